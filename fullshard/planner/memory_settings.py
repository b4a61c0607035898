"""What the settings of a run say about its memory: the options of the estimate, and what each layer keeps for backward,
by checkpointing or by a budget."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from fullshard.activations.levels import (
    Level,
    LevelChoice,
    full_checkpointing,
    has_slices,
    limit_offload,
    recompute_costs,
)
from fullshard.device import accelerator
from fullshard.fsdp.plan import ParameterPlan, ShardingPlan
from fullshard.fsdp.strategy import BackwardPrefetch
from fullshard.parallel.settings import EngineSettings
from fullshard.planner.batch import bounds_batches
from fullshard.planner.host_memory import PROCESS, margin
from fullshard.planner.memory import MemoryEstimate, MemoryOptions, estimate_memory
from fullshard.planner.optimizer_state import OptimizerMemory, names_apart
from fullshard.planner.planned_model import PlannedModel, ReplicatedTensor
from fullshard.planner.step_trace import StepTrace, TracedModel
from fullshard.sft.sft_config import SFTConfig

PASSES = ("forward", "loss", "backward")
"""The moments whose memory depends on what layers keep."""


def kept_bytes(traces: Mapping[Level, StepTrace]) -> dict[str, dict[Level, float]]:
    """By kind of layer and level, the bytes that a layer keeps for backward."""
    sizes: dict[str, dict[Level, float]] = {}
    for level, trace in traces.items():
        for segment in trace.segments:
            if segment.unit and segment.moment == "forward":
                sizes.setdefault(segment.unit, {}).setdefault(level, segment.kept)
    return sizes


@dataclass(frozen=True)
class PlannedPeak:
    """The peak of a step's forward and backward, by the levels of its layers. The engine's copies of weights are not
    counted: they take what is left."""

    plan: ShardingPlan
    model: TracedModel
    options: MemoryOptions

    def __call__(self, levels: Sequence[Level]) -> float:
        moments = self.estimate(levels).moments
        return max(sum(moments[moment].values()) for moment in PASSES)

    def estimate(self, levels: Sequence[Level]) -> MemoryEstimate:
        """All memory of a run with these levels."""
        options = replace(self.options, keeps_copies=False)
        return estimate_memory(self.plan, self.model, levels, options)


SLACK = 0.01
"""The part of a budget's size that is left free, for what differs from step to step."""


def memory_options(
    config: SFTConfig, planned: PlannedModel, accumulation: int, ranks_per_node: int,
    device_memory: int | None = None, usable: int | None = None,
) -> MemoryOptions:  # fmt: skip
    """What memory depends on besides the plan and the traces. `usable` is what a run that begins may allocate."""
    engine, on_device = planned.engine, accelerator.is_accelerator(planned.device)
    if usable is None and device_memory is not None and not on_device:
        usable = int(device_memory * (1 - margin(math.prod(size for _, size in planned.plan.axes)))) - PROCESS
    apart = whole_names(names_apart(planned.model, config.optim), planned.kinds)
    return MemoryOptions(
        accelerator=on_device,
        point_to_point=not on_device,
        accumulation=accumulation,
        sync_each_batch=config.sync_each_batch,
        forward_prefetch=engine.forward_prefetch is not False,
        backward_prefetch=BackwardPrefetch.of(engine.backward_prefetch or "BACKWARD_PRE"),
        optimizer=OptimizerMemory(config.optim, config.optimizer_arguments(), apart, config.weight_decay),
        buffers=sum(t.bytes for t in planned.buffers.values()),
        unsharded=tuple(_unsharded(name, t) for name, t in planned.ignored.items()),
        ranks_per_node=ranks_per_node,
        async_save=config.async_save,
        device_memory=device_memory if on_device else None,
        usable=usable,
        budget=budget_limit(config.activation_budget),
    )


def budget_limit(budget: int | Literal["auto"] | None) -> float | None:
    """What a budget for activations lets torch allocate."""
    return math.inf if budget == "auto" else budget * (1 - SLACK) if budget is not None else None


def whole_names(names: set[str], kinds: Mapping[str, str]) -> frozenset[str]:
    """Names of parameters of a condensed model, in all layers of the whole model."""
    alike: dict[str, list[str]] = {}
    for layer, kind in kinds.items():
        alike.setdefault(f"{kind}.", []).append(f"{layer}.")
    whole = set()
    for name in names:
        prefix = next((kind for kind in alike if name.startswith(kind)), "")
        whole |= {layer + name.removeprefix(prefix) for layer in alike[prefix]} if prefix else {name}
    return frozenset(whole)


def _unsharded(name: str, t: ReplicatedTensor) -> ParameterPlan:
    """The plan of a parameter that every rank holds whole."""
    spec = (None,) * len(t.shape)
    return ParameterPlan(
        (name,), t.shape, t.dtype, t.dtype, t.dtype, t.trainable, spec, None, 1, t.shape, math.prod(t.shape) > 0
    )


# --- what layers keep -------------------------------------------------------------------------------------------------


def needed_levels(config: SFTConfig, engine: EngineSettings, sliced: bool = False) -> list[Level]:
    """The levels that layers may have, for which a step must be traced; `sliced` is whether they have parts that run
    in slices of the sequence."""
    if config.activation_budget is not None:
        return list(Level)
    if not (config.gradient_checkpointing or engine.activation_checkpointing):
        return [Level.RECOMPUTE_MLP if sliced else Level.KEEP_ALL]
    return [Level.RECOMPUTE, *([Level.OFFLOAD] if _offloads(config, engine) else [])]


def _offloads(config: SFTConfig, engine: EngineSettings) -> bool:
    return config.activation_offloading or engine.activation_checkpointing_offload


def may_offload(wanted: bool, budget: int | Literal["auto"] | None, on_device: bool) -> bool:
    """Whether inputs of recomputed layers may wait on the host: if that is wanted, or for a budget's size. (For auto,
    they do where nothing fits otherwise.)"""
    return wanted or (isinstance(budget, int) and on_device)


def planned_choice(
    config: SFTConfig, planned: PlannedModel, traces: Mapping[Level, StepTrace], options: MemoryOptions
) -> LevelChoice[str] | None:
    """What decides the levels of layers under a budget, in a plan and in the run that begins with it. None without a
    budget, and where the run does not know its largest batch: it recomputes all layers then. Inputs wait on the host if
    that is wanted, or if nothing fits otherwise, as many as it has memory for."""
    budget, wanted = config.activation_budget, _offloads(config, planned.engine)
    if budget is None or not planned.layers or not bounds_batches(config):
        return None
    if not options.accelerator:  # inputs are in host memory already
        traces = {**traces, Level.OFFLOAD: traces[Level.RECOMPUTE]}
    kinds, peak = (
        [planned.kinds[layer] for layer in planned.layers],
        PlannedPeak(planned.plan, planned.traced(traces), options),
    )
    costs = planned_costs(planned, traces)
    kept = kept_bytes(traces)
    on_host = _inputs_on_host(peak, kept, kinds)

    def choice(offload: bool) -> LevelChoice[str]:
        sizes = {
            kind: {
                level: size
                for level, size in each.items()
                if level in costs[kind] and (offload or level < Level.OFFLOAD)
            }
            for kind, each in kept.items()
        }
        base = limit_offload(full_checkpointing(len(kinds), offload), on_host)
        least = peak.estimate(base)
        update = sum(least.moments["optimizer step"].values())
        limit = options.limit(least.reserved)
        return LevelChoice(kinds, sizes, costs, base, peak, limit, least.rest, update, on_host)

    chosen = choice(may_offload(wanted, budget, options.accelerator))
    fits = chosen.peak(chosen.base) <= chosen.limit
    return chosen if fits or not options.accelerator else choice(offload=True)


def planned_costs(planned: PlannedModel, traces: Mapping[Level, StepTrace]) -> dict[str, dict[Level, float]]:
    """What recomputing a layer costs, by its kind and level: the operations of its forward and backward beyond those of
    a layer that keeps everything. Where nothing is traced, those of its products."""
    modules, costs = dict(planned.model.named_modules()), {}
    for kind in dict.fromkeys(planned.kinds[layer] for layer in planned.layers):
        flops = {level: sum(s.flops for s in trace.segments if s.unit == kind) for level, trace in traces.items()}
        more = {level: max(0.0, float(count - flops[Level.KEEP_ALL])) for level, count in flops.items()}
        by_products = recompute_costs(modules[kind])
        whole = more[Level.RECOMPUTE]
        costs[kind] = (
            {level: 1.02 * whole if level is Level.OFFLOAD else more[level] for level in by_products}
            if whole
            else by_products
        )
    return costs


def _inputs_on_host(peak: PlannedPeak, kept: Mapping[str, Mapping[Level, float]], kinds: Sequence[str]) -> int | None:
    """How many layers' inputs the host has memory for, beside what else is there."""
    options = peak.options
    if options.host_memory is None or not options.accelerator:
        return None
    largest = max(kept[kind][Level.RECOMPUTE] - kept[kind][Level.OFFLOAD] for kind in kinds) * options.ranks_per_node
    others = peak.estimate(full_checkpointing(len(kinds), offload=False)).host_total
    free = options.host_memory * (1 - margin(1)) - others
    return max(0, int(free // largest)) if largest > 0 else None


def planned_levels(config: SFTConfig, planned: PlannedModel, choice: LevelChoice[str] | None) -> list[Level]:
    """What each layer keeps for backward."""
    if choice is not None:
        return choice.levels()
    count, engine = len(planned.layers), planned.engine
    if not (config.gradient_checkpointing or engine.activation_checkpointing):
        return needed_levels(config, engine, has_slices(planned.model)) * count
    return full_checkpointing(count, _offloads(config, engine) and accelerator.is_accelerator(planned.device))
