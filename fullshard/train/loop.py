"""The training loop: steps, evaluations, checkpoints, and when to stop.

The loss of a step is the mean of the model's own loss over all learnt tokens of its global batch: every rank knows
their number beforehand, and since the engine averages gradients over the ranks, each micro-batch's loss × tokens is
scaled by ranks / tokens of the step. What a model adds (a router's auxiliary loss) counts once, weighted alike.
Decisions are taken from values that all ranks share, so all take the same ones.
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
    """Where a run stands; saved with every checkpoint."""

    step: int = 0
    """Steps done, skipped ones included: their rows are used up. The learning rate goes by `step - skipped`."""
    batch: int = 0
    """Rows in a global batch."""
    tokens: int = 0
    skipped: int = 0
    """Steps that changed no weights: gradients that overflowed in fp16, and losses or gradients that were not finite
    with `on_nonfinite_loss skip`."""
    loss_sum: float = 0.0
    """The finite losses of all steps, added up."""
    loss_steps: int = 0
    """How many those are."""
    best_step: int | None = None
    best_value: float | None = None
    without_improvement: int = 0
    epoch: float = 0.0
    """Epochs gone through. In the first pass over a stream parts of one are not known."""
    position: dict[str, Any] | None = None
    """Where a stream of data stands; None for a table, whose rows follow from the step."""

    @property
    def mean_loss(self) -> float:
        """The mean of the steps' losses since the run began, each step counted once: Trainer's `train_loss`."""
        return self.loss_sum / self.loss_steps if self.loss_steps else math.nan


@dataclass(frozen=True)
class Outcome:
    """What one step came to, alike on every rank."""

    loss: float
    accuracy: float
    entropy: float
    grad_norm: float
    updated: bool


class Loop:
    """Trains a sharded model. Every rank runs the same loop."""

    def __init__(
        self, config: SFTConfig, model: Any, head: LeanHead, optimizer: torch.optim.Optimizer, schedule: Schedule,
        loader: Loader, reporter: Reporter, total: int, manager: CheckpointManager | None = None,
        evaluation: TokenTable | None = None, precision: str = "no", packed: Packed | None = None,
        notify: Callable[..., bool] = lambda event, **facts: False,
    ) -> None:  # fmt: skip
        self.config, self.model, self.head, self.optimizer, self.schedule = config, model, head, optimizer, schedule
        self.loader, self.reporter, self.total, self.manager = loader, reporter, total, manager
        self.evaluation, self.notify, self.packed = evaluation, notify, packed
        self.progress = Progress(batch=loader.sampler.batch)
        head.enabled = False  # outside the loop the model is the user's
        self.scaler = torch.amp.GradScaler(runtime.device().type, enabled=precision == "fp16")
        self.rate = 0.0
        self._saved: int | None = None
        self.logged_steps = 0
        """How many steps the last logged loss is the mean of."""
        self._window = Window()

    # --- running ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Train until the last step, or until something says stop."""
        config = self.config
        if self.manager is not None:
            self.manager.listen()
        self.reporter.start(self.progress.step)
        if config.eval_on_start and self.evaluation is not None and self.progress.step == 0:
            self.evaluate()
        self.model.train()
        self._window.began = time.monotonic()
        progress = self.progress
        with contextlib.closing(self.loader.steps(progress.step, self.total, progress.position)) as steps:
            facts = None
            for step in steps:
                outcome, facts = self.train_step(step), step.pick.facts
                if self._after(step, outcome):
                    break
        if facts is not None:
            self.reporter.say(describe_data("streamed", facts, config))
        if config.save_strategy != "no" and self._saved != self.progress.step:
            self.save()
        if self.manager is not None:
            self.manager.join()

    def _after(self, step: Step, outcome: Outcome) -> bool:
        """Note a step; log, evaluate and save where it is time. Whether to stop."""
        config, progress, pick = self.config, self.progress, step.pick
        progress.step, progress.tokens = step.number + 1, progress.tokens + pick.tokens
        progress.epoch, progress.position = pick.epoch, pick.position
        progress.skipped += not outcome.updated
        if math.isfinite(outcome.loss):
            progress.loss_sum, progress.loss_steps = progress.loss_sum + outcome.loss, progress.loss_steps + 1
        self._window.add(outcome.loss, outcome.accuracy, outcome.entropy, pick.tokens)
        done, epoch_ends = progress.step, pick.ends_epoch
        last = done == self.total
        self._show(outcome)
        if pick.facts is not None and epoch_ends and pick.epoch == 1:
            self.reporter.say(describe_data("streamed", pick.facts, config))
        first = config.logging_first_step and done == 1
        if self._due(config.logging_strategy, config.logging_steps, epoch_ends) or first or last:
            self._log(outcome.grad_norm)
        stop = self.notify("on_step_end", step=done)
        if self.evaluation is not None and self._due(config.eval_strategy, config.evaluates_every, epoch_ends, last):
            stop |= self._judge(self.evaluate())
        best = config.load_best_model_at_end and progress.best_step == done
        if best or self._due(config.save_strategy, config.save_steps, epoch_ends):
            self.save()
        if self.manager is not None and self.manager.reached_preemption(done):
            self.reporter.close()
            self.manager.exit_if_preempted(done, self.state())
        return stop

    def _show(self, outcome: Outcome) -> None:
        """Move the live display on."""
        values = {"loss": outcome.loss, "learning_rate": self.rate, "grad_norm": outcome.grad_norm}
        values |= {"tokens_per_second": self._window.tokens_per_second, "memory_gib": memory_gib()}
        self.reporter.tick(self.progress.step, values)

    def _due(self, strategy: str, every: int, epoch_ends: bool, last: bool = False) -> bool:
        if strategy == "no":
            return False
        if strategy == "epoch":
            return epoch_ends or last
        return self.progress.step % every == 0

    # --- one step ---------------------------------------------------------------------------------------------------

    def train_step(self, step: Step) -> Outcome:
        """Forward and backward over this rank's part of the global batch, then one update."""
        watch.begin_step(step.number + 1)
        rate = self.schedule.set(step.number - self.progress.skipped)  # a step that is left out is no update
        self._seed(step.number)
        targets = max(1, step.pick.targets)
        self.scaler.scale(torch.zeros(1, device=runtime.device()))  # so that it has a scale before the first step too
        scale = self.scaler.get_scale()
        self.head.scale = scale * runtime.world_size() / targets
        sums = torch.zeros(3, dtype=torch.float64, device=runtime.device())
        losses = []
        for index, batch in enumerate(step.batches):
            holds_back = index + 1 < len(step.batches) and not self.config.sync_each_batch
            with self.model.no_sync() if holds_back else contextlib.nullcontext(), self._rows(batch):
                self.forward(batch).backward()
            assert self.head.statistics is not None
            sums += self.head.statistics.sums
            losses.append(self.head.statistics.loss)
        if runtime.world_size() > 1:
            collectives.finish("sum of the metrics", lambda: dist.all_reduce(sums, async_op=True))
        loss_sum, correct, entropy = sums.tolist()
        watch.check()  # the host has just waited for the device: what it read is right only if no rank is gone
        self.scaler.unscale_(self.optimizer)
        norm = float(self.model.clip_grad_norm_(self.config.max_grad_norm or math.inf))
        watch.check()
        usable = math.isfinite(loss_sum) and (math.isfinite(norm) or self.scaler.is_enabled())
        if not usable:
            self._nonfinite(step, loss_sum, norm, losses)
        else:
            self.scaler.step(self.optimizer)
        self.scaler.update()
        # Where gradients overflow in fp16 the scaler leaves the step out, and lowers its scale.
        updated = usable and self.scaler.get_scale() >= scale
        self.optimizer.zero_grad(set_to_none=True)
        self.rate = rate
        return Outcome(loss_sum / targets, correct / targets, entropy / targets, norm, updated)

    def forward(self, batch: Batch) -> torch.Tensor:
        """The model's own loss of a micro-batch × its learnt tokens, scaled for its part in the step."""
        device = runtime.device()
        self.head.targets = int((batch["labels"][:, 1:] != IGNORED).sum())  # still on the host
        pinned = self.config.dataloader_pin_memory and accelerator.is_accelerator(device)
        moved = {
            name: (tensor.pin_memory() if pinned else tensor).to(device, non_blocking=pinned)
            for name, tensor in batch.items()
        }
        self.head.enabled = True
        try:
            return self.model(**moved, use_cache=False).loss
        finally:
            self.head.enabled = False

    def _rows(self, batch: Batch) -> contextlib.AbstractContextManager[None]:
        """While inside, packed documents are kept apart in passes over this batch, recomputed ones included."""
        return self.packed.rows(batch) if self.packed is not None else contextlib.nullcontext()

    def _seed(self, step: int) -> None:
        """Random numbers (dropout) of a step are a function of seed, step and rank: a resumed run draws the same."""
        words = f"{self.config.seed}/{step}/{runtime.rank()}".encode()
        torch.manual_seed(int.from_bytes(hashlib.blake2b(words, digest_size=7).digest(), "little"))

    def _nonfinite(self, step: Step, loss: float, norm: float, losses: list[torch.Tensor]) -> None:
        """Name the rows that gave a loss that is no number, on every rank; stop unless the user chose to skip."""
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
                f"step {step.number + 1}: {what}{where}. The weights were not touched. Look at those rows, lower "
                f"learning_rate, or leave such steps out with on_nonfinite_loss skip."
            )
        if runtime.is_main():
            runtime.get_logger().warning("step %d left out: %s%s", step.number + 1, what, where)

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
        """Mean loss, accuracy and entropy over all learnt tokens of the evaluation data. All ranks must call it."""
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
                    self.forward(batch)
                assert self.head.statistics is not None
                sums += self.head.statistics.sums
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

    def _judge(self, values: dict[str, float]) -> bool:
        """Remember the best evaluation; whether to stop early."""
        config, progress = self.config, self.progress
        if config.best_metric not in values:
            names = ", ".join(values)
            raise TrainingError(f"metric_for_best_model: there is no {config.best_metric}; evaluation gives {names}.")
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
        """What a checkpoint holds. All ranks must call it."""
        scaler = {"scaler": self.scaler} if self.scaler.is_enabled() else {}
        elapsed = exchange(self._window.elapsed, "time spent")[0]
        progress = {**asdict(self.progress), "window": self._window.state(elapsed)}
        return {"model": self.model, "optimizer": self.optimizer, "progress": progress, **scaler}

    def save(self) -> None:
        assert self.manager is not None
        save = self.manager.save_async if self.config.async_save else self.manager.save
        save(self.progress.step, self.state(), force=True)
        self._saved = self.progress.step
        self.notify("on_save", step=self.progress.step)

    def restore(self, manager: CheckpointManager, step: int | None) -> int:
        """Go on from a checkpoint; the newest if no step is given."""
        state = self.state()
        found = manager.restore(step, state, fallback=step is None)
        self.adopt(state)
        return found

    def adopt(self, state: dict[str, Any]) -> None:
        """Take over where a restored state stands."""
        found = dict(state["progress"])
        self._window = Window(**found.pop("window", {}))
        batch, self.progress = self.progress.batch, Progress(**found)
        # A stream goes on with its next row whatever the batch.
        if self.progress.batch != batch and self.progress.position is None and runtime.is_main():
            runtime.get_logger().warning(
                "the checkpoint was made with %d rows in a global batch, now there are %d: from here on rows come in "
                "another order than the run began with",
                self.progress.batch,
                batch,
            )
        self.progress.batch = batch
        self._saved = self.progress.step
