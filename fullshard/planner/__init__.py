"""Capacity planning: what a training run needs in memory, traffic and time, before it runs.

The names below are imported when they are first used; `docs/planning.md` is the guide.
"""

from __future__ import annotations

from fullshard.config.lazy_names import lazy_names

_HOMES = {
    "trace_step": "activations",
    **dict.fromkeys(("MemoryEstimate", "MemoryOptions", "estimate_memory"), "memory"),
    "PlannedModel": "planned_model",
    **dict.fromkeys(("BatchShape", "Segment", "StepTrace"), "step_trace"),
    "Estimate": "estimate",
    "Verdict": "verdict",
}
"""Each public name and the module that defines it."""

__all__ = sorted(_HOMES)

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
