"""Checkpoints on 4 XLA devices against the values in host memory and against runs without interruption."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch_xla", reason="needs torch_xla")

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from transformers import LlamaForCausalLM

import fullshard.distributed.runtime as xr
import fullshard.spmd as xs
from fullshard import CheckpointManager, FSDPv2
from fullshard.checkpoint import CheckpointReader, load_state, publish, save_state
from fullshard.checkpoint.consolidate import merge_weights, stored_tensors
from fullshard.checkpoint.inspect import inspect_checkpoint, lines
from fullshard.checkpoint.manifest import read_manifest
from fullshard.config.errors import CheckpointError
from fullshard.xla import shards
from tests.xla.resume_program import config, train
from tests.xla.torch_engine import torch_python

ROOT = Path(__file__).parents[2]


def grid(*shape: int, names: tuple[str, ...] = ("replica", "fsdp")) -> xs.Mesh:
    return xs.Mesh(np.arange(4), shape, names[-len(shape) :])


def whole(value: torch.Tensor) -> torch.Tensor:
    return value.detach().cpu()


def on_devices(value: torch.Tensor, mesh: xs.Mesh | None, spec: tuple[Any, ...] = ()) -> Any:
    moved = value.to(xr.device())
    return moved if mesh is None else xs.mark_sharding(moved, mesh, spec)


def module_with(value: torch.Tensor, mesh: xs.Mesh | None, spec: tuple[Any, ...] = ()) -> Any:
    """A module with one parameter on the devices."""
    module = nn.Module()
    module.weight = nn.Parameter(value.to(xr.device()))
    if mesh is not None:
        xs.mark_sharding(module.weight, mesh, spec)
    return module


def layouts() -> dict[str, tuple[Any, ...]]:
    """Meshes and specs for a tensor with two dims."""
    return {
        "unsharded": (None, ()),
        "replicated": (grid(4), (None, None)),
        "rows": (grid(4), ("fsdp", None)),
        "columns": (grid(4), (None, "fsdp")),
        "both": (grid(2, 2), ("replica", "fsdp")),
        "transposed": (grid(2, 2), ("fsdp", "replica")),
        "partial": (grid(2, 2), ("fsdp", None)),
        "other order": (grid(2, 2), (("fsdp", "replica"), None)),
    }


NAMES = ("unsharded", "replicated", "rows", "columns", "both", "transposed", "partial", "other order")


# --- what is written --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(127, 63), (8, 8), (1, 3)])
def test_every_value_is_written_once(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    value = torch.randn(shape)
    save_state(tmp_path / "c", values={"t": on_devices(value, *layouts()[name])})
    manifest = read_manifest(tmp_path / "c")
    pieces = manifest.tensors["values/t"].pieces
    covered = torch.zeros(shape, dtype=torch.int)
    for piece in pieces:
        covered[tuple(slice(o, o + n) for o, n in zip(piece.offsets, piece.sizes, strict=True))] += 1
    assert covered.eq(1).all()
    mesh, spec = layouts()[name]
    cuts = [xs.Layout.of(mesh, spec).slices(shape, device) for device in range(4)] if mesh is not None else []
    parts = {tuple((c.start, c.stop) for c in part) for part in cuts if all(c.start < c.stop for c in part)}
    assert len(pieces) == (len(parts) or 1)  # whole shards, none of them twice
    files = sum(file.bytes for file in manifest.files)
    rng = sum(t.bytes for key, t in manifest.tensors.items() if key.startswith("rng/"))
    assert files < value.numel() * 4 + rng + 8192


@pytest.mark.parametrize("before", NAMES)
def test_any_layout_is_read_into_any_other(tmp_path: Path, before: str) -> None:
    torch.manual_seed(0)
    value = torch.randn(127, 63)
    made = module_with(value, *layouts()[before])
    save_state(tmp_path / "c", model=made)
    for after, (mesh, spec) in layouts().items():
        other = module_with(torch.zeros(127, 63), mesh, spec)
        layout = xs.sharding_of(other.weight)
        load_state(tmp_path / "c", model=other)
        assert torch.equal(whole(other.weight), value), after
        assert xs.sharding_of(other.weight) == layout, after
    host = nn.Module()
    host.weight = nn.Parameter(torch.zeros(127, 63))
    load_state(tmp_path / "c", model=host)
    assert torch.equal(host.weight.detach(), value)


def test_several_processes_share_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes with two devices each, played one after the other: together they write everything once."""
    from fullshard.checkpoint.shard_index import part_to_write, shards_of

    compiler = shards._compiler
    real = compiler._get_local_shards
    for name, (mesh, spec) in layouts().items():
        if mesh is None:
            continue
        tensor = on_devices(torch.randn(64, 48), mesh, spec)
        covered = torch.zeros(64, 48, dtype=torch.int)
        for process in range(2):
            mine = slice(2 * process, 2 * process + 2)
            monkeypatch.setattr(
                shards, "_compiler", type("C", (), {"_get_local_shards": lambda ts, m=mine: [real(ts)[0][m]]})
            )
            monkeypatch.setattr(xr, "world_size", lambda: 2)
            monkeypatch.setattr(xr, "rank", lambda p=process: p)
            for part in filter(None, map(part_to_write, shards_of("t", tensor))):
                cuts = tuple(slice(o, o + n) for o, n in zip(part.offsets, part.local.shape, strict=True))
                covered[cuts] += 1
                assert torch.equal(part.local, whole(tensor)[cuts])
            monkeypatch.undo()
        assert covered.eq(1).all(), name


# --- training ---------------------------------------------------------------------------------------------------------


def llama(mesh: xs.Mesh, seed: int = 0, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    axis = {"extra_data_axis": "replica"} if mesh.ndim == 2 else {}
    model = FSDPv2(LlamaForCausalLM(config()), mesh, **axis, **options)
    return model, torch.optim.Adam(model.parameters(), 1e-2)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """A checkpoint after 2 steps on 2×2 devices (HSDP), and the losses of the next 2."""
    place = tmp_path_factory.mktemp("reference")
    mesh = grid(2, 2)
    model, optimizer = llama(mesh)
    train(model, optimizer, mesh, range(2))
    save_state(place / "c", model=model, optimizer=optimizer)
    return place / "c", train(model, optimizer, mesh, range(2, 4))


@pytest.mark.parametrize("shape", [(2, 2), (4,), (1, 4)])
def test_resumed_losses(reference: tuple[Path, list[float]], shape: tuple[int, ...]) -> None:
    place, losses = reference
    mesh = grid(*shape)
    model, optimizer = llama(mesh, seed=1)
    load_state(place, model=model, optimizer=optimizer)
    for parameter, state in optimizer.state.items():
        assert xs.sharding_of(state["exp_avg"]) == xs.sharding_of(parameter)
        assert float(state["step"]) == 2
    found = train(model, optimizer, mesh, range(2, 4))
    torch.testing.assert_close(found, losses, rtol=0, atol=0 if shape == (2, 2) else 1e-5)
    model, optimizer = llama(mesh, seed=1)
    load_state(place, model=model)
    without = train(model, optimizer, mesh, range(2, 4))
    assert abs(without[1] - losses[1]) > 1e-3  # the optimizer's state matters


def test_tied_tensors_are_written_once_and_stay_tied(reference: tuple[Path, list[float]]) -> None:
    place, _ = reference
    manifest = read_manifest(place)
    assert manifest.states["model"]["tied"] == {"lm_head.weight": "model.embed_tokens.weight"}
    assert "model/lm_head.weight" not in manifest.tensors
    model, _ = llama(grid(4), seed=1)
    load_state(place, model=model)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_parameters_on_the_meta_device_get_memory_and_values(reference: tuple[Path, list[float]]) -> None:
    place, _ = reference
    with torch.device("meta"):
        empty: Any = LlamaForCausalLM(config())
    model = FSDPv2(empty, grid(4))
    before = {id(p) for p in model.parameters()}
    load_state(place, model=model)
    assert {id(p) for p in model.parameters()} == before  # an optimizer may hold them
    other, _ = llama(grid(4), seed=1)
    load_state(place, model=other)
    for name, p in other.named_parameters():
        found = model.get_parameter(name)
        assert torch.equal(whole(found), whole(p)) and xs.sharding_of(found) == xs.sharding_of(p), name


def test_inspect_and_merge_weights(reference: tuple[Path, list[float]], tmp_path: Path) -> None:
    place, _ = reference
    facts = inspect_checkpoint(place, verify=True)
    assert facts["health"].startswith("whole")
    assert facts["states"]["model"]["mesh"] == {"replica": 2, "fsdp": 2}
    assert any("torch_xla" in text for _, text in lines(facts))
    merge_weights(place, tmp_path / "merged")
    model, _ = llama(grid(4), seed=1)
    load_state(place, model=model)
    merged = LlamaForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    for name, value in model.full_state_dict().items():
        assert torch.equal(merged[name], value), name


def test_torch_distributed_checkpoint_reads_it(reference: tuple[Path, list[float]]) -> None:
    place, _ = reference
    state = {"model/model.embed_tokens.weight": torch.empty(61, 20)}
    dcp.load(state, storage_reader=CheckpointReader(place))
    model, _ = llama(grid(4), seed=1)
    load_state(place, model=model)
    assert torch.equal(state["model/model.embed_tokens.weight"], whole(model.model.embed_tokens.weight))


def test_scalars_with_adam_and_modules_that_are_not_wrapped(tmp_path: Path) -> None:
    def made(seed: int, mesh: xs.Mesh | None) -> tuple[Any, Any]:
        torch.manual_seed(seed)
        module: Any = nn.Linear(5, 8)
        module.scale = nn.Parameter(torch.randn(()))
        module.forward = lambda x: nn.functional.linear(x, module.weight, module.bias) * module.scale
        module = module.to(xr.device()) if mesh is None else FSDPv2(module, mesh)
        return module, torch.optim.AdamW(module.parameters(), 1e-2)

    def steps(module: Any, optimizer: Any) -> list[float]:
        out = []
        for _ in range(2):
            loss = module(torch.ones(4, 5).to(xr.device())).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            xr.sync()
            out.append(float(whole(loss)))
        return out

    for before in (grid(4), None):
        first = made(0, before)
        steps(*first)
        place = tmp_path / str(before)
        save_state(place, model=first[0], optimizer=first[1])
        expected = steps(*first)
        for after in (grid(4), None):
            again = made(1, after)
            load_state(place, model=again[0], optimizer=again[1])
            for p, state in again[1].state.items():
                assert xs.sharding_of(state["exp_avg"]) == xs.sharding_of(p)
            torch.testing.assert_close(steps(*again), expected, rtol=0, atol=0 if before == after else 1e-6)


# --- values and generators --------------------------------------------------------------------------------------------


def test_plain_values_and_tensors_of_the_devices(tmp_path: Path) -> None:
    mesh = grid(2, 2)
    values = {
        "json": {"a": [1, 2.5, None, True], "t": (1, "x"), 3: {4}},
        "array": np.arange(3),
        "host": torch.arange(4),
        "device": on_devices(torch.arange(5.0), None),
        "computed": on_devices(torch.arange(5.0), None) * 2,
        "sharded": on_devices(torch.randn(6, 5), mesh, ("fsdp", None)),
        "bf16": on_devices(torch.randn(6, 5).bfloat16(), mesh, ("fsdp", None)),
        "integers": on_devices(torch.arange(9), mesh, ("fsdp",)),
        "mask": on_devices(torch.arange(9) > 3, mesh, ("replica",)),
    }
    save_state(tmp_path / "c", values=values)
    found = load_state(tmp_path / "c", values=None)["values"]
    assert found["json"] == values["json"]
    assert np.array_equal(found["array"], values["array"])
    for name in ("host", "device", "computed", "sharded", "bf16", "integers", "mask"):
        assert torch.equal(whole(found[name]), whole(values[name])), name
        assert found[name].device == values[name].device, name


def test_generators_of_host_and_devices_continue(tmp_path: Path) -> None:
    def draw() -> tuple[float, torch.Tensor, torch.Tensor]:
        value = torch.nn.functional.dropout(torch.ones(64, device=xr.device()))
        xr.sync()
        return np.random.rand(), torch.rand(3), whole(value)

    xr.seed(5)
    draw()
    uninterrupted = xr.generator_state()
    save_state(tmp_path / "c", epoch=1)
    assert xr.generator_state() == uninterrupted  # saving changes nothing
    expected = draw()
    xr.seed(6)
    draw()
    load_state(tmp_path / "c", epoch=None)
    found = draw()
    assert found[0] == expected[0]
    assert torch.equal(found[1], expected[1])
    assert torch.equal(found[2], expected[2])


# --- the manager ------------------------------------------------------------------------------------------------------


def counter(mesh: xs.Mesh, value: float = 0.0) -> Any:
    return module_with(torch.full((9, 5), value), mesh, ("fsdp", None))


def test_interval_and_max_to_keep(tmp_path: Path) -> None:
    model = counter(grid(4))
    with CheckpointManager(tmp_path, save_interval=2, max_to_keep=2) as manager:
        saved = [step for step in range(1, 9) if manager.save(step, {"model": model})]
        assert saved == [2, 4, 6, 8]
        assert manager.all_steps() == [6, 8]


def test_asynchronous_saves_copy_first_and_leave_the_devices_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = grid(2, 2)
    model, go = counter(mesh, 1.0), threading.Event()
    foreign: list[str] = []
    for name in ("_get_local_shards", "_xla_sync_multi", "_load_local_shards"):
        real = getattr(shards._compiler, name)

        def watched(*args: Any, real: Callable[..., Any] = real, name: str = name, **kwargs: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                foreign.append(name)
            return real(*args, **kwargs)

        monkeypatch.setattr(shards._compiler, name, watched)
    monkeypatch.setattr(publish, "stage", lambda name: go.wait(30) if name == "directory" else None)
    with CheckpointManager(tmp_path, save_interval=1) as manager:
        assert manager.save_async(1, {"model": model})
        assert manager.all_steps() == []
        with torch.no_grad():
            model.weight.add_(1)  # after the copy, before anything is written
        xr.sync(wait=True)
        go.set()
        manager.join()
        other = counter(mesh)
        assert manager.restore(None, {"model": other}) == 1
        assert whole(other.weight).eq(1).all()
    assert not foreign


def test_join_raises_what_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        if name == "inside a file":
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(publish, "stage", fail)
    with CheckpointManager(tmp_path, save_interval=1) as manager:
        manager.save_async(1, {"model": counter(grid(4))})
        with pytest.raises(CheckpointError, match="No space left on device"):
            manager.join()
        assert manager.all_steps() == []
        assert not list(tmp_path.glob(".step-*"))


def test_sigterm_is_a_preemption(tmp_path: Path) -> None:
    model = counter(grid(4), 3.0)
    with CheckpointManager(tmp_path, save_interval=100) as manager:
        assert not manager.reached_preemption(1)
        os.kill(os.getpid(), signal.SIGTERM)
        deadline = time.monotonic() + 30
        while not manager.reached_preemption(2) and time.monotonic() < deadline:
            time.sleep(0.01)
        with pytest.raises(SystemExit) as stopped:
            manager.exit_if_preempted(2, {"model": model})
        assert stopped.value.code == 75
    other = counter(grid(4))
    load_state(tmp_path / "step-2", model=other)
    assert whole(other.weight).eq(3).all()


def test_damaged_files_are_found_and_the_newest_intact_one_is_named(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, save_interval=1) as manager:
        for step in (1, 2):
            manager.save(step, {"model": counter(grid(4), float(step))})
        file = next((tmp_path / "step-2").glob("*.safetensors"))
        data = bytearray(file.read_bytes())
        data[-3] ^= 1
        file.write_bytes(data)
        other = counter(grid(4))
        with pytest.raises(CheckpointError, match=r"damaged(.|\n)*step 1 is intact"):
            manager.restore(None, {"model": other})
        assert whole(other.weight).eq(0).all()
        assert manager.restore(None, {"model": other}, fallback=True) == 1
        assert whole(other.weight).eq(1).all()


def test_a_state_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    save_state(tmp_path / "c", model=counter(grid(4), 2.0))
    other = module_with(torch.zeros(9, 6), grid(4), ("fsdp", None))
    with pytest.raises(CheckpointError, match=r"shape \(9, 5\) in the checkpoint and \(9, 6\) here"):
        load_state(tmp_path / "c", model=other)
    assert whole(other.weight).eq(0).all()


KILLED = """
import os
import torch
from fullshard.checkpoint import CheckpointManager, publish
import fullshard.distributed.runtime as xr, fullshard.spmd as xs

xr.use_spmd()
model = torch.nn.Module()
model.weight = torch.nn.Parameter(torch.ones(8, 8).to(xr.device()))
xs.mark_sharding(model.weight, xs.get_1d_mesh("fsdp"), ("fsdp", None))
manager = CheckpointManager({path!r}, save_interval=1)
manager.save(1, {{"model": model}})
publish.stage = lambda name: os._exit(9) if name == "manifest" else None
manager.save_async(2, {{"model": model}})
manager.join()
"""


def test_a_kill_leaves_nothing_half_published(tmp_path: Path) -> None:
    program = KILLED.format(path=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 9
    assert len(list(tmp_path.glob(".step-2.*"))) == 1
    with CheckpointManager(tmp_path, save_interval=1) as manager:
        assert manager.all_steps() == [1]
        model = module_with(torch.zeros(8, 8), grid(4), ("fsdp", None))
        assert manager.restore(None, {"model": model}) == 1
        assert whole(model.weight).eq(1).all()
        manager.save(3, {"model": model})
    assert not list(tmp_path.glob(".step-2.*"))


# --- the other engine -------------------------------------------------------------------------------------------------


def torch_engine(*command: str) -> str:
    """The output of `python -m …` where the torch engine is installed."""
    python = torch_python()
    env = {key: value for key, value in os.environ.items() if not key.startswith(("PJRT_", "CPU_NUM", "XLA_"))}
    env |= {"PYTHONPATH": str(ROOT), "FULLSHARD_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([python, "-m", *command], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def other_engine(**options: Any) -> list[float]:
    """The losses of the program on 2 ranks of the torch engine."""
    launch = ("torch.distributed.run", "--nproc_per_node", "2", "-m", "tests.xla.resume_program")
    output = torch_engine(*launch, json.dumps(options))
    return json.loads(next(line for line in output.splitlines() if line.startswith("LOSSES ")).removeprefix("LOSSES "))


def test_commands_of_the_torch_engine(reference: tuple[Path, list[float]], tmp_path: Path) -> None:
    place, _ = reference
    facts = json.loads(torch_engine("fullshard", "inspect", str(place), "--verify", "--json"))
    assert facts["health"].startswith("whole") and "torch_xla" in facts["versions"]
    torch_engine("fullshard", "merge-weights", str(place), str(tmp_path / "there"))
    merge_weights(place, tmp_path / "here")
    here, there = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("here", "there"))
    assert here == there


@pytest.mark.parametrize("lora", [False, True])
def test_to_the_torch_engine_and_back(tmp_path: Path, lora: bool) -> None:
    from tests.xla.resume_program import with_lora

    def made(seed: int) -> tuple[Any, Any]:
        torch.manual_seed(seed)
        model: Any = LlamaForCausalLM(config())
        model = FSDPv2(with_lora(model) if lora else model, grid(4))
        return model, torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 1e-2)

    mesh = grid(4)
    model, optimizer = made(0)
    train(model, optimizer, mesh, range(2))
    save_state(tmp_path / "xla", model=model, optimizer=optimizer, start=2)
    losses = train(model, optimizer, mesh, range(2, 6))
    there = other_engine(load=str(tmp_path / "xla"), save=str(tmp_path / "torch"), steps=2, lora=lora)
    torch.testing.assert_close(there, losses[:2], rtol=0, atol=1e-5)
    model, optimizer = made(1)
    state = load_state(tmp_path / "torch", model=model, optimizer=optimizer, start=None)
    assert state["start"] == 4
    back = train(model, optimizer, mesh, range(4, 6))
    torch.testing.assert_close(back, losses[2:], rtol=0, atol=1e-5)
    assert inspect_checkpoint(tmp_path / "torch", verify=True)["world_size"] == 2
    tensors = dict(stored_tensors(read_manifest(tmp_path / "torch"), tmp_path / "torch", "model"))
    assert all(tensors[name].read().shape == p.shape for name, p in model.named_parameters())
