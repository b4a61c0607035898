"""Models as they are shipped through the trainer: adapters on them, dense values of them, and what is refused."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from fullshard.checkpoint.manifest import read_manifest
from fullshard.config.errors import ConfigError, QuantizationError
from fullshard.distributed import runtime
from fullshard.quant.quantize import quantize_model, quantized_experts, quantized_layers
from fullshard.sft.sft_config import SFTConfig
from tests.data.tiny import make_tokenizer
from tests.pool import ranks
from tests.quant import shipped_models
from tests.quant.shipped_models import MXFP4, fp8, gpt_oss, llama, qwen_moe, write
from tests.sft.runs import global_batch, losses, settings, train
from tests.sft.tiny import VOCABULARY

LORA = {"use_peft_lora": True, "lora_r": 4, "lora_dropout": 0.0, "lora_target_modules": "all-linear"}


def written(place: Path, monkeypatch: pytest.MonkeyPatch, family: Any = llama, quantization: Any = None) -> Path:
    """A shipped model with a tokenizer; `-dense` beside it has the unpacked values."""
    monkeypatch.setitem(shipped_models.SIZES, "vocab_size", VOCABULARY)
    monkeypatch.setitem(shipped_models.SIZES, "max_position_embeddings", 256)
    if runtime.is_main():
        write(family(), quantization or fp8((16, 24)), place / "model")
        for folder in ("model", "model-dense"):
            make_tokenizer().save_pretrained(place / folder)
    runtime.barrier()
    return place / "model"


def losses_of(
    model: Path, folder: Path, engine: dict[str, Any] | None = None, **changes: Any
) -> tuple[Any, list[float]]:
    batch = global_batch(runtime.world_size())
    config = settings(folder, max_steps=4, learning_rate=2e-2, torch_dtype="float32", **batch, **changes)
    trainer = train(str(model), config, engine=engine)
    return trainer, losses(trainer)


@ranks(2)
@pytest.mark.parametrize(
    ("family", "quantization"), [(llama, fp8((16, 24))), pytest.param(gpt_oss, MXFP4, marks=pytest.mark.slow)]
)
def test_adapters_on_shipped_weights_that_peft_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: Any, quantization: Any
) -> None:
    """Packed rows; losses are those of the unpacked model."""
    model = written(tmp_path, monkeypatch, family, quantization)
    options = {**LORA, "packing": True, "gradient_checkpointing": "true"}
    trainer, found = losses_of(model, tmp_path, **options)
    assert quantized_layers(trainer.model) or quantized_experts(trainer.model)
    expected = losses_of(tmp_path / "model-dense", tmp_path / "other", **options)[1]
    assert found == pytest.approx(expected, abs=1e-5) and found[-1] < found[0]
    trainer.save_model()
    ids = torch.arange(24).view(2, 12)
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "model-dense", dtype=torch.float32)
    loaded = PeftModel.from_pretrained(dense, tmp_path / "out").eval()
    with torch.no_grad():
        ours = trainer.model.eval()(input_ids=ids).logits
        torch.testing.assert_close(ours, loaded(input_ids=ids).logits, rtol=1e-4, atol=1e-5)


def four_experts() -> Any:
    """Gate's rows are no multiple of a block."""
    return qwen_moe(40, experts=4)


@ranks(2, 4)
@pytest.mark.parametrize(
    ("family", "quantization"), [(four_experts, fp8()), pytest.param(gpt_oss, MXFP4, marks=pytest.mark.slow)]
)
def test_experts_split_over_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: Any, quantization: Any
) -> None:
    """Each rank reads the bytes of its own experts; losses are those of a run that splits none."""
    model = written(
        tmp_path, monkeypatch, functools.partial(family, experts=4) if family is gpt_oss else family, quantization
    )
    extra = {**LORA, "router_aux_loss_coef": 0.0}
    expected = losses_of(model, tmp_path / "whole", **extra)[1]
    trainer, found = losses_of(model, tmp_path / "split", engine={"ep_size": 2}, **extra)
    stack = next(p for name, p in trainer.model.named_parameters() if name.endswith("gate_up_proj"))
    assert stack.to_local().shape[0] == stack.shape[0] // runtime.world_size()
    assert any(unit.axes for unit in trainer.model.plan.units) and found == pytest.approx(expected, abs=1e-5)


@ranks(2)
def test_dense_values_train_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = written(tmp_path, monkeypatch)
    trainer, found = losses_of(model, tmp_path, dequantize=True)
    expected = losses_of(tmp_path / "model-dense", tmp_path / "other")[1]
    assert not quantized_layers(trainer.model) and found == expected and found[-1] < found[0]
    trainer.save_model()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config


@ranks(1)
def test_a_resumed_run_reads_the_weights_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shipped weights are not saved again; a checkpoint refers to them, so they keep their form."""
    model = written(tmp_path, monkeypatch)
    _, whole = losses_of(model, tmp_path, save_strategy="steps", save_steps=2, **LORA)
    step = tmp_path / "out" / "checkpoints" / "step-2"
    assert not [name for name in read_manifest(step).tensors if "packed" in name], "the base is saved again"
    again = losses_of(model, tmp_path / "again", resume_from_checkpoint=str(step), **LORA)[1]
    assert again[-2:] == whole[-2:]
    with pytest.raises(ConfigError, match=r"dequantize is True, and the run to resume .* had False: its checkpoints"):
        losses_of(model, tmp_path / "third", resume_from_checkpoint=str(step), dequantize=True, **LORA)


@ranks(1)
def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = written(tmp_path, monkeypatch)
    with pytest.raises(QuantizationError, match="the model's fp8 16x24 weights are frozen"):
        train(str(model), settings(tmp_path))
    with pytest.raises(ConfigError, match=r"dequantize unpacks models that are shipped in mxfp4, .* is stored dense"):
        train(str(tmp_path / "model-dense"), settings(tmp_path, dequantize=True))
    with pytest.raises(ConfigError, match=r"base_dtype is fp8, but .* is quantized already"):
        train(str(model), settings(tmp_path, base_dtype="fp8", **LORA))
    with pytest.raises(ConfigError, match="dequantize is on, and use_4bit_quantization is on; choose one"):
        SFTConfig(dequantize=True, use_4bit_quantization=True)
    with pytest.raises(ConfigError, match="chosen anew for each input"):
        SFTConfig(use_8bit_quantization=True)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "awq"}}))
    with pytest.raises(QuantizationError, match="quantization by awq is not supported; expected mxfp4, fp8"):
        train(str(model), settings(tmp_path, **LORA))


@ranks(1)
def test_dora_reads_the_shipped_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = written(tmp_path, monkeypatch)
    found = losses_of(model, tmp_path, use_dora=True, **LORA)[1]
    expected = losses_of(tmp_path / "model-dense", tmp_path / "other", use_dora=True, **LORA)[1]
    assert found == pytest.approx(expected, abs=1e-5)


def test_a_model_of_random_weights_has_no_formats() -> None:
    with pytest.raises(QuantizationError, match="read from its files: give its folder"):
        quantize_model(LlamaForCausalLM(LlamaConfig(**shipped_models.SIZES, intermediate_size=64)), fp8())
