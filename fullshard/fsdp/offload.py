"""Side streams, and shards that lie on the host.

On CUDA what prepares a gather or a reduction (casts, packing, copies from and to the host) runs on a stream of its
own beside compute. With offload the shards, their gradients and so the optimizer's state lie in pinned host memory.
On CPUs all of this falls away.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Iterator, Sequence

import numpy as np
import torch

LARGE = 2**20
"""Bytes from which on host memory is locked in place: it then has pages of its own."""


class Streams:
    """The side streams of an engine."""

    def __init__(self, device: torch.device):
        self.cuda = device.type == "cuda"
        self._streams = {name: torch.cuda.Stream(device) for name in ("gather", "reduce")} if self.cuda else {}

    @contextlib.contextmanager
    def aside(self, name: str) -> Iterator[None]:
        """Run what follows beside compute, after everything compute was given so far.

        That order also makes memory safe: whatever the side stream allocates was last used before this point.
        """
        if not self.cuda:
            yield
            return
        side = self._streams[name]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            yield

    def join(self, name: str) -> None:
        """Let compute wait for what was run aside."""
        if self.cuda:
            torch.cuda.current_stream().wait_stream(self._streams[name])


class HostGradients:
    """Gradients on their way to the host: copies run on, additions wait for `settle()`."""

    def __init__(self) -> None:
        self._additions: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._copies = False

    def to_host(self, grad: torch.Tensor) -> torch.Tensor:
        host = torch.empty(grad.shape, dtype=grad.dtype, pin_memory=True)
        self._copies = True
        return host.copy_(grad, non_blocking=True)

    def add(self, total: torch.Tensor, grad: torch.Tensor) -> None:
        if self._copies and total.device.type == "cpu":
            self._additions.append((total, grad))
        else:
            total.add_(grad)

    def settle(self) -> None:
        """After this the host may read the gradients."""
        if self._copies:
            torch.cuda.current_stream().synchronize()
        for total, grad in self._additions:
            total.add_(grad)
        self._additions, self._copies = [], False


def host_copy(t: torch.Tensor) -> torch.Tensor:
    """A shard in host memory."""
    return host_memory(t.shape, t.dtype).copy_(t)


def host_memory(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Host memory without values: page-locked where there is a GPU to read it.

    Large pieces are ordinary memory that is locked afterwards: what torch allocates as pinned it rounds up to a power
    of two, which for a large model's shards adds up to gigabytes.
    """
    if not torch.cuda.is_available():
        return torch.empty(shape, dtype=dtype)
    size = math.prod(shape) * dtype.itemsize
    if size < LARGE:
        return torch.empty(shape, dtype=dtype, pin_memory=True)
    owner = np.empty(size, np.uint8)  # lives as long as the tensor's storage does
    if int(torch.cuda.cudart().cudaHostRegister(owner.ctypes.data, size, 0)) == 0:
        # Unlocked before it is freed: numpy tells of an array's end before it gives the memory back.
        weakref.finalize(owner, torch.cuda.cudart().cudaHostUnregister, owner.ctypes.data).atexit = False
    return torch.from_numpy(owner).view(dtype).view(tuple(shape))
