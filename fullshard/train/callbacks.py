"""Callbacks as transformers' trainer calls them: `on_log(args, state, control, logs=…)` and the like.

A callback may set `control.should_training_stop`; one rank is enough. The trainer's own (`samples.py`, `hub.py`) are
told the same way, and never stop a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fullshard.ranks import any_of


@dataclass
class TrainerState:
    """Where the run stands, under transformers' names."""

    global_step: int = 0
    max_steps: int = 0
    epoch: float = 0.0
    best_metric: float | None = None
    best_global_step: int | None = None
    log_history: list[dict[str, Any]] = field(default_factory=list)
    is_world_process_zero: bool = True


@dataclass
class TrainerControl:
    should_training_stop: bool = False


class Callbacks:
    """Calls every callback that has a method for an event."""

    def __init__(self, callbacks: Sequence[Any], args: Any, state: TrainerState, own: Sequence[Any] = ()) -> None:
        self.callbacks, self.args, self.state, self.own = list(callbacks), args, state, list(own)
        self.control = TrainerControl()

    def __call__(self, event: str, step: int = 0, **facts: Any) -> bool:
        """Tell the callbacks; whether one of them, on any rank, wants to stop."""
        self.state.global_step = step
        for callback in (*self.own, *self.callbacks):
            if (method := getattr(callback, event, None)) is not None:
                method(self.args, self.state, self.control, **facts)
        if not self.callbacks or event != "on_step_end":
            return False
        return bool(any_of(int(self.control.should_training_stop), "callbacks"))
