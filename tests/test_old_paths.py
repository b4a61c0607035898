"""Import paths of version 0.1: they give the moved modules, with a warning that names the new path."""

import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from fullshard.old_paths import MOVED, PACKAGES

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTED = {
    "adapters.bnb": "check_map",
    "adapters.linear": "NF4Linear",
    "adapters.lora": "target_modules",
    "adapters.nf4": "quantize_4bit",
    "adapters.quantize": "Quantization",
    "data.find": "source_of",
    "train.engine": "EngineSettings",
    "weights.preemption": "EXIT_PREEMPTED",
    "weights.storage": "CheckpointReader",
}


def forget(name: str) -> None:
    sys.modules.pop(name, None)


@pytest.mark.parametrize("old", MOVED)
def test_an_old_path_gives_the_moved_module(old):
    new = f"fullshard.{MOVED[old]}"
    assert not (ROOT / f"fullshard/{old.replace('.', '/')}.py").exists(), "a module of that name exists again"
    if old == "adapters.kernels" and importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    forget(f"fullshard.{old}")
    with pytest.warns(FutureWarning, match=f"fullshard.{old} has moved to {new}"):
        module = importlib.import_module(f"fullshard.{old}")
    assert module is importlib.import_module(new)
    assert module.__spec__ is not None and module.__spec__.name == new


@pytest.mark.parametrize(("module", "name"), DOCUMENTED.items())
def test_documented_names_are_where_they_were(module, name):
    forget(f"fullshard.{module}")
    with pytest.warns(FutureWarning):
        assert hasattr(importlib.import_module(f"fullshard.{module}"), name)


def test_the_warning_points_at_the_script(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import fullshard\nfrom fullshard.train import engine\nprint(engine.EngineSettings.__name__)\n")
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env={"PYTHONPATH": str(ROOT), "PATH": ""}
    )
    assert done.stdout == "EngineSettings\n", done.stderr
    assert f"{script}:2: FutureWarning: fullshard.train.engine has moved" in done.stderr


def test_names_that_never_were_are_not_found():
    for name in ("fullshard.adapters.never", "fullshard.train.never", "fullshard.never"):
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(name)
    assert PACKAGES
