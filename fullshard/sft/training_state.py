"""What changes while a model trains: progress, the current micro-batch, and everything that a checkpoint holds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import NoneType
from typing import Any

import torch

from fullshard.checkpoint.manager import CheckpointManager, load_state
from fullshard.checkpoint.manifest import published_steps, step_name
from fullshard.config.errors import CheckpointError
from fullshard.distributed import runtime
from fullshard.distributed.ranks import exchange
from fullshard.planner.activation_budget import ActivationBudget
from fullshard.report.reporter import Window
from fullshard.sft.callbacks import Callbacks
from fullshard.sft.optimizer import Schedule
from fullshard.sft.output_dir import CHECKPOINTS
from fullshard.sft.sft_config import SFTConfig


@dataclass
class Progress:
    """How far a run has come; saved with every checkpoint."""

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
    for name, (kind, saved) in parts.items():
        types = {field.name: _types(str(field.type)) for field in fields(kind)}
        for key, value in saved.items() if isinstance(saved, dict) else [(name, saved)]:
            allowed = (NoneType,) if key == "window" else types.get(key, ())
            number = isinstance(value, int | float) and key != "best_value"
            if type(value) not in allowed or (number and not 0 <= value <= 2**53):
                raise CheckpointError(f"the {name} in the checkpoint has {key} = {str(value)[:40]}, which no run saves")


def _types(annotation: str) -> tuple[type, ...]:
    """The types of a field by its annotation; a float may be a whole number."""
    names = {"int": (int,), "float": (int, float), "dict": (dict,), "None": (NoneType,)}
    return tuple(kind for part in annotation.split(" | ") for kind in names[part.partition("[")[0]])


class MicroBatch:
    """What the optimizer step, the loss and `trainer.accelerator` share of the current micro-batch."""

    def __init__(self) -> None:
        self.scale = 1.0
        """The scale of the loss in fp16; otherwise 1."""
        self.stands_in = False
        """Whether the micro-batch is a repeated row, because this rank has none; it must not contribute."""
        self.measured = torch.zeros(4, dtype=torch.float64, device=runtime.device())
        """Correct predictions, entropy, router's loss × tokens, and tokens: sums over forward passes."""

    def take_measured(self) -> torch.Tensor:
        """The sums of this rank since the last call."""
        measured, self.measured = self.measured, torch.zeros_like(self.measured)
        return measured

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """The gradients of the micro-batch's loss; in fp16 the loss is scaled."""
        factor = 0.0 if self.stands_in else self.scale
        (loss if factor == 1 else loss * factor).backward(**options)


class TrainingState:
    """The model, what updates it, and how far it has come: what a checkpoint of a training holds."""

    def __init__(
        self, config: SFTConfig, model: Any, optimizer: torch.optim.Optimizer, schedule: Schedule,
        scaler: torch.amp.GradScaler, activations: ActivationBudget, events: Callbacks,
        store_flos: Callable[[], None], batch: int,
    ) -> None:  # fmt: skip
        self.config, self.model, self.optimizer, self.schedule = config, model, optimizer, schedule
        self.scaler, self.activations, self.events = scaler, activations, events
        self._store_flos = store_flos
        self.progress = Progress(batch=batch)
        self.window = Window()
        """The metrics of the steps since the last log line."""
        self.logged_steps = 0
        """The number of steps that the last logged loss is the mean of."""
        self.logged: dict[str, float] = {}
        """What TRL logs besides the loss, as it was logged last."""
        self.saved_step: int | None = None
        """The step of the newest checkpoint of this run."""

    def snapshot(self) -> dict[str, Any]:
        """The objects and values that a checkpoint holds. All ranks must call it."""
        scaler = {"scaler": self.scaler} if self.scaler.is_enabled() else {}
        self._store_flos()
        self.progress.total_flos = self.events.state.total_flos
        self.progress.callbacks = exchange(self.events.exported(), "state of the callbacks")[0]
        self.events.state.stateful_callbacks = self.progress.callbacks
        self.progress.activations = self.activations.record()
        elapsed = exchange(self.window.elapsed, "time spent")[0]
        progress = {**asdict(self.progress), "window": self.window.state(elapsed)}
        optimizer = {} if self.config.save_only_model else {"optimizer": self.optimizer}
        return {"model": self.model, **optimizer, "progress": progress, **scaler, **self.schedule.saved()}

    def restore(self, checkpoints: CheckpointManager) -> None:
        """Resume from the newest checkpoint that is whole."""
        snapshot = self.snapshot()
        checkpoints.restore(None, snapshot, fallback=True, check_values=check_progress)
        self.adopt(snapshot)

    def load(self, folder: Path) -> None:
        """Resume from a checkpoint's folder, or from the newest checkpoint in a run's folder."""
        self.adopt(load_state(_newest(folder), self.snapshot(), check_values=check_progress))

    def begin_again(self) -> None:
        """Start at the first step, with the model and the optimizer as they are."""
        self.progress, self.window, self.saved_step = Progress(batch=self.progress.batch), Window(), None

    def adopt(self, snapshot: dict[str, Any]) -> None:
        """Continue from the progress in a restored snapshot."""
        values = dict(snapshot["progress"])
        self.window = Window(**values.pop("window", {}))
        batch, self.progress = self.progress.batch, Progress(**values)
        # A stream continues with its next row whatever the batch size.
        if self.progress.batch != batch and self.progress.position is None and runtime.is_main():
            runtime.get_logger().warning(
                "the checkpoint was saved with a global batch of %d rows, this run has %d: from here on rows come in "
                "another order than the run began with",
                self.progress.batch,
                batch,
            )
        if self.config.save_only_model and runtime.is_main():
            runtime.get_logger().warning("save_only_model is on: the optimizer is a new one, without its state")
        self.progress.batch = batch
        self.activations.adopt(self.progress.activations)
        self.saved_step = self.progress.step
        self._show()

    def _show(self) -> None:
        """Show the progress under transformers' names."""
        progress, state = self.progress, self.events.state
        state.global_step, state.epoch, state.total_flos = progress.step, progress.epoch, progress.total_flos
        state.best_metric, state.best_global_step = progress.best_value, progress.best_step
        self.events.restore(progress.callbacks)


def _newest(folder: Path) -> Path:
    """The newest checkpoint in a run's folder or its folder of checkpoints; else the folder itself."""
    for root in (folder, folder / CHECKPOINTS):
        if root.is_dir() and (steps := published_steps(root)):
            return root / step_name(steps[-1])
    return folder
