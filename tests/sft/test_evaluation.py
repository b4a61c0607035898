"""Evaluation and prediction beside transformers' trainer: metrics of the script's own, several sets, collators."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments

from fullshard.config.errors import ConfigError
from fullshard.distributed import runtime
from fullshard.sft.trainer import SFTTrainer
from tests.data.tiny import make_tokenizer, text_rows
from tests.pool import ranks
from tests.sft.runs import losses, settings
from tests.sft.tiny import make_model

ROWS = [{"input_ids": ids, "labels": ids} for n in range(7) for ids in [list(range(3 + n, 9 + 3 * n))]]
"""Rows of different lengths."""


def trainer(folder: Path, kind: type[SFTTrainer] = SFTTrainer, rows: Any = ROWS, **more: Any) -> Any:
    changes = {"max_steps": 3, "per_device_eval_batch_size": 2, **more.pop("settings", {})}
    return kind(
        model=make_model(), args=settings(folder, **changes), train_dataset=text_rows(12), eval_dataset=rows,
        processing_class=make_tokenizer(), **more,
    )  # fmt: skip


def their_prediction(folder: Path, **more: Any) -> Any:
    args = TrainingArguments(str(folder / "theirs"), per_device_eval_batch_size=2, use_cpu=True, report_to="none")
    tokenizer = make_tokenizer()
    made = Trainer(
        model=make_model(), args=args, processing_class=tokenizer, **more,
        data_collator=DataCollatorForSeq2Seq(tokenizer, padding=True),
    )  # fmt: skip
    return made.predict([{**row, "attention_mask": [1] * len(row["input_ids"])} for row in ROWS])


def compute_metrics(given: Any) -> dict[str, Any]:
    predictions = given.predictions.argmax(-1) if given.predictions.ndim == 3 else given.predictions
    trained = given.label_ids[:, 1:] != -100
    hits = predictions[:, :-1] == given.label_ids[:, 1:]
    return {"hits": hits[trained].sum(), "tokens": np.float64(trained.sum())}


def argmax(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return logits.argmax(-1)


@ranks(1)
@pytest.mark.parametrize("preprocess", [None, pytest.param(argmax, marks=pytest.mark.slow)])
def test_predictions_are_those_of_transformers_trainer(preprocess: Any, tmp_path: Path) -> None:
    more = {"compute_metrics": compute_metrics, "preprocess_logits_for_metrics": preprocess}
    expected, found = their_prediction(tmp_path, **more), trainer(tmp_path, **more).predict(ROWS)
    assert type(found) is type(expected) and found.predictions.shape == expected.predictions.shape
    trained = expected.label_ids != -100
    np.testing.assert_allclose(found.predictions[trained], expected.predictions[trained], atol=1e-5)
    # Here the first token of a row, which nothing predicts, has no label either.
    np.testing.assert_array_equal(found.label_ids[:, 1:], expected.label_ids[:, 1:])
    assert expected.metrics.keys() - found.metrics.keys() == {"test_model_preparation_time"}
    assert {n: found.metrics[n] for n in ("test_hits", "test_tokens")} == {
        n: expected.metrics[n] for n in ("test_hits", "test_tokens")
    }


@ranks(2)
def test_every_rank_gets_the_predictions_of_all_rows_in_order(tmp_path: Path) -> None:
    """Seven rows in batches of two on two ranks: one rank has fewer."""
    made = trainer(tmp_path, compute_metrics=compute_metrics, preprocess_logits_for_metrics=argmax)
    found = made.predict(ROWS)
    with torch.no_grad():
        plain = make_model()
        expected = [plain(input_ids=torch.tensor([row["input_ids"]])).logits[0].argmax(-1) for row in ROWS]
    for mine, labels, theirs, row in zip(found.predictions, found.label_ids, expected, ROWS, strict=True):
        assert mine[: len(theirs)].tolist() == theirs.tolist() and set(mine[len(theirs) :]) <= {-100, *range(416)}
        assert labels[1 : len(theirs)].tolist() == row["labels"][1:]
    evaluated = made.evaluate()
    assert (
        evaluated["eval_hits"] == found.metrics["test_hits"]
        and evaluated["eval_tokens"] == found.metrics["test_tokens"]
    )
    assert evaluated["eval_loss"] == pytest.approx(trainer(tmp_path / "loss only").evaluate()["eval_loss"], abs=1e-6)


@ranks(2)
def test_several_sets_have_their_names_in_their_metrics(tmp_path: Path) -> None:
    sets = {"short": ROWS[:3], "long": ROWS[3:]}
    changes = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_long_loss"}
    made = trainer(tmp_path, rows=sets, settings={**changes, **best})
    before = made.evaluate()
    assert {"eval_short_loss", "eval_long_loss", "eval_long_samples_per_second"} <= before.keys()
    assert before["eval_long_loss"] == pytest.approx(made.evaluate(ROWS[3:])["eval_loss"], abs=1e-6)
    assert made.evaluate(sets, metric_key_prefix="other")["other_short_loss"] == pytest.approx(
        before["eval_short_loss"]
    )
    made.train()
    assert [r["step"] for r in made.state.log_history if "eval_long_loss" in r] == [1, 2, 3]
    assert made.state.best_metric == min(r["eval_long_loss"] for r in made.state.log_history if "eval_long_loss" in r)


class Collator:
    """Rows as lists; what it returns is what the model gets. The second half of a row is not trained."""

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        assert all(isinstance(row["input_ids"], list) for row in rows)
        width = max(len(row["input_ids"]) for row in rows)
        ids = torch.tensor([row["input_ids"] + [2] * (width - len(row["input_ids"])) for row in rows])
        labels = torch.tensor([row["labels"] + [-100] * (width - len(row["labels"])) for row in rows])
        labels[:, width // 2 :] = -100
        return {"input_ids": ids, "labels": labels}


@ranks(2)
def test_a_collator_of_the_script_s_own(tmp_path: Path) -> None:
    changes = {
        "train_sampling_strategy": "sequential",
        "per_device_train_batch_size": 2,
        "lr_scheduler_type": "constant",
    }
    made = trainer(tmp_path, data_collator=Collator(), settings=changes)
    made.train()
    plain, expected = make_model(), []
    optimizer = torch.optim.AdamW(plain.parameters(), lr=5e-3, weight_decay=0.0)
    table = made.parts.train
    for step in range(3):
        total, tokens = torch.zeros(()), 0
        for pair in ([4 * step, 4 * step + 1], [4 * step + 2, 4 * step + 3]):  # as the ranks divide them
            rows = [np.concatenate([ids for ids, _ in table.documents(row)]).tolist() for row in pair]
            batch = Collator()([{"input_ids": row, "labels": row} for row in rows])
            logits = plain(input_ids=batch["input_ids"]).logits[:, :-1].flatten(0, 1)
            labels = batch["labels"][:, 1:].flatten()
            total = total + torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
            tokens += int((labels != -100).sum())
        (total / tokens).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(float(total.detach()) / tokens)
    assert losses(made) == pytest.approx(expected, abs=1e-5)
    with pytest.raises(ConfigError, match="data_collator: packed rows are collated by the trainer"):
        trainer(tmp_path / "packed", data_collator=Collator(), settings={"packing": True})


@ranks(1)
def test_metrics_and_state_are_written_as_by_transformers(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    output = made.train()
    made.log_metrics("train", output.metrics)
    made.save_metrics("train", output.metrics)
    made.save_state()
    out = tmp_path / "out"
    assert json.loads((out / "train_results.json").read_text()) == output.metrics
    assert json.loads((out / "trainer_state.json").read_text())["global_step"] == 3
    assert made.is_world_process_zero() and made.is_local_process_zero() and runtime.is_main()
    assert made.num_examples(made.get_train_dataloader()) == 12 and len(made.get_eval_dataloader()) == 4
    with pytest.raises(ConfigError, match="hyperparameter_search is not supported"):
        made.hyperparameter_search()
