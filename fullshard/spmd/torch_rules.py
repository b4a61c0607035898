"""torch's own sharding rules: whether one is exact for the given shards, and running an operator by it.

A rule names the layouts that an operator needs for its arguments and the layouts of its results. For some operators it
is wrong on shards of different sizes, or raises on some ranks only. Such an operator is tried again with fewer dims
split.
`EXACT_ON_UNEVEN` lists the operators whose torch rule is right for shards of different sizes, empty ones included.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from fullshard.device.torch_private import (
    DTensorSpec,
    local_of,
    spec_of,
    take_shard,
    torch_sharding,
    tree_leaves,
    tree_map,
    tree_unflatten,
)
from fullshard.spmd.redistribute import spec_with
from fullshard.spmd.rule_table import overload, written_tensors
from fullshard.spmd.tensor import is_sharded, redistributed
from fullshard.spmd.views import remember_base

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


@dataclass(frozen=True)
class Choice:
    """How one operator runs on tensors of given shapes and layouts."""

    by_torch: bool
    why: str = ""
    """Why torch's rule is not used."""
    placements: tuple[tuple[Placement, ...] | None, ...] = ()
    """The placements that each argument is redistributed to first; None for an argument that is not sharded."""


_choices: dict[Any, Choice] = {}
MAX_CHOICES = 50_000
"""Shapes may differ from batch to batch: the cache is cleared at this size."""
_fake_tensor_log = logging.getLogger("torch._subclasses.fake_tensor")


def choose(op: Any, flat: list[Any], tree: Any) -> Choice:
    """Whether torch's rule runs this operator. Depends on global shapes and layouts only: all ranks agree."""
    # The numbers given to an elementwise operator, such as a learning rate, do not affect layouts.
    values = torch.Tag.pointwise not in op.tags
    key = (op, tree, *(_cache_key(leaf, values) for leaf in flat))
    try:
        known = _choices.get(key)
    except TypeError:  # an argument that cannot be hashed, such as a generator
        return _choose_anew(op, flat, tree)
    if known is None:
        if len(_choices) >= MAX_CHOICES:
            _choices.clear()
        known = _choices[key] = _choose_anew(op, flat, tree)
    return known


def _cache_key(leaf: Any, values: bool) -> Any:
    """The part of an argument that the choice depends on."""
    if is_sharded(leaf):
        return spec_of(leaf)
    return (type(leaf), leaf) if values or not isinstance(leaf, int | float | complex) else type(leaf)


def _choose_anew(op: Any, flat: list[Any], tree: Any) -> Choice:
    why = "torch's sharding rule is not exact for these shards"
    _fake_tensor_log.disabled = True  # it prints a traceback for every operator that torch has no rule for
    try:
        for attempt in _attempts(op, flat, tree):
            try:
                placements = _torch_placements(op, attempt, tree)
            except Exception as error:
                # torch signals "no rule" in many ways. For a real mistake replicated execution raises the same error.
                why = f"torch has no sharding rule for it ({type(error).__name__})"
                continue
            if placements is not None:
                return Choice(True, placements=placements)
    finally:
        _fake_tensor_log.disabled = False
    return Choice(False, why=why)


def _attempts(op: Any, flat: list[Any], tree: Any) -> Iterator[list[Any]]:
    """Arguments to try torch's rule with: in their own layouts, then with fewer dims split."""
    yield flat
    tensors = [leaf for leaf in flat if is_sharded(leaf)]
    uneven = {id(t): _uneven_dims(spec_of(t)) for t in tensors}
    written = written_tensors(op, *tree_unflatten(flat, tree))
    if any(uneven.values()) and not any(uneven[id(t)] for t in written):
        yield [_unsplit(leaf, uneven[id(leaf)]) if is_sharded(leaf) else leaf for leaf in flat]
    if len(tensors) == 1 and not written:  # a view that would merge split dims: unsplitting one may be enough
        for dim in reversed(range(tensors[0].ndim)):
            yield [_unsplit(leaf, (dim, *uneven[id(leaf)])) if is_sharded(leaf) else leaf for leaf in flat]


def _torch_placements(op: Any, flat: list[Any], tree: Any) -> tuple[tuple[Placement, ...] | None, ...] | None:
    """The placements that torch's rule needs for the arguments; None if the rule is not exact for these shards."""
    args, kwargs = tree_unflatten([_as_dtensor(leaf) for leaf in flat], tree)
    sharding = torch_sharding(op, args, kwargs)
    specs = [spec_of(leaf) for leaf in flat if is_sharded(leaf)]
    inputs = list(specs)
    if sharding.needs_redistribute:
        required = [s for s in tree_leaves(sharding.redistribute_schema.args_schema) if isinstance(s, DTensorSpec)]
        inputs[: len(required)] = required  # keyword arguments come last and are never redistributed
    if any(p.is_partial() and not _is_sum(p) for spec in inputs for p in spec.placements):
        return None
    out = [s for s in tree_leaves(sharding.output_spec) if isinstance(s, DTensorSpec)]
    written = [spec_of(t).placements for t in written_tensors(op, args, kwargs)]
    # A tensor that is written to keeps its layout; results are listed in the order of such arguments.
    stays = not written or (
        inputs[0].placements == specs[0].placements and written == [s.placements for s in out]
    )  # fmt: skip
    if not stays or not all(_is_exact(op, spec) for spec in specs + inputs + out):
        return None
    remaining = iter(inputs)
    return tuple(next(remaining).placements if is_sharded(leaf) else None for leaf in flat)


def _is_exact(op: Any, spec: DTensorSpec) -> bool:
    if not all(p.is_replicate() or p.is_partial() or type(p) is Shard for p in spec.placements):
        return False  # a strided shard: no partition spec describes it
    dims = _uneven_dims(spec)
    if not dims:
        return True
    split_twice = any(sum(isinstance(p, Shard) and p.dim == dim for p in spec.placements) > 1 for dim in dims)
    return not split_twice and (torch.Tag.pointwise in op.tags or op in EXACT_ON_UNEVEN)


def _is_sum(placement: Placement) -> bool:
    return type(placement) is Partial and placement.reduce_op == "sum"


def _uneven_dims(spec: DTensorSpec) -> tuple[int, ...]:
    parts = [1] * len(spec.shape)
    for size, placement in zip(spec.mesh.shape, spec.placements, strict=True):
        if isinstance(placement, Shard):
            parts[placement.dim] *= size
    return tuple(dim for dim, size in enumerate(spec.shape) if size % parts[dim])


def _unsplit(t: DTensor, dims: Sequence[int]) -> DTensor:
    """A stand-in for `t` with some dims not split. Its layout is right; its data is not."""
    placements = tuple(Replicate() if isinstance(p, Shard) and p.dim in dims else p for p in t.placements)
    return DTensor(local_of(t), spec_with(spec_of(t), t.device_mesh, placements), requires_grad=False)


def run_by_torch(op: Any, flat: list[Any], tree: Any, choice: Choice) -> Any:
    """Run an operator on torch's `DTensor`s, after redistributing them to the placements of `choice`."""
    ready = [
        leaf if target is None or target == leaf.placements else redistributed(leaf, leaf.device_mesh, target)
        for leaf, target in zip(flat, choice.placements, strict=True)
    ]
    dtensors = [_as_dtensor(leaf) for leaf in ready]
    args, kwargs = tree_unflatten(dtensors, tree)
    owner = {id(d): leaf for d, leaf in zip(dtensors, flat, strict=True) if is_sharded(d)}

    def own(t: Any) -> Any:
        if not is_sharded(t):
            return t
        if id(t) in owner:  # an operator that writes to its argument returns that argument
            leaf = owner[id(t)]
            take_shard(leaf, t)
            return leaf
        # A partial maximum, mean or norm cannot be combined with anything else: it is reduced at once.
        done = [Replicate() if p.is_partial() and not _is_sum(p) else p for p in t.placements]
        return redistributed(t, t.device_mesh, done)

    out = tree_map(own, op(*args, **kwargs))
    if op.is_view and ready[0] is not flat[0]:
        remember_base(out, op, flat[0], args[1:], kwargs)
    return out


def _as_dtensor(leaf: Any) -> Any:
    """The same tensor as torch's own class, whose operators torch runs."""
    return DTensor(local_of(leaf), spec_of(leaf), requires_grad=False) if is_sharded(leaf) else leaf
