"""The bytes of one unit of a sharding plan: shards, gathered values, and what a gather and a reduction need.

These are the allocations of `fsdp/parameter.py`, `fsdp/unit.py` and `fsdp/reduction.py`, counted instead of made, for
the rank that holds the most. Units that differ in names only are counted once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from fullshard.fsdp.plan import Bucket, ParameterPlan, ShardingPlan, UnitPlan, item_size
from fullshard.fsdp.point_to_point import SMALL_SUM

ROUNDING = 512
"""Bytes: torch's allocator of an accelerator rounds sizes up to a multiple of this."""


@dataclass(frozen=True)
class Transport:
    """How the values of a plan are stored and sent."""

    accelerator: bool
    """Whether the device has memory of its own, and runs beside the host."""
    point_to_point: bool
    """Whether ranks send messages over Gloo instead of using collectives."""
    offload: bool
    """Whether what is trained is in host memory, with its gradients and optimizer state."""
    ranks: int
    """The ranks that a parameter is sharded over."""
    replicas: int

    @classmethod
    def of(cls, plan: ShardingPlan, accelerator: bool, point_to_point: bool) -> Transport:
        """How the values of this plan are stored and sent."""
        sizes = dict(plan.axes)
        replicas = math.prod(sizes[axis] for axis in plan.replica_axes)
        # On the CPU host memory is the device's memory.
        return cls(accelerator, point_to_point, plan.trains_on_host and accelerator, sizes["fsdp"], replicas)

    def on(self, axes: tuple[tuple[str, int], ...]) -> Transport:
        """The same on another mesh of the same ranks; on the same one without axes."""
        sizes = dict(axes)
        return replace(self, ranks=sizes["fsdp"], replicas=sizes.get("replica", 1)) if axes else self

    def rounded(self, size: int) -> int:
        """A size as the device's allocator rounds it up."""
        return -(-size // ROUNDING) * ROUNDING if self.accelerator else size

    def tensor(self, shape: Iterable[int], dtype: str) -> int:
        """Bytes of a tensor on the device."""
        return self.rounded(math.prod(shape) * item_size(dtype))


@dataclass(frozen=True)
class UnitMemory:
    """What a unit needs at a rank, in bytes."""

    plan: UnitPlan
    transport: Transport

    @cached_property
    def trained(self) -> list[ParameterPlan]:
        """The parameters that train."""
        return [p for p in self.plan.parameters if p.trainable]

    # --- shards -------------------------------------------------------------------------------------------------------

    @cached_property
    def shards(self) -> int:
        """Shards on the device."""
        return sum(self.transport.tensor(p.piece, p.dtype) for p in self.plan.parameters if not self.on_host(p))

    @cached_property
    def host_shards(self) -> int:
        """Shards in host memory."""
        return sum(p.shard_bytes for p in self.plan.parameters if self.on_host(p))

    def on_host(self, p: ParameterPlan) -> bool:
        """Whether the shard of a parameter is in host memory."""
        return self.transport.accelerator and p.in_host_memory

    def _offloaded(self, p: ParameterPlan) -> bool:
        return self.transport.accelerator and p.offloaded

    @cached_property
    def gradients(self) -> int:
        """Gradients of the shards, in the dtype and with the padding in which they were reduced."""
        if self.transport.offload:
            return 0
        return self._results if self._kept_as_reduced else self.pieces

    @cached_property
    def pieces(self) -> int:
        """Gradients in the dtype of the shards."""
        return sum(self.transport.tensor(p.piece, p.dtype) for p in self.trained)

    @cached_property
    def left_by_backward(self) -> int:
        """Whole gradients as backward leaves them."""
        return sum(self.transport.tensor(p.whole, p.compute_dtype) for p in self.trained)

    # --- gathered values ----------------------------------------------------------------------------------------------

    def _is_copy(self, p: ParameterPlan) -> bool:
        """Whether the gathered value has memory of its own."""
        return not p.on_host and (p.gathers or p.dtype != p.compute_dtype or self._offloaded(p))

    @cached_property
    def gathered(self) -> int:
        """Gathered values."""
        return sum(self.transport.tensor(p.whole, p.compute_dtype) for p in self.plan.parameters if self._is_copy(p))

    @cached_property
    def only_casts(self) -> bool:
        """Whether gathered values are at most copies in another dtype, which the engine may keep."""
        return not any(p.gathers or self._offloaded(p) for p in self.plan.parameters)

    @cached_property
    def gathering(self) -> int:
        """What a gather holds besides the gathered values until it is waited for: pieces as they are sent."""
        sent = 0
        for p in self.plan.parameters:
            copied = self._offloaded(p) and not self.transport.point_to_point
            if p.gathers and p.direct and (p.dtype != p.compute_dtype or copied):
                sent += self.transport.tensor(p.piece, p.compute_dtype)
        bucket = self.plan.gather_bucket
        if bucket is not None:
            sent += self.transport.rounded(bucket.length)
            sent += self.transport.rounded(bucket.length * self.transport.ranks)
            inside = {slot.name for slot in bucket.slots}
            copied_pieces = [p for p in self.plan.parameters if p.name in inside and self._offloaded(p)]
            sent += sum(self.transport.tensor(p.piece, p.dtype) for p in copied_pieces)
        return sent

    @cached_property
    def copying(self) -> int:
        """What a shard in host memory that is not split takes on the device before it is cast; one at a time."""
        copied = [p for p in self.plan.parameters if not p.gathers and self._offloaded(p)]
        return max((self.transport.tensor(p.piece, p.dtype) for p in copied), default=0)

    # --- gradients ----------------------------------------------------------------------------------------------------

    @property
    def alone(self) -> bool:
        """Whether nothing is sent to reduce the unit's gradients."""
        return self.transport.ranks * self.transport.replicas == 1 or not self.trained

    def _whole(self, p: ParameterPlan) -> int:
        return self.transport.tensor(p.whole, p.reduce_dtype)

    @cached_property
    def whole_gradients(self) -> int:
        """Whole gradients in the dtype in which they are reduced."""
        return sum(self._whole(p) for p in self.trained)

    @cached_property
    def converting(self) -> int:
        """The most bytes above the gradients that autograd left, while they are converted one by one."""
        most = now = 0
        for p in self.trained:
            if p.compute_dtype != p.reduce_dtype:
                now += self._whole(p)
                most = max(most, now)
                now -= self.transport.tensor(p.whole, p.compute_dtype)
        return most

    @cached_property
    def _scattered(self) -> list[tuple[int, str]]:
        """Elements and dtype of what is reduce-scattered."""
        direct = [(math.prod(p.whole), p.reduce_dtype) for p in self.trained if p.gathers and p.direct]
        return direct + [(b.length * self.transport.ranks, b.dtype) for b in self.plan.scatter_buckets]

    @cached_property
    def _summed(self) -> list[tuple[int, str]]:
        """Elements and dtype of what is all-reduced."""
        direct = [(math.prod(p.whole), p.reduce_dtype) for p in self.trained if not p.gathers and p.direct]
        return direct + [(b.length, b.dtype) for b in self.plan.copy_buckets]

    @cached_property
    def _flags(self) -> int:
        """Elements of the flags that say which parameters have a gradient."""
        return len(self.trained) * (1 if self._summed or not self._scattered else self.transport.ranks)

    @cached_property
    def bucketed(self) -> int:
        """Whole gradients that are copied into buckets."""
        return sum(self._whole(p) for p in self.trained if not p.direct)

    @cached_property
    def reducing(self) -> int:
        """What a reduction holds besides whole gradients: buckets, flags, and what it receives."""
        if self.alone:
            return 0
        t, dtype = self.transport, self.trained[0].reduce_dtype
        size = t.tensor([len(self.trained)], dtype)
        size += sum(t.tensor([b.length * t.ranks], b.dtype) for b in self.plan.scatter_buckets)
        size += sum(t.tensor([b.length], b.dtype) for b in self.plan.copy_buckets)
        flags = (self._flags, dtype)
        repeated = bool(self._scattered) and not self._summed
        size += t.tensor([self._flags], dtype) if repeated else 0
        scattered, summed = ([*self._scattered, flags], []) if repeated else (self._scattered, [*self._summed, flags])
        if t.ranks > 1:
            size += sum(self._received(n // t.ranks, each) for n, each in scattered)
            size += sum(self._exchanged(n, each, t.ranks) for n, each in summed)
        elif t.replicas > 1:
            size += sum(self._exchanged(n, each, t.replicas) for n, each in summed)
        return size

    def _received(self, count: int, dtype: str) -> int:
        """Buffers for the pieces of a reduce-scatter: one for each other rank, or the piece alone."""
        others = self.transport.ranks - 1 if self.transport.point_to_point else 1
        return others * self.transport.tensor([count], dtype)

    def _exchanged(self, count: int, dtype: str, ranks: int) -> int:
        """Buffers of an all-reduce; collectives sum in place."""
        if not self.transport.point_to_point:
            return 0
        each = count if count <= SMALL_SUM else -(-count // ranks)
        return (ranks - 1) * self.transport.tensor([each], dtype)

    @cached_property
    def _results(self) -> int:
        """This rank's part of the sums."""
        if self.alone:
            return self.whole_gradients
        t = self.transport
        pieces = sum(t.tensor([n // t.ranks], self._sum_dtype(dtype)) for n, dtype in self._scattered)
        return pieces + sum(t.tensor([n], dtype) for n, dtype in self._summed)

    def _sum_dtype(self, dtype: str) -> str:
        """Messages are summed in fp32 if they are narrower."""
        return "float32" if self.transport.point_to_point and item_size(dtype) < 4 else dtype

    @cached_property
    def _kept_as_reduced(self) -> bool:
        """Whether the sums themselves become the gradients of the shards."""
        if self.alone:
            return all(p.reduce_dtype == p.dtype for p in self.trained)
        return all(self._sum_dtype(p.reduce_dtype) == p.dtype for p in self.trained)

    @cached_property
    def finishing(self) -> int:
        """The most bytes when the sums become gradients of the shards."""
        across = self.transport.ranks > 1 and self.transport.replicas > 1
        again = [(n // self.transport.ranks, dtype) for n, dtype in self._scattered] + self._summed
        sums = sum(self._exchanged(n, dtype, self.transport.replicas) for n, dtype in again) if across else 0
        return self._results + max(sums, 0 if self._kept_as_reduced else self.pieces)


def signature(unit: UnitPlan) -> Any:
    """Equal for units that differ in names only."""
    buckets = (unit.gather_bucket, *unit.scatter_buckets, *unit.copy_buckets)
    parameters = tuple(
        (
            p.shape,
            p.dtype,
            p.compute_dtype,
            p.reduce_dtype,
            p.trainable,
            p.dim,
            p.parts,
            p.whole,
            p.direct,
            p.on_host,
            p.offloaded,
        )
        for p in unit.parameters
    )
    return parameters, tuple(_outline(b) for b in buckets), unit.axes


def _outline(bucket: Bucket | None) -> Any:
    return None if bucket is None else (bucket.dtype, bucket.length)


def units_of(plan: ShardingPlan, transport: Transport) -> dict[str, UnitMemory]:
    """The memory of every unit by its name."""
    by_kind: dict[Any, UnitMemory] = {}
    return {
        unit.name: by_kind.setdefault(signature(unit), UnitMemory(unit, transport.on(unit.axes))) for unit in plan.units
    }


def units_by_layer(plan: ShardingPlan, layers: Sequence[str]) -> dict[str, list[UnitPlan]]:
    """The units that are gathered for each layer; under the empty name those around the layers."""
    units: dict[str, list[UnitPlan]] = {layer: [] for layer in ("", *layers)}
    for unit in plan.units:
        owner = unit.name
        while owner not in units:  # a unit inside a layer
            owner = owner.rpartition(".")[0]
        units[owner].append(unit)
    return units
