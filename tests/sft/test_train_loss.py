"""The loss that a run ends with: the mean of all steps, as transformers' Trainer has it, and said so."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer, TrainingArguments

from fullshard.sft import results
from fullshard.sft.trainer import SFTTrainer
from tests.data.tiny import make_tokenizer
from tests.pool import ranks
from tests.sft.runs import settings
from tests.sft.tiny import make_model

STEPS, LOGGED_EVERY, BATCH = 5, 2, 2
ROWS = [{"input_ids": list(range(3, 19)), "labels": list(range(3, 19))}] * (STEPS * BATCH)
"""All alike, so that their order does not matter. The last loss that is logged is of one step, the others of two."""
RATE = 3e-3


def transformers_output(folder: Path) -> Any:
    args = TrainingArguments(
        output_dir=str(folder), max_steps=STEPS, logging_steps=LOGGED_EVERY, per_device_train_batch_size=BATCH,
        learning_rate=RATE, report_to="none", use_cpu=True, save_strategy="no", disable_tqdm=True, weight_decay=0.0,
    )  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()):  # it prints what it logs
        return Trainer(model=make_model(), args=args, train_dataset=ROWS).train()


def trainer(folder: Path, callbacks: Any = (), **changes: Any) -> SFTTrainer:
    config = settings(
        folder, max_steps=STEPS, logging_steps=LOGGED_EVERY, per_device_train_batch_size=BATCH, learning_rate=RATE,
        lr_scheduler_type="linear", **changes,
    )  # fmt: skip
    return SFTTrainer(
        model=make_model(), args=config, train_dataset=ROWS, tokenizer=make_tokenizer(), callbacks=callbacks
    )


@ranks(1)
def test_the_mean_loss_is_that_of_transformers_trainer(tmp_path: Path) -> None:
    expected = transformers_output(tmp_path / "theirs")
    made = trainer(tmp_path, progress="plain")
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        found = made.train()
        results.show_results(made.summary())
    assert found.global_step == expected.global_step == STEPS
    assert found.training_loss == pytest.approx(expected.training_loss, rel=1e-5)
    assert found.metrics["train_loss"] == found.training_loss
    logged = [record["loss"] for record in made.state.log_history if "loss" in record]
    windows = sum(logged) / len(logged)
    assert windows != pytest.approx(found.training_loss, rel=1e-3), "else the test could not tell them apart"
    mean, last = re.findall(r"^(training loss| {13}) +(\S+)  (.*)$", shown.getvalue(), re.MULTILINE)
    assert mean[1:] == (f"{expected.training_loss:.4f}", "mean of all 5 steps")
    assert last[1:] == (f"{logged[-1]:.4f}", "of the last step")


class Breaks:
    def on_step_end(self, args: Any, state: Any, control: Any, **facts: Any) -> None:
        raise KeyError("a callback's own mistake")


@ranks(1)
def test_the_bar_is_taken_away_whatever_ends_a_run(tmp_path: Path) -> None:
    made = trainer(tmp_path, callbacks=[Breaks()], progress="live")
    before = sys.stdout
    with contextlib.redirect_stdout(io.StringIO()), pytest.raises(KeyError, match="own mistake"):
        made.train()
    assert made.loop.reporter._bar is None and made.loop.reporter._file is None and sys.stdout is before


@ranks(1)
def test_a_resumed_run_has_the_mean_of_all_steps(tmp_path: Path) -> None:
    whole = trainer(tmp_path / "whole", save_strategy="steps", save_steps=3).train()
    resumed = trainer(tmp_path / "resumed").train(str(tmp_path / "whole" / "out" / "checkpoints" / "step-3"))
    assert resumed.training_loss == whole.training_loss
