"""Supervised fine-tuning: `SFTTrainer`, which scripts use, and `run`, which `fullshard sft` calls.

The trainer has the names of TRL's and transformers' trainers, so a script keeps working when its imports change. What
it does is in `assemble.py` (what a run is made of) and `loop.py` (training); here is what happens before and after.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fullshard import runtime
from fullshard.data.find import source_of
from fullshard.data.once import agree
from fullshard.data.sources import Source, hold_back, row_source
from fullshard.errors import ConfigError
from fullshard.train import assemble, boards, folder, results
from fullshard.train.accelerator import Accelerator, Plugin, State
from fullshard.train.adapter import lora_config
from fullshard.train.arguments import check_model_folder, check_paths
from fullshard.train.batches import total_steps
from fullshard.train.callbacks import Callbacks, TrainerState
from fullshard.train.config import SFTConfig
from fullshard.train.engine import resolved_launch
from fullshard.train.given import config_of
from fullshard.train.hub import Hub
from fullshard.train.loop import Loop
from fullshard.train.metrics import Reporter
from fullshard.train.samples import Samples
from fullshard.train.start import starting_point
from fullshard.weights.checkpoint import CheckpointManager


class TrainOutput(NamedTuple):
    global_step: int
    training_loss: float
    metrics: dict[str, float]


class SFTTrainer:
    """Fine-tunes a causal language model, fully sharded over the launched ranks. Every rank makes one.

    `model` is a name or folder (each rank then reads its own slices only), a model, or a `PeftModel`. `args` is an
    `SFTConfig`, transformers' `TrainingArguments`, TRL's `SFTConfig` or a dict. Data sets are lists of rows, data sets
    of `datasets`, or files; `data/formats.py` says which rows are understood.
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
            peft_config = lora_config(self.args)
        if peft_config is not None and (hasattr(model, "peft_config") or earlier is not None):
            raise ConfigError("the model has an adapter already, and peft_config asks for another; leave one out.")
        self._say: Callable[[str], None] = _speaker(self.args.progress)
        _set_log_level(self.args)
        train, evaluation = (
            None if data is None else _source(data, name, formatting_func, self.args.dataset_text_field)
            for data, name in ((train_dataset, "train_dataset"), (eval_dataset, "eval_dataset"))
        )
        if train is None and evaluation is None:
            raise ConfigError("there is no data: give train_dataset= (and eval_dataset=).")
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
            self.args, engine, model, processing_class if processing_class is not None else tokenizer, train,
            evaluation, peft_config, self._say,
        )  # fmt: skip
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
            place = Path(self.args.output_dir).expanduser()
            reporter = Reporter(place, total, self.args.progress, boards.opener(self.args))
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
        earlier = self._open_folder()
        loop = self.loop
        loop.config = self.args
        with assemble.open_checkpoints(self.args, loop) as manager:
            loop.manager = manager
            self._resume(manager, earlier)
            agree(self._write_settings)
            self._callbacks("on_train_begin", step=loop.progress.step)
            loop.run()
            self._load_best(manager)
            loop.manager = None
        self._callbacks("on_train_end", step=loop.progress.step)
        loop.reporter.close()
        self._update_state()
        losses = [r["loss"] for r in self.state.log_history if r.get("loss") is not None]
        last: dict[str, Any] = next((r for r in reversed(self.state.log_history) if "loss" in r), {})
        return TrainOutput(loop.progress.step, sum(losses) / max(1, len(losses)), dict(last))

    def evaluate(self, eval_dataset: Any = None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Metrics on the evaluation data, before or after training. All ranks must call it."""
        table = self.parts.evaluation
        if eval_dataset is not None:
            source = source_of(eval_dataset, "eval_dataset")
            table = assemble.table_of(self.parts, "evaluation", source, self._say)
        if table is None:
            raise ConfigError("there is no eval_dataset to evaluate on.")
        return self.loop.evaluate(table, metric_key_prefix)

    def _open_folder(self) -> dict[str, Any] | None:
        """Check and prepare the output folder; the settings of the run that is gone on with."""

        def check() -> dict[str, Any] | None:
            if not runtime.is_main():
                return None
            folder.check_folder(self.args)
            folder.prepare_folder(self.args)
            return folder.read_settings(Path(self.args.output_dir).expanduser())

        return agree(check)[0]

    def _resume(self, manager: CheckpointManager, earlier: dict[str, Any] | None) -> None:
        wanted = (self.args.resume_from_checkpoint or "").strip()
        explicit = wanted.lower() not in ("", "true", "yes", "false", "no", "none")
        if not folder.resumes(self.args):
            return
        if explicit and not folder.restarted():
            self.accelerator.load_state(wanted)
        elif manager.latest() is None:
            if not folder.restarted():
                raise ConfigError(f"there is no checkpoint in {manager.path} to resume from; leave --resume out.")
            self._say("started again before the first checkpoint: beginning anew")
            return
        else:
            self.loop.restore(manager, None)
        self._say(f"resumed at step {self.loop.progress.step} of {self.loop.total}")
        if not runtime.is_main() or earlier is None:
            return
        if (found := folder.describe_changes(earlier, self.args)).startswith("Changed"):
            runtime.get_logger().warning("resumed with other settings. %s", found)

    def _write_settings(self) -> None:
        if runtime.is_main():
            engine = self.parts.engine
            facts = {"engine": engine.describe(), "launch": resolved_launch(), "ranks": runtime.world_size()}
            folder.write_settings(self.args, {**facts, "versions": results.versions()})
            # Beside the checkpoints from the start, so that they can be used before the run has ended.
            self.parts.tokenizer.save_pretrained(Path(self.args.output_dir).expanduser())

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

    # --- results ----------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None) -> None:
        """Write the model (or adapter) with its tokenizer, card and report, as transformers and peft read them.

        Whole values are written whatever the state-dict type is. All ranks must call it.
        """
        place = Path(output_dir or self.args.output_dir).expanduser()
        loop = self.loop
        self._update_state()
        results.export(loop.model, self.parts, self.args, place)
        results.describe(self, place)

    def save_state(self) -> None:
        """Save a checkpoint of where the run stands."""
        with assemble.open_checkpoints(self.args, self.loop) as manager:
            if self.loop.progress.step not in manager.all_steps():
                manager.save(self.loop.progress.step, self.loop.state(), force=True)


def run(config: SFTConfig, notes: Sequence[str] = ()) -> None:
    """What `fullshard sft` does: build a trainer from files, train, save, say where everything is."""
    data = check_paths(config)
    if runtime.rank() == 0:
        folder.check_folder(config)
    say = _speaker(config.progress)
    for note in notes:
        say(f"note: {note}")
    trainer = SFTTrainer(
        model=config.model_name_or_path,
        args=config,
        train_dataset=data.train,
        eval_dataset=data.evaluation,
    )
    trainer.train()
    trainer.save_model()
    results.show(trainer)


def _source(data: Any, name: str, formatting: Callable[[Any], str] | None, text_field: str) -> Source:
    if formatting is None:
        return source_of(data, name)
    return row_source([{text_field: formatting(row)} for row in data], name)


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
