"""CPU offload: shards in host memory, and the copies between them and the accelerator.

The shards of an offloaded parameter, its gradient and therefore its optimizer state are in page-locked host memory.
Copies in both directions run beside compute (`streams.py`). The host may use what they read or write only after
`settle()`. All parameters are offloaded, or those that `keep_shards_on_host` names.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from fullshard.device import accelerator
from fullshard.device.streams import SideStream, StreamWork

MARK = "_fullshard_offloaded"


def keep_shards_on_host(parameter: nn.Parameter) -> None:
    """Let the engine keep the shards of this parameter in host memory. Call it before sharding."""
    setattr(parameter, MARK, True)


def is_offloaded(parameter: nn.Parameter) -> bool:
    """Whether `keep_shards_on_host` was called for a parameter."""
    return getattr(parameter, MARK, False)


class HostTraffic:
    """Copies between host memory and the accelerator that may still be running."""

    def __init__(self, stream: SideStream) -> None:
        self._stream = stream
        # A stream runs in order, so waiting for the last copy of each kind waits for all of them.
        self._reading: StreamWork | None = None
        self._landing: StreamWork | None = None
        self._additions: list[tuple[torch.Tensor, torch.Tensor]] = []

    def reads(self, copy: StreamWork) -> None:
        """Record copies that read host shards: the host must not write to those before the copies are done."""
        self._reading = copy

    @contextlib.contextmanager
    def landing(self, pieces: Any) -> Iterator[None]:
        """Inside, `to_host` copies these pieces beside compute.

        Compute first waits for the previous copies, so that the pieces of at most one unit are kept alive for them.
        """
        if self._landing is not None:
            self._landing.join()
        with self._stream.run() as copy:
            copy.keep(pieces)
            yield
        self._landing = copy

    def to_host(self, grad: torch.Tensor) -> torch.Tensor:
        """Start to copy a gradient to host memory; the result is valid after `settle()`."""
        return accelerator.pinned(grad.shape, grad.dtype).copy_(grad, non_blocking=True)

    def add(self, total: torch.Tensor, grad: torch.Tensor) -> None:
        """Add a gradient to an existing one; on the host this happens in `settle()`, once the copies are done."""
        if total.device != self._stream.device:
            self._additions.append((total, grad))
        else:
            total.add_(grad)

    def arrived(self) -> None:
        """Wait until the host may read what `to_host` copies inside `landing`."""
        self._stream.join_host()

    def settle(self) -> None:
        """Wait until the host may read gradients and write to shards."""
        for copies in (self._reading, self._landing):
            if copies is not None:
                copies.join_host()
        for total, grad in self._additions:
            total.add_(grad)
        self._reading, self._landing, self._additions = None, None, []

    def abandon(self) -> None:
        """As `settle`, after a backward that failed: pending additions are dropped."""
        self._additions = []
        self.settle()


def host_copy(t: torch.Tensor) -> torch.Tensor:
    """A copy of a shard in host memory."""
    return accelerator.host_memory(t.shape, t.dtype).copy_(t)
