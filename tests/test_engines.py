"""Which engine an installation offers, and what is said where it offers none."""

import ast
from pathlib import Path

import pytest

import fullshard
import fullshard.fsdp
import fullshard.spmd
from fullshard.config.errors import RuntimeSetupError
from fullshard.distributed import engines
from fullshard.distributed.engines import choose
from fullshard.fsdp import torch_engine
from fullshard.xla import engine as xla_engine


@pytest.mark.parametrize(
    ("torch", "torch_xla", "asked", "engine"),
    [
        ("2.13.0", None, "", "torch"),
        ("2.11.0+cu130", None, "torch", "torch"),
        ("2.12.0a0+git1234", None, "", "torch"),
        ("2.9.0+cu128", "2.9.0", "", "xla"),
        ("2.9.1", "2.9.0", "xla", "xla"),
        ("2.11.0", "2.11.0", "", "torch"),
        ("2.11.0", "2.11.0", "xla", "xla"),
    ],
)
def test_the_version_of_torch_decides(torch, torch_xla, asked, engine):
    assert choose({engines.ENGINE_VARIABLE: asked} if asked else {}, torch, torch_xla) == engine


@pytest.mark.parametrize(
    ("torch", "torch_xla", "asked", "text"),
    [
        ("2.9.0", None, "", "No engine can run in this installation: torch 2.9.0, torch_xla is not installed"),
        ("2.10.0", "2.9.0", "", "the xla engine needs torch 2.9 or newer and the torch_xla of the same version"),
        (None, None, "", "torch is not installed.*The torch engine needs torch 2.11 or newer"),
        ("2.8.0", "2.8.0", "", "No engine"),
        ("2.13.0", None, "xla", "FULLSHARD_ENGINE=xla: this engine cannot run here: torch 2.13.0, torch_xla is not"),
        ("2.9.0", "2.9.0", "torch", "FULLSHARD_ENGINE=torch: this engine cannot run here"),
        ("2.13.0", None, "jax", "FULLSHARD_ENGINE=jax: expected torch or xla"),
    ],
)
def test_an_engine_that_cannot_be_offered_is_an_error_that_names_both(torch, torch_xla, asked, text):
    with pytest.raises(RuntimeSetupError, match=text):
        choose({engines.ENGINE_VARIABLE: asked}, torch, torch_xla)


def test_names_are_those_of_the_engine():
    assert engines.current().name == "torch" and engines.can_be_used()
    engines.require("plans", "anything")
    assert fullshard.spmd.mark_sharding.__module__ == "fullshard.spmd.sharding"
    assert fullshard.FSDPv2 is fullshard.fsdp.FSDPv2 and fullshard.FSDPv2.__module__ == "fullshard.fsdp.module"
    with pytest.raises(AttributeError, match=r"'fullshard.fsdp' has no attribute 'nothing'"):
        _ = fullshard.fsdp.nothing


def members(cls: type) -> set[str]:
    return {name for name in (*vars(cls), *getattr(cls, "__annotations__", ())) if not name.startswith("_")}


@pytest.mark.parametrize("engine", [torch_engine.TorchEngine, xla_engine.XLAEngine])
def test_an_engine_has_what_the_protocol_has_and_nothing_else(engine):
    assert members(engine) == members(engines.Engine)


def test_only_the_engines_and_what_prints_its_name_know_which_engine_it_is():
    """Rooms ask for what an engine does or lacks. `current().name` may stand in texts only."""
    root = Path(fullshard.__file__).parent
    for file in sorted(root.rglob("*.py")):
        if file.is_relative_to(root / "xla"):
            continue
        tree = ast.parse(file.read_text())
        text = {id(inner) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for inner in ast.walk(node)}
        returned = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Return)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr == "name" and "engines.current()" in ast.unparse(node):
                assert id(node) in text | returned, f"{file}:{node.lineno} asks which engine this is"
            if isinstance(node, ast.Import | ast.ImportFrom):
                targets = [f"{getattr(node, 'module', '')}.{alias.name}".strip(".") for alias in node.names]
                assert not any(f"{target}.".startswith("fullshard.xla.") for target in targets), f"{file}:{node.lineno}"
            for call in [node] if isinstance(node, ast.Call) else []:
                called = ast.unparse(call.func)
                assert not (called.endswith("update") and "globals()" in called), f"{file}:{call.lineno}"


@pytest.fixture
def too_old(monkeypatch):
    """An installation with torch 2.9 and without torch_xla."""
    versions = {"torch": "2.9.0", "torch_xla": None}
    monkeypatch.setattr(engines, "_version", versions.get)
    engines.current.cache_clear()
    yield versions
    engines.current.cache_clear()


def test_the_torch_engine_refuses_an_old_torch_when_it_is_first_used(too_old):
    assert not engines.can_be_used()
    with pytest.raises(RuntimeSetupError, match=r"No engine can run in this installation: torch 2.9.0"):
        engines.require("plans", "fullshard plan")
    too_old["torch_xla"] = "2.9.0"
    with pytest.raises(
        RuntimeSetupError, match=r"fullshard plan is not available on the XLA engine.*install torch 2.1"
    ):
        engines.require("plans", "fullshard plan")
