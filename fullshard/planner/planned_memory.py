"""The memory that a run with these settings needs: its planned model and the traces of a step, priced."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from fullshard.activations.levels import Level, LevelChoice, full_checkpointing, recompute_costs
from fullshard.config.errors import UserError, first_line
from fullshard.data.find_dataset import names_of
from fullshard.data.loader import cached_table
from fullshard.data.sources import hold_back
from fullshard.device import accelerator
from fullshard.fsdp.plan import ParameterPlan, ShardingPlan
from fullshard.fsdp.strategy import BackwardPrefetch
from fullshard.models.attention import is_own
from fullshard.models.attention_masks import BLOCK
from fullshard.models.causal_lm import get_causal_lm
from fullshard.models.rope_scaling import longest_document
from fullshard.models.router_loss import has_router_loss
from fullshard.parallel.settings import EngineSettings
from fullshard.planner.host_memory import PROCESS, margin
from fullshard.planner.memory import MemoryEstimate, MemoryOptions, estimate_memory
from fullshard.planner.optimizer_state import OptimizerMemory, names_apart
from fullshard.planner.planned_model import HeldTensor, PlannedModel
from fullshard.planner.step_trace import BatchShape, StepTrace
from fullshard.sft.batches import make_collator, text_settings
from fullshard.sft.dataset_options import find
from fullshard.sft.model import prepared_tokenizer, read_tokenizer
from fullshard.sft.read_model import uses_flash
from fullshard.sft.sft_config import SFTConfig

CONTEXT = 2048
"""Tokens of a row if neither the settings nor the model limit them."""


def bounds_batches(config: SFTConfig) -> bool:
    """Whether the largest batch of the engine's own data loader is known before it is loaded."""
    return not config.streaming or (config.max_length is not None and not config.skip_prepare_dataset)


def largest_shape(config: SFTConfig, model: Any, lengths: Sequence[int]) -> BatchShape:
    """The shape of a micro-batch of the longest rows, as the data loader pads them."""
    rows = config.per_device_train_batch_size
    block = BLOCK if is_own(get_causal_lm(model).config) else None
    collator = make_collator(config, 0, uses_flash(get_causal_lm(model)), has_router_loss(model), block=block)
    longest = sorted(lengths)[-rows:]
    length = collator.padded(int(sum(longest) if collator.flatten else longest[-1]))
    return BatchShape(1 if collator.flatten else rows, length, config.gradient_accumulation_steps, config.keeps_apart)


def evaluation_shape(config: SFTConfig, batch: BatchShape) -> BatchShape | None:
    """The largest batch of evaluations, of rows like the longest that are trained; None if there are none."""
    if config.eval_strategy == "no":
        return None
    trained, rows = config.per_device_train_batch_size, config.per_device_eval_batch_size
    packed = batch.packed and config.eval_packing is not False
    if batch.rows == 1 < trained:  # the rows of a batch are one
        return BatchShape(1, batch.length * rows // trained, packed=packed)
    return BatchShape(rows, batch.length, packed=packed)


def assumed_length(config: SFTConfig, model: Any) -> tuple[int, str]:
    """The length of rows if the data is not looked at, and where it comes from."""
    if config.max_length is not None:
        return config.max_length, "max_length"
    context = longest_document(get_causal_lm(model).config)
    return (context, "the model's context") if context is not None else (CONTEXT, "neither data nor model limit it")


def lengths_of_data(config: SFTConfig, model: Any, adapter: Any) -> tuple[Sequence[int] | None, str]:
    """The lengths of all rows of the training data, if it is here and has been tokenized for this run; and a note for
    the user. Nothing is downloaded or tokenized."""
    if config.dataset_name is None:
        return None, "no data was named"
    places = [*names_of(config.dataset_name), config.tokenizer_name_or_path or str(model or adapter)]
    if not all(Path(place).expanduser().exists() for place in places):
        return None, f"{config.dataset_name} and its tokenizer are not both on this machine"
    try:
        tokenizer = read_tokenizer(config, model, Path(adapter).expanduser() if adapter is not None else None)
        prepared_tokenizer(config, tokenizer)
        source = find(config).train
        if config.val_size:
            source, _ = hold_back(source, config.val_size, config.seed, config.streaming)
        settings = text_settings(config, tokenizer)
        table = None if config.streaming else cached_table(source, tokenizer, settings, config.cache_dir)
    except UserError as error:
        return None, f"{config.dataset_name} cannot be read ({first_line(error)})"
    if table is None:
        return None, f"{config.dataset_name} has not been tokenized yet, which fullshard sft with --preview does"
    return table.row_sizes[:].tolist(), f"they are those of {config.dataset_name}"


PASSES = ("forward", "loss", "backward")
"""The moments whose memory depends on what layers keep."""


def kept_bytes(traces: Mapping[Level, StepTrace]) -> dict[str, dict[Level, float]]:
    """By kind of layer and level, the bytes that a layer keeps for backward."""
    found: dict[str, dict[Level, float]] = {}
    for level, trace in traces.items():
        for segment in trace.segments:
            if segment.unit and segment.moment == "forward":
                found.setdefault(segment.unit, {}).setdefault(level, segment.kept)
    return found


@dataclass(frozen=True)
class PlannedPeak:
    """The peak of a step's forward and backward, by the levels of its layers. The engine's copies of weights are not
    counted: they take what is left."""

    plan: ShardingPlan
    traces: Mapping[Level, StepTrace]
    layers: Sequence[str]
    kinds: Mapping[str, str]
    options: MemoryOptions

    def __call__(self, levels: Sequence[Level]) -> float:
        moments = self.estimate(levels).moments
        return max(sum(moments[moment].values()) for moment in PASSES)

    def estimate(self, levels: Sequence[Level]) -> MemoryEstimate:
        """All memory of a run with these levels."""
        options = replace(self.options, keeps_copies=False)
        return estimate_memory(self.plan, self.traces, self.layers, self.kinds, levels, options)


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
        offload=engine.offload_params,
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


def may_offload(wanted: bool, budget: int | Literal["auto"] | None, on_device: bool) -> bool:
    """Whether inputs of recomputed layers may wait on the host: if that is wanted, or for a budget's size."""
    return wanted or (isinstance(budget, int) and on_device)


def planned_choice(
    config: SFTConfig, planned: PlannedModel, traces: Mapping[Level, StepTrace], options: MemoryOptions
) -> LevelChoice[str] | None:
    """What decides the levels of layers under a budget, in a plan and in the run that begins with it. None without a
    budget, and where the run does not know its largest batch: it recomputes all layers then."""
    budget, wanted = config.activation_budget, _offloads(config, planned.engine)
    if budget is None or not planned.layers or not bounds_batches(config):
        return None
    offload = may_offload(wanted, budget, options.accelerator)
    if not options.accelerator:  # inputs are in host memory already
        traces = {**traces, Level.OFFLOAD: traces[Level.RECOMPUTE]}
    modules, kinds = dict(planned.model.named_modules()), [planned.kinds[layer] for layer in planned.layers]
    costs = {kind: recompute_costs(modules[kind]) for kind in dict.fromkeys(kinds)}
    sizes = {
        kind: {
            level: size for level, size in each.items() if level in costs[kind] and (offload or level < Level.OFFLOAD)
        }
        for kind, each in kept_bytes(traces).items()
    }
    base = full_checkpointing(len(kinds), offload)
    peak = PlannedPeak(planned.plan, traces, planned.layers, planned.kinds, options)
    least = peak.estimate(base)
    update = sum(least.moments["optimizer step"].values())
    return LevelChoice(kinds, sizes, costs, base, peak, options.limit(least.reserved), least.rest, update)


def planned_levels(config: SFTConfig, planned: PlannedModel, choice: LevelChoice[str] | None) -> list[Level]:
    """What each layer keeps for backward."""
    if choice is not None:
        return choice.levels()
    count, engine = len(planned.layers), planned.engine
    if not (config.gradient_checkpointing or engine.activation_checkpointing):
        return [Level.KEEP_ALL] * count
    return full_checkpointing(count, _offloads(config, engine) and accelerator.is_accelerator(planned.device))
