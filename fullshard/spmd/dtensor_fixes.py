"""Corrections to torch's own `DTensor`, which parameters of FSDPv2 are: its optimizer steps are the fastest.

`import fullshard.spmd` applies all but the last. `torch_private.py` lists them among the patches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from fullshard.device import accelerator
from fullshard.device.torch_private import (
    DTensorSpec,
    custom_op_handlers,
    layout_chooser,
    local_of,
    replace_layout_chooser,
    run_in_layouts,
    spec_of,
    tree_flatten,
    tree_unflatten,
)
from fullshard.distributed import runtime
from fullshard.spmd.foreach_ops import fused_update, unscale
from fullshard.spmd.mesh import is_own
from fullshard.spmd.ops import beside_plain
from fullshard.spmd.redistribute import meta_of, redistribute, replicated, spec_with
from fullshard.spmd.rule_table import RULES, aten, written_tensors
from fullshard.spmd.rules import draw_global, local_scalar
from fullshard.spmd.tensor import DATA, ShardedTensor, as_replicated, is_sharded

# `parameter.data = value` changes the shard; torch changes the outer tensor only, whose memory is never read.
DTensor.data = DATA

# torch's handler for `GradScaler` uses the layout of the first gradient for all of them and fails on lists that also
# hold plain tensors (the gradients of FSDPv2 with ignored modules).
custom_op_handlers()[aten._amp_foreach_non_finite_check_and_unscale_.default] = unscale

# torch finds the layout of every tensor of a fused optimizer's lists, and looks each up again for the result.
for _update in (aten._fused_adamw_.default, aten._fused_adam_.default, aten._fused_sgd_.default):
    custom_op_handlers()[_update] = fused_update


def _item(op: Any, args: Any, kwargs: Any) -> Any:
    """`item()`: torch returns the shard's value, which is one term where a sum is not reduced yet."""
    return local_scalar(op, args, kwargs) if is_own(args[0].device_mesh) else op(local_of(args[0]))


custom_op_handlers()[aten._local_scalar_dense.default] = _item


# --- a penalty on sharded parameters, and the loss of a rank ----------------------------------------------------------


def _with_full_value(name: str) -> Callable[[Any, Any], Any]:
    """An arithmetic operator for a sharded scalar: beside a plain tensor of this rank its full value counts.

    A constant, which is the same on every rank, leaves it sharded.
    """
    operator: Callable[[Any, Any], Any] = getattr(torch.Tensor, name)

    @functools.wraps(operator)
    def operate(t: Any, other: Any) -> Any:
        if not t.ndim and isinstance(other, torch.Tensor) and not is_sharded(other) and _is_of_parameters(t):
            constant = not other.requires_grad and t.requires_grad and torch.is_grad_enabled()
            t = t if constant else _MeanGradient.apply(t.full_tensor(), t.device_mesh)
        return operator(t, other)

    return operate


class _MeanGradient(torch.autograd.Function):
    """A value that all ranks have and each has a gradient for: their mean counts, as for gathered parameters."""

    @staticmethod
    def forward(ctx: Any, t: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        ctx.mesh = mesh
        return t.view_as(t)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        terms = DTensorSpec(ctx.mesh, (Partial(),) * ctx.mesh.ndim, tensor_meta=meta_of(grad))
        total = redistribute(grad.contiguous(), terms, spec_with(terms, ctx.mesh, replicated(ctx.mesh)))
        return total / ctx.mesh.size(), None


def _is_of_parameters(t: Any) -> bool:
    """Whether it may have been computed from parameters of a model that each rank gives its own rows."""
    return bool(t.meets_no_plain) if isinstance(t, ShardedTensor) else is_own(t.device_mesh)


for _operator in ("add", "sub", "mul", "truediv"):
    for _name in (f"__{_operator}__", f"__r{_operator}__"):
        setattr(DTensor, _name, _with_full_value(_name))
        setattr(ShardedTensor, _name, getattr(DTensor, _name))  # no DTensor in torch 2.11


_choose_layouts = layout_chooser()


def _choose_or_run(op: Any, args: Any, kwargs: Any, info: Any, *rest: Any) -> Any:
    """Where torch chooses layouts: an operator that a plain scalar could take part in is run here.

    torch would remember its layouts, and take any scalar for the same value on every rank.
    """
    flat, tree = tree_flatten((args, kwargs))
    tensors = [t for t in flat if isinstance(t, torch.Tensor)]
    if op.is_view or not _has_scalar(flat, tensors):
        return _choose_layouts(op, args, kwargs, info, *rest)
    if all(map(is_sharded, tensors)) or not is_own(info.compute_mesh):
        return run_in_layouts(op, args, kwargs, info, _choose_layouts(op, args, kwargs, info, *rest))
    flat = beside_plain(flat, written_tensors(op, args, kwargs))
    if any(map(is_sharded, flat)):
        flat = [_on_mesh(t, info.compute_mesh) if isinstance(t, torch.Tensor) else t for t in flat]
    args, kwargs = tree_unflatten(flat, tree)
    return op(*args, **kwargs)


def _has_scalar(flat: list[Any], tensors: list[torch.Tensor]) -> bool:
    """Whether there is a scalar beside another tensor. To torch a number is one, of dtype float64 or int64."""
    if len(tensors) > 1:
        return any(t.numel() == 1 for t in tensors)
    alike = tensors[0].ndim == 0 or tensors[0].dtype == torch.float64
    return alike and any(isinstance(leaf, int | float) for leaf in flat)


def _on_mesh(t: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """A constant as torch's class."""
    if is_sharded(t):
        return t
    constant = as_replicated(t, mesh)
    return DTensor(local_of(constant), spec_of(constant), requires_grad=False)


replace_layout_chooser(_choose_or_run)


def draw_global_where_needed() -> None:
    """Let random operators on DTensors draw what one device draws, if torch does not do so on this device.

    torch has one random stream for all shards only on some accelerators; on CPUs each rank draws the same numbers.
    """
    if not accelerator.draws_by_offset(runtime.device()):
        for op in [op for op, rule in RULES.items() if rule is draw_global]:
            custom_op_handlers().setdefault(op, draw_global)
