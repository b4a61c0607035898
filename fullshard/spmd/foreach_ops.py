"""Operators on lists of tensors (`_foreach_*`, `_fused_*`), as used by optimizers and `GradScaler`.

Most are elementwise, so each rank runs them on its shards. The tensors of one list may be on several meshes, and some
may be plain: at each position, the tensors are redistributed to the layout of the one that is written to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import Partial

from fullshard.device.torch_private import (
    DTensorSpec,
    TensorMeta,
    local_of,
    spec_of,
    take_shard,
    tree_leaves,
    tree_map,
)
from fullshard.spmd.redistribute import has_partial, meta_of, redistribute, replicated, spec_with, without_partial
from fullshard.spmd.tensor import ShardedTensor, as_replicated, full_of, is_sharded, redistributed

aten = torch.ops.aten
REDUCE: dict[str, Callable[..., Any]] = {
    "_foreach_norm": lambda t, order=2, dtype=None: aten.linalg_vector_norm.default(t, order, None, False, dtype=dtype),
    "_foreach_max": lambda t: aten.max.default(t),
}
"""Operators that reduce each tensor of the list, and the operator that does so for one tensor."""
NOT_ELEMENTWISE = ("_foreach_powsum", "_foreach_mm")
"""Other operators that are not elementwise."""


def is_list_operator(op: Any) -> bool:
    """Whether an operator takes lists of tensors and treats each position separately."""
    return op.__name__.startswith(("_foreach_", "_fused_ada", "_fused_sgd", "_amp_foreach_"))


def run(op: Any, args: Any, kwargs: Any, written: list[torch.Tensor]) -> Any:
    """Run a list operator; `NotImplemented` if it must run like any other operator."""
    positions = _positions((args, kwargs))
    if op.overloadpacket.__name__ in REDUCE:
        return [REDUCE[op.overloadpacket.__name__](t, *args[1:], **kwargs) for t in args[0]]
    if op.__name__.startswith(NOT_ELEMENTWISE) or any(len({t.shape for t in p if t.ndim}) > 1 for p in positions):
        return _one_by_one(op, args, kwargs) if len(positions) > 1 and _is_mixed(positions) else NotImplemented
    if op is aten._amp_foreach_non_finite_check_and_unscale_.default:
        return unscale(op, args, kwargs)
    return _on_shards(op, args, kwargs, written)


def unscale(op: Any, args: Any, kwargs: Any) -> None:
    """Divide gradients by the loss scale; set `found_inf` on every rank if any element on any rank is not finite."""
    gradients, found_inf, inverse = args
    not_finite = torch.zeros_like(_full(found_inf))
    _on_shards(op, (gradients, not_finite, inverse), kwargs, gradients)
    for mesh in {t.device_mesh: None for t in gradients if is_sharded(t)}:
        partial = DTensorSpec(mesh, (Partial("max"),) * mesh.ndim, tensor_meta=meta_of(not_finite))
        not_finite = redistribute(not_finite, partial, spec_with(partial, mesh, replicated(mesh)))
    found_inf.copy_(torch.maximum(_full(found_inf), not_finite))


def fused_update(op: Any, args: Any, kwargs: Any) -> None:
    """A fused optimizer's update. Parameters, gradients and state nearly always have the same layout, position by
    position: then it is an update of the shards, without torch's work for each tensor."""
    lists = [
        tensors for tensors in args if tensors and tensors[0].ndim
    ]  # but for the steps, and state that there is none of
    if all(_is_aligned(position) for position in zip(*lists, strict=True)):
        op(*([local_of(t) if is_sharded(t) else t for t in tensors] for tensors in args), **kwargs)
    else:
        _on_shards(op, args, kwargs, [t for tensors in lists for t in tensors])


def _is_aligned(position: tuple[torch.Tensor, ...]) -> bool:
    specs = [spec_of(t) if is_sharded(t) else None for t in position]
    first = specs[0]
    for spec in specs:
        if spec is first:
            continue
        if spec is None or first is None or spec.mesh is not first.mesh or spec.placements != first.placements:
            return False
    return True


def _on_shards(op: Any, args: Any, kwargs: Any, written: list[torch.Tensor]) -> Any:
    lists, writes = _lists((args, kwargs)), {id(t) for t in written}
    targets = [_target(position, writes) for position in _positions((args, kwargs))]
    shards = [[_shard(t, where) for t, where in zip(tensors, targets, strict=True)] for tensors in lists]
    local = {id(tensors): own for tensors, own in zip(lists, shards, strict=True)}

    def ready(value: Any) -> Any:
        if isinstance(value, list):
            return local.get(id(value), value)
        return _full(value) if isinstance(value, torch.Tensor) else value

    args, kwargs = tree_map(ready, (args, kwargs), is_leaf=lambda x: isinstance(x, list))
    results = op(*args, **kwargs)
    for tensors, own in zip(lists, shards, strict=True):
        for t, shard, where in zip(tensors, own, targets, strict=True):
            if id(t) in writes:
                _write_back(t, shard, where)
    return [_sharded(t, where) for t, where in zip(results, targets, strict=True)] if results else results


def _target(position: list[torch.Tensor], writes: set[int]) -> DTensorSpec | None:
    """The layout for the tensors at one position; None for plain full tensors."""
    for t in position:
        if id(t) in writes and is_sharded(t) and has_partial(t.placements):
            # A write to one term of a sum is not a write to the sum.
            take_shard(t, redistributed(t, t.device_mesh, without_partial(t.placements)))
    full = [t for t in position if t.ndim == max(t.ndim for t in position)]  # the others are scalars
    first = next((t for t in full if id(t) in writes), next(filter(is_sharded, full), full[0]))
    if not is_sharded(first):
        return None
    return spec_with(spec_of(first), first.device_mesh, without_partial(first.placements))


def _shard(t: torch.Tensor, where: DTensorSpec | None) -> torch.Tensor:
    if where is None or not t.ndim:
        return _full(t)
    if not is_sharded(t):
        t = as_replicated(t, where.mesh)
    return redistribute(local_of(t), spec_of(t), spec_with(spec_of(t), where.mesh, where.placements))


def _write_back(t: torch.Tensor, shard: torch.Tensor, where: DTensorSpec | None) -> None:
    """Copy a written shard back to the tensor it was redistributed from."""
    local = local_of(t) if is_sharded(t) else t
    if shard is local:
        return
    if is_sharded(t):
        source = where or spec_with(spec_of(t), t.device_mesh, replicated(t.device_mesh))
        local.copy_(redistribute(shard, spec_with(spec_of(t), source.mesh, source.placements), spec_of(t)))
    elif where is not None and t.ndim:
        source = DTensorSpec(where.mesh, where.placements, tensor_meta=meta_of(t))
        local.copy_(redistribute(shard, source, spec_with(source, where.mesh, replicated(where.mesh))))


def _sharded(t: torch.Tensor, where: DTensorSpec | None) -> torch.Tensor:
    if where is None:
        return t
    meta = TensorMeta(where.shape, where.stride, t.dtype)
    return ShardedTensor(t, DTensorSpec(where.mesh, where.placements, tensor_meta=meta), requires_grad=False)


def _full(t: torch.Tensor) -> torch.Tensor:
    return full_of(t) if is_sharded(t) else t


def _lists(tree: Any) -> list[list[Any]]:
    leaves = tree_leaves(tree, is_leaf=lambda x: isinstance(x, list))
    return [leaf for leaf in leaves if isinstance(leaf, list) and leaf and isinstance(leaf[0], torch.Tensor)]


def _positions(tree: Any) -> list[list[torch.Tensor]]:
    """The tensors of all lists, position by position."""
    return [list(position) for position in zip(*_lists(tree), strict=True)]


def _is_mixed(positions: list[list[torch.Tensor]]) -> bool:
    return len({t.device_mesh if is_sharded(t) else None for position in positions for t in position}) > 1


def _one_by_one(op: Any, args: Any, kwargs: Any) -> Any:
    """Run a list operator position by position: for tensors on several meshes, or plain and sharded ones."""
    results = []
    for i in range(len(_lists((args, kwargs))[0])):
        args_i, kwargs_i = tree_map(
            lambda a, i=i: [a[i]] if isinstance(a, list) else a, (args, kwargs), is_leaf=lambda x: isinstance(x, list)
        )
        results.append(op(*args_i, **kwargs_i))
    return None if results[0] is None else [t for r in results for t in r]
