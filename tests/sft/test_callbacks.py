"""Callbacks beside transformers' own trainer: the events, their arguments, what callbacks ask for, what is logged."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainerControl, TrainingArguments
from transformers.trainer_callback import ExportableState

from fullshard.checkpoint.manifest import published_steps
from fullshard.config.errors import ConfigError
from fullshard.distributed import runtime
from fullshard.sft.callbacks import FLAGS
from fullshard.sft.trainer import SFTTrainer
from tests.data.tiny import make_tokenizer
from tests.pool import ranks
from tests.sft.runs import settings
from tests.sft.tiny import make_model

ROWS = [{"input_ids": list(range(3, 19)), "labels": list(range(3, 19))}] * 18
"""All alike, so that their order does not matter."""
EVENTS = [name for name in dir(TrainerCallback) if name.startswith("on_")]
RUN: dict[str, Any] = {
    "num_train_epochs": 2, "logging_steps": 2, "eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps",
    "save_steps": 3, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 4, "learning_rate": 1e-3,
    "gradient_accumulation_steps": 2, "lr_scheduler_type": "linear", "logging_first_step": True,
    "load_best_model_at_end": True,
}  # fmt: skip
TIMED = ("_runtime", "_per_second")


class Recorder(TrainerCallback):
    """Records every event."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []


def _recording(event: str) -> Any:
    def record(self: Recorder, args: Any, state: Any, control: Any, **facts: Any) -> None:
        given = sorted(name for name, value in facts.items() if value is not None)
        asked = [flag for flag in FLAGS if getattr(control, flag)]
        rate = facts["lr_scheduler"].get_last_lr()[0] if facts.get("lr_scheduler") is not None else None
        self.seen.append((event, state.global_step, state.epoch, given, asked, rate))

    return record


for _event in EVENTS:
    setattr(Recorder, _event, _recording(_event))


def theirs(folder: Path, callbacks: list[Any], rows: Any = ROWS, **changes: Any) -> Any:
    args = TrainingArguments(
        output_dir=str(folder / "theirs"), report_to="none", use_cpu=True, disable_tqdm=True, **{**RUN, **changes}
    )  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()):  # it prints what it logs
        made = Trainer(
            model=make_model(), args=args, train_dataset=rows, eval_dataset=rows[:4], callbacks=callbacks,
            processing_class=make_tokenizer(), data_collator=_collate,
        )  # fmt: skip
        made.train()
    return made


def _collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
    import torch

    return {name: torch.tensor([row[name] for row in rows]) for name in ("input_ids", "labels")}


def ours(folder: Path, callbacks: list[Any], rows: Any = ROWS, **changes: Any) -> SFTTrainer:
    config = settings(folder, **{**RUN, "max_steps": -1, **changes})
    return SFTTrainer(
        model=make_model(), args=config, train_dataset=rows, eval_dataset=rows[:4], callbacks=callbacks,
        processing_class=make_tokenizer(),
    )  # fmt: skip


@ranks(1)
def test_events_and_logs_are_those_of_transformers_trainer(tmp_path: Path) -> None:
    expected, found = Recorder(), Recorder()
    their, our = theirs(tmp_path, [expected]), ours(tmp_path, [found])
    output = our.train()
    assert len(found.seen) == len(expected.seen)
    for mine, other in zip(found.seen, expected.seen, strict=True):
        assert mine[:2] + mine[3:5] == other[:2] + other[3:5]
        assert mine[2] == pytest.approx(other[2]) and mine[5] == pytest.approx(other[5], abs=1e-12), mine
    for mine, other in zip(our.state.log_history, their.state.log_history, strict=True):
        assert mine.keys() >= other.keys()
        timed = {name for name in other if name.endswith(TIMED)}
        assert {n: mine[n] for n in other.keys() - timed} == pytest.approx(
            {n: other[n] for n in other.keys() - timed}, abs=1e-5
        )
    mine, other = vars(our.state), vars(their.state)
    for name in other.keys() - {"log_history", "best_model_checkpoint", "stateful_callbacks", "best_metric"}:
        assert mine[name] == other[name], name
    assert mine["best_metric"] == pytest.approx(other["best_metric"], abs=1e-5)
    assert mine["best_model_checkpoint"] == str(tmp_path / "out" / "checkpoints" / "step-10")
    assert output.metrics == {n: v for n, v in our.state.log_history[-1].items() if n != "step"}
    assert output.metrics["train_samples_per_second"] == pytest.approx(36 / output.metrics["train_runtime"], rel=0.1)


class Asks(TrainerCallback):
    """Asks for something at an event of a step, on one rank."""

    def __init__(self, event: str, step: int, *flags: str, rank: int = 1) -> None:
        self.step, self.flags, self.rank = step, flags, rank
        setattr(self, event, self.act)

    def act(self, args: Any, state: Any, control: Any, **facts: Any) -> Any:
        if state.global_step != self.step or runtime.rank() != self.rank:
            return None
        return TrainerControl(**dict.fromkeys(self.flags, True))  # the one that is returned counts


@ranks(2)
def test_what_one_rank_asks_for_happens_on_all(tmp_path: Path) -> None:
    plain: dict[str, Any] = {
        "eval_strategy": "no", "save_strategy": "no", "load_best_model_at_end": False, "gradient_accumulation_steps": 1,
        "logging_steps": 100, "logging_first_step": False,
    }  # fmt: skip
    made = ours(tmp_path / "saved", [Asks("on_step_end", 2, "should_save", "should_evaluate", "should_log")], **plain)
    made.train()
    assert [r["step"] for r in made.state.log_history] == [2, 2, 10, 10]
    assert "loss" in made.state.log_history[0] and "eval_loss" in made.state.log_history[1]
    assert published_steps(tmp_path / "saved" / "out" / "checkpoints") == [2]
    stopped = ours(
        tmp_path / "stopped",
        [Asks("on_evaluate", 2, "should_training_stop")],
        **{**plain, "eval_strategy": "steps", "eval_steps": 1},
    )
    assert stopped.train().global_step == 2
    # The first epoch of five steps ends after three: two epochs are eight steps.
    shorter = ours(tmp_path / "shorter", [Asks("on_step_end", 3, "should_epoch_stop")], **plain)
    recorder = Recorder()
    shorter.add_callback(recorder)
    assert shorter.train().global_step == 8 and shorter.loop.progress.passed_over == 2
    epochs = [(seen[0], seen[1]) for seen in recorder.seen if "epoch" in seen[0]]
    assert epochs == [("on_epoch_begin", 0), ("on_epoch_end", 3), ("on_epoch_begin", 3), ("on_epoch_end", 8)]
    assert shorter.state.epoch == 2.0
    alone = ours(tmp_path / "alone", [Recorder()] if runtime.is_main() else [], **plain)  # not every rank has one
    if not runtime.is_main():
        alone.add_callback(Asks("on_step_end", 2, "should_training_stop"))
    assert alone.train().global_step == 2
    between = ours(
        tmp_path / "between",
        [Asks("on_substep_end", 1, "should_training_stop")],
        **{**plain, "gradient_accumulation_steps": 2},
    )
    assert between.train().global_step == 1, "the second step is not taken"


@ranks(1)
def test_early_stopping_stops_at_the_step_of_transformers_trainer(tmp_path: Path) -> None:
    """A learning rate that ruins the model after a while."""
    changes: dict[str, Any] = {
        "eval_steps": 1, "save_steps": 1, "learning_rate": 0.3, "num_train_epochs": 6, "gradient_accumulation_steps": 1,
        "warmup_steps": 20, "metric_for_best_model": "eval_loss", "greater_is_better": False,
    }  # fmt: skip
    callbacks = lambda: [EarlyStoppingCallback(2, 0.01)]  # noqa: E731
    their, our = theirs(tmp_path, callbacks(), **changes), ours(tmp_path, callbacks(), **changes)
    assert our.train().global_step == their.state.global_step < our.state.max_steps
    assert our.state.best_global_step == their.state.best_global_step
    assert our.state.stateful_callbacks.keys() == their.state.stateful_callbacks.keys()


class Counts(TrainerCallback, ExportableState):
    """Counts steps, over a resume too."""

    def __init__(self, start: int = 0) -> None:
        self.start, self.steps = start, 0

    def on_step_end(self, args: Any, state: Any, control: Any, **facts: Any) -> None:
        self.steps += 1

    def state(self) -> dict[str, Any]:
        return {"args": {"start": self.start}, "attributes": {"steps": self.steps}}


@pytest.mark.slow
@ranks(2)
def test_a_resumed_run_has_the_state_of_the_one_before(tmp_path: Path) -> None:
    steps: dict[str, Any] = {"gradient_accumulation_steps": 1, "max_steps": 10, "lr_scheduler_type": "constant"}
    whole = ours(tmp_path / "whole", [Counts()], **steps)
    whole.train()
    part = ours(tmp_path / "part", [Counts()], **{**steps, "max_steps": 6})
    part.train()
    resumed = ours(tmp_path / "part", [rest := Counts()], **steps)
    resumed.train(resume_from_checkpoint=True)
    assert rest.steps == 10 and rest in resumed.callback_handler.callbacks
    for name in ("global_step", "epoch", "total_flos", "best_metric", "best_global_step", "stateful_callbacks"):
        assert getattr(resumed.state, name) == getattr(whole.state, name), name
    logged = [[(r["step"], r["loss"]) for r in t.state.log_history if "loss" in r] for t in (whole, resumed)]
    assert logged[0] == logged[1], "on every rank"


@ranks(1)
def test_callbacks_are_added_and_removed(tmp_path: Path) -> None:
    made = ours(tmp_path, [Recorder])
    own = made.callback_handler.callbacks[-1]
    assert isinstance(own, Recorder) and own.seen[0][0] == "on_init_end"
    assert made.pop_callback(EarlyStoppingCallback) is None
    made.add_callback(stops := EarlyStoppingCallback())
    assert made.pop_callback(EarlyStoppingCallback) is stops
    made.remove_callback(Recorder)
    assert own not in made.callback_handler.callbacks
    with pytest.raises(ConfigError, match="not one of the trainer's callbacks"):
        made.remove_callback(own)


@ranks(1)
def test_a_short_run_has_as_many_log_lines_as_steps(tmp_path: Path) -> None:
    """Where `logging_steps` is open; evaluations come as before."""
    open_to_choice = {"logging_steps": None, "max_steps": 18, "eval_steps": None, "save_strategy": "no"}
    changes = {**RUN, **open_to_choice, "load_best_model_at_end": False}
    trainer = SFTTrainer(
        model=make_model(), args=settings(tmp_path, **changes), train_dataset=ROWS, eval_dataset=ROWS[:4],
        tokenizer=make_tokenizer(),
    )  # fmt: skip
    trainer.train()
    lines = trainer.state.log_history
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 19))
    assert [line["step"] for line in lines if "eval_loss" in line] == [10, 18]
