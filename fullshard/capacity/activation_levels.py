"""What decides the levels of layers under a budget, as far as it is planned: bytes and peaks from traces.

The choice itself is `fsdp/activation_memory.LevelChoice`. A run begins with the planned one, and corrects it by what
its steps take; where there is no plan, it makes one of what the first steps show.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fullshard.capacity.memory import MemoryEstimate, MemoryOptions, estimate_memory
from fullshard.capacity.step_trace import StepTrace
from fullshard.fsdp.activation_memory import Level
from fullshard.fsdp.plan import ShardingPlan

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
