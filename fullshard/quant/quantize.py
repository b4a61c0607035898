"""`quantize_model`: replaces a model's linear layers by `NF4Linear` and its fused experts by `NF4Experts`, its linear
layers by `FP8Linear`, or both by those that keep the formats of a released model's files.

Models with values are quantized layer by layer. On the meta device only the modules are replaced; loading sets their
values.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from fullshard.config.errors import QuantizationError
from fullshard.device.torch_private import parameters_of
from fullshard.distributed import engines
from fullshard.quant import bnb_format, fp8
from fullshard.quant.config import Quantization
from fullshard.quant.experts import NF4Experts
from fullshard.quant.fp8_linear import FP8Linear
from fullshard.quant.linear import NF4Linear
from fullshard.quant.packed_experts import PackedExperts
from fullshard.quant.quantizable import LinearForm, form_of, fused_experts
from fullshard.quant.quantized_linear import QuantizedLinear
from fullshard.quant.shipped import Shipped, Tensor, is_shipped
from fullshard.quant.shipped_layers import use_shipped
from fullshard.spmd.tensor import is_sharded


def quantize_model(
    model: nn.Module, config: Any, stored: Mapping[str, Any] | None = None, unpack: bool = False
) -> nn.Module:
    """Quantize the model's linear layers (`NF4Linear`) and fused experts (`NF4Experts`) in place, and return it.

    The output head and `llm_int8_skip_modules` stay dense. On the meta device the new layers get their values when the
    model is loaded; `stored` then has the tensors in the files by name, each with a shape and a dtype, so that weights
    stored in few bits are read as they are. A released model's `quantization_config` (MXFP4, fp8 blocks,
    compressed-tensors) keeps the formats of its files; with `unpack` they are unpacked while loading. With "fp8" as the
    configuration, linear layers become `FP8Linear`; fused experts and layers whose sizes are not multiples of 16 stay
    dense.
    """
    engines.require("quantized weights", "quantization of weights (4-bit, fp8)")
    _check(model)
    if config == "fp8":
        return _to_fp8(model)
    if isinstance(config, Shipped) or is_shipped(config):
        return _as_shipped(model, config if isinstance(config, Shipped) else Shipped.of(config), stored or {}, unpack)
    chosen = Quantization.of(config)

    def four_bits(name: str, linear: Any, form: LinearForm) -> NF4Linear:
        layer = NF4Linear.of(linear, chosen.scheme, chosen.compute_dtype, form)
        layer.stored = _stored(f"{name}.weight", stored or {})
        return layer

    replaced = _replace(model, linears(model, chosen.skip), four_bits)
    experts = list(expert_modules(model, chosen.skip))
    for _, module, names in experts:
        NF4Experts.of(module, names, chosen.scheme, chosen.compute_dtype)
    if not replaced and not experts:
        raise QuantizationError(
            f"{type(model).__name__} has no weight to quantize: no fused experts, and no linear layers besides the head"
            f"{' and ' + ', '.join(chosen.skip) if chosen.skip else ''}"
        )
    if hasattr(model, "config"):
        model.config.quantization_config = chosen.to_config()
    return model


def _as_shipped(model: nn.Module, shipped: Shipped, stored: Mapping[str, Tensor], unpack: bool) -> nn.Module:
    if any(not p.is_meta for p in model.parameters()):
        raise QuantizationError(
            f"{type(model).__name__} has dense weights already; a released model's formats are read from its files: "
            f"give its folder"
        )
    use_shipped(model, shipped, stored, {name for name in _always_dense(model) if name}, unpack)
    if hasattr(model, "config"):
        if unpack and hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        elif not unpack:
            model.config.quantization_config = dict(shipped.config)
    return model


def _to_fp8(model: nn.Module) -> nn.Module:
    fitting = ((name, linear, form) for name, linear, form in linears(model) if fp8.fits(*form[:2]))
    if not _replace(model, fitting, lambda name, linear, form: FP8Linear.of(linear, form=form)):
        raise QuantizationError(
            f"{type(model).__name__} has no weight to quantize to fp8: no linear layer besides the head whose sizes "
            f"are multiples of {fp8.MULTIPLE}"
        )
    return model


def _replace(
    model: nn.Module,
    layers: Iterable[tuple[str, Any, LinearForm]],
    make: Callable[[str, Any, LinearForm], QuantizedLinear],
) -> int:
    """Put quantized layers in the place of linear ones; returns their number."""
    replaced: dict[nn.Module, QuantizedLinear] = {}
    for name, linear, form in list(layers):
        if linear not in replaced:
            replaced[linear] = make(name, linear, form)
            if replaced[linear].bias is not None:
                replaced[linear].bias.requires_grad_(False)
        model.set_submodule(name, replaced[linear])
    return len(replaced)


def _stored(name: str, tensors: Mapping[str, Any]) -> dict[str, tuple[int, ...]] | None:
    """The file tensors of a 4-bit weight, by their names in its layer; None if the weight is dense."""
    if not bnb_format.is_quantized(tensors, name):
        return None
    return {"weight" + key.removeprefix(name): tuple(t.shape) for key, t in tensors.items() if _of(key, name)}


def _of(key: str, name: str) -> bool:
    return key == name or key.startswith(f"{name}.")


def linears(model: nn.Module, skip: tuple[str, ...] = ()) -> Iterator[tuple[str, Any, LinearForm]]:
    """The linear layers to quantize, under every name they have."""
    kept = [*skip, *_always_dense(model)]
    for name, module in model.named_modules(remove_duplicate=False):
        if name and not _matches(name, kept) and (form := form_of(module)) is not None:
            yield name, module, form


def expert_modules(model: nn.Module, skip: tuple[str, ...] = ()) -> Iterator[tuple[str, nn.Module, list[str]]]:
    """The modules with fused experts to quantize, and the names of their fused weights."""
    kept = [*skip, *_always_dense(model)]
    for name, module in model.named_modules():
        weights = [own for own, _ in fused_experts(module) if not _matches(f"{name}.{own}", kept)]
        if weights and not _matches(name, kept):
            yield name, module, weights


def quantized_layers(model: nn.Module) -> dict[str, QuantizedLinear]:
    """The model's quantized linear layers by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}


def quantized_experts(model: nn.Module) -> dict[str, PackedExperts]:
    """The model's modules with quantized experts by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, PackedExperts)}


def packed_parameters(model: nn.Module) -> set[int]:
    """The ids of the parameters with quantized weights."""
    modules: list[Any] = [*quantized_layers(model).values(), *quantized_experts(model).values()]
    return {id(parameters_of(module)[name]) for module in modules for name in module.made_parameters()}


def packed_weights(model: nn.Module) -> int:
    """The number of quantized weights."""
    linear = sum(math.prod(layer.shape) for layer in quantized_layers(model).values())
    return linear + sum(math.prod(s) for module in quantized_experts(model).values() for s in module.fused.values())


def quantized_format(model: nn.Module) -> str | None:
    """The format of a model's quantized weights, such as "4-bit", "fp8" or "mxfp4"; None if it has none."""
    experts = (module.format for module in quantized_experts(model).values())
    return next(itertools.chain(experts, (layer.FORMAT for layer in quantized_layers(model).values())), None)


def dequantize_model(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """Replace quantized layers by dense ones with the dequantized weights, in place; adapters stay."""
    for module in quantized_experts(model).values():
        module.restore(dtype)
    for name, layer in quantized_layers(model).items():
        dense = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
        dense.weight = nn.Parameter(layer.dequantize(dtype), requires_grad=False)
        if layer.bias is not None:
            dense.bias = layer.bias
        model.set_submodule(name, dense.train(layer.training))
    if hasattr(getattr(model, "config", None), "quantization_config"):
        del model.config.quantization_config
    return model


def _check(model: nn.Module) -> None:
    from peft.tuners.tuners_utils import BaseTunerLayer

    if any(is_sharded(p) for p in model.parameters()):
        raise QuantizationError("the model is already sharded; quantize it before FSDPv2(model, mesh)")
    if any(isinstance(m, BaseTunerLayer) for m in model.modules()):
        raise QuantizationError(
            "the model already has adapters, which would be quantized too; quantize it before get_peft_model"
        )
    if quantized_layers(model) or quantized_experts(model):
        raise QuantizationError("the model is already quantized")


def _always_dense(model: nn.Module) -> list[str]:
    """Modules that are never quantized: the output head, tied weights, and `_keep_in_fp32_modules`."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    names = [name for name, module in model.named_modules() if head is not None and module is head]
    first: dict[int, str] = {}
    for name, module in model.named_modules():
        for parameter in parameters_of(module).values():
            if parameter is not None and first.setdefault(id(parameter), name) != name:
                names += [first[id(parameter)], name]
    return [*names, *(getattr(model, "_keep_in_fp32_modules", None) or [])]


def _matches(name: str, patterns: list[str]) -> bool:
    """Whether a module's name starts with a pattern (up to a dot) or ends with one."""
    return any(re.match(rf"(?:{p})(?:\.|$)", name) or name == p or name.endswith(f".{p}") for p in patterns if p)
