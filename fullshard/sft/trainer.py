"""Supervised fine-tuning: `SFTTrainer`, which scripts use, and `train_run`, which `fullshard sft` calls.

The trainer has the names of TRL's and transformers' trainers, so a script keeps working when its imports change. How a
run is put together is in `assemble.py`, training itself in `loop.py`; here is what happens before and after.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fullshard.checkpoint.manager import CheckpointManager
from fullshard.config.errors import ConfigError
from fullshard.config.paths import refuse_inputs, save_tokenizer
from fullshard.data.prepared_rows import prepared_rows
from fullshard.distributed import runtime
from fullshard.distributed.ranks import agree, on_rank_0
from fullshard.distributed.terminal_text import print_text
from fullshard.models.causal_lm import get_causal_lm
from fullshard.models.generate import stop_criteria
from fullshard.report import loggers
from fullshard.report.reporter import Reporter
from fullshard.sft import assemble, results, run_dir, run_facts
from fullshard.sft.batches import total_steps
from fullshard.sft.callbacks import Accelerator, AcceleratorState, Callbacks, Plugin, ScriptMethods, with_best_metric
from fullshard.sft.checked_run import CheckedRun, check_script
from fullshard.sft.evaluation import Evaluation
from fullshard.sft.hub import Hub, Saving
from fullshard.sft.loop import Loop
from fullshard.sft.optimizer import schedule_of
from fullshard.sft.overrides import check_subclass, missing
from fullshard.sft.results import ResultWriter, report_run
from fullshard.sft.run_lock import FolderLock
from fullshard.sft.samples import Samples, choose_prompts
from fullshard.sft.sft_config import SFTConfig
from fullshard.sft.step_record import step_watchers
from fullshard.sft.trainer_options import quantization_settings


class EarlierRun(NamedTuple):
    """The run that `output_dir` holds already."""

    settings: dict[str, Any] | None
    resumes: bool
    """Whether this run resumes it."""


class SFTTrainer(Evaluation, Saving, ScriptMethods):
    """Fine-tunes a causal language model, fully sharded over the launched ranks. Every rank makes one.

    `model` is a name or folder (each rank then reads its own slices only), a model, or a `PeftModel`. `args` is an
    `SFTConfig`, transformers' `TrainingArguments`, TRL's `SFTConfig` or a dict. Data sets are lists of rows, data sets
    of `datasets`, or files; `data/row_formats.py` lists the row formats. Everything is checked here, once; the model is
    sharded and its weights are read by `prepare()`, which `train()` and `evaluate()` call.

    Methods may be overridden as with transformers' trainer; `overrides.py` lists those that are not called, which are
    refused when the class is made.
    """

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        compute_loss_func: Callable[..., Any] | None = None,
        compute_metrics: Callable[[Any], dict[str, Any]] | None = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[Any, dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[..., Any] | None = None,
        quantization_config: Any = None,
        peft_config: Any = None,
        formatting_func: Callable[[Any], str] | None = None,
        *,
        model_init: Callable[..., Any] | None = None,
        tokenizer: Any = None,
        packing: bool | None = None,
        dataset_text_field: str | None = None,
        max_seq_length: int | None = None,
        dataset_kwargs: dict[str, Any] | None = None,
    ) -> None:
        self.model_init = model_init
        if model_init is not None and model is not None:
            raise ConfigError("model and model_init are both given; choose one.")
        model = self.call_model_init() if model_init is not None else model
        settings: dict[str, Any] = {
            "packing": packing, "dataset_text_field": dataset_text_field, "max_length": max_seq_length,
            **(quantization_settings(quantization_config) if quantization_config is not None else {}),
        }  # fmt: skip
        tokenizer = processing_class if processing_class is not None else tokenizer
        run = check_script(
            model, args, train_dataset, eval_dataset, tokenizer, peft_config, formatting_func,
            {**settings, **(dataset_kwargs or {})},
        )  # fmt: skip
        self._formatting_func = formatting_func
        if data_collator is not None and run.config.keeps_apart:
            raise ConfigError(
                "data_collator: packed rows are collated by the trainer, so that documents stay apart; leave packing "
                "(padding_free, eval_packing) out, or the collator."
            )
        self.data_collator, self.compute_loss_func = data_collator, compute_loss_func
        self.compute_metrics, self.preprocess_logits_for_metrics = compute_metrics, preprocess_logits_for_metrics
        self.optimizer, self.lr_scheduler = optimizers
        self.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs
        self._start(run, callbacks or ())

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        check_subclass(cls, SFTTrainer)

    def __getattr__(self, name: str) -> Any:
        raise missing(self, name)

    @classmethod
    def of(cls, run: CheckedRun) -> SFTTrainer:
        """The trainer of a run that has been checked."""
        made = cls.__new__(cls)
        made._start(run)
        return made

    def _start(self, run: CheckedRun, callbacks: Sequence[Any] = ()) -> None:
        self.args = with_best_metric(run.config)
        self._run = run
        self._say = _printer(self.args.progress)
        _set_log_level(self.args)
        for note in run.notes:
            self._say(f"note: {note}")
        self.parts = assemble.gather_parts(run, self._say)
        if hasattr(inner := get_causal_lm(self.parts.model), "add_model_tags"):
            inner.add_model_tags(list(self._tag_names))
        self._inputs = self._with_downloads(run)
        self._folder_checked = run.folder_checked
        self._folder: EarlierRun | None = None
        self._samples = self._choose_samples()
        events = self.callback_handler = Callbacks(self.args, [*loggers.callbacks(self.args.report_to), *callbacks])
        events.model, events.processing_class = self.parts.model, self.parts.tokenizer
        self._prepared: tuple[Loop, ResultWriter, Hub | None] | None = None
        self._preparing = self._trained = False
        self.ignored_keys: list[str] | None = None
        self.began = 0.0
        engine = run.engine
        plugin = Plugin(engine.strategy, engine.offload_params, engine.saved_as)
        self.accelerator = Accelerator(self.prepare, AcceleratorState(plugin, mixed_precision=engine.mixed_precision))
        self.is_fsdp_enabled = True
        events.meet()
        events("on_init_end")

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
        rows = self.parts.evaluation
        rows = next(iter(rows.values())) if isinstance(rows, dict) else rows
        return choose_prompts(self.args, model, rows, tokenizer), stop_criteria(model, tokenizer)

    @property
    def model(self) -> Any:
        """The model. On one rank it is sharded and has its weights from the first time it is read; on several, where
        sharding needs all of them, from `prepare()`, `train()` or `evaluate()` on."""
        if runtime.world_size() == 1 and not self._preparing:
            self.prepare()
        return self.parts.model

    model_wrapped = model

    @property
    def processing_class(self) -> Any:
        """The tokenizer."""
        return self.parts.tokenizer

    tokenizer = processing_class

    @property
    def train_dataset(self) -> Any:
        """The rows of the training data: tokens and labels, read like a `datasets.Dataset`."""
        return prepared_rows(self.parts.train)

    @property
    def loop(self) -> Loop:  # type: ignore[override]
        """The training loop that `prepare()` has made."""
        if self._prepared is None:
            raise ConfigError("the model is not sharded yet; call trainer.prepare(), train() or evaluate() first.")
        return self._prepared[0]

    def prepare(self) -> Loop:
        """Shard the model, read its weights and make the optimizer; the training loop. All ranks must call it.

        Only the first call does the work; later ones return the same loop.
        """
        if self._prepared is None:
            self._preparing = True
            try:
                self._prepared = self._prepare()
            finally:
                self._preparing = False
        return self._prepared[0]

    def _prepare(self) -> tuple[Loop, ResultWriter, Hub | None]:
        config, parts = self.args, self.parts
        steps = self.train_steps() if parts.train is not None else None
        total = total_steps(config, steps)
        boards = loggers.opener(config.report_to, config.to_dict(), config.run_name, config.logging_dir)
        reporter = Reporter(run_dir.place_of(config), total, config.progress, boards)
        first = run_dir.first_adapter(config) if parts.from_weights and run_dir.resumes(config) else None
        writer = ResultWriter(config, parts.model, parts.tokenizer, parts.own_tables, parts.from_weights, first)
        hub = Hub(config, writer, reporter.say) if config.push_to_hub else None
        samples = Samples(*self._samples, parts.model, reporter.samples) if self._samples is not None else None
        (events := self.callback_handler).own = [one for one in (reporter.events, samples, hub) if one is not None]
        events.state.log_history = reporter.history
        events.meet()
        loop = assemble.build_loop(config, parts, reporter, first, steps, self)
        events.optimizer, events.lr_scheduler = self.optimizer, self.lr_scheduler
        events.own += step_watchers(reporter.folder, loop)
        return loop, writer, hub

    # --- training ---------------------------------------------------------------------------------------------------

    def train(
        self, resume_from_checkpoint: str | bool | None = None, trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:  # fmt: skip
        """Train; returns transformers' `TrainOutput`. All ranks must call it.

        `resume_from_checkpoint` is a checkpoint's folder, or true for the newest. A second call trains from the first
        step again, with model and optimizer as they are.
        """
        if trial is not None:
            self.hyperparameter_search()
        if self.parts.train is None:
            raise ConfigError("there is no train_dataset to train on.")
        if resume_from_checkpoint:
            text = "true" if resume_from_checkpoint is True else str(resume_from_checkpoint)
            self.args = self.callback_handler.args = dataclasses.replace(self.args, resume_from_checkpoint=text)
        if self._trained and self.model_init is not None:
            self._begin_with_new_model()
        self.is_in_train, self.ignored_keys = True, ignore_keys_for_eval
        with self.own_folder() as earlier:
            loop = self.prepare()
            if self._trained:
                self._begin_again(loop, earlier.resumes)
            self.callback_handler.begin(loop.total, loop.loader, loop.reporter.history)
            if not earlier.resumes:
                agree(self._replace_earlier, "start of the run")
            try:
                return self._train(loop, earlier)
            finally:
                self.is_in_train, self._trained = False, True
                loop.reporter.close()  # whatever happened, the terminal is left in order
                if sys.exception() is not None and runtime.is_main():
                    report_run(self.args, run_dir.place_of(self.args))  # of what there is until now

    def _train(self, loop: Loop, earlier: EarlierRun) -> Any:
        from transformers.trainer_utils import TrainOutput

        assert self._prepared is not None
        self._prepared[1].keep_first()
        with self._open_checkpoints() as checkpoints:
            if earlier.resumes or run_dir.named_checkpoint(self.args) is not None:
                self._resume(loop, checkpoints, earlier)
                agree(self._write_settings, "settings of the run")
            self.began, first = time.time(), loop.progress.step
            loop.run(checkpoints)
            run_facts.write_data(self.args, self.parts, loop.streamed)
            metrics = self._closing_metrics(loop, first)
            self.log(metrics)
            self._load_best_model()
        self.callback_handler("on_train_end")
        return TrainOutput(loop.progress.step, loop.progress.mean_loss, metrics)

    def _begin_again(self, loop: Loop, resumes: bool) -> None:
        """Start a second training, with the model and the optimizer as they are and a new schedule."""
        loop.begin_again()
        if not resumes:
            on_rank_0(lambda: run_dir.remove_checkpoints(self.args), "second training")
        if self._made_schedule:
            self.lr_scheduler = None
            self.create_scheduler(loop.total)
            loop.schedule = schedule_of(self.lr_scheduler)
        self.callback_handler.lr_scheduler = self.lr_scheduler

    def _begin_with_new_model(self) -> None:
        """Start a second training with a model that `model_init` makes."""
        self.optimizer = self.lr_scheduler = None
        self.parts = assemble.gather_parts(dataclasses.replace(self._run, model=self.call_model_init()), self._say)
        self.callback_handler.model, self._prepared, self._trained = self.parts.model, None, False
        self._folder_checked = True

    @contextlib.contextmanager
    def own_folder(self) -> Iterator[EarlierRun]:
        """Lock the output folder for this run, once what it holds has been checked. Inside, it may be entered again."""
        if self._folder is not None:
            yield self._folder
            return
        locks: list[FolderLock] = []

        def lock() -> EarlierRun:
            if not self._folder_checked and not self._trained:
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
        progress.best_step = progress.best_value = self.state.best_metric = self.state.best_global_step = None

    def _write_settings(self) -> None:
        if runtime.is_main():
            run_facts.write_facts(self.args, self.parts, self._run.notes, self.loop.total, self.planned())
            # Beside the checkpoints from the start, so that they can be used before the run has ended.
            save_tokenizer(self.parts.tokenizer, run_dir.place_of(self.args))


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
    return lambda text: None if quiet or not runtime.is_main() else print_text(text)


def _set_log_level(config: SFTConfig) -> None:
    level = "warning" if config.log_level == "passive" and config.progress == "quiet" else config.log_level
    if level == "passive":
        return
    import transformers

    runtime.get_logger().setLevel(level.upper())
    if not runtime.is_main() and level in ("debug", "info"):
        level = "warning"
    getattr(transformers.logging, f"set_verbosity_{'error' if level == 'critical' else level}")()
