"""The memory that a run with these settings needs: its planned model and the traces of a step, priced."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from fullshard import accelerator
from fullshard.capacity.activation_levels import chosen_levels
from fullshard.capacity.memory import MemoryEstimate, MemoryOptions, estimate_memory
from fullshard.capacity.optimizer_state import OptimizerMemory, names_apart
from fullshard.capacity.planned_model import HeldTensor, PlannedModel
from fullshard.capacity.step_trace import StepTrace
from fullshard.fsdp.activation_memory import Level, full_checkpointing, recompute_costs
from fullshard.fsdp.plan import ParameterPlan
from fullshard.fsdp.strategy import BackwardPrefetch
from fullshard.parallelize.settings import EngineSettings
from fullshard.settings.sft_config import SFTConfig
from fullshard.train.activation_budget import SLACK


def memory_options(
    config: SFTConfig, planned: PlannedModel, accumulation: int, ranks_per_node: int, device_memory: int | None = None
) -> MemoryOptions:
    """What memory depends on besides the plan and the traces."""
    engine, on_device = planned.engine, accelerator.is_accelerator(planned.device)
    apart = whole_names(names_apart(planned.model, config.optim), planned.kinds)
    return MemoryOptions(
        accelerator=on_device,
        point_to_point=not on_device,
        accumulation=accumulation,
        sync_each_batch=config.sync_each_batch,
        forward_prefetch=engine.forward_prefetch is not False,
        backward_prefetch=BackwardPrefetch.of(engine.backward_prefetch or "BACKWARD_PRE"),
        offload=engine.offload_params,
        optimizer=OptimizerMemory(config.optim, config.optimizer_arguments(), apart, config.weight_decay),
        buffers=sum(t.bytes for t in planned.buffers.values()),
        unsharded=tuple(_unsharded(name, t) for name, t in planned.ignored.items()),
        ranks_per_node=ranks_per_node,
        async_save=config.async_save,
        device_memory=device_memory if on_device else None,
        budget=_limit(config.activation_budget),
    )


def _limit(budget: int | Literal["auto"] | None) -> float | None:
    """What a budget for activations lets torch allocate."""
    return math.inf if budget == "auto" else budget * (1 - SLACK) if budget is not None else None


def whole_names(names: set[str], kinds: Mapping[str, str]) -> frozenset[str]:
    """Names of parameters of a condensed model, in all layers of the whole model."""
    alike: dict[str, list[str]] = {}
    for layer, kind in kinds.items():
        alike.setdefault(f"{kind}.", []).append(f"{layer}.")
    found = set()
    for name in names:
        prefix = next((kind for kind in alike if name.startswith(kind)), "")
        found |= {layer + name.removeprefix(prefix) for layer in alike[prefix]} if prefix else {name}
    return frozenset(found)


def _unsharded(name: str, t: HeldTensor) -> ParameterPlan:
    """The plan of a parameter that every rank holds whole."""
    spec = (None,) * len(t.shape)
    return ParameterPlan(
        (name,), t.shape, t.dtype, t.dtype, t.dtype, t.trainable, spec, None, 1, t.shape, math.prod(t.shape) > 0
    )


# --- what layers keep -------------------------------------------------------------------------------------------------


def needed_levels(config: SFTConfig, engine: EngineSettings) -> list[Level]:
    """The levels that layers may have, for which a step must be traced."""
    if config.activation_budget is not None:
        return list(Level)
    if not (config.gradient_checkpointing or engine.activation_checkpointing):
        return [Level.KEEP_ALL]
    return [Level.RECOMPUTE, *([Level.OFFLOAD] if _offloads(config, engine) else [])]


def _offloads(config: SFTConfig, engine: EngineSettings) -> bool:
    return config.activation_offloading or engine.activation_checkpointing_offload


def planned_levels(
    config: SFTConfig, planned: PlannedModel, traces: Mapping[Level, StepTrace], options: MemoryOptions
) -> list[Level]:
    """What each layer keeps for backward; with a budget, what the run would choose."""
    count, budget = len(planned.layers), config.activation_budget
    if not (config.gradient_checkpointing or planned.engine.activation_checkpointing):
        return [Level.KEEP_ALL] * count
    offload = options.accelerator and (_offloads(config, planned.engine) or isinstance(budget, int))
    base = full_checkpointing(count, offload)
    if budget is None or not count:
        return base
    allowed = {level: trace for level, trace in traces.items() if offload or level is not Level.OFFLOAD}

    def estimate(levels: Sequence[Level]) -> MemoryEstimate:
        return estimate_memory(planned.plan, allowed, planned.layers, planned.kinds, levels, options)

    limits = [budget * (1 - SLACK)] if isinstance(budget, int) else []
    if options.device_memory is not None:
        least = estimate(base)
        limits.append(options.device_memory - least.reserved)
    if not limits:
        return base
    modules = dict(planned.model.named_modules())
    costs = {kind: recompute_costs(modules[kind]) for kind in dict.fromkeys(planned.kinds.values())}
    kinds = [planned.kinds[layer] for layer in planned.layers]
    return chosen_levels(allowed, costs, kinds, base, min(limits), lambda levels: estimate(levels).peak)
