"""Models that a script gives in memory: 4-bit ones of bitsandbytes train as there, others are refused by name.

The oracle of the first is bitsandbytes' own model with PEFT's adapter in a plain loop on one device.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BitsAndBytesConfig,
    T5Config,
    T5ForConditionalGeneration,
    get_scheduler,
)  # fmt: skip

from fullshard.config.errors import ConfigError, QuantizationError
from fullshard.distributed import runtime
from fullshard.distributed.ranks import exchange
from fullshard.quant.bitsandbytes_layers import foreign_layers
from fullshard.quant.quantize import quantized_layers
from fullshard.sft.trainer import SFTTrainer
from tests.data.tiny import make_tokenizer, text_rows
from tests.pool import ranks
from tests.sft.runs import global_batch, losses, plain_losses, settings
from tests.sft.test_adapter_kinds import IDS, logits_of, values_of
from tests.sft.tiny import make_folder, make_model

LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
ROWS = {"train_dataset": text_rows(60), "eval_dataset": text_rows(6, seed=2)}


def four_bits(folder: Path, **changes: Any) -> Any:
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", **changes)
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)


def check(place: Path, ready_made: bool, **changes: Any) -> None:
    if runtime.is_main():
        make_folder(place, hidden_size=64, intermediate_size=128)  # bitsandbytes needs rows of whole blocks
    runtime.barrier()
    model = four_bits(place / "model", **changes)
    asked = LoraConfig(**LORA)
    given = {} if ready_made else {"peft_config": asked}
    config = settings(
        place / "run", max_steps=4, learning_rate=2e-2, lr_scheduler_type="constant", eval_strategy="steps",
        eval_steps=2, **global_batch(runtime.world_size()),
    )  # fmt: skip
    trainer = SFTTrainer(
        get_peft_model(model, asked) if ready_made else model, config, tokenizer=make_tokenizer(), **ROWS, **given
    )
    assert not foreign_layers(trainer.model, "Linear4bit") and len(quantized_layers(trainer.model)) == 14
    values = values_of(trainer.prepare().model)
    trainer.train()
    trainer.save_model()
    ours, got = losses(trainer), logits_of(trainer.model)
    alone = None
    if runtime.is_main():
        oracle = get_peft_model(four_bits(place / "model", **changes), LoraConfig(**LORA))
        trained = {name: p for name, p in oracle.named_parameters() if p.requires_grad}
        for name, p in trained.items():
            p.data.copy_(values[name])
        optimizer = torch.optim.AdamW(trained.values(), lr=config.learning_rate, weight_decay=0.0)
        oracle.train()
        order, schedule = trainer.loop.loader.sampler.order, get_scheduler("constant", optimizer)
        alone = plain_losses(oracle, optimizer, schedule, trainer.parts.train, order, config)
        loaded = PeftModel.from_pretrained(four_bits(place / "model", **changes), config.output_dir)
        torch.testing.assert_close(loaded.train()(input_ids=IDS).logits.detach(), got, rtol=1e-4, atol=1e-4)
    alone = exchange(alone, "oracle", watched=False)[0]
    assert ours == pytest.approx(alone, abs=1e-4), (ours, alone)


@ranks(1)
def test_a_4_bit_model_of_bitsandbytes_trains_with_evaluations(tmp_path: Path) -> None:
    check(tmp_path, ready_made=False)


@ranks(1)
def test_scales_that_an_evaluation_has_rounded_are_refused(tmp_path: Path) -> None:
    import bitsandbytes

    make_model(hidden_size=64, intermediate_size=128).save_pretrained(tmp_path / "model")
    model = four_bits(tmp_path / "model")
    layer = model.model.layers[0].mlp.up_proj.weight  # what bitsandbytes does for an evaluation on some processors
    layer.data, _ = bitsandbytes.functional._convert_weight_packed_for_cpu(layer.data, layer.quant_state)
    with pytest.raises(QuantizationError, match="evaluated on the CPU, for which bitsandbytes repacks"):
        SFTTrainer(model, settings(tmp_path), tokenizer=make_tokenizer(), peft_config=LoraConfig(**LORA), **ROWS)


@pytest.mark.slow
@ranks(2)
@pytest.mark.parametrize("ready_made", [False, True])
def test_so_it_does_over_ranks(ready_made: bool, tmp_path: Path) -> None:
    check(tmp_path, ready_made, bnb_4bit_use_double_quant=True)


def eight_bits(folder: Path) -> Any:
    make_model().save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=BitsAndBytesConfig(load_in_8bit=True))


def packed_by(method: str) -> Any:
    model = make_model()
    model.config.quantization_config = {"quant_method": method, "bits": 4}
    return model


def on_meta() -> Any:
    with torch.device("meta"):
        return make_model()


def spread() -> Any:
    model = make_model()
    model.hf_device_map = {"model.layers.0": 0, "model.layers.1": "cpu"}
    return model


def compiled_in_place() -> Any:
    model = make_model()
    model.model.layers[1].compile()
    return model


T5 = {"vocab_size": 416, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}
REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "8 bits": (eight_bits, "quantized by bitsandbytes in 8 bits, which cannot be sharded"),
    "gptq": (lambda _: packed_by("gptq"), "quantized by gptq"),
    "awq": (lambda _: packed_by("awq"), "quantized by awq"),
    "no module": (lambda _: 5, "model is int; expected a name, a folder"),
    "no model of transformers": (lambda _: nn.Linear(2, 2), "a Linear without a config"),
    "wrapped": (lambda _: nn.DataParallel(make_model()), "distributes the model itself; give model.module"),
    "compiled": (lambda _: torch.compile(make_model()), "compiled already"),
    "a compiled layer": (lambda _: compiled_in_place(), "model.layers.1 is compiled already"),
    "no values": (lambda _: on_meta(), "21 parameter.* have no values"),
    "several devices": (lambda _: spread(), "device_map spreads it over 0, cpu"),
    "encoder-decoder": (lambda _: T5ForConditionalGeneration(T5Config(**T5)), "an encoder-decoder"),
    "no head": (lambda _: make_model().model, "a LlamaModel, which has no language-model head"),
    "a classifier": (lambda _: AutoModelForSequenceClassification.from_config(make_model().config),
                     "a LlamaForSequenceClassification, which has no language-model head"),
}  # fmt: skip


@ranks(1)
def test_other_models_are_refused_by_name(tmp_path: Path) -> None:
    for name, (make, message) in REFUSED.items():
        with pytest.raises(ConfigError, match=message):
            SFTTrainer(make(tmp_path / name), settings(tmp_path), tokenizer=make_tokenizer(), **ROWS)
