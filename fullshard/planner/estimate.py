"""What a run needs and costs, as one value: memory, traffic and time of its step, and whether it fits.

An `Estimator` makes it of a planned model and the trace of one step. `fullshard plan` prints it, a run's `plan.json`
holds it, every run asks it before it starts, and the search for settings that fit compares many.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from fullshard.activations.levels import Level, LevelChoice, has_slices
from fullshard.config.errors import CapacityError
from fullshard.fsdp.plan import ShardingPlan, UnitPlan
from fullshard.fsdp.strategy import dtype_name
from fullshard.models.causal_lm import get_causal_lm
from fullshard.models.rope_scaling import longest_document
from fullshard.parallel.settings import KEEPING
from fullshard.planner.batch import BatchShape, assumed_length, evaluation_shape, largest_shape
from fullshard.planner.machines import Machine
from fullshard.planner.memory import MemoryEstimate, MemoryOptions, estimate_memory
from fullshard.planner.memory_settings import memory_options, needed_levels, planned_choice, planned_levels
from fullshard.planner.planned_model import PlannedModel, find_config, planned_model
from fullshard.planner.request import PlanRequest
from fullshard.planner.step_time import StepOptions, StepTime, TracedStep, estimate_time, flops_per_token
from fullshard.planner.step_trace import Segment, StepTrace
from fullshard.planner.tracer import trace_evaluation, trace_step
from fullshard.planner.traffic import LayerExchanges, Traffic, step_traffic
from fullshard.planner.verdict import Verdict, judge
from fullshard.sft.sft_config import SFTConfig
from fullshard.version import __version__

FORMAT = 1
"""The version of the JSON form."""
BATCH_SETTINGS = (
    "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps",
    "gradient_checkpointing", "activation_offloading",
    "optim", "optim_args", "sync_each_batch", "use_reentrant",
)  # fmt: skip
"""Settings that neither the planned model nor its plan depends on."""
LAYOUTS = {keeping: freeing for freeing, keeping in KEEPING.items()}
"""Strategies that lay parameters out like another one."""
UNSHARDED: dict[str, Any] = {
    "sharding_strategy": None, "reshard_after_forward": None, "offload_params": False, "dp_replicate_size": None,
    "dp_shard_size": None,
}  # fmt: skip
"""Sharding settings that neither the model nor its traces depend on, at their defaults."""


@dataclass(frozen=True)
class Estimate:
    """One training step of a run on a machine: memory, traffic, time."""

    model: str
    """The model's name or folder."""
    machine: Machine
    settings: dict[str, Any]
    """The settings that are not at their defaults."""
    plan: ShardingPlan
    parameters: int
    """The number of parameters; quantized weights count as the weights they store."""
    batch: BatchShape
    """The largest batch of the run."""
    layers: tuple[str, ...]
    """The names of the model's layers."""
    levels: tuple[Level, ...]
    """What each layer keeps for backward."""
    memory: MemoryEstimate
    traffic: Traffic
    time: StepTime
    flops_per_token: float
    verdict: Verdict
    assumptions: tuple[str, ...] = ()
    """What was not given and is assumed, and what the numbers leave out."""
    seconds: dict[str, float] = field(default_factory=dict)
    """How long each part of planning took."""
    choice: LevelChoice[str] | None = None
    """What decided the levels under a budget; None without one."""
    positions: int | None = None
    """The positions that the model has; None if their number is not limited."""

    @property
    def tokens(self) -> int:
        """Tokens in a step of all devices."""
        return self.batch.tokens * self.batch.accumulation * self.plan.data_size

    @property
    def trained(self) -> int:
        """The number of parameters that train."""
        return sum(math.prod(p.shape) for unit in self.plan.units for p in unit.parameters if p.trainable)

    def to_json(self) -> dict[str, Any]:
        """The estimate as plain data; docs/planning.md describes it. Sizes are bytes, times seconds; None where the
        model's activations cannot be traced."""
        memory, plan, certain = self.memory, self.plan, self.verdict.certain
        return {
            "format": FORMAT,
            "fullshard": __version__,
            "model": self.model,
            "settings": self.settings,
            "machine": {**asdict(self.machine), "nodes": self.machine.nodes},
            "parameters": {"all": self.parameters, "trained": self.trained},
            "mesh": dict(plan.axes),
            "expert_mesh": dict(plan.expert_axes),
            "strategy": plan.strategy,
            "batch": {**asdict(self.batch), "tokens_per_step": self.tokens},
            "verdict": {
                **asdict(self.verdict), "needs": self.verdict.needs if certain else None,
                "sentences": self.verdict.sentences(),
            },
            "memory": {
                "peak": memory.peak,
                "peak_moment": memory.peak_moment,
                "reserved": memory.reserved,
                "device": memory.device,
                "moments": memory.moments,
                "timeline": [list(entry) for entry in memory.timeline],
                "host": memory.host,
            } if certain else None,
            "units": [_unit(unit) for unit in plan.units],
            "layers": list(self.layers),
            "levels": [level.name.lower() for level in self.levels],
            "traffic": asdict(self.traffic),
            "flops_per_token": self.flops_per_token if certain else None,
            "time": {
                "parts": self.time.parts,
                "total": self.time.total,
                "tokens_per_second": self.time.tokens_per_second,
                "flops": self.time.flops,
            } if certain else None,
            "assumptions": list(self.assumptions),
            "planned_in": self.seconds,
        }  # fmt: skip


def _unit(unit: UnitPlan) -> dict[str, Any]:
    """What a unit holds and sends."""
    return {
        "name": unit.name,
        "shard": unit.shard_bytes,
        "gathered": unit.gathered_bytes,
        "gather": unit.gather_traffic[0],
        "reduce": unit.reduce_traffic[0],
    }


class Estimator:
    """Prices runs. What several of them share, models and traces, is made once."""

    def __init__(self) -> None:
        self._models: dict[Any, PlannedModel] = {}
        self._plans: dict[Any, PlannedModel] = {}
        """The planned models by the ranks and layouts that they were planned for."""
        self._traces: dict[Any, StepTrace] = {}
        self.seconds: dict[str, float] = {}
        """How long each part took."""

    @contextlib.contextmanager
    def clock(self, what: str) -> Iterator[None]:
        """Add the time inside to a part."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[what] = self.seconds.get(what, 0.0) + time.perf_counter() - began

    def __call__(self, request: PlanRequest) -> Estimate:
        """What a run needs and costs."""
        config = request.config
        with self.clock("imports"):
            import_libraries(request)
        with self.clock("model and plan"):
            planned = self._planned(request)
        if request.lengths is None:
            length, why = assumed_length(config, planned.model)
            lengths, note = [length] * config.per_device_train_batch_size, f"every row has {length:,} tokens ({why})"
        else:
            lengths, note = list(request.lengths), f"rows have up to {max(request.lengths):,} tokens"
        note += f": {request.data}" if request.data else ""
        batch = largest_shape(config, planned.model, lengths)
        batch = dataclasses.replace(batch, routing_imbalance=request.routing_imbalance)
        return self.of_model(config, planned, request.machine, batch, str(request.model), (*request.notes, note))

    def of_model(
        self, config: SFTConfig, planned: PlannedModel, machine: Machine, batch: BatchShape, name: str,
        assumed: Sequence[str] = (), own_optimizer: bool = True, usable: int | None = None,
    ) -> Estimate:  # fmt: skip
        """What a run with this model needs and costs; `batch` is its largest. `own_optimizer` is whether the optimizer
        is the one that the settings name, and `usable` what a run that begins may allocate."""
        lines, untraced, evaluation = [*assumed, *planned.notes, *routing(planned, batch)], "", None
        with self.clock("trace"):
            try:
                needed = needed_levels(config, planned.engine, has_slices(planned.model))
                traces = {level: self._trace(config, planned, batch, level) for level in needed}
                if (shape := evaluation_shape(config, batch)) is not None:
                    evaluation = self._trace(config, planned, shape, None)
            except CapacityError as error:
                traces, untraced = without_activations(planned), str(error)
            planned = without_idle_layers(planned, traces)
        with self.clock("memory"):
            options = memory_options(
                config, planned, batch.accumulation, machine.gpus_per_node, machine.device_memory, usable
            )
            options = dataclasses.replace(options, host_memory=machine.host_memory)
            if not own_optimizer:
                options = dataclasses.replace(options, optimizer=dataclasses.replace(options.optimizer, name=None))
                lines.append("the optimizer is the script's: its state is not counted")
            choice = planned_choice(config, planned, traces, options) if not untraced else None
            levels = planned_levels(config, planned, choice)
            memory = estimate_memory(planned.plan, planned.traced(traces), levels, options, evaluation)
        with self.clock("traffic and time"):
            between = layer_exchanges(planned, levels, batch)
            traffic = step_traffic(
                planned.plan, machine.gpus_per_node, batch.accumulation, config.sync_each_batch, batch.tokens,
                options.point_to_point, between=between,
                tokens_sent=TracedStep.of(planned.traced(traces), levels, batch).tokens_sent(),
            )  # fmt: skip
            step = dataclasses.replace(step_options(config, planned, options), between=between)
            steps = estimate_time(planned.plan, machine, planned.traced(traces), levels, batch, step)
            ranks_per_row = math.prod(size for _, size in planned.plan.axes) // planned.plan.data_size
            flops = flops_per_token(planned.traced(traces), batch) * ranks_per_row
        return Estimate(
            name, machine, config.changed(), planned.plan, planned.parameters, batch, planned.layers, tuple(levels),
            memory, traffic, steps, flops, judge(memory, machine, untraced), (*lines, *steps.assumptions),
            dict(self.seconds), choice, longest_document(get_causal_lm(planned.model).config),
        )  # fmt: skip

    def _planned(self, request: PlanRequest) -> PlannedModel:
        """The planned model. Ranks and strategies share the model; strategies that lay parameters out alike, with and
        without offload, the plan too."""
        config, engine, machine = request.config, request.engine, request.machine
        wanted: dict[str, Any] = {"sharding_strategy": engine.strategy, "reshard_after_forward": None}
        wanted["offload_params"] = engine.offload_params
        alike = {**wanted, "sharding_strategy": LAYOUTS.get(engine.strategy, engine.strategy), "offload_params": False}
        layout = dataclasses.replace(engine, **alike)
        some_exclude_it = config.adapter_kind not in (None, "lora")
        recomputes = some_exclude_it and bool(config.gradient_checkpointing)
        model = (_fixed(config), recomputes, str(dataclasses.replace(engine, **UNSHARDED)), machine.kind)
        ranks = machine.num_processes, machine.nodes
        key = (model, str(layout), *ranks)
        if key not in self._plans:
            cached = self._models.get(model)
            self._plans[key] = cached.on_ranks(layout, *ranks) if cached is not None else planned_model(
                config, layout, request.model, *ranks, device=machine.kind, started=True
            )  # fmt: skip
            self._models.setdefault(model, self._plans[key])
        planned = self._plans[key]
        plan = dataclasses.replace(planned.plan, strategy=engine.strategy)
        if engine.offload_params:
            plan = plan.offloaded()
        return dataclasses.replace(planned, engine=dataclasses.replace(planned.engine, **wanted), plan=plan)

    def _trace(self, config: SFTConfig, planned: PlannedModel, batch: BatchShape, level: Level | None) -> StepTrace:
        """One micro-batch at a level; without a level, one batch of an evaluation. How the model is sharded makes no
        difference to it."""
        if level is Level.OFFLOAD:
            return self._trace(config, planned, batch, Level.RECOMPUTE).with_inputs_on_host()
        model = (_fixed(config), str(dataclasses.replace(planned.engine, **UNSHARDED)), planned.device)
        key = (model, dataclasses.replace(batch, accumulation=1), level)
        if key not in self._traces:
            traced = trace_evaluation(planned, batch) if level is None else trace_step(planned, batch, level)
            self._traces[key] = traced
        return self._traces[key]


def _fixed(config: SFTConfig) -> tuple[tuple[str, str], ...]:
    """The settings that a planned model depends on."""
    return tuple((name, str(value)) for name, value in config.values().items() if name not in BATCH_SETTINGS)


def import_libraries(request: PlanRequest) -> None:
    """Import what planning needs, which takes longer than planning."""
    if request.config.adapter_kind is not None or request.adapter is not None:
        importlib.import_module("peft")
    from transformers import AutoConfig

    from fullshard.weights.load import text_class

    with contextlib.suppress(Exception):  # reported where the model is made
        shape = AutoConfig.from_pretrained(find_config(request.model))
        kind = text_class(shape)
        getattr(kind, "_model_mapping", {type(shape): kind})[type(shape)]


def layer_exchanges(planned: PlannedModel, levels: Sequence[Level], batch: BatchShape) -> LayerExchanges | None:
    """What tensor parallelism exchanges in a micro-batch; None without it."""
    if not planned.exchanges:
        return None
    dtype = planned.precision.param_dtype or next(p.dtype for p in planned.model.parameters() if p.is_floating_point())
    kept = dict(zip(planned.layers, levels, strict=True))
    return LayerExchanges(planned.exchanges, batch.tokens, dtype.itemsize, kept)


def step_options(config: SFTConfig, planned: PlannedModel, options: MemoryOptions) -> StepOptions:
    """Settings that a step's time depends on."""
    dtype = planned.precision.param_dtype or next(p.dtype for p in planned.model.parameters() if p.is_floating_point())
    name = dtype_name(dtype)
    return StepOptions(
        "tf32" if name == "float32" and config.tf32 else name, config.sync_each_batch,
        options.forward_prefetch, options.backward_prefetch,
        sum(map(options.optimizer.unit_state, planned.plan.units)),
    )  # fmt: skip


def routing(planned: PlannedModel, batch: BatchShape) -> Iterator[str]:
    """What is assumed about the tokens of experts, if there are any."""
    counts = {m.num_experts for m in planned.model.modules() if isinstance(getattr(m, "num_experts", None), int)}
    if not counts:
        if batch.routing_imbalance != 1:
            yield "routing_imbalance has no effect: the model has no experts"
        return
    experts, imbalance = max(counts), batch.routing_imbalance
    if imbalance == 1:
        yield f"routing is balanced: each of {experts} experts gets as many tokens (routing_imbalance 1)"
    elif imbalance < experts:
        yield (
            f"routing is uneven: the busiest of {experts} experts gets {imbalance:g} times the mean of tokens "
            f"(routing_imbalance)"
        )
    else:
        yield f"routing is as uneven as can be: one of {experts} experts gets all tokens (routing_imbalance {experts})"


def without_idle_layers(planned: PlannedModel, traces: Mapping[Level, StepTrace]) -> PlannedModel:
    """The planned model without the layers that its forward pass does not call, such as those for images."""
    called = {segment.unit for trace in traces.values() for segment in trace.segments}
    layers = tuple(layer for layer in planned.layers if planned.kinds[layer] in called)
    kinds = {layer: planned.kinds[layer] for layer in layers}
    return dataclasses.replace(planned, layers=layers, kinds=kinds)


def without_activations(planned: PlannedModel) -> dict[Level, StepTrace]:
    """A step without activations, for models that cannot be traced."""
    kinds = dict.fromkeys(planned.kinds.values())
    segments = [Segment(kind, moment, 0, 0, 0, 0, 0) for moment in ("forward", "backward") for kind in kinds]
    return dict.fromkeys(Level, StepTrace(tuple(segments)))
