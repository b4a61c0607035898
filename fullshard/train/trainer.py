"""Supervised fine-tuning: `SFTTrainer`, which scripts use, and `train_run`, which `fullshard sft` calls.

The trainer has the names of TRL's and transformers' trainers, so a script keeps working when its imports change. How a
run is put together is in `assemble.py`, training itself in `loop.py`; here is what happens before and after.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fullshard import runtime
from fullshard.checkpoint.manager import CheckpointManager
from fullshard.data.find_dataset import source_of
from fullshard.errors import ConfigError
from fullshard.models.generate import stop_criteria
from fullshard.models.inner_model import causal
from fullshard.parallelize.settings import resolved_launch
from fullshard.paths import refuse_inputs, save_tokenizer
from fullshard.ranks import agree, on_rank_0
from fullshard.reporting import loggers
from fullshard.reporting.reporter import Reporter
from fullshard.train import assemble, results, run_dir
from fullshard.train.batches import checked_table, total_steps
from fullshard.train.callbacks import Accelerator, AcceleratorState, Callbacks, Plugin, TrainerState
from fullshard.train.checked_run import CheckedRun, check_script
from fullshard.train.config import SFTConfig
from fullshard.train.hub import Hub
from fullshard.train.loop import Loop
from fullshard.train.model import local_folder
from fullshard.train.results import ResultWriter, Summary
from fullshard.train.run_lock import FolderLock
from fullshard.train.samples import Samples, choose_prompts
from fullshard.version import library_versions


class TrainOutput(NamedTuple):
    """The return value of `train()`, as in transformers."""

    global_step: int
    training_loss: float
    """The mean of the losses of all steps, those before a resume included."""
    metrics: dict[str, float]
    """The last training metrics that were logged, and `train_loss`, which is `training_loss`."""


class EarlierRun(NamedTuple):
    """The run that `output_dir` holds already."""

    settings: dict[str, Any] | None
    resumes: bool
    """Whether this run resumes it."""


class SFTTrainer:
    """Fine-tunes a causal language model, fully sharded over the launched ranks. Every rank makes one.

    `model` is a name or folder (each rank then reads its own slices only), a model, or a `PeftModel`. `args` is an
    `SFTConfig`, transformers' `TrainingArguments`, TRL's `SFTConfig` or a dict. Data sets are lists of rows, data sets
    of `datasets`, or files; `data/row_formats.py` lists the row formats. Everything is checked here, once; the model is
    sharded and its weights are read by `prepare()`, which `train()` and `evaluate()` call.
    """

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        peft_config: Any = None,
        formatting_func: Callable[[Any], str] | None = None,
        *,
        tokenizer: Any = None,
        packing: bool | None = None,
        dataset_text_field: str | None = None,
        max_seq_length: int | None = None,
        dataset_kwargs: dict[str, Any] | None = None,
    ) -> None:
        if data_collator is not None:
            raise ConfigError(
                "data_collator: the trainer collates rows itself, so that documents stay apart and the loss is exact; "
                "give rows with input_ids and labels for full control."
            )
        if optimizers[1] is not None:
            raise ConfigError("optimizers: schedulers are set by lr_scheduler_type; give (optimizer, None).")
        settings = {"packing": packing, "dataset_text_field": dataset_text_field, "max_seq_len": max_seq_length}
        tokenizer = processing_class if processing_class is not None else tokenizer
        run = check_script(
            model, args, train_dataset, eval_dataset, tokenizer, peft_config, formatting_func,
            {**settings, **(dataset_kwargs or {})},
        )  # fmt: skip
        self._start(run, callbacks or (), optimizers[0])

    @classmethod
    def of(cls, run: CheckedRun) -> SFTTrainer:
        """The trainer of a run that has been checked."""
        made = cls.__new__(cls)
        made._start(run)
        return made

    def _start(self, run: CheckedRun, callbacks: Sequence[Any] = (), optimizer: Any = None) -> None:
        self.args = run.config
        self._say = _printer(self.args.progress)
        _set_log_level(self.args)
        for note in run.notes:
            self._say(f"note: {note}")
        self.parts = assemble.gather_parts(run, self._say)
        self._inputs = self._with_downloads(run)
        self._folder_checked = run.folder_checked
        self._folder: EarlierRun | None = None
        self._samples = self._choose_samples()
        self.state = TrainerState(is_world_process_zero=runtime.is_main())
        self._user_callbacks, self._optimizer = callbacks, optimizer
        self._prepared: tuple[Loop, ResultWriter, Hub | None] | None = None
        engine = run.engine
        plugin = Plugin(engine.strategy, engine.offload_params, engine.saved_as)
        self.accelerator = Accelerator(self.prepare, AcceleratorState(plugin, mixed_precision=engine.mixed_precision))
        self.is_fsdp_enabled = True

    def _with_downloads(self, run: CheckedRun) -> dict[str, list[Path]]:
        """The paths that the run reads, with those of downloaded models; refuses to write over the latter."""
        found = {"model_name_or_path": self.parts.base, "adapter_name_or_path": self.parts.adapter}
        resolved = {name: [place] for name, place in found.items() if place is not None}
        if run.train is not None:
            new = {name: places for name, places in resolved.items() if name not in run.inputs}
            refuse_inputs(run_dir.place_of(self.args), "output_dir", new)
        return {**{name: list(paths) for name, paths in run.inputs.items()}, **resolved}

    def _choose_samples(self) -> tuple[Any, Any] | None:
        """The prompts to answer at each evaluation, and what ends an answer."""
        if not (self.args.eval_samples or self.args.sample_prompts):
            return None
        model, tokenizer = self.parts.model, self.parts.tokenizer
        return choose_prompts(self.args, model, self.parts.evaluation, tokenizer), stop_criteria(model, tokenizer)

    @property
    def model(self) -> Any:
        """The model; sharded once training or evaluation has begun."""
        return self.parts.model

    @property
    def processing_class(self) -> Any:
        """The tokenizer."""
        return self.parts.tokenizer

    tokenizer = processing_class

    @property
    def loop(self) -> Loop:
        """The training loop that `prepare()` has made."""
        if self._prepared is None:
            raise ConfigError("the model is not sharded yet; call trainer.prepare(), train() or evaluate() first.")
        return self._prepared[0]

    def prepare(self) -> Loop:
        """Shard the model, read its weights and make the optimizer; the training loop. All ranks must call it.

        Only the first call does the work; later ones return the same loop.
        """
        if self._prepared is None:
            self._prepared = self._prepare()
        return self._prepared[0]

    def _prepare(self) -> tuple[Loop, ResultWriter, Hub | None]:
        config, parts = self.args, self.parts
        data = parts.train if parts.train is not None else parts.evaluation
        assert data is not None
        self.state.max_steps = total_steps(config, data)
        config.count_steps(self.state.max_steps)
        boards = loggers.opener(config.report_to, config.to_dict(), config.run_name, config.logging_dir)
        reporter = Reporter(run_dir.place_of(config), self.state.max_steps, config.progress, boards)
        first = run_dir.first_adapter(config) if parts.from_weights and run_dir.resumes(config) else None
        writer = ResultWriter(config, parts.model, parts.tokenizer, parts.own_tables, parts.from_weights, first)
        hub = Hub(config, writer, reporter.say) if config.push_to_hub else None
        samples = Samples(*self._samples, parts.model, reporter.samples) if self._samples is not None else None
        own = [one for one in (samples, hub) if one is not None]
        notify = Callbacks([*loggers.callbacks(config.report_to), *self._user_callbacks], config, self.state, own)
        return assemble.build_loop(config, parts, reporter, self._optimizer, first, notify), writer, hub

    # --- training ---------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None) -> TrainOutput:
        """Train. `resume_from_checkpoint` is a checkpoint's folder, or true for the newest. All ranks must call it."""
        if self.parts.train is None:
            raise ConfigError("there is no train_dataset to train on.")
        if resume_from_checkpoint:
            text = "true" if resume_from_checkpoint is True else str(resume_from_checkpoint)
            self.args = dataclasses.replace(self.args, resume_from_checkpoint=text)
        with self.own_folder() as earlier:
            loop = self.prepare()
            if not earlier.resumes:
                agree(self._replace_earlier, "start of the run")
            try:
                self._train(loop, earlier)
            finally:
                loop.reporter.close()  # whatever happened, the terminal is left in order
        self._update_state()
        last: dict[str, Any] = next((r for r in reversed(self.state.log_history) if "loss" in r), {})
        mean = loop.progress.mean_loss
        return TrainOutput(loop.progress.step, mean, {**last, "train_loss": mean})

    def _train(self, loop: Loop, earlier: EarlierRun) -> None:
        assert self._prepared is not None
        self._prepared[1].keep_first()
        with self._open_checkpoints() as checkpoints:
            if earlier.resumes or run_dir.named_checkpoint(self.args) is not None:
                self._resume(loop, checkpoints, earlier)
                agree(self._write_settings, "settings of the run")
            loop.notify("on_train_begin", step=loop.progress.step)
            loop.run(checkpoints)
            self._load_best(loop, checkpoints)
        loop.notify("on_train_end", step=loop.progress.step)

    def evaluate(self, eval_dataset: Any = None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Metrics on the evaluation data, before or after training. All ranks must call it."""
        table, parts = self.parts.evaluation, self.parts
        if eval_dataset is not None:
            source = source_of(eval_dataset, "eval_dataset", self.args.sample_by)
            table = checked_table(self.args, parts.model, parts.tokenizer, self._say, "evaluation", source)
        if table is None:
            raise ConfigError("there is no eval_dataset to evaluate on.")
        return self.prepare().evaluate(table, metric_key_prefix)

    @contextlib.contextmanager
    def own_folder(self) -> Iterator[EarlierRun]:
        """Lock the output folder for this run, once what it holds has been checked. Inside, it may be entered again."""
        if self._folder is not None:
            yield self._folder
            return
        locks: list[FolderLock] = []

        def lock() -> EarlierRun:
            if not self._folder_checked:
                run_dir.check_contents(self.args, self._inputs)
            locks.append(run_dir.open_folder(self.args))
            return EarlierRun(run_dir.read_settings(run_dir.place_of(self.args)), run_dir.resumes(self.args))

        try:
            self._folder = on_rank_0(lock, "output directory")
            self._folder_checked = False  # what the run writes is there when it is entered again later
            yield self._folder
        finally:
            self._folder = None
            for held in locks:
                held.release()

    def _replace_earlier(self) -> None:
        if runtime.is_main():
            if note := run_dir.remove_earlier(self.args):
                self._say(note)
            self._write_settings()

    def _resume(self, loop: Loop, checkpoints: CheckpointManager, earlier: EarlierRun) -> None:
        named = run_dir.named_checkpoint(self.args)
        if named is not None and not (run_dir.restarted() and checkpoints.latest() is not None):
            self.accelerator.load_state(str(named))
        elif checkpoints.latest() is None:
            self._say("restarted before the first checkpoint: starting from the beginning")
            return
        else:
            loop.restore(checkpoints)
        self._say(f"resumed at step {loop.progress.step} of {loop.total}")
        self._forget_lost_best(loop, checkpoints)
        if not runtime.is_main() or earlier.settings is None or not earlier.resumes:
            return
        if (found := run_dir.describe_changes(earlier.settings, self.args)).startswith("Changed"):
            runtime.get_logger().warning("resumed with other settings. %s", found)

    def _forget_lost_best(self, loop: Loop, checkpoints: CheckpointManager) -> None:
        """Forget a best checkpoint that is in the folder of the resumed run only: it cannot be loaded at the end."""
        progress, there = loop.progress, agree(checkpoints.all_steps, "list of checkpoints")[0]
        if not self.args.load_best_model_at_end or progress.best_step is None or progress.best_step in there:
            return
        if runtime.is_main():
            runtime.get_logger().warning(
                "the best checkpoint so far, of step %d, is not in %s: the best one is chosen among later evaluations",
                progress.best_step,
                checkpoints.path,
            )
        progress.best_step = progress.best_value = None

    def _write_settings(self) -> None:
        if runtime.is_main():
            engine = self.parts.engine
            facts = {"engine": engine.describe(), "launch": resolved_launch(), "ranks": runtime.world_size()}
            run_dir.write_settings(self.args, {**facts, "versions": library_versions()})
            # Beside the checkpoints from the start, so that they can be used before the run has ended.
            save_tokenizer(self.parts.tokenizer, run_dir.place_of(self.args))

    def _load_best(self, loop: Loop, checkpoints: CheckpointManager) -> None:
        progress = loop.progress
        if not self.args.load_best_model_at_end or progress.best_step is None:
            return
        if progress.best_step != progress.step:
            checkpoints.restore(progress.best_step, {"model": loop.model}, rng=False)
        self._say(
            f"best {self.args.best_metric} {progress.best_value:.4f} at step {progress.best_step}: its weights are kept"
        )

    def _update_state(self) -> None:
        progress, state = self.loop.progress, self.state
        state.log_history = list(self.loop.reporter.history)
        state.global_step, state.epoch = progress.step, progress.epoch
        state.best_metric, state.best_global_step = progress.best_value, progress.best_step

    def _open_checkpoints(self) -> CheckpointManager:
        """The run's checkpoints. The best one, and those that are still to be uploaded, are not removed."""
        loop, hub = self.prepare(), self._hub

        def protect(step: int) -> bool:
            return step == loop.progress.best_step or (hub is not None and hub.holds(step))

        place = run_dir.place_of(self.args) / run_dir.CHECKPOINTS
        return CheckpointManager(place, int(self.args.save_steps), self.args.save_total_limit, protect=protect)

    @property
    def _hub(self) -> Hub | None:
        return self._prepared[2] if self._prepared is not None else None

    # --- results ----------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None) -> None:
        """Write the model (or adapter) with tokenizer, model card and report, as transformers and PEFT read them.

        Whole values are written whatever the state-dict type is. All ranks must call it.
        """
        place = Path(output_dir or self.args.output_dir).expanduser()
        agree(lambda: refuse_inputs(place, "save_model", self._inputs), "save_model")
        self.prepare()
        assert self._prepared is not None
        _, writer, hub = self._prepared
        self._update_state()
        writer.export(place)
        if runtime.is_main():
            results.describe(self.summary(), place)
            if hub is not None:
                hub.push(place)
        if hub is not None and self.args.save_total_limit is not None:
            with self._open_checkpoints() as checkpoints:
                checkpoints.prune()  # those that were kept until they were uploaded

    def save_state(self) -> None:
        """Save a checkpoint of the current step."""
        loop = self.prepare()
        with self._open_checkpoints() as checkpoints:
            if loop.progress.step not in checkpoints.all_steps():
                checkpoints.save(loop.progress.step, loop.state(), force=True)

    def summary(self) -> Summary:
        """The outcome of the run so far."""
        loop = self.loop
        return Summary(
            self.args, loop.progress, loop.logged_steps, self.state.log_history, loop.reporter.answers,
            self.parts.base or local_folder(causal(self.model)), hasattr(self.model, "peft_config"),
        )  # fmt: skip


def train_run(run: CheckedRun) -> None:
    """Train a checked run, save its result and print where everything is: what `fullshard sft` does on each rank."""
    if not run.folder_checked:
        assemble.join_ranks(run.engine)
        on_rank_0(functools.partial(run_dir.check_folder, run.config, run.inputs), "output directory")
        run = dataclasses.replace(run, folder_checked=True)
    trainer = SFTTrainer.of(run)
    with trainer.own_folder():  # until the result is written
        trainer.train()
        trainer.save_model()
    if trainer.loop.reporter.mode not in ("quiet", "json"):
        results.show(trainer.summary())


def _printer(progress: str) -> Callable[[str], None]:
    """Prints lines for the user on the first rank, unless `progress` asks for none."""
    quiet = progress in ("quiet", "json")
    return lambda text: None if quiet or not runtime.is_main() else print(text, file=sys.stdout, flush=True)


def _set_log_level(config: SFTConfig) -> None:
    level = "warning" if config.log_level == "passive" and config.progress == "quiet" else config.log_level
    if level == "passive":
        return
    import transformers

    runtime.get_logger().setLevel(level.upper())
    if not runtime.is_main() and level in ("debug", "info"):
        level = "warning"
    getattr(transformers.logging, f"set_verbosity_{'error' if level == 'critical' else level}")()
