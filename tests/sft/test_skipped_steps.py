"""Steps that change no weights: what schedule, step and log make of them, against a plain loop with a `GradScaler`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import get_scheduler

from fullshard.distributed import runtime
from fullshard.sft.trainer import SFTTrainer
from tests.data.tiny import make_tokenizer, text_rows
from tests.pool import ranks
from tests.sft.runs import global_batch, settings
from tests.sft.tiny import make_model

OVERFLOWS = (0, 1, 4)
SCALE = 64.0


def plain_loop(made: Any, table: Any, order: Any, config: Any) -> dict[str, list[float]]:
    """One device. As transformers and Accelerate: after a step that the scaler left out the schedule stays where it
    is, and the next rows are used."""
    optimizer = torch.optim.AdamW(made.parameters(), lr=config.learning_rate, weight_decay=0.0)
    schedule = get_scheduler("linear", optimizer, num_warmup_steps=2, num_training_steps=config.max_steps)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    found: dict[str, list[float]] = {"loss": [], "learning_rate": [], "scale": []}
    for step in range(config.max_steps):
        documents = [torch.tensor(ids.astype("int64")) for row in order.step(step) for ids, _ in table.documents(row)]
        ids = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True, padding_value=2)
        labels = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True, padding_value=-100)[:, 1:].flatten()
        logits = made(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, labels)
        scaler.scale(loss * (math.inf if step in OVERFLOWS else 1.0)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(made.parameters(), config.max_grad_norm)
        found["loss"].append(float(loss.detach()))
        found["learning_rate"].append(schedule.get_last_lr()[0])
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        found["scale"].append(scaler.get_scale())
        if scaler.get_scale() >= before:
            schedule.step()
        optimizer.zero_grad()
    return found


@ranks(2)
def test_steps_that_the_scaler_leaves_out_are_no_updates(tmp_path: Path) -> None:
    config = settings(
        tmp_path, max_steps=9, warmup_steps=2, lr_scheduler_type="linear", weight_decay=0.0, **global_batch(2),
    )  # fmt: skip
    made = make_model()
    trainer = SFTTrainer(model=made, args=config, train_dataset=text_rows(60), tokenizer=make_tokenizer())
    loop = trainer.prepare()
    loop.state.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    # On one rank alone: all leave the step out.
    factor = lambda: math.inf if loop.progress.step in OVERFLOWS and runtime.rank() == 1 else 1.0  # noqa: E731
    usual = trainer.compute_loss

    def compute_loss(*given: Any, **more: Any) -> Any:
        loss = usual(*given, **more)
        loss.register_hook(lambda grad: grad * factor())
        return loss

    trainer.compute_loss = compute_loss  # type: ignore[method-assign]
    trainer.train()
    expected = plain_loop(make_model(), trainer.parts.train, loop.loader.sampler.order, config)
    records = [r for r in trainer.state.log_history if "loss" in r]
    for name, tolerance in (("loss", 1e-4), ("learning_rate", 1e-12)):
        assert [r[name] for r in records] == pytest.approx(expected[name], abs=tolerance), name
    assert loop.state.scaler.get_scale() == expected["scale"][-1] == SCALE / 2 ** len(OVERFLOWS)
    assert [r["skipped_steps"] for r in records] == [1, 2, 2, 2, 3, 3, 3, 3, 3]
    assert loop.progress.step == 9 and loop.progress.skipped == 3
    assert [r["grad_norm"] is None for r in records] == [step in OVERFLOWS for step in range(9)]
    if runtime.is_main():
        written = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
        assert written[-2]["skipped_steps"] == 3
