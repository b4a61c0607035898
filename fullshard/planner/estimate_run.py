"""Prices a run on a machine: its planned model, a trace of one step, and from these memory, traffic and time.

Used by `fullshard plan`, by every run before it starts, and by the search for settings that fit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fullshard.activations.levels import Level
from fullshard.config.errors import CapacityError
from fullshard.fsdp.strategy import dtype_name
from fullshard.parallel.settings import KEEPING
from fullshard.planner.activations import trace_evaluation, trace_step
from fullshard.planner.estimate import Estimate
from fullshard.planner.machines import Machine
from fullshard.planner.memory import MemoryOptions, estimate_memory
from fullshard.planner.plan_changes import ChangeSearch
from fullshard.planner.plan_request import PlanRequest
from fullshard.planner.planned_memory import (
    assumed_length,
    evaluation_shape,
    largest_shape,
    memory_options,
    needed_levels,
    planned_choice,
    planned_levels,
)
from fullshard.planner.planned_model import PlannedModel, find_config, planned_model
from fullshard.planner.step_time import StepOptions, estimate_time, flops_per_token
from fullshard.planner.step_trace import BatchShape, Segment, StepTrace
from fullshard.planner.traffic import step_traffic
from fullshard.planner.verdict import judge
from fullshard.sft.sft_config import SFTConfig

BATCH_SETTINGS = (
    "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps",
    "gradient_checkpointing", "activation_offloading",
    "optim", "optim_args", "sync_each_batch", "use_reentrant",
)  # fmt: skip
"""Settings that neither the planned model nor its plan depends on."""
LAYOUTS = {keeping: freeing for freeing, keeping in KEEPING.items()}
"""Strategies that lay parameters out like another one."""


class Pricing:
    """Prices runs. What several of them share, models and traces, is made once."""

    def __init__(self) -> None:
        self._models: dict[Any, PlannedModel] = {}
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
        return self.price(config, planned, request.machine, batch, str(request.model), (*request.notes, note))

    def price(
        self, config: SFTConfig, planned: PlannedModel, machine: Machine, batch: BatchShape, name: str,
        assumed: Sequence[str] = (), own_optimizer: bool = True, usable: int | None = None,
    ) -> Estimate:  # fmt: skip
        """What a run with this model needs and costs; `batch` is its largest. `own_optimizer` is whether the optimizer
        is the one that the settings name, and `usable` what a run that begins may allocate."""
        lines, certain, evaluation = [*assumed, *planned.notes], True, None
        with self.clock("trace"):
            try:
                needed = needed_levels(config, planned.engine)
                traces = {level: self._trace(config, planned, batch, level) for level in needed}
                plain = traces, batch
                if Level.KEEP_ALL not in traces:
                    plain = self._plain_step(config, planned, batch)
                if (shape := evaluation_shape(config, batch)) is not None:
                    evaluation = self._trace(config, planned, shape, None)
            except CapacityError as error:
                lines.append(str(error))
                traces, certain = untraced(planned), False
                plain = traces, batch
            planned = without_idle_layers(planned, traces)
        with self.clock("memory"):
            options = memory_options(
                config, planned, batch.accumulation, machine.gpus_per_node, machine.device_memory, usable
            )
            if not own_optimizer:
                options = dataclasses.replace(options, optimizer=dataclasses.replace(options.optimizer, name=None))
                lines.append("the optimizer is the script's: its state is not counted")
            choice = planned_choice(config, planned, traces, options) if certain else None
            levels = planned_levels(config, planned, choice)
            memory = estimate_memory(planned.plan, traces, planned.layers, planned.kinds, levels, options, evaluation)
        with self.clock("traffic and time"):
            traffic = step_traffic(
                planned.plan, machine.gpus_per_node, batch.accumulation, config.sync_each_batch, options.offload,
                batch.tokens, options.point_to_point,
            )  # fmt: skip
            step = step_options(config, planned, options)
            steps = estimate_time(planned.plan, machine, traces, planned.layers, planned.kinds, levels, batch, step)
            flops = flops_per_token(plain[0], planned.layers, planned.kinds, plain[1])
        return Estimate(
            name, machine, config.changed(), planned.plan, planned.parameters, batch, planned.layers, tuple(levels),
            memory, traffic, steps, flops, judge(memory, machine, certain), (*lines, *steps.assumptions),
            dict(self.seconds), choice,
        )  # fmt: skip

    def _planned(self, request: PlanRequest) -> PlannedModel:
        """The planned model; strategies that lay parameters out alike, with and without offload, share one."""
        config, engine, machine = request.config, request.engine, request.machine
        wanted: dict[str, Any] = {"sharding_strategy": engine.strategy, "reshard_after_forward": None}
        wanted["offload_params"] = engine.offload_params
        alike = {**wanted, "sharding_strategy": LAYOUTS.get(engine.strategy, engine.strategy), "offload_params": False}
        built = dataclasses.replace(engine, **alike)
        some_exclude_it = config.adapter_kind not in (None, "lora")
        recomputes = some_exclude_it and bool(config.gradient_checkpointing)
        key = (_fixed(config), recomputes, str(built), machine.kind, machine.num_processes, machine.nodes)
        if key not in self._models:
            self._models[key] = planned_model(
                config, built, request.model, machine.num_processes, machine.nodes, device=machine.kind, started=True
            )
        found = self._models[key]
        plan = dataclasses.replace(found.plan, strategy=engine.strategy)
        return dataclasses.replace(found, engine=dataclasses.replace(found.engine, **wanted), plan=plan)

    def _trace(self, config: SFTConfig, planned: PlannedModel, batch: BatchShape, level: Level | None) -> StepTrace:
        """One micro-batch at a level; without a level, one batch of an evaluation. How the model is sharded makes no
        difference to it."""
        if level is Level.OFFLOAD:
            return self._trace(config, planned, batch, Level.RECOMPUTE).with_inputs_on_host()
        whole: dict[str, Any] = {
            "sharding_strategy": None, "reshard_after_forward": None, "offload_params": False,
            "dp_replicate_size": None, "dp_shard_size": None,
        }  # fmt: skip
        model = (_fixed(config), str(dataclasses.replace(planned.engine, **whole)), planned.device)
        key = (model, batch.rows, batch.length, batch.packed, level)
        if key not in self._traces:
            traced = trace_evaluation(planned, batch) if level is None else trace_step(planned, batch, level)
            self._traces[key] = traced
        return self._traces[key]

    def _plain_step(
        self, config: SFTConfig, planned: PlannedModel, batch: BatchShape
    ) -> tuple[dict[Level, StepTrace], BatchShape]:
        """One row without recomputation and compilation, which counts operations: each row has as many."""
        plain = dataclasses.replace(planned, engine=dataclasses.replace(planned.engine, backend="no"))
        row = dataclasses.replace(batch, rows=1)
        return {Level.KEEP_ALL: self._trace(config, plain, row, Level.KEEP_ALL)}, row


def _fixed(config: SFTConfig) -> tuple[tuple[str, str], ...]:
    """The settings that a planned model depends on."""
    return tuple((name, str(value)) for name, value in config.values().items() if name not in BATCH_SETTINGS)


def estimate_with_advice(request: PlanRequest) -> Estimate:
    """What a run needs and costs and, if it does not fit, the smallest change that would make it fit."""
    price = Pricing()
    return advised(price(request), request, price)


def advised(estimate: Estimate, request: PlanRequest, price: Pricing) -> Estimate:
    """An estimate with the smallest change that would make the run fit, if it does not."""
    if estimate.verdict.fits is not False:
        return estimate
    search = ChangeSearch(request, estimate, price)
    began = time.perf_counter()
    changes = tuple(search.find())
    verdict = dataclasses.replace(estimate.verdict, changes=changes, tried=search.tried)
    seconds = {**estimate.seconds, "advice": time.perf_counter() - began}
    return dataclasses.replace(estimate, verdict=verdict, seconds=seconds)


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


def step_options(config: SFTConfig, planned: PlannedModel, options: MemoryOptions) -> StepOptions:
    """Settings that a step's time depends on."""
    dtype = planned.precision.param_dtype or next(p.dtype for p in planned.model.parameters() if p.is_floating_point())
    name = dtype_name(dtype)
    return StepOptions(
        "tf32" if name == "float32" and config.tf32 else name, options.offload, config.sync_each_batch,
        options.forward_prefetch, options.backward_prefetch,
        sum(map(options.optimizer.unit_state, planned.plan.units)),
    )  # fmt: skip


def without_idle_layers(planned: PlannedModel, traces: Mapping[Level, StepTrace]) -> PlannedModel:
    """The planned model without the layers that its forward pass does not call, such as those for images."""
    called = {segment.unit for trace in traces.values() for segment in trace.segments}
    layers = tuple(layer for layer in planned.layers if planned.kinds[layer] in called)
    kinds = {layer: planned.kinds[layer] for layer in layers}
    return dataclasses.replace(planned, layers=layers, kinds=kinds)


def untraced(planned: PlannedModel) -> dict[Level, StepTrace]:
    """A step without activations, for models that cannot be traced."""
    kinds = dict.fromkeys(planned.kinds.values())
    segments = [Segment(kind, moment, 0, 0, 0, 0, 0) for moment in ("forward", "backward") for kind in kinds]
    return dict.fromkeys(Level, StepTrace(tuple(segments)))
