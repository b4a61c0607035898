"""The sharding plan: plain data that says how a model lives on a mesh.

Units → parameters → (global shape, dtypes, trainable or not, tied names, layout, padding), and how small parameters
share buckets. The engine executes it, the capacity planner prices it, a checkpoint writes it down; nothing derives it
again. No tensors and no communication here.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import torch

from fullshard.byte_size import memory_size
from fullshard.fsdp.split_dim import choose_dim
from fullshard.fsdp.strategy import MixedPrecision, ShardingStrategy, dtype_name, dtype_of
from fullshard.spmd.mesh import Mesh
from fullshard.spmd.spec import Layout

SMALL_BYTES = 64 * 1024
"""Parameters with fewer bytes than this share a bucket: a message of their own would cost more than a copy."""
SMALL_BYTES_COLLECTIVE = 16 * 1024 * 1024
"""The same where pieces travel in collectives: each one costs microseconds, also inside one launch, and more the more
ranks there are, while an accelerator copies this much in less than ten."""
ALIGNMENT = 16
"""Bytes: a gather bucket is a multiple of this long, and pieces of some length start at one, so that they copy fast.
Short pieces start at a multiple of their own dtype's size: on thousands of ranks a piece may be a single element."""


def _item(dtype: str) -> int:
    found = dtype_of(dtype)
    assert found is not None
    return found.itemsize


@dataclass(frozen=True)
class ParameterPlan:
    """One parameter: its global form, and how it is split and gathered."""

    names: tuple[str, ...]
    """Its names in the model; several when it is tied."""
    shape: tuple[int, ...]
    dtype: str
    """At rest."""
    compute_dtype: str
    """When gathered."""
    reduce_dtype: str
    """In which its gradient travels."""
    trainable: bool
    spec: tuple[Any, ...]
    """Its layout at rest: for each dim None, an axis, or a tuple of axes."""
    dim: int | None
    """The dim that is split over `fsdp`; None where every rank along that axis holds the same."""
    parts: int
    """Into how many pieces that dim is cut."""
    whole: tuple[int, ...]
    """The shape a rank sees once the value is gathered: the global one, less what other axes split."""
    direct: bool
    """Gathered straight into its own storage and reduced straight from its gradient; otherwise through a bucket."""

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def piece(self) -> tuple[int, ...]:
        """The shape of one padded piece of the gathered value."""
        return tuple(-(-size // self.parts) if dim == self.dim else size for dim, size in enumerate(self.whole))

    @property
    def padding(self) -> int:
        """Rows (along `dim`) by which the pieces exceed the value."""
        return 0 if self.dim is None else self.piece[self.dim] * self.parts - self.whole[self.dim]

    @property
    def gathers(self) -> bool:
        return self.parts > 1

    @property
    def shard_bytes(self) -> int:
        """Bytes of the largest shard at rest."""
        return math.prod(self.piece) * _item(self.dtype)

    @property
    def gathered_bytes(self) -> int:
        return math.prod(self.whole) * _item(self.compute_dtype)


@dataclass(frozen=True)
class Slot:
    """A parameter's place in a bucket."""

    name: str
    offset: int
    size: int


@dataclass(frozen=True)
class Bucket:
    """Parameters that travel together. Offsets and sizes are bytes when gathered, elements when reduced."""

    dtype: str
    slots: tuple[Slot, ...]
    length: int


@dataclass(frozen=True)
class UnitPlan:
    """A module whose parameters are gathered together."""

    name: str
    """The module's name in the model; empty for the root."""
    module: str
    """Its class."""
    parameters: tuple[ParameterPlan, ...]
    gather_bucket: Bucket | None
    """Pieces of small and of padded parameters, byte for byte."""
    scatter_buckets: tuple[Bucket, ...]
    """Their gradients, per dtype: summed and scattered."""
    copy_buckets: tuple[Bucket, ...]
    """Gradients of small parameters that every rank holds whole, per dtype: summed."""

    @property
    def gathered_bytes(self) -> int:
        """Bytes that appear when the unit is gathered; what a rank already holds whole does not count."""
        return sum(p.gathered_bytes for p in self.parameters if p.gathers or p.dtype != p.compute_dtype)

    @property
    def shard_bytes(self) -> int:
        return sum(p.shard_bytes for p in self.parameters)

    @property
    def gather_traffic(self) -> tuple[int, int]:
        """Bytes that one gather produces on a rank, padding included, and how many of them are the parameters' own."""
        split = [p for p in self.parameters if p.gathers]
        own = sum(p.gathered_bytes for p in split)
        ranks = max((p.parts for p in split), default=1)
        bucket = ranks * self.gather_bucket.length if self.gather_bucket else 0
        return bucket + sum(p.gathered_bytes for p in split if p.direct), own

    @property
    def reduce_traffic(self) -> tuple[int, int]:
        """Bytes of gradients that one reduction takes from a rank, padding and flags (which parameters had a gradient)
        included, and the parameters' own."""
        trained = [p for p in self.parameters if p.trainable]
        sizes = [math.prod(p.whole) * _item(p.reduce_dtype) for p in trained]
        ranks = max((p.parts for p in trained), default=1)
        buckets = sum(ranks * b.length * _item(b.dtype) for b in self.scatter_buckets)
        buckets += sum(b.length * _item(b.dtype) for b in self.copy_buckets)
        flags = len(trained) * 4 * (ranks if all(p.gathers for p in trained) else 1)
        return flags + buckets + sum(n for p, n in zip(trained, sizes, strict=True) if p.direct), sum(sizes)


@dataclass(frozen=True)
class ShardingPlan:
    """A model on a mesh."""

    axes: tuple[tuple[str, int], ...]
    """Mesh axes and their sizes."""
    strategy: str
    replica_axes: tuple[str, ...]
    """Axes across which gradients are averaged besides `fsdp`."""
    units: tuple[UnitPlan, ...]
    """The root first, then the others in the order of the model."""

    @cached_property
    def parameters(self) -> dict[str, ParameterPlan]:
        """Every parameter by every name it has."""
        return {name: p for unit in self.units for p in unit.parameters for name in p.names}

    @property
    def shard_bytes(self) -> int:
        """Parameter bytes at rest on the fullest rank."""
        return sum(unit.shard_bytes for unit in self.units)

    def gathered_bound(self, in_flight: int = 1) -> int:
        """The most bytes of gathered values alive at once: those of the current unit, of the units around it (the root
        is one of them), and of prefetched ones."""
        if ShardingStrategy[self.strategy].keeps_after_forward:
            return sum(unit.gathered_bytes for unit in self.units)
        sizes = {unit.name: unit.gathered_bytes for unit in self.units}
        names = sorted(sizes, key=lambda name: -sizes[name])
        largest = 0
        for current in names:
            path = current.split(".")
            around = {"", *(".".join(path[:n]) for n in range(1, len(path) + 1))} & sizes.keys()
            ahead = itertools.islice((name for name in names if name not in around), in_flight)
            largest = max(largest, sum(sizes[name] for name in (*around, *ahead)))
        return largest

    def to_json(self, indent: int | None = None) -> str:
        return json.dumps(asdict(self), indent=indent)

    @classmethod
    def from_json(cls, text: str) -> ShardingPlan:
        data = json.loads(text)
        units = [
            UnitPlan(
                unit["name"],
                unit["module"],
                tuple(ParameterPlan(**_tuples(p)) for p in unit["parameters"]),
                _bucket(unit["gather_bucket"]) if unit["gather_bucket"] else None,
                tuple(_bucket(b) for b in unit["scatter_buckets"]),
                tuple(_bucket(b) for b in unit["copy_buckets"]),
            )
            for unit in data["units"]
        ]
        axes = tuple((name, size) for name, size in data["axes"])
        return cls(axes, data["strategy"], tuple(data["replica_axes"]), tuple(units))

    def __str__(self) -> str:
        axes = ", ".join(f"{name}={size}" for name, size in self.axes)
        total = sum(len(unit.parameters) for unit in self.units)
        lines = [
            f"{self.strategy} on Mesh({axes}): {len(self.units)} unit(s), {total} parameters, "
            f"{memory_size(self.shard_bytes)} per rank at rest"
        ]
        for unit in self.units:
            lines.append(
                f"{unit.name or '(root)'} [{unit.module}]  {memory_size(unit.shard_bytes)} per rank, "
                f"{memory_size(unit.gathered_bytes)} gathered"
            )
            lines += [f"  {_line(p)}" for p in unit.parameters]
        return "\n".join(lines)


def _line(p: ParameterPlan) -> str:
    dtype = p.dtype if p.dtype == p.compute_dtype else f"{p.dtype}→{p.compute_dtype}"
    notes = ["trains" if p.trainable else "frozen"]
    if not p.direct:
        notes.append("bucket")
    if p.padding:
        notes.append(f"padded by {p.padding}")
    if len(p.names) > 1:
        notes.append("tied: " + ", ".join(p.names[1:]))
    return f"{p.name}  {tuple(p.shape)} {dtype}  {p.spec}  {', '.join(notes)}"


def _tuples(data: dict[str, Any]) -> dict[str, Any]:
    return {key: _tuple(value) for key, value in data.items()}


def _tuple(value: Any) -> Any:
    return tuple(_tuple(v) for v in value) if isinstance(value, list) else value


def _bucket(data: dict[str, Any]) -> Bucket:
    return Bucket(data["dtype"], tuple(Slot(**slot) for slot in data["slots"]), data["length"])


# --- making a plan --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Terms:
    """What every parameter of a model is planned by."""

    mesh: Mesh
    strategy: ShardingStrategy
    precision: MixedPrecision
    replica_axes: tuple[str, ...] = ()
    small_bytes: int = SMALL_BYTES
    any_order: bool = True
    """Whether axes can be merged in an order other than the mesh's (torch 2.11 cannot)."""


def layout_at_rest(
    shape: Sequence[int], dtype: torch.dtype, annotation: Layout | None, terms: Terms
) -> tuple[Layout, int | None]:
    """A parameter's layout at rest and the dim that `fsdp` splits.

    Dim 0 wherever possible: its pieces are contiguous, so that gathering them needs no copy; else as `split_dim.py`
    says. A parameter that other axes split already gets `fsdp` besides: on dim 0 as the minor axis where that divides,
    else on a dim still free. Packed bytes (4-bit weights) are rows of groups and are always cut by rows.
    """
    mesh = terms.mesh
    axis = mesh.get_axis_name_idx("fsdp")
    assert axis is not None
    dims = list(annotation.dims if annotation else ((),) * len(shape))
    for dim, axes in enumerate(dims):
        if axis in axes:
            return Layout(mesh, tuple(dims)), dim
    if not terms.strategy.shards or not shape:
        return Layout(mesh, tuple(dims)), None
    cuts = [math.prod(mesh.mesh_shape[a] for a in axes) for axes in dims]
    candidates = [dim for dim, axes in enumerate(dims) if not axes]
    orderly = terms.any_order or all(a < axis for a in dims[0])
    if dims[0] and orderly and shape[0] % (cuts[0] * mesh.mesh_shape[axis]) == 0:
        candidates = [0]
    seen = [-(-size // cut) for size, cut in zip(shape, cuts, strict=True)]
    chosen = choose_dim(seen, dtype.itemsize, mesh.mesh_shape[axis], candidates)
    if not dtype.is_floating_point:
        chosen = candidates[0] if candidates else None
    if chosen is not None:
        dims[chosen] = (*dims[chosen], axis)
    return Layout(mesh, tuple(dims)), chosen


def plan_parameter(
    names: Sequence[str],
    shape: Sequence[int],
    dtype: torch.dtype,
    trainable: bool,
    annotation: Layout | None,
    terms: Terms,
) -> ParameterPlan:
    """Plan one parameter."""
    stored = terms.precision.stored(dtype, trainable)
    layout, dim = layout_at_rest(shape, stored, annotation, terms)
    axis = terms.mesh.get_axis_name_idx("fsdp")
    assert axis is not None
    # What a rank sees when gathered: pieces by every axis but `fsdp`. An annotation that does not divide leaves ranks
    # with values of different sizes; the largest is planned for.
    cuts = [math.prod(terms.mesh.mesh_shape[a] for a in axes if a != axis) for axes in layout.dims]
    whole = tuple(-(-size // cut) for size, cut in zip(shape, cuts, strict=True))
    parts = terms.mesh.mesh_shape[axis] if dim is not None else 1
    computed = terms.precision.computed(stored)
    big = math.prod(whole) * computed.itemsize >= terms.small_bytes
    divides = dim is None or (dim == 0 and whole[0] % parts == 0)
    return ParameterPlan(
        names=tuple(names),
        shape=tuple(shape),
        dtype=dtype_name(stored),
        compute_dtype=dtype_name(computed),
        reduce_dtype=dtype_name(terms.precision.reduced(computed)),
        trainable=trainable,
        spec=layout.spec,
        dim=dim,
        parts=parts,
        whole=whole,
        direct=big and divides and math.prod(whole) > 0,
    )


def replan(plan: ParameterPlan, dtype: torch.dtype, trainable: bool, precision: MixedPrecision) -> ParameterPlan:
    """The plan of a parameter that was frozen, set free or cast after it was sharded; it is split as before."""
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


def plan_unit(name: str, module: str, parameters: Sequence[ParameterPlan]) -> UnitPlan:
    """Put a unit's parameters together and lay out its buckets."""
    gathered: list[Slot] = []
    end = 0
    for p in parameters:
        if p.gathers and not p.direct:
            size = math.prod(p.piece) * _item(p.compute_dtype)
            start = _up(end, ALIGNMENT if size >= 64 * ALIGNMENT else _item(p.compute_dtype))
            gathered.append(Slot(p.name, start, size))
            end = start + size
    reduced = [p for p in parameters if p.trainable and not p.direct]
    return UnitPlan(
        name,
        module,
        tuple(parameters),
        Bucket("uint8", tuple(gathered), _up(end, ALIGNMENT)) if gathered else None,
        _reduce_buckets([p for p in reduced if p.gathers]),
        _reduce_buckets([p for p in reduced if not p.gathers]),
    )


def _up(n: int, step: int) -> int:
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
