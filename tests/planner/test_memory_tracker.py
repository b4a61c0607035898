"""The oracle counts what is there: kernels' workspaces, storages that are resized, tensors kept too long."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fullshard.device import accelerator
from tests.memory_tracker import MemoryTracker
from tests.planner import measured_run

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


class FakeAllocator:
    """What torch says of a GPU's memory, without one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allocated = self.peak = 0
        monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda *_: self.allocated)
        monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda *_: self.peak)
        monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", self.reset)
        monkeypatch.setattr(measured_run, "_settled_memory", lambda: self.allocated)
        monkeypatch.setattr(measured_run, "_memory_of_others", lambda: 0)
        monkeypatch.setattr(accelerator, "_peaks", {})

    def allocate(self, size: int) -> None:
        self.allocated += size
        self.peak = max(self.peak, self.allocated)

    def reset(self, *_: object) -> None:
        self.peak = self.allocated


def test_a_budget_sees_the_peak_of_its_step_while_moments_are_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, device = FakeAllocator(monkeypatch), torch.device("cuda:0")
    memory.allocate(100)
    with measured_run.DeviceTracker() as tracker:
        tracker.mark("forward")
        accelerator.mark_peak(device)
        memory.allocate(50)
        tracker.mark("backward")
        memory.allocate(30)
        memory.allocate(-70)
        tracker.mark("optimizer step")
        assert accelerator.peak_since_mark(device) == 180  # not only since the last moment
        accelerator.mark_peak(device)
        assert accelerator.peak_since_mark(device) == 110 and accelerator.peak_memory(device) == 180
        memory.allocate(5)
    assert tracker.peaks == {"": 0, "forward": 50, "backward": 80, "optimizer step": 15} and tracker.before == 100
    assert torch.accelerator.max_memory_allocated() == memory.peak
