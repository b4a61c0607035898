"""QLoRA through the trainer: the losses of one device with the same (rounded) weights, and an adapter that PEFT loads.

The oracle is the plain loop of `test_ranks.py` on a dense model whose weights went through 4 bits.
"""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

from fullshard.checkpoint.manifest import read_manifest
from fullshard.config.errors import QuantizationError
from fullshard.distributed import runtime
from fullshard.distributed.ranks import exchange
from fullshard.quant.linear import NF4Linear
from fullshard.quant.quantize import dequantize_model, quantize_model
from fullshard.sft.adapter import quantization
from fullshard.sft.output_dir import CHECKPOINTS
from fullshard.sft.trainer import SFTTrainer
from tests.data.tiny import make_tokenizer, text_rows
from tests.pool import ranks
from tests.sft.runs import global_batch, losses, settings, train
from tests.sft.test_ranks import one_device
from tests.sft.tiny import make_folder, make_model

FOUR_BITS = {"use_4bit_quantization": True, "use_nested_quant": True, "bnb_4bit_compute_dtype": "float32"}
LORA = LoraConfig(r=4, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")


def rounded(model: Any, config: Any) -> Any:
    """A dense model with the weights that 4 bits leave."""
    return dequantize_model(quantize_model(model, quantization(config)))


@ranks(2)
@pytest.mark.parametrize("packing", [pytest.param(False, marks=pytest.mark.slow), True])
def test_losses_of_one_device(packing: bool, tmp_path: Path) -> None:
    config = settings(
        tmp_path, packing=packing, lr_scheduler_type="cosine", warmup_steps=3, weight_decay=0.01, **global_batch(2),
        **FOUR_BITS,
    )  # fmt: skip
    trainer = train(make_model(), config, peft_config=LORA)
    held = [m for m in trainer.model.modules() if isinstance(m, NF4Linear)]
    assert len(held) == 14 and all(p.dtype == torch.uint8 for m in held for p in m.parts.values())
    alone = None
    if runtime.is_main():
        dense = rounded(make_model(), config)
        torch.manual_seed(config.seed)
        alone = one_device(get_peft_model(dense, LORA), trainer.parts.train, trainer.loop.loader.sampler.order, config)
    alone = exchange(alone, "oracle", watched=False)[0]
    assert alone is not None and alone[0] - alone[-1] > 0.05
    assert losses(trainer) == pytest.approx(alone, abs=1e-4)


@ranks(2)
def test_from_files_to_an_adapter_that_peft_loads(tmp_path: Path) -> None:
    if runtime.is_main():
        make_folder(tmp_path)
    runtime.barrier()
    config = settings(
        tmp_path, max_steps=6, use_peft_lora=True, lora_r=4, lora_dropout=0.0, lora_target_modules="all-linear",
        save_strategy="steps", save_steps=3, **global_batch(2), **FOUR_BITS,
    )  # fmt: skip
    trainer = train(str(tmp_path / "model"), config, str(tmp_path / "data" / "train.jsonl"))
    trainer.save_model()
    assert len(losses(trainer)) == 6
    ids = torch.arange(24).view(2, 12)
    trainer.model.eval()
    with torch.no_grad():
        got = trainer.model(input_ids=ids).logits
    dense = rounded(AutoModelForCausalLM.from_pretrained(tmp_path / "model"), config)
    loaded = PeftModel.from_pretrained(dense, config.output_dir).eval()
    with torch.no_grad():
        torch.testing.assert_close(got, loaded(input_ids=ids).logits, rtol=1e-4, atol=1e-5)
    saved = read_manifest(Path(config.output_dir) / CHECKPOINTS / "step-6").tensors
    assert [n for n in saved if "lora_A" in n] and not [n for n in saved if "packed" in n], (
        "the base is not saved again"
    )


@pytest.mark.slow
@ranks(2)
def test_a_mixture_of_experts(tmp_path: Path) -> None:
    """Experts in 4 bits with adapters on them, from files to an adapter that PEFT loads; the log says what is dense."""
    shape = {
        "vocab_size": 416, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "num_local_experts": 3, "max_position_embeddings": 256,
    }  # fmt: skip
    if runtime.is_main():
        torch.manual_seed(0)
        MixtralForCausalLM(MixtralConfig(**shape)).save_pretrained(tmp_path / "model")
        make_tokenizer().save_pretrained(tmp_path / "model")
    runtime.barrier()
    options = {"use_peft_lora": True, "lora_r": 4, "lora_target_modules": "all-linear", **global_batch(2), **FOUR_BITS}
    config = settings(tmp_path, max_steps=2, lora_dropout=0.0, progress="plain", **options)
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        trainer = train(str(tmp_path / "model"), config)
    assert not runtime.is_main() or "dense: 210.8 KiB (embedding 104.0 KiB, head 104.0 KiB," in shown.getvalue()
    trainer.save_model()
    runtime.barrier()
    assert any("experts" in name and p.requires_grad for name, p in trainer.model.named_parameters())
    ids = torch.arange(24).view(2, 12)
    dense = rounded(AutoModelForCausalLM.from_pretrained(tmp_path / "model"), config)
    loaded = PeftModel.from_pretrained(dense, config.output_dir).eval()
    with torch.no_grad():
        got, expected = trainer.model.eval()(input_ids=ids).logits, loaded(input_ids=ids).logits
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
        with loaded.disable_adapter():
            assert not torch.allclose(got, loaded(input_ids=ids).logits, atol=1e-3)


@ranks(2)
def test_bf16_storage_trains_in_bf16_throughout(tmp_path: Path) -> None:
    storage = {**FOUR_BITS, "bnb_4bit_quant_storage_dtype": "bfloat16", "bnb_4bit_compute_dtype": "bfloat16"}
    if runtime.is_main():
        make_folder(tmp_path)
    runtime.barrier()
    model, rows = str(tmp_path / "model"), str(tmp_path / "data" / "train.jsonl")
    found = {}
    for name, changes in {"bf16": storage, "wide": {**storage, "adapter_dtype": "float32"}}.items():
        config = settings(
            tmp_path / name, max_steps=2, bf16=True, use_peft_lora=True, lora_target_modules="all-linear",
            **global_batch(2), **changes,
        )  # fmt: skip
        trainer = train(model, config, rows)
        found[name] = {(p.requires_grad, p.dtype) for p in trainer.model.parameters()}
    frozen = {(False, torch.uint8), (False, torch.bfloat16)}
    assert found["bf16"] == frozen | {(True, torch.bfloat16)}
    assert found["wide"] == frozen | {(True, torch.float32)}


@ranks(1)
def test_a_4_bit_model_without_an_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(QuantizationError, match="full fine-tuning is not possible: the model's 4-bit weights"):
        train(make_model(), settings(tmp_path, **FOUR_BITS))


@ranks(1)
def test_other_data_is_evaluated_on_the_model_as_it_is(tmp_path: Path) -> None:
    """`evaluate(dataset)` reads data only: the model is neither quantised again nor are random numbers drawn anew."""
    config = settings(tmp_path, max_steps=2, per_device_train_batch_size=2, **FOUR_BITS)
    more = {"peft_config": LORA, "tokenizer": make_tokenizer()}
    trainer = SFTTrainer(make_model(), config, train_dataset=text_rows(8), eval_dataset=text_rows(5, seed=9), **more)
    for trained in (False, True):
        if trained:
            trainer.train()
        expected = trainer.evaluate()["eval_loss"]
        torch.manual_seed(3)
        assert trainer.evaluate(text_rows(5, seed=9))["eval_loss"] == expected
        assert torch.initial_seed() == 3
