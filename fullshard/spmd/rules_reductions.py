"""Rules for reductions over dims that may be split, with the results of one device.

- Sums in fp16 and bf16 are computed and communicated in fp32, and rounded once.
- A maximum or minimum is NaN if any shard has a NaN, which no backend guarantees; empty shards are ignored. `any` and
  `all` are computed as a maximum and a minimum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from fullshard.spmd.redistribute import NARROW, redistribute, replicated, spec_with, unsplit, without_partial
from fullshard.spmd.rule_table import rule_for
from fullshard.spmd.rules_elementwise import wrapped
from fullshard.spmd.tensor import ShardedTensor, is_sharded, redistributed
from fullshard.torch_private import local_of, schema_of, spec_of

aten = torch.ops.aten


def _argument(op: Any, args: Any, kwargs: Any, name: str) -> Any:
    """An argument by name, positional or keyword, or its default."""
    for index, a in enumerate(schema_of(op).arguments):
        if a.name == name:
            return args[index] if index < len(args) else kwargs.get(name, a.default_value)
    return None


def _dims(op: Any, args: Any, kwargs: Any) -> tuple[int, ...]:
    """The dims that are reduced: all, if none are given."""
    t, dims = args[0], _argument(op, args, kwargs, "dim")
    dims = (dims,) if isinstance(dims, int) else dims
    if not dims or not t.ndim:
        return tuple(range(t.ndim))
    return tuple(dim % t.ndim for dim in dims)


def _count(t: torch.Tensor, dims: Sequence[int]) -> int:
    return math.prod(t.shape[dim] for dim in dims)


def _splits(t: DTensor, dims: Sequence[int]) -> bool:
    """Whether a reduction over `dims` combines several shards, or terms of a `Partial`."""
    return any(p.is_partial() or (isinstance(p, Shard) and p.dim in dims) for p in t.placements)


# --- sums ------------------------------------------------------------------------------------------------------------


def narrowed(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`t` cast to another dtype; a `Partial` is reduced first."""
    return redistributed(t, t.device_mesh, without_partial(t.placements)).to(dtype) if is_sharded(t) else t.to(dtype)


@rule_for("sum", "sum.dim_IntList")
def total(op: Any, args: Any, kwargs: Any) -> Any:
    t, dtype = args[0], kwargs.get("dtype") or args[0].dtype
    dims, keeps = _dims(op, args, kwargs), bool(_argument(op, args, kwargs, "keepdim"))
    if dtype in NARROW and _splits(t, dims):
        return narrowed(aten.sum.dim_IntList(t, list(dims), keeps, dtype=torch.float32), dtype)
    if op is aten.sum.dim_IntList and list(args[1] or ()) != list(dims):  # no dims means all dims
        return aten.sum.dim_IntList(t, list(dims), keeps, **kwargs)
    return NotImplemented


@rule_for("prod", "prod.dim_int")
def product(op: Any, args: Any, kwargs: Any) -> Any:
    t, dtype = args[0], kwargs.get("dtype") or args[0].dtype
    if dtype not in NARROW or not _splits(t, _dims(op, args, kwargs)):
        return NotImplemented
    return narrowed(op(*args, **{**kwargs, "dtype": torch.float32}), dtype)


@rule_for("mean", "mean.dim")
def mean(op: Any, args: Any, kwargs: Any) -> Any:
    t, dtype = args[0], kwargs.get("dtype") or args[0].dtype
    dims, keeps = _dims(op, args, kwargs), bool(_argument(op, args, kwargs, "keepdim"))
    if not (dtype.is_floating_point or dtype.is_complex):
        return NotImplemented  # raises the error of one device
    wide = torch.float32 if dtype in NARROW else dtype
    average = aten.sum.dim_IntList(t, list(dims), keeps, dtype=wide) / _count(t, dims)
    return average if wide == dtype else narrowed(average, dtype)


@rule_for("var_mean.correction")
def var_mean(op: Any, args: Any, kwargs: Any) -> Any:
    t, dims, keeps = args[0], _dims(op, args, kwargs), kwargs.get("keepdim", False)
    correction = 1 if kwargs.get("correction") is None else kwargs["correction"]
    wide = t.to(torch.float32) if t.dtype in NARROW else t
    average = aten.mean.dim(wide, list(dims), True)
    off = (wide - average).abs() if t.is_complex() else wide - average
    spread = aten.sum.dim_IntList(off.square(), list(dims), keeps) / max(_count(t, dims) - correction, 0)
    average = average if keeps else average.reshape(spread.shape)
    return tuple(narrowed(r, t.dtype) if t.dtype in NARROW else r for r in (spread, average))


@rule_for("linalg_vector_norm")
def vector_norm(op: Any, args: Any, kwargs: Any) -> Any:
    """A norm of infinite order is a maximum or minimum, the others are sums."""
    t, order = args[0], _argument(op, args, kwargs, "ord")
    dims, keeps = _dims(op, args, kwargs), bool(_argument(op, args, kwargs, "keepdim"))
    dtype = kwargs.get("dtype") or t.dtype
    if not _splits(t, dims):
        return NotImplemented
    if math.isinf(order) and _count(t, dims):
        magnitude = (t if dtype == t.dtype else t.to(dtype)).abs()
        return (aten.amax if order > 0 else aten.amin).default(magnitude, list(dims), keeps)
    if dtype in NARROW:
        return narrowed(op(*args, **{**kwargs, "dtype": torch.float32}), dtype)
    return NotImplemented


# --- maxima and minima -----------------------------------------------------------------------------------------------

EXTREMES = {"amax": "max", "max": "max", "any": "max", "amin": "min", "min": "min", "all": "min"}


@rule_for("amax", "amin", "max", "min", "any", "any.dim", "any.dims", "all", "all.dim", "all.dims")
def extreme(op: Any, args: Any, kwargs: Any) -> Any:
    t, dims = args[0], _dims(op, args, kwargs)
    named = schema_of(op).name.removeprefix("aten::")
    logical, way = named in ("any", "all"), EXTREMES[named]
    if not _splits(t, dims) or not (logical or _count(t, dims)) or t.dtype.is_complex:
        return NotImplemented
    t = redistributed(t, t.device_mesh, without_partial(t.placements))
    keeps = bool(_argument(op, args, kwargs, "keepdim"))
    shape = [1 if dim in dims else size for dim, size in enumerate(t.shape)]
    local = local_of(t).bool() if logical else local_of(t)
    if local.numel():
        found = getattr(aten, f"a{way}").default(local, list(dims), True)
    else:
        kept = [1 if dim in dims else size for dim, size in enumerate(local.shape)]
        dtype = torch.bool if logical else t.dtype
        found = torch.full(kept, neutral(dtype, way), dtype=dtype, device=local.device)
    placements: list[Placement] = [Partial(way) if isinstance(p, Shard) and p.dim in dims else p for p in t.placements]
    out = reduce_extreme(wrapped(found, t.device_mesh, placements, shape))
    if logical and t.dtype == torch.uint8:
        out = out.to(torch.uint8)
    return out if keeps else out.reshape([size for dim, size in enumerate(t.shape) if dim not in dims])


def neutral(dtype: torch.dtype, way: str) -> float | int | bool:
    """The value that does not change a maximum (or minimum)."""
    if dtype == torch.bool:
        return way == "min"
    if dtype.is_floating_point:
        return -math.inf if way == "max" else math.inf
    return torch.iinfo(dtype).min if way == "max" else torch.iinfo(dtype).max


def reduce_extreme(t: ShardedTensor) -> ShardedTensor:
    """Reduce a `Partial` maximum or minimum; NaN wins over every number."""
    if without_partial(t.placements) == tuple(t.placements):
        return t
    local = local_of(t)
    done = spec_with(spec_of(t), t.device_mesh, without_partial(t.placements))
    if t.dtype == torch.bool:
        out = redistribute(local.to(torch.uint8), spec_of(t), done).bool()
    elif not t.dtype.is_floating_point:
        out = redistribute(local, spec_of(t), done)
    else:
        way = next(p.reduce_op for p in t.placements if isinstance(p, Partial))
        nan = local.isnan()
        out = redistribute(local.masked_fill(nan, neutral(t.dtype, way)), spec_of(t), done)
        maximum = [Partial("max") if p.is_partial() else p for p in t.placements]
        any_nan = redistribute(nan.to(torch.uint8), spec_with(spec_of(t), t.device_mesh, maximum), done)
        out = out.masked_fill(any_nan.bool(), math.nan)
    return ShardedTensor(out, done, requires_grad=False)


@rule_for("aminmax")
def both_extremes(op: Any, args: Any, kwargs: Any) -> Any:
    t, dim, keeps = args[0], kwargs.get("dim"), kwargs.get("keepdim", False)
    dims = list(range(t.ndim)) if dim is None else [dim]
    if not _count(t, _dims(aten.amin.default, (t, dims), {})):
        return NotImplemented
    return aten.amin.default(t, dims, keeps), aten.amax.default(t, dims, keeps)


@rule_for("argmax", "argmin")
def extreme_index(op: Any, args: Any, kwargs: Any) -> Any:
    """The index of the largest element: its dim must not be split, the others may be."""
    t, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim")
    keeps = args[2] if len(args) > 2 else kwargs.get("keepdim", False)
    mesh, shape = t.device_mesh, list(t.shape)
    if dim is None or t.ndim == 0:
        layout, out, shape = replicated(mesh), replicated(mesh), [1] * t.ndim if keeps else []
    else:
        dim %= t.ndim
        layout = unsplit(t, {dim})
        shift = [p.dim - (p.dim > dim and not keeps) if isinstance(p, Shard) else None for p in layout]
        out = tuple(Replicate() if d is None else Shard(d) for d in shift)
        shape = [*shape[:dim], *([1] if keeps else []), *shape[dim + 1 :]]
    local = redistribute(local_of(t), spec_of(t), spec_with(spec_of(t), mesh, layout))
    return wrapped(op(local, *args[1:], **kwargs), mesh, out, shape)
