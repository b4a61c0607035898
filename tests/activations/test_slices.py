"""Layers whose parts run in slices of the sequence; the oracle is the same model without slices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fullshard.activations.levels import Level, run_in_slices, set_level, sliced_parts
from fullshard.activations.slices import ELEMENTS, GradientSum, SliceCount, is_sliced, run_whole, slice_module
from fullshard.fsdp import checkpoint_module
from fullshard.models.experts import use_own_experts
from fullshard.models.slice_check import apply_slices, layers_of, try_slices
from fullshard.quant.config import Quantization
from fullshard.quant.sharded_groups import Scheme
from tests.lora.fused_models import assert_same
from tests.planner.small_models import planned

IDS = torch.arange(46).view(2, 23) * 7 % 61 + 3
FAMILIES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "gpt2", "mistral", "mixtral", "qwen3_moe")
WAYS: dict[str, dict[str, Any]] = {
    "full": {}, "peft lora": {"lora": {}}, "fused lora": {"lora": {}, "fused": True},
    "qlora": {"lora": {}, "fused": True, "quantize": Quantization(Scheme())},
    "dropout": {"lora": {"lora_dropout": 0.2}, "fused": True},
}  # fmt: skip
QUICK = [("llama", "fused lora"), ("gemma3", "full"), ("mixtral", "full"), ("gpt2", "peft lora"), ("qwen2", "qlora")]
EVERY = [(name, way) for name in FAMILIES for way in WAYS if not (name == "gpt2" and way == "qlora")]
CASES = [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in EVERY]
LEVELS = [Level.RECOMPUTE_MLP, Level.RECOMPUTE]


def make(name: str, way: str, dtype: torch.dtype = torch.float64) -> Any:
    """A tiny model in training, with an adapter that changes outputs."""
    exact = torch.float32 if way == "qlora" else dtype
    attention = "eager" if name == "gemma2" else "sdpa"
    model = planned(name, "cpu", dtype=exact, attention=attention, **WAYS[way]).model
    torch.manual_seed(1)
    for parameter_name, parameter in model.named_parameters():
        if "lora_B" in parameter_name:
            nn.init.normal_(parameter, 0, 0.2)
        parameter.data = parameter.data.to(exact) if parameter.requires_grad else parameter.data
    return model.train()


def step(model: Any, seed: int = 3) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The logits and all gradients of one step."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    logits = model(input_ids=IDS, use_cache=False).logits
    F.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten()).backward()
    return logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def sliced(model: Any, level: Level = Level.RECOMPUTE_MLP, count: int = 4) -> list[str]:
    """Slice all parts of a model's layers that can be; returns their names in a layer."""
    parts = apply_slices(model, try_slices(model), SliceCount(count))
    for layer in layers_of(model):
        set_level(layer, level)
    return parts


def with_level(model: Any, level: Level) -> Any:
    for layer in layers_of(model):
        set_level(layer, level)
    return model


@pytest.mark.parametrize(("name", "way"), CASES)
def test_losses_and_gradients_are_those_of_the_whole(name: str, way: str) -> None:
    model = make(name, way)
    expected = step(model)
    parts = sliced(model)
    assert any("mlp" in part for part in parts)
    close = 1e-10 if next(iter(expected[1].values())).dtype == torch.float64 else 1e-5
    for level in LEVELS:
        found = step(with_level(model, level))
        if not (way == "dropout" and name in ("gpt2", "mixtral", "qwen3_moe", "phi3")):  # PEFT's layers: other masks
            assert_same(found, expected, close)
    assert_same(step(with_level(model, Level.KEEP_ALL)), expected, close)
