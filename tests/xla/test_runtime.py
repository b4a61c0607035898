"""Processes, devices and the names of PyTorch/XLA on its own engine; loaders."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

import fullshard
import fullshard.runtime as xr
import fullshard.spmd as xs
import fullshard.xm as xm
from fullshard.config.errors import (
    BatchError,
    BatchKeyError,
    NameMissingError,
    RuntimeSetupError,
    SpecError,
    UnsupportedError,
)
from fullshard.distributed import engines, guide_names

MODULES = {"xm": xm, "xr": xr, "xs": xs}


def mesh():
    return xs.Mesh(np.arange(4), (2, 2), ("data", "model"))


def test_processes_and_devices_are_counted_separately():
    assert engines.current().name == "XLA" and xr.is_spmd()
    assert (xr.world_size(), xr.process_count(), xr.rank(), xr.process_index(), xr.node_count()) == (1, 1, 0, 0, 1)
    assert (xr.global_runtime_device_count(), xr.addressable_device_count(), xr.local_device_count()) == (4, 4, 4)
    assert xr.device() == xm.xla_device() == torch.device("xla:0") and xr.device_type() == "CPU"
    assert xr.is_main() and "4 CPU devices" in str(xr.transport())
    xr.barrier()
    with pytest.raises(UnsupportedError, match="auto=True"):
        xr.use_spmd(auto=True)
    with pytest.raises(
        RuntimeSetupError, match=r"fullshard plan is not available on the XLA engine.*torch 2.11 or newer"
    ):
        engines.require("plans", "fullshard plan")


FIRST_USES = """
import torch, fullshard, fullshard.spmd as xs
from fullshard.config.errors import RuntimeSetupError
from fullshard.spmd.mesh import VirtualMesh

mesh = VirtualMesh((1,), ("fsdp",))
for use in (
    lambda: xs.get_1d_mesh("fsdp"),
    fullshard.use_spmd,
    lambda: xs.mark_sharding(torch.ones(2), mesh, ("fsdp",)),
    lambda: xs.distribute_module(torch.nn.Linear(2, 2), mesh),
    lambda: fullshard.FSDPv2(torch.nn.Linear(2, 2), mesh),
    lambda: fullshard.prepare(torch.nn.Linear(2, 2)),
    lambda: fullshard.save_state("nowhere", {}),
):
    try:
        use()
    except RuntimeSetupError as error:
        print(error)
"""


def run(program: str, **env: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=300)


def test_the_torch_engine_refuses_when_it_is_first_used():
    done = run(FIRST_USES, FULLSHARD_ENGINE="torch")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("FULLSHARD_ENGINE=torch: this engine cannot run here: torch 2.9") == 7, done.stdout


def test_more_processes_than_the_runtime_sees_are_refused():
    launched = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    launched |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    done = run("import fullshard; fullshard.use_spmd()", **launched)
    assert done.returncode and "2 processes were started, but the XLA runtime sees 1" in done.stderr


def test_every_module_can_be_imported():
    import importlib
    import pkgutil

    for module in pkgutil.walk_packages(fullshard.__path__, "fullshard."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)


def test_seeds_reach_the_devices():
    drawn = []
    for _ in range(2):
        xr.seed(5)
        drawn.append((torch.rand(3, device=xr.device()).cpu(), torch.rand(3)))
    assert torch.equal(drawn[0][0], drawn[1][0]) and torch.equal(drawn[0][1], drawn[1][1])
    xr.seed(6)
    assert not torch.equal(torch.rand(3, device=xr.device()).cpu(), drawn[0][0])
    xm.set_rng_state(9)
    assert xm.get_rng_state() == 9


def test_names_of_xm():
    seen = []
    t = torch.ones(3, device=xm.xla_device())
    xm.add_step_closure(lambda value: seen.append(value.item()), (t.sum(),))
    assert seen == []
    xm.mark_step(wait=True)
    assert seen == [3.0]
    xm.unlazy([t + 1])
    xm.wait_device_ops()
    xm.optimization_barrier_([t])
    assert torch.equal(xm.mesh_reduce("a", t, torch.stack), torch.ones(1, 3)) and xm.rendezvous("b", b"1") == [b"1"]
    assert xm.xla_device_hw(xm.xla_device()) == "CPU" and xm.is_master_ordinal() and xm.xrt_world_size() == 1
    layer = nn.Linear(2, 2).to(xm.xla_device())
    xm.broadcast_master_param(layer)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    before = layer.bias.detach().cpu()
    layer(torch.ones(1, 2, device=xm.xla_device())).sum().backward()
    xm.optimizer_step(optimizer, barrier=True)
    assert torch.equal(layer.bias.detach().cpu(), before - 1)
    with pytest.raises(UnsupportedError, match=r"xla_device\(1\): a process uses one device here, xla:0"):
        xm.xla_device(1)
    with pytest.raises(UnsupportedError, match="CPU devices do not report it"):
        xm.get_memory_info()


def test_a_sharded_model_is_saved_whole(tmp_path):
    model = nn.Linear(4, 4)
    whole = model.weight.detach().clone()
    xs.mark_sharding(model.weight, mesh(), ("model", None))
    xs.distribute_module(model, mesh())
    xm.save({"model": model.state_dict(), "step": 3}, tmp_path / "model.pt")
    saved = torch.load(tmp_path / "model.pt")
    assert saved["step"] == 3 and torch.equal(saved["model"]["weight"], whole) and saved["model"]["weight"].is_cpu


@pytest.mark.parametrize("known_as", guide_names.REFUSED)
def test_names_are_torch_xlas_own_or_refused(known_as):
    own = {
        "xm": {"fork_rng", "get_stablehlo", "get_stablehlo_bytecode", "is_xla_tensor", "xla_device_kind",
               "xla_real_devices"},
        "xr": {"set_device_type", "runtime_device_attributes", "global_runtime_device_attributes",
               "get_num_cached_compilation_graph", "is_bf16_supported"},
        "xs": {"XLAPatchedLinear", "xla_patched_nn_linear_forward"},
    }[known_as]  # fmt: skip
    for name in guide_names.REFUSED[known_as]:
        if name in own:
            assert getattr(MODULES[known_as], name).__module__.startswith("torch_xla")
        else:
            with pytest.raises(NameMissingError, match=rf"{known_as}\.{name} is not in fullshard"):
                getattr(MODULES[known_as], name)
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        _ = MODULES[known_as].no_such_name


@pytest.mark.parametrize("known_as", guide_names.MODULES)
def test_modules_without_a_counterpart_are_torch_xlas_own(known_as):
    """The same objects, for every name that the installed torch_xla has."""
    home, names = guide_names.MODULES[known_as]
    own, ours = importlib.import_module(home), importlib.import_module(f"fullshard.{known_as}")
    for name in names:
        if hasattr(own, name):
            assert getattr(ours, name) is getattr(own, name)


def test_every_public_name_is_there():
    for name in (*xs.__all__, "FSDPv2"):
        assert getattr(fullshard if name == "FSDPv2" else xs, name) is not None
    assert xs.mark_sharding.__module__ == "fullshard.xla.sharding" and fullshard.use_spmd is xr.use_spmd
    assert xs.Mesh.__module__ == "fullshard.spmd.mesh"


# --- loaders ----------------------------------------------------------------------------------------------------------


def test_batches_are_sharded():
    batch = {"x": torch.randn(8, 4), "y": torch.arange(8), "name": "a", "n": torch.tensor(3)}
    spec = xs.ShardingSpec(mesh(), (("data", "model"), None))
    (placed,) = xs.ShardedLoader([dict(batch)], input_sharding=spec)
    assert placed["x"].sharding_spec == (("data", "model"), None) and placed["name"] == "a"
    assert placed["y"].device.type == placed["n"].device.type == "xla" and torch.equal(placed["y"].cpu(), batch["y"])
    assert [shard.data.shape for shard in placed["x"].local_shards] == [(2, 4)] * 4

    specs = {"x": xs.ShardingSpec(mesh(), ("data", None), minibatch=True), "y": None}
    loader = xs.ShardedLoader([{key: torch.ones(8, 4) for key in "xy"}] * 2, xm.xla_device(), input_sharding=specs)
    assert len(loader) == 2 and [b["x"].sharding_spec for b in loader] == [("data", None)] * 2


def test_torch_xlas_own_loader_takes_the_specs():
    from torch_xla.distributed.parallel_loader import MpDeviceLoader

    rows = torch.arange(32.0).reshape(8, 4)
    for minibatch in (False, True):
        spec = xs.ShardingSpec(mesh(), (("data", "model"), None), minibatch)
        batches = list(MpDeviceLoader([rows, torch.ones(3)], xm.xla_device(), input_sharding=spec))
        assert xs.sharding_of(batches[0]).spec == (("data", "model"), None) and torch.equal(batches[0].cpu(), rows)
        assert torch.equal(batches[1].cpu(), torch.ones(3))


def test_errors_of_loaders():
    spec = xs.ShardingSpec(mesh(), (("data", "model"), None), minibatch=True)
    assert spec.can_apply(torch.ones(3, 3)) and not spec.can_apply(torch.ones(3))
    with pytest.raises(BatchError, match="this process loaded 6 rows, 6 in total, to be split 4 ways"):
        next(iter(xs.ShardedLoader([torch.ones(6, 2)], input_sharding=spec)))
    with pytest.raises(BatchError, match="dict with keys"):
        next(iter(xs.ShardedLoader([torch.ones(6, 2)], input_sharding={"x": spec})))
    with pytest.raises(BatchKeyError, match="the batch lacks"):
        next(iter(xs.ShardedLoader([{"y": torch.ones(6, 2)}], input_sharding={"x": spec, "y": spec})))
    with pytest.raises(SpecError, match="minibatch=True needs"):
        xs.ShardingSpec(mesh(), (), minibatch=True)


def test_rows_of_this_process_become_a_global_batch():
    """The path of several processes, with one."""
    from fullshard.xla.tensor import from_parts, local_shards

    rows = torch.arange(16.0).reshape(8, 2)
    joined = from_parts(rows, xs.Layout.of(mesh(), (("data", "model"), None), (8, 2)))
    assert torch.equal(joined.cpu(), rows) and torch.equal(local_shards(joined)[2].data, rows[4:6])
