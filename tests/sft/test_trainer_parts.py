"""The parts of a trainer by themselves, without a trainer, a loop or each other; and the loop without a trainer."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import Trainer

from fullshard.config.errors import ConfigError, TrainingError
from fullshard.data.loader import GlobalBatch, Step
from fullshard.report.reporter import Window
from fullshard.sft import evaluation, hub, loop, optimizer_step, saving, training_state
from fullshard.sft.evaluation import Evaluation
from fullshard.sft.loop import DataSteps
from fullshard.sft.overrides import Calls, is_overridden
from fullshard.sft.run_folder import RunFolder
from fullshard.sft.saving import CheckpointSaver
from fullshard.sft.trainer import SFTTrainer
from fullshard.sft.trainer_context import ShardedRun, TrainerContext
from fullshard.sft.training_state import MicroBatch, Progress
from tests.pool import ranks
from tests.sft.runs import settings


class NoTrainer:
    """Stands for a trainer in `Calls`: nothing is overridden, and a call is an error."""


class Events:
    """Stands for the callbacks."""

    def __init__(self) -> None:
        self.state = SimpleNamespace(best_metric=None, best_global_step=None, best_model_checkpoint=None)
        self.control = SimpleNamespace(should_training_stop=False)
        self.seen: list[str] = []

    def __call__(self, event: str, **facts: Any) -> None:
        self.seen.append(event)


def context(folder: Path, **changes: Any) -> TrainerContext:
    """Settings and a sharded run whose model is a small layer."""
    made = TrainerContext(settings(folder, **changes), Any, Events(), lambda text: None, {})  # type: ignore[arg-type]
    model = torch.nn.Linear(2, 1, bias=False)
    model.config = SimpleNamespace(keys_to_ignore_at_inference=[])  # type: ignore[assignment]
    state: Any = SimpleNamespace(progress=Progress(step=1), model=model, window=Window())
    made.sharded = ShardedRun(
        state, SimpleNamespace(entropy=False), lambda batch: contextlib.nullcontext(),  # type: ignore[arg-type]
        lambda: {"model": model, "progress": {"step": state.progress.step}}, None, None, None,  # type: ignore[arg-type]
    )  # fmt: skip
    return made


# --- evaluation -----------------------------------------------------------------------------------------------------


@ranks(1)
def test_the_best_evaluation_is_chosen_without_a_trainer(tmp_path: Path) -> None:
    shared = context(tmp_path, early_stopping_patience=2, eval_strategy="steps", save_strategy="steps", eval_steps=1)
    part = Evaluation(shared, Calls(NoTrainer()), lambda table: None)
    gains = [part._determine_best_metric({"eval_loss": loss}, None) for loss in (3.0, 2.0, 2.5, 2.2)]
    assert gains == [True, True, False, False]
    assert shared.run.state.progress.best_value == shared.events.state.best_metric == 2.0
    assert shared.events.control.should_training_stop
    with pytest.raises(TrainingError, match="there is no eval_loss; evaluation has other"):
        part._determine_best_metric({"other": 1.0}, None)


@ranks(1)
def test_a_pass_weights_batches_by_their_trained_tokens(tmp_path: Path) -> None:
    """With functions in the place of the loss: the mean over all labels, and the predictions in the order of rows."""
    shared, calls = context(tmp_path), Calls(NoTrainer())
    shared.compute_metrics = lambda predictions: {"rows": len(predictions.predictions)}
    rows = [{"labels": torch.tensor([0, i, i])} for i in range(1, 6)]
    for row in rows[:2]:
        row["labels"][1] = -100

    def predict(model: Any, batch: Any, loss_only: bool, ignore_keys: Any = None) -> Any:
        labels = batch["labels"]
        return labels[:, 1:][labels[:, 1:] != -100].double().mean(), labels.float(), labels

    calls.prediction_step = predict
    output = Evaluation(shared, calls, lambda table: None).evaluation_loop(DataLoader(rows, 2), "", False)  # type: ignore[arg-type]
    trained = torch.cat([row["labels"][1:][row["labels"][1:] != -100] for row in rows])
    assert output.metrics == pytest.approx({"eval_loss": float(trained.double().mean()), "eval_rows": 5})
    assert output.predictions[:, 2].tolist() == [1, 2, 3, 4, 5] and output.num_samples == 5
    assert shared.events.seen == ["on_prediction_step"] * 3  # type: ignore[attr-defined]


# --- saving ---------------------------------------------------------------------------------------------------------


@ranks(1)
def test_checkpoints_are_saved_and_the_best_one_restored_without_a_trainer(tmp_path: Path) -> None:
    shared = context(tmp_path, load_best_model_at_end=True, eval_strategy="steps", save_strategy="steps", save_steps=10)
    part, run = CheckpointSaver(shared, Calls(NoTrainer())), shared.run
    progress, weight = run.state.progress, run.state.model.weight
    with part.open_checkpoints() as checkpoints:
        for step in (1, 2):
            progress.step = step
            weight.data.fill_(step)
            if step == 1:
                progress.best_step, progress.best_value = 1, 0.5
            part._save_checkpoint(None)
        assert checkpoints.all_steps() == [1, 2]
        assert shared.events.state.best_model_checkpoint == str(tmp_path / "out" / "checkpoints" / "step-1")
        part._load_best_model()
    assert weight.tolist() == [[1.0, 1.0]]


@ranks(1)
def test_nothing_is_restored_where_no_evaluation_was_the_best(tmp_path: Path) -> None:
    shared = context(tmp_path)
    CheckpointSaver(shared, Calls(NoTrainer()))._load_best_model()
    shared.sharded = None
    with pytest.raises(ConfigError, match="the model is not sharded yet"):
        CheckpointSaver(shared, Calls(NoTrainer()))._load_best_model()


# --- the output folder ----------------------------------------------------------------------------------------------


@ranks(1)
def test_a_folder_is_checked_once_and_locked_until_the_last_one_leaves(tmp_path: Path) -> None:
    config = settings(tmp_path)
    folder, lines = RunFolder({}, lambda line: None, checked=False), list[str]()
    with folder.locked(config) as earlier:
        assert not earlier.resumes and earlier.settings is None and (tmp_path / "out" / ".lock").exists()
        folder.replace_earlier(config, lambda: lines.append("written"))
        (tmp_path / "out" / "metrics.jsonl").write_text("{}")
        with folder.locked(config) as again:
            assert again is earlier
        assert (tmp_path / "out" / ".lock").exists()
    assert lines == ["written"] and not (tmp_path / "out" / ".lock").exists()
    with pytest.raises(ConfigError, match="is not empty"), folder.locked(config):
        pass
    folder.is_own = True
    with folder.locked(config):
        pass


# --- the loop -------------------------------------------------------------------------------------------------------


class ThreeStepEpochs:
    """Stands for a data loader: step numbers in epochs of three."""

    steps_per_epoch, batch = 3, 1

    def steps(self, start: int, end: int, position: Any = None) -> Generator[Step, None, None]:
        for number in range(start, end):
            yield Step(GlobalBatch(number, None, None, 1, 1, (number + 1) / 3, number % 3 == 2), [[0]], [{}])  # type: ignore[arg-type]

    def next_epoch(self, pick: GlobalBatch) -> tuple[None, int]:
        return None, -(pick.number + 1) % 3


def numbers(total: int, *, leave: int | None = None, taken: bool = True, **progress: Any) -> list[int]:
    """The step numbers of the data that a run trains on, where its epoch ends early at step `leave`."""
    seen, made = list[int](), Progress(**progress)
    with contextlib.closing(DataSteps(ThreeStepEpochs(), made, total)) as data:  # type: ignore[arg-type]
        for step in data:
            seen.append(step.pick.number)
            made.step += step.pick.number != leave or taken
            if step.pick.number == leave:
                data.skip_epoch(step, taken)
    return seen


def test_an_epoch_that_ends_early_leaves_its_other_steps_out() -> None:
    assert numbers(5) == [0, 1, 2, 3, 4]
    assert numbers(5, step=2) == [2, 3, 4]
    assert numbers(7, leave=3) == [0, 1, 2, 3, 6, 7, 8]
    assert numbers(7, leave=3, taken=False) == [0, 1, 2, 3, 6, 7, 8]
    assert numbers(6, leave=0) == [0, 3, 4, 5]


@ranks(1)
def test_a_micro_batch_that_stands_in_has_no_gradient_and_fp16_s_scale_is_applied(tmp_path: Path) -> None:
    micro, weight = MicroBatch(), torch.ones(2, requires_grad=True)
    for scale, stands_in, expected in ((1.0, False, 3.0), (4.0, False, 12.0), (4.0, True, 0.0)):
        micro.scale, micro.stands_in, weight.grad = scale, stands_in, None
        micro.backward((3 * weight).sum())
        assert weight.grad is not None and weight.grad.tolist() == [expected] * 2
    micro.measured += 1
    assert micro.take_measured().tolist() == [1.0] * 4 and micro.take_measured().tolist() == [0.0] * 4


# --- methods --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["training_step", "compute_loss", "evaluate", "predict", "evaluation_loop", "prediction_step", "log"]
)
def test_a_method_has_the_arguments_of_transformers_trainer(name: str) -> None:
    ours, theirs = (list(inspect.signature(getattr(kind, name)).parameters) for kind in (SFTTrainer, Trainer))
    assert ours == theirs and getattr(SFTTrainer, name).__doc__


def test_calls_reach_an_override_that_is_set_later_and_refuse_names_outside_the_table() -> None:
    trainer = SFTTrainer.__new__(SFTTrainer)
    calls = Calls(trainer)
    assert not calls.is_overridden("log") and not calls.batches_are_seen
    trainer.log = lambda logs, start_time=None: logs["loss"]
    trainer.compute_loss = lambda *args, **options: 7
    assert calls.log({"loss": 2.0}) == 2.0 and calls.compute_loss() == 7
    assert calls.is_overridden("log", "evaluate") and calls.batches_are_seen and is_overridden(trainer, "log")
    with pytest.raises(AttributeError, match="_inner_training_loop is no row of METHODS"):
        _ = calls._inner_training_loop


@pytest.mark.parametrize("module", [loop, optimizer_step, training_state, hub])
def test_the_loop_never_sees_the_trainer(module: Any) -> None:
    assert not imports_of(module) & {"trainer", "overrides", "trainer_context", "assemble"}


@pytest.mark.parametrize("module", [evaluation, saving])
def test_parts_never_see_the_loop_or_the_trainer(module: Any) -> None:
    assert not imports_of(module) & {"trainer", "loop", "optimizer_step", "assemble"}


def imports_of(module: Any) -> set[str]:
    """The modules of the room that a module imports."""
    lines = inspect.getsource(module).splitlines()
    names = {line.split()[1].removeprefix("fullshard.sft.") for line in lines if line.startswith("from fullshard.sft.")}
    assert names
    return names
