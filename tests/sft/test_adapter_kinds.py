"""Kinds of adapters through the trainer: each begins, trains, is saved and goes on as PEFT's own on one device.

The oracle is PEFT: its configuration, its initialisation from whole weights, a plain loop on one device, and
`PeftModel.from_pretrained` on what a run leaves.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig, PeftModel, PrefixTuningConfig, PromptEncoderConfig, PromptTuningConfig, VeraConfig
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, get_scheduler

from fullshard.distributed import runtime
from fullshard.distributed.ranks import exchange
from fullshard.fsdp.state_dict import whole_value
from fullshard.quant.linear import NF4Linear
from fullshard.sft.trainer import SFTTrainer
from fullshard.weights import init
from tests.data.tiny import make_tokenizer
from tests.pool import ranks
from tests.sft.runs import global_batch, losses, plain_losses, settings
from tests.sft.test_qlora import FOUR_BITS, rounded
from tests.sft.tiny import make_folder

LORA = {"use_peft_lora": True, "lora_r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "lora_target_modules": "all-linear"}
PEFT_LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
PROMPT = {"num_virtual_tokens": 5, "task_type": "CAUSAL_LM"}
TEXT = "the old bird sings"
IDS = torch.arange(24).view(2, 12) + 3

KINDS: dict[str, tuple[dict[str, Any], Any]] = {
    "pissa, dora": ({"init_lora_weights": "pissa", "use_dora": True},
                    LoraConfig(init_lora_weights="pissa", use_dora=True, **PEFT_LORA)),
    "dora, 4 bits": ({"use_dora": True, **FOUR_BITS}, LoraConfig(use_dora=True, **PEFT_LORA)),
    "pissa": ({"init_lora_weights": "pissa", "use_rslora": True},
              LoraConfig(init_lora_weights="pissa", use_rslora=True, **PEFT_LORA)),
    "pissa_niter": ({"init_lora_weights": "pissa_niter_8"}, LoraConfig(init_lora_weights="pissa_niter_8", **PEFT_LORA)),
    "olora": ({"init_lora_weights": "olora"}, LoraConfig(init_lora_weights="olora", **PEFT_LORA)),
    "orthogonal": ({"init_lora_weights": "orthogonal"}, LoraConfig(init_lora_weights="orthogonal", **PEFT_LORA)),
    "false, dora": ({"init_lora_weights": "false", "use_dora": True},
                    LoraConfig(init_lora_weights=False, use_dora=True, **PEFT_LORA)),
    "loftq": ({"init_lora_weights": "loftq", **FOUR_BITS}, LoraConfig(**PEFT_LORA)),
    "rslora": ({"use_rslora": True}, LoraConfig(use_rslora=True, **PEFT_LORA)),
    "modules_to_save": ({"modules_to_save": "embed_tokens,lm_head"},
                        LoraConfig(modules_to_save=["embed_tokens", "lm_head"], **PEFT_LORA)),
    "tokens": ({"trainable_token_indices": "<s>,7"},
               LoraConfig(trainable_token_indices={"embed_tokens": [0, 7], "lm_head": [0, 7]}, **PEFT_LORA)),
    "vera": ({"peft_type": "vera", "projection_prng_key": 3},
             VeraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", projection_prng_key=3)),
    "prompt": ({"peft_type": "prompt_tuning", "num_virtual_tokens": 5, "prompt_tuning_init_text": TEXT},
               PromptTuningConfig(**PROMPT)),
    "prefix": ({"peft_type": "prefix_tuning", "num_virtual_tokens": 5}, PrefixTuningConfig(**PROMPT)),
    "prefix, projected": ({"peft_type": "prefix_tuning", "num_virtual_tokens": 5, "prefix_projection": True,
                           "encoder_hidden_size": 8},
                          PrefixTuningConfig(prefix_projection=True, encoder_hidden_size=8, **PROMPT)),
    "p_tuning": ({"peft_type": "p_tuning", "num_virtual_tokens": 5, "encoder_hidden_size": 12, **FOUR_BITS},
                 PromptEncoderConfig(encoder_hidden_size=12, **PROMPT)),
}  # fmt: skip
FROM_WEIGHTS = ("pissa", "pissa, dora", "pissa_niter", "olora")
FEW = ("pissa, dora", "dora, 4 bits")


def start(place: Path, name: str = "run", **changes: Any) -> Any:
    """A trainer from files."""
    if runtime.is_main() and not (place / "model").exists():
        make_folder(place)
    runtime.barrier()
    world = runtime.world_size()
    values = {"max_steps": 5, "learning_rate": 5e-3, "lr_scheduler_type": "cosine", "warmup_steps": 1}
    config = settings(place / name, **{**values, **global_batch(world), **LORA, **changes})
    return SFTTrainer(model=str(place / "model"), args=config, train_dataset=str(place / "data" / "train.jsonl"))


def base_of(place: Path, config: Any) -> Any:
    """The model that an adapter is trained beside, dense."""
    model = AutoModelForCausalLM.from_pretrained(place / "model")
    return rounded(model, config) if config.use_4bit_quantization else model


def values_of(model: Any) -> dict[str, torch.Tensor]:
    """All parameters of a sharded model, whole."""
    return {p.plan.name: whole_value(p).clone() for unit in model._fullshard_engine.units for p in unit.parameters}


def logits_of(model: Any) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        return model(input_ids=IDS).logits[:, -IDS.shape[1] :].float()


def one_device(made: Any, trainer: Any) -> list[float]:
    """The plain loop, with each document in a row of its own."""
    config, table, order = trainer.args, trainer.parts.train, trainer.prepare().loader.sampler.order
    trained = [p for p in made.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=config.learning_rate, weight_decay=0.0)
    schedule = get_scheduler("cosine", optimizer, num_warmup_steps=1, num_training_steps=config.max_steps)
    made.train()
    return plain_losses(made, optimizer, schedule, table, order, config)


def peft_model(place: Path, kind: str, config: Any, values: dict[str, torch.Tensor]) -> Any:
    """PEFT's model on one device, with our first values where they are drawn; what is derived is PEFT's own."""
    made = peft.get_peft_model(base_of(place, config), copy.deepcopy(KINDS[kind][1]))
    if kind == "pissa_niter":
        for name, layer in made.named_modules():
            if hasattr(layer, "pissa_init"):  # again, from the same random numbers
                layer.get_base_layer().weight.data = _stored(place, name)
                with init.seeded(config.seed, name):
                    layer.pissa_init("default", "pissa_niter_8")
    if kind == "loftq":
        dense = AutoModelForCausalLM.from_pretrained(place / "model")
        for name, layer in made.named_modules():
            if hasattr(layer, "lora_A") and "default" in layer.lora_A:
                _loftq(layer, dense.get_submodule(name.removeprefix("base_model.model.")).weight)
    for name, p in made.named_parameters():
        derived = kind in FROM_WEIGHTS or kind == "loftq" or "magnitude" in name
        if p.requires_grad and not derived:
            assert p.shape == values[name].shape
            p.data.copy_(values[name])
    for layer in made.modules():
        if kind == "false, dora" and hasattr(layer, "lora_A") and "default" in layer.lora_A:
            a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
            layer.lora_magnitude_vector["default"].update_layer(
                base_layer=layer.get_base_layer(), lora_A=a, lora_B=b, scaling=layer.scaling["default"]
            )
    return made


def _stored(place: Path, name: str) -> torch.Tensor:
    return load_file(place / "model" / "model.safetensors")[f"{name.removeprefix('base_model.model.')}.weight"]


def _loftq(layer: Any, weight: torch.Tensor) -> None:
    from peft.utils.loftq_utils import _low_rank_decomposition

    found = _low_rank_decomposition(weight.detach().float() - layer.get_base_layer().weight.detach(), reduced_rank=4)
    layer.lora_A["default"].weight.data, layer.lora_B["default"].weight.data = found["R"], found["L"]


def check(kind: str, place: Path) -> None:
    trainer = start(place, **KINDS[kind][0])
    config, values = trainer.args, values_of(trainer.prepare().model)
    if config.use_4bit_quantization:
        assert any(isinstance(m, NF4Linear) for m in trainer.model.modules())
    trainer.train()
    trainer.save_model()
    ours, got = losses(trainer), logits_of(trainer.model)
    alone = None
    if runtime.is_main():
        oracle = peft_model(place, kind, config, values)
        for name, p in oracle.named_parameters():
            if name in values and values[name].is_floating_point():
                exact = kind != "loftq" and "magnitude" not in name  # sums in another order
                torch.testing.assert_close(values[name], p.data, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-6)
        if kind == "prompt":
            table, ids = oracle.word_embeddings.weight, make_tokenizer()(TEXT)["input_ids"]
            expected = table[torch.tensor((ids * 5)[:5])]
            torch.testing.assert_close(values["prompt_encoder.default.embedding.weight"], expected, rtol=0, atol=0)
        alone = one_device(oracle, trainer)
        loaded = PeftModel.from_pretrained(base_of(place, config), config.output_dir)
        torch.testing.assert_close(logits_of(loaded), got, rtol=1e-4, atol=1e-5)
        assert (logits_of(base_of(place, config)) - got).abs().max() > 1e-3, (
            "an adapter that does nothing shows nothing"
        )
    alone = exchange(alone, "oracle", watched=False)[0]
    assert ours == pytest.approx(alone, abs=1e-5), (ours, alone)


@pytest.mark.slow
@ranks(2)
@pytest.mark.parametrize("kind", FEW)
def test_an_adapter_begins_trains_and_loads_as_peft_s(kind: str, tmp_path: Path) -> None:
    check(kind, tmp_path)


@pytest.mark.slow
@ranks(1, 4)
@pytest.mark.parametrize("kind", KINDS)
def test_every_adapter_begins_trains_and_loads_as_peft_s(kind: str, tmp_path: Path) -> None:
    check(kind, tmp_path)
