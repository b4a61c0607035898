"""Marks that nobody honours, and optimizers that hold what was replaced: said when such a parameter is first used.

`mark_sharding` on a parameter only records a layout. A program that never distributes the module would train on whole
parameters without a word; one that made its optimizer before distributing would train nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from fullshard import runtime
from fullshard.errors import LayoutError
from fullshard.spmd.spec import Layout

_pending: WeakIdKeyDictionary = WeakIdKeyDictionary()  # marked parameters of which no use is known yet
_replaced: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameters that distribute_module has replaced → name
_looked_at: WeakSet[nn.Module | Optimizer] = WeakSet()  # since the last mark
_forward_hook: Any = None
_step_hook: Any = None
MOST_NAMES = 8


def marked(parameter: nn.Parameter, layout: Layout) -> None:
    """A layout was recorded that something has to honour."""
    global _forward_hook
    if layout.mesh.size() == 1 or not any(layout.dims):
        return  # whole either way
    _pending[parameter] = True
    _looked_at.clear()
    if _forward_hook is None:
        _forward_hook = nn.modules.module.register_module_forward_pre_hook(_before_forward)
    _watch_steps()


def cleared(parameter: torch.Tensor) -> None:
    """The layout was taken off, or is honoured."""
    _pending.pop(parameter, None)
    _rest()


def replaced(parameter: nn.Parameter, name: str) -> None:
    """Another parameter stands in this one's place."""
    cleared(parameter)
    _replaced[parameter] = name
    _looked_at.clear()
    _watch_steps()


def _watch_steps() -> None:
    global _step_hook
    if _step_hook is None:
        _step_hook = register_optimizer_step_pre_hook(_before_step)


def _rest() -> None:
    global _forward_hook
    if not _pending and _forward_hook is not None:
        _forward_hook.remove()
        _forward_hook = None


def _before_forward(module: nn.Module, args: Any) -> None:
    if torch.compiler.is_compiling() or module in _looked_at:
        return
    _looked_at.add(module)
    _remind(module.named_parameters())


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if optimizer in _looked_at:
        return
    held = [p for group in optimizer.param_groups for p in group["params"]]
    stale = [_replaced[p] for p in held if p in _replaced]
    if stale:
        raise LayoutError(
            f"this {type(optimizer).__name__} was made before distribute_module: it holds the old values of "
            f"{_listed(stale)}, which the module does not use any more; make it afterwards"
        )
    _looked_at.add(optimizer)
    _remind((f"a parameter of shape {tuple(p.shape)}", p) for p in held)


def _remind(parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
    if not _pending:
        return
    found = [(name, p) for name, p in parameters if p in _pending]
    if not found:
        return
    for _, p in found:
        _pending.pop(p)
    _rest()
    names = _listed([name for name, _ in found])
    runtime.warn_once(
        f"marked but whole: {names}",
        f"{names}: marked with mark_sharding, but whole on every rank. A mark on a parameter takes effect with "
        f"xs.distribute_module(module, mesh) or FSDPv2(module, mesh); call one before the first forward pass.",
    )


def _listed(names: list[str]) -> str:
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
