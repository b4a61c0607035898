"""Sharding plans for the tests of pictures: small models on meshes that need not exist."""

from __future__ import annotations

import functools
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import BitsAndBytesConfig

from fullshard.fsdp.host_embedding import keep_on_host
from fullshard.fsdp.plan import ShardingPlan
from fullshard.fsdp.plan_model import plan_inputs, plan_model
from fullshard.fsdp.strategy import MixedPrecision, ShardingStrategy
from fullshard.quant.quantize import quantize_model
from fullshard.spmd.mesh import VirtualMesh
from tests.fsdp.programs import llama, mixtral

NAME = "<img src=x onerror=alert(1)>\x1b[31m]]> [bold] \"'&"
"""A name that is markup wherever it is not escaped."""


class Odd(nn.Module):
    """Modules and parameters with the name."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({NAME: nn.Linear(8, 6, bias=False), "0": nn.Linear(8, 6), "1": nn.Linear(8, 6)})
        self.register_parameter(NAME, nn.Parameter(torch.zeros(5, 3)))


@functools.cache
def make_model(kind: str) -> tuple[nn.Module, type]:
    """A model, and the class of its units."""
    torch.manual_seed(0)
    if kind == "odd":
        return Odd(), nn.Linear
    if kind == "experts":
        model: Any = mixtral()
        return model, type(model.model.layers[0])
    model = llama(tied=kind == "tied", layers=3)
    layer = type(model.model.layers[0])
    if kind in ("qlora", "fp8"):
        four = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
        model = quantize_model(model, "fp8" if kind == "fp8" else four)
        keep_on_host(model.model.embed_tokens.weight.requires_grad_(False))
    if kind in ("lora", "qlora", "fp8"):
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    return model, layer


def make_plan(
    kind: str = "full", mesh: dict[str, int] | None = None, strategy: str = "FULL_SHARD", precision: str = "bf16"
) -> ShardingPlan:
    mesh = mesh or {"fsdp": 4}
    model, layer = make_model(kind)
    chosen = [module for module in model.modules() if isinstance(module, layer)]
    absent = VirtualMesh(tuple(mesh.values()), tuple(mesh))
    inputs = plan_inputs(
        absent, ShardingStrategy[strategy], MixedPrecision.of(precision), None, None, point_to_point=True
    )  # fmt: skip
    return plan_model(model, chosen, inputs)
