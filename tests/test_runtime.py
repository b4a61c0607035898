"""Starting, asking and stopping: in this process, in the pool, and in processes of their own."""

from __future__ import annotations

import json
import logging
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import fullshard.distributed.runtime as xr
from fullshard import xm
from fullshard.config.errors import RuntimeSetupError, UnsupportedError
from fullshard.distributed.job_store import JobStore
from fullshard.distributed.rank_env import Launch
from fullshard.distributed.rendezvous import differences, introduce, meet
from tests.pool import ROOT, ranks

CPU = torch.device("cpu")
PROGRAMS = ROOT / "tests" / "programs"


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """This process without a launcher, and left without a process group."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FULLSHARD_DEVICE", "cpu")
    yield monkeypatch
    xr.shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()


# --- one process


def test_one_process_is_a_world_of_one(alone: pytest.MonkeyPatch) -> None:
    xr.shutdown()  # another test of this process may have been one
    environment = dict(os.environ)
    torch.manual_seed(11)
    expected = torch.rand(1, generator=torch.Generator().manual_seed(11))
    assert (xr.is_spmd(), xr.world_size(), xr.device()) == (False, 1, torch.device("cpu"))
    xr.use_spmd()
    xr.use_spmd()
    assert xr.is_spmd() and dist.is_initialized()
    assert dict(os.environ) == environment
    assert torch.equal(torch.rand(1), expected), "a world of one keeps the user's seed"
    assert (xr.rank(), xr.local_rank(), xr.world_size(), xr.local_world_size(), xr.node_count()) == (0, 0, 1, 1, 1)
    xr.barrier()
    xr.shutdown()
    xr.shutdown()
    assert not xr.is_spmd() and not dist.is_initialized()


def test_the_group_is_destroyed_where_no_thread_can_be_started(alone: pytest.MonkeyPatch) -> None:
    """As when a program ends: from version 3.12 on, Python refuses new threads then."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    xr.use_spmd()
    alone.setattr(threading.Thread, "start", refuse)
    xr.shutdown()
    assert not dist.is_initialized()


def test_existing_group_is_taken_and_left(alone: pytest.MonkeyPatch) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    xr.use_spmd()
    assert xr.is_spmd() and dist.group.WORLD is group
    xr.shutdown()
    assert not xr.is_spmd()
    assert dist.is_initialized(), "whoever made the group ends it"


def test_automatic_layouts_are_refused(alone: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedError, match=r"use_spmd\(auto=True\).*mark_sharding"):
        xr.use_spmd(auto=True)


def test_wrong_variables_stop_the_start(alone: pytest.MonkeyPatch) -> None:
    alone.setenv("RANK", "3")
    with pytest.raises(RuntimeSetupError, match="WORLD_SIZE is not set, but RANK=3 is"):
        xr.use_spmd()


def test_absent_ranks_are_waited_for_no_longer_than_asked(alone: pytest.MonkeyPatch) -> None:
    place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**place, "MASTER_PORT": str(free_port())}.items():
        alone.setenv(name, value)
    alone.setenv("GLOO_SOCKET_IFNAME", "lo")
    started = time.monotonic()
    said = (
        r"Rank 0 waited 1 s at 127\.0\.0\.1:\d+ \(MASTER_ADDR:MASTER_PORT\), but of 2 ranks these did not arrive: 1\."
    )
    with pytest.raises(RuntimeSetupError, match=said) as error:
        xr.use_spmd(init_timeout=1)
    assert time.monotonic() - started < 30
    assert "FULLSHARD_INIT_TIMEOUT" in str(error.value)
    assert not xr.is_spmd() and not dist.is_initialized()


def test_absent_ranks_are_named_where_the_launcher_holds_the_store(alone: pytest.MonkeyPatch) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**place, "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        alone.setenv(name, value)
    alone.setenv("GLOO_SOCKET_IFNAME", "lo")
    alone.setenv("FULLSHARD_INIT_TIMEOUT", "1")
    with pytest.raises(RuntimeSetupError, match=r"Rank 1 waited 1 s .* of 4 ranks these did not arrive: 0, 2, 3"):
        xr.use_spmd()


def test_a_start_costs_a_rank_the_same_however_many_there_are() -> None:
    calls: list[str] = []

    class Counting:
        def __init__(self, inner: dist.Store) -> None:
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            calls.append(name)
            return getattr(self.inner, name)

    for world in (2, 512):
        inner = dist.HashStore()
        for rank in range(1, world):
            JobStore(inner, "0").put(f"here/{rank}", json.dumps(asdict(introduce(Launch(rank, world), CPU))))
        calls.clear()
        meet(JobStore(Counting(inner), "0"), Launch(0, world, 0, world), CPU, 5.0, calls.append)
        assert calls == ["set", "check", "check", "multi_get", "set", "check", "check", "get"]
        calls.clear()
        meet(JobStore(Counting(inner), "0"), Launch(world - 1, world), CPU, 5.0, calls.append)
        assert calls == ["set", "check", "check", "get"]


def test_ranks_that_were_started_differently_are_named_with_what_differs() -> None:
    """The number of ranks too: rank 0 need not know of a rank that counts itself to its job."""
    store = dist.HashStore()
    errors: dict[int, str] = {}

    def start(rank: int, world: int) -> None:
        try:
            meet(JobStore(store, "0"), Launch(rank, world, rank, world), CPU, 5.0, print)
        except RuntimeSetupError as error:
            errors[rank] = str(error)

    threads = [threading.Thread(target=start, args=one) for one in ((0, 2), (1, 2), (2, 3))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == {2: "the ranks were started differently: WORLD_SIZE is 2 on rank 0, 3 on rank 2."}
    found = differences({0: {"torch": "2.13.0", "lr": 0.1}, 1: {"torch": "2.12.0", "lr": 0.1}, 2: {"torch": "2.13.0"}})
    assert found == 'torch is "2.13.0" on rank 0, 2, "2.12.0" on rank 1; lr is 0.1 on rank 0, 1, null on rank 2'


# --- foreign wrappers


class BareDDP(nn.parallel.DistributedDataParallel):
    """DDP without what its constructor imports, which takes seconds."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = module


def test_ddp_is_refused_by_name(alone: pytest.MonkeyPatch) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    wrapped = BareDDP(nn.Linear(2, 2))
    wrapped.itself = [wrapped]  # a cycle, as the real one has
    said = r"Linear is wrapped by DistributedDataParallel \(DDP\).*without its wrapper"
    with pytest.raises(RuntimeSetupError, match=said):
        xr.use_spmd()  # finds it by itself
    with pytest.raises(RuntimeSetupError, match=said):
        xr.use_spmd(modules=wrapped)
    with pytest.raises(RuntimeSetupError, match=r"Linear \(at '1' in Sequential\) is wrapped by"):
        xr.refuse_foreign_wrappers(nn.Sequential(nn.ReLU(), wrapped))
    assert not xr.is_spmd()
    del wrapped
    xr.use_spmd()
    assert xr.is_spmd(), "a wrapper that was dropped does not count"


def test_fully_shard_is_refused_by_name(alone: pytest.MonkeyPatch) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = fully_shard(nn.Sequential(nn.Linear(2, 2)), mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(RuntimeSetupError, match=r"FSDPSequential is wrapped by torch's fully_shard \(FSDP2\)"):
        xr.use_spmd()
    del model
    xr.use_spmd()
    xr.use_spmd(modules=[nn.Linear(1, 1), nn.Linear(1, 1)])


def test_deepspeed_and_fsdp1_are_known_without_being_imported() -> None:
    engine = type("DeepSpeedEngine", (nn.Module,), {"__module__": "deepspeed.runtime.engine"})
    fsdp = type("FullyShardedDataParallel", (nn.Module,), {"__module__": "torch.distributed.fsdp.somewhere"})
    users_own = type("FSDPModule", (nn.Module,), {"__module__": "my_project.models"})
    wrapped = type("MyEngine", (engine,), {})()
    wrapped.module = nn.Bilinear(1, 1, 1)
    with pytest.raises(RuntimeSetupError, match="Bilinear is wrapped by DeepSpeed"):
        xr.refuse_foreign_wrappers(wrapped)
    with pytest.raises(RuntimeSetupError, match=r"torch's FullyShardedDataParallel \(FSDP\)"):
        xr.refuse_foreign_wrappers(fsdp())
    xr.refuse_foreign_wrappers(users_own())


# --- seeds, output, XLA's names


@pytest.mark.parametrize("number", [0, 1234, 2**40, np.int64(5)])
def test_seed_repeats_everything(number: int) -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), np.random.rand(), torch.rand(1).item()

    xr.seed(number)
    first = draw()
    xr.seed(number)
    assert draw() == first
    xr.seed(int(number) + 1)
    assert draw() != first


@pytest.mark.parametrize("number", [-1, 1.5, "7", None])
def test_seed_that_is_none(number: object) -> None:
    with pytest.raises(RuntimeSetupError, match="expected an integer of 0 or more"):
        xr.seed(number)  # type: ignore[arg-type]


def test_warn_once(caplog: pytest.LogCaptureFixture) -> None:
    xr.forget_warnings()
    assert [xr.warn_once(key, f"about {key}") for key in "aab"] == [True, False, True]
    assert caplog.messages == ["about a", "about b"]
    assert xr.warned() == {"a", "b"}
    xr.forget_warnings()
    assert xr.warn_once("a", "about a")


def test_logger_leaves_an_application_its_own_logging(capsys: pytest.CaptureFixture[str]) -> None:
    assert xr.get_logger("spmd") is xr.get_logger("fullshard.spmd") is logging.getLogger("fullshard.spmd")
    xr.get_logger().warning("said once")  # pytest's handlers are the application's here
    assert "said once" not in capsys.readouterr().err


def test_xla_names(alone: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert xm.xla_device() == xr.xla_device() == torch.device("cpu")
    assert (xm.get_ordinal(), xm.xrt_world_size(), xr.global_runtime_device_count()) == (0, 1, 1)
    xm.mark_step()
    xm.mark_step(wait=True)
    xm.wait_device_ops()
    xm.master_print("hello")
    assert capsys.readouterr().out == "hello\n"


# --- GPUs


@pytest.mark.gpu
def test_world_of_one_on_a_gpu_carries_cpu_tensors_too(alone: pytest.MonkeyPatch) -> None:
    alone.delenv("FULLSHARD_DEVICE")
    xr.use_spmd()
    assert xr.device().type == "cuda" and "cuda:nccl" in dist.get_backend_config()
    for where in (torch.device("cpu"), xr.device()):
        total = torch.ones(3, device=where)
        dist.all_reduce(total)
        assert total.tolist() == [1, 1, 1]
    xm.wait_device_ops()


@pytest.mark.gpu
@ranks(2, 4)
def test_ranks_on_gpus_draw_alike_and_add_up(world_size: int) -> None:
    shared = world_size > torch.cuda.device_count()
    assert dist.get_backend_config() == f"cpu:gloo,cuda:{'gloo' if shared else 'nccl'}"
    for where in (torch.device("cpu"), xr.device()):
        drawn = torch.rand(4, device=where)
        total = drawn.clone()
        dist.all_reduce(total)
        assert torch.allclose(total, world_size * drawn)
    xr.barrier()


# --- several processes


@ranks(2)
def test_group_made_by_another_gives_its_place() -> None:
    launcher = {name: os.environ.pop(name) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    held = xr._launch, xr._device, xr._owns_group
    xr._launch = xr._device = None
    try:
        with pytest.raises(RuntimeSetupError, match=r"Call fullshard\.runtime\.use_spmd\(\) first"):
            xr.local_rank()
        torch.manual_seed(xr.rank())
        xr.use_spmd(device="cpu")  # asks the other rank which node it is on
        assert (xr.local_rank(), xr.local_world_size(), xr.node_count()) == (xr.rank(), 2, 1)
        assert torch.equal(torch.rand(1), torch.rand(1, generator=torch.Generator().manual_seed(0)))
    finally:
        xr._launch, xr._device, xr._owns_group = held
        os.environ.update(launcher)


def test_under_torchrun(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", str(PROGRAMS / "meet.py")]
    run = subprocess.run([*command, str(tmp_path)], env=environment(), capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    facts = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for rank, told in enumerate(facts):
        assert told["before"] == [rank, 2, False]
        assert told["now"] == [rank, 2, True]
        assert told["local"] == [rank, 2, 1]
        assert told["aliases"] == [2, 2, rank, 2]
        assert told["main"] is (rank == 0)
        assert told["after"] == [False, False]
        assert told["total"] == 2
        assert (told["device"], told["backend"], told["interface"]) == ("cpu", "gloo", "lo")
    expected = torch.rand(2, generator=torch.Generator().manual_seed(100)).tolist()
    assert facts[0]["drawn"] == facts[1]["drawn"] == expected, "all ranks draw what rank 0 would"
    assert facts[0]["seeded"] == facts[1]["seeded"] == facts[0]["seeded per rank"] != facts[1]["seeded per rank"]
    lines = sorted((run.stdout + run.stderr).splitlines())
    assert [line for line in lines if "info" in line or "warned" in line or "printed" in line] == [
        "[rank 0] INFO info asked of all",
        "[rank 0] INFO info from all",
        "[rank 0] WARNING warned once",
        "[rank 0] printed by each",
        "[rank 1] INFO info asked of all",
        "[rank 1] printed by each",
        "printed by one",
    ]


@pytest.mark.parametrize(
    ("way", "codes"),
    [
        ("one raises while one waits", (1, 1)),
        pytest.param("one is killed", (0, -9), marks=pytest.mark.slow),
        pytest.param("both raise with unlike work pending", (1, 1), marks=pytest.mark.slow),
        pytest.param("one raises while the other is elsewhere", (1, None), marks=pytest.mark.slow),
    ],
)
def test_no_rank_hangs_when_they_part(way: str, codes: tuple[int | None, ...]) -> None:
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, str(PROGRAMS / "part.py"), way]
    runs = [
        subprocess.Popen(command, env=environment(**place, RANK=r, LOCAL_RANK=r), stderr=subprocess.PIPE, text=True)
        for r in "01"
    ]
    try:
        for run, code in zip(runs, codes, strict=True):
            if code is not None:
                _, errors = run.communicate(timeout=60)
                assert run.returncode == code, errors
                assert "gave up" in errors or "waits" in way or "killed" in way
    finally:
        for run in runs:
            run.kill()
            run.communicate()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "FULLSHARD_DEVICE": "cpu", **more}
