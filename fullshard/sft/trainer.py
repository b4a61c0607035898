"""Supervised fine-tuning: `SFTTrainer`, which scripts use, and `train_run`, which `fullshard sft` calls.

The trainer has the names of TRL's and transformers' trainers, so a script keeps working when its imports change. How a
run is put together is in `assemble.py`, training itself in `loop.py`; here is what happens before and after.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fullshard.config.errors import ConfigError
from fullshard.config.paths import refuse_inputs
from fullshard.data.prepared_rows import prepared_rows
from fullshard.distributed import runtime
from fullshard.distributed.ranks import agree, on_rank_0
from fullshard.distributed.terminal_text import print_text
from fullshard.models.causal_lm import get_causal_lm
from fullshard.models.router_loss import has_router_loss
from fullshard.parallel.settings import EngineSettings
from fullshard.report import loggers
from fullshard.report.reporter import Reporter
from fullshard.report.step_record import step_watchers
from fullshard.sft import assemble, output_dir, results
from fullshard.sft.batches import total_steps
from fullshard.sft.callbacks import Callbacks, with_best_metric
from fullshard.sft.checked_run import CheckedRun, check_script
from fullshard.sft.evaluation import Evaluation
from fullshard.sft.hub import Hub
from fullshard.sft.loop import Loop, LoopFunctions
from fullshard.sft.optimizer import class_and_options, schedule_of
from fullshard.sft.optimizer_step import StepFunctions
from fullshard.sft.overrides import Calls, check_subclass, missing_attribute, with_methods
from fullshard.sft.results import ResultWriter, write_run_report
from fullshard.sft.run_folder import EarlierRun, RunFolder, write_data, write_run
from fullshard.sft.samples import Samples, choose_samples
from fullshard.sft.saving import CheckpointSaver
from fullshard.sft.script_methods import Accelerator, AcceleratorState, Plugin, ScriptMethods
from fullshard.sft.sft_config import SFTConfig
from fullshard.sft.trainer_context import Parts, ShardedRun, Shared, TrainerContext, TrainerFunctions
from fullshard.sft.training_arguments import quantization_settings
from fullshard.sft.training_step import Optimizers, TrainingStep


@with_methods(
    step=TrainingStep, optimizers=Optimizers, evaluation=Evaluation, saver=CheckpointSaver, script=ScriptMethods
)
class SFTTrainer:
    """Fine-tunes a causal language model, fully sharded over the launched ranks. Every rank makes one.

    `model` is a name or folder (each rank then reads its own slices only), a model, or a `PeftModel`. `args` is an
    `SFTConfig`, transformers' `TrainingArguments`, TRL's `SFTConfig` or a dict. Data sets are lists of rows, data sets
    of `datasets`, or files; `data/row_formats.py` lists the row formats. Everything is checked here, once; the model is
    sharded and its weights are read by `prepare()`, which `train()` and `evaluate()` call.

    Methods may be overridden as with transformers' trainer. `overrides.METHODS` names the part that implements each;
    overriding one that is not called is an error of the class.
    """

    _tag_names: Sequence[str] = ("fullshard", "sft", "trl")
    """Tags of the model card."""
    loss_is_scaled_for_ga: bool | None = None
    """Whether an overridden `compute_loss` has divided by all tokens of the step; None decides as transformers does."""
    model_init: Callable[..., Any] | None = None

    args, parts, callback_handler, estimate = Shared(), Shared(), Shared("events"), Shared()
    data_collator, compute_loss_func, compute_metrics = Shared(), Shared(), Shared()
    preprocess_logits_for_metrics, optimizer_cls_and_kwargs = Shared(), Shared()
    optimizer, lr_scheduler = Shared(), Shared()
    is_in_train, current_flos, current_gradient_accumulation_steps = Shared(), Shared(), Shared()

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
        if data_collator is not None and run.config.keeps_apart:
            raise ConfigError(
                "data_collator: packed rows are collated by the trainer, so that documents stay apart; leave packing "
                "(padding_free, eval_packing) out, or the collator."
            )
        self._start(
            run, callbacks or (), formatting_func=formatting_func, data_collator=data_collator,
            compute_loss_func=compute_loss_func, compute_metrics=compute_metrics,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics, optimizer=optimizers[0],
            lr_scheduler=optimizers[1], optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
        )  # fmt: skip

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        check_subclass(cls, SFTTrainer)

    def __getattr__(self, name: str) -> Any:
        raise missing_attribute(self, name)

    @classmethod
    def from_checked(cls, run: CheckedRun) -> SFTTrainer:
        """The trainer of a run that has been checked."""
        trainer = cls.__new__(cls)
        trainer._start(run)
        return trainer

    def _start(self, run: CheckedRun, callbacks: Sequence[Any] = (), **script: Any) -> None:
        config, say = with_best_metric(run.config), _printer(run.config.progress)
        self._run = run
        _set_log_level(config)
        for note in run.notes:
            say(f"note: {note}")
        parts = assemble.gather_parts(run, say)
        if hasattr(inner := get_causal_lm(parts.model), "add_model_tags"):
            inner.add_model_tags(list(self._tag_names))
        inputs = _with_downloads(run, config, parts)
        self._samples = choose_samples(config, parts.model, parts.evaluation, parts.tokenizer)
        events = Callbacks(config, [*loggers.callbacks(config.report_to), *callbacks])
        events.model, events.processing_class = parts.model, parts.tokenizer
        self._make_parts(TrainerContext(config, parts, events, say, inputs, **script), run.engine)
        self._folder = RunFolder(inputs, say, checked=run.folder_checked)
        self._loop: Loop | None = None
        self._preparing = self._trained = False
        events.meet()
        events("on_init_end")

    def _make_parts(self, context: TrainerContext, engine: EngineSettings) -> None:
        """Make the parts that implement this trainer's methods; they call each other by way of `Calls`."""
        calls = self._calls = Calls(self)
        self._context = context
        plugin = Plugin(engine.strategy, engine.offload_params, engine.saved_as)
        state = AcceleratorState(plugin, mixed_precision=engine.mixed_precision)
        self.accelerator, self.is_fsdp_enabled = Accelerator(state, context.micro, calls.prepare), True
        self._step = TrainingStep(context, calls, lambda loss: self.accelerator.backward(loss))  # may be replaced
        self._optimizers = Optimizers(context, calls)
        self._evaluation = Evaluation(context, calls, self._step.evaluation_loader)
        self._saver = CheckpointSaver(context, calls)
        self._script = ScriptMethods(context, calls)

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
    def eval_dataset(self) -> Any:
        """The rows of the evaluation data, or of each set by name, read like a `datasets.Dataset`."""
        return self._evaluation.dataset

    @property
    def state(self) -> Any:
        """The progress of the run, as transformers' `TrainerState`."""
        return self.callback_handler.state

    @property
    def control(self) -> Any:
        """What the callbacks ask for, as transformers' `TrainerControl`."""
        return self.callback_handler.control

    @property
    def model_accepts_loss_kwargs(self) -> bool:
        """Whether the model's own loss takes the number of tokens to divide by."""
        return self._step.model_accepts_loss_kwargs

    @property
    def aux_loss_enabled(self) -> bool:
        """Whether the loss has the auxiliary loss of a mixture of experts."""
        return has_router_loss(self.parts.model)

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: SFTConfig, model: Any = None) -> tuple[Any, dict[str, Any]]:
        """The class and the options of the optimizer that the settings name."""
        return class_and_options(args)

    def call_model_init(self, trial: Any = None) -> Any:
        """A model from `model_init`, with the run's seed."""
        assert self.model_init is not None
        takes_trial = inspect.signature(self.model_init).parameters
        model = self.model_init(trial) if takes_trial else self.model_init()
        if model is None:
            raise ConfigError("model_init returned None; expected a model.")
        return model

    @property
    def loop(self) -> Loop:
        """The training loop; an error before `prepare()`."""
        _ = self._context.run  # an error if there is none
        assert self._loop is not None
        return self._loop

    def prepare(self) -> Loop:
        """Shard the model, read its weights and make the optimizer; the training loop. All ranks must call it.

        Only the first call does the work; later ones return the same loop.
        """
        if self._context.sharded is None:
            self._preparing = True
            try:
                self._loop, self._context.sharded = self._prepare()
            finally:
                self._preparing = False
        return self.loop

    def _prepare(self) -> tuple[Loop, ShardedRun]:
        config, parts, events = self.args, self.parts, self.callback_handler
        steps = self._step.train_steps() if parts.train is not None else None
        boards = loggers.opener(config.report_to, config.to_dict(), config.run_name, config.logging_dir)
        reporter = Reporter(output_dir.output_path(config), total_steps(config, steps), config.progress, boards)
        first = output_dir.first_adapter(config) if parts.from_weights and output_dir.resumes(config) else None
        writer = ResultWriter(config, parts.model, parts.tokenizer, parts.own_tables, parts.from_weights, first)
        hub = Hub(config, writer, reporter.say) if config.push_to_hub else None
        samples = Samples(self._samples, parts.model, reporter.samples) if self._samples is not None else None
        events.own = [one for one in (reporter.events, samples, hub) if one is not None]
        events.state.log_history = reporter.history
        events.meet()
        loop, self.estimate = assemble.build_loop(config, parts, reporter, first, steps, self._functions())
        events.optimizer, events.lr_scheduler = self.optimizer, self.lr_scheduler
        events.own += step_watchers(reporter.folder, loop.model, loop.optimizer, lambda: loop.activations.is_settled)
        return loop, ShardedRun(
            loop.state, loop.head, loop.steps.isolate_documents, loop.snapshot, reporter, writer, hub
        )

    def _functions(self) -> TrainerFunctions:
        """What the run calls of this trainer, with a script's overrides."""
        calls, step, evaluation = self._calls, self._step, self._evaluation
        return TrainerFunctions(
            self._context.micro, self.callback_handler,
            StepFunctions(
                step.num_items, calls.training_step, calls.floating_point_ops, calls._clip_grad_norm, step.add_flos
            ),
            LoopFunctions(
                step.count_tokens, evaluation.evaluate_in_training, evaluation.is_best, self._saver.save_in_training,
                step.log_in_training,
            ),
            calls.store_flos, self._optimizers.make, self._optimizers.are_own, step.is_own_loss,
        )  # fmt: skip

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
        self.is_in_train, self._context.ignored_keys = True, ignore_keys_for_eval
        with self._folder.locked(self.args) as earlier:
            loop = self.prepare()
            if self._trained:
                self._begin_again(loop, earlier.resumes)
            self.callback_handler.begin(loop.total, loop.loader, loop.reporter.history)
            if not earlier.resumes:
                self._folder.replace_earlier(self.args, self._write_run)
            try:
                return self._train(loop, earlier)
            finally:
                self.is_in_train, self._trained, self._folder.is_own = False, True, True
                loop.reporter.close()  # whatever happened, the terminal is left in order
                if sys.exception() is not None and runtime.is_main():
                    write_run_report(self.args, output_dir.output_path(self.args))  # of what there is until now

    def _train(self, loop: Loop, earlier: EarlierRun) -> Any:
        from transformers.trainer_utils import TrainOutput

        self._context.run.writer.keep_first()
        with self._saver.open_checkpoints() as checkpoints:
            if earlier.resumes or output_dir.named_checkpoint(self.args) is not None:
                self._folder.resume(self.args, loop, checkpoints, earlier)
                agree(self._write_run, "settings of the run")
            self._context.began, first = time.time(), loop.progress.step
            loop.run(checkpoints)
            write_data(self.args, self.parts, loop.streamed)
            metrics = self._evaluation.closing_metrics(first, loop.total)
            self.log(metrics)
            self._load_best_model()
        self.callback_handler("on_train_end")
        return TrainOutput(loop.progress.step, loop.progress.mean_loss, metrics)

    def _write_run(self) -> None:
        write_run(self.args, self.parts, self._run.notes, self.loop.total, self.estimate)

    def _begin_again(self, loop: Loop, resumes: bool) -> None:
        """Start a second training, with the model and the optimizer as they are and a new schedule."""
        loop.begin_again()
        if not resumes:
            on_rank_0(lambda: output_dir.remove_checkpoints(self.args), "second training")
        if self._optimizers.made_schedule:
            self.lr_scheduler = None
            self.create_scheduler(loop.total)
            loop.state.schedule = schedule_of(self.lr_scheduler)
        self.callback_handler.lr_scheduler = self.lr_scheduler

    def _begin_with_new_model(self) -> None:
        """Start a second training with a model that `model_init` makes."""
        self.optimizer = self.lr_scheduler = None
        self.parts = assemble.gather_parts(
            dataclasses.replace(self._run, model=self.call_model_init()), self._context.say
        )
        self.callback_handler.model, self._context.sharded, self._trained = self.parts.model, None, False

    def locked_folder(self) -> contextlib.AbstractContextManager[Any]:
        """Lock the output folder for this run, once its contents have been checked."""
        return self._folder.locked(self.args)

    def summary(self) -> results.Summary:
        """The outcome of the run so far."""
        return self._saver.summary()


def train_run(run: CheckedRun) -> None:
    """Train a checked run, save its result and print where everything is: what `fullshard sft` does on each rank."""
    if not run.folder_checked:
        assemble.join_ranks(run.engine)
        on_rank_0(functools.partial(output_dir.check_output_dir, run.config, run.inputs), "output directory")
        run = dataclasses.replace(run, folder_checked=True)
    trainer = SFTTrainer.from_checked(run)
    with trainer.locked_folder():  # until the result is written
        trainer.train()
        trainer.save_model()
    if trainer.loop.reporter.mode not in ("quiet", "json"):
        results.show_results(trainer.summary())


def _with_downloads(run: CheckedRun, config: SFTConfig, parts: Parts) -> dict[str, list[Path]]:
    """The paths that the run reads, with those of downloaded models; refuses to write over the latter."""
    downloads = {"model_name_or_path": parts.base, "adapter_name_or_path": parts.adapter}
    resolved = {name: [place] for name, place in downloads.items() if place is not None}
    if run.train is not None:
        new = {name: places for name, places in resolved.items() if name not in run.inputs}
        refuse_inputs(output_dir.output_path(config), "output_dir", new)
    return {**{name: list(paths) for name, paths in run.inputs.items()}, **resolved}


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
