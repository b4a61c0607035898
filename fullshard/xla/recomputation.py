"""Activation checkpointing on XLA: activations are computed again in backward, and the compiler cannot undo that.

The compiler's common-subexpression elimination removes what is computed twice, so the second computation starts from
the inputs behind an optimization barrier. The barrier includes the gradients that start backward: nothing is recomputed
before them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from fullshard.spmd.tensor_tree import tensors_in

Scope = Callable[[], contextlib.AbstractContextManager[Any]]
_scopes: list[Scope] = []


def _xm() -> Any:
    import torch_xla.core.xla_model as xm  # takes seconds, so not before the first use

    return xm


@contextlib.contextmanager
def kept_for_recomputation(scope: Scope) -> Iterator[None]:
    """Enter a scope, and again when calls inside it are recomputed."""
    _scopes.append(scope)
    try:
        with scope():
            yield
    finally:
        _scopes.pop()


def checkpoint(function: Callable[..., Any], *args: Any, use_reentrant: bool = False, **kwargs: Any) -> Any:
    """Call `function`; what its backward needs is computed again then. Inputs need not require gradients.

    `use_reentrant` changes nothing: both ways record the same program.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    call = _Call(function, args, kwargs)
    output = torch_checkpoint(call, use_reentrant=False)
    for t in tensors_in(output):
        if t.requires_grad:
            t.register_hook(call.gradients.append)
    return output


class _Call:
    """A call that is recorded once in forward, and again in backward."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.function = functools.partial(function, *args, **kwargs)
        self.scopes = tuple(_scopes)
        self.gradients: list[torch.Tensor] = []
        """Of the outputs, when backward arrives at them."""
        self.seed: int | None = None
        self.autocast = (torch.get_autocast_dtype("xla"), torch.is_autocast_enabled("xla"))

    def __call__(self) -> Any:
        if self.seed is None:
            self.seed = _xm().get_rng_state()
            return self.function()
        self._put_barrier()
        dtype, enabled = self.autocast
        with contextlib.ExitStack() as stack:
            stack.enter_context(_xm().fork_rng())
            _xm().set_rng_state(self.seed)
            stack.enter_context(torch.autocast("xla", dtype=dtype, enabled=enabled))
            for scope in self.scopes:
                stack.enter_context(scope())
            return self.function()

    def _put_barrier(self) -> None:
        inputs = list(tensors_in((self.function.args, self.function.keywords)))
        own = [t for module in _modules_of(self.function) for t in (*module.parameters(), *module.buffers())]
        behind = {id(t): t for t in (*inputs, *self.gradients, *own) if t.device.type == "xla"}
        _xm().optimization_barrier_(list(behind.values()))
        self.gradients.clear()


def _modules_of(function: Any) -> Iterator[nn.Module]:
    """The modules that a function is bound to or gets as arguments."""
    while isinstance(function, functools.partial):
        yield from (value for value in function.args if isinstance(value, nn.Module))
        function = function.func
    owner = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    if isinstance(owner, nn.Module):
        yield owner
