"""Peak memory of a training step, per device and per node, by part and by moment: arithmetic over a sharding plan.

No tensors and no communication. What the operators of a step allocate comes from a `StepTrace` per activation level, of
a model with one layer of each kind; its segments are repeated for all layers. What the engine allocates beside them is
in `engine_memory.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from fullshard.activations.levels import Level
from fullshard.fsdp.plan import ParameterPlan, ShardingPlan, item_size
from fullshard.fsdp.strategy import BackwardPrefetch, ShardingStrategy
from fullshard.planner.engine_memory import EngineMemory, Ledger, Schedule
from fullshard.planner.host_memory import HostNeeds, host_memory, reserved_memory
from fullshard.planner.optimizer_state import OptimizerMemory
from fullshard.planner.step_trace import Segment, StepTrace, TracedModel
from fullshard.planner.unit_memory import Transport, UnitMemory, signature, units_by_layer, units_of
from fullshard.report.step_memory import GatheredMoment, StepMemory


@dataclass(frozen=True)
class StateMemory:
    """Bytes that a rank needs whatever its batches are: on the device, or on the host if they are offloaded."""

    shards: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.shards + self.gradients + self.optimizer


ONLY_PARAMETERS = (
    "Memory of parameters and their gradients only: a checkpoint does not tell the batch, the optimizer or the device. "
    "Show the model with the run's settings to see all of it."
)
LOADING = 6
"""Bytes for each byte of a quantized weight that is read: itself in bf16, and packed before its scales are."""
MICRO_BATCHES = 3
"""Micro-batches of a step that are followed; those between the second and the last are alike."""


@dataclass(frozen=True)
class MemoryEstimate:
    """What one device, and the host of one node, need at most."""

    moments: dict[str, dict[str, int]]
    """"load", "forward", "loss", "backward", "optimizer step", "save" → part → bytes at the peak of that moment. Parts:
    "shards", "buffers", "gathered", "communication", "gradients", "optimizer", "activations", "logits", "workspace"."""
    timeline: tuple[tuple[str, int], ...] = ()
    """(what, the most bytes allocated during it) along one step."""
    reserved: int = 0
    """Device memory beside what torch allocates: context, communicators, fragmentation."""
    host: dict[str, int] = field(default_factory=dict)
    """Host memory per node, by part."""
    rest: int = 0
    """Bytes that torch has allocated between steps."""
    state: StateMemory = StateMemory(0, 0, 0)
    """What does not depend on activations."""

    @property
    def peak(self) -> int:
        """The most bytes that torch allocates at once on one device."""
        return max((sum(parts.values()) for parts in self.moments.values()), default=0)

    @property
    def peak_moment(self) -> str:
        """The moment at which `peak` is reached."""
        return max(self.moments, key=lambda moment: sum(self.moments[moment].values()), default="")

    @property
    def device(self) -> int:
        """All memory that one device needs."""
        return self.peak + self.reserved

    @property
    def host_total(self) -> int:
        """All host memory that one node needs."""
        return sum(self.host.values())


@dataclass(frozen=True)
class MemoryOptions:
    """What memory depends on besides the plan and the traces."""

    accelerator: bool = True
    """Whether the run is on accelerators; otherwise on CPUs, whose memory is the host's."""
    point_to_point: bool = False
    """Whether ranks communicate over Gloo."""
    accumulation: int = 1
    """Micro-batches in a step."""
    sync_each_batch: bool = True
    """Whether gradients are reduced after each of them."""
    forward_prefetch: bool = True
    backward_prefetch: BackwardPrefetch = BackwardPrefetch.BACKWARD_PRE
    in_flight: int = 1
    optimizer: OptimizerMemory = field(default_factory=lambda: OptimizerMemory("adamw_torch_fused"))
    buffers: int = 0
    """Bytes of the model's buffers."""
    unsharded: Sequence[ParameterPlan] = ()
    """Parameters of modules that are not sharded."""
    ranks_per_node: int = 1
    async_save: bool = False
    device_memory: int | None = None
    """Bytes of an accelerator, which decide whether the engine keeps copies; without them, and a budget, it keeps
    none."""
    usable: int | None = None
    """Bytes that torch may allocate as far as other programs are concerned; None where that is not known."""
    budget: float | None = None
    """Bytes that a budget for activations leaves to torch, which then decides about copies; None without one."""
    keeps_copies: bool = True
    """Whether the engine may keep copies at all."""
    host_memory: int | None = None
    """Bytes of a node's host memory, which limit what a budget moves there; None: any number."""

    def limit(self, reserved: int) -> float:
        """The most bytes that torch may allocate, if so many are `reserved` beside them."""
        limits = [self.budget, self.usable, None if self.device_memory is None else self.device_memory - reserved]
        return min((limit for limit in limits if limit is not None), default=math.inf)


def estimate_memory(
    plan: ShardingPlan, model: TracedModel, levels: Sequence[Level], options: MemoryOptions,
    evaluation: StepTrace | None = None,
) -> MemoryEstimate:  # fmt: skip
    """The memory of a run with this plan, whose layers keep what `levels` say; the model has traces of all of them.
    `evaluation` is the trace of a batch of evaluations, if there are any."""
    return _Estimate(plan, model, levels, options).result(evaluation)


def state_memory(plan: ShardingPlan, options: MemoryOptions) -> StateMemory:
    """What an estimate counts without a trace: shards, gradients and optimizer state."""
    return _Estimate(plan, TracedModel({}, (), {}), (), options).state


def memory_of_plan(plan: ShardingPlan, gathered: Sequence[GatheredMoment]) -> StepMemory:
    """What a plan alone tells of a step's memory: shards, gathered units, gradients of the shards."""
    state = state_memory(plan, MemoryOptions(optimizer=OptimizerMemory(None)))
    moments: dict[str, dict[str, int]] = {}
    for phase in ("forward", "loss", "backward"):
        most = max((moment.bytes for moment in gathered if moment.phase == phase), default=0)
        gradients = {"gradients": state.gradients} if phase == "backward" else {}
        moments[phase] = {"shards": state.shards, "gathered": most, **gradients}
    return StepMemory(moments, notes=(ONLY_PARAMETERS,))


class _Estimate:
    def __init__(
        self, plan: ShardingPlan, model: TracedModel, levels: Sequence[Level], options: MemoryOptions
    ) -> None:  # fmt: skip
        self.plan, self.levels, self.options = plan, levels, options
        self.layers, self.kinds = model.layers, model.kinds
        self.transport = Transport.of(plan, options.accelerator, options.point_to_point)
        self.units = units_of(plan, self.transport)
        self.inside = {
            layer: [unit.name for unit in units] for layer, units in units_by_layer(plan, self.layers).items()
        }
        """The units of each layer in the order of their calls: its own, and those of its experts."""
        self.traces = {level: SplitTrace(trace) for level, trace in model.traces.items()}
        self.schedule = Schedule(
            ShardingStrategy[plan.strategy], options.forward_prefetch, options.backward_prefetch, options.in_flight
        )

    def result(self, evaluation: StepTrace | None) -> MemoryEstimate:
        schedule = self.schedule
        ledger = self._step(schedule)
        reserved = reserved_memory(self.plan, self.options.accelerator, ledger.peak, self.options.device_memory)
        if self._keeps_copies(ledger, reserved):
            schedule = replace(schedule, keep_copies=True)
            ledger = self._step(schedule)
        moments = {"load": self._load(), **ledger.moments}
        if evaluation is not None:
            moments["evaluation"] = self._evaluation(SplitTrace(evaluation), schedule)
        moments["save"] = self._save()
        needs = HostNeeds(
            device=sum(max(moments.values(), key=lambda parts: sum(parts.values())).values()),
            shards=sum(unit.host_shards for unit in self.units.values()),
            gradients=sum(unit.pieces for unit in self.units.values()) if self.transport.offload else 0,
            optimizer=self.optimizer_state if self.transport.offload or self.options.optimizer.paged else 0,
            activations=self._inputs_on_host,
            largest=self._largest, snapshot=self._saved if self.options.async_save else 0,
        )  # fmt: skip
        host = host_memory(needs, self.options.ranks_per_node, self.options.accelerator)
        rest = sum(self._static.values())
        return MemoryEstimate(moments, tuple(ledger.timeline), reserved, host, rest, self.state)

    # --- what is there all the time -----------------------------------------------------------------------------------

    @cached_property
    def state(self) -> StateMemory:
        offload, unsharded = self.transport.offload, self.options.unsharded
        paged = self.transport.accelerator and self.options.optimizer.paged
        shards = sum(unit.host_shards if offload else unit.shards for unit in self.units.values())
        gradients = sum(unit.pieces for unit in self.units.values())
        return StateMemory(
            shards + sum(p.shard_bytes for p in unsharded),
            gradients + sum(p.shard_bytes for p in unsharded if p.trainable),
            self.optimizer_state if offload or not paged else 0,
        )

    @cached_property
    def optimizer_state(self) -> int:
        optimizer = self.options.optimizer
        if optimizer.name is None:
            return 0
        sizes: dict[object, int] = {}
        total = 0
        for unit in self.plan.units:
            key = (signature(unit), tuple(not optimizer.apart.isdisjoint(p.names) for p in unit.parameters))
            if key not in sizes:
                sizes[key] = sum(self.transport.rounded(optimizer.state(p)) for p in unit.parameters)
            total += sizes[key]
        return total + sum(optimizer.state(p) for p in self.options.unsharded)

    @cached_property
    def _workspace(self) -> int:
        """What kernels keep from step to step: the buffer for dequantized weights, and the workspaces of cuBLAS."""
        return max((trace.workspace for trace in self.traces.values()), default=0)

    @cached_property
    def _static(self) -> dict[str, int]:
        on_device, unsharded = not (self.transport.offload or self.options.optimizer.paged), self.options.unsharded
        return {
            "shards": sum(unit.shards for unit in self.units.values()) + sum(p.shard_bytes for p in unsharded),
            "buffers": self.options.buffers,
            "optimizer": self.optimizer_state if on_device else 0,
            "gradients": sum(p.shard_bytes for p in unsharded if p.trainable),
            "workspace": self._workspace,
        }

    @cached_property
    def _inputs_on_host(self) -> int:
        """Inputs of layers that wait in host memory: what the layers keep less than if they stayed."""
        if not self.options.accelerator or not {Level.OFFLOAD, Level.RECOMPUTE} <= self.traces.keys():
            return 0
        kept, moved = self.traces[Level.RECOMPUTE].forward, self.traces[Level.OFFLOAD].forward
        waiting = [self.kinds[n] for n, level in zip(self.layers, self.levels, strict=True) if level is Level.OFFLOAD]
        return sum(kept[kind].kept - moved[kind].kept for kind in waiting)

    @cached_property
    def _largest(self) -> int:
        """Bytes of the largest parameter that is saved, whole, in the dtype that it is stored in."""
        saved = [p for unit in self._kinds for p in (unit.trained if self._adapts else unit.plan.parameters)]
        return max((math.prod(p.whole) * item_size(p.dtype) for p in saved), default=0)

    @cached_property
    def _adapts(self) -> bool:
        """Whether some parameters are frozen, so that only the others are saved."""
        return any(not p.trainable for unit in self._kinds for p in unit.plan.parameters)

    @cached_property
    def _kinds(self) -> list[UnitMemory]:
        """The units without those that differ in names only."""
        return list({id(unit): unit for unit in self.units.values()}.values())

    @cached_property
    def _saved(self) -> int:
        """Bytes of a checkpoint that this rank writes."""
        every = self.units.values()
        shards = sum(unit.pieces if self._adapts else unit.shards + unit.host_shards for unit in every)
        return shards + self.optimizer_state

    def _load(self) -> dict[str, int]:
        """Files are read into shards directly; a weight that is quantized on the way is dense on the device first."""
        parts = {**self._static, "optimizer": 0, "gradients": 0, "workspace": LOADING * self._largest_packed}
        return {part: size for part, size in parts.items() if size}

    @cached_property
    def _largest_packed(self) -> int:
        """Bytes of the largest piece of a weight that is quantized to 4 bits or fp8 while it is loaded."""
        packed = [p for unit in self._kinds for p in unit.plan.parameters if item_size(p.dtype) == 1 and not p.form]
        return max((p.shard_bytes for p in packed), default=0)

    def _save(self) -> dict[str, int]:
        parts = {**self._static, "workspace": self._static["workspace"] + self._largest}
        return {part: size for part, size in parts.items() if size}

    def _keeps_copies(self, ledger: Ledger, reserved: int) -> bool:
        """As `Engine.keep_copies` decides, from half of what is unused if that is most of the device; or from all that
        a budget leaves."""
        total = self.options.device_memory
        if not self.options.keeps_copies:
            return False
        size = sum(unit.gathered for unit in self.units.values() if unit.only_casts)
        if self.options.budget is not None:
            return 0 < size <= self.options.limit(reserved) - ledger.peak
        if total is None or not self.options.accelerator:
            return False
        spare = total - reserved - ledger.peak
        return 2 * spare >= total and 0 < size <= spare // 2

    # --- one step -----------------------------------------------------------------------------------------------------

    def _begun(self, moment: str, schedule: Schedule) -> tuple[Ledger, EngineMemory, str]:
        """What is there before a pass: its ledger, the engine, and the name of the root."""
        ledger = Ledger()
        ledger.begin(moment)
        for part, size in self._static.items():
            ledger.hold(part, size)
        called = [name for layer in self.layers for name in self.inside[layer]]
        root = self.plan.units[0].name
        return ledger, EngineMemory(self.units, [root, *called], schedule, ledger), root

    def _evaluation(self, trace: SplitTrace, schedule: Schedule) -> dict[str, int]:
        """A batch of an evaluation: a forward pass between two steps."""
        ledger, engine, root = self._begun("evaluation", schedule)
        self._forward(engine, ledger, root, trace, [trace.forward[self.kinds[layer]] for layer in self.layers])
        self._run(engine, ledger, root, trace.loss, "logits")
        return ledger.moments["evaluation"]

    def _step(self, schedule: Schedule) -> Ledger:
        ledger, engine, root = self._begun("forward", schedule)
        count = min(self.options.accumulation, MICRO_BATCHES)
        for index in range(count):
            engine.sync = self.options.sync_each_batch or index == count - 1
            self._micro_batch(engine, ledger, root)
            ledger.release("activations", ledger.sizes["activations"])
            ledger.release("logits", ledger.sizes["logits"])
        ledger.begin("optimizer step")
        ledger.pass_through("workspace", self._updating)
        ledger.entry("optimizer step")
        engine.zero_grad()
        return ledger

    @cached_property
    def _updating(self) -> int:
        """What an update needs, with what is left of the one before it: that of a layer, before a table of the root."""
        if self.transport.offload:
            return 0
        optimizer, accelerator = self.options.optimizer, self.options.accelerator
        trained = [p for unit in self._kinds for p in unit.trained]
        root = self.units[self.plan.units[0].name]
        in_layers = [p for unit in self._kinds if unit is not root for p in unit.trained]
        own = max((optimizer.updating(p, accelerator) for p in trained), default=0)
        own += max((optimizer.left_behind(p, accelerator) for p in in_layers or trained), default=0)
        if not accelerator:
            return own
        every = (p for unit in self.units.values() for p in unit.trained)
        return max(own, optimizer.updating_together(every, self.transport.rounded))

    def _micro_batch(self, engine: EngineMemory, ledger: Ledger, root: str) -> None:
        model = self.traces[self.levels[-1] if self.levels else next(iter(self.traces))]
        ledger.begin("forward")
        kept = zip(self.layers, self.levels, strict=True)
        layers = [self.traces[level].forward[self.kinds[layer]] for layer, level in kept]
        self._forward(engine, ledger, root, model, layers)
        ledger.begin("loss")
        self._run(engine, ledger, root, model.loss, "logits")
        ledger.entry("loss")
        engine.end_pass()
        ledger.begin("backward")
        engine.begin_backward(root)
        self._run(engine, ledger, root, model.head_backward, "logits")
        ledger.entry("backward of the loss")
        last: list[str] = []
        for layer, level in zip(reversed(self.layers), reversed(self.levels), strict=True):
            for unit in reversed(last):
                engine.end_backward(unit)
            last = self.inside[layer]
            for unit in last:
                engine.begin_backward(unit)
            self._run(engine, ledger, root, [self.traces[level].backward[self.kinds[layer]]], units=last)
            ledger.entry(f"backward {layer}")
        for unit in reversed(last):
            engine.end_backward(unit)
        self._run(engine, ledger, root, model.tail)
        engine.end_pass_backward()
        ledger.entry("end of backward")

    def _forward(
        self, engine: EngineMemory, ledger: Ledger, root: str, model: SplitTrace, layers: Sequence[Segment]
    ) -> None:
        """The forward pass, whose layers do what `layers` say."""
        engine.begin_forward(0)
        self._run(engine, ledger, root, model.before)
        call = 0
        for layer, segment in zip(self.layers, layers, strict=True):
            calls = range(call + 1, call + 1 + len(self.inside[layer]))
            for call in calls:
                engine.begin_forward(call)
            self._run(engine, ledger, root, [segment], units=self.inside[layer])
            for ending in reversed(calls):
                engine.end_forward(ending)
            ledger.entry(f"forward {layer}")
        self._run(engine, ledger, root, model.after)

    def _run(
        self, engine: EngineMemory, ledger: Ledger, root: str, segments: Sequence[Segment], part: str = "activations",
        units: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """Segments of the model, or of a layer with these units."""
        for segment in segments:
            ledger.pass_through(part, segment.peak)
            kept = segment.kept - segment.gradients
            if kept < 0:  # what the loss holds is released first
                first = min(-kept, ledger.sizes["logits"]) if part == "logits" else 0
                ledger.release("logits", first)
                ledger.release("activations", -kept - first)
            else:
                ledger.hold(part, kept)
            ledger.hold("gradients", segment.gradients)
            inner = [name for name in units if name not in self.inside]
            of_inner = {name: self.units[name].left_by_backward for name in inner if segment.gradients}
            for name, size in of_inner.items():
                engine.add_gradients(name, size)
            outer = next((name for name in units if name in self.inside), root)
            engine.add_gradients(outer, segment.gradients - sum(of_inner.values()))


class SplitTrace:
    """The segments of a trace: those of its layers, and those of the model around them."""

    def __init__(self, trace: StepTrace) -> None:
        self.workspace = trace.workspace
        self.before: list[Segment] = []
        self.forward: dict[str, Segment] = {}
        self.after: list[Segment] = []
        """The model's own forward between and after its layers."""
        self.loss: list[Segment] = []
        self.head_backward: list[Segment] = []
        self.backward: dict[str, Segment] = {}
        self.tail: list[Segment] = []
        for segment in trace.segments:
            if segment.unit:
                moments = self.forward if segment.moment == "forward" else self.backward
                moments.setdefault(segment.unit, segment)
            elif segment.moment == "loss":
                self.loss.append(segment)
            elif segment.moment == "forward":
                (self.after if self.forward else self.before).append(segment)
            else:
                (self.tail if self.backward else self.head_backward).append(segment)
