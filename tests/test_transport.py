"""How tensors travel, in words: every case from numbers alone, and what a process group gives."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from dataclasses import asdict

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import fullshard.distributed.runtime as xr
import fullshard.spmd as xs
from fullshard.config.errors import RuntimeSetupError, TrainingError
from fullshard.device import accelerator
from fullshard.distributed import groups, rendezvous, torch_devices
from fullshard.distributed.job_store import JobStore
from fullshard.distributed.rank_env import Launch, choose_backend
from fullshard.distributed.rendezvous import Meeting, introduce, meet
from fullshard.distributed.transport import Transport, transport_of
from fullshard.fsdp import FSDPv2
from fullshard.launch import selftest
from fullshard.spmd.redistribute import _over_gloo
from tests.pool import ranks

SHARED = "Gloo through host memory: more ranks than GPUs on this node (4 on 1)"
ELSEWHERE = "Gloo through host memory: ranks 5 and 6 share a GPU of b"
ALTHOUGH = "Gloo through host memory, although each rank has its own GPU"


@pytest.mark.parametrize(
    ("backend", "device", "world", "local", "gpus", "shared", "without", "ours", "sentence", "fix"),
    [
        ("gloo", "cpu", 1, 1, 0, "", "", True, "none: there is one rank", ""),
        ("nccl", "cuda", 1, 1, 8, "", "", True, "none: there is one rank", ""),
        ("gloo", "cpu", 4, 4, 0, "", "", True, "Gloo (CPU)", ""),
        ("mpi", "cpu", 4, 4, 0, "", "", False, "mpi (CPU)", ""),
        ("nccl", "cuda", 16, 8, 8, "", "", True, "NCCL", ""),
        ("nccl", "cuda", 16, 8, 1, "", "", True, "NCCL", ""),  # each rank sees its own GPU alone
        ("ucc", "cuda", 16, 8, 8, "", "", False, "ucc", ""),
        ("gloo", "cuda", 4, 4, 1, "ranks 0 and 1 share a GPU of a", "", True, SHARED, ""),
        ("gloo", "cuda", 4, 4, 1, "ranks share GPUs", "", False, SHARED, ""),
        ("gloo", "cuda", 8, 2, 2, "ranks 5 and 6 share a GPU of b", "", True, ELSEWHERE, ""),
        ("gloo", "cuda", 4, 4, 4, "", "", False, ALTHOUGH, 'use "cpu:gloo,cuda:nccl"'),
        ("gloo", "cuda", 4, 4, 4, "", "rank 3 on b", True, ALTHOUGH, "torch has no NCCL on rank 3 on b: install"),
    ],
)  # fmt: skip
def test_every_case_has_its_sentence(
    backend: str, device: str, world: int, local: int, gpus: int, shared: str, without: str, ours: bool, sentence: str,
    fix: str,
) -> None:  # fmt: skip
    way = transport_of(backend, device, world, local, gpus, shared=shared, without=without, ours=ours)
    assert str(way) == sentence
    assert fix in way.fix and bool(fix) == bool(way.fix)
    assert way.backend == ("" if world == 1 else backend)


# --- what a process group gives


@pytest.fixture
def four(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[pytest.MonkeyPatch]:
    """Rank 0 of four of torch's fake process group, on one node; `caplog` has what it logs."""
    for name, value in {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4", "FULLSHARD_DEVICE": "cpu"}.items():
        monkeypatch.setenv(name, value)
    xr.shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()
    xr.forget_warnings()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    caplog.set_level(logging.INFO, logger="fullshard")
    yield monkeypatch
    xr.shutdown()
    dist.destroy_process_group()


def on_gpus(patch: pytest.MonkeyPatch, backend: str, gpus: int, nccl: bool = True) -> None:
    """Make the runtime believe in GPUs, and in this backend for them."""
    patch.setattr(xr, "_device", torch.device("cuda", 0))
    patch.setattr(torch_devices, "gpu_count", lambda: gpus)
    patch.setattr(groups, "has_own", lambda device_type: nccl)
    patch.setattr(groups, "backend_of", lambda group, device: backend if device.type == "cuda" else "gloo")


def told(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(r.levelname, r.getMessage()) for r in caplog.records if r.getMessage().startswith("transport")]


def test_wrapping_tells_once_per_process_group(four: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    mesh = xs.Mesh(np.arange(4), (4,), ("fsdp",))
    for _ in range(2):
        FSDPv2(nn.Linear(8, 8), mesh, sync_module_states=False)
    assert told(caplog) == [("INFO", "transport: fake (CPU)")]
    xr.shutdown()
    FSDPv2(nn.Linear(8, 8), mesh, sync_module_states=False)
    assert len(told(caplog)) == 2, "a process group taken anew is told of anew"


@pytest.mark.parametrize(
    ("backend", "gpus", "said"),
    [("nccl", 4, "NCCL"), ("gloo", 1, SHARED)],
)
def test_gpus(
    four: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, backend: str, gpus: int, said: str
) -> None:  # fmt: skip
    xr.use_spmd()
    on_gpus(four, backend, gpus)
    lines: list[str] = []
    xr.announce_transport(lines.append)
    xr.announce_transport(lines.append)
    xr.announce_transport()
    assert lines == [f"transport: {said}"] and not told(caplog)


def test_gloo_without_need_is_a_warning_with_the_fix(
    four: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    xr.use_spmd()
    on_gpus(four, "gloo", 4)
    lines: list[str] = []
    xr.announce_transport(lines.append)
    xr.announce_transport()
    assert not lines
    [(level, message)] = told(caplog)
    assert level == "WARNING" and message.startswith(f"transport: {ALTHOUGH}.") and '"cpu:gloo,cuda:nccl"' in message


def test_one_rank_is_told_to_the_user_but_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="fullshard")
    xr.shutdown()
    xr.use_spmd(device="cpu")
    try:
        xr.announce_transport()
        assert not told(caplog) and xr.transport() == Transport("", "none: there is one rank")
    finally:
        xr.shutdown()


def test_everything_asks_in_one_place(four: pytest.MonkeyPatch) -> None:
    """Relays of sharded tensors and barriers take Gloo's way when, and only when, Gloo carries the device's tensors."""
    xr.use_spmd()
    waited: list[object] = []
    four.setattr(dist, "barrier", lambda device_ids=None: waited.append(device_ids))
    on_gpu = torch.empty(0).as_subclass(_OnGpu)
    for backend in ("nccl", "gloo", "fake", ""):
        on_gpus(four, backend, 4)
        assert _over_gloo(on_gpu) == (backend == "gloo")
        assert _over_gloo(torch.empty(0))
        xr.barrier()
        assert waited.pop() == (None if backend == "gloo" else [0])


class _OnGpu(torch.Tensor):
    device = torch.device("cuda", 0)  # type: ignore[assignment]


# --- the self-test


@ranks(2)
def test_the_self_test_finds_gloo_where_nccl_could_be() -> None:
    fix = "Make it with NCCL." if xr.rank() == 1 else ""
    here, tensor, said = xr.device(), torch.tensor, []
    devices = iter([torch.device("cuda", 0)])  # the first to ask is told of a GPU
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(xr, "transport", lambda: Transport("gloo", ALTHOUGH, fix))
        patch.setattr(xr, "device", lambda: next(devices, here))
        patch.setattr(torch, "tensor", lambda values, device=None: tensor(values))
        patch.setattr(selftest, "say", said.append)
        patch.setenv("ACCELERATE_USE_CPU", "true")
        with pytest.raises(TrainingError, match=r"on 1 rank\(s\): NCCL is used where each rank has its own GPU"):
            selftest.main()
    assert said[-1] == "an all-reduce over all ranks is correct"


@ranks(2)
def test_links_of_a_sharded_model_must_agree_with_the_transport() -> None:
    model = FSDPv2(nn.Linear(8, 8), xs.Mesh(np.arange(2), (2,), ("fsdp",)))
    selftest.check_links(model, "gloo")
    with pytest.raises(TrainingError, match=r"2 rank\(s\): all-gathers and reductions of the sharded model"):
        selftest.check_links(model, "nccl")


# --- ranks that meet


def _found(met: Meeting, device: torch.device) -> tuple[str, str]:
    return choose_backend(device.type, own=met.own), met.shared


def meeting(gpus: list[str], patch: pytest.MonkeyPatch, nccl: list[bool] | None = None) -> list[tuple[str, str, str]]:
    """(backend, which ranks share a GPU, error) of each rank when they meet; a rank without a GPU is on the CPU."""
    store, found, place = dist.HashStore(), [("", "", "")] * len(gpus), threading.local()
    patch.setattr(accelerator, "identity", lambda device: gpus[place.rank])
    patch.setattr(groups, "has_own", lambda kind: nccl is None or nccl[place.rank])
    patch.setattr(rendezvous.socket, "gethostname", lambda: f"node{place.rank // 2}")

    def one(rank: int) -> None:
        place.rank = rank
        launch, device = (
            Launch(rank, len(gpus), rank % 2, 2, 2, "node0:1"),
            torch.device("cuda" if gpus[rank] else "cpu"),
        )
        try:
            found[rank] = (*_found(meet(JobStore(store, "0"), launch, device, 10, print), device), "")
        except RuntimeSetupError as error:
            found[rank] = ("", "", str(error))

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(gpus))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


def test_all_ranks_choose_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    nccl, gloo = "cpu:gloo,cuda:nccl", "cpu:gloo,cuda:gloo"
    assert {found[0] for found in meeting(["a", "b", "c", "d"], monkeypatch)} == {nccl}
    assert {found[0] for found in meeting(["", "", "", ""], monkeypatch)} == {"gloo"}
    shared = meeting(["a", "b", "c", "c"], monkeypatch)  # on one node of two
    assert {found[0] for found in shared} == {gloo}
    assert all("share a GPU of node1" in found[1] for found in shared)
    assert {found[0] for found in meeting(["a", "b", "c", "d"], monkeypatch, [True, True, True, False])} == {gloo}


def test_ranks_that_pretend_to_be_nodes_may_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    # NCCL tells nodes apart by this variable; here both ranks run in one process, one after the other.
    store, gpu = JobStore(dist.HashStore(), "0"), torch.device("cuda", 0)
    monkeypatch.setattr(accelerator, "identity", lambda device: "a")
    monkeypatch.setattr(groups, "has_own", lambda kind: True)
    for node, own in (("node1", True), ("", False)):
        monkeypatch.setenv("NCCL_HOSTID", node)
        store.put("here/1", json.dumps(asdict(introduce(Launch(1, 2, 1, 2), gpu))))
        monkeypatch.setenv("NCCL_HOSTID", "")
        assert meet(store, Launch(0, 2, 0, 2), gpu, 5, print).own == own


def test_devices_of_two_kinds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = [found[2] for found in meeting(["a", "b", "", ""], monkeypatch)]
    assert len(set(errors)) == 1
    assert 'started differently: type of device is "cuda" on rank 0, 1, "cpu" on rank 2, 3. One program' in errors[0]
