"""Warnings about marked parameters that were never sharded, and errors about optimizers of replaced parameters.

`mark_sharding` on a parameter only records a layout. A program that never distributes the module would train on full
parameters without notice; one that made its optimizer before distributing would train nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from fullshard.config.errors import LayoutError
from fullshard.distributed import runtime
from fullshard.spmd.spec import Layout

_pending: WeakIdKeyDictionary = WeakIdKeyDictionary()  # marked parameters that were neither sharded nor warned about
_replaced: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameters that distribute_module replaced → name
_checked: WeakSet[nn.Module | Optimizer] = WeakSet()  # since the last mark
_forward_hook: Any = None
_step_hook: Any = None
MAX_NAMES = 8


def marked(parameter: nn.Parameter, layout: Layout) -> None:
    """A layout was recorded on a parameter."""
    global _forward_hook
    if layout.mesh.size() == 1 or not any(layout.dims):
        return  # the layout changes nothing
    _pending[parameter] = True
    _checked.clear()
    if _forward_hook is None:
        _forward_hook = nn.modules.module.register_module_forward_pre_hook(_before_forward)
    _hook_steps()


def cleared(parameter: torch.Tensor) -> None:
    """The layout was removed, or applied."""
    _pending.pop(parameter, None)
    _remove_hook_if_unused()


def replaced(parameter: nn.Parameter, name: str) -> None:
    """The parameter was replaced by a sharded one."""
    cleared(parameter)
    _replaced[parameter] = name
    _checked.clear()
    _hook_steps()


def _hook_steps() -> None:
    global _step_hook
    if _step_hook is None:
        _step_hook = register_optimizer_step_pre_hook(_before_step)


def _remove_hook_if_unused() -> None:
    global _forward_hook
    if not _pending and _forward_hook is not None:
        _forward_hook.remove()
        _forward_hook = None


def _before_forward(module: nn.Module, args: Any) -> None:
    if torch.compiler.is_compiling() or module in _checked:
        return
    _checked.add(module)
    _warn(module.named_parameters())


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if optimizer in _checked:
        return
    params = [p for group in optimizer.param_groups for p in group["params"]]
    stale = [_replaced[p] for p in params if p in _replaced]
    if stale:
        raise LayoutError(
            f"this {type(optimizer).__name__} was made before distribute_module: it has the old parameters "
            f"{_listed(stale)}, which the module does not use any more; make it after distribute_module"
        )
    _checked.add(optimizer)
    _warn((f"a parameter of shape {tuple(p.shape)}", p) for p in params)


def _warn(parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
    if not _pending:
        return
    unused = [(name, p) for name, p in parameters if p in _pending]
    if not unused:
        return
    for _, p in unused:
        _pending.pop(p)
    _remove_hook_if_unused()
    names = _listed([name for name, _ in unused])
    runtime.warn_once(
        f"marked but not sharded: {names}",
        f"{names}: marked with mark_sharding, but not sharded. A mark on a parameter takes effect with "
        f"xs.distribute_module(module, mesh) or FSDPv2(module, mesh); call one before the first forward pass.",
    )


def _listed(names: list[str]) -> str:
    more = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f" and {more} more" if more > 0 else "")
