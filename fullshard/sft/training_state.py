"""What a run resumes from: the model, what updates it, and how far it has come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from fullshard.checkpoint.manager import CheckpointManager
from fullshard.distributed import runtime
from fullshard.distributed.ranks import exchange
from fullshard.planner.activation_budget import ActivationBudget
from fullshard.report.reporter import Window
from fullshard.sft.callbacks import Callbacks
from fullshard.sft.optimizer import Schedule
from fullshard.sft.run_progress import Progress, check_progress
from fullshard.sft.sft_config import SFTConfig


class TrainingState:
    """The objects and values that change in the course of a training, and that its checkpoints hold."""

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
