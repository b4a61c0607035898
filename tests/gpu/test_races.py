"""The tool that makes races visible does: each fault put into the engine on purpose is caught by it.

The faults are put in here, from outside: the two that version 0.1 had, and others of their kind. How often each goes
unseen without the tool is shown beside: that is why the tool is needed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from fullshard.activations import offload
from fullshard.device import streams
from fullshard.fsdp import comm, reduction
from tests.gpu.cases import Case
from tests.gpu.chaos import chaos
from tests.gpu.programs import train_sharded
from tests.pool import gpu_ranks, note

SEEDS = (1, 2, 3)


def _keeps_nothing(patch: pytest.MonkeyPatch) -> None:
    """Gradients that the side stream packs are let go at once (version 0.1)."""
    patch.setattr(streams.StreamWork, "keep", lambda self, *tensors: None)


def _sums_replicas_early(patch: pytest.MonkeyPatch) -> None:
    """The sum over the replicas starts on the compute stream before the side stream has filled its buffers (0.1)."""
    start = reduction.Reduction._sum_replicas

    def early(self: Any) -> None:
        with torch.cuda.stream(torch.cuda.default_stream()):
            start(self)

    patch.setattr(reduction.Reduction, "_sum_replicas", early)


def _joins_without_waiting(patch: pytest.MonkeyPatch) -> None:
    """Compute does not wait for what ran aside."""
    patch.setattr(streams.StreamWork, "_wait", lambda self: None)


def _does_not_wait_for_compute(patch: pytest.MonkeyPatch) -> None:
    """A side stream begins before compute has produced what it reads."""

    @contextlib.contextmanager
    def run(self: streams.SideStream) -> Iterator[streams.StreamWork]:
        work = streams.StreamWork(self.device, True)
        assert self._stream is not None
        with self._stream:
            yield work
        work.ended(self._stream.record_event())

    patch.setattr(streams.SideStream, "run", run)


def _uses_sums_early(patch: pytest.MonkeyPatch) -> None:
    """Compute does not wait for the communicator."""
    patch.setattr(comm.Pending, "_wait", lambda self: None)


def _forgets_activations(patch: pytest.MonkeyPatch) -> None:
    """Inputs on their way to the host are let go before the copy has read them."""

    def leave(device: torch.device) -> Any:
        last = offload._leaving.pop(device, None)
        return None if last is None else last[0]

    patch.setattr(offload, "_join_last", leave)
    patch.setattr(streams.StreamWork, "keep", lambda self, *tensors: None)


def _shares_a_buffer(patch: pytest.MonkeyPatch) -> None:
    """A host buffer is handed on while the input in it is still needed."""
    held: dict[str, torch.Tensor] = {}

    def take(self: Any, size: int) -> torch.Tensor:
        if "one" not in held or held["one"].numel() < size:
            held["one"] = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return held["one"]

    patch.setattr(offload.HostBuffers, "take", take)


FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Case]] = {
    "packed gradients let go": (_keeps_nothing, Case(batches="each")),
    "replica sum too early": (_sums_replicas_early, Case("HYBRID_SHARD", (2, 1))),
    # Casts of shards on the device run on the compute stream. Beside it, what a unit needs and does not gather is
    # copied from the host; what it gathers, compute waits for through the communicator.
    "copy from the host not waited for": (
        _joins_without_waiting,
        Case("NO_SHARD", precision="bf16", place="offload"),
    ),
    "side stream too early": (_does_not_wait_for_compute, Case()),
    "communicator not waited for": (_uses_sums_early, Case()),
    "host gradients let go": (_keeps_nothing, Case(place="offload", precision="bf16")),
    "activations let go": (_forgets_activations, Case(activations="hosted")),
    "activations used before they are back": (_joins_without_waiting, Case(activations="hosted")),
    "host buffer handed on": (_shares_a_buffer, Case(activations="hosted")),
}


@gpu_ranks(2)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_caught(name):
    fault, case = FAULTS[name]
    if torch.accelerator.current_accelerator(check_available=True) is None:
        pytest.skip("needs a GPU: without streams there are no races")
    calm = train_sharded(case)
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        unaided = [train_sharded(case).same_bits(calm) for _ in SEEDS]
        caught = []
        for seed in SEEDS:
            with chaos(seed) as made:
                caught.append(not train_sharded(case).same_bits(calm))
            assert made.slept and made.poisoned
    note(f"{name}: caught in {sum(caught)} of {len(SEEDS)} runs; unseen without the tool in {sum(unaided)}")
    assert all(caught)
    with chaos(SEEDS[0]):
        assert train_sharded(case).same_bits(calm)
