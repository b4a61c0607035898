"""Settings of transformers' and TRL's trainers in short runs: what they change."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fullshard.checkpoint.manifest import published_steps
from fullshard.distributed import runtime
from fullshard.sft.trainer import SFTTrainer
from tests.data.tiny import make_tokenizer, text_rows
from tests.pool import ranks
from tests.sft.runs import settings, train
from tests.sft.tiny import make_model

ROWS = [{"input_ids": [5, 6, 7]}, {"input_ids": list(range(5, 35))}]
"""A short and a long row."""


@ranks(2)
def test_ranks_of_equal_weight(tmp_path: Path) -> None:
    """`average_tokens_across_devices=False`: the step is the mean of the ranks' means, not that of all tokens."""
    model = make_model()
    losses = [model(input_ids=(ids := torch.tensor([row["input_ids"]])), labels=ids).loss for row in ROWS]
    tokens = torch.tensor([2.0, 29.0])
    plain, weighted = torch.stack(losses).mean(), (torch.stack(losses) * tokens).sum() / tokens.sum()
    found = {}
    for equal in (True, False):
        config = settings(
            tmp_path / str(equal), average_tokens_across_devices=not equal, max_steps=1, per_device_train_batch_size=1,
            train_sampling_strategy="sequential", max_grad_norm=0.0,
        )  # fmt: skip
        trainer = train(make_model(), config, ROWS)
        found[equal] = next(each for each in trainer.state.log_history if "loss" in each)
    for equal, loss in ((True, plain), (False, weighted)):
        gradients = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        assert found[equal]["loss"] == pytest.approx(float(loss), rel=1e-5)
        assert found[equal]["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    assert abs(float(plain - weighted)) > 1e-3


@ranks(1)
def test_checkpoints_without_the_optimizer(tmp_path: Path) -> None:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    runtime.get_logger().addHandler(handler)
    values: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "per_device_train_batch_size": 2}
    sizes = {}
    for only in (True, False):
        train(make_model(), settings(tmp_path / str(only), save_only_model=only, max_steps=2, **values))
        files = (tmp_path / str(only) / "out" / "checkpoints" / "step-2").rglob("*")
        sizes[only] = sum(file.stat().st_size for file in files)
    assert sizes[True] < 0.5 * sizes[False]
    again = settings(tmp_path / "True", save_only_model=True, max_steps=4, resume=True, **values)
    trainer = train(make_model(seed=1), again)
    runtime.get_logger().removeHandler(handler)
    assert trainer.state.global_step == 4
    assert said[0] == "save_only_model is on: the optimizer is a new one, without its state"


@ranks(1)
def test_the_best_checkpoint_alone(tmp_path: Path) -> None:
    config = settings(
        tmp_path, max_steps=4, eval_strategy="steps", eval_steps=1, save_strategy="best", eval_delay=2,
        metric_for_best_model="eval_loss", greater_is_better=True, learning_rate=1e-2,
    )  # fmt: skip
    trainer = train(make_model(), config, text_rows(40), eval_dataset=text_rows(4))
    evaluated = [each["step"] for each in trainer.state.log_history if "eval_loss" in each]
    assert evaluated == [2, 3, 4] and published_steps(tmp_path / "out" / "checkpoints") == [2], "the loss only falls"


@ranks(1)
def test_evaluations_without_predictions(tmp_path: Path) -> None:
    for only in (False, True):
        trainer = SFTTrainer(
            make_model(), settings(tmp_path / str(only), prediction_loss_only=only), eval_dataset=text_rows(4),
            compute_metrics=lambda given: {"found": given.predictions.shape[0]}, tokenizer=make_tokenizer(),
        )  # fmt: skip
        found = trainer.evaluate()
        assert found["eval_loss"] > 0 and found.get("eval_found") == (None if only else 4)


TRACKIO = """
import contextvars
calls, config = [], {}
__version__ = "0.1"

class context_vars:
    current_space_id = contextvars.ContextVar("space", default=None)

class Config(dict):
    def update(self, values, allow_val_change=False):
        calls.append(("config", values))

config = Config()
def init(**options):
    calls.append(("init", options))
def log(values):
    calls.append(("log", values))
def finish():
    calls.append(("finish", None))
"""


@ranks(1)
def test_a_logger_of_transformers(tmp_path: Path) -> None:
    """`report_to="trackio"` runs transformers' callback, on a stand-in for the package."""
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "trackio.py").write_text(TRACKIO)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path / "packages")
        config = settings(tmp_path, report_to=["trackio"], run_name="mine", project="ours", max_steps=2)
        train(make_model(), config, eval_dataset=None)
        calls = sys.modules["trackio"].calls
    sys.modules.pop("trackio")
    kinds = [kind for kind, _ in calls]
    assert kinds[0] == "init" and calls[0][1]["project"] == "ours" and calls[0][1]["name"] == "mine"
    assert kinds[-1] == "finish" and kinds.count("config") == 1
    logged = [values for kind, values in calls if kind == "log"]
    assert [each["train/global_step"] for each in logged[:2]] == [1, 2] and logged[0]["train/loss"] > 0


@ranks(1)
def test_numerics(tmp_path: Path) -> None:
    before = torch.get_float32_matmul_precision()
    try:
        config = settings(tmp_path, max_steps=1, tf32=True, full_determinism=True, disable_tqdm=True)
        train(make_model(), config, tokenizer=make_tokenizer())
        assert torch.get_float32_matmul_precision() == "high" and torch.are_deterministic_algorithms_enabled()
    finally:
        torch.set_float32_matmul_precision(before)
        torch.use_deterministic_algorithms(False)
