"""The sharding plan: plain data that describes how a model is sharded over a mesh.

Units → parameters → (global shape, dtypes, trainable or not, tied names, layout, padding), and which small parameters
share buckets. `plan_layout.py` makes it, the engine executes it, checkpoints store it. No tensors and no communication.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from fullshard.config.byte_size import memory_size
from fullshard.fsdp.strategy import ShardingStrategy, dtype_of


def item_size(dtype: str) -> int:
    """Bytes of one element of a dtype, given by name."""
    torch_dtype = dtype_of(dtype)
    assert torch_dtype is not None
    return torch_dtype.itemsize


@dataclass(frozen=True)
class ParameterPlan:
    """One parameter: its global shape, and how it is split and gathered."""

    names: tuple[str, ...]
    """Its names in the model; several when it is tied."""
    shape: tuple[int, ...]
    dtype: str
    """The dtype of the shards."""
    compute_dtype: str
    """The dtype of the gathered value."""
    reduce_dtype: str
    """The dtype in which its gradient is reduced."""
    trainable: bool
    spec: tuple[Any, ...]
    """The layout of the shards: for each dim None, an axis, or a tuple of axes."""
    dim: int | None
    """The dim that is split over `fsdp`; None if it is replicated along that axis."""
    parts: int
    """The number of pieces that dim is split into."""
    whole: tuple[int, ...]
    """The shape of the gathered value on a rank: the global shape, split by the other axes."""
    direct: bool
    """Whether it is gathered directly into its own storage and reduced directly from its gradient, not in a bucket."""
    on_host: bool = False
    """Whether every rank holds it whole in host memory, and reads it there (`host_embedding.py`)."""
    offloaded: bool = False
    """Whether its shards are in host memory, from which they are copied when it is gathered."""
    form: str = ""
    """The format of the released model's weight that it is a part of; empty for other parameters."""
    weights: int = 0
    """How many weights its bytes are the codes of, in such a format."""
    local_axes: tuple[str, ...] = ()
    """The axes of `spec` along which its module computes with this rank's slice (`local_axes.py`)."""
    summed_axes: tuple[str, ...] = ()
    """The axes along which each rank has a term of its gradient."""

    @property
    def name(self) -> str:
        """The first of the parameter's names."""
        return self.names[0]

    @property
    def in_host_memory(self) -> bool:
        """Whether its shards are in host memory."""
        return self.on_host or self.offloaded

    @property
    def piece(self) -> tuple[int, ...]:
        """The shape of one rank's piece of the gathered value, padded."""
        return tuple(-(-size // self.parts) if dim == self.dim else size for dim, size in enumerate(self.whole))

    @property
    def padding(self) -> int:
        """Rows (along `dim`) by which all pieces together are longer than the value."""
        return 0 if self.dim is None else self.piece[self.dim] * self.parts - self.whole[self.dim]

    @property
    def gathers(self) -> bool:
        """Whether ranks have different shards."""
        return self.parts > 1

    @property
    def shard_bytes(self) -> int:
        """Bytes of the largest shard."""
        return math.prod(self.piece) * item_size(self.dtype)

    @property
    def gathered_bytes(self) -> int:
        """The bytes of the gathered value in its compute dtype."""
        return math.prod(self.whole) * item_size(self.compute_dtype)


@dataclass(frozen=True)
class Slot:
    """A parameter's range in a bucket."""

    name: str
    offset: int
    size: int


@dataclass(frozen=True)
class Bucket:
    """Parameters that are sent together. Offsets and sizes are in bytes for gathers, in elements for reductions."""

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
    """The pieces of small and of padded parameters, as bytes."""
    scatter_buckets: tuple[Bucket, ...]
    """Their gradients, per dtype: reduce-scattered."""
    copy_buckets: tuple[Bucket, ...]
    """Gradients of small parameters that every rank holds whole, per dtype: all-reduced."""
    axes: tuple[tuple[str, int], ...] = ()
    """The mesh of its parameters, if it is another one of the same ranks than the model's (experts)."""

    @property
    def gathered_bytes(self) -> int:
        """Bytes allocated when the unit is gathered; parameters that a rank already holds whole do not count."""
        allocated = [p for p in self.parameters if p.gathers or p.dtype != p.compute_dtype]
        return sum(p.gathered_bytes for p in allocated if not p.on_host)

    @property
    def shard_bytes(self) -> int:
        """The bytes of a rank's shards of the unit."""
        return sum(p.shard_bytes for p in self.parameters)

    @property
    def gather_traffic(self) -> tuple[int, int]:
        """Bytes that one gather produces on a rank, with padding, and the bytes of the parameters alone."""
        split = [p for p in self.parameters if p.gathers]
        own = sum(p.gathered_bytes for p in split)
        ranks = max((p.parts for p in split), default=1)
        bucket = ranks * self.gather_bucket.length if self.gather_bucket else 0
        return bucket + sum(p.gathered_bytes for p in split if p.direct), own

    @property
    def reduce_traffic(self) -> tuple[int, int]:
        """Bytes that one reduction takes from a rank, with padding and flags (which parameters had a gradient), and the
        bytes of the gradients alone."""
        trained = [p for p in self.parameters if p.trainable]
        sizes = [math.prod(p.whole) * item_size(p.reduce_dtype) for p in trained]
        ranks = max((p.parts for p in trained), default=1)
        buckets = sum(ranks * b.length * item_size(b.dtype) for b in self.scatter_buckets)
        buckets += sum(b.length * item_size(b.dtype) for b in self.copy_buckets)
        flags = len(trained) * 4 * (ranks if all(p.gathers for p in trained) else 1)
        return flags + buckets + sum(n for p, n in zip(trained, sizes, strict=True) if p.direct), sum(sizes)


@dataclass(frozen=True)
class ShardingPlan:
    """The plan of a model on a mesh."""

    axes: tuple[tuple[str, int], ...]
    """Mesh axes and their sizes."""
    strategy: str
    replica_axes: tuple[str, ...]
    """The axes besides `fsdp` over which gradients are averaged."""
    units: tuple[UnitPlan, ...]
    """The root first, then the others in module order."""

    @cached_property
    def parameters(self) -> dict[str, ParameterPlan]:
        """Every parameter by every name it has."""
        return {name: p for unit in self.units for p in unit.parameters for name in p.names}

    @property
    def expert_axes(self) -> tuple[tuple[str, int], ...]:
        """The mesh of experts, if they have one of their own."""
        return next((unit.axes for unit in self.units if unit.axes), ())

    @property
    def data_size(self) -> int:
        """The number of ranks with rows of their own."""
        sizes = dict(self.axes)
        return math.prod(sizes[axis] for axis in {"fsdp", *self.replica_axes})

    @property
    def shard_bytes(self) -> int:
        """Bytes of all shards on the rank that holds the most."""
        return sum(unit.shard_bytes for unit in self.units)

    @property
    def host_bytes(self) -> int:
        """Bytes of the parameters that are in host memory."""
        return sum(p.shard_bytes for unit in self.units for p in unit.parameters if p.in_host_memory)

    @property
    def trains_on_host(self) -> bool:
        """Whether gradients and optimizer state are in host memory, because what is trained is offloaded."""
        return any(p.offloaded and p.trainable for unit in self.units for p in unit.parameters)

    def offloaded(self) -> ShardingPlan:
        """The same plan with all shards in host memory."""
        units = (
            replace(unit, parameters=tuple(replace(p, offloaded=not p.on_host) for p in unit.parameters))
            for unit in self.units
        )
        return replace(self, units=tuple(units))

    def gathered_bound(self, in_flight: int = 1) -> int:
        """The most bytes of gathered values allocated at once: the current unit, the units around it (always the root),
        and prefetched ones."""
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
        """The plan as JSON; see `from_json`."""
        return json.dumps(asdict(self), indent=indent)

    @classmethod
    def from_json(cls, text: str) -> ShardingPlan:
        """A plan from its JSON."""
        data = json.loads(text)
        units = [
            UnitPlan(
                unit["name"],
                unit["module"],
                tuple(ParameterPlan(**_with_tuples(p)) for p in unit["parameters"]),
                _bucket(unit["gather_bucket"]) if unit["gather_bucket"] else None,
                tuple(_bucket(b) for b in unit["scatter_buckets"]),
                tuple(_bucket(b) for b in unit["copy_buckets"]),
                tuple((name, size) for name, size in unit.get("axes", ())),
            )
            for unit in data["units"]
        ]
        axes = tuple((name, size) for name, size in data["axes"])
        return cls(axes, data["strategy"], tuple(data["replica_axes"]), tuple(units))

    def __str__(self) -> str:
        axes = mesh_text(self.axes)
        total = sum(len(unit.parameters) for unit in self.units)
        lines = [
            f"{self.strategy} on Mesh({axes}): {len(self.units)} unit(s), {total} parameters, "
            f"{memory_size(self.shard_bytes)} per rank"
        ]
        for unit in self.units:
            lines.append(
                f"{unit.name or '(root)'} [{unit.module}]  {memory_size(unit.shard_bytes)} per rank, "
                f"{memory_size(unit.gathered_bytes)} gathered"
                + (f", on Mesh({mesh_text(unit.axes)})" if unit.axes else "")
            )
            lines += [f"  {_line(p)}" for p in unit.parameters]
        return "\n".join(lines)


def mesh_text(axes: Iterable[tuple[str, int]]) -> str:
    """Axes and their sizes as text."""
    return ", ".join(f"{name}={size}" for name, size in axes)


def _line(p: ParameterPlan) -> str:
    dtype = p.dtype if p.dtype == p.compute_dtype else f"{p.dtype}→{p.compute_dtype}"
    notes = ["trains" if p.trainable else "frozen"]
    if p.in_host_memory:
        notes.append("on the host")
    if not p.on_host and not p.direct:
        notes.append("bucket")
    if p.summed_axes:
        notes.append(f"gradient summed over {', '.join(p.summed_axes)}")
    if p.padding:
        notes.append(f"padded by {p.padding}")
    if len(p.names) > 1:
        notes.append("tied: " + ", ".join(p.names[1:]))
    return f"{p.name}  {tuple(p.shape)} {dtype}  {p.spec}  {', '.join(notes)}"


def _with_tuples(data: dict[str, Any]) -> dict[str, Any]:
    return {key: _as_tuple(value) for key, value in data.items()}


def _as_tuple(value: Any) -> Any:
    return tuple(_as_tuple(v) for v in value) if isinstance(value, list) else value


def _bucket(data: dict[str, Any]) -> Bucket:
    return Bucket(data["dtype"], tuple(Slot(**slot) for slot in data["slots"]), data["length"])
