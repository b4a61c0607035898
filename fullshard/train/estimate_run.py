"""Prices a run on a machine: its planned model, a trace of one step, and from these memory, traffic and time.

Used by `fullshard plan`, by every run before it starts, and by the search for settings that fit.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fullshard.capacity.activations import trace_step
from fullshard.capacity.estimate import Estimate
from fullshard.capacity.memory import MemoryOptions, estimate_memory
from fullshard.capacity.optimizer_state import OptimizerMemory, names_apart
from fullshard.capacity.planned_model import PlannedModel
from fullshard.capacity.step_time import StepOptions, estimate_time, flops_per_token
from fullshard.capacity.step_trace import BatchShape, StepTrace
from fullshard.capacity.traffic import step_traffic
from fullshard.capacity.verdict import judge
from fullshard.errors import CapacityError
from fullshard.fsdp.activation_memory import Level, full_checkpointing
from fullshard.fsdp.strategy import BackwardPrefetch
from fullshard.settings.sft_config import SFTConfig
from fullshard.train.plan_changes import ChangeSearch
from fullshard.train.plan_request import PlanRequest

BATCH_SETTINGS = (
    "per_device_train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing", "activation_offloading",
    "optim", "optim_args", "sync_each_batch", "use_reentrant",
)  # fmt: skip
"""Settings that neither the planned model nor its plan depends on."""


def estimate_run(request: PlanRequest) -> Estimate:
    """What a run needs and costs."""
    return Pricing()(request)


def estimate_with_advice(request: PlanRequest) -> Estimate:
    """What a run needs and costs and, if it does not fit, the smallest change that would make it fit."""
    price = Pricing()
    estimate = price(request)
    if estimate.verdict.fits is not False:
        return estimate
    search = ChangeSearch(request, estimate, price)
    with price.clock("advice"):
        change = search.find()
    verdict = dataclasses.replace(estimate.verdict, change=change, tried=search.tried)
    return dataclasses.replace(estimate, verdict=verdict, seconds=dict(price.seconds))


class Pricing:
    """Prices runs. What several of them share, models and traces, is made once."""

    def __init__(self) -> None:
        self._models: dict[Any, PlannedModel] = {}
        self._traces: dict[Any, StepTrace] = {}
        self.seconds: dict[str, float] = {}
        """How long each part took."""

    @contextmanager
    def clock(self, what: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[what] = self.seconds.get(what, 0.0) + time.perf_counter() - began

    def __call__(self, request: PlanRequest) -> Estimate:
        config, machine = request.config, request.machine
        with self.clock("model and plan"):
            planned = self._planned(request)
        batch, assumed = request.batch, list(request.notes)
        if batch is None:
            batch = assumed_batch(config, planned)
            assumed.append(f"every row has {batch.length:,} tokens (max_length): the data was not looked at")
        return self.price(config, planned, machine, batch, request.model, tuple(assumed))

    def price(
        self, config: SFTConfig, planned: PlannedModel, machine: Machine, batch: BatchShape, name: str,
        assumed: Sequence[str] = (),
    ) -> Estimate:  # fmt: skip
        """What a run with this model needs and costs; `batch` is its largest."""
        lines, certain = [*assumed, *planned.notes], True
        with self.clock("trace"):
            try:
                traces = self._traced(planned, batch, config)
            except CapacityError as error:
                lines.append(str(error))
                traces, certain = _nothing(planned), False
        with self.clock("memory"):
            options = memory_options(config, planned, machine, batch, traces)
            levels = levels_of(config, planned, traces, options)
            memory = estimate_memory(planned.plan, traces, planned.layers, planned.kinds, levels, options)
        with self.clock("traffic and time"):
            engine = planned.engine
            traffic = step_traffic(
                planned.plan, machine.gpus_per_node, batch.accumulation, config.sync_each_batch, engine.offload_params,
                batch.tokens, machine.shares_host_memory,
            )  # fmt: skip
            dtype = str(planned.precision.param_dtype or planned.model.dtype).removeprefix("torch.")
            step = StepOptions(
                dtype, engine.offload_params, config.sync_each_batch, options.forward_prefetch,
                options.backward_prefetch, sum(map(options.optimizer.unit_state, planned.plan.units)),
            )  # fmt: skip
            steps = estimate_time(
                planned.plan, machine, traces, planned.layers, planned.kinds, levels, batch, step
            )
            flops = flops_per_token(traces, planned.layers, planned.kinds, batch)
        return Estimate(
            str(name), machine, config.changed(), planned.plan, batch, planned.layers, tuple(levels), memory, traffic,
            steps, flops, judge(memory, machine, certain), (*lines, *steps.assumptions), dict(self.seconds),
        )  # fmt: skip

    def _planned(self, request: PlanRequest) -> PlannedModel:
        values = request.config.values()
        fixed = tuple((name, str(value)) for name, value in values.items() if name not in BATCH_SETTINGS)
        key = (fixed, request.engine, request.machine.kind, request.machine.num_processes, request.machine.nodes)
        if key not in self._models:
            self._models[key] = plan_run(request)
        return dataclasses.replace(self._models[key])

    def _traced(self, planned: PlannedModel, batch: BatchShape, config: SFTConfig) -> dict[Level, StepTrace]:
        found = {}
        for level in needed_levels(config, planned.engine):
            key = (id(planned.model), batch.rows, batch.length, batch.packed, level)
            if key not in self._traces:
                self._traces[key] = trace_step(planned, batch, level)
            found[level] = self._traces[key]
        return found
