"""Runs with experts split over ranks: the losses and files of a run that splits none, whatever is resumed with what."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from fullshard.distributed import runtime
from fullshard.distributed.ranks import exchange
from fullshard.sft.trainer import SFTTrainer
from tests.data.tiny import make_tokenizer, text_rows
from tests.pool import ranks
from tests.quant import shipped_models
from tests.quant.shipped_models import MXFP4, fp8
from tests.sft.runs import global_batch, losses, settings
from tests.sft.test_all_linear import make
from tests.sft.test_qlora import FOUR_BITS

LORA = {"use_peft_lora": True, "lora_r": 2, "lora_alpha": 4, "lora_target_modules": "all-linear", "lora_dropout": 0.0}
KINDS: dict[str, dict[str, Any]] = {"full": {}, "lora": LORA, "qlora": {**LORA, **FOUR_BITS}}


def start(
    place: Path, name: str, family: str, kind: str, ep: int, rows: Any = None, evaluation: Any = None, **changes: Any
) -> SFTTrainer:
    if runtime.is_main() and not (place / "model").exists():
        make(family).save_pretrained(place / "model")
        make_tokenizer().save_pretrained(place / "model")
    runtime.barrier()
    values = {"learning_rate": 5e-3, "lr_scheduler_type": "constant", "save_strategy": "steps", "save_steps": 2}
    values |= {"router_aux_loss_coef": 0.0} if family == "GptOss" else {}
    config = settings(
        place / name, **{**values, **KINDS[kind], **global_batch(runtime.world_size()), "max_length": 32, **changes}
    )
    trainer = SFTTrainer(
        model=str(place / "model"), args=config, train_dataset=rows or text_rows(40), eval_dataset=evaluation
    )
    trainer.parts = dataclasses.replace(
        trainer.parts, engine=dataclasses.replace(trainer.parts.engine, ep_size=ep)
    )  # fmt: skip
    return trainer


def check(place: Path, family: str, kind: str, sizes: tuple[int, ...]) -> None:
    whole = start(place, "whole", family, kind, 1, max_steps=2 * len(sizes))
    whole.train()
    ours = []
    for i, size in enumerate(sizes):
        part = start(place, "part", family, kind, size, max_steps=2 * (i + 1), resume=i > 0, overwrite=i == 0)
        part.train()
        ours += losses(part)[-2:]
        assert any(unit.axes for unit in part.model.plan.units) == (size > 1)
    assert ours == pytest.approx(losses(whole), abs=1e-4)
    for trainer, name in ((whole, "whole"), (part, "part")):
        trainer.save_model(place / f"{name}-files")
    runtime.barrier()
    if runtime.is_main():
        first, second = (files(place / f"{name}-files") for name in ("whole", "part"))
        assert first.keys() == second.keys()
        for name, value in first.items():
            torch.testing.assert_close(second[name], value, rtol=0, atol=1e-4, msg=name)
    runtime.barrier()


def files(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {name: t for path in sorted(folder.glob("*.safetensors")) for name, t in load_file(path).items()}


@ranks(2)
def test_resumed_without_ep(tmp_path: Path) -> None:
    check(tmp_path, "Qwen3Moe", "lora", (2, 1))


@ranks(4)
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["GptOss", "DeepseekV3"])
def test_resumed_with_other_sizes(family: str, kind: str, tmp_path: Path) -> None:
    check(tmp_path, family, kind, (4, 1, 2))


@ranks(2)
@pytest.mark.slow
def test_evaluated_and_offloaded(tmp_path: Path) -> None:
    """Rows that do not divide evenly among ranks, and frozen experts in host memory."""
    changes = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "max_steps": 4,
        "save_strategy": "no",
        "offload_experts": True,
    }
    results = []
    for ep in (1, 2):
        trainer = start(tmp_path, f"run-{ep}", "Mixtral", "lora", ep, evaluation=text_rows(7, seed=5), **changes)
        trainer.train()
        results.append([r["eval_loss"] for r in trainer.state.log_history if "eval_loss" in r])
    first, second = (exchange(one, "results")[0] for one in results)
    assert len(first) == 2 and second == pytest.approx(first, abs=1e-4)
    assert all(p.offloaded for unit in trainer.model.plan.units if unit.axes for p in unit.parameters)


@ranks(2, 4)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "quantization"), [("gpt_oss", MXFP4), ("qwen_moe", fp8((16, 24)))], ids=["mxfp4", "fp8"]
)
def test_experts_as_they_are_shipped(
    family: str, quantization: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(shipped_models.SIZES, "vocab_size", 416)
    monkeypatch.setitem(shipped_models.SIZES, "max_position_embeddings", 256)
    if runtime.is_main():
        shipped_models.write(getattr(shipped_models, family)(experts=4), quantization, tmp_path / "model")
        make_tokenizer().save_pretrained(tmp_path / "model")
    runtime.barrier()
    every = []
    for ep in (1, 2):
        changes = {"router_aux_loss_coef": 0.0, "torch_dtype": "float32", "save_strategy": "no", "max_steps": 3}
        trainer = start(tmp_path, f"run-{ep}", "", "lora", ep, **changes)
        trainer.train()
        every.append(losses(trainer))
    packed = [p for unit in trainer.model.plan.units if unit.axes for p in unit.parameters if p.dtype == "uint8"]
    assert packed and all("ep" in str(p.spec[0]) for p in packed)
    assert every[1] == pytest.approx(every[0], abs=1e-5)


# --- plans ------------------------------------------------------------------------------------------------------------


def with_every_expert(place: Path, family: str) -> None:
    """A model whose tokens choose all experts, so that every rank gets as many as the plan says."""
    if runtime.is_main():
        model = make(family)
        model.config.num_experts_per_tok = 4
        model.save_pretrained(place / "model")
        make_tokenizer().save_pretrained(place / "model")
    runtime.barrier()


def check_bytes(place: Path, family: str, kind: str, ep: int, **changes: Any) -> None:
    with_every_expert(place, family)
    values = {"max_steps": 4, "save_strategy": "no", "skip_plan": False, **changes}
    trainer = start(place, "run", family, kind, ep, rows=text_rows(1) * 40, **values)
    trainer.train()
    sent = exchange(dict(trainer.model.meter.tokens_sent), "tokens sent")[0]
    gathered = exchange(trainer.model.meter.bytes_sent, "bytes sent")[0]
    if not runtime.is_main():
        return
    traffic, steps = trainer.estimate.traffic, trainer.args.max_steps
    planned = {kind: traffic.inside.get(kind, 0) + traffic.across.get(kind, 0) for kind in traffic.inside}
    assert sum(sent.values()) == steps * planned["tokens to experts"] > 0
    uncounted = planned["clipping"] + planned["metrics"]
    assert gathered == steps * (traffic.sent - uncounted)


@ranks(2)
@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["Mixtral", "Qwen3Moe"])
def test_a_plan_has_the_bytes_that_tokens_take(family: str, kind: str, checkpointing: bool, tmp_path: Path) -> None:
    check_bytes(tmp_path, family, kind, 2, gradient_checkpointing=checkpointing)


@ranks(4)
@pytest.mark.slow
@pytest.mark.parametrize("ep", [2, 4])
def test_bytes_on_four_ranks(ep: int, tmp_path: Path) -> None:
    check_bytes(tmp_path, "Mixtral", "full", ep)
