"""One optimizer step: forward and backward over a rank's part of the global batch, then an update.

The loss of a step is the mean of the model's own loss over all trained tokens of its global batch. Every rank has the
number of these tokens before the step. The engine averages gradients over the ranks, so each micro-batch's loss ×
tokens is scaled by ranks / tokens of the step. What a model adds (a router's auxiliary loss) is weighted the same way.

The host issues a step while the device computes the one before, and reads the values of each step one step later, or
earlier where they are needed: to log, evaluate or save. It must not wait for a loss to decide whether to update, so the
device decides (`engines.UpdateGuard`): a step without a finite loss and gradient changes nothing, and neither do the
steps after it, until the host has read its values and stopped the run. The same holds for a step whose collectives were
aborted because a rank is lost. Optimizers that cannot skip an update on the device are stepped once the host has read
the values.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fullshard.config.errors import TrainingError
from fullshard.data.loader import Batch, Step
from fullshard.distributed import data_ranks, engines, runtime
from fullshard.distributed.ranks import exchange
from fullshard.distributed.watchdog import watch
from fullshard.models.attention_masks import known_rows
from fullshard.models.packed_inputs import Packed
from fullshard.sft.callbacks import Callbacks
from fullshard.sft.sft_config import SFTConfig
from fullshard.sft.training_state import MicroBatch, TrainingState
from fullshard.spmd.tensor import is_sharded

ROWS_NAMED = 16
"""The most rows that an error names."""


@dataclass(frozen=True)
class StepFunctions:
    """What a step calls that a script may replace; see `overrides.py`."""

    num_items: Callable[[Step], Any]
    """The number of trained tokens of a step, as `training_step` gets it."""
    training_step: Callable[..., Any]
    """Forward and backward over a micro-batch; its loss."""
    floating_point_ops: Callable[[Batch], float]
    clip_grad_norm: Callable[[Any], Any]
    add_flos: Callable[[float], None]
    """Count the operations of a step."""


@dataclass(frozen=True)
class StepResult:
    """The metrics of one step, equal on every rank."""

    loss: float
    accuracy: float
    entropy: float
    router_loss: float
    flos: float
    grad_norm: float


class IssuedStep:
    """An optimizer step that was issued to the device, whose values the host reads later."""

    def __init__(
        self, step: Step, place: dict[str, Any], losses: Sequence[torch.Tensor], sums: torch.Tensor, norm: Any
    ) -> None:
        self.step, self.place, self.losses = step, place, losses
        """The step, the place in the run before it, and this rank's loss of each micro-batch."""
        self.values = torch.cat([sums, _on_device(norm)])
        """Loss, correct predictions, entropy, router's loss × tokens, tokens, floating-point operations (sums over all
        ranks), and the norm of the gradients."""
        self._copy = engines.current().devices.host_copy(self.values)
        self._result: StepResult | None = None

    def result(self) -> StepResult:
        """Its metrics; waits until the device has computed them."""
        if self._result is None:
            loss, correct, entropy, router_loss, tokens, flos, norm = self._copy.read()
            watch.raise_failure()  # the host has waited for the device: what it read is valid only if no rank is lost
            tokens = tokens or math.nan
            self._result = StepResult(
                loss / data_ranks.data_size(), correct / tokens, entropy / tokens, router_loss / tokens, flos, norm
            )
        return self._result

    def describe_nonfinite(self) -> str:
        """Which of its values is not finite, and the rows that it came from. All ranks must call it."""
        result = self.result()
        each = zip(self.step.mine, self.losses, strict=True)
        mine = [row for rows, loss in each if not math.isfinite(float(loss)) for row in rows]
        rows = sorted(
            row for rank in data_ranks.of_each_row(exchange(mine, "rows without a finite loss")) for row in rank
        )
        shown = ", ".join(map(str, rows[:ROWS_NAMED])) + (", …" if len(rows) > ROWS_NAMED else "")
        where = f"; it came from rows {shown} of the training data" if rows else ""
        if math.isfinite(result.loss):
            return f"the gradient's norm is {result.grad_norm}{where}"
        return f"the loss is {result.loss}{where}"


def _on_device(value: Any) -> torch.Tensor:
    """A number as a vector on the device, without waiting for the device."""
    if not isinstance(value, torch.Tensor):
        return torch.full((1,), float(value), dtype=torch.float64, device=runtime.device())
    whole = value.full_tensor() if is_sharded(value) else value
    return whole.detach().to(runtime.device(), torch.float64).reshape(1)


class OptimizerSteps:
    """Takes optimizer steps and reads their values. Every rank takes the same ones."""

    def __init__(
        self, config: SFTConfig, state: TrainingState, micro: MicroBatch, packed: Packed | None,
        functions: StepFunctions, notify: Callbacks, close_report: Callable[[], None],
    ) -> None:  # fmt: skip
        self.config, self.state, self.micro, self.packed = config, state, micro, packed
        self.functions, self.notify = functions, notify
        self._close_report = close_report
        self._pending: deque[IssuedStep] = deque()
        """Steps that were issued and counted, whose values were not read yet."""
        self.last: StepResult | None = None
        """The metrics of the step that was read last."""
        self.rate = 0.0
        """The learning rate of the current step."""

    def take(self, step: Step) -> bool:
        """Forward and backward over this rank's part of the global batch, then one update. Returns whether the step was
        taken: not if a callback ends the epoch or the run between micro-batches."""
        progress, scaler, optimizer = self.state.progress, self.state.scaler, self.state.optimizer
        watch.begin_step(progress.step + 1)
        self.rate = self.state.schedule.set(progress.step - progress.skipped)  # a skipped step is no update
        self._seed(progress.step)
        batches, items = step.batches, self.functions.num_items(step)
        self.micro.take_measured()
        if scaler.is_enabled():
            scaler.scale(torch.zeros(1, device=runtime.device()))  # it has a scale before the first step too
            self.micro.scale = scaler.get_scale()
        self.notify("on_step_begin")
        losses, flos = [], 0.0
        for index, batch in enumerate(batches):
            loss = self._micro_batch(batch, items, not step.mine[index], index + 1 < len(batches))
            losses.append(loss)
            runtime.sync()  # on XLA each micro-batch is a program, the update another
            flos += 0.0 if self.micro.stands_in else float(self.functions.floating_point_ops(batch))
            if index + 1 < len(batches):
                control = self.notify("on_substep_end")
                if control.should_epoch_stop or control.should_training_stop:
                    optimizer.zero_grad(set_to_none=True)
                    return False
        sums = self._sums(losses, flos)
        scaler.unscale_(optimizer)
        norm = self.functions.clip_grad_norm(self.state.model)
        issued = IssuedStep(step, progress.place(), losses, sums, norm)
        updated = self._update(issued)
        optimizer.zero_grad(set_to_none=True)
        runtime.sync()
        if updated:
            self.state.schedule.advance(progress.step + 1 - progress.skipped)
        self._count(issued, updated)
        return True

    def isolate_documents(self, batch: Batch) -> contextlib.AbstractContextManager[None]:
        """Inside, packed documents are isolated in forward passes over this batch, recomputed ones included."""
        return self.packed.rows(batch) if self.packed is not None else known_rows(batch.get("position_ids"))

    def read_values(self, but: float = 0) -> None:
        """Read and add up the values of the steps issued so far, but the last ones. Stops the run at a step that has
        changed nothing because its loss or gradient is not finite."""
        while len(self._pending) > but:
            issued = self._pending[0]
            result = issued.result()
            if self.guard is not None and not math.isfinite(result.loss + result.grad_norm):
                self._handle_nonfinite(issued)
            self._pending.popleft()
            self.functions.add_flos(result.flos)
            self.state.progress.add_loss(result.loss)
            tokens = issued.step.pick.tokens
            self.state.window.add(result.loss, result.accuracy, result.entropy, tokens, result.router_loss)
            self.last = result

    @functools.cached_property
    def guard(self) -> engines.UpdateGuard | None:
        """What skips updates on the device. None where the host reads the values first: to skip steps that then do not
        count as updates, or because the optimizer cannot."""
        waits = self.config.on_nonfinite_loss == "skip" or self.state.scaler.is_enabled()
        return None if waits else engines.current().devices.update_guard(self.state.optimizer)

    def _seed(self, step: int) -> None:
        """Seed the random numbers (dropout) of a step from seed, step and rows: a resumed run draws the same."""
        key = f"{self.config.seed}/{step}/{data_ranks.data_rank()}".encode()
        runtime.seed_device(int.from_bytes(hashlib.blake2b(key, digest_size=7).digest(), "little"))

    def _micro_batch(self, batch: Batch, items: Any, stands_in: bool, more: bool) -> torch.Tensor:
        """Forward and backward over one micro-batch; its loss, detached."""
        self.micro.stands_in, model = stands_in, self.state.model
        accumulates = more and not self.config.sync_each_batch
        with model.no_sync() if accumulates else contextlib.nullcontext(), self.isolate_documents(batch):
            loss = self.functions.training_step(model, batch, num_items_in_batch=items)
        loss = torch.as_tensor(loss, device=runtime.device()).detach().double()
        return torch.zeros_like(loss) if stands_in else loss

    def _sums(self, losses: list[torch.Tensor], flos: float) -> torch.Tensor:
        """Over all ranks: the loss of the step, what was measured, and floating-point operations."""
        flops = torch.full((1,), flos, dtype=torch.float64, device=runtime.device())
        sums = torch.cat([torch.stack(losses).sum(0, keepdim=True), self.micro.take_measured(), flops])
        return data_ranks.sum_over_rows("sum of the metrics", sums)

    def _update(self, issued: IssuedStep) -> bool:
        """Take the optimizer's step. Returns whether weights were changed, as far as the host decides it."""
        if self.guard is not None:
            self.notify("on_pre_optimizer_step")
            self.guard.step(issued.values)
            self.notify("on_optimizer_step")
            return True
        result, scaler = issued.result(), self.state.scaler
        usable = math.isfinite(result.loss) and (math.isfinite(result.grad_norm) or scaler.is_enabled())
        if not usable:
            self._handle_nonfinite(issued)
        else:
            self.notify("on_pre_optimizer_step")
            scaler.step(self.state.optimizer)
            self.notify("on_optimizer_step")
        scaler.update()
        # Where gradients overflow in fp16 the scaler skips the step and lowers its scale.
        return usable and scaler.get_scale() >= self.micro.scale

    def _count(self, issued: IssuedStep, updated: bool) -> None:
        """Count a step whose update was issued, or skipped."""
        progress, pick = self.state.progress, issued.step.pick
        progress.step, progress.tokens = progress.step + 1, progress.tokens + pick.tokens
        progress.epoch, progress.position = pick.epoch, pick.position
        progress.skipped += not updated
        self._pending.append(issued)
        self.read_values(but=math.inf if engines.current().compiles_steps else 1)

    def _handle_nonfinite(self, issued: IssuedStep) -> None:
        """Stop the run at a step whose loss or gradient is not finite, unless `on_nonfinite_loss` is skip."""
        number, what = issued.place["step"] + 1, issued.describe_nonfinite()
        if self.config.on_nonfinite_loss == "stop":
            # Back to its place: the steps issued since have changed nothing either.
            progress = self.state.progress
            self._pending.clear()
            progress.go_back(issued.place)
            self.notify.state.global_step, self.notify.state.epoch = progress.step, progress.epoch
            if self.guard is not None:
                self.guard.reset()
            self._close_report()
            raise TrainingError(
                f"step {number}: {what}. The weights were not changed. Look at those rows, lower learning_rate, or "
                f"skip such steps with on_nonfinite_loss skip."
            )
        if runtime.is_main():
            runtime.get_logger().warning("step %d skipped: %s", number, what)
