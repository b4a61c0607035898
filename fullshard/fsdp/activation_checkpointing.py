"""Activation checkpointing: a module's activations are recomputed in backward instead of being kept.

With `offload`, the module's inputs are kept in host memory until backward; copies both ways run beside compute.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fullshard import accelerator
from fullshard.fsdp.streams import SideStream, StreamWork
from fullshard.fsdp.tensor_tree import tensors_in
from fullshard.spmd.tensor import is_sharded


class _Checkpointed:
    """A module's forward whose activations are recomputed in backward."""

    def __init__(self, forward: Any, reentrant: bool, offload: bool):
        functools.update_wrapper(self, forward)
        self.forward, self.reentrant, self.offload = forward, reentrant, offload

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        if self.offload:
            # Re-entrant checkpointing saves its inputs and nothing else.
            with torch.autograd.graph.saved_tensors_hooks(_to_host, _from_host):
                return self._reentrant(args, kwargs)
        if not self.reentrant:
            return checkpoint(self.forward, *args, use_reentrant=False, **kwargs)
        return self._reentrant(args, kwargs)

    def _reentrant(self, args: Any, kwargs: Any) -> Any:
        # Re-entrant checkpointing passes gradients through positional tensor arguments only.
        if not any(t.requires_grad for t in tensors_in(args)):
            return checkpoint(self.forward, *args, use_reentrant=False, **kwargs)
        return checkpoint(functools.partial(self.forward, **kwargs), *args, use_reentrant=True)


def checkpoint_module(module: nn.Module, *, reentrant: bool = False, offload: bool = False) -> nn.Module:
    """Recompute the module's activations in backward. Call it before or after wrapping; a second call has no effect.

    `offload` keeps the module's inputs in host memory until then, and implies re-entrant checkpointing.

    Inside a sharded model the recomputation uses the values gathered for the unit's backward: nothing is gathered
    twice.
    """
    if isinstance(module.__dict__.get("forward"), _Checkpointed):
        return module
    module.forward = _Checkpointed(module.forward, reentrant, offload)
    return module


# --- inputs in host memory ------------------------------------------------------------------------------------------


class _HostInput:
    """One input in host memory."""

    def __init__(self, host: torch.Tensor, device: torch.device, before: _HostInput | None):
        self.host, self.device = host, device
        self._before = weakref.ref(before) if before is not None else None
        self._back: tuple[torch.Tensor, StreamWork] | None = None

    @property
    def before(self) -> _HostInput | None:
        """The input that was copied out before this one: backward needs it next."""
        return self._before() if self._before is not None else None

    def fetch(self) -> None:
        """Start to copy it back."""
        if self._back is None:
            with _stream(self.device).run() as copy:
                self._back = self.host.to(self.device, non_blocking=True), copy

    def take(self) -> torch.Tensor:
        """The input on its device again."""
        self.fetch()
        assert self._back is not None
        (value, copy), self._back = self._back, None
        copy.join()
        return value


_leaving: dict[torch.device, tuple[_HostInput, StreamWork]] = {}
"""By device, the input that was copied out last; compute has not waited for its copy yet."""


@functools.cache
def _stream(device: torch.device) -> SideStream:
    return SideStream(device)


def _join_last(device: torch.device) -> _HostInput | None:
    """Make compute wait for the last copy to the host, so that its source can be freed; returns that input."""
    last = _leaving.pop(device, None)
    if last is None:
        return None
    last[1].join()
    return last[0]


def _to_host(t: torch.Tensor) -> Any:
    if is_sharded(t) or not accelerator.is_accelerator(t.device):
        return t
    before = _join_last(t.device)
    with _stream(t.device).run() as copy:
        kept = _HostInput(accelerator.pinned(t.shape, t.dtype).copy_(t, non_blocking=True), t.device, before)
        copy.keep(t)
    _leaving[t.device] = kept, copy
    return kept


def _from_host(kept: Any) -> Any:
    if not isinstance(kept, _HostInput):
        return kept
    _join_last(kept.device)
    kept.fetch()
    if kept.before is not None:
        kept.before.fetch()
    return kept.take()
