"""Messages of other libraries that our commands leave out, and those beside them that are shown."""

from __future__ import annotations

import copy
import logging
import warnings
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from fullshard.config.errors import ConfigError
from fullshard.distributed import log_filter
from fullshard.sft.adapter import add_adapter

SMALL = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2,
}  # fmt: skip


def warned(model: Any, messages: tuple[log_filter.Message, ...], **settings: Any) -> list[str]:
    """What PEFT warns of when the adapter is put in."""
    with warnings.catch_warnings(record=True) as found, torch.device("meta"):
        warnings.simplefilter("always")
        log_filter.install_filters(messages)
        get_peft_model(copy.deepcopy(model), LoraConfig(task_type="CAUSAL_LM", **settings))
    return [str(one.message) for one in found]


def test_patterns_that_peft_itself_puts_in() -> None:
    with torch.device("meta"):
        model = MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=2))
    targets = ["q_proj", "w1", "w2", "w3"]
    with pytest.raises(ConfigError, match=r"lora_dropout=0\.1: peft has no such adapters on parameters"):
        add_adapter(copy.deepcopy(model), LoraConfig(target_modules=targets, lora_dropout=0.1), 0)
    assert any("rank_pattern keys did not match" in text for text in warned(model, (), target_modules=targets))
    assert not warned(model, log_filter.WARNED, target_modules=targets)
    (own,) = warned(model, log_filter.WARNED, target_modules=["q_proj"], rank_pattern={"k_proj": 2})
    assert "rank_pattern keys did not match" in own and "k_proj" in own, "the user can put that right"


def test_advice_for_training_is_shown_there_and_not_afterwards() -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=True))
    targets = ["q_proj", "embed_tokens"]
    (shown,) = warned(model, log_filter.WARNED, target_modules=targets)
    assert "tied layer is part of the adapter" in shown
    assert not warned(model, log_filter.TRAINED, target_modules=targets)


def test_the_loss_type_that_a_configuration_leaves_open(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("transformers.modeling_utils")
    monkeypatch.setattr(logger, "filters", [])
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        for left_out in (False, True):
            if left_out:
                log_filter.install_filters()
            type(logger).warning_once.cache_clear()  # type: ignore[attr-defined]
            model = GPT2LMHeadModel(GPT2Config(vocab_size=8, n_embd=4, n_layer=1, n_head=1, n_positions=4))
            model.config.loss_type = model.loss_type = None
            tokens = torch.zeros(1, 2, dtype=torch.long)
            assert torch.isfinite(model(input_ids=tokens, labels=tokens).loss)
            logger.warning("another message")
    finally:
        logger.removeHandler(handler)
    assert [text[:16] for text in said] == ["`loss_type=None`", "another message", "another message"]


def test_each_is_one_text_of_one_module_with_a_reason() -> None:
    for one in (*log_filter.LOGGED, *log_filter.WARNED, *log_filter.TRAINED):
        assert len(one.text) > 30 and "." in one.source and one.why.endswith(".")
