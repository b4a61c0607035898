"""The loss curve of TRL's `SFTTrainer` on the same model, data, order and settings (fp32, dropout 0): within 1e-3."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.pool import ranks
from tests.sft import trl_curve
from tests.sft.runs import losses, settings, train
from tests.sft.tiny import make_trained


def our_losses(kind: str, folder: Path, world: int) -> list[float]:
    share = {"per_device_train_batch_size": 4 // world, "gradient_accumulation_steps": 2}
    chat = kind == "assistant"
    special: dict[str, Any] = {"assistant_only_loss": True} if chat else {"add_special_tokens": None}
    config = settings(folder, **{**trl_curve.SETTINGS, **share, **special, "max_seq_len": 256})
    return losses(train(make_trained(kind), config, trl_curve.rows(kind), tokenizer=trl_curve.tokenizer(kind)))


@ranks(2)
@pytest.mark.parametrize(
    "kind", [kind if kind == "lora" else pytest.param(kind, marks=pytest.mark.slow) for kind in trl_curve.KINDS]
)
def test_trl_s_loss_curve(kind: str, tmp_path: Path) -> None:
    check(kind, 2, tmp_path)


@pytest.mark.slow
@ranks(1, 4)
@pytest.mark.parametrize("kind", trl_curve.KINDS)
def test_trl_s_loss_curve_on_other_numbers_of_ranks(kind: str, world_size: int, tmp_path: Path) -> None:
    check(kind, world_size, tmp_path)


def check(kind: str, world_size: int, tmp_path: Path) -> None:
    recorded = json.loads(trl_curve.FILE.read_text())[kind]
    ours = our_losses(kind, tmp_path, world_size)
    assert len(ours) == len(recorded) == trl_curve.STEPS
    assert recorded[0] - recorded[-1] > 0.1, "a curve that goes nowhere shows nothing"
    assert ours == pytest.approx(recorded, abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", trl_curve.KINDS)
def test_the_recorded_curve_is_trl_s(kind: str) -> None:
    assert trl_curve.trl_losses(kind) == pytest.approx(json.loads(trl_curve.FILE.read_text())[kind], abs=1e-4)
