"""bitsandbytes' layers in a model in memory: 4-bit ones become ours, with the same bits; the library need not be
installed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fullshard.config.errors import QuantizationError
from fullshard.quant import bnb_format
from fullshard.quant.linear import NF4Linear
from fullshard.quant.sharded_groups import from_state

QUANTIZER = ("hf_quantizer", "is_quantized", "quantization_method")
"""Attributes with which transformers marks a model with bitsandbytes' layers."""


def foreign_layers(model: nn.Module, kind: str) -> dict[str, Any]:
    """bitsandbytes' layers of one class, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if type(module).__name__ == kind and type(module).__module__.startswith("bitsandbytes.")
    }


def take_over(model: nn.Module, inner: nn.Module) -> int:
    """Put our layers in the place of bitsandbytes' 4-bit ones; returns their number. `inner` is the model without
    PEFT's wrappers."""
    replaced: dict[nn.Module, NF4Linear] = {}
    for name, layer in foreign_layers(model, "Linear4bit").items():
        if hasattr(layer.weight.quant_state, "original_dtype"):
            raise QuantizationError(
                f"{name}: the model has been evaluated on the CPU, for which bitsandbytes repacks its 4-bit weights "
                f"and rounds their scales to bf16; load it again, and evaluate with the trainer"
            )
        if layer not in replaced:
            replaced[layer] = _ours(layer)
        model.set_submodule(name, replaced[layer])
    for attribute in QUANTIZER if replaced else ():
        vars(inner).pop(attribute, None)
    return len(replaced)


@torch.no_grad()
def _ours(layer: Any) -> NF4Linear:
    """Our layer with the same 4-bit weight."""
    packed, state = bnb_format.from_tensors(layer.state_dict())
    _, scheme = from_state(packed, state)
    ours = NF4Linear(
        layer.in_features, layer.out_features, layer.bias is not None, scheme=scheme, device=packed.device,
        compute_dtype=layer.compute_dtype, dtype=state.dtype,
    )  # fmt: skip
    ours.set_quant_state(packed, state)
    if layer.bias is not None:
        ours.bias = layer.bias
    return ours.train(layer.training)
