"""PEFT's adapters on stacked expert weights (`target_parameters`), in factored form.

PEFT adds `B @ A` of every expert to the whole stack in each forward. Experts that can apply factors get these instead,
by the name of the weight, with the arguments of their call: each `ParamWrapper` adds its own and calls what it wraps.
Files, names and merging stay PEFT's.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import nn

from fullshard.spmd.tensor import is_sharded

IMPLEMENTATION = "fullshard"
"""The name of the experts implementation in transformers (`models/experts.py`)."""


class LoraFactors(NamedTuple):
    """A LoRA adapter on a stack: adds scale × left @ right to each expert."""

    left: torch.Tensor
    """[experts, rows, r]"""
    right: torch.Tensor
    """[experts, r, columns]"""
    scale: float
    dropout: float = 0.0
    """The probability with which elements of the adapter's input are dropped."""


Adapters = dict[str, list[LoraFactors]]
"""The active adapters of each weight, by its name."""


def runs_own_experts(module: nn.Module) -> bool:
    """Whether a module's experts run our implementation."""
    return getattr(getattr(module, "config", None), "_experts_implementation", None) == IMPLEMENTATION


def applies_factors(module: nn.Module) -> bool:
    """Whether a module takes adapters in factored form, with its arguments."""
    return getattr(module, "applies_factors", False) or runs_own_experts(module)


@functools.cache
def patch_peft() -> None:
    """Let PEFT's `ParamWrapper`s pass factors to experts that apply them."""
    from peft.tuners.lora import layer

    wrapper_class: Any = layer.ParamWrapper
    original = wrapper_class.forward

    def forward(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        experts = self.get_base_layer()
        inactive = self.disable_adapters or self.merged or kwargs.get("adapter_names") is not None
        stays_dense = is_sharded(x) and not getattr(experts, "applies_factors", False)
        if inactive or stays_dense or not applies_factors(experts):
            return original(self, x, *args, **kwargs)
        own = [_factors(self, adapter) for adapter in self.active_adapters if adapter in self.lora_A]
        if own:
            kwargs["adapters"] = {**kwargs.get("adapters", {}), self.parameter_name: own}
        return self.base_layer(x, *args, **kwargs)

    wrapper_class.forward = forward


def _factors(wrapper: Any, adapter: str) -> LoraFactors:
    """An adapter's factors per expert."""
    a, b = wrapper.lora_A[adapter].weight, wrapper.lora_B[adapter].weight
    right = a.reshape(wrapper.num_experts, -1, a.shape[-1])  # [experts, r, in]
    left = b.reshape(b.shape[0], -1, wrapper.num_experts).permute(2, 0, 1)  # [experts, out, r]
    if not getattr(wrapper, "_did_swap_in_out_features", False):  # the weight is stored as [experts, in, out]
        left, right = right.transpose(1, 2), left.transpose(1, 2)
    dropout = wrapper.lora_dropout[adapter]
    rate = dropout.p if isinstance(dropout, nn.Dropout) and dropout.training else 0.0
    return LoraFactors(left, right, wrapper.scaling[adapter], rate)
