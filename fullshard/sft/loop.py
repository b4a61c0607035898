"""The training loop: steps, evaluations, checkpoints, and when to stop.

The loss of a step is the mean of the model's own loss over all trained tokens of its global batch. Every rank has the
number of these tokens before the step. The engine averages gradients over the ranks, so each micro-batch's loss ×
tokens is scaled by ranks / tokens of the step. What a model adds (a router's auxiliary loss) is weighted the same way.
Decisions depend only on values that are equal on all ranks, so all ranks decide alike.

The host issues a step while the device computes the one before, and reads the values of each step one step later
(`launched_step.py`), or earlier where they are needed: to log, evaluate or save.

The order of a run and its events are transformers'. What a subclass of the trainer may override is called on the
trainer (`training_step.py`, `evaluation.py`), whose own methods do what this engine does.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import time
from collections import deque
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from fullshard.checkpoint.manager import CheckpointManager
from fullshard.config.errors import TrainingError
from fullshard.data.loader import Batch, Step
from fullshard.device import accelerator
from fullshard.distributed import engines, runtime
from fullshard.distributed.ranks import exchange
from fullshard.distributed.watchdog import collectives, watch
from fullshard.models.attention_masks import known_rows
from fullshard.models.chunked_loss import ChunkedLossHead
from fullshard.models.packed_inputs import Packed
from fullshard.models.router_loss import has_router_loss
from fullshard.planner.activation_budget import ActivationBudget
from fullshard.report.reporter import Reporter, Window, memory_gib
from fullshard.sft.batches import Steps, describe_data
from fullshard.sft.launched_step import LaunchedStep
from fullshard.sft.optimizer import Schedule
from fullshard.sft.run_progress import Progress, StepResult, check_progress
from fullshard.sft.sft_config import SFTConfig


class Loop:
    """Trains a sharded model. Every rank runs the same loop."""

    def __init__(
        self, config: SFTConfig, model: Any, head: ChunkedLossHead, optimizer: torch.optim.Optimizer,
        schedule: Schedule, loader: Steps | None, reporter: Reporter, precision: str, packed: Packed | None,
        trainer: Any, activations: ActivationBudget,
    ) -> None:  # fmt: skip
        self.config, self.model, self.head, self.optimizer, self.schedule = config, model, head, optimizer, schedule
        self.loader, self.reporter, self.packed, self.activations = loader, reporter, packed, activations
        self.trainer = trainer
        """The trainer, whose methods may be overridden."""
        self.notify = trainer.callback_handler
        self.total = reporter.total
        self.progress = Progress(batch=loader.batch if loader is not None else 0)
        self.scaler = torch.amp.GradScaler(runtime.device().type, enabled=precision == "fp16")
        self._unread: deque[LaunchedStep] = deque()  # issued and counted, but their values have not been read
        self._last: StepResult | None = None
        self.rate = 0.0
        self.streamed: dict[str, Any] | None = None  # the counts of a stream so far
        self.logged_steps = 0
        """The number of steps that the last logged loss is the mean of."""
        self.scale = 1.0
        """The scale of the loss in fp16."""
        self.measured = torch.zeros(4, dtype=torch.float64, device=runtime.device())
        """Correct predictions, entropy, router's loss × tokens, and tokens, summed over passes."""
        self.stands_in = False
        """Whether the micro-batch is a repeated row, because this rank has none; it must not contribute."""
        self._counts_tokens = config.include_num_input_tokens_seen != "no"
        self.checkpoints: CheckpointManager | None = None
        self.last_measured: dict[str, float] = {}
        """What TRL logs besides the loss, as logged last."""
        self._saved: int | None = None
        self._logged = 0
        self.window = Window()
        self.has_router_loss = has_router_loss(model)

    # --- running ----------------------------------------------------------------------------------------------------

    def run(self, checkpoints: CheckpointManager) -> None:
        """Train until the last step, or until a callback, early stopping or a signal ends the run."""
        self.checkpoints, progress = checkpoints, self.progress
        checkpoints.listen()
        self.reporter.start(progress.step)
        self.reporter.history[:] = exchange(self.reporter.history, "metrics so far")[0]
        self._logged = progress.step
        self.notify("on_train_begin")
        if self.config.eval_on_start and self.trainer.eval_dataset is not None and progress.step == 0:
            self.trainer._evaluate(None, self.trainer.ignored_keys)
        self.model.train()
        self.window.began = time.monotonic()
        self._run_epochs(checkpoints)
        self.read_values()
        if self.config.save_strategy not in ("no", "best") and self._saved != progress.step:
            self.save()
        checkpoints.join()

    def _run_epochs(self, checkpoints: CheckpointManager) -> None:
        assert self.loader is not None
        loader, progress, begins = self.loader, self.progress, True
        steps = loader.steps(progress.step + progress.passed_over, self._end, progress.position)
        try:
            while (step := next(steps, None)) is not None:
                if begins:
                    self.notify("on_epoch_begin")
                step = self.trainer.counted(step)
                taken, self.streamed = self.activations.run(self.train_step, step), step.pick.facts
                if taken:
                    self._end_step(step)
                    self._log_evaluate_save(taken)
                control = self.notify.control
                begins = step.pick.ends_epoch or control.should_epoch_stop or control.should_training_stop
                if begins:
                    self.read_values()
                    self.notify("on_epoch_end")
                    self._log_evaluate_save(taken)
                if checkpoints.reached_preemption(progress.step):
                    self.reporter.close()
                    checkpoints.exit_if_preempted(progress.step, self.state())
                if self.notify.control.should_training_stop:
                    break
                if begins and not step.pick.ends_epoch:
                    steps.close()
                    progress.position, left = loader.next_epoch(step.pick)
                    progress.passed_over += left + (not taken)
                    steps = loader.steps(progress.step + progress.passed_over, self._end, progress.position)
        finally:
            steps.close()
        if self.streamed is not None:
            self.reporter.say(describe_data("streamed", self.streamed, self.config))

    @property
    def _end(self) -> int:
        """The last step of the data, exclusive: an epoch that a callback ends early makes the run shorter."""
        assert self.loader is not None
        end, length = self.total + self.progress.passed_over, self.loader.steps_per_epoch
        return end if length is None else min(end, math.ceil(self.total / length) * length)

    def _count(self, launched: LaunchedStep, updated: bool) -> None:
        """Count a step whose update was issued, or skipped."""
        progress, pick = self.progress, launched.step.pick
        progress.step, progress.tokens = progress.step + 1, progress.tokens + pick.tokens
        progress.epoch, progress.position = pick.epoch, pick.position
        progress.skipped += not updated
        self._unread.append(launched)
        self.read_values(but=math.inf if engines.current().compiles_steps else 1)

    def read_values(self, but: float = 0) -> None:
        """Read and add up the values of the steps issued so far, but the last ones. Stops the run at a step that has
        changed nothing because its loss or gradient is not finite."""
        while len(self._unread) > but:
            launched = self._unread[0]
            result = launched.result()
            if self.guard is not None and not math.isfinite(result.loss + result.grad_norm):
                self._handle_nonfinite(launched)
            self._unread.popleft()
            self.trainer.current_flos += result.flos
            self.progress.add_loss(result.loss)
            tokens = launched.step.pick.tokens
            self.window.add(result.loss, result.accuracy, result.entropy, tokens, result.router_loss)
            self._last = result

    def _end_step(self, step: Step) -> None:
        """Show a step, and call the callbacks of its end."""
        progress, pick, state = self.progress, step.pick, self.notify.state
        state.global_step, state.epoch = progress.step, progress.epoch
        state.num_input_tokens_seen = progress.tokens if self._counts_tokens else 0
        every = self.config.torch_empty_cache_steps
        if every is not None and progress.step % every == 0:
            accelerator.empty_cache(runtime.device())
        if self.reporter.is_live and self._last is not None:
            values = {"loss": self._last.loss, "learning_rate": self.rate, "grad_norm": self._last.grad_norm}
            values |= {"tokens_per_second": self.window.tokens_per_second, "memory_gib": memory_gib()}
            self.reporter.tick(progress.step, values)
        if pick.facts is not None and pick.ends_epoch and pick.epoch == 1:
            self.reporter.say(describe_data("streamed", pick.facts, self.config))
        self.notify("on_step_end")

    def _log_evaluate_save(self, taken: bool) -> None:
        """Do what the settings or a callback ask for; `taken` is whether the last step was."""
        trainer, control = self.trainer, self.notify.control
        if control.should_log or control.should_evaluate or control.should_save:
            self.read_values()
        if control.should_log and taken and self.progress.step > self._logged:
            self._log()
        if self.notify.control.should_evaluate:
            best = trainer._determine_best_metric(trainer._evaluate(None, trainer.ignored_keys), None)
            if best and (self.config.load_best_model_at_end or self.config.save_strategy == "best"):
                self.notify.control.should_save = True
        if self.notify.control.should_save:
            self.save()

    # --- one step ---------------------------------------------------------------------------------------------------

    def train_step(self, step: Step) -> bool:
        """Forward and backward over this rank's part of the global batch, then one update. Returns whether the step was
        taken: not if a callback ends the epoch or the run between micro-batches."""
        trainer, number = self.trainer, self.progress.step
        watch.begin_step(number + 1)
        self.rate = self.schedule.set(number - self.progress.skipped)  # a skipped step is no update
        self._seed(number)
        batches, items = step.batches, trainer.items(step)
        self.take_measured()
        if self.scaler.is_enabled():
            self.scaler.scale(torch.zeros(1, device=runtime.device()))  # it has a scale before the first step too
            self.scale = self.scaler.get_scale()
        self.notify("on_step_begin")
        losses, flos = [], 0.0
        for index, batch in enumerate(batches):
            loss = self._micro_batch(batch, items, not step.mine[index], index + 1 < len(batches))
            losses.append(loss)
            runtime.sync()  # on XLA each micro-batch is a program, the update another
            flos += 0.0 if self.stands_in else float(trainer.floating_point_ops(batch))
            if index + 1 < len(batches):
                control = self.notify("on_substep_end")
                if control.should_epoch_stop or control.should_training_stop:
                    self.optimizer.zero_grad(set_to_none=True)
                    return False
        sums = self._sums(losses, flos)
        self.scaler.unscale_(self.optimizer)
        norm = trainer._clip_grad_norm(self.model)
        launched = LaunchedStep(step, self.progress.place(), losses, sums, norm)
        updated = self._update(launched)
        self.optimizer.zero_grad(set_to_none=True)
        runtime.sync()
        if updated:
            self.schedule.advance(number + 1 - self.progress.skipped)
        self._count(launched, updated)
        return True

    def _micro_batch(self, batch: Batch, items: Any, stands_in: bool, more: bool) -> torch.Tensor:
        """Forward and backward over one micro-batch; its loss, detached."""
        self.stands_in = stands_in
        accumulates = more and not self.config.sync_each_batch
        with self.model.no_sync() if accumulates else contextlib.nullcontext(), self.rows(batch):
            loss = self.trainer.training_step(self.model, batch, num_items_in_batch=items)
        loss = torch.as_tensor(loss, device=runtime.device()).detach().double()
        return torch.zeros_like(loss) if stands_in else loss

    def _sums(self, losses: list[torch.Tensor], flos: float) -> torch.Tensor:
        """Over all ranks: the loss of the step, what was measured, and floating-point operations."""
        flops = torch.full((1,), flos, dtype=torch.float64, device=runtime.device())
        sums = torch.cat([torch.stack(losses).sum(0, keepdim=True), self.take_measured(), flops])
        if runtime.world_size() > 1:
            collectives.finish("sum of the metrics", lambda: dist.all_reduce(sums, async_op=True))
        return sums

    def take_measured(self) -> torch.Tensor:
        """What was measured on this rank since the last call."""
        found, self.measured = self.measured, torch.zeros_like(self.measured)
        return found

    @functools.cached_property
    def guard(self) -> engines.UpdateGuard | None:
        """What skips updates on the device. None where the host reads the values first: to skip steps that then do not
        count as updates, or because the optimizer cannot."""
        waits = self.config.on_nonfinite_loss == "skip" or self.scaler.is_enabled()
        return None if waits else engines.current().devices.update_guard(self.optimizer)

    def _update(self, launched: LaunchedStep) -> bool:
        """Take the optimizer's step. Returns whether weights were changed, as far as the host decides it."""
        if self.guard is not None:
            self.notify("on_pre_optimizer_step")
            self.guard.step(launched.values)
            self.notify("on_optimizer_step")
            return True
        result = launched.result()
        usable = math.isfinite(result.loss) and (math.isfinite(result.grad_norm) or self.scaler.is_enabled())
        if not usable:
            self._handle_nonfinite(launched)
        else:
            self.notify("on_pre_optimizer_step")
            self.scaler.step(self.optimizer)
            self.notify("on_optimizer_step")
        self.scaler.update()
        # Where gradients overflow in fp16 the scaler skips the step and lowers its scale.
        return usable and self.scaler.get_scale() >= self.scale

    def rows(self, batch: Batch) -> contextlib.AbstractContextManager[None]:
        """Inside, packed documents are isolated in passes over this batch, recomputed ones included."""
        return self.packed.rows(batch) if self.packed is not None else known_rows(batch.get("position_ids"))

    def _seed(self, step: int) -> None:
        """Seed the random numbers (dropout) of a step from seed, step and rank: a resumed run draws the same."""
        key = f"{self.config.seed}/{step}/{runtime.rank()}".encode()
        runtime.seed_device(int.from_bytes(hashlib.blake2b(key, digest_size=7).digest(), "little"))

    def _handle_nonfinite(self, launched: LaunchedStep) -> None:
        """Stop the run at a step whose loss or gradient is not finite, unless `on_nonfinite_loss` is skip."""
        number, what = launched.place["step"] + 1, launched.why_unusable()
        if self.config.on_nonfinite_loss == "stop":
            # Back to its place: the steps issued since have changed nothing either.
            self._unread.clear()
            self.progress.go_back(launched.place)
            self.notify.state.global_step, self.notify.state.epoch = self.progress.step, self.progress.epoch
            if self.guard is not None:
                self.guard.reset()
            self.reporter.close()
            raise TrainingError(
                f"step {number}: {what}. The weights were not changed. Look at those rows, lower learning_rate, or "
                f"skip such steps with on_nonfinite_loss skip."
            )
        if runtime.is_main():
            runtime.get_logger().warning("step %d skipped: %s", number, what)

    def _log(self) -> None:
        assert self._last is not None
        means, skipped, self.logged_steps = self.window.means(), self.progress.skipped, self.window.steps
        names = {"mean_token_accuracy": True, "entropy": self.head.entropy, "aux_loss": self.has_router_loss}
        measured = {name: means[name] for name, shown in names.items() if shown and not math.isnan(means[name])}
        values = {
            "loss": means["loss"],
            "learning_rate": self.rate,
            "grad_norm": self._last.grad_norm,
            **measured,
            "num_tokens": self.progress.tokens,
            **({"num_input_tokens_seen": self.progress.tokens} if self._counts_tokens else {}),
            "tokens_per_second": self.window.tokens_per_second,
            "memory_gib": memory_gib(),
            **({"skipped_steps": skipped} if skipped or self.scaler.is_enabled() else {}),
        }
        self.window, self._logged = Window(), self.progress.step
        self.last_measured = {**measured, "num_tokens": self.progress.tokens}
        self.trainer.store_flos()
        self.trainer.log(values, self.trainer.began)

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The objects and values that a checkpoint holds. All ranks must call it."""
        self.read_values()
        scaler = {"scaler": self.scaler} if self.scaler.is_enabled() else {}
        self.trainer.store_flos()
        self.progress.total_flos = self.notify.state.total_flos
        self.progress.callbacks = exchange(self.notify.exported(), "state of the callbacks")[0]
        self.notify.state.stateful_callbacks = self.progress.callbacks
        self.progress.activations = self.activations.record()
        elapsed = exchange(self.window.elapsed, "time spent")[0]
        progress = {**asdict(self.progress), "window": self.window.state(elapsed)}
        optimizer = {} if self.config.save_only_model else {"optimizer": self.optimizer}
        return {"model": self.model, **optimizer, "progress": progress, **scaler, **self.schedule.saved()}

    def save(self) -> None:
        """Save a checkpoint of this step, by way of the trainer, and call the callbacks."""
        self.trainer._save_checkpoint(self.model, None)
        self._saved = self.progress.step
        self.notify("on_save", checkpoints=self.checkpoints)

    def save_checkpoint(self) -> None:
        """Save a checkpoint of this step."""
        assert self.checkpoints is not None
        save = self.checkpoints.save_async if self.config.async_save else self.checkpoints.save
        save(self.progress.step, self.state(), force=True)

    def restore(self, checkpoints: CheckpointManager) -> None:
        """Resume from the newest checkpoint that is whole."""
        state = self.state()
        checkpoints.restore(None, state, fallback=True, check_values=check_progress)
        self.adopt(state)

    def begin_again(self) -> None:
        """Start at the first step, with the model and the optimizer as they are."""
        self.progress, self.window, self._saved = Progress(batch=self.progress.batch), Window(), None
        self.reporter.history = []

    def adopt(self, state: dict[str, Any]) -> None:
        """Continue from the progress in a restored state."""
        found = dict(state["progress"])
        self.window = Window(**found.pop("window", {}))
        batch, self.progress = self.progress.batch, Progress(**found)
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
        self._saved = self.progress.step
        self._set_state()

    def _set_state(self) -> None:
        """Show the progress under transformers' names."""
        progress, state = self.progress, self.notify.state
        state.global_step, state.epoch, state.total_flos = progress.step, progress.epoch, progress.total_flos
        state.best_metric, state.best_global_step = progress.best_value, progress.best_step
        self.notify.restore(progress.callbacks)
