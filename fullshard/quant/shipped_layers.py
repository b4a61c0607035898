"""Puts layers in the formats of a released model in the place of a model's linear layers and experts, on the meta
device, or finds the weights that are unpacked while they are loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from fullshard.config.errors import QuantizationError
from fullshard.device.torch_private import parameters_of
from fullshard.quant.quantizable import LinearForm, form_of, fused_experts
from fullshard.quant.shipped import Shipped, Tensor
from fullshard.quant.stored_experts import StoredExperts
from fullshard.quant.stored_format import StoredFormat, StoredWeight
from fullshard.quant.stored_linear import StoredLinear

ATTRIBUTE = "_fullshard_unpacked"
"""The attribute of a model with the weights that are unpacked while loading, by the name of the dense weight."""
_OF_EXPERT = {"gate_up_proj": ("gate_proj", "w1"), "up_proj": ("up_proj", "w1"), "down_proj": ("down_proj", "w2")}
"""What files that store experts one by one call the first matrix of a stack."""
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def use_shipped(
    model: nn.Module, shipped: Shipped, stored: Mapping[str, Tensor], dense: set[str], unpack: bool = False
) -> None:
    """Give a model on the meta device the formats of its files, in place.

    `stored` has the tensors in the files, if they are there; `dense` the names of layers that stay dense, whose weights
    are unpacked while loading; with `unpack` all are.
    """
    shipped = shipped.with_scales_of(stored)
    unpacked: dict[str, StoredWeight] = {}
    count = 0
    for name, linear, form in _linears(model, shipped, stored):
        weight = _checked(f"{name}.weight", StoredWeight(form[0], form[1].out_features, form[1].in_features))
        if unpack or name in dense:
            unpacked[f"{name}.weight"] = weight
        else:
            layer = StoredLinear.of(linear, form[0], form[1])
            if layer.bias is not None:
                layer.bias.requires_grad_(False)
            model.set_submodule(name, layer)
        count += 1
    for name, module, weights in _experts(model, shipped, stored):
        if unpack:
            unpacked |= {f"{name}.{own}": weight for own, weight in weights.items()}
        else:
            StoredExperts.of(module, weights)
        count += len(weights)
    if not count:
        raise QuantizationError(
            f"{type(model).__name__} has no layer that its quantization_config ({shipped.method}) names; check targets "
            f"and ignored modules there"
        )
    setattr(model, ATTRIBUTE, unpacked)


def stored_weights(model: nn.Module) -> dict[str, StoredWeight]:
    """The weights that files store in a released model's format, by the name of the dense weight in the model."""
    weights: dict[str, StoredWeight] = dict(getattr(model, ATTRIBUTE, {}))
    for name, module in model.named_modules():
        if isinstance(module, StoredLinear | StoredExperts):
            prefix = f"{name}." if name else ""
            weights |= {f"{prefix}{own}": weight for own, weight in module.stored_weights().items()}
    return weights


def _checked(name: str, weight: StoredWeight) -> StoredWeight:
    """The weight, if its groups divide its columns."""
    width = weight.format.coding.block[1]
    if weight.format.coding.block[0] == 1 and width and weight.columns % width:
        raise QuantizationError(
            f"{name}: {weight.columns} columns are no multiple of the {width} that share a scale in "
            f"{weight.format.name}; check group_size in quantization_config"
        )
    return weight


def _linears(
    model: nn.Module, shipped: Shipped, stored: Mapping[str, Tensor]
) -> Iterator[tuple[str, Any, tuple[StoredFormat, LinearForm]]]:
    """The linear layers with quantized weights."""
    for name, module in list(model.named_modules()) if not shipped.experts_only else ():
        if (
            name
            and (form := form_of(module)) is not None
            and not form.transposed
            and (chosen := shipped.format_of(name, _classes(module))) is not None
            and not _is_dense(stored, f"{name}.weight")
        ):
            yield name, module, (chosen, form)


def _classes(module: nn.Module) -> list[str]:
    return [cls.__name__ for cls in type(module).__mro__ if issubclass(cls, nn.Module)]


def _is_dense(stored: Mapping[str, Tensor], name: str) -> bool:
    """Whether the files store a weight as floats of at least 16 bits."""
    return name in stored and stored[name].dtype in _FLOATS


def _experts(
    model: nn.Module, shipped: Shipped, stored: Mapping[str, Tensor]
) -> Iterator[tuple[str, nn.Module, dict[str, StoredWeight]]]:
    """The modules with quantized fused experts, and their weights."""
    for name, module in list(model.named_modules()):
        weights = {}
        for own, _ in fused_experts(module):
            parts = [f"{name}.0.{part}" for part in _OF_EXPERT.get(own, (own,))]
            if any(shipped.kept(one, ("Linear",)) for one in (name, *parts)) or _is_dense(stored, f"{name}.{own}"):
                continue
            chosen = next((f for part in parts if (f := shipped.format_of(part, ("Linear",))) is not None), None)
            if chosen is not None:
                key = f".{own}{chosen.suffixes['packed']}"
                together = any(one.endswith(f"experts{key}") for one in stored) or chosen.blocked
                joined = 2 if own == "gate_up_proj" and not together else 1
                weight = StoredWeight.of(chosen, tuple(parameters_of(module)[own].shape), joined)
                weights[own] = _checked(f"{name}.{own}", weight)
        if weights:
            yield name, module, weights
