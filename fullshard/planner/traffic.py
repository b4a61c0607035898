"""What one device sends in a training step: to others in its node, to other nodes, and over the bus to its host.

Arithmetic over a sharding plan, by the algorithms that the engine uses: rings for collectives, direct messages on
Gloo. `fsdp/counters.py` counts the same bytes while a run sends them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from fullshard.activations.levels import MLPS, Level
from fullshard.fsdp.plan import ParameterPlan, ShardingPlan, UnitPlan, item_size
from fullshard.fsdp.point_to_point import SMALL_SUM
from fullshard.fsdp.strategy import ShardingStrategy
from fullshard.parallel.tensor_plan import Exchange

METRICS = 6
"""Values of 8 bytes that the ranks add up in each step: loss, measurements, floating-point operations."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that one device sends in one step, by kind; where ranks differ, the one that sends the most."""

    inside: dict[str, int] = field(default_factory=dict)
    """To other devices of its node."""
    across: dict[str, int] = field(default_factory=dict)
    """To other nodes, on average over the devices of a node."""
    from_host: int = 0
    """From host memory to the device."""
    to_host: int = 0
    """From the device to host memory."""
    units: dict[str, int] = field(default_factory=dict)
    """Of what is sent to other devices, the part of each unit."""

    @property
    def sent(self) -> int:
        """To all other devices."""
        return sum(self.inside.values()) + sum(self.across.values())


@dataclass(frozen=True)
class LayerExchanges:
    """What tensor parallelism exchanges in a micro-batch."""

    layers: Mapping[str, Exchange]
    tokens: int
    item: int
    """Bytes of an element of an activation."""
    levels: Mapping[str, Level]
    """What each layer that can be recomputed keeps for backward."""

    def sent(self, name: str, moment: str, ring: Ring) -> int:
        """Bytes that a rank sends at the borders of a layer."""
        return exchange_bytes(self.layers[name], self.tokens, self.item, ring, moment)

    def inside(self, layer: str) -> list[str]:
        """The names of what is exchanged inside a layer."""
        return [name for name in self.layers if name.startswith(f"{layer}.")]

    def recomputed(self, ring: Ring, layer: str | None = None) -> int:
        """Bytes that a rank sends again because layers are recomputed, or one of them."""
        total = 0
        for name, level in self.levels.items() if layer is None else [(layer, self.levels[layer])]:
            again = [
                one for one in self.inside(name)
                if level >= Level.RECOMPUTE
                or (level is Level.RECOMPUTE_MLP and one.removeprefix(f"{name}.").split(".")[0] in MLPS)
            ]  # fmt: skip
            total += sum(self.sent(one, "forward", ring) for one in again)
        return total


@dataclass(frozen=True)
class Ring:
    """The ranks along some axes of a mesh, in order."""

    size: int
    crossing: float = 0.0
    """The share of its hops that lead to another node."""
    direct: bool = False
    """Whether ranks send each other messages, as on Gloo, and not around the ring."""

    def gather(self, piece: int) -> int:
        """Bytes that a rank sends to give its piece to all others."""
        return (self.size - 1) * piece

    def scatter_sum(self, whole: int) -> int:
        """Bytes that a rank sends until each has the sum of its own piece."""
        return (self.size - 1) * (whole // self.size)

    def sum(self, count: int, item: int) -> int:
        """Bytes that a rank sends until all have the sum of `count` elements."""
        if self.size == 1:
            return 0
        if not self.direct:
            return 2 * (self.size - 1) * count * item // self.size
        if count <= SMALL_SUM:
            return (self.size - 1) * count * item
        return (count + (self.size - 2) * -(-count // self.size)) * item  # the first slices are the longest


Axes = tuple[tuple[str, int], ...]
"""The axes of a mesh and their sizes."""


def ring_along(axes: Axes, names: Collection[str], gpus_per_node: int, direct: bool = False) -> Ring:
    """The ring of the first rank along some axes of a mesh, whose ranks fill one node after the other."""
    nodes = _ranks_along(axes, names) // gpus_per_node
    return Ring(len(nodes), float(np.mean(nodes != np.roll(nodes, 1))), direct)


def all_to_all(axes: Axes, gpus_per_node: int) -> Ring:
    """The ranks of `ep`, each of which sends to all others: `crossing` is the share of these on other nodes."""
    nodes = _ranks_along(axes, ("ep",)) // gpus_per_node
    return Ring(len(nodes), float(np.mean(nodes[1:] != nodes[0])) if len(nodes) > 1 else 0.0)


def _ranks_along(axes: Axes, names: Collection[str]) -> np.ndarray:
    """The ranks that differ from the first one only along some axes. Those of `ep` are consecutive."""
    order = sorted(axes, key=lambda axis: axis[0] == "ep")
    shape = [size for _, size in order]
    ranks = np.arange(math.prod(shape)).reshape(shape)
    ranks = ranks[tuple(slice(None) if name in names else 0 for name, _ in order)]
    return ranks.reshape(-1)


@dataclass(frozen=True)
class UnitTraffic:
    """Bytes that one rank sends for one unit."""

    gather: int
    """Each time that it is gathered."""
    reduce: int
    """Each time that its gradients are reduced."""
    flags: int
    """With each reduction: which parameters have a gradient."""
    replicas: int
    """With each reduction, to the other replicas: sums and flags."""
    from_host: int
    """With offload, each time that it is gathered."""
    to_host: int
    """With offload, each time that its gradients are reduced."""


class Rings:
    """The rings of a plan's units: along `fsdp` and over the replicas, on the mesh of each."""

    def __init__(self, plan: ShardingPlan, gpus_per_node: int, direct: bool = False) -> None:
        self._plan, self._gpus_per_node, self._direct = plan, gpus_per_node, direct
        self._known: dict[Axes, tuple[Ring, Ring]] = {}

    def of(self, unit: UnitPlan) -> tuple[Ring, Ring]:
        """The ring of a unit's shards, and that of its replicas."""
        axes = unit.axes or self._plan.axes
        if axes not in self._known:
            shards, replicas = (
                ring_along(axes, names, self._gpus_per_node, self._direct)
                for names in (("fsdp",), self._plan.replica_axes)
            )
            self._known[axes] = shards, replicas
        return self._known[axes]


def unit_traffic(unit: UnitPlan, shards: Ring, replicas: Ring) -> UnitTraffic:
    """What a unit sends along `fsdp` and over the replicas."""
    split = [p for p in unit.parameters if p.gathers]
    pieces = [math.prod(p.piece) * item_size(p.compute_dtype) for p in split if p.direct]
    pieces += [unit.gather_bucket.length] if unit.gather_bucket else []
    trained = [p for p in unit.parameters if p.trainable]
    reduce, flags, over_replicas = _reduction(unit, trained, shards, replicas)
    return UnitTraffic(
        gather=sum(map(shards.gather, pieces)),
        reduce=reduce,
        flags=flags,
        replicas=over_replicas,
        from_host=sum(p.shard_bytes for p in unit.parameters if p.offloaded),
        to_host=sum(p.shard_bytes for p in trained if p.offloaded),
    )


def _reduction(unit: UnitPlan, trained: Sequence[ParameterPlan], shards: Ring, replicas: Ring) -> tuple[int, int, int]:
    """Bytes of gradients and of flags along `fsdp`, and of both over the replicas."""
    if not trained:
        return 0, 0, 0
    whole = [(math.prod(p.whole), item_size(p.reduce_dtype), p.gathers) for p in trained if p.direct]
    scattered = [(count, item) for count, item, gathers in whole if gathers]
    scattered += [(shards.size * b.length, item_size(b.dtype)) for b in unit.scatter_buckets]
    copied = [(count, item) for count, item, gathers in whole if not gathers]
    copied += [(b.length, item_size(b.dtype)) for b in unit.copy_buckets]
    flag = (len(trained), item_size(trained[0].reduce_dtype))
    scatters_flags = bool(scattered) and not copied
    sums = [(count // shards.size, item) for count, item in scattered] + copied + [flag]
    flags = shards.scatter_sum(shards.size * flag[0] * flag[1]) if scatters_flags else shards.sum(*flag)
    return (
        sum(shards.scatter_sum(count * item) for count, item in scattered) + sum(shards.sum(*one) for one in copied),
        flags,
        sum(replicas.sum(*one) for one in sums),
    )


def exchange_bytes(one: Exchange, tokens: int, item: int, ring: Ring, moment: str) -> int:
    """Bytes that a rank sends at the borders of a layer, forward or backward, for so many tokens."""
    summed, gathered = one[:2][moment == "backward"], one[2:][moment == "backward"]
    return ring.sum(tokens * summed, item) + ring.gather(tokens * gathered // ring.size * item)


def units_without_backward(plan: ShardingPlan) -> frozenset[str]:
    """The units that backward does not reach, as far as the plan tells: those before the first one that trains, if the
    parameters around them (embeddings) are frozen."""
    if any(p.trainable for p in plan.units[0].parameters):
        return frozenset()
    trains = [any(p.trainable for p in unit.parameters) for unit in plan.units]
    first = trains.index(True) if any(trains) else len(trains)
    return frozenset(unit.name for unit in plan.units[1:first])


def step_traffic(
    plan: ShardingPlan,
    gpus_per_node: int,
    accumulation: int = 1,
    sync_each_batch: bool = True,
    tokens: int = 0,
    direct: bool = False,
    without_backward: frozenset[str] | None = None,
    between: LayerExchanges | None = None,
    tokens_sent: int = 0,
) -> Traffic:
    """The traffic of one step.

    Each micro-batch gathers every unit for forward, and again for backward unless the strategy keeps it; recomputing
    activations gathers nothing twice. `tokens` are those of a micro-batch: what they read from an embedding in host
    memory crosses the bus. `direct` is for ranks that send each other messages (CPUs), `between` what the ranks of
    tensor parallelism exchange, and `tokens_sent` the bytes of tokens that a micro-batch sends to experts on other
    ranks, and back.
    """
    world = ring_along(plan.axes, [name for name, _ in plan.axes], gpus_per_node, direct)
    rings = Rings(plan, gpus_per_node, direct)
    skipped = units_without_backward(plan) if without_backward is None else without_backward
    again = not ShardingStrategy[plan.strategy].keeps_after_forward
    reductions = accumulation if sync_each_batch else 1
    totals: dict[str, int] = {}
    crossing: dict[str, float] = {}

    def add(kind: str, ring: Ring, count: int) -> None:
        totals[kind] = totals.get(kind, 0) + count
        crossing[kind] = crossing.get(kind, 0.0) + ring.crossing * count

    from_host = accumulation * tokens * sum(_row_bytes(p) for unit in plan.units for p in unit.parameters if p.on_host)
    to_host, units = 0, dict[str, int]()
    for unit in plan.units:
        shards, replicas = rings.of(unit)
        sends = unit_traffic(unit, shards, replicas)
        backward = accumulation * (again and unit is not plan.units[0] and unit.name not in skipped)
        add("gather forward", shards, accumulation * sends.gather)
        add("gather backward", shards, backward * sends.gather)
        add("reduce", shards, reductions * sends.reduce)
        add("flags", shards, reductions * sends.flags)
        add("replica all-reduce", replicas, reductions * sends.replicas)
        units[unit.name] = (accumulation + backward) * sends.gather
        units[unit.name] += reductions * (sends.reduce + sends.flags + sends.replicas)
        from_host += (accumulation + backward) * sends.from_host
        to_host += reductions * sends.to_host
    for unit in plan.units:
        for axes in sorted({p.summed_axes for p in unit.parameters if p.trainable and p.summed_axes}):
            along = ring_along(plan.axes, axes, gpus_per_node, direct)
            for dtype in {p.reduce_dtype for p in unit.parameters}:
                terms = [p for p in unit.parameters if p.trainable and (p.summed_axes, p.reduce_dtype) == (axes, dtype)]
                count = sum(math.prod(p.piece) for p in terms)
                add("terms of gradients", along, reductions * along.sum(count, item_size(dtype)))
    if between is not None:
        along = ring_along(plan.axes, ("tp",), gpus_per_node)
        for moment in ("forward", "backward"):
            one_batch = sum(between.sent(name, moment, along) for name in between.layers)
            one_batch += between.recomputed(along) if moment == "backward" else 0
            add(f"between layers {moment}", along, accumulation * one_batch)
    for mesh, axes in sorted(
        {(u.axes or plan.axes, _split_over(p)) for u in plan.units for p in u.parameters if p.trainable}
    ):
        for axis in axes:
            along = ring_along(mesh, (axis,), gpus_per_node)
            add("clipping", along, along.sum(1, 8))
    if plan.expert_axes:
        add("tokens to experts", all_to_all(plan.expert_axes, gpus_per_node), accumulation * tokens_sent)
    whole = Ring(world.size, world.crossing)
    add("metrics", whole, whole.sum(METRICS, 8))
    across = {kind: round(count) for kind, count in crossing.items()}
    inside = {kind: count - across[kind] for kind, count in totals.items()}
    return Traffic(inside, across, from_host, to_host, units)


def _split_over(p: ParameterPlan) -> tuple[str, ...]:
    """The axes that split a parameter."""
    axes = [axis for entry in p.spec for axis in (entry if isinstance(entry, tuple) else (entry,)) if axis is not None]
    return tuple(sorted(axes))


def _row_bytes(p: ParameterPlan) -> int:
    return math.prod(p.whole[1:]) * item_size(p.dtype)
