"""Small models of each family, as files and as `from_pretrained` loads them: what loading and export must equal."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BertForMaskedLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    T5ForConditionalGeneration,
)

import fullshard.spmd as xs
from fullshard.distributed import runtime
from tests.fsdp.programs import bert, gpt2, llama, mixtral, t5


def qwen2() -> nn.Module:
    config = Qwen2Config(
        vocab_size=67, hidden_size=32, intermediate_size=44, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=False,
    )  # fmt: skip
    return Qwen2ForCausalLM(config)


def qwen2_moe() -> nn.Module:
    config = Qwen2MoeConfig(
        vocab_size=67, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=10,
        shared_expert_intermediate_size=12, max_position_embeddings=32,
    )  # fmt: skip
    return Qwen2MoeForCausalLM(config)


FAMILIES = {
    "llama": llama,
    "llama-tied": functools.partial(llama, tied=True),
    "gpt2": gpt2,
    "bert": bert,
    "t5": t5,
    "mixtral": mixtral,
    "qwen2": qwen2,
    "qwen2-moe": qwen2_moe,
}
CLASSES: dict[str, Any] = {"bert": BertForMaskedLM, "t5": T5ForConditionalGeneration}


def save(name: str, directory: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    """Write a small model of the family; the same one every time."""
    torch.manual_seed(5)
    model = FAMILIES[name]()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_()  # biases and norms too, so that a value in the wrong place shows
    model.to(dtype).save_pretrained(directory, **options)
    return directory


def reference(name: str, directory: Path, **options: Any) -> nn.Module:
    """The model on one device."""
    return CLASSES.get(name, AutoModelForCausalLM).from_pretrained(directory, **options)


def mesh_for(strategy: str) -> xs.Mesh:
    world = runtime.world_size()
    if strategy.startswith("HYBRID"):
        return xs.Mesh(np.arange(world), (2, world // 2), ("replica", "fsdp"))
    return xs.Mesh(np.arange(world), (world,), ("fsdp",))


def tensor_mesh() -> xs.Mesh:
    world = runtime.world_size()
    return xs.Mesh(np.arange(world), (world // 2, 2), ("fsdp", "model"))


def split_for_tensors(model: nn.Module, mesh: xs.Mesh) -> None:
    """Tensor-parallel layouts over both dims, also where they do not divide."""
    for name, p in model.named_parameters():
        if p.ndim == 2:
            xs.mark_sharding(p, mesh, ("model", None) if "q_proj" in name or "embed" in name else (None, "model"))
        elif p.ndim == 3:
            xs.mark_sharding(p, mesh, (None, "model", None))


def assert_equal(model: Any, plain: nn.Module) -> None:
    """Names, dtypes, values of parameters and buffers, and ties: bit for bit."""
    full = model.full_state_dict()
    expected = plain.state_dict()
    assert list(full) == list(expected)
    for key, value in expected.items():
        assert full[key].dtype == value.dtype, key
        assert torch.equal(full[key], value), key
    mine, theirs = dict(model.named_buffers()), dict(plain.named_buffers())
    assert mine.keys() == theirs.keys()
    for key, value in theirs.items():
        assert mine[key].dtype == value.dtype and torch.equal(mine[key].cpu(), value), key
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
