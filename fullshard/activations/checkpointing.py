"""Activation checkpointing: a module's activations are recomputed in backward instead of being kept.

A recomputed module's `forward` is a bound function of this file, the same one for all modules, so that modules of one
class share their compiled code: `torch.compile` makes one variant for each way of recomputing. The engine recomputes;
how the inputs of a recomputed module wait in host memory is in `offload.py`.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from fullshard.activations.offload import inputs_on_host
from fullshard.distributed import engines
from fullshard.fsdp.compile import never_compile
from fullshard.spmd.tensor_tree import tensors_in

OWN = "_fullshard_own_forward"
"""The attribute for a `forward` that the module itself had, not its class: a function of the module and its inputs."""


def checkpoint_module(module: nn.Module, *, reentrant: bool = False, offload: bool = False) -> nn.Module:
    """Recompute the module's activations in backward. Call it before or after wrapping; a second call has no effect.

    `offload` keeps the module's inputs in host memory until then. It is not meant for the last module of a model, whose
    inputs are needed again at once.

    Inside a sharded model the recomputation uses the values gathered for the unit's backward: nothing is gathered
    twice.
    """
    if offload:
        engines.require("inputs in host memory", "checkpoint_module(offload=True)")
    if is_checkpointed(module):
        return module
    way = _ways().from_host if offload else _ways().reentrant if reentrant else _ways().recomputed
    if offload:
        never_compile(way)  # what it calls is compiled: the same code as without offload
    replace_forward(module, way)
    return module


def keep_activations(module: nn.Module) -> nn.Module:
    """Undo `checkpoint_module`."""
    if is_checkpointed(module):
        restore_forward(module)
    return module


def replace_forward(module: nn.Module, way: Callable[..., Any]) -> None:
    """Let calls of a module run a function of the module and its inputs, which calls `own_forward`."""
    if "forward" in vars(module):
        module.__dict__[OWN] = _unbound(module, module.forward)
    module.forward = types.MethodType(way, module)


def restore_forward(module: nn.Module) -> None:
    """Undo `replace_forward`."""
    del module.forward
    if OWN in vars(module):
        module.forward = types.MethodType(module.__dict__.pop(OWN), module)


def own_forward(module: nn.Module) -> Callable[..., Any]:
    """The forward of a module whose forward was replaced: a function of the module and its inputs."""
    forward: Callable[..., Any] = module.__dict__.get(OWN) or type(module).forward
    return forward


def _unbound(module: nn.Module, forward: Any) -> Any:
    if getattr(forward, "__self__", None) is module:
        return forward.__func__  # shared by modules, and so is their compiled code
    return functools.wraps(forward)(lambda _, *args, **kwargs: forward(*args, **kwargs))


def is_checkpointed(module: nn.Module) -> bool:
    """Whether the module's activations are recomputed."""
    return getattr(vars(module).get("forward"), "__func__", None) in _ways()


class _Ways(NamedTuple):
    """The `forward` of a recomputed module, in each way: one function for all modules, so that they share code."""

    recomputed: Callable[..., Any]
    reentrant: Callable[..., Any]
    from_host: Callable[..., Any]


@functools.cache
def _ways() -> _Ways:
    checkpoint = engines.current().checkpoint

    def recomputed(module: Any, *args: Any, **kwargs: Any) -> Any:
        forward = own_forward(module)
        if not torch.is_grad_enabled():
            return forward(module, *args, **kwargs)
        return checkpoint(forward, module, *args, use_reentrant=False, **kwargs)

    def reentrant(module: Any, *args: Any, **kwargs: Any) -> Any:
        # Re-entrant checkpointing passes gradients through positional tensor arguments only.
        if not torch.is_grad_enabled() or not any(t.requires_grad for t in tensors_in(args)):
            return recomputed(module, *args, **kwargs)
        forward = own_forward(module)
        return checkpoint(functools.partial(forward, module, **kwargs), *args, use_reentrant=True)

    def from_host(module: Any, *args: Any, **kwargs: Any) -> Any:
        with inputs_on_host(args if torch.is_grad_enabled() else ()):
            return recomputed(module, *args, **kwargs)

    return _Ways(recomputed, reentrant, from_host)
