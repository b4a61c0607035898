"""What `gradient_checkpointing` auto or a size leads to: the levels that a run would choose, from traces.

The choice itself is `fsdp/activation_memory.fitting_levels`, which a run feeds with measured numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from fullshard.capacity.step_trace import StepTrace
from fullshard.fsdp.activation_memory import Level, fitting_levels


def kept_bytes(traces: Mapping[Level, StepTrace]) -> dict[str, dict[Level, float]]:
    """By kind of layer and level, the bytes that a layer keeps for backward."""
    found: dict[str, dict[Level, float]] = {}
    for level, trace in traces.items():
        for segment in trace.segments:
            if segment.unit and segment.moment == "forward":
                found.setdefault(segment.unit, {}).setdefault(level, segment.kept)
    return found


def chosen_levels(
    traces: Mapping[Level, StepTrace],
    costs: Mapping[str, Mapping[Level, float]],
    kinds: Sequence[str],
    base: Sequence[Level],
    limit: float,
    peak: Callable[[Sequence[Level]], float],
) -> list[Level]:
    """The levels with the least recomputation whose peak is within the limit; `base` if there are none.

    `kinds` are the kinds of all layers in order, `costs` what recomputing a layer of each costs, `base` the levels with
    the least memory, and `peak` the peak that levels lead to.
    """
    sizes = kept_bytes(traces)
    everything = sum(max(sizes[kind].values()) for kind in kinds)
    return fitting_levels(sizes, costs, kinds, everything, limit, peak) or list(base)
