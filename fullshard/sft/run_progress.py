"""How far a run has come, and the metrics of its steps. No tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from types import NoneType
from typing import Any

from fullshard.config.errors import CheckpointError
from fullshard.report.reporter import Window


@dataclass
class Progress:
    """The progress of a run; saved with every checkpoint."""

    step: int = 0
    """Steps done, skipped ones included: their rows are used up. The learning rate follows `step - skipped`."""
    batch: int = 0
    """Rows in a global batch."""
    tokens: int = 0
    skipped: int = 0
    """Steps without an update: gradients that overflowed in fp16, and non-finite losses or gradients with
    `on_nonfinite_loss skip`."""
    loss_sum: float = 0.0
    """The sum of the finite losses of all steps."""
    loss_steps: int = 0
    """The number of these losses."""
    best_step: int | None = None
    best_value: float | None = None
    without_improvement: int = 0
    """Evaluations in a row without improvement."""
    epoch: float = 0.0
    """Epochs completed. In the first pass over a stream, fractions of an epoch are unknown."""
    position: dict[str, Any] | None = None
    """The position in a stream of data; None for a table, whose rows follow from the step."""
    passed_over: int = 0
    """Steps of the data that were left out because a callback ended an epoch early."""
    total_flos: float = 0.0
    """Floating-point operations of all ranks so far, by transformers' estimate."""
    callbacks: dict[str, Any] = field(default_factory=dict)
    """The state of callbacks that have one, by class name."""
    activations: dict[str, Any] | None = None
    """What layers keep for backward, if it was chosen (`activation_budget.py`)."""

    @property
    def mean_loss(self) -> float:
        """The mean of the steps' losses since the run began, each step counted once: Trainer's `train_loss`."""
        return self.loss_sum / self.loss_steps if self.loss_steps else math.nan

    def add_loss(self, loss: float) -> None:
        """Count the loss of a step, if it is finite."""
        if math.isfinite(loss):
            self.loss_sum, self.loss_steps = self.loss_sum + loss, self.loss_steps + 1

    def place(self) -> dict[str, Any]:
        """What counts the steps, to return to with `go_back`."""
        return {"step": self.step, "tokens": self.tokens, "epoch": self.epoch, "position": self.position}

    def go_back(self, place: dict[str, Any]) -> None:
        """Undo the counting of the steps since `place`."""
        vars(self).update(place)


def check_progress(values: dict[str, Any]) -> None:
    """Refuse the progress in a checkpoint if it is not what a run saves, before the run changes."""
    progress = values.get("progress")
    if not isinstance(progress, dict):
        raise CheckpointError("the checkpoint has no progress of a run")
    parts = {"progress": (Progress, {**progress, "window": None}), "window": (Window, progress.get("window", {}))}
    for name, (kind, found) in parts.items():
        types = {field.name: _types(str(field.type)) for field in fields(kind)}
        for key, value in found.items() if isinstance(found, dict) else [(name, found)]:
            allowed = (NoneType,) if key == "window" else types.get(key, ())
            number = isinstance(value, int | float) and key != "best_value"
            if type(value) not in allowed or (number and not 0 <= value <= 2**53):
                raise CheckpointError(f"the {name} in the checkpoint has {key} = {str(value)[:40]}, which no run saves")


def _types(annotation: str) -> tuple[type, ...]:
    """The types of a field by its annotation; a float may be a whole number."""
    names = {"int": (int,), "float": (int, float), "dict": (dict,), "None": (NoneType,)}
    return tuple(kind for part in annotation.split(" | ") for kind in names[part.partition("[")[0]])


@dataclass(frozen=True)
class StepResult:
    """The metrics of one step, equal on every rank."""

    loss: float
    accuracy: float
    entropy: float
    router_loss: float
    flos: float
    grad_norm: float
