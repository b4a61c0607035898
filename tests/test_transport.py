"""How tensors travel, in words: every case from numbers alone, and what a process group gives."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import fullshard.runtime as xr
import fullshard.spmd as xs
from fullshard import groups
from fullshard.errors import RuntimeSetupError, TrainingError
from fullshard.fsdp import FSDPv2
from fullshard.launch import selftest
from fullshard.launcher import Launch
from fullshard.spmd.tensor import _over_gloo
from fullshard.transport import Choice, Transport, differing, transport_of
from tests.pool import ranks

SHARED = "Gloo through host memory: more ranks than GPUs on this node (4 on 1)"
ALTHOUGH = "Gloo through host memory, though each rank has a GPU of its own"


@pytest.mark.parametrize(
    ("backend", "device", "world", "local", "gpus", "nccl", "ours", "sentence", "fix"),
    [
        ("gloo", "cpu", 1, 1, 0, False, True, "nothing travels: there is one rank", ""),
        ("nccl", "cuda", 1, 1, 8, True, True, "nothing travels: there is one rank", ""),
        ("gloo", "cpu", 4, 4, 0, False, True, "Gloo (CPU)", ""),
        ("gloo", "cpu", 4, 4, 8, True, False, "Gloo (CPU)", ""),
        ("mpi", "cpu", 4, 4, 0, False, False, "mpi (CPU)", ""),
        ("nccl", "cuda", 16, 8, 8, True, True, "NCCL", ""),
        ("ucc", "cuda", 16, 8, 8, True, False, "ucc", ""),
        ("gloo", "cuda", 4, 4, 1, True, True, SHARED, ""),
        ("gloo", "cuda", 4, 4, 1, True, False, SHARED, ""),
        ("gloo", "cuda", 4, 4, 1, False, True, SHARED, ""),
        ("gloo", "cuda", 4, 4, 4, True, False, ALTHOUGH, 'make it with "cpu:gloo,cuda:nccl"'),
        ("gloo", "cuda", 4, 4, 4, False, True, ALTHOUGH, "This build of torch has no NCCL: install one that has it."),
        ("gloo", "cuda", 4, 4, 4, False, False, ALTHOUGH, "This build of torch has no NCCL: install one that has it."),
        ("gloo", "cuda", 4, 2, 2, True, True, ALTHOUGH, "set CUDA_VISIBLE_DEVICES before the start"),
    ],
)  # fmt: skip
def test_every_case_has_its_sentence(
    backend: str, device: str, world: int, local: int, gpus: int, nccl: bool, ours: bool, sentence: str, fix: str
) -> None:
    way = transport_of(backend, device, world, local, gpus, has_own=nccl, ours=ours)
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
    patch.setattr(xr, "gpu_count", lambda: gpus)
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
        assert not told(caplog) and xr.transport() == Transport("", "nothing travels: there is one rank")
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
        with pytest.raises(TrainingError, match=r"on 1 rank\(s\): NCCL carries tensors where each rank has a GPU"):
            selftest.main()
    assert said[-1] == "collectives add up"


@ranks(2)
def test_links_of_a_sharded_model_must_agree_with_the_transport() -> None:
    model = FSDPv2(nn.Linear(8, 8), xs.Mesh(np.arange(2), (2,), ("fsdp",)))
    selftest.check_links(model, "gloo")
    with pytest.raises(TrainingError, match=r"2 rank\(s\): the sharded model's gathers and reductions"):
        selftest.check_links(model, "nccl")


# --- ranks that choose differently


def meet(launches: list[Launch], backends: list[str], gpus: list[int], patch: pytest.MonkeyPatch) -> list[str]:
    """Each rank's error, or "", when they meet at one store."""
    store, errors, place = dist.HashStore(), [""] * len(launches), threading.local()
    patch.setattr(xr, "gpu_count", lambda: gpus[place.rank])
    patch.setattr(xr.socket, "gethostname", lambda: f"node{launches[place.rank].rank // 2}")

    def one(rank: int) -> None:
        place.rank = rank
        try:
            xr._await_all(dist.PrefixStore("run", store), launches[rank], backends[rank], 10)
        except RuntimeSetupError as error:
            errors[rank] = str(error)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(launches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return errors


def test_nodes_that_choose_differently_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = [Launch(r, 4, r % 2, 2, 2, "node0:1") for r in range(4)]
    nccl, gloo = "cpu:gloo,cuda:nccl", "cpu:gloo,cuda:gloo"
    assert meet(launches, [nccl] * 4, [2] * 4, monkeypatch) == [""] * 4
    errors = meet(launches, [nccl, nccl, gloo, gloo], [2, 2, 1, 1], monkeypatch)
    assert len(set(errors)) == 1, "every rank says the same"
    assert f"{nccl} on rank(s) 0, 1 (2 rank(s) and 2 GPU(s) on node0)" in errors[0]
    assert f"{gloo} on rank(s) 2, 3 (2 rank(s) and 1 GPU(s) on node1)" in errors[0]
    assert "no more ranks on a node than it has GPUs" in errors[0]


def test_thousands_of_ranks_are_named_briefly() -> None:
    choices = [Choice("a", f"node{r // 8}", 8, 8) for r in range(4096)]
    assert len(differing([*choices[:-8], *[Choice("b", "node511", 8, 7)] * 8])) < 1500
