"""Runs with tensor parallelism: the losses of one device, evaluation, answers, files, and runs that go on without."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from fullshard.distributed import runtime
from fullshard.distributed.ranks import exchange
from fullshard.sft.trainer import SFTTrainer
from tests.data.tiny import make_tokenizer, text_rows
from tests.pool import ranks
from tests.sft.runs import global_batch, losses, settings, train
from tests.sft.test_ranks import one_device
from tests.sft.test_resume import StopAt
from tests.sft.tiny import make_model, make_trained


@contextlib.contextmanager
def split(ranks: int = 2) -> Iterator[None]:
    """Inside, runs have this `tp_size`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PARALLELISM_CONFIG_TP_SIZE", str(ranks))
        yield


@ranks(4)
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        pytest.param("full", {"packing": True}, marks=pytest.mark.slow),
        ("lora", {"gradient_checkpointing": True}),
        pytest.param("full", {"chunked_loss": False}, marks=pytest.mark.slow),
    ],
)
def test_losses_of_one_device(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    config = settings(
        tmp_path, lr_scheduler_type="cosine", warmup_steps=3, weight_decay=0.01, max_steps=12, eval_strategy="steps",
        eval_steps=6, eval_samples=3, sample_max_new_tokens=4, **changes, **global_batch(2),
    )  # fmt: skip
    with split():
        trainer = train(make_trained(kind), config, eval_dataset=text_rows(11, seed=9))
    assert trainer.model.mesh.shape() == {"fsdp": 2, "tp": 2}
    evaluations = [
        (r["eval_loss"], r["eval_mean_token_accuracy"]) for r in trainer.state.log_history if "eval_loss" in r
    ]
    tokens = trainer.loop.progress.tokens
    config = settings(
        tmp_path / "plain", lr_scheduler_type="cosine", warmup_steps=3, weight_decay=0.01, max_steps=12,
        eval_strategy="steps", eval_steps=6, eval_samples=3, sample_max_new_tokens=4, **changes, **global_batch(4),
    )  # fmt: skip
    alone = one_device(make_trained(kind), trainer.parts.train, trainer.loop.loader.sampler.order, config)
    assert losses(trainer) == pytest.approx(alone, abs=1e-5)
    plain = train(make_trained(kind), config, eval_dataset=text_rows(11, seed=9))
    theirs = [(r["eval_loss"], r["eval_mean_token_accuracy"]) for r in plain.state.log_history if "eval_loss" in r]
    assert len(theirs) == 2 and plain.loop.progress.tokens == tokens
    for found, expected in zip(evaluations, theirs, strict=True):
        assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
@ranks(4)
@pytest.mark.parametrize(("first", "then"), [(2, 1), (1, 2)])
def test_a_run_goes_on_with_another_mesh(first: int, then: int, tmp_path: Path) -> None:
    def options(name: str, tp: int, **changes: Any) -> dict[str, Any]:
        config = settings(
            tmp_path / name, max_steps=12, save_strategy="steps", save_steps=5, packing=True, weight_decay=0.01,
            **global_batch(4 // tp), **changes,
        )  # fmt: skip
        return {"model": make_model(), "args": config, "train_dataset": text_rows(130), "tokenizer": make_tokenizer()}

    whole = SFTTrainer(**options("whole", 1))
    whole.train()
    stop = StopAt(7)
    with split(first):
        broken = SFTTrainer(**options("broken", first), callbacks=[stop])
        stop.of(broken)
        with pytest.raises(SystemExit):
            broken.train()
    with split(then):
        resumed = SFTTrainer(**options("broken", then, resume=True))
        resumed.train()
    assert resumed.loop.progress.step == 12
    assert losses(resumed) == pytest.approx(losses(whole), abs=1e-5)
    for (name, a), (_, b) in zip(resumed.model.named_parameters(), whole.model.named_parameters(), strict=True):
        torch.testing.assert_close(a.full_tensor(), b.full_tensor(), rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.slow
@ranks(2)
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_files_are_those_of_transformers_and_peft(kind: str, tmp_path: Path) -> None:
    with split():
        trainer = train(make_trained(kind), settings(tmp_path, max_steps=3, **global_batch(1)))
    state = trainer.model.full_state_dict()
    folder = tmp_path / "saved"
    trainer.save_model(str(folder))
    if runtime.is_main():
        if kind == "full":
            loaded = AutoModelForCausalLM.from_pretrained(folder)
        else:
            loaded = PeftModel.from_pretrained(make_model(), folder)
        for name, value in loaded.state_dict().items():
            torch.testing.assert_close(value, state[name], rtol=0, atol=0, msg=name)
    exchange(0, "done")
