"""Activation checkpointing: a module's activations are computed again in backward instead of being kept."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fullshard.fsdp.tree import tensors_in


class _Checkpointed:
    """A module's forward, with its activations computed again in backward."""

    def __init__(self, forward: Any, reentrant: bool, offload: bool):
        functools.update_wrapper(self, forward)
        self.forward, self.reentrant, self.offload = forward, reentrant, offload

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        if self.offload:
            # What the re-entrant kind saves are its inputs, and nothing else.
            with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
                return self._reentrant(args, kwargs)
        if not self.reentrant:
            return checkpoint(self.forward, *args, use_reentrant=False, **kwargs)
        return self._reentrant(args, kwargs)

    def _reentrant(self, args: Any, kwargs: Any) -> Any:
        # The re-entrant kind follows gradients through positional tensor arguments only.
        if not any(t.requires_grad for t in tensors_in(args)):
            return checkpoint(self.forward, *args, use_reentrant=False, **kwargs)
        return checkpoint(functools.partial(self.forward, **kwargs), *args, use_reentrant=True)


def checkpoint_module(module: nn.Module, *, reentrant: bool = False, offload: bool = False) -> nn.Module:
    """Compute the module's activations again in backward. Before or after wrapping; a second call changes nothing.

    `offload` keeps the module's inputs in host memory until then, and takes the re-entrant kind.

    Inside a sharded model the recomputation uses the values gathered for the unit's backward: nothing is gathered
    twice.
    """
    if isinstance(module.__dict__.get("forward"), _Checkpointed):
        return module
    module.forward = _Checkpointed(module.forward, reentrant, offload)
    return module
