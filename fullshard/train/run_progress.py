"""How far a run has come, and the metrics of its steps. No tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any


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


@dataclass(frozen=True)
class StepResult:
    """The metrics of one step, equal on every rank."""

    loss: float
    accuracy: float
    entropy: float
    router_loss: float
    flos: float
    grad_norm: float
