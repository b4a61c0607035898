"""PEFT's methods besides LoRA, VeRA and prompts: served as PEFT has them on one device, or refused by name.

The oracle is PEFT: its model with our initial values, a plain loop on one device, and `PeftModel.from_pretrained` on
what a run leaves. (LoRA's variants, VeRA and prompts are in `test_adapter_kinds.py`.)
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, get_scheduler

from fullshard.config.errors import ConfigError
from fullshard.distributed import runtime
from fullshard.distributed.ranks import exchange
from fullshard.lora.peft_model import REFUSED, SERVED
from fullshard.sft.trainer import SFTTrainer
from tests.data.tiny import make_tokenizer, text_rows
from tests.pool import ranks
from tests.sft.runs import global_batch, losses, plain_losses, settings
from tests.sft.test_adapter_kinds import logits_of, values_of
from tests.sft.tiny import make_folder, make_model

TARGETS = {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "IA3": ("IA3Config", {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
    "LOHA": ("LoHaConfig", {"r": 4, "alpha": 8}),
    "LOKR": ("LoKrConfig", {"r": 4, "alpha": 8}),
    "OFT": ("OFTConfig", {"oft_block_size": 4}),
    "BOFT": ("BOFTConfig", {"boft_block_size": 4}),
    "HRA": ("HRAConfig", {"r": 4}),
    "LN_TUNING": ("LNTuningConfig", {"target_modules": ["input_layernorm"]}),
    "FOURIERFT": ("FourierFTConfig", {"n_frequency": 20}),
    "RANDLORA": ("RandLoraConfig", {"r": 4}),
    "MISS": ("MissConfig", {"r": 4}),
    "C3A": ("C3AConfig", {"block_size": 16}),
    "ROAD": ("RoadConfig", {"group_size": 16}),
    "WAVEFT": ("WaveFTConfig", {"n_frequency": 20}),
    "GRALORA": ("GraloraConfig", {"r": 4}),
    "DELORA": ("DeloraConfig", {"r": 4}),
    "TRAINABLE_TOKENS": ("TrainableTokensConfig", {"target_modules": ["embed_tokens"], "token_indices": [*range(99)]}),
    "several layers": ("LoraConfig", {"rank_pattern": {"v_proj": 2}, "layers_to_transform": [1], "lora_bias": True}),
    "parameters": ("LoraConfig", {"r": 4, "target_modules": ["v_proj"], "target_parameters": ["q_proj.weight"]}),
}  # fmt: skip
IN_MEMORY = ("DELORA", "TRAINABLE_TOKENS")
"""Methods that start from the weights."""


def config_of(method: str) -> Any:
    name, values = METHODS[method]
    if not hasattr(peft, name):
        pytest.skip(f"needs a newer peft: this one has no {name}")
    return getattr(peft, name)(**{**TARGETS, **values})


def check(method: str, place: Path, in_memory: bool) -> None:
    asked = config_of(method)
    if runtime.is_main():
        make_folder(place)
    runtime.barrier()
    folder = place / "model"
    config = settings(
        place / "run", max_steps=4, learning_rate=2e-2, lr_scheduler_type="constant",
        **global_batch(runtime.world_size()),
    )  # fmt: skip
    given = AutoModelForCausalLM.from_pretrained(folder) if in_memory else str(folder)
    trainer = SFTTrainer(
        given, config, train_dataset=text_rows(60), tokenizer=make_tokenizer(), peft_config=copy.deepcopy(asked)
    )
    values = values_of(trainer.prepare().model)
    trainer.train()
    trainer.save_model()
    ours, got = losses(trainer), logits_of(trainer.model)
    alone = None
    if runtime.is_main():
        torch.manual_seed(config.seed)  # for what is no parameter
        oracle = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), copy.deepcopy(asked))
        trained = {name: p for name, p in oracle.named_parameters() if p.requires_grad}
        assert trained.keys() == {name for name, p in trainer.model.named_parameters() if p.requires_grad}
        for name, p in trained.items():
            p.data.copy_(values[name])
        optimizer = torch.optim.AdamW(trained.values(), lr=config.learning_rate, weight_decay=0.0)
        schedule, order = get_scheduler("constant", optimizer), trainer.loop.loader.sampler.order
        oracle.train()
        alone = plain_losses(oracle, optimizer, schedule, trainer.parts.train, order, config)
        loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), config.output_dir)
        torch.testing.assert_close(logits_of(loaded), got, rtol=1e-4, atol=1e-5)
        assert (logits_of(AutoModelForCausalLM.from_pretrained(folder)) - got).abs().max() > 1e-3
    alone = exchange(alone, "oracle", watched=False)[0]
    assert ours == pytest.approx(alone, abs=1e-5), (ours, alone)


@ranks(2)
def test_a_method_trains_and_loads_as_peft_s(tmp_path: Path) -> None:
    check("LOHA", tmp_path, in_memory=False)


@pytest.mark.slow
@ranks(1, 2)
@pytest.mark.parametrize(
    ("method", "in_memory"),
    [(method, in_memory) for method in METHODS for in_memory in (False, True) if in_memory or method not in IN_MEMORY],
)
def test_every_method_trains_and_loads_as_peft_s(method: str, in_memory: bool, tmp_path: Path) -> None:
    check(method, tmp_path, in_memory)


def refused(place: Path, model: Any, peft_config: Any, match: str, **changes: Any) -> None:
    rows = {"train_dataset": text_rows(8), "tokenizer": make_tokenizer()}
    with pytest.raises(ConfigError, match=match):
        SFTTrainer(model, settings(place, **changes), peft_config=peft_config, **rows)


@ranks(1)
def test_other_methods_are_refused_by_name(tmp_path: Path) -> None:
    adalora = peft.AdaLoraConfig(total_step=5, **TARGETS)
    refused(tmp_path, make_model(), adalora, "a ADALORA adapter is not supported: it changes its ranks")
    refused(tmp_path, get_peft_model(make_model(), adalora), None, "a ADALORA adapter is not supported")
    adalora.peft_type = "NEW"
    refused(tmp_path, make_model(), adalora, "a NEW adapter is not supported: it has not been tried")
    refused(tmp_path, make_model(), config_of("IA3"), "IA3 adapter .* on 4-bit weights", use_4bit_quantization=True)
    make_model().save_pretrained(tmp_path / "model")
    refused(tmp_path, str(tmp_path / "model"), config_of("DELORA"), "a DELORA adapter is initialized from the weights")


def test_every_method_of_peft_is_known() -> None:
    known = {kind.value for kind in peft.PeftType} - {*SERVED, *REFUSED}
    assert known <= {
        "ADAMSS", "BEFT", "DEFT", "FROD", "GLORA", "HIRA", "LILY", "PEANUT", "PSOFT", "PVERA", "SHADOW", "SUPERTUNING",
        "TINYLORA", "UNILORA",
    }  # fmt: skip
    assert not {*SERVED} & {*REFUSED}
