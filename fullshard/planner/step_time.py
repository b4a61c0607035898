"""An estimate of how long a training step takes, with its parts and what it assumes.

The work comes from the traced segments (operations, bytes read and written), what is sent from the sharding plan, the
speeds from the machine; `overlap.py` lays them out in time.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fullshard.activations.levels import Level
from fullshard.fsdp.plan import ShardingPlan, UnitPlan, item_size
from fullshard.fsdp.strategy import BackwardPrefetch, ShardingStrategy
from fullshard.models.kernels_on_meta import ATTENTION, ATTENTION_BACKWARD, GROUPED, PLAIN
from fullshard.planner.batch import BatchShape
from fullshard.planner.machines import Machine
from fullshard.planner.step_trace import Segment, TracedModel
from fullshard.planner.traffic import (
    LayerExchanges,
    Ring,
    Rings,
    all_to_all,
    ring_along,
    unit_traffic,
    units_without_backward,
)
from fullshard.planner.unit_memory import units_by_layer


@dataclass
class Stage:
    """A unit's forward or backward, in seconds."""

    products: float = 0.0
    """Matrix products and attention."""
    memory: float = 0.0
    """Operations that memory bandwidth limits."""
    arrives: float = 0.0
    """Gathering its parameters, which must come before its compute."""
    leaves: float = 0.0
    """Reducing its gradients, which must come after it."""
    between: float = 0.0
    """Sums of activations between the ranks of tensor parallelism, for which compute waits."""
    bus: float = 0.0
    """Moving activations to or from the host, beside its compute."""
    tokens: float = 0.0
    """Sending tokens to experts on other ranks and back, which its compute waits for."""

    @property
    def compute(self) -> float:
        """Seconds of the device, with those in which it waits for activations and tokens of other ranks."""
        return max(self.products + self.memory + self.between, self.bus) + self.tokens


def micro_batch_seconds(
    forward: Sequence[Stage],
    backward: Sequence[Stage],
    forward_prefetch: bool = True,
    backward_prefetch: BackwardPrefetch = BackwardPrefetch.BACKWARD_PRE,
    reduces: bool = True,
) -> float:
    """Seconds of one micro-batch; without `reduces`, gradients are held back (`no_sync`)."""
    timeline = _Timeline()
    timeline.run(forward, forward_prefetch, reduces=False)
    timeline.run(backward, backward_prefetch is BackwardPrefetch.BACKWARD_PRE, reduces)
    return max(timeline.computed, timeline.link)


class _Timeline:
    """Two resources: the device's compute, and the links that gathers and reductions share."""

    def __init__(self) -> None:
        self.computed = 0.0
        """When compute so far is over."""
        self.link = 0.0
        """When the communication so far is over."""

    def run(self, stages: Sequence[Stage], prefetch: bool, reduces: bool) -> None:
        """One pass; with `prefetch` the next unit is gathered from the beginning of a unit's compute on."""
        reduced = [0.0, 0.0]
        gathered = self._send(stages[0].arrives, self.computed) if stages else 0.0
        for stage, following in itertools.pairwise((*stages, Stage())):
            # At most one unit's gradients are reduced while another's are computed.
            begins = max(self.computed, gathered, reduced[-2])
            self.computed = begins + stage.compute
            if prefetch:
                gathered = self._send(following.arrives, begins)
            reduced.append(self._send(stage.leaves, self.computed) if reduces else 0.0)
            if not prefetch:
                gathered = self._send(following.arrives, self.computed)

    def _send(self, seconds: float, earliest: float) -> float:
        """Use the links for some time; returns when that is over."""
        if not seconds:
            return 0.0
        self.link = max(self.link, earliest) + seconds
        return self.link


# Measured on one H200; other devices are taken to reach the same shares of their datasheets.
PRODUCTS, FP8_PRODUCTS = 0.694, 0.617
"""The shares of the dense rates that matrix products reach; in fp8 with the conversion of their operands: alone, such a
product reaches 0.66."""
SHARES = {PLAIN: PRODUCTS, ATTENTION: 0.485, ATTENTION_BACKWARD: 0.38, GROUPED: 0.63}
"""The shares of the dense rates that plain products, attention, its backward, and grouped products reach."""
MEMORY = 0.708
"""The share of the memory bandwidth that a copy reaches."""
LINK, HOST_LINK = 0.80, 0.875
"""The shares of a link's bandwidth that collectives and copies from and to the host reach."""
HOP = 3e-6
"""Seconds for each hop of a ring."""
HOST_PASS, HOST_PARAMETER = 2.2e-3, 0.09e-3
"""Seconds that the host needs to issue one pass of a layer, and more for each of its parameters."""
HOST_BANDWIDTH = 100e9
"""Bytes per second that the optimizer reads and writes in the memory of one host."""


@dataclass(frozen=True)
class StepOptions:
    """Settings that a step's time depends on."""

    dtype: str = "bfloat16"
    """The dtype of matrix products; "tf32" for float32 with TF32."""
    sync_each_batch: bool = True
    forward_prefetch: bool = True
    backward_prefetch: BackwardPrefetch = BackwardPrefetch.BACKWARD_PRE
    optimizer_state: int = 0
    """Bytes of optimizer state on one rank."""
    between: LayerExchanges | None = None
    """What tensor parallelism exchanges."""


@dataclass(frozen=True)
class StepTime:
    """The time of one step."""

    parts: dict[str, float]
    """Seconds by part. Communication and transfers count only where compute waits for them."""
    tokens: int
    """Tokens in the step, over all ranks."""
    flops: int
    """Floating-point operations of one rank, recomputed ones included."""
    assumptions: tuple[str, ...] = field(default=(), compare=False)

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(self.parts.values())

    @property
    def tokens_per_second(self) -> float:
        """Over all ranks."""
        return self.tokens / self.total if self.total else math.inf


@dataclass(frozen=True)
class TracedStep(TracedModel):
    """One micro-batch of the whole model, by segments."""

    levels: Sequence[Level]
    """What each layer keeps for backward."""
    batch: BatchShape

    @classmethod
    def of(cls, model: TracedModel, levels: Sequence[Level], batch: BatchShape) -> TracedStep:
        """The step of a traced model whose layers have these levels."""
        return cls(model.traces, model.layers, model.kinds, levels, batch)

    def around(self, moment: str) -> list[Segment]:
        """The model's own segments around its layers."""
        common = max(set(self.levels), key=list(self.levels).count) if self.levels else min(self.traces)
        return [s for s in self.traces[common].segments if not s.unit and s.moment == moment]

    def of_layer(self, index: int, moment: str) -> list[Segment]:
        """The segments of one layer; none where backward does not reach it."""
        kind = self.kinds[self.layers[index]]
        return [s for s in self.traces[self.levels[index]].segments if s.unit == kind and s.moment == moment]

    def flops(self) -> int:
        """Floating-point operations of one micro-batch."""
        return self._sum(lambda segment: segment.flops)

    def tokens_sent(self) -> int:
        """Bytes of tokens that one micro-batch sends to experts on other ranks, and back."""
        return self._sum(lambda segment: segment.tokens_sent)

    def recomputed(self) -> int:
        """Those of them that repeat what forward has computed."""
        return self._sum(lambda segment: segment.recomputed)

    def _sum(self, value: Callable[[Segment], int]) -> int:
        """A sum over the segments of all layers and of the model around them."""
        own = sum(value(s) for moment in ("forward", "loss", "backward") for s in self.around(moment))
        alike = Counter((self.kinds[layer], level) for layer, level in zip(self.layers, self.levels, strict=True))
        return own + sum(
            count * sum(value(s) for s in self.traces[level].segments if s.unit == kind)
            for (kind, level), count in alike.items()
        )

    def moved_input(self, index: int) -> int:
        """Bytes of a layer's input that are in host memory between forward and backward."""
        if self.levels[index] is not Level.OFFLOAD or Level.RECOMPUTE not in self.traces:
            return 0
        kind = self.kinds[self.layers[index]]
        kept = [
            sum(s.kept for s in self.traces[level].segments if s.unit == kind and s.moment == "forward")
            for level in (Level.RECOMPUTE, Level.OFFLOAD)
        ]
        return max(0, kept[0] - kept[1])


def flops_per_token(model: TracedModel, batch: BatchShape) -> float:
    """Floating-point operations per token of forward and backward, without recomputation."""
    step = TracedStep.of(model, [min(model.traces)] * len(model.layers), batch)
    return (step.flops() - step.recomputed()) / batch.tokens


def estimate_time(
    plan: ShardingPlan, machine: Machine, model: TracedModel, levels: Sequence[Level], batch: BatchShape,
    options: StepOptions,
) -> StepTime:  # fmt: skip
    """The time of one step of a planned model whose layers keep what `levels` say."""
    step = TracedStep.of(model, levels, batch)
    clock = _Clock(plan, machine, step, options)
    forward, backward = clock.forward(), clock.backward()
    stages = (*forward, *backward)
    products, memory, exchanged, tokens, compute = (
        sum(getattr(s, part) for s in stages) for part in ("products", "memory", "between", "tokens", "compute")
    )
    prefetch = (options.forward_prefetch, options.backward_prefetch)
    synced = micro_batch_seconds(forward, backward, *prefetch)
    between = synced if options.sync_each_batch else micro_batch_seconds(forward, backward, *prefetch, reduces=False)
    many = batch.accumulation
    device = synced + (many - 1) * between
    parts = {
        "matrix products and attention": many * products,
        "memory-bound operations": many * memory,
        "sums of activations between ranks": many * exchanged,
        "sending tokens to experts": many * tokens,
        "waiting for activations from the host": many * (compute - products - memory - exchanged - tokens),
        "waiting for communication": device - many * compute,
        "waiting for the host to issue work": max(0.0, many * clock.host_seconds() - device),
        "optimizer and clipping": clock.optimizer_seconds(),
    }
    return StepTime(
        {part: seconds for part, seconds in parts.items() if seconds > 1e-9},
        tokens=batch.tokens * many * plan.data_size,
        flops=step.flops() * many,
        assumptions=tuple(clock.assumptions()),
    )


class _Clock:
    """Turns the work of a step into seconds on one machine."""

    def __init__(self, plan: ShardingPlan, machine: Machine, step: TracedStep, options: StepOptions) -> None:
        self.plan, self.machine, self.step, self.options = plan, machine, step, options
        direct = machine.kind == "cpu"
        self.rings = Rings(plan, machine.gpus_per_node, direct)
        self.experts = all_to_all(plan.expert_axes, machine.gpus_per_node) if plan.expert_axes else Ring(1)
        self.along_tp = ring_along(plan.axes, ("tp",), machine.gpus_per_node)
        self.rate = rate_of(machine, options.dtype)
        self.bandwidth = machine.memory_bandwidth * MEMORY
        self.units = units_by_layer(plan, step.layers)
        keeps = ShardingStrategy[plan.strategy].keeps_after_forward
        kept = {plan.units[0].name, *units_without_backward(plan)}
        self.gathered_again = {u.name for u in plan.units if not keeps and u.name not in kept}
        self._stages: dict[tuple[str, str, Level, int], Stage] = {}

    # --- stages -------------------------------------------------------------------------------------------------------

    def forward(self) -> list[Stage]:
        """The model's own operations before its layers, the layers, and the loss."""
        before = self._stage(self.step.around("forward"))
        self._gather(before, self.units[""])
        layers = [self._layer(index, "forward") for index in range(len(self.step.layers))]
        loss = self._stage(self.step.around("loss"))
        # Nearly all that it moves are operands of the head's products, chunk by chunk, while these compute.
        loss.memory = max(0.0, loss.memory - loss.products)
        return [before, *layers, loss]

    def backward(self) -> list[Stage]:
        """The layers in reverse, and what is left."""
        layers = [self._layer(index, "backward") for index in reversed(range(len(self.step.layers)))]
        last = self._stage(self.step.around("backward"))
        self._reduce(last, self.units[""])
        return [*layers, last]

    def _layer(self, index: int, moment: str) -> Stage:
        """A layer's stage; layers that are alike share it."""
        step, name = self.step, self.step.layers[index]
        units, level = self.units[name], step.levels[index]
        gathered = units if moment == "forward" else [unit for unit in units if unit.name in self.gathered_again]
        key = (step.kinds[name], moment, level, len(gathered))
        if key in self._stages:
            return self._stages[key]
        recomputed = moment == "backward" and level >= Level.RECOMPUTE
        stage = self._stages[key] = self._stage(step.of_layer(index, moment))
        weights = packed_weights(units)
        tokens, passes = step.batch.tokens, 1 + recomputed
        if weights.fp8 and "float8" in self.machine.flops:  # at a rate of their own
            fp8 = 2 * tokens * weights.fp8 * passes
            stage.products += fp8 / (self.machine.flops["float8"] * FP8_PRODUCTS) - fp8 / (self.rate * PRODUCTS)
        # Weights in few bits are written out in 16 bits for a product.
        stage.memory += passes * (2.5 * weights.four_bit + unpacked_bytes(units)) / self.bandwidth
        stage.bus = self._bus(step.moved_input(index))
        stage.between = self._between(name, moment)
        self._gather(stage, gathered)
        if moment == "backward":
            self._reduce(stage, units)
        return stage

    def _stage(self, segments: Sequence[Segment]) -> Stage:
        moved = sum(s.read_write for s in segments)
        at_full_rate = sum(
            count / SHARES[kind] for s in segments for kind, count in (s.kinds or {PLAIN: s.flops}).items()
        )
        tokens = self._link(sum(s.tokens_sent for s in segments), self.experts)
        return Stage(products=at_full_rate / self.rate, memory=moved / self.bandwidth, tokens=tokens)

    def _gather(self, stage: Stage, units: Sequence[UnitPlan]) -> None:
        """Add what gathering units costs."""
        for unit in units:
            shards, replicas = self.rings.of(unit)
            sends = unit_traffic(unit, shards, replicas)
            stage.arrives += self._link(sends.gather, shards)
            stage.arrives += self._bus(sends.from_host)
            cast = [p for p in unit.parameters if p.dtype != p.compute_dtype]
            moved = sum(math.prod(p.piece) * (item_size(p.dtype) + item_size(p.compute_dtype)) for p in cast)
            stage.memory += moved / self.bandwidth

    def _reduce(self, stage: Stage, units: Sequence[UnitPlan]) -> None:
        """Add what reducing the gradients of units costs: they are cast, summed, and added to those of the shards."""
        for unit in units:
            shards, replicas = self.rings.of(unit)
            sends = unit_traffic(unit, shards, replicas)
            stage.leaves += self._link(sends.reduce, shards) + self._link(sends.replicas, replicas)
            stage.leaves += self._bus(sends.to_host)
            trained = [p for p in unit.parameters if p.trainable]
            moved = sum(math.prod(p.whole) * (item_size(p.compute_dtype) + item_size(p.reduce_dtype)) for p in trained)
            stage.memory += moved / self.bandwidth

    # --- seconds ------------------------------------------------------------------------------------------------------

    def _link(self, sent: int, ring: Ring) -> float:
        """Seconds of a collective in which this rank sends some bytes. The slower kind of hop sets the pace."""
        if not sent:
            return 0.0
        inside = sent * (1 - ring.crossing) / self.machine.node_link
        across = sent * ring.crossing / self.machine.network
        return max(inside, across) / LINK + ring.size * HOP

    def _between(self, layer: str, moment: str) -> float:
        """Seconds of the sums at the borders inside a layer; those of a layer that is recomputed come again."""
        between = self.options.between
        if between is None:
            return 0.0
        names = between.inside(layer)
        seconds = sum(self._link(between.sent(name, moment, self.along_tp), self.along_tp) for name in names)
        again = between.recomputed(self.along_tp, layer) if moment == "backward" and layer in between.levels else 0
        return seconds + self._link(again, self.along_tp)

    def _bus(self, count: int) -> float:
        """Seconds of a copy between device and host."""
        return count / (self.machine.host_link * HOST_LINK)

    def optimizer_seconds(self) -> float:
        """The update reads parameters, gradients and state and writes parameters and state; clipping reads gradients
        and scales them."""
        trained = sum(p.shard_bytes for unit in self.plan.units for p in unit.parameters if p.trainable)
        moved = (2 + 1 + 3) * trained + 2 * self.options.optimizer_state
        on_host = self.plan.trains_on_host and not self.machine.shares_host_memory
        return moved / (HOST_BANDWIDTH / self.machine.gpus_per_node if on_host else self.bandwidth)

    def host_seconds(self) -> float:
        """The least time in which the host can issue one micro-batch; 0 for a CPU, which computes what it issues."""
        if self.machine.shares_host_memory:
            return 0.0
        counts = {layer: sum(len(unit.parameters) for unit in units) for layer, units in self.units.items()}
        return sum(
            (2 + (level >= Level.RECOMPUTE)) * (HOST_PASS + HOST_PARAMETER * counts[layer])
            for layer, level in zip(self.step.layers, self.step.levels, strict=True)
        )

    def assumptions(self) -> Iterator[str]:
        """What the estimate takes for granted, in words."""
        machine, dtype = self.machine, self.options.dtype
        yield (
            f"matrix products reach {PRODUCTS:.0%} of {self.rate / 1e12:,.4g} TFLOP/s ({dtype}), attention "
            f"{SHARES[ATTENTION]:.0%}, other operations {MEMORY:.0%} of {machine.memory_bandwidth / 1e9:,.4g} GB/s: "
            f"the shares measured on one H200"
        )
        if dtype not in machine.flops:
            yield f"{machine.name} has no {dtype} in hardware; its float32 rate is used"
        if math.prod(size for _, size in self.plan.axes) > 1:
            across = f", {machine.network / 1e9:,.4g} GB/s per device between nodes" if machine.nodes > 1 else ""
            yield f"links reach {LINK:.0%} of {machine.node_link / 1e9:,.4g} GB/s inside a node{across}"
        if self.plan.host_bytes:
            yield (
                f"transfers to the host reach {HOST_LINK:.0%} of {machine.host_link / 1e9:,.4g} GB/s, the optimizer "
                f"there {HOST_BANDWIDTH / 1e9:,.4g} GB/s per node"
            )
        yield "the data is ready in time; no evaluation, checkpoint or compilation falls into the step"


def rate_of(machine: Machine, dtype: str) -> float:
    """Floating-point operations per second of matrix products in a dtype; in float32 where it has none in hardware."""
    return machine.flops.get(dtype, machine.flops["float32"])


class PackedWeights(NamedTuple):
    """The number of weights that a unit multiplies by and that are stored in few bits, by format."""

    four_bit: int
    fp8: int


def packed_weights(units: Iterable[UnitPlan]) -> PackedWeights:
    """The packed weights of units."""
    four_bit = fp8 = 0
    for unit in units:
        names = {name for p in unit.parameters for name in p.names}
        for p in unit.parameters:
            owner, _, part = p.name.rpartition(".")
            if p.form:
                continue  # see `unpacked_bytes`
            if f"{owner}.scales" in names:
                fp8 += math.prod(p.shape) * (part == "packed")
            elif part == "packed" or f"{p.name}_absmax" in names:  # of a layer, of fused experts
                four_bit += 2 * math.prod(p.shape)
    return PackedWeights(four_bit, fp8)


def unpacked_bytes(units: Iterable[UnitPlan]) -> int:
    """Bytes that are read and written when the weights of units in a released model's formats are unpacked once."""
    return sum(2 * p.weights + math.prod(p.whole) for unit in units for p in unit.parameters if p.form)
