"""Sharding rules of our own, for operators that torch has no rule for, or none that is exact.

Reductions have theirs in `rules_reductions.py`. `EXACT_ON_UNEVEN` lists the operators whose torch rule holds for
pieces of different sizes, empty ones included.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from fullshard import accelerator, runtime
from fullshard.spmd import rules_reductions as reductions
from fullshard.spmd.rule_table import RULES, Rule, overload, rule_for
from fullshard.spmd.rules_elementwise import INDEPENDENT, Independent, wrapped
from fullshard.spmd.tensor import (
    NARROW,
    ShardedTensor,
    is_sharded,
    layout_of,
    meta_of,
    relaid,
    relay,
    replicated,
    respec,
    settle,
)
from fullshard.torch_private import (
    DTensorSpec,
    custom_op_handlers,
    decomposition_table,
    is_in_mesh,
    local_of,
    random_ops,
    schema_of,
    set_local,
    set_spec,
    spec_of,
    tree_flatten,
    tree_map,
)

aten = torch.ops.aten


def find(op: Any, flat: list[Any]) -> Rule | None:
    """Our rule for an operator, if there is one."""
    if torch.Tag.nondeterministic_seeded in op.tags and not _torch_draws(op, flat):
        return RULES.get(op, by_whole_draw)
    return RULES.get(op)


for _name, (_pattern, _split) in INDEPENDENT.items():
    rule_for(_name)(Independent(_pattern, _split))


# --- random numbers --------------------------------------------------------------------------------------------------


@rule_for(
    "bernoulli_.float", "bernoulli_.Tensor", "uniform_", "normal_", "exponential_", "random_", "random_.from",
    "random_.to", "cauchy_", "log_normal_", "geometric_", "rand_like", "randn_like", "randint_like",
    "randint_like.low_dtype", "bernoulli", "bernoulli.p", "multinomial",
)  # fmt: skip
def by_global_draw(op: Any, args: Any, kwargs: Any) -> Any:
    """Every rank draws the whole from the generator all ranks share and keeps its piece: what one device draws."""
    target: DTensor = args[0]
    mesh, local = target.device_mesh, local_of(target)
    reads = schema_of(op).name in ("aten::bernoulli", "aten::multinomial")  # its values are probabilities
    whole_spec = DTensorSpec(mesh, replicated(mesh), tensor_meta=spec_of(target).tensor_meta)
    whole = relay(local, spec_of(target), whole_spec) if reads else local.new_empty(target.shape)
    others = tree_map(lambda t: t.full_tensor() if is_sharded(t) else t, (args[1:], kwargs))
    drawn = op(whole, *others[0], **others[1])
    placements = settle(target.placements) if drawn.shape == target.shape else replicated(mesh)
    spec = DTensorSpec(mesh, replicated(mesh), tensor_meta=meta_of(drawn))
    piece = relay(drawn, spec, respec(spec, mesh, placements))
    if drawn is not whole:
        return ShardedTensor(piece.contiguous(), respec(spec, mesh, placements), requires_grad=False)
    set_local(target, local.copy_(piece) if piece.shape == local.shape else piece.contiguous())
    set_spec(target, respec(spec_of(target), mesh, placements))
    return target


def draw_alike() -> None:
    """Let torch's own class draw so too where ranks compute on CPUs: it has one random stream for all pieces only on
    accelerators; on CPUs each rank would draw the same numbers for its piece."""
    if not accelerator.is_accelerator(runtime.device()):
        for op in [op for op, rule in RULES.items() if rule is by_global_draw]:
            custom_op_handlers().setdefault(op, by_global_draw)


def by_whole_draw(op: Any, args: Any, kwargs: Any) -> Any:
    """Any other operator that draws: on whole values, from the shared generator."""
    return _on_whole(op, args, kwargs, "")


@rule_for("linalg_solve_triangular")
def distrusted(op: Any, args: Any, kwargs: Any) -> Any:
    return _on_whole(op, args, kwargs, "torch's sharding rule for it leaves one matrix whole where the other is split")


def _on_whole(op: Any, args: Any, kwargs: Any, why: str) -> Any:
    from fullshard.spmd.ops import by_copies

    flat, tree = tree_flatten((args, kwargs))
    return by_copies(op, flat, tree, next(leaf for leaf in flat if is_sharded(leaf)).device_mesh, why)


def _torch_draws(op: Any, flat: list[Any]) -> bool:
    """On CUDA torch gives each piece its own part of one random stream, without drawing the whole."""
    if "scaled_dot_product" in op.__name__:  # it may drop out, but need not; torch has a rule
        return True
    target = next(leaf for leaf in flat if is_sharded(leaf))
    known = op in random_ops()
    return known and accelerator.is_accelerator(target.device) and layout_of(spec_of(target)).is_even(target.shape)


# --- embeddings ------------------------------------------------------------------------------------------------------


@rule_for("embedding")
def embedding(op: Any, args: Any, kwargs: Any) -> Any:
    """Rows may be split too: a rank looks up the rows it holds, gives zeros for the others, and the sum is pending."""
    weight, indices = args[0], args[1]
    mesh = weight.device_mesh
    rows: list[Placement] = list(settle(weight.placements))
    tokens: list[Placement] = list(settle(indices.placements))
    out: list[Placement] = []
    for i, row in enumerate(rows):
        if isinstance(row, Shard):
            tokens[i] = Replicate()  # tokens are small next to rows
            out.append(Partial() if row.dim == 0 else Shard(indices.ndim))
        else:
            out.append(tokens[i])
    table, ids = _in(weight, rows), _in(indices, tokens)
    held = layout_of(respec(spec_of(weight), mesh, rows)).slices(weight.shape, runtime.rank())[0]
    if any(isinstance(p, Partial) for p in out):
        local_ids = ids - held.start
        elsewhere = (local_ids < 0) | (local_ids >= held.stop - held.start)
        if table.shape[0] == 0:
            found = table.new_zeros(*ids.shape, table.shape[1])
        else:
            found = op(table, local_ids.masked_fill(elsewhere, 0), *args[2:], **kwargs)
        found = found.masked_fill(elsewhere.unsqueeze(-1), 0)
    else:
        found = op(table, ids, *args[2:], **kwargs)
    return wrapped(found, mesh, out, (*indices.shape, weight.shape[1]))


@rule_for("embedding_dense_backward")
def embedding_dense_backward(op: Any, args: Any, kwargs: Any) -> Any:
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
    local = op(_in(grad, incoming), _in(indices, tokens), *args[2:], **kwargs)
    return wrapped(local, mesh, out, (rows, grad.shape[-1]))


# --- losses, comparisons, padding, scalars ---------------------------------------------------------------------------


@rule_for("nll_loss_forward", "nll_loss2d_forward")
def nll_loss_forward(op: Any, args: Any, kwargs: Any) -> Any:
    """A mean is over the unmasked tokens of the whole batch, not a mean of the pieces' means."""
    scores, target, weight, reduction, ignored = args
    mesh = scores.device_mesh
    batch = [p if isinstance(p, Shard) and p.dim == 0 and scores.ndim > 1 else Replicate() for p in scores.placements]
    whole = [Replicate()] * mesh.ndim
    local_weight = _in(weight, whole) if weight is not None else None
    summed = 0 if reduction == 0 else 2
    rows, labels = _in(scores, batch), _in(target, batch)
    if reduction != 0 and scores.dtype in NARROW:
        losses = wrapped(op(rows, labels, local_weight, 0, ignored)[0], mesh, batch, target.shape)
        counted = (labels != ignored).float()
        if local_weight is not None:
            counted = counted * local_weight.float()[labels.masked_fill(labels == ignored, 0)]
        total = aten.sum.default(wrapped(counted, mesh, batch, target.shape))
        loss = aten.sum.default(losses, dtype=torch.float32)
        loss = loss / total if reduction == 1 else loss
        return reductions.narrowed(loss, scores.dtype), reductions.narrowed(total, scores.dtype)
    loss, total = op(rows, labels, local_weight, summed, ignored)
    if reduction == 0:
        return wrapped(loss, mesh, batch, target.shape), wrapped(total, mesh, whole, total.shape)
    pending = [Partial() if isinstance(p, Shard) else Replicate() for p in batch]
    loss, total = wrapped(loss, mesh, pending, loss.shape), wrapped(total, mesh, pending, total.shape)
    total = wrapped(_in(total, whole), mesh, whole, total.shape)
    return (aten.div.Tensor(loss, total) if reduction == 1 else loss), total


@rule_for("equal")
def equal(op: Any, args: Any, kwargs: Any) -> bool:
    one, other = args
    if one.shape != other.shape:
        return False
    mesh, layout = one.device_mesh, settle(one.placements)
    same = True
    if is_in_mesh(mesh):
        same = op(_in(one, layout), _in(other, layout))
    verdict = torch.tensor(int(same), device=runtime.device())
    for dim in range(mesh.ndim):
        if is_in_mesh(mesh):
            dist.all_reduce(verdict, dist.ReduceOp.MIN, group=mesh.get_group(dim))
    return bool(verdict.item())


@rule_for("constant_pad_nd")
def pad(op: Any, args: Any, kwargs: Any) -> Any:
    """Dims that are padded (or cropped) must be whole, the others may be split."""
    t, amounts = args[0], args[1]
    grown = {t.ndim - 1 - i: amounts[2 * i] + amounts[2 * i + 1] for i in range(len(amounts) // 2)}
    touched = {t.ndim - 1 - i for i in range(len(amounts) // 2) if any(amounts[2 * i : 2 * i + 2])}
    layout = tuple(Replicate() if isinstance(p, Shard) and p.dim in touched else p for p in settle(t.placements))
    shape = [size + grown.get(dim, 0) for dim, size in enumerate(t.shape)]
    return wrapped(op(_in(t, layout), *args[1:], **kwargs), t.device_mesh, layout, shape)


@rule_for("slice_scatter", "select_scatter")
def put_into(op: Any, args: Any, kwargs: Any) -> Any:
    """The dim that is written along must be whole, the others may be split."""
    t, part = args[0], args[1]
    dim = (args[2] if len(args) > 2 else kwargs.get("dim", 0)) % t.ndim
    layout = tuple(Replicate() if isinstance(p, Shard) and p.dim == dim else p for p in settle(t.placements))
    lost = t.ndim - part.ndim  # a selected dim is not there any more
    inner = [Shard(p.dim - (lost if p.dim > dim else 0)) if isinstance(p, Shard) else p for p in layout]
    return wrapped(op(_in(t, layout), _in(part, inner), *args[2:], **kwargs), t.device_mesh, layout, t.shape)


@rule_for("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put")
def put_by_mask(op: Any, args: Any, kwargs: Any) -> Any:
    """A mask covers as many dims as it has, which torch's rule does not know: positions in its place."""
    t, indices = args[0], args[1]
    if not any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices):
        return NotImplemented
    places: list[Any] = []
    for index in indices:
        masks = index is not None and index.dtype in (torch.bool, torch.uint8)
        places += aten.nonzero.default(index).unbind(1) if masks else [index]
    return op(t, places, *args[2:], **kwargs)


@rule_for("fill_.Tensor")
def fill(op: Any, args: Any, kwargs: Any) -> Any:
    target, value = args
    op(local_of(target), _in(value, replicated(value.device_mesh)))
    set_spec(target, respec(spec_of(target), target.device_mesh, settle(target.placements)))
    return target


@rule_for("_local_scalar_dense")
def local_scalar(op: Any, args: Any, kwargs: Any) -> Any:
    return op(_in(args[0], replicated(args[0].device_mesh)))


@rule_for("_fused_sdp_choice")
def attention_choice(op: Any, args: Any, kwargs: Any) -> int:
    """Which attention kernel would run: asked with stand-ins of one batch row, so that all ranks agree."""

    def stand_in(t: Any) -> Any:
        if not is_sharded(t):
            return t
        shape = (1, *t.shape[1:]) if t.ndim == 4 else t.shape
        return torch.empty(shape, dtype=t.dtype, device=t.device, requires_grad=t.requires_grad)

    args, kwargs = tree_map(stand_in, (args, kwargs))
    return op(*args, **kwargs)


def _in(t: DTensor, placements: Any) -> torch.Tensor:
    """This rank's part of `t` in another layout."""
    return relay(local_of(t), spec_of(t), respec(spec_of(t), t.device_mesh, placements))


# --- operators made of simpler ones ----------------------------------------------------------------------------------


@rule_for("_to_copy")
def cast(op: Any, args: Any, kwargs: Any) -> Any:
    """Terms of a pending sum are not rounded one by one, nor counted as numbers where they are truths."""
    t, dtype = args[0], kwargs.get("dtype")
    if dtype is None or dtype == t.dtype or not any(p.is_partial() for p in t.placements):
        return NotImplemented
    if not (dtype in NARROW or not dtype.is_floating_point):
        return NotImplemented
    return op(relaid(t, t.device_mesh, settle(t.placements)), **kwargs)


@rule_for("div.Tensor", "div.Scalar")
def divide(op: Any, args: Any, kwargs: Any) -> Any:
    """Terms of a pending sum over a divisor that may be zero would be infinities of both signs."""
    t, divisor = args[0], args[1]
    if not is_sharded(t) or not any(p.is_partial() for p in t.placements):
        return NotImplemented
    if not isinstance(divisor, torch.Tensor) and divisor != 0:
        return NotImplemented
    return op(relaid(t, t.device_mesh, settle(t.placements)), divisor, **kwargs)


@rule_for("cat")
def cat(op: Any, args: Any, kwargs: Any) -> Any:
    """Caches of attention keys begin as an empty tensor of rank 1, which may be joined to anything."""
    tensors = [t for t in args[0] if t.shape != (0,)]
    if not tensors or len(tensors) == len(args[0]):
        return NotImplemented
    return op(tensors, *args[1:], **kwargs)


@rule_for("squeeze.dims")
def squeeze_dims(op: Any, args: Any, kwargs: Any) -> Any:
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

EXACT_ON_UNEVEN = {
    op
    for op in map(
        overload,
        [
            "mm", "addmm", "bmm", "baddbmm", "sum", "sum.dim_IntList", "_softmax", "_softmax_backward_data",
            "_log_softmax", "_log_softmax_backward_data", "native_layer_norm", "native_layer_norm_backward", "t",
            "transpose.int", "permute", "unsqueeze", "clone", "detach", "alias", "expand", "_to_copy", "copy_",
            "zeros_like", "ones_like", "empty_like", "full_like", "zero_", "fill_.Scalar",
        ],
    )
    if op is not None
}  # fmt: skip
