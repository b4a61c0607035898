"""Which layers of a model are quantised, and how: from a configuration in bitsandbytes' terms to `NF4Linear` layers and
`NF4Experts`.

Works on models with values, layer by layer, and on the meta device, where it only lays out what loading fills.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fullshard.errors import QuantizationError
from fullshard.fsdp.strategy import dtype_of
from fullshard.quant import bnb_format
from fullshard.quant.experts import NF4Experts
from fullshard.quant.linear import NF4Linear
from fullshard.quant.quantizable import Form, form_of, fused_experts
from fullshard.quant.sharded_groups import Scheme
from fullshard.spmd.tensor import is_sharded
from fullshard.torch_private import parameters_of

_KNOWN = {
    "load_in_4bit", "load_in_8bit", "_load_in_4bit", "_load_in_8bit", "llm_int8_skip_modules", "bnb_4bit_compute_dtype",
    "bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "bnb_4bit_quant_storage", "quant_method", "llm_int8_threshold",
    "llm_int8_enable_fp32_cpu_offload", "llm_int8_has_fp16_weight",
}  # fmt: skip


@dataclass(frozen=True)
class Quantization:
    """A configuration, checked."""

    scheme: Scheme
    compute_dtype: torch.dtype | None = None
    skip: tuple[str, ...] = ()
    """Names of modules that stay as they are, besides the output head."""

    @classmethod
    def of(cls, config: Any) -> Quantization:
        """From transformers' `BitsAndBytesConfig`, a mapping with its fields, a `Scheme`, or itself."""
        if isinstance(config, Quantization):
            return config
        if isinstance(config, Scheme):
            return cls(config)
        fields = dict(config) if isinstance(config, Mapping) else dict(getattr(config, "__dict__", {}))
        method = fields.get("quant_method")
        method = getattr(method, "value", method)
        if method not in (None, "bitsandbytes") or not fields:
            raise QuantizationError(
                f"quantisation by {method or type(config).__name__} is not supported; pass "
                f"BitsAndBytesConfig(load_in_4bit=True, …)"
            )
        if unknown := sorted(set(fields) - _KNOWN):
            raise QuantizationError(
                f"unknown quantisation option(s) {', '.join(unknown)}; known: {', '.join(sorted(_KNOWN))}"
            )
        four = bool(fields.get("load_in_4bit", fields.get("_load_in_4bit")))
        eight = bool(fields.get("load_in_8bit", fields.get("_load_in_8bit")))
        if four and eight:
            raise QuantizationError(
                "load_in_4bit and load_in_8bit are both set; a weight is stored one way. Choose 4-bit"
            )
        if eight:
            raise QuantizationError(
                "8-bit weights are not supported yet; use load_in_4bit=True, or leave the model as it is"
            )
        if not four:
            raise QuantizationError("a quantisation configuration without load_in_4bit=True quantises nothing")
        scheme = Scheme(
            quant_type=str(fields.get("bnb_4bit_quant_type") or "fp4"),
            double=bool(fields.get("bnb_4bit_use_double_quant")),
            storage=fields.get("bnb_4bit_quant_storage") or torch.uint8,
        )
        compute = dtype_of(fields.get("bnb_4bit_compute_dtype"))
        if compute is not None and not compute.is_floating_point:
            raise QuantizationError(f"bnb_4bit_compute_dtype={compute}: expected a floating-point dtype")
        skip = fields.get("llm_int8_skip_modules") or ()
        return cls(scheme, compute, (skip,) if isinstance(skip, str) else tuple(skip))

    def to_config(self) -> Any:
        """As transformers writes it into config.json."""
        from transformers import BitsAndBytesConfig

        return BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=self.scheme.quant_type,
            bnb_4bit_use_double_quant=self.scheme.double,
            bnb_4bit_quant_storage=self.scheme.storage,
            bnb_4bit_compute_dtype=self.compute_dtype,
            llm_int8_skip_modules=list(self.skip) or None,
        )


def quantize_model(model: nn.Module, config: Any, stored: Mapping[str, tuple[int, ...]] | None = None) -> nn.Module:
    """Hold the model's linear layers (`NF4Linear`) and fused experts (`NF4Experts`) in 4 bits, in place; the head and
    the modules to skip stay.

    On the meta device the new layers wait for their values. `stored` has names and shapes of the tensors in the files
    they will come from: a weight that lies there in 4 bits is read as it is. Returns the model.
    """
    chosen = Quantization.of(config)
    _check(model)
    made: dict[nn.Module, NF4Linear] = {}
    for name, linear, form in list(linears(model, chosen.skip)):
        if linear not in made:
            made[linear] = NF4Linear.of(linear, chosen.scheme, chosen.compute_dtype, form)
            made[linear].stored = _stored(f"{name}.weight", stored or {})
            if made[linear].bias is not None:
                made[linear].bias.requires_grad_(False)
        model.set_submodule(name, made[linear])
    experts = list(expert_modules(model, chosen.skip))
    for _, module, names in experts:
        NF4Experts.of(module, names, chosen.scheme, chosen.compute_dtype)
    if not made and not experts:
        raise QuantizationError(
            f"{type(model).__name__} has no weight to quantise (linear layers besides the head"
            f"{' and ' + ', '.join(chosen.skip) if chosen.skip else ''}, fused experts)"
        )
    if hasattr(model, "config"):
        model.config.quantization_config = chosen.to_config()
    return model


def _stored(name: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]] | None:
    """The tensors that make up a weight in bitsandbytes' form, as its layer names them; None if it is dense."""
    if not bnb_format.is_quantized(shapes, name):
        return None
    return {"weight" + key.removeprefix(name): tuple(shape) for key, shape in shapes.items() if _of(key, name)}


def _of(key: str, name: str) -> bool:
    return key == name or key.startswith(f"{name}.")


def linears(model: nn.Module, skip: tuple[str, ...] = ()) -> Iterator[tuple[str, Any, Form]]:
    """The linear layers that are quantised, with every name they have."""
    kept = [*skip, *_always_dense(model)]
    for name, module in model.named_modules(remove_duplicate=False):
        if name and not _matches(name, kept) and (form := form_of(module)) is not None:
            yield name, module, form


def expert_modules(model: nn.Module, skip: tuple[str, ...] = ()) -> Iterator[tuple[str, nn.Module, list[str]]]:
    """The modules with fused experts that are quantised, and the names of those weights."""
    kept = [*skip, *_always_dense(model)]
    for name, module in model.named_modules():
        weights = [own for own, _ in fused_experts(module) if not _matches(f"{name}.{own}", kept)]
        if weights and not _matches(name, kept):
            yield name, module, weights


def quantized_layers(model: nn.Module) -> dict[str, NF4Linear]:
    """The model's 4-bit linear layers by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, NF4Linear)}


def quantized_experts(model: nn.Module) -> dict[str, NF4Experts]:
    """The model's modules with 4-bit experts by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, NF4Experts)}


def packed_parameters(model: nn.Module) -> set[int]:
    """The ids of the parameters that hold 4-bit weights."""
    modules: list[Any] = [*quantized_layers(model).values(), *quantized_experts(model).values()]
    return {id(parameters_of(module)[name]) for module in modules for name in module.made_parameters()}


def packed_weights(model: nn.Module) -> int:
    """How many weights are held in 4 bits."""
    linear = sum(math.prod(layer.shape) for layer in quantized_layers(model).values())
    return linear + sum(math.prod(s) for module in quantized_experts(model).values() for s in module.fused.values())


def dequantize_model(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """Replace 4-bit layers by dense ones with the same (rounded) weights, in place; adapters stay."""
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
        raise QuantizationError("the model is sharded already; quantise it before FSDPv2(model, mesh)")
    if any(isinstance(m, BaseTunerLayer) for m in model.modules()):
        raise QuantizationError(
            "the model has adapters already, which would be quantised too; quantise it before get_peft_model"
        )
    if quantized_layers(model) or quantized_experts(model):
        raise QuantizationError("the model is quantised already")


def _always_dense(model: nn.Module) -> list[str]:
    """The output head, whatever is tied to another parameter, and what the model itself wants in full precision."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    names = [name for name, module in model.named_modules() if head is not None and module is head]
    first: dict[int, str] = {}
    for name, module in model.named_modules():
        for parameter in parameters_of(module).values():
            if parameter is not None and first.setdefault(id(parameter), name) != name:
                names += [first[id(parameter)], name]
    return [*names, *(getattr(model, "_keep_in_fp32_modules", None) or [])]


def _matches(name: str, patterns: list[str]) -> bool:
    """Whether a module's name begins with a pattern, up to a dot, or ends with it."""
    return any(re.match(rf"(?:{p})(?:\.|$)", name) or name == p or name.endswith(f".{p}") for p in patterns if p)
