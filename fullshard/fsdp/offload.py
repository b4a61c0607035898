"""Shards that lie in host memory, and what travels between them and the accelerator.

With offload the shards, their gradients and so the optimizer's state lie in page-locked host memory. Copies in both
directions run beside compute (`streams.py`); the host may touch what they read or write only after `settle()`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from fullshard import accelerator
from fullshard.fsdp.streams import Aside, Lane


class HostTraffic:
    """Copies between host memory and the accelerator that may not be done yet."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        # A lane runs in order, so the last copy of each kind stands for all before it.
        self._reading: Aside | None = None
        self._landing: Aside | None = None
        self._additions: list[tuple[torch.Tensor, torch.Tensor]] = []

    def reads(self, copy: Aside) -> None:
        """Take note of copies that read host shards: the host must not write to those before they are done."""
        self._reading = copy

    @contextlib.contextmanager
    def landing(self, pieces: Any) -> Iterator[None]:
        """Inside, `to_host` copies these pieces beside compute.

        Compute waits for the copies of the last time first, so that no more than one unit's pieces are kept for them.
        """
        if self._landing is not None:
            self._landing.join()
        with self._lane.run() as copy:
            copy.keep(pieces)
            yield
        self._landing = copy

    def to_host(self, grad: torch.Tensor) -> torch.Tensor:
        """A gradient in host memory, there after `settle()`."""
        return accelerator.pinned(grad.shape, grad.dtype).copy_(grad, non_blocking=True)

    def add(self, total: torch.Tensor, grad: torch.Tensor) -> None:
        """Add a gradient to one that is there; on the host once both are."""
        if total.device != self._lane.device:
            self._additions.append((total, grad))
        else:
            total.add_(grad)

    def arrived(self) -> None:
        """After this the host may read what `to_host` has begun to copy inside `landing`."""
        self._lane.join_host()

    def settle(self) -> None:
        """After this the host may read gradients and write to shards."""
        for copies in (self._reading, self._landing):
            if copies is not None:
                copies.join_host()
        for total, grad in self._additions:
            total.add_(grad)
        self._reading, self._landing, self._additions = None, None, []

    def abandon(self) -> None:
        """As `settle`, for a backward that was broken off: what was to be added is dropped."""
        self._additions = []
        self.settle()


def host_copy(t: torch.Tensor) -> torch.Tensor:
    """A shard in host memory."""
    return accelerator.host_memory(t.shape, t.dtype).copy_(t)
