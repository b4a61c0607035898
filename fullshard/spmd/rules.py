"""Our own sharding rules, for operators for which torch has no rule, or one that is not exact.

Attention, convolutions and pooling are in `rules_elementwise.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from fullshard.device import accelerator
from fullshard.device.torch_private import (
    DTensorSpec,
    decomposition_table,
    is_in_mesh,
    local_of,
    random_ops,
    schema_of,
    set_local,
    set_spec,
    spec_of,
    tree_map,
)
from fullshard.distributed import runtime
from fullshard.spmd.redistribute import (
    NARROW,
    has_partial,
    layout_of,
    meta_of,
    redistribute,
    replicated,
    spec_with,
    unsplit,
    without_partial,
)
from fullshard.spmd.replicate import rule_replicated
from fullshard.spmd.rule_table import RULES, Rule, rule_for
from fullshard.spmd.rules_elementwise import INDEPENDENT, Independent, wrapped
from fullshard.spmd.tensor import ShardedTensor, is_sharded, redistributed

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
    """Sums in a narrow dtype over split dims: computed in fp32 and rounded once; others are torch's."""
    t, dtype = args[0], kwargs.get("dtype") or args[0].dtype
    dims, keeps = _dims(op, args, kwargs), bool(_argument(op, args, kwargs, "keepdim"))
    if dtype in NARROW and _splits(t, dims):
        return narrowed(aten.sum.dim_IntList(t, list(dims), keeps, dtype=torch.float32), dtype)
    if op is aten.sum.dim_IntList and list(args[1] or ()) != list(dims):  # no dims means all dims
        return aten.sum.dim_IntList(t, list(dims), keeps, **kwargs)
    return NotImplemented


@rule_for("prod", "prod.dim_int")
def product(op: Any, args: Any, kwargs: Any) -> Any:
    """Products in a narrow dtype: computed in fp32 and rounded once."""
    t, dtype = args[0], kwargs.get("dtype") or args[0].dtype
    if dtype not in NARROW or not _splits(t, _dims(op, args, kwargs)):
        return NotImplemented
    return narrowed(op(*args, **{**kwargs, "dtype": torch.float32}), dtype)


@rule_for("mean", "mean.dim")
def mean(op: Any, args: Any, kwargs: Any) -> Any:
    """Means: a sum, divided by the global number of values."""
    t, dtype = args[0], kwargs.get("dtype") or args[0].dtype
    dims, keeps = _dims(op, args, kwargs), bool(_argument(op, args, kwargs, "keepdim"))
    if not (dtype.is_floating_point or dtype.is_complex):
        return NotImplemented  # raises the error of one device
    wide = torch.float32 if dtype in NARROW else dtype
    average = aten.sum.dim_IntList(t, list(dims), keeps, dtype=wide) / _count(t, dims)
    return average if wide == dtype else narrowed(average, dtype)


@rule_for("var_mean.correction")
def var_mean(op: Any, args: Any, kwargs: Any) -> Any:
    """Variances and means over split dims."""
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
    """Largest and smallest values, exact on uneven and empty shards."""
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
        extremes = getattr(aten, f"a{way}").default(local, list(dims), True)
    else:
        kept = [1 if dim in dims else size for dim, size in enumerate(local.shape)]
        dtype = torch.bool if logical else t.dtype
        extremes = torch.full(kept, neutral(dtype, way), dtype=dtype, device=local.device)
    placements: list[Placement] = [Partial(way) if isinstance(p, Shard) and p.dim in dims else p for p in t.placements]
    out = reduce_extreme(wrapped(extremes, t.device_mesh, placements, shape))
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
    """Largest and smallest value together."""
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


aten = torch.ops.aten


def find_rule(op: Any, flat: list[Any]) -> Rule | None:
    """Our rule for an operator; None without one."""
    if torch.Tag.nondeterministic_seeded in op.tags and not _torch_draws(op, flat):
        return RULES.get(op, draw_replicated)
    return RULES.get(op)


for _name, (_pattern, _split) in INDEPENDENT.items():
    rule_for(_name)(Independent(_pattern, _split))


# --- random numbers --------------------------------------------------------------------------------------------------


@rule_for(
    "bernoulli_.float", "bernoulli_.Tensor", "uniform_", "normal_", "exponential_", "random_", "random_.from",
    "random_.to", "cauchy_", "log_normal_", "geometric_", "rand_like", "randn_like", "randint_like",
    "randint_like.low_dtype", "bernoulli", "bernoulli.p", "multinomial",
)  # fmt: skip
def draw_global(op: Any, args: Any, kwargs: Any) -> Any:
    """Random numbers as one device draws them: every rank draws all of them from the shared generator and keeps its
    shard."""
    target: DTensor = args[0]
    mesh, local = target.device_mesh, local_of(target)
    reads = schema_of(op).name in ("aten::bernoulli", "aten::multinomial")  # its input holds probabilities
    full_spec = DTensorSpec(mesh, replicated(mesh), tensor_meta=spec_of(target).tensor_meta)
    full = redistribute(local, spec_of(target), full_spec) if reads else local.new_empty(target.shape)
    others = tree_map(lambda t: t.full_tensor() if is_sharded(t) else t, (args[1:], kwargs))
    drawn = op(full, *others[0], **others[1])
    placements = without_partial(target.placements) if drawn.shape == target.shape else replicated(mesh)
    spec = DTensorSpec(mesh, replicated(mesh), tensor_meta=meta_of(drawn))
    shard = redistribute(drawn, spec, spec_with(spec, mesh, placements))
    if drawn is not full:
        kind = ShardedTensor if isinstance(target, ShardedTensor) else DTensor  # parameters of FSDPv2 are DTensors
        return kind(shard.contiguous(), spec_with(spec, mesh, placements), requires_grad=False)
    set_local(target, local.copy_(shard) if shard.shape == local.shape else shard.contiguous())
    set_spec(target, spec_with(spec_of(target), mesh, placements))
    return target


def draw_replicated(op: Any, args: Any, kwargs: Any) -> Any:
    """Any other random operator: on full values, from the shared generator."""
    return rule_replicated(op, args, kwargs)


@rule_for("linalg_solve_triangular")
def not_trusted(op: Any, args: Any, kwargs: Any) -> Any:
    """Operators for which torch's rule is wrong: they run replicated."""
    return rule_replicated(op, args, kwargs, "torch's sharding rule splits one of its two matrices and not the other")


def _torch_draws(op: Any, flat: list[Any]) -> bool:
    """Whether torch draws each shard from its own part of one random stream, as it does on CUDA."""
    if "scaled_dot_product" in op.__name__:  # dropout is optional there; torch has a rule
        return True
    target = next(leaf for leaf in flat if is_sharded(leaf))
    known = op in random_ops()
    return known and accelerator.draws_by_offset(target.device) and layout_of(spec_of(target)).is_even(target.shape)


# --- embeddings ------------------------------------------------------------------------------------------------------


@rule_for("embedding")
def embedding(op: Any, args: Any, kwargs: Any) -> Any:
    """Look up rows of a table that may be split by rows: each rank looks up its own rows and returns zeros for the
    others, and the result is `Partial`."""
    weight, indices = args[0], args[1]
    mesh = weight.device_mesh
    rows: list[Placement] = list(without_partial(weight.placements))
    tokens: list[Placement] = list(without_partial(indices.placements))
    out: list[Placement] = []
    for i, row in enumerate(rows):
        if isinstance(row, Shard):
            tokens[i] = Replicate()  # ids take less memory than rows
            out.append(Partial() if row.dim == 0 else Shard(indices.ndim))
        else:
            out.append(tokens[i])
    table, ids = local_in(weight, rows), local_in(indices, tokens)
    local_rows = layout_of(spec_with(spec_of(weight), mesh, rows)).slices(weight.shape, runtime.rank())[0]
    if any(isinstance(p, Partial) for p in out):
        local_ids = ids - local_rows.start
        not_here = (local_ids < 0) | (local_ids >= local_rows.stop - local_rows.start)
        if table.shape[0] == 0:
            vectors = table.new_zeros(*ids.shape, table.shape[1])
        else:
            vectors = op(table, local_ids.masked_fill(not_here, 0), *args[2:], **kwargs)
        vectors = vectors.masked_fill(not_here.unsqueeze(-1), 0)
    else:
        vectors = op(table, ids, *args[2:], **kwargs)
    return wrapped(vectors, mesh, out, (*indices.shape, weight.shape[1]))


@rule_for("embedding_dense_backward")
def embedding_dense_backward(op: Any, args: Any, kwargs: Any) -> Any:
    """The gradient of a table: each rank adds up its ids or its rows."""
    grad, indices, rows = args[0], args[1], args[2]
    mesh = grad.device_mesh
    incoming: list[Placement] = []
    tokens: list[Placement] = []
    out: list[Placement] = []
    for placement in grad.placements:
        split = isinstance(placement, Shard)
        if split and placement.dim < indices.ndim:
            step = (placement, Shard(placement.dim), Partial())
        elif split:
            step = (placement, Replicate(), Shard(1))
        elif placement.is_partial() and placement.reduce_op == "sum":  # linear in the gradient
            step = (placement, Replicate(), Partial())
        else:
            step = (Replicate(), Replicate(), Replicate())
        for kept, now in zip((incoming, tokens, out), step, strict=True):
            kept.append(now)
    local = op(local_in(grad, incoming), local_in(indices, tokens), *args[2:], **kwargs)
    return wrapped(local, mesh, out, (rows, grad.shape[-1]))


# --- losses, comparisons, padding, scalars ---------------------------------------------------------------------------


@rule_for("nll_loss_forward", "nll_loss2d_forward")
def nll_loss_forward(op: Any, args: Any, kwargs: Any) -> Any:
    """Cross-entropy; a mean is over the unmasked tokens of the global batch, not a mean of the shards' means."""
    scores, target, weight, reduction, ignored = args
    mesh = scores.device_mesh
    batch = [p if isinstance(p, Shard) and p.dim == 0 and scores.ndim > 1 else Replicate() for p in scores.placements]
    full = [Replicate()] * mesh.ndim
    local_weight = local_in(weight, full) if weight is not None else None
    summed = 0 if reduction == 0 else 2
    rows, labels = local_in(scores, batch), local_in(target, batch)
    if reduction != 0 and scores.dtype in NARROW:
        losses = wrapped(op(rows, labels, local_weight, 0, ignored)[0], mesh, batch, target.shape)
        counted = (labels != ignored).float()
        if local_weight is not None:
            counted = counted * local_weight.float()[labels.masked_fill(labels == ignored, 0)]
        total = aten.sum.default(wrapped(counted, mesh, batch, target.shape))
        loss = aten.sum.default(losses, dtype=torch.float32)
        loss = loss / total if reduction == 1 else loss
        return narrowed(loss, scores.dtype), narrowed(total, scores.dtype)
    loss, total = op(rows, labels, local_weight, summed, ignored)
    if reduction == 0:
        return wrapped(loss, mesh, batch, target.shape), wrapped(total, mesh, full, total.shape)
    partial = [Partial() if isinstance(p, Shard) else Replicate() for p in batch]
    loss, total = wrapped(loss, mesh, partial, loss.shape), wrapped(total, mesh, partial, total.shape)
    total = wrapped(local_in(total, full), mesh, full, total.shape)
    return (aten.div.Tensor(loss, total) if reduction == 1 else loss), total


@rule_for("equal")
def equal(op: Any, args: Any, kwargs: Any) -> bool:
    """Whether two tensors are equal, on all ranks alike."""
    one, other = args
    if one.shape != other.shape:
        return False
    mesh, layout = one.device_mesh, without_partial(one.placements)
    same = True
    if is_in_mesh(mesh):
        same = op(local_in(one, layout), local_in(other, layout))
    result = torch.tensor(int(same), device=runtime.device())
    for dim in range(mesh.ndim):
        if is_in_mesh(mesh):
            dist.all_reduce(result, dist.ReduceOp.MIN, group=mesh.get_group(dim))
    return bool(result.item())


@rule_for("constant_pad_nd")
def pad(op: Any, args: Any, kwargs: Any) -> Any:
    """Padding, or cropping: those dims must not be split, the others may be."""
    t, amounts = args[0], args[1]
    grown = {t.ndim - 1 - i: amounts[2 * i] + amounts[2 * i + 1] for i in range(len(amounts) // 2)}
    touched = {t.ndim - 1 - i for i in range(len(amounts) // 2) if any(amounts[2 * i : 2 * i + 2])}
    layout = unsplit(t, touched)
    shape = [size + grown.get(dim, 0) for dim, size in enumerate(t.shape)]
    return wrapped(op(local_in(t, layout), *args[1:], **kwargs), t.device_mesh, layout, shape)


@rule_for("slice_scatter", "select_scatter")
def slice_scatter(op: Any, args: Any, kwargs: Any) -> Any:
    """Write a slice: its dim must not be split, the others may be."""
    t, part = args[0], args[1]
    dim = (args[2] if len(args) > 2 else kwargs.get("dim", 0)) % t.ndim
    layout = unsplit(t, {dim})
    removed = t.ndim - part.ndim  # select removes its dim
    inner = [Shard(p.dim - (removed if p.dim > dim else 0)) if isinstance(p, Shard) else p for p in layout]
    return wrapped(op(local_in(t, layout), local_in(part, inner), *args[2:], **kwargs), t.device_mesh, layout, t.shape)


@rule_for("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put")
def put_by_mask(op: Any, args: Any, kwargs: Any) -> Any:
    """Writing by a boolean mask: positions replace the mask, because torch's rule ignores that a mask covers several
    dims."""
    t, indices = args[0], args[1]
    if not any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices):
        return NotImplemented
    positions: list[Any] = []
    for index in indices:
        is_mask = index is not None and index.dtype in (torch.bool, torch.uint8)
        positions += aten.nonzero.default(index).unbind(1) if is_mask else [index]
    return op(t, positions, *args[2:], **kwargs)


@rule_for("fill_.Tensor")
def fill(op: Any, args: Any, kwargs: Any) -> Any:
    """Fill shards with a value."""
    target, value = args
    op(local_of(target), local_in(value, replicated(value.device_mesh)))
    set_spec(target, spec_with(spec_of(target), target.device_mesh, without_partial(target.placements)))
    return target


@rule_for("_local_scalar_dense")
def local_scalar(op: Any, args: Any, kwargs: Any) -> Any:
    """The value of a tensor with one element."""
    return op(local_in(args[0], replicated(args[0].device_mesh)))


@rule_for("_fused_sdp_choice")
def attention_choice(op: Any, args: Any, kwargs: Any) -> int:
    """The attention kernel to use, chosen for tensors of one batch row, so that all ranks agree."""

    def stand_in(t: Any) -> Any:
        if not is_sharded(t):
            return t
        shape = (1, *t.shape[1:]) if t.ndim == 4 else t.shape
        return torch.empty(shape, dtype=t.dtype, device=t.device, requires_grad=t.requires_grad)

    args, kwargs = tree_map(stand_in, (args, kwargs))
    return op(*args, **kwargs)


def local_in(t: DTensor, placements: Any) -> torch.Tensor:
    """This rank's shard of `t` with other placements."""
    return redistribute(local_of(t), spec_of(t), spec_with(spec_of(t), t.device_mesh, placements))


# --- operators made of simpler ones ----------------------------------------------------------------------------------


@rule_for("_to_copy")
def cast(op: Any, args: Any, kwargs: Any) -> Any:
    """Reduce a `Partial` sum before a cast that would round each term, or turn terms into booleans."""
    t, dtype = args[0], kwargs.get("dtype")
    if dtype is None or dtype == t.dtype or not has_partial(t.placements):
        return NotImplemented
    if not (dtype in NARROW or not dtype.is_floating_point):
        return NotImplemented
    return op(redistributed(t, t.device_mesh, without_partial(t.placements)), **kwargs)


@rule_for("div.Tensor", "div.Scalar")
def divide(op: Any, args: Any, kwargs: Any) -> Any:
    """Reduce a `Partial` sum before a division by zero, which would make its terms infinities of both signs."""
    t, divisor = args[0], args[1]
    if not is_sharded(t) or not has_partial(t.placements):
        return NotImplemented
    if not isinstance(divisor, torch.Tensor) and divisor != 0:
        return NotImplemented
    return op(redistributed(t, t.device_mesh, without_partial(t.placements)), divisor, **kwargs)


@rule_for("cat")
def cat(op: Any, args: Any, kwargs: Any) -> Any:
    """Drop empty 1-D tensors, which can be concatenated with any shape: key-value caches start as one."""
    tensors = [t for t in args[0] if t.shape != (0,)]
    if not tensors or len(tensors) == len(args[0]):
        return NotImplemented
    return op(tensors, *args[1:], **kwargs)


@rule_for("squeeze.dims")
def squeeze_dims(op: Any, args: Any, kwargs: Any) -> Any:
    """Remove several dims, one after the other."""
    t = args[0]
    for dim in sorted((d % max(t.ndim, 1) for d in args[1]), reverse=True):
        t = aten.squeeze.dim(t, dim)
    return t


def _decomposed(op: Any, args: Any, kwargs: Any) -> Any:
    return decomposition_table[op](*args, **kwargs)


rule_for(
    "native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit.no_stats", "native_batch_norm_backward",
    "cudnn_batch_norm", "cudnn_batch_norm_backward", "native_group_norm", "native_group_norm_backward",
)(_decomposed)  # fmt: skip
