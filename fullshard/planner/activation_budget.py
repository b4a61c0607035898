"""Activation memory by budget (`gradient_checkpointing` auto or a size): layers keep what fits, the rest is recomputed.

A run begins with the choice that was planned (`plan_first.py`), from its first step on. Where there is no plan, the
first steps are measured. The first one recomputes every layer. In the next one the last layer keeps everything, which
takes no more memory: a recomputed layer has all of its activations too when its backward begins. (One that runs in
slices of the sequence has not: without a plan, all of them are recomputed.) Then it is known what a layer keeps, and if
not all layers can, one step measures a layer that recomputes its feed-forward part alone.

Both are one `LevelChoice`, which rank 0 decides by. The peak that it leads to is measured on accelerators, and the
choice corrected by the difference: steps in which something is compiled or tuned take more memory than others. All
ranks have the same levels, by the largest numbers and the smallest memory among them, for the largest batch of the run.

If memory runs out all the same, a single rank returns to full checkpointing and repeats the step. Several ranks cannot,
because the others wait in a collective by then: they leave more memory free instead.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn

from fullshard.activations.layer_memory import DeviceMemory, LayerMeter
from fullshard.activations.levels import (
    Level,
    LevelChoice,
    describe_levels,
    full_checkpointing,
    kinds_of,
    mlp_of,
    peak_of,
    recompute_costs,
    set_level,
    sliced_parts,
)
from fullshard.activations.offload import buffers as host_buffers
from fullshard.config.byte_size import memory_size
from fullshard.data.loader import Step
from fullshard.device import accelerator
from fullshard.distributed import engines, runtime
from fullshard.distributed.ranks import exchange, on_rank_0
from fullshard.models.causal_lm import get_causal_lm
from fullshard.planner.batch import BatchShape
from fullshard.planner.host_memory import margin
from fullshard.planner.memory_settings import budget_limit, may_offload

CHECKS = 3
"""How often a choice is corrected at most."""
WAIT = 8
"""Steps in which a choice is checked, if none has a batch of about the largest size before."""


@dataclass
class Measured:
    """What is known of one rank, in bytes for the largest batch."""

    limit: float = 0.0
    """What may be allocated."""
    rest: float = 0.0
    """In use between steps."""
    full: float = 0.0
    """What a step adds at its peak if all layers are recomputed."""
    lean: float = 0.0
    """The same without the activations of the layer that is recomputed at the peak."""
    update: float = 0.0
    """The same at the update of the weights, where that is more."""
    inputs: dict[int, float] = field(default_factory=dict)
    """By kind of layer, the size of a layer's input."""
    kept: dict[tuple[int, Level], float] = field(default_factory=dict)
    """By kind and level, what a call of a layer leaves behind."""

    @staticmethod
    def of_ranks(ranks: Sequence[Measured]) -> Measured:
        """What holds on every rank: the largest sizes and the smallest limit."""

        def most(name: str) -> Any:
            return {key: max(getattr(one, name)[key] for one in ranks) for key in getattr(ranks[0], name)}

        limit, rest = min(one.limit for one in ranks), max(one.rest for one in ranks)
        full, lean = max(one.full for one in ranks), max(one.lean for one in ranks)
        update = max(one.update for one in ranks)
        return Measured(limit, rest, full, lean, update, most("inputs"), most("kept"))

    def sizes(self, kind: int) -> dict[Level, float]:
        """What a layer of this kind keeps, by level, as far as it is known."""
        base = self.kept[kind, Level.RECOMPUTE]
        return {
            Level.OFFLOAD: 0.0,
            **{level: self.inputs[kind] + max(0.0, b - base) for (k, level), b in self.kept.items() if k == kind},
        }


@dataclass(frozen=True)
class Decision:
    """What all ranks do by a `LevelChoice`."""

    levels: list[Level]
    base: list[Level]
    """The levels that need the least memory."""
    predicted: float
    """The peak of a step."""
    spare: float
    """What it leaves of the limit."""
    checks: int
    """How often it may still be corrected."""


def usable_memory(memory: DeviceMemory) -> float:
    """The bytes that this rank may allocate, as far as other programs are concerned."""
    return memory.limit() - margin(runtime.world_size()) * memory.total()


class ActivationBudget:
    """Sets what a model's layers keep, from step to step until it is chosen. Without a budget, all are recomputed."""

    def __init__(
        self, layers: Sequence[nn.Module], budget: int | Literal["auto"] | None, largest: BatchShape | None,
        model: Any, say: Callable[[str], None], *, offload: bool = False, reentrant: bool = False,
    ) -> None:  # fmt: skip
        self.layers, self.budget, self.largest, self.model, self.say = list(layers), budget, largest, model, say
        self.reentrant = reentrant
        self.memory = DeviceMemory(runtime.device(), runtime.local_world_size())
        self.offload = may_offload(offload, budget, self.memory.has_streams)
        """Whether inputs of recomputed layers may wait on the host: a size holds from the first step on."""
        self.kinds = kinds_of(self.layers)
        self.base = full_checkpointing(len(self.layers), self.offload)
        self.measured, self.known = Measured(), Measured()
        """What this rank has measured, and what is known of all of them."""
        self.levels = self._set(self.base)
        self.probe: tuple[int, Level] | None = None
        """The kind and level of the layer that the next step measures."""
        self.choice: LevelChoice[Any] | None = None
        """What rank 0 decides by."""
        self.predicted, self.copies = 0.0, 0
        """The peak of a step, and the part of it that copies of weights take."""
        self.decides = budget is not None and largest is not None and bool(self.layers)
        """Whether there is anything to choose."""
        self.quadratic = self.decides and get_causal_lm(model).config.get_text_config()._attn_implementation == "eager"
        """Whether attention keeps a value for each pair of tokens."""
        self.chosen = not self.decides
        if not engines.current().compiles_steps:
            model._fullshard_engine.decides_copies = budget is None
        self._checks, self._age, self._exceeded, self._error = 0, 0, False, 0.0
        """How often the choice may still be corrected, the steps since it was made, whether one took more than the
        limit, and what steps take beyond what was predicted; the last two on rank 0."""
        self._before_update: int | None = None
        """The peak of this step up to the update of the weights; None before it."""
        if self.chosen and budget is not None:
            say("activations: the length of batches is not known in advance, so all layers are recomputed.")

    def usable(self) -> int | None:
        """The bytes that every rank may allocate as far as other programs are concerned, before weights are read; None
        where nothing is chosen. All ranks must call it."""
        if not self.decides:
            return None
        process = 0 if self.memory.counts_tensors else self.memory.in_use()
        return int(min(exchange(usable_memory(self.memory) - process, "usable memory")))

    def begin(self, planned: LevelChoice[Any] | None) -> None:
        """Begin with the choice that was planned, if there is one. All ranks must call it; rank 0 has the plan."""
        if self.chosen:
            return
        self.choice = planned if planned is not None and len(planned.kinds) == len(self.layers) else None
        checks = CHECKS if self.memory.counts_tensors else 0
        decision = on_rank_0(lambda: None if self.choice is None else self._decision(checks), "planned levels")
        if decision is not None:
            self.chosen = True
            self._apply(decision)
        elif any(map(sliced_parts, self.layers)):  # to measure a layer that keeps everything may take too much
            self.chosen = True
            self.say("activations: there is no plan, so all layers are recomputed, in slices.")

    # --- one step ---------------------------------------------------------------------------------------------------

    @property
    def is_settled(self) -> bool:
        """Whether steps are no longer measured here."""
        return self.chosen and not self._checks

    def run(self, train_step: Callable[[Step], Any], step: Step) -> Any:
        """Take a step. It is measured until everything is chosen, and repeated if it runs out of memory."""
        self._before_update = None
        try:
            if self.is_settled:
                return train_step(step)
            return self._checked_step(train_step, step) if self.chosen else self._measured_step(train_step, step)
        except torch.OutOfMemoryError:
            if runtime.world_size() > 1 or self.levels == self.base or self._before_update is not None:
                raise
        # Not in the except block: the exception holds the frames of the step, and these its tensors.
        self.model._fullshard_engine.reset()  # first: until then modules may hold gathered parameters
        self.model.zero_grad(set_to_none=True)
        gc.collect()
        accelerator.empty_cache(runtime.device())
        self._keep_copies(0)
        self.levels, self.probe, self.chosen, self._checks = self._set(self.base), None, True, 0
        self.say("activations: memory ran out; the step is repeated, and from here on all layers are recomputed.")
        return train_step(step)

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Note when weights are updated: such a step cannot be repeated, and the memory of updates is another one."""
        optimizer.register_step_pre_hook(lambda *_: self._at_update())

    def _at_update(self) -> None:
        self._before_update = self.memory.peak() if self._checks or not self.chosen else 0

    def _measured_step(self, train_step: Callable[[Step], Any], step: Step) -> Any:
        last = {kind: index for index, kind in enumerate(self.kinds)}
        probed = [kind for kind in last if self.probe is None or kind == self.probe[0]]
        meters = {kind: LayerMeter(self.layers[last[kind]]) for kind in probed}
        rest = self.memory.in_use()
        self.memory.mark()
        try:
            result = train_step(step)
        finally:
            for meter in meters.values():
                meter.stop()
        assert self.largest is not None
        self._note(meters, rest, self.largest.scale(step, self.quadratic))
        self._decide()
        return result

    def _note(self, meters: dict[int, LayerMeter], rest: int, scale: float) -> None:
        """Add what a step has shown."""
        measured, probe, whole = self.measured, self.probe, self.memory.peak() - rest
        peak = scale * (self._before_update - rest if self._before_update is not None else whole)
        for kind, meter in meters.items():
            measured.kept[kind, probe[1] if probe is not None else Level.RECOMPUTE] = meter.kept * scale
            if probe is None:
                measured.inputs[kind] = meter.input * scale
        if probe is None:
            measured.full = measured.lean = peak
        elif probe == (self.kinds[-1], Level.KEEP_ALL):
            sizes = measured.sizes(probe[0])
            measured.lean = min(measured.full, peak - (sizes[Level.KEEP_ALL] - sizes[Level.RECOMPUTE]))
            measured.update = whole if whole > peak else 0.0
        measured.rest = self.memory.in_use()
        measured.limit = min(usable_memory(self.memory), budget_limit(self.budget) or math.inf)

    # --- the choice -------------------------------------------------------------------------------------------------

    def _decide(self) -> None:
        """Choose what to measure in the next step, or the levels of the run. All ranks must call it."""
        self.known = known = Measured.of_ranks(exchange(self.measured, "activation memory"))
        self.probe = self._next_probe(known)
        if self.probe is not None:
            kind, level = self.probe
            index = len(self.kinds) - 1 - self.kinds[::-1].index(kind)
            self.levels = self._set([*self.base[:index], level, *self.base[index + 1 :]])
            return
        self.choice, self.chosen = self._measured_choice(known), True
        self._apply(on_rank_0(lambda: self._decision(CHECKS), "activation levels"))

    def _decision(self, checks: int) -> Decision:
        """What follows from the choice and the error that is known of it."""
        assert self.choice is not None
        levels = self.choice.levels(self._error)
        predicted = self.choice.predicted(levels, self._error)
        return Decision(levels, list(self.choice.base), predicted, self.choice.limit - predicted, checks)

    def _apply(self, decision: Decision) -> None:
        is_new = decision.levels != self.levels or not self.predicted
        self.base, self.predicted, self._checks = decision.base, decision.predicted, decision.checks
        if is_new:
            self.levels, self._age = self._set(decision.levels), 0
            if Level.OFFLOAD not in self.levels:
                host_buffers.release()
        if self._checks == 0:  # copies of weights take what is left: before, they would be taken for activations
            self._keep_copies(int(decision.spare))
            self.predicted += self.copies
        if is_new:
            self.say(f"activations: {self.describe()}.")

    def _checked_step(self, train_step: Callable[[Step], Any], step: Step) -> Any:
        """Take a step with the levels that were chosen, and correct the choice by its peak."""
        assert self.largest is not None
        rest = self.memory.in_use()
        self.memory.mark()
        result = train_step(step)
        peak = self._before_update if self._before_update is not None else self.memory.peak()
        self._age += 1
        peaks = exchange((rest, peak - rest, self.largest.scale(step, self.quadratic)), "peak of activation memory")
        decision = on_rank_0(lambda: self._corrected(peaks), "activation levels")
        if decision is not None:
            self._apply(decision)
        return result

    def _corrected(self, peaks: Sequence[tuple[int, int, float]]) -> Decision | None:
        """What follows from a step with the current levels: by rank, the memory before it, what it added at its peak,
        and how much more the largest batch needs. None if nothing does."""
        assert self.choice is not None
        choice, small_batch = self.choice, max(scale for *_, scale in peaks) > 1.1
        first = self._age == 1  # something may have been compiled in it
        if small_batch and self._age < WAIT:
            return None
        rest = max(choice.rest, *(rest for rest, *_ in peaks))  # before the first step there is no optimizer state
        took = rest + max(more * scale if scale < 1.1 else more for _, more, scale in peaks)
        exceeded, error = took > choice.limit, took - choice.peak(self.levels)
        if first and not exceeded:
            return None
        checks = self._checks if first else self._checks - 1
        # Down whenever it is needed; up only while no choice has been too much, and if the next one is checked too.
        if error > self._error or not (first or small_batch or self._exceeded or checks == 0):
            self._error = error
        self._exceeded |= exceeded and not first
        decision = self._decision(checks)
        return replace(decision, checks=0) if decision.levels == self.levels and not first else decision

    def _keep_copies(self, spare: int) -> None:
        self.copies = self.model._fullshard_engine.keep_copies(spare)

    def _next_probe(self, known: Measured) -> tuple[int, Level] | None:
        """The kind and level to measure next; None if enough is known."""
        free = known.limit - known.rest - known.full
        recomputed = known.full - sum(known.inputs[kind] for kind in self.kinds)
        for kind in dict.fromkeys(reversed(self.kinds)):
            # Only the last layer's memory is released before the peak.
            fits = free >= 0 if kind == self.kinds[-1] else free >= recomputed
            if fits and (kind, Level.KEEP_ALL) not in known.kept:
                return kind, Level.KEEP_ALL
        if all(level is Level.KEEP_ALL for level in self._measured_choice(known).levels()):
            return None
        for kind in dict.fromkeys(reversed(self.kinds)):
            measured = (kind, Level.KEEP_ALL) in known.kept and (kind, Level.RECOMPUTE_MLP) not in known.kept
            if measured and mlp_of(self.layers[self.kinds.index(kind)]) is not None:
                return kind, Level.RECOMPUTE_MLP
        return None

    def _measured_choice(self, known: Measured) -> LevelChoice[int]:
        sizes = {kind: known.sizes(kind) for kind in set(self.kinds)}
        costs = {kind: recompute_costs(self.layers[self.kinds.index(kind)]) for kind in set(self.kinds)}
        besides = known.lean - sum(sizes[kind][level] for kind, level in zip(self.kinds, self.base, strict=True))
        """What a step needs besides what layers keep for backward."""

        def peak(levels: Sequence[Level]) -> float:
            return known.rest + max(known.full, besides + peak_of(sizes, self.kinds, levels))

        allowed = {
            kind: {level: size for level, size in each.items() if self.offload or level < Level.OFFLOAD}
            for kind, each in sizes.items()
        }
        update = known.rest + known.update
        return LevelChoice(self.kinds, allowed, costs, self.base, peak, known.limit, known.rest, update)

    def _set(self, levels: Sequence[Level]) -> list[Level]:
        accelerator.empty_cache(runtime.device())  # blocks of other sizes are needed now
        for layer, level in zip(self.layers, levels, strict=True):
            set_level(layer, level, reentrant=self.reentrant)
        return list(levels)

    def describe(self) -> str:
        """What was chosen, in words."""
        of = memory_size(self.budget if isinstance(self.budget, int) else self.memory.total())
        more = " (more than asked for, and the least possible)" if self._exceeds() else ""
        return f"{describe_levels(self.levels)}; predicted peak {memory_size(self.predicted)} of {of}{more}"

    def _exceeds(self) -> bool:
        return isinstance(self.budget, int) and self.predicted > self.budget

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def shape(self) -> dict[str, Any]:
        """What a choice depends on."""
        return {
            "budget": self.budget, "offload": self.offload, "ranks": runtime.world_size(), "kinds": self.kinds,
            "slices": [len(sliced_parts(layer)) for layer in self.layers],
            "memory": min(exchange(self.memory.total(), "memory of the ranks")),
            "largest": None if self.largest is None else {
                "tokens": self.largest.tokens, "length": self.largest.length, "quadratic": self.quadratic,
            },
        }  # fmt: skip

    def record(self) -> dict[str, Any] | None:
        """The choice, for a checkpoint; None if there is none. All ranks must call it."""
        if not self.chosen or self.budget is None:
            return None
        return {
            "shape": self.shape(), "levels": [int(level) for level in self.levels], "predicted": self.predicted,
            "copies": self.copies,
        }  # fmt: skip

    def adopt(self, record: dict[str, Any] | None) -> None:
        """Make the choice of a checkpoint this run's, if nothing has changed that it depends on. All ranks must call
        it."""
        if record is None or not self.decides:
            return
        if record["shape"] != self.shape():
            self.say("activations: chosen anew, because the checkpoint is from a run of another shape.")
            return
        self.levels, self.predicted = self._set([Level(level) for level in record["levels"]]), record["predicted"]
        self.chosen, self._checks = True, 0
        self._keep_copies(record.get("copies", 0))
        self.say(f"activations: as before: {self.describe()}.")
