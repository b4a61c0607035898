"""Activation offload: inputs of recomputed modules in host memory until backward; copies run beside compute.

An input leaves while its module computes, and comes back while the backward of the module after it computes: at most
two are on the device at a time. Host buffers are pinned once and used again in every step. All copies run on one side
stream, in order, so that a buffer may be handed on as soon as the copies that use it are queued.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from fullshard.device import accelerator
from fullshard.device.streams import SideStream, StreamWork
from fullshard.spmd.tensor import is_sharded
from fullshard.spmd.tensor_tree import tensors_in


@contextlib.contextmanager
def inputs_on_host(args: Any) -> Iterator[None]:
    """Inside, tensors in `args` that autograd saves are moved to the host; other saved tensors stay."""
    inputs = {_memory(t) for t in tensors_in(args) if _movable(t)}
    moved: dict[Any, HostInput] = {}

    def pack(t: torch.Tensor) -> Any:
        where = _memory(t)
        if where not in inputs:
            return t
        if where not in moved:
            moved[where] = to_host(t)
        return moved[where]

    with torch.autograd.graph.saved_tensors_hooks(pack, from_host) if inputs else contextlib.nullcontext():
        yield


def _movable(t: torch.Tensor) -> bool:
    plain = not is_sharded(t) and t.is_floating_point() and t.is_contiguous() and not isinstance(t, nn.Parameter)
    return plain and accelerator.is_accelerator(t.device)


def _memory(t: torch.Tensor) -> Any:
    return None if is_sharded(t) else (t.data_ptr(), t.shape, t.dtype)


class HostInput:
    """One input in host memory."""

    def __init__(self, host: torch.Tensor, device: torch.device, before: HostInput | None):
        self.host, self.device = host, device
        self._before = weakref.ref(before) if before is not None else None
        self._back: tuple[torch.Tensor, StreamWork] | None = None

    @property
    def before(self) -> HostInput | None:
        """The input that was copied out before this one: backward needs it next."""
        return self._before() if self._before is not None else None

    def fetch(self) -> None:
        """Start to copy it back."""
        if self._back is None:
            with _stream(self.device).run() as copy:
                self._back = self.host.to(self.device, non_blocking=True, copy=True), copy

    def take(self) -> torch.Tensor:
        """The input on its device again."""
        self.fetch()
        assert self._back is not None
        (value, copy), self._back = self._back, None
        copy.join()
        return value


class HostBuffers:
    """Pinned host memory that is used again."""

    def __init__(self) -> None:
        self.free: list[torch.Tensor] = []

    def take(self, size: int) -> torch.Tensor:
        """The smallest free buffer of at least this many bytes; a new one if there is none."""
        fits = [buffer for buffer in self.free if buffer.numel() >= size]
        if not fits:
            return accelerator.host_memory((size,), torch.uint8)
        best = min(fits, key=torch.Tensor.numel)
        self.free = [buffer for buffer in self.free if buffer is not best]
        return best

    def give(self, buffer: torch.Tensor) -> None:
        """Return a buffer for reuse."""
        self.free.append(buffer)

    def release(self) -> None:
        """Give free buffers back to the system."""
        self.free = []


_leaving: dict[torch.device, tuple[HostInput, StreamWork]] = {}
"""By device, the input that was copied out last; compute has not waited for its copy yet."""
buffers = HostBuffers()


@functools.cache
def _stream(device: torch.device) -> SideStream:
    return SideStream(device)


def _join_last(device: torch.device) -> HostInput | None:
    """Make compute wait for the last copy to the host, so that its source can be freed; returns that input."""
    last = _leaving.pop(device, None)
    if last is None:
        return None
    last[1].join()
    return last[0]


def to_host(t: torch.Tensor) -> HostInput:
    """Start to copy a tensor to the host."""
    before = _join_last(t.device)
    buffer = buffers.take(t.numel() * t.element_size())
    host = buffer[: t.numel() * t.element_size()].view(t.dtype).view(t.shape)
    kept = HostInput(host, t.device, before)
    weakref.finalize(kept, buffers.give, buffer).atexit = False
    with _stream(t.device).run() as copy:
        host.copy_(t.detach(), non_blocking=True)
        copy.keep(t)
    _leaving[t.device] = kept, copy
    return kept


def from_host(kept: Any) -> Any:
    """What autograd saved, on its device again."""
    if not isinstance(kept, HostInput):
        return kept
    _join_last(kept.device)
    kept.fetch()
    if kept.before is not None:
        kept.before.fetch()
    return kept.take()
