"""Writes to a view that does not share memory with its base.

A view that needs data of other ranks (`x[0]` if dim 0 is split) is a copy. A write to it must still reach the base, as
on one device: the view records the operator that made it, and a write is applied to the base too.
"""

from __future__ import annotations

from typing import Any

import torch

from fullshard.config.errors import LayoutError
from fullshard.device.torch_private import tree_leaves

aten = torch.ops.aten


def remember_base(out: Any, op: Any, base: torch.Tensor, args: Any, kwargs: Any) -> None:
    """Record that the tensors in `out` are copies of `op(base, *args)`."""
    for position, t in enumerate(tree_leaves(out)):
        if isinstance(t, torch.Tensor):
            t._copy_of = (*_one_of_several(op, base, args, kwargs, position), base)


def _one_of_several(op: Any, base: torch.Tensor, args: Any, kwargs: Any, position: int) -> tuple[Any, Any, Any]:
    """The operator and arguments that return only one of the several views of `op`."""
    if op not in (aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int):
        return op, args, kwargs
    if op is aten.unbind.int:
        return aten.select.int, (args[0] if args else kwargs.get("dim", 0), position), {}
    sizes, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0)
    ends = [size * (i + 1) for i, size in enumerate([sizes] * (position + 1))] if isinstance(sizes, int) else None
    ends = ends or [sum(sizes[: i + 1]) for i in range(position + 1)]
    start = ends[position - 1] if position else 0
    return aten.slice.Tensor, (dim, start, min(ends[position], base.shape[dim])), {}


def is_copy(t: Any) -> bool:
    """Whether a view is a copy whose writes are applied to its base."""
    return getattr(t, "_copy_of", None) is not None


def write_through(t: torch.Tensor) -> None:
    """After a write to `t`: write to its base too, if `t` is a copy."""
    source = getattr(t, "_copy_of", None)
    if source is None:
        return
    op, args, kwargs, base = source
    base.copy_(_put_back(op, base, t, args, kwargs))


def _put_back(op: Any, base: torch.Tensor, view: torch.Tensor, args: Any, kwargs: Any) -> torch.Tensor:
    if op is aten.slice.Tensor:
        return aten.slice_scatter.default(base, view, *args, **kwargs)
    if op is aten.select.int:
        return aten.select_scatter.default(base, view, *args, **kwargs)
    if op is aten.as_strided.default:
        return aten.as_strided_scatter.default(base, view, *args, **kwargs)
    if op in (aten.view.default, aten._unsafe_view.default, aten.unsqueeze.default, aten.reshape.default):
        return view.reshape(base.shape)
    if op in (aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.alias.default, aten.detach.default):
        return view.reshape(base.shape)
    if op is aten.diagonal.default:
        return aten.diagonal_scatter.default(base, view, *args, **kwargs)
    if op in (aten.t.default, aten.transpose.int):  # they are their own inverse
        return op(view, *args, **kwargs)
    if op is aten.permute.default:
        return view.permute([[d % base.ndim for d in args[0]].index(dim) for dim in range(base.ndim)])
    raise LayoutError(
        f"a write to a view made by {op} of a tensor of shape {tuple(base.shape)}: the view is a copy, because it "
        f"needs data of other ranks, so the write would not reach its base; write to the base, or do not split that dim"
    )
