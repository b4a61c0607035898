"""Capacity planning: what a training run needs in memory, traffic and time, before it runs.

One pipeline: a `PlanRequest` → the `PlannedModel` → its largest batch → a `StepTrace` → memory, traffic and time → the
`Verdict`, together an `Estimate`. Runs begin with it (`plan_first.py`, `activation_budget.py`); `changes.py` and
`search.py` make it for other settings.

The names below are imported when they are first used; `docs/planning.md` is the guide.
"""

from __future__ import annotations

from fullshard.config.lazy_names import lazy_names

_HOMES = {
    "trace_step": "tracer",
    **dict.fromkeys(("MemoryEstimate", "MemoryOptions", "estimate_memory"), "memory"),
    "PlannedModel": "planned_model",
    "BatchShape": "batch",
    **dict.fromkeys(("Segment", "StepTrace"), "step_trace"),
    "Estimate": "estimate",
    "Verdict": "verdict",
}
"""Each public name and the module that defines it."""

__all__ = sorted(_HOMES)

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
