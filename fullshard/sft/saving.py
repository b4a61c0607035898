"""Saving under transformers' names: checkpoints, the best model, and the result with its model card."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fullshard.checkpoint.manager import CheckpointManager
from fullshard.checkpoint.manifest import step_name
from fullshard.config.errors import ConfigError
from fullshard.config.paths import refuse_inputs
from fullshard.distributed import runtime
from fullshard.distributed.ranks import agree
from fullshard.models.causal_lm import get_causal_lm
from fullshard.sft import results
from fullshard.sft.base_model import local_folder
from fullshard.sft.hub import Hub
from fullshard.sft.output_dir import CHECKPOINTS, output_path
from fullshard.sft.overrides import Calls
from fullshard.sft.results import Summary
from fullshard.sft.trainer_context import TrainerContext


class CheckpointSaver:
    """Saves a run's checkpoints and its result."""

    def __init__(self, context: TrainerContext, calls: Calls) -> None:
        self._context, self._calls = context, calls
        self._checkpoints: CheckpointManager | None = None
        self._push_message = "the end of training"

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def open_checkpoints(self) -> CheckpointManager:
        """The run's checkpoints. The best one, and those that are still to be uploaded, are not removed."""
        args, run = self._context.args, self._context.run

        def protect(step: int) -> bool:
            return step == run.state.progress.best_step or (run.hub is not None and run.hub.holds(step))

        self._checkpoints = CheckpointManager(
            output_path(args) / CHECKPOINTS, max(1, int(args.save_steps)), args.save_total_limit, protect=protect
        )
        return self._checkpoints

    def save_in_training(self, model: Any) -> None:
        """Save a checkpoint between two steps."""
        self._calls._save_checkpoint(model, None)

    def _save_checkpoint(self, model: Any, trial: Any = None) -> None:
        """Save a checkpoint of the current step."""
        args, run, events = self._context.args, self._context.run, self._context.events
        if run.hub is not None and args.hub_strategy != "end":
            events("on_push_begin")
        assert self._checkpoints is not None
        save = self._checkpoints.save_async if args.async_save else self._checkpoints.save
        progress = run.state.progress
        save(progress.step, run.snapshot(), force=True)
        if progress.best_step is not None:
            folder = output_path(args) / CHECKPOINTS / step_name(progress.best_step)
            if progress.best_step == progress.step or folder.is_dir():
                events.state.best_model_checkpoint = str(folder)

    def _load_best_model(self) -> None:
        """Restore the weights of the best evaluation, if `load_best_model_at_end` is on."""
        args, state = self._context.args, self._context.run.state
        progress = state.progress
        if not args.load_best_model_at_end or progress.best_step is None:
            return
        if progress.best_step != progress.step:
            assert self._checkpoints is not None
            self._checkpoints.restore(progress.best_step, {"model": state.model}, rng=False)
        best = f"best {args.best_metric} {progress.best_value:.4f} at step {progress.best_step}"
        self._context.say(f"{best}: its weights are kept")

    # --- the result -------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model (or adapter) with tokenizer, model card and report, as transformers and PEFT read them.

        Whole values are written whatever the state-dict type is. All ranks must call it.
        """
        place = Path(output_dir or self._context.args.output_dir).expanduser()
        agree(lambda: refuse_inputs(place, "save_model", self._context.inputs), "save_model")
        self._calls.prepare()
        self._calls._save(str(place))
        self._calls.create_model_card(folder=place)
        if (hub := self._context.run.hub) is not None:
            self._push(hub, place)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Write the model (or adapter) and the tokenizer. All ranks must call it."""
        if state_dict is not None:
            raise ConfigError("_save: whole values are gathered and written by the trainer; leave state_dict out.")
        self._calls.prepare()
        self._context.run.writer.export(Path(output_dir or self._context.args.output_dir).expanduser())

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None,
        tags: str | Sequence[str] | None = None, *, folder: Path | None = None,
    ) -> None:  # fmt: skip
        """Write the model card and the report into `folder`, or into `output_dir`; `tags` are further ones."""
        more = [tags] if isinstance(tags, str) else list(tags or ())
        if runtime.is_main():
            place = folder or output_path(self._context.args)
            results.write_card_and_report(
                self.summary(), place, model_name, dataset_name, [*self._calls.value("_tag_names"), *more]
            )

    def push_to_hub(self, commit_message: str = "the end of training", blocking: bool = True) -> None:
        """Save the model to `output_dir`, upload it to the hub and wait for that. All ranks must call it."""
        self._calls.prepare()
        run = self._context.run
        run.hub = run.hub or Hub(self._context.args, run.writer, run.reporter.say)
        self._push_message = commit_message
        self._calls.save_model()

    def _push(self, hub: Hub, place: Path) -> None:
        self._context.events("on_push_begin")
        if runtime.is_main():
            hub.push(place, self._push_message)
        if self._context.args.save_total_limit is not None:
            with self.open_checkpoints() as checkpoints:
                checkpoints.prune()  # those that were kept until they were uploaded

    def summary(self) -> Summary:
        """The outcome of the run so far."""
        run, parts = self._context.run, self._context.parts
        return Summary(
            self._context.args, run.state.progress, run.state.logged_steps, run.reporter.history,
            parts.base or local_folder(get_causal_lm(parts.model)), hasattr(parts.model, "peft_config"),
        )  # fmt: skip
