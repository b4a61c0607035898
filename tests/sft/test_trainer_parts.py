"""The parts of a trainer by themselves, and the loop without a trainer."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer

from fullshard.config.errors import ConfigError, TrainingError
from fullshard.sft import hub, loop, micro_batch, optimizer_step, training_state
from fullshard.sft.evaluation import Evaluation
from fullshard.sft.micro_batch import MicroBatch
from fullshard.sft.overrides import Calls, overridden
from fullshard.sft.saving import CheckpointSaver
from fullshard.sft.trainer import SFTTrainer
from fullshard.sft.trainer_context import TrainerContext
from tests.pool import ranks
from tests.sft.runs import settings


class NoTrainer:
    """Stands for a trainer in `Calls`: nothing is overridden, and a call is an error."""


class Events:
    """Stands for the callbacks."""

    def __init__(self) -> None:
        self.state = type("State", (), {"best_metric": None, "best_global_step": None})()
        self.control = type("Control", (), {"should_training_stop": False})()


def context(folder: Path, **changes: Any) -> TrainerContext:
    made = TrainerContext(settings(folder, **changes), Any, Events(), lambda text: None, {})  # type: ignore[arg-type]
    progress = type("Progress", (), {"best_value": None, "best_step": None, "without_improvement": 0, "step": 1})()
    made.prepared = type("Prepared", (), {"loop": type("Loop", (), {"progress": progress})(), "hub": None})()
    return made


@ranks(1)
def test_the_best_evaluation_is_chosen_without_a_trainer(tmp_path: Path) -> None:
    shared = context(tmp_path, early_stopping_patience=2, eval_strategy="steps", save_strategy="steps", eval_steps=1)
    part = Evaluation(shared, Calls(NoTrainer()), None)  # type: ignore[arg-type]
    gains = [part._determine_best_metric({"eval_loss": loss}, None) for loss in (3.0, 2.0, 2.5, 2.2)]
    assert gains == [True, True, False, False]
    assert shared.loop.progress.best_value == shared.events.state.best_metric == 2.0
    assert shared.events.control.should_training_stop
    with pytest.raises(TrainingError, match="there is no eval_loss; evaluation has other"):
        part._determine_best_metric({"other": 1.0}, None)


@ranks(1)
def test_nothing_is_restored_where_no_evaluation_was_the_best(tmp_path: Path) -> None:
    shared = context(tmp_path)
    CheckpointSaver(shared, Calls(NoTrainer()))._load_best_model()
    shared.prepared = None
    with pytest.raises(ConfigError, match="the model is not sharded yet"):
        CheckpointSaver(shared, Calls(NoTrainer()))._load_best_model()


@ranks(1)
def test_a_micro_batch_that_stands_in_has_no_gradient_and_fp16_s_scale_is_applied(tmp_path: Path) -> None:
    micro, weight = MicroBatch(), torch.ones(2, requires_grad=True)
    for scale, stands_in, expected in ((1.0, False, 3.0), (4.0, False, 12.0), (4.0, True, 0.0)):
        micro.scale, micro.stands_in, weight.grad = scale, stands_in, None
        micro.backward((3 * weight).sum())
        assert weight.grad is not None and weight.grad.tolist() == [expected] * 2
    micro.measured += 1
    assert micro.take_measured().tolist() == [1.0] * 4 and micro.take_measured().tolist() == [0.0] * 4


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
    assert calls.is_overridden("log", "evaluate") and calls.batches_are_seen and overridden(trainer, "log")
    with pytest.raises(AttributeError, match="_inner_training_loop is no row of METHODS"):
        _ = calls._inner_training_loop


def test_the_loop_never_sees_the_trainer() -> None:
    for module in (loop, optimizer_step, training_state, micro_batch, hub):
        source = inspect.getsource(module)
        imports = [line for line in source.splitlines() if line.startswith(("from ", "import "))]
        assert imports and not [line for line in imports if "sft.trainer" in line or "overrides" in line]
        assert "self.trainer" not in source
