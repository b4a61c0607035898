"""The oracle counts what is there: kernels' workspaces, storages that are resized, tensors kept too long."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.memory_tracker import MemoryTracker

MIB = 2**20


def test_it_counts_every_byte_at_its_time() -> None:
    with MemoryTracker() as tracker:
        tracker.mark("two tensors")
        a = torch.empty(MIB, dtype=torch.uint8)
        b = torch.empty(2 * MIB, dtype=torch.uint8)
        del a
        tracker.mark("storage")
        b.untyped_storage().resize_(0)
        b.untyped_storage().resize_(4 * MIB)
        view = b[:1]
        del b
        tracker.mark("inside an operator")
        ids = torch.randint(0, 9, (MIB,))
        ids.sort()
        del ids
    assert tracker.peaks["two tensors"] == 3 * MIB and tracker.peaks["storage"] == 4 * MIB
    assert tracker.peaks["inside an operator"] > 4 * MIB + 3 * 8 * MIB  # ids, their order, and the sort's own memory
    assert tracker.end == 4 * MIB and view.numel() == 1


def _backward(*, leaked: list[torch.Tensor] | None = None, frees: bool = True) -> tuple[int, int]:
    """Peak and end of a small step, whose gathered weight is allocated and freed by resizing as the engine does."""
    with MemoryTracker() as tracker:
        weight = nn.Parameter(torch.empty(512, 512))
        weight.untyped_storage().resize_(0)
        for _ in range(2):
            weight.untyped_storage().resize_(MIB)
            hidden = torch.ones(64, 512).requires_grad_()
            out = F.linear(hidden, weight).relu()
            if leaked is not None:
                leaked.append(out.detach().clone())
            out.sum().backward()
            weight.grad = None
            if frees:
                weight.untyped_storage().resize_(0)
            del hidden, out
    return tracker.peak, tracker.end


def test_a_leak_and_a_missed_free_are_seen() -> None:
    peak, end = _backward()
    assert end == 0
    kept: list[torch.Tensor] = []
    leak_peak, leak_end = _backward(leaked=kept)
    assert leak_end == 2 * 64 * 512 * 4 and leak_peak == peak + 2 * 64 * 512 * 4
    assert _backward(frees=False)[1] == MIB
