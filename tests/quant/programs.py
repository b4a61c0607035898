"""The QLoRA program that sharded ones must equal: one device, dense weights that bitsandbytes rounded to 4 bits."""

from __future__ import annotations

import functools
from typing import Any

import bitsandbytes.functional as bnb
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from fullshard.fsdp import FSDPv2, checkpoint_module, transformer_auto_wrap_policy
from fullshard.quant.quantize import quantize_model
from fullshard.quant.sharded_groups import Scheme
from tests.fsdp.programs import mean_over_ranks, mesh_for, mine
from tests.quant.unpacked import unpacked_by_bnb

VOCABULARY, ROWS, LENGTH = 131, 8, 7


def llama(dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """Layers of one, of less than one and of several groups, none a multiple of four."""
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=448, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, use_cache=False, attention_bias=True,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.02)
    return model


def with_lora(model: nn.Module, **options: Any) -> nn.Module:
    """Adapters on every layer but the head; both factors random, so that every gradient counts."""
    torch.manual_seed(7)
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False, lora_dropout=0.0)
    return get_peft_model(model, config, **options)


def rounded(model: nn.Module, scheme: Scheme) -> nn.Module:
    """The model with each linear weight replaced by what bitsandbytes makes of it."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and "lm_head" not in name:
            packed, state = bnb.quantize_4bit(
                module.weight.data, blocksize=scheme.blocksize, compress_statistics=scheme.double,
                quant_type=scheme.quant_type,
            )  # fmt: skip
            module.weight.data = unpacked_by_bnb(packed, state)
    return model


def batches(steps: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(13)
    return [torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=generator) for _ in range(steps)]


def train(model: nn.Module, steps: int, sharded: bool) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, foreach=True)
    losses = []
    for batch in batches(steps):
        rows = mine(batch) if sharded else batch
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(loss) if sharded else loss.item())
    return losses


@functools.lru_cache(maxsize=8)
def alone(scheme: Scheme, steps: int) -> list[float]:
    """Losses of the one-device program."""
    return train(with_lora(rounded(llama(), scheme)), steps, sharded=False)


def sharded_qlora(scheme: Scheme, strategy: str, checkpointed: str = "", **options: Any) -> nn.Module:
    """The same model with packed weights, fully sharded."""
    model = with_lora(quantize_model(llama(), scheme))
    if checkpointed:
        if checkpointed == "reentrant":
            model.enable_input_require_grads()
        for layer in model.base_model.model.model.layers:
            checkpoint_module(layer, reentrant=checkpointed == "reentrant")
    return FSDPv2(
        model, mesh_for(strategy), strategy=strategy, auto_wrap_policy=transformer_auto_wrap_policy, **options
    )
