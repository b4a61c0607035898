"""Making a sharding plan: the layout of each parameter, and how the small parameters of a unit share buckets.

Arithmetic on shapes and dtypes; `plan.py` has the data types.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from fullshard.fsdp.plan import Bucket, ParameterPlan, Slot, UnitPlan, item_size
from fullshard.fsdp.strategy import MixedPrecision, ShardingStrategy, dtype_name
from fullshard.spmd.mesh import Mesh
from fullshard.spmd.spec import Layout

DIM0_RATIO = 1.15
"""The ratio of padded to unpadded size up to which dim 0 is always chosen: blocks of rows are contiguous, so that they
are read from files in one piece and, where the rows divide evenly, gathered without a copy."""
FREE_PADDING = 4096
"""Bytes of padding, over all ranks, that do not justify another layout."""
WHOLE_RATIO = 1.5
"""The ratio of padded to unpadded size above which a small parameter is not split at all."""
WHOLE_BYTES = 256 * 1024
"""The most bytes of a parameter that every rank may hold whole. With gradient and two optimizer states in fp32, 100
parameters of this size cost a rank 100 MiB; splitting a small one that is mostly padding costs time in every gather."""


def padded(shape: Sequence[int], dim: int, parts: int) -> int:
    """The number of elements of all pieces together when a dim is split."""
    return math.prod(-(-n // parts) * parts if i == dim else n for i, n in enumerate(shape))


def choose_dim(shape: Sequence[int], itemsize: int, parts: int, candidates: Sequence[int]) -> int | None:
    """The dim to split into `parts`; None if every rank should hold the whole parameter.

    `candidates` are in order of preference. The first is chosen unless its padding is large and at least twice that of
    another. A small parameter that would be mostly padding with any of them stays whole.
    """
    own = math.prod(shape)
    if not candidates or own == 0:
        return candidates[0] if candidates else None
    first = candidates[0]
    best = min(candidates, key=lambda dim: padded(shape, dim, parts))  # the earliest of equals
    excess = padded(shape, first, parts) - own
    if excess * itemsize <= FREE_PADDING or excess <= (DIM0_RATIO - 1) * own:
        return first
    if 2 * (padded(shape, best, parts) - own) > excess:
        best = first
    excess = padded(shape, best, parts) - own
    if excess * itemsize > FREE_PADDING and own + excess > WHOLE_RATIO * own and own * itemsize <= WHOLE_BYTES:
        return None
    return best


SMALL_BYTES = 64 * 1024
"""Parameters with fewer bytes than this share a bucket: a message for each would cost more than the copy."""
SMALL_BYTES_COLLECTIVE = 16 * 1024 * 1024
"""The same for collectives: each costs microseconds even inside one launch, and more with more ranks, while an
accelerator copies this much in less than ten microseconds."""
ALIGNMENT = 16
"""Bytes: the length of a gather bucket is a multiple of this, and long pieces start at one, so that they copy fast.
Short pieces start at a multiple of their own element size: on thousands of ranks a piece may be a single element."""


@dataclass(frozen=True)
class PlanInputs:
    """What the plan of every parameter of a model depends on."""

    mesh: Mesh
    strategy: ShardingStrategy
    precision: MixedPrecision
    replica_axes: tuple[str, ...] = ()
    small_bytes: int = SMALL_BYTES
    any_order: bool = True
    """Whether torch can merge axes in an order other than the mesh's (2.11 cannot)."""
    offload: bool = False
    """Whether all shards are in host memory."""


def shard_layout(
    shape: Sequence[int], dtype: torch.dtype, annotation: Layout | None, inputs: PlanInputs
) -> tuple[Layout, int | None]:
    """The layout of a parameter's shards, and the dim that `fsdp` splits.

    Dim 0 wherever possible: its pieces are contiguous, so that gathering them needs no copy; otherwise as in
    `choose_dim`. A parameter that is already split over other axes is split over `fsdp` as well: on dim 0 as the
    minor axis where that divides, otherwise on a dim that is not split yet. Packed bytes (4-bit weights) are rows of
    groups and are always split by rows.
    """
    mesh = inputs.mesh
    axis = mesh.get_axis_name_idx("fsdp")
    assert axis is not None
    dims = list(annotation.dims if annotation else ((),) * len(shape))
    for dim, axes in enumerate(dims):
        if axis in axes:
            return Layout(mesh, tuple(dims)), dim
    if not inputs.strategy.shards or not shape:
        return Layout(mesh, tuple(dims)), None
    cuts = [math.prod(mesh.mesh_shape[a] for a in axes) for axes in dims]
    candidates = [dim for dim, axes in enumerate(dims) if not axes]
    can_merge = inputs.any_order or all(a < axis for a in dims[0])
    if dims[0] and can_merge and shape[0] % (cuts[0] * mesh.mesh_shape[axis]) == 0:
        candidates = [0]
    local = [-(-size // cut) for size, cut in zip(shape, cuts, strict=True)]
    chosen = choose_dim(local, dtype.itemsize, mesh.mesh_shape[axis], candidates)
    if not dtype.is_floating_point:
        chosen = 0 if 0 in candidates else None
    if chosen is not None:
        dims[chosen] = (*dims[chosen], axis)
    return Layout(mesh, tuple(dims)), chosen


def plan_parameter(
    names: Sequence[str],
    shape: Sequence[int],
    dtype: torch.dtype,
    trainable: bool,
    annotation: Layout | None,
    inputs: PlanInputs,
) -> ParameterPlan:
    """Plan one parameter."""
    stored = inputs.precision.stored(dtype, trainable)
    layout, dim = shard_layout(shape, stored, annotation, inputs)
    axis = inputs.mesh.get_axis_name_idx("fsdp")
    assert axis is not None
    # The gathered value on a rank is split by every axis but `fsdp`. Where an annotation does not divide the dim, ranks
    # have values of different sizes; the plan is for the largest.
    cuts = [math.prod(inputs.mesh.mesh_shape[a] for a in axes if a != axis) for axes in layout.dims]
    whole = tuple(-(-size // cut) for size, cut in zip(shape, cuts, strict=True))
    parts = inputs.mesh.mesh_shape[axis] if dim is not None else 1
    computed = inputs.precision.computed(stored)
    big = math.prod(whole) * computed.itemsize >= inputs.small_bytes
    divides = dim is None or (dim == 0 and whole[0] % parts == 0)
    return ParameterPlan(
        names=tuple(names),
        shape=tuple(shape),
        dtype=dtype_name(stored),
        compute_dtype=dtype_name(computed),
        reduce_dtype=dtype_name(inputs.precision.reduced(computed)),
        trainable=trainable,
        spec=layout.spec,
        dim=dim,
        parts=parts,
        whole=whole,
        direct=big and divides and math.prod(whole) > 0,
    )


def replan(plan: ParameterPlan, dtype: torch.dtype, trainable: bool, precision: MixedPrecision) -> ParameterPlan:
    """The plan of a parameter that was frozen, unfrozen or cast after it was sharded; it stays split as before."""
    if dtype_name(dtype) == plan.dtype:
        return replace(plan, trainable=trainable)
    computed = precision.computed(dtype)
    return replace(
        plan,
        dtype=dtype_name(dtype),
        compute_dtype=dtype_name(computed),
        reduce_dtype=dtype_name(precision.reduced(computed)),
        trainable=trainable,
    )


def plan_unit(
    name: str, module: str, parameters: Sequence[ParameterPlan], axes: tuple[tuple[str, int], ...] = ()
) -> UnitPlan:
    """Plan a unit: lay out the buckets of its parameters. `axes` are those of its own mesh, if it has one."""
    gathered: list[Slot] = []
    end = 0
    for p in parameters:
        if p.gathers and not p.direct:
            size = math.prod(p.piece) * item_size(p.compute_dtype)
            start = _round_up(end, ALIGNMENT if size >= 64 * ALIGNMENT else item_size(p.compute_dtype))
            gathered.append(Slot(p.name, start, size))
            end = start + size
    reduced = [p for p in parameters if p.trainable and not p.direct]
    return UnitPlan(
        name,
        module,
        tuple(parameters),
        Bucket("uint8", tuple(gathered), _round_up(end, ALIGNMENT)) if gathered else None,
        _reduce_buckets([p for p in reduced if p.gathers]),
        _reduce_buckets([p for p in reduced if not p.gathers]),
        axes,
    )


def _round_up(n: int, step: int) -> int:
    return -(-n // step) * step


def _reduce_buckets(parameters: Sequence[ParameterPlan]) -> tuple[Bucket, ...]:
    buckets = []
    for dtype in sorted({p.reduce_dtype for p in parameters}):
        slots, end = [], 0
        for p in parameters:
            if p.reduce_dtype == dtype:
                size = math.prod(p.piece)
                slots.append(Slot(p.name, end, size))
                end += size
        buckets.append(Bucket(dtype, tuple(slots), end))
    return tuple(buckets)
