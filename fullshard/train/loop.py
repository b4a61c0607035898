"""The training loop: steps, evaluations, checkpoints, and when to stop.

The loss of a step is the mean of the model's own loss over all trained tokens of its global batch. Every rank has the
number of these tokens before the step. The engine averages gradients over the ranks, so each micro-batch's loss ×
tokens is scaled by ranks / tokens of the step. What a model adds (a router's auxiliary loss) is weighted the same way.
Decisions depend only on values that are equal on all ranks, so all ranks decide alike.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from fullshard import accelerator, runtime
from fullshard.checkpoint.manager import CheckpointManager
from fullshard.data.loader import Batch, Loader, Step, one_pass
from fullshard.data.pretokenized import IGNORED
from fullshard.data.token_table import TokenTable
from fullshard.errors import TrainingError
from fullshard.models.chunked_loss import LeanHead
from fullshard.models.packed_inputs import Packed
from fullshard.ranks import exchange
from fullshard.reporting.reporter import Reporter, Window, memory_gib
from fullshard.train.batches import describe_data
from fullshard.train.config import SFTConfig
from fullshard.train.optimizer import Schedule
from fullshard.watchdog import collectives, watch

ROWS_NAMED = 16


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

    @property
    def mean_loss(self) -> float:
        """The mean of the steps' losses since the run began, each step counted once: Trainer's `train_loss`."""
        return self.loss_sum / self.loss_steps if self.loss_steps else math.nan


@dataclass(frozen=True)
class StepResult:
    """The metrics of one step, equal on every rank."""

    loss: float
    accuracy: float
    entropy: float
    grad_norm: float
    updated: bool


class Loop:
    """Trains a sharded model. Every rank runs the same loop."""

    def __init__(
        self, config: SFTConfig, model: Any, head: LeanHead, optimizer: torch.optim.Optimizer, schedule: Schedule,
        loader: Loader, reporter: Reporter, evaluation: TokenTable | None, precision: str, packed: Packed | None,
        notify: Callable[..., bool],
    ) -> None:  # fmt: skip
        self.config, self.model, self.head, self.optimizer, self.schedule = config, model, head, optimizer, schedule
        self.loader, self.reporter, self.evaluation, self.packed = loader, reporter, evaluation, packed
        self.notify = notify
        """Calls the callbacks of an event; returns whether one of them asks to stop."""
        self.total = reporter.total
        self.progress = Progress(batch=loader.sampler.batch)
        self.scaler = torch.amp.GradScaler(runtime.device().type, enabled=precision == "fp16")
        self.rate = 0.0
        self.logged_steps = 0
        """The number of steps that the last logged loss is the mean of."""
        self._loss_scale = 1.0
        """What losses × tokens are multiplied by; an evaluation keeps that of the last step."""
        self._saved: int | None = None
        self._window = Window()

    # --- running ----------------------------------------------------------------------------------------------------

    def run(self, checkpoints: CheckpointManager) -> None:
        """Train until the last step, or until a callback, early stopping or a signal ends the run."""
        config = self.config
        checkpoints.listen()
        self.reporter.start(self.progress.step)
        if config.eval_on_start and self.evaluation is not None and self.progress.step == 0:
            self.evaluate()
        self.model.train()
        self._window.began = time.monotonic()
        progress = self.progress
        with contextlib.closing(self.loader.steps(progress.step, self.total, progress.position)) as steps:
            facts = None
            for step in steps:
                result, facts = self.train_step(step), step.pick.facts
                if self._after(step, result, checkpoints):
                    break
        if facts is not None:
            self.reporter.say(describe_data("streamed", facts, config))
        if config.save_strategy != "no" and self._saved != self.progress.step:
            self.save(checkpoints)
        checkpoints.join()

    def _after(self, step: Step, result: StepResult, checkpoints: CheckpointManager) -> bool:
        """Record a step; log, evaluate and save when due. Returns whether to stop."""
        config, progress, pick = self.config, self.progress, step.pick
        progress.step, progress.tokens = step.number + 1, progress.tokens + pick.tokens
        progress.epoch, progress.position = pick.epoch, pick.position
        progress.skipped += not result.updated
        if math.isfinite(result.loss):
            progress.loss_sum, progress.loss_steps = progress.loss_sum + result.loss, progress.loss_steps + 1
        self._window.add(result.loss, result.accuracy, result.entropy, pick.tokens)
        done, epoch_ends = progress.step, pick.ends_epoch
        last = done == self.total
        self._show(result)
        if pick.facts is not None and epoch_ends and pick.epoch == 1:
            self.reporter.say(describe_data("streamed", pick.facts, config))
        first = config.logging_first_step and done == 1
        if self._due(config.logging_strategy, config.logging_steps, epoch_ends) or first or last:
            self._log(result.grad_norm)
        stop = self.notify("on_step_end", step=done)
        if self.evaluation is not None and self._due(config.eval_strategy, config.evaluates_every, epoch_ends, last):
            stop |= self._compare(self.evaluate())
        best = config.load_best_model_at_end and progress.best_step == done
        if best or self._due(config.save_strategy, config.save_steps, epoch_ends):
            self.save(checkpoints)
        if checkpoints.reached_preemption(done):
            self.reporter.close()
            checkpoints.exit_if_preempted(done, self.state())
        return stop

    def _show(self, result: StepResult) -> None:
        """Update the live display."""
        values = {"loss": result.loss, "learning_rate": self.rate, "grad_norm": result.grad_norm}
        values |= {"tokens_per_second": self._window.tokens_per_second, "memory_gib": memory_gib()}
        self.reporter.tick(self.progress.step, values)

    def _due(self, strategy: str, every: float, epoch_ends: bool, last: bool = False) -> bool:
        if strategy == "no":
            return False
        if strategy == "epoch":
            return epoch_ends or last
        return self.progress.step % every == 0

    # --- one step ---------------------------------------------------------------------------------------------------

    def train_step(self, step: Step) -> StepResult:
        """Forward and backward over this rank's part of the global batch, then one update."""
        watch.begin_step(step.number + 1)
        rate = self.schedule.set(step.number - self.progress.skipped)  # a skipped step is no update
        self._seed(step.number)
        targets = max(1, step.pick.targets)
        self.scaler.scale(torch.zeros(1, device=runtime.device()))  # so that it has a scale before the first step too
        scale = self.scaler.get_scale()
        self._loss_scale = scale * runtime.world_size() / targets
        sums = torch.zeros(3, dtype=torch.float64, device=runtime.device())
        losses = []
        for index, batch in enumerate(step.batches):
            accumulates = index + 1 < len(step.batches) and not self.config.sync_each_batch
            with self.model.no_sync() if accumulates else contextlib.nullcontext(), self._rows(batch):
                loss, found = self.forward(batch)
                loss.backward()
            sums += found
            losses.append(found[0])
        if runtime.world_size() > 1:
            collectives.finish("sum of the metrics", lambda: dist.all_reduce(sums, async_op=True))
        loss_sum, correct, entropy = sums.tolist()
        watch.check()  # the host has just waited for the device: what it read is valid only if no rank is lost
        self.scaler.unscale_(self.optimizer)
        norm = float(self.model.clip_grad_norm_(self.config.max_grad_norm or math.inf))
        watch.check()
        usable = math.isfinite(loss_sum) and (math.isfinite(norm) or self.scaler.is_enabled())
        if not usable:
            self._handle_nonfinite(step, loss_sum, norm, losses)
        else:
            self.scaler.step(self.optimizer)
        self.scaler.update()
        # Where gradients overflow in fp16 the scaler skips the step and lowers its scale.
        updated = usable and self.scaler.get_scale() >= scale
        self.optimizer.zero_grad(set_to_none=True)
        self.rate = rate
        return StepResult(loss_sum / targets, correct / targets, entropy / targets, norm, updated)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """The model's own loss of a micro-batch × its trained tokens, scaled for its part in the step; and the sums of
        loss, correct predictions and entropy over these tokens, detached."""
        device = runtime.device()
        targets = int((batch["labels"][:, 1:] != IGNORED).sum())  # still on the host
        pinned = self.config.dataloader_pin_memory and accelerator.is_accelerator(device)
        moved = {
            name: (tensor.pin_memory() if pinned else tensor).to(device, non_blocking=pinned)
            for name, tensor in batch.items()
        }
        with self.head.loss_pass(self._loss_scale, targets) as measured:
            loss = self.model(**moved, use_cache=False).loss
        return loss, measured.sums

    def _rows(self, batch: Batch) -> contextlib.AbstractContextManager[None]:
        """Inside, packed documents are isolated in passes over this batch, recomputed ones included."""
        return self.packed.rows(batch) if self.packed is not None else contextlib.nullcontext()

    def _seed(self, step: int) -> None:
        """Seed the random numbers (dropout) of a step from seed, step and rank: a resumed run draws the same."""
        key = f"{self.config.seed}/{step}/{runtime.rank()}".encode()
        torch.manual_seed(int.from_bytes(hashlib.blake2b(key, digest_size=7).digest(), "little"))

    def _handle_nonfinite(self, step: Step, loss: float, norm: float, losses: list[torch.Tensor]) -> None:
        """Name the rows of a non-finite loss, on every rank; stop the run unless `on_nonfinite_loss` is skip."""
        mine = [
            r for rows, value in zip(step.mine, losses, strict=True) if not math.isfinite(float(value)) for r in rows
        ]
        rows = sorted(row for rank in exchange(mine, "rows without a finite loss") for row in rank)
        shown = ", ".join(map(str, rows[:ROWS_NAMED])) + (", …" if len(rows) > ROWS_NAMED else "")
        what = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient's norm is {norm}"
        where = f"; it came from rows {shown} of the training data" if rows else ""
        if self.config.on_nonfinite_loss == "stop":
            self.reporter.close()
            raise TrainingError(
                f"step {step.number + 1}: {what}{where}. The weights were not changed. Look at those rows, lower "
                f"learning_rate, or skip such steps with on_nonfinite_loss skip."
            )
        if runtime.is_main():
            runtime.get_logger().warning("step %d skipped: %s%s", step.number + 1, what, where)

    # --- logging, evaluation ----------------------------------------------------------------------------------------

    def _log(self, grad_norm: float) -> None:
        means, skipped, self.logged_steps = self._window.means(), self.progress.skipped, self._window.steps
        values = {
            "loss": means["loss"],
            "learning_rate": self.rate,
            "grad_norm": grad_norm,
            "mean_token_accuracy": means["mean_token_accuracy"],
            "entropy": means["entropy"],
            "num_tokens": self.progress.tokens,
            "epoch": round(self.progress.epoch, 4),
            "tokens_per_second": self._window.tokens_per_second,
            "memory_gib": memory_gib(),
            **({"skipped_steps": skipped} if skipped or self.scaler.is_enabled() else {}),
        }
        self.reporter.log(self.progress.step, values)
        self.notify("on_log", step=self.progress.step, logs=values)
        self._window = Window()

    @torch.no_grad()
    def evaluate(self, table: TokenTable | None = None, prefix: str = "eval") -> dict[str, float]:
        """Mean loss, accuracy and entropy over all trained tokens of the evaluation data. All ranks must call it."""
        table = table if table is not None else self.evaluation
        assert table is not None
        began, collator = time.monotonic(), self.loader.collator
        self.model.eval()
        sums = torch.zeros(3, dtype=torch.float64, device=runtime.device())
        for step in one_pass(
            table, collator, self.config.per_device_eval_batch_size, self.loader.rank, self.loader.world
        ):
            for batch in step.batches:
                with self._rows(batch):
                    sums += self.forward(batch)[1]
        self.model.train()
        if runtime.world_size() > 1:
            collectives.finish("sum of the evaluation", lambda: dist.all_reduce(sums, async_op=True))
        targets, took = int(table.row_targets.sum()), time.monotonic() - began
        loss, correct, entropy = (value / targets for value in sums.tolist())
        watch.check()
        values = {
            f"{prefix}_loss": loss, f"{prefix}_mean_token_accuracy": correct, f"{prefix}_entropy": entropy,
            f"{prefix}_runtime": took, f"{prefix}_samples_per_second": len(table) / max(took, 1e-9),
            "epoch": round(self.progress.epoch, 4),
        }  # fmt: skip
        self.reporter.log(self.progress.step, values)
        self.notify("on_evaluate", step=self.progress.step, metrics=values)
        self._window.pause(time.monotonic() - began)
        return values

    def _compare(self, values: dict[str, float]) -> bool:
        """Record the best evaluation. Returns whether to stop early."""
        config, progress = self.config, self.progress
        if config.best_metric not in values:
            names = ", ".join(values)
            raise TrainingError(f"metric_for_best_model: there is no {config.best_metric}; evaluation has {names}.")
        value, best = values[config.best_metric], progress.best_value
        sign = 1 if config.higher_is_better else -1
        if best is None or sign * (value - best) > config.early_stopping_threshold:
            progress.without_improvement = 0
        else:
            progress.without_improvement += 1
        if best is None or sign * (value - best) > 0:
            progress.best_value, progress.best_step = value, progress.step
        patience = config.early_stopping_patience
        stop = patience is not None and progress.without_improvement >= patience
        if stop:
            self.reporter.say(f"no improvement of {config.best_metric} in {patience} evaluations: stopping early")
        return stop

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The objects and values that a checkpoint holds. All ranks must call it."""
        scaler = {"scaler": self.scaler} if self.scaler.is_enabled() else {}
        elapsed = exchange(self._window.elapsed, "time spent")[0]
        progress = {**asdict(self.progress), "window": self._window.state(elapsed)}
        return {"model": self.model, "optimizer": self.optimizer, "progress": progress, **scaler}

    def save(self, checkpoints: CheckpointManager) -> None:
        """Save a checkpoint of this step."""
        save = checkpoints.save_async if self.config.async_save else checkpoints.save
        save(self.progress.step, self.state(), force=True)
        self._saved = self.progress.step
        self.notify("on_save", step=self.progress.step, checkpoints=checkpoints)

    def restore(self, checkpoints: CheckpointManager) -> None:
        """Resume from the newest checkpoint that is whole."""
        state = self.state()
        checkpoints.restore(None, state, fallback=True)
        self.adopt(state)

    def adopt(self, state: dict[str, Any]) -> None:
        """Continue from the progress in a restored state."""
        found = dict(state["progress"])
        self._window = Window(**found.pop("window", {}))
        batch, self.progress = self.progress.batch, Progress(**found)
        # A stream continues with its next row whatever the batch size.
        if self.progress.batch != batch and self.progress.position is None and runtime.is_main():
            runtime.get_logger().warning(
                "the checkpoint was saved with a global batch of %d rows, this run has %d: from here on rows come in "
                "another order than the run began with",
                self.progress.batch,
                batch,
            )
        self.progress.batch = batch
        self._saved = self.progress.step
