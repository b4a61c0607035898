"""Operators on lists of tensors: those of optimizers and of `GradScaler`.

All but a few work element by element, so that each rank can run them on its pieces. The elements of one list may lie
on several meshes, and some may be plain: the tensors of one position come into the layout of the one that is written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import Partial

from fullshard.spmd.tensor import (
    ShardedTensor,
    is_sharded,
    meta_of,
    relaid,
    relay,
    replicated,
    respec,
    settle,
    taken_as_global,
)
from fullshard.torch_private import (
    DTensorSpec,
    TensorMeta,
    custom_op_handlers,
    local_of,
    spec_of,
    take_shard,
    tree_leaves,
    tree_map,
)

aten = torch.ops.aten
REDUCE: dict[str, Callable[..., Any]] = {
    "_foreach_norm": lambda t, order=2, dtype=None: aten.linalg_vector_norm.default(t, order, None, False, dtype=dtype),
    "_foreach_max": lambda t: aten.max.default(t),
}
"""Those that reduce their elements: each as the operator on one tensor does."""
ACROSS = ("_foreach_powsum", "_foreach_mm")
"""Others that do not work element by element."""


def is_list_operator(op: Any) -> bool:
    """Whether an operator takes lists of tensors and treats each position apart."""
    return op.__name__.startswith(("_foreach_", "_fused_ada", "_fused_sgd", "_amp_foreach_"))


def run(op: Any, args: Any, kwargs: Any, written: list[torch.Tensor]) -> Any:
    """Run a list operator; `NotImplemented` where it has to be run as any other."""
    positions = _positions((args, kwargs))
    if op.overloadpacket.__name__ in REDUCE:
        return [REDUCE[op.overloadpacket.__name__](t, *args[1:], **kwargs) for t in args[0]]
    if op.__name__.startswith(ACROSS) or any(len({t.shape for t in p if t.ndim}) > 1 for p in positions):
        return _one_by_one(op, args, kwargs) if len(positions) > 1 and _is_mixed(positions) else NotImplemented
    if op is aten._amp_foreach_non_finite_check_and_unscale_.default:
        return unscale(op, args, kwargs)
    return _on_pieces(op, args, kwargs, written)


def unscale(op: Any, args: Any, kwargs: Any) -> None:
    """Gradients divided by the scale; every rank learns whether any element on any rank is infinite or NaN."""
    gradients, found, inverse = args
    seen = torch.zeros_like(_whole(found))
    _on_pieces(op, (gradients, seen, inverse), kwargs, gradients)
    for mesh in {t.device_mesh: None for t in gradients if is_sharded(t)}:
        pending = DTensorSpec(mesh, (Partial("max"),) * mesh.ndim, tensor_meta=meta_of(seen))
        seen = relay(seen, pending, respec(pending, mesh, replicated(mesh)))
    found.copy_(torch.maximum(_whole(found), seen))


# torch's own handler looks at the layout of the first gradient only, and knows no list that holds plain ones too (the
# gradients of FSDPv2 with ignored modules).
custom_op_handlers()[aten._amp_foreach_non_finite_check_and_unscale_.default] = unscale


def _on_pieces(op: Any, args: Any, kwargs: Any, written: list[torch.Tensor]) -> Any:
    lists, writes = _lists((args, kwargs)), {id(t) for t in written}
    targets = [_target(position, writes) for position in _positions((args, kwargs))]
    pieces = [[_piece(t, where) for t, where in zip(given, targets, strict=True)] for given in lists]
    local = {id(given): mine for given, mine in zip(lists, pieces, strict=True)}

    def ready(value: Any) -> Any:
        if isinstance(value, list):
            return local.get(id(value), value)
        return _whole(value) if isinstance(value, torch.Tensor) else value

    args, kwargs = tree_map(ready, (args, kwargs), is_leaf=lambda x: isinstance(x, list))
    results = op(*args, **kwargs)
    for given, mine in zip(lists, pieces, strict=True):
        for t, piece, where in zip(given, mine, targets, strict=True):
            if id(t) in writes:
                _carry_back(t, piece, where)
    return [_shared(t, where) for t, where in zip(results, targets, strict=True)] if results else results


def _target(position: list[torch.Tensor], writes: set[int]) -> DTensorSpec | None:
    """The layout in which the tensors at one position meet; None for whole."""
    for t in position:
        if id(t) in writes and is_sharded(t) and any(p.is_partial() for p in t.placements):
            settled = relaid(t, t.device_mesh, settle(t.placements))  # a term of a sum cannot be written like a value
            take_shard(t, settled)
    full = [t for t in position if t.ndim == max(t.ndim for t in position)]  # the others are scalars
    first = next((t for t in full if id(t) in writes), next(filter(is_sharded, full), full[0]))
    return respec(spec_of(first), first.device_mesh, settle(first.placements)) if is_sharded(first) else None


def _piece(t: torch.Tensor, where: DTensorSpec | None) -> torch.Tensor:
    if where is None or not t.ndim:
        return _whole(t)
    if not is_sharded(t):
        t = taken_as_global(t, where.mesh)
    return relay(local_of(t), spec_of(t), respec(spec_of(t), where.mesh, where.placements))


def _carry_back(t: torch.Tensor, piece: torch.Tensor, where: DTensorSpec | None) -> None:
    """After a write into a piece that was made for it."""
    own = local_of(t) if is_sharded(t) else t
    if piece is own:
        return
    if is_sharded(t):
        source = where or respec(spec_of(t), t.device_mesh, replicated(t.device_mesh))
        own.copy_(relay(piece, respec(spec_of(t), source.mesh, source.placements), spec_of(t)))
    elif where is not None and t.ndim:
        source = DTensorSpec(where.mesh, where.placements, tensor_meta=meta_of(t))
        own.copy_(relay(piece, source, respec(source, where.mesh, replicated(where.mesh))))


def _shared(t: torch.Tensor, where: DTensorSpec | None) -> torch.Tensor:
    if where is None:
        return t
    meta = TensorMeta(where.shape, where.stride, t.dtype)
    return ShardedTensor(t, DTensorSpec(where.mesh, where.placements, tensor_meta=meta), requires_grad=False)


def _whole(t: torch.Tensor) -> torch.Tensor:
    return local_of(relaid(t, t.device_mesh, replicated(t.device_mesh))) if is_sharded(t) else t


def _lists(tree: Any) -> list[list[Any]]:
    found = tree_leaves(tree, is_leaf=lambda x: isinstance(x, list))
    return [given for given in found if isinstance(given, list) and given and isinstance(given[0], torch.Tensor)]


def _positions(tree: Any) -> list[list[torch.Tensor]]:
    """For each position the tensors that the lists have there."""
    return [list(position) for position in zip(*_lists(tree), strict=True)]


def _is_mixed(positions: list[list[torch.Tensor]]) -> bool:
    return len({t.device_mesh if is_sharded(t) else None for position in positions for t in position}) > 1


def _one_by_one(op: Any, args: Any, kwargs: Any) -> Any:
    """A list operator on tensors of several meshes, or plain and sharded ones: element by element."""
    results = []
    for i in range(len(_lists((args, kwargs))[0])):
        args_i, kwargs_i = tree_map(
            lambda a, i=i: [a[i]] if isinstance(a, list) else a, (args, kwargs), is_leaf=lambda x: isinstance(x, list)
        )
        results.append(op(*args_i, **kwargs_i))
    return None if results[0] is None else [t for r in results for t in r]
