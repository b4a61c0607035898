"""Supervised fine-tuning: `SFTTrainer`, which scripts use, and `run`, which `fullshard sft` calls.

The trainer has the names of TRL's and transformers' trainers, so a script keeps working when its imports change. What
it does is in `assemble.py` (what a run is made of) and `loop.py` (training); here is what happens before and after.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fullshard import runtime
from fullshard.checkpoint.manager import CheckpointManager
from fullshard.data.find_dataset import source_of
from fullshard.data.sources import DataSource, hold_back, row_source
from fullshard.errors import ConfigError
from fullshard.parallelize.settings import resolved_launch
from fullshard.paths import refuse_inputs, save_tokenizer
from fullshard.ranks import agree, on_rank_0
from fullshard.reporting import loggers
from fullshard.reporting.reporter import Reporter
from fullshard.train import assemble, results, run_dir
from fullshard.train.accelerator import Accelerator, Plugin, State
from fullshard.train.adapter import adapter_config
from fullshard.train.batches import total_steps
from fullshard.train.callbacks import Callbacks, TrainerState
from fullshard.train.cli_args import check_model_folder, check_paths, check_report_to, inputs_of
from fullshard.train.config import SFTConfig
from fullshard.train.foreign_args import config_of
from fullshard.train.hub import Hub
from fullshard.train.loop import Loop
from fullshard.train.run_lock import FolderLock
from fullshard.train.samples import Samples
from fullshard.train.start import starting_point
from fullshard.version import library_versions


class TrainOutput(NamedTuple):
    """What `train()` returns, as transformers' does."""

    global_step: int
    training_loss: float
    """The mean of the losses of all steps, those before a resume included."""
    metrics: dict[str, float]
    """The last numbers of training that were logged, and `train_loss`, which is `training_loss`."""


class SFTTrainer:
    """Fine-tunes a causal language model, fully sharded over the launched ranks. Every rank makes one.

    `model` is a name or folder (each rank then reads its own slices only), a model, or a `PeftModel`. `args` is an
    `SFTConfig`, transformers' `TrainingArguments`, TRL's `SFTConfig` or a dict. Data sets are lists of rows, data sets
    of `datasets`, or files; `data/row_formats.py` says which rows are understood.
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
        given = {"packing": packing, "dataset_text_field": dataset_text_field, "max_seq_len": max_seq_length}
        self.args, notes = config_of(args, **given, **(dataset_kwargs or {}))
        check_report_to(self.args.report_to)
        if data_collator is not None:
            raise ConfigError(
                "data_collator: the trainer puts rows together itself, so that documents stay apart and the loss "
                "is exact; "
                "give rows with input_ids and labels for full control."
            )
        if optimizers[1] is not None:
            raise ConfigError("optimizers: schedulers are set by lr_scheduler_type; give (optimizer, None).")
        model = model if model is not None else self.args.model_name_or_path
        model, earlier = starting_point(model, self.args.adapter_name_or_path)
        self.args = dataclasses.replace(self.args, adapter_name_or_path=earlier)
        if model is None and earlier is None:
            raise ConfigError("there is no model: give model=, or model_name_or_path in args.")
        if isinstance(model, str | Path):
            check_model_folder(str(model))
        elif model is not None and self.args.rope_scaling is not None:
            raise ConfigError(
                f"rope_scaling is {self.args.rope_scaling}, but the model is in memory already; set rope_parameters in "
                f"its configuration before it is made, or name its folder."
            )
        engine = assemble.engine_settings(self.args, notes)
        if peft_config is None and earlier is None:
            peft_config = adapter_config(self.args)
        if peft_config is not None and (hasattr(model, "peft_config") or earlier is not None):
            raise ConfigError("the model has an adapter already, and peft_config asks for another; leave one out.")
        self._say: Callable[[str], None] = _speaker(self.args.progress)
        _set_log_level(self.args)
        train, evaluation = (
            None if data is None else _source(data, name, formatting_func, self.args)
            for data, name in ((train_dataset, "train_dataset"), (eval_dataset, "eval_dataset"))
        )
        if train is None and evaluation is None:
            raise ConfigError("there is no data: give train_dataset= (and eval_dataset=).")
        given_tokenizer = processing_class if processing_class is not None else tokenizer
        self._inputs = run_dir.inputs_of(self.args, model, earlier, (train, evaluation), given_tokenizer)
        if train is not None:
            run_dir.check_place(self.args, self._inputs)
        if self.args.val_size and evaluation is not None:
            raise ConfigError(f"val_size is {self.args.val_size:g}, and there is an eval_dataset; choose one.")
        if self.args.val_size and train is not None:
            train, evaluation = hold_back(train, self.args.val_size, self.args.seed, self.args.streaming)
        if self.args.eval_strategy != "no" and evaluation is None:
            raise ConfigError(
                f"eval_strategy is {self.args.eval_strategy}, but there is no eval_dataset; give one, or hold rows "
                f"back with val_size."
            )
        for note in notes:
            self._say(f"note: {note}")
        self.parts = assemble.gather_parts(
            self.args, engine, model, given_tokenizer, train, evaluation, peft_config, self._say
        )
        resolved = {"model_name_or_path": self.parts.base, "adapter_name_or_path": self.parts.earlier}
        self._inputs |= {name: [place] for name, place in resolved.items() if place is not None}
        self.state = TrainerState(is_world_process_zero=runtime.is_main())
        self.hub = Hub(self) if self.args.push_to_hub else None
        samples = Samples(self) if self.args.eval_samples or self.args.sample_prompts else None
        own = [one for one in (samples, self.hub) if one is not None]
        self._callbacks = Callbacks(callbacks or (), self.args, self.state, own)
        self._optimizer = optimizers[0]
        self._loop: Loop | None = None
        plugin = Plugin(engine.strategy, engine.offload_params, engine.saved_as)
        self.accelerator = Accelerator(self, State(plugin, mixed_precision=engine.mixed_precision))
        self.is_fsdp_enabled = True

    @property
    def model(self) -> Any:
        """The model; sharded once training or evaluation has begun."""
        return self.parts.model

    @property
    def processing_class(self) -> Any:
        return self.parts.tokenizer

    tokenizer = processing_class

    @property
    def loop(self) -> Loop:
        """The loop around the sharded model; the model is sharded and filled when it is first asked for."""
        if self._loop is None:
            table = self.parts.train if self.parts.train is not None else self.parts.evaluation
            assert table is not None
            total = self.state.max_steps = total_steps(self.args, table)
            place = run_dir.place_of(self.args)
            if self.parts.takes_from_weights and run_dir.resumes(self.args):
                self.parts.first = run_dir.first_adapter(self.args)
            reporter = Reporter(
                place,
                total,
                self.args.progress,
                loggers.opener(self.args.report_to, self.args.to_dict(), self.args.run_name),
            )
            self._loop = assemble.build_loop(self.parts, reporter, self._optimizer, self._callbacks)
        return self._loop

    # --- training ---------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None) -> TrainOutput:
        """Train. With `resume_from_checkpoint` (true: the newest) go on from there. All ranks must call it."""
        if self.parts.train is None:
            raise ConfigError("there is no train_dataset to train on.")
        if resume_from_checkpoint:
            text = "true" if resume_from_checkpoint is True else str(resume_from_checkpoint)
            self.args = self.parts.config = dataclasses.replace(self.args, resume_from_checkpoint=text)
        with self.own_folder() as (earlier, resumes):
            loop = self.loop
            loop.config = self.args
            if not resumes:
                agree(self._begin_anew, "start of the run")
            try:
                self._train(loop, earlier if resumes else None, resumes)
            finally:
                loop.reporter.close()  # whatever happened, the terminal is left in order
        self._update_state()
        last: dict[str, Any] = next((r for r in reversed(self.state.log_history) if "loss" in r), {})
        mean = loop.progress.mean_loss
        return TrainOutput(loop.progress.step, mean, {**last, "train_loss": mean})

    def _train(self, loop: Loop, earlier: dict[str, Any] | None, resumes: bool) -> None:
        results.keep_first(loop.model, self.parts, self.args)
        with self._open_checkpoints() as manager:
            loop.manager = manager
            if resumes or run_dir.named_checkpoint(self.args) is not None:
                self._resume(manager, earlier)
                agree(self._write_settings, "settings of the run")
            self._callbacks("on_train_begin", step=loop.progress.step)
            loop.run()
            self._load_best(manager)
            loop.manager = None
        self._callbacks("on_train_end", step=loop.progress.step)

    def evaluate(self, eval_dataset: Any = None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Metrics on the evaluation data, before or after training. All ranks must call it."""
        table = self.parts.evaluation
        if eval_dataset is not None:
            source = source_of(eval_dataset, "eval_dataset", self.args.sample_by)
            table = assemble.table_of(self.parts, "evaluation", source, self._say)
        if table is None:
            raise ConfigError("there is no eval_dataset to evaluate on.")
        return self.loop.evaluate(table, metric_key_prefix)

    @contextlib.contextmanager
    def own_folder(self) -> Iterator[tuple[dict[str, Any] | None, bool]]:
        """The output folder, checked, and held for this run until its end: the settings of the run that is there, and
        whether this one goes on with it."""
        locks: list[FolderLock] = []

        def hold() -> tuple[dict[str, Any] | None, bool]:
            run_dir.check_folder(self.args, self._inputs)
            locks.append(run_dir.open_folder(self.args))
            return run_dir.read_settings(run_dir.place_of(self.args)), run_dir.resumes(self.args)

        try:
            yield on_rank_0(hold, "output directory")
        finally:
            for lock in locks:
                lock.release()

    def _begin_anew(self) -> None:
        if runtime.is_main():
            if note := run_dir.remove_earlier(self.args):
                self._say(note)
            self._write_settings()

    def _resume(self, manager: CheckpointManager, earlier: dict[str, Any] | None) -> None:
        named = run_dir.named_checkpoint(self.args)
        if named is not None and not (run_dir.restarted() and manager.latest() is not None):
            self.accelerator.load_state(str(named))
        elif manager.latest() is None:
            self._say("started again before the first checkpoint: beginning anew")
            return
        else:
            self.loop.restore(manager, None)
        self._say(f"resumed at step {self.loop.progress.step} of {self.loop.total}")
        self._forget_lost_best(manager)
        if not runtime.is_main() or earlier is None:
            return
        if (found := run_dir.describe_changes(earlier, self.args)).startswith("Changed"):
            runtime.get_logger().warning("resumed with other settings. %s", found)

    def _forget_lost_best(self, manager: CheckpointManager) -> None:
        """A best checkpoint that is not in this folder (but in that of the run gone on with) cannot be returned to."""
        progress, there = self.loop.progress, agree(manager.all_steps, "list of checkpoints")[0]
        if not self.args.load_best_model_at_end or progress.best_step is None or progress.best_step in there:
            return
        if runtime.is_main():
            runtime.get_logger().warning(
                "the best checkpoint so far, of step %d, is not in %s: from here on the best of what follows counts",
                progress.best_step,
                manager.path,
            )
        progress.best_step = progress.best_value = None

    def _write_settings(self) -> None:
        if runtime.is_main():
            engine = self.parts.engine
            facts = {"engine": engine.describe(), "launch": resolved_launch(), "ranks": runtime.world_size()}
            run_dir.write_settings(self.args, {**facts, "versions": library_versions()})
            # Beside the checkpoints from the start, so that they can be used before the run has ended.
            save_tokenizer(self.parts.tokenizer, run_dir.place_of(self.args))

    def _load_best(self, manager: CheckpointManager) -> None:
        progress = self.loop.progress
        if not self.args.load_best_model_at_end or progress.best_step is None:
            return
        if progress.best_step != progress.step:
            manager.restore(progress.best_step, {"model": self.loop.model}, rng=False)
        self._say(
            f"best {self.args.best_metric} {progress.best_value:.4f} at step {progress.best_step}: its weights stay"
        )

    def _update_state(self) -> None:
        progress, state = self.loop.progress, self.state
        state.log_history = list(self.loop.reporter.history)
        state.global_step, state.best_metric, state.best_global_step = (
            progress.step,
            progress.best_value,
            progress.best_step,
        )
        state.epoch = progress.epoch

    def _open_checkpoints(self) -> CheckpointManager:
        needed = self.hub.holds if self.hub is not None else lambda step: False
        return assemble.open_checkpoints(self.args, self.loop, needed)

    # --- results ----------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None) -> None:
        """Write the model (or adapter) with its tokenizer, card and report, as transformers and peft read them.

        Whole values are written whatever the state-dict type is. All ranks must call it.
        """
        place = Path(output_dir or self.args.output_dir).expanduser()
        agree(lambda: refuse_inputs(place, "save_model", self._inputs), "save_model")
        loop = self.loop
        self._update_state()
        results.export(loop.model, self.parts, self.args, place)
        results.describe(self, place)
        if self.hub is not None and self.args.save_total_limit is not None:
            with self._open_checkpoints() as manager:
                manager.prune()  # what was kept until it was uploaded

    def save_state(self) -> None:
        """Save a checkpoint of where the run stands."""
        with self._open_checkpoints() as manager:
            if self.loop.progress.step not in manager.all_steps():
                manager.save(self.loop.progress.step, self.loop.state(), force=True)


def run(config: SFTConfig, notes: Sequence[str] = ()) -> None:
    """What `fullshard sft` does: build a trainer from files, train, save, say where everything is."""
    data = check_paths(config)
    assemble.join_ranks(assemble.engine_settings(config, []))
    inputs = inputs_of(config, data)
    on_rank_0(lambda: run_dir.check_folder(config, inputs), "output directory")
    say = _speaker(config.progress)
    for note in notes:
        say(f"note: {note}")
    trainer = SFTTrainer(
        model=config.model_name_or_path,
        args=config,
        train_dataset=data.train,
        eval_dataset=data.evaluation,
    )
    with trainer.own_folder():  # until the result is written
        trainer.train()
        trainer.save_model()
    results.show(trainer)


def _source(data: Any, name: str, formatting: Callable[[Any], str] | None, config: SFTConfig) -> DataSource:
    if formatting is None:
        return source_of(data, name, config.sample_by)
    return row_source([{config.dataset_text_field: formatting(row)} for row in data], name)


def _speaker(progress: str) -> Callable[[str], None]:
    """Says lines to the user, from the first rank, unless they want none."""
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
