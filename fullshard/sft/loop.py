"""The training loop: steps, evaluations, checkpoints, and when to stop.

Decisions depend only on values that are equal on all ranks, so all ranks decide alike. The order of a run and its
events are transformers'. What a step is, is in `optimizer_step.py`; what a checkpoint holds, in `training_state.py`.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullshard.checkpoint.manager import CheckpointManager
from fullshard.data.loader import Step
from fullshard.device import accelerator
from fullshard.distributed import engines, runtime
from fullshard.distributed.ranks import exchange
from fullshard.models.chunked_loss import ChunkedLossHead
from fullshard.models.router_loss import has_router_loss
from fullshard.models.routing import TokensPerExpert, usage_metrics, warn_of_collapse
from fullshard.report.reporter import Reporter, Window, memory_gib
from fullshard.sft.batches import Steps, describe_data
from fullshard.sft.callbacks import Callbacks
from fullshard.sft.optimizer_step import OptimizerSteps
from fullshard.sft.sft_config import SFTConfig
from fullshard.sft.training_state import Progress, TrainingState


@dataclass(frozen=True)
class LoopFunctions:
    """What the loop has others do; a script may replace most of it (see `overrides.py`)."""

    count_tokens: Callable[[Step], Step]
    """A step with the number of its trained tokens, over all ranks."""
    evaluate: Callable[[], dict[str, float]]
    is_best: Callable[[dict[str, float]], bool]
    """Compare an evaluation with the best so far; stops early if it is time."""
    save_checkpoint: Callable[[Any], None]
    """Save a checkpoint of the model and of everything else that the run resumes from."""
    log: Callable[[dict[str, float]], None]


class DataSteps:
    """The steps of the training data, from the run's progress on."""

    def __init__(self, loader: Steps, progress: Progress, total: int) -> None:
        self._loader, self._progress, self._total = loader, progress, total
        self._steps = self._from_progress()

    def __iter__(self) -> Iterator[Step]:
        while (step := next(self._steps, None)) is not None:
            yield step

    def skip_epoch(self, step: Step, taken: bool) -> None:
        """Leave out the rest of a step's epoch. `taken` is whether the step itself was trained on."""
        self._steps.close()
        self._progress.position, left = self._loader.next_epoch(step.pick)
        self._progress.passed_over += left + (not taken)
        self._steps = self._from_progress()

    def close(self) -> None:
        """Stop preparing batches."""
        self._steps.close()

    def _from_progress(self) -> Generator[Step, None, None]:
        progress, length = self._progress, self._loader.steps_per_epoch
        end = self._total + progress.passed_over
        if length is not None:  # an epoch that a callback ends early makes the run shorter
            end = min(end, math.ceil(self._total / length) * length)
        return self._loader.steps(progress.step + progress.passed_over, end, progress.position)


class Loop:
    """Trains a sharded model. Every rank runs the same loop."""

    def __init__(
        self, config: SFTConfig, state: TrainingState, steps: OptimizerSteps, head: ChunkedLossHead,
        loader: Steps | None,
        reporter: Reporter, functions: LoopFunctions, notify: Callbacks, *, evaluates_first: bool,
    ) -> None:  # fmt: skip
        self.config, self.state, self.steps, self.head, self.loader = config, state, steps, head, loader
        self.reporter, self.functions, self.notify = reporter, functions, notify
        self.evaluates_first = evaluates_first
        """Whether the model is evaluated before the first step."""
        self.model, self.optimizer, self.activations = state.model, state.optimizer, state.activations
        self.total = reporter.total
        self.streamed: dict[str, Any] | None = None
        """The counts of a stream so far."""
        self._checkpoints: CheckpointManager | None = None
        self._logged = 0
        """The step of the last log line."""
        self._has_router_loss = has_router_loss(state.model)
        self._experts = TokensPerExpert(state.model)
        self._counts_tokens = config.include_num_input_tokens_seen != "no"

    def run(self, checkpoints: CheckpointManager) -> None:
        """Train until the last step, or until a callback, early stopping or a signal ends the run."""
        assert self.loader is not None
        self._begin(checkpoints)
        new_epoch = True
        with contextlib.closing(DataSteps(self.loader, self.progress, self.total)) as data:
            for step in data:
                if new_epoch:
                    self.notify("on_epoch_begin")
                step = self.functions.count_tokens(step)
                taken, self.streamed = self.activations.run(self.steps.take, step), step.pick.facts
                if taken:
                    self._end_step(step)
                    self._log_evaluate_save(taken)
                new_epoch = step.pick.ends_epoch or self._ends_epoch_early
                if new_epoch:
                    self.steps.read_values()
                    self.notify("on_epoch_end")
                    self._log_evaluate_save(taken)
                self._exit_if_preempted(checkpoints)
                if self.notify.control.should_training_stop:
                    break
                if new_epoch and not step.pick.ends_epoch:
                    data.skip_epoch(step, taken)
        self._finish(checkpoints)

    def _begin(self, checkpoints: CheckpointManager) -> None:
        self._checkpoints, progress = checkpoints, self.progress
        checkpoints.listen()
        self.reporter.start(progress.step)
        self.reporter.history[:] = exchange(self.reporter.history, "metrics so far")[0]
        self._logged = progress.step
        self.notify("on_train_begin")
        if self.evaluates_first and progress.step == 0:
            self.functions.evaluate()
        self.model.train()
        self.window.began = time.monotonic()

    def _finish(self, checkpoints: CheckpointManager) -> None:
        if self.streamed is not None:
            self.reporter.say(describe_data("streamed", self.streamed, self.config))
        self.steps.read_values()
        if self.config.save_strategy not in ("no", "best") and self.state.saved_step != self.progress.step:
            self._save()
        checkpoints.join()

    @property
    def _ends_epoch_early(self) -> bool:
        """Whether a callback has ended the epoch, or the run."""
        control = self.notify.control
        return bool(control.should_epoch_stop or control.should_training_stop)

    def _exit_if_preempted(self, checkpoints: CheckpointManager) -> None:
        """After a signal: save a checkpoint and leave the process."""
        if checkpoints.reached_preemption(self.progress.step):
            self.reporter.close()
            checkpoints.exit_if_preempted(self.progress.step, self.snapshot())

    # --- the end of a step ------------------------------------------------------------------------------------------

    def _end_step(self, step: Step) -> None:
        """Show a step, and call the callbacks of its end."""
        progress, pick, state = self.progress, step.pick, self.notify.state
        state.global_step, state.epoch = progress.step, progress.epoch
        state.num_input_tokens_seen = progress.tokens if self._counts_tokens else 0
        every = self.config.torch_empty_cache_steps
        if every is not None and progress.step % every == 0:
            accelerator.empty_cache(runtime.device())
        if self.reporter.is_live and (last := self.steps.last) is not None:
            values = {"loss": last.loss, "learning_rate": self.steps.rate, "grad_norm": last.grad_norm}
            values |= {"tokens_per_second": self.window.tokens_per_second, "memory_gib": memory_gib()}
            self.reporter.tick(progress.step, values)
        if pick.facts is not None and pick.ends_epoch and pick.epoch == 1:
            self.reporter.say(describe_data("streamed", pick.facts, self.config))
        self.notify("on_step_end")

    def _log_evaluate_save(self, taken: bool) -> None:
        """Do what the settings or a callback ask for; `taken` is whether the last step was."""
        control = self.notify.control
        if control.should_log or control.should_evaluate or control.should_save:
            self.steps.read_values()
        if control.should_log and taken and self.progress.step > self._logged:
            self._log()
        if self.notify.control.should_evaluate:
            best = self.functions.is_best(self.functions.evaluate())
            if best and (self.config.load_best_model_at_end or self.config.save_strategy == "best"):
                self.notify.control.should_save = True
        if self.notify.control.should_save:
            self._save()

    def _log(self) -> None:
        last, state, tokens, skipped = self.steps.last, self.state, self.progress.tokens, self.progress.skipped
        assert last is not None
        means, state.logged_steps = state.window.means(), state.window.steps
        names = {"mean_token_accuracy": True, "entropy": self.head.entropy, "aux_loss": self._has_router_loss}
        measured = {name: means[name] for name, shown in names.items() if shown and not math.isnan(means[name])}
        values = {
            "loss": means["loss"],
            "learning_rate": self.steps.rate,
            "grad_norm": last.grad_norm,
            **measured,
            "num_tokens": tokens,
            **({"num_input_tokens_seen": tokens} if self._counts_tokens else {}),
            "tokens_per_second": state.window.tokens_per_second,
            "memory_gib": memory_gib(),
            **({"skipped_steps": skipped} if skipped or state.scaler.is_enabled() else {}),
            **self._usage_of_experts(),
        }
        state.window, self._logged = Window(), self.progress.step
        state.logged = {**measured, "num_tokens": tokens}
        self.functions.log(values)

    def _usage_of_experts(self) -> dict[str, Any]:
        """How a mixture used its experts since the last log line."""
        usage = self._experts.take()
        warn_of_collapse(usage)
        return usage_metrics(usage)

    def _save(self) -> None:
        self.functions.save_checkpoint(self.model)
        self.state.saved_step = self.progress.step
        self.notify("on_save", checkpoints=self._checkpoints)

    # --- the state of the training ----------------------------------------------------------------------------------

    @property
    def progress(self) -> Progress:
        """How far the run has come."""
        return self.state.progress

    @property
    def window(self) -> Window:
        """The metrics of the steps since the last log line."""
        return self.state.window

    @property
    def guard(self) -> engines.UpdateGuard | None:
        """What skips updates on the device; None where the host decides."""
        return self.steps.guard

    def snapshot(self) -> dict[str, Any]:
        """The objects and values that a checkpoint holds. All ranks must call it."""
        self.steps.read_values()
        return self.state.snapshot()

    def restore(self, checkpoints: CheckpointManager) -> None:
        """Resume from the newest checkpoint that is whole."""
        self.steps.read_values()
        self.state.restore(checkpoints)

    def load(self, folder: Path) -> None:
        """Resume from a checkpoint's folder, or from the newest checkpoint in a run's folder."""
        self.steps.read_values()
        self.state.load(folder)

    def begin_again(self) -> None:
        """Start at the first step, with the model and the optimizer as they are."""
        self.state.begin_again()
        self.reporter.history = []
