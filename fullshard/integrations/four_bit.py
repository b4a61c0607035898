"""`from_pretrained` under `fullshard launch`: which values were loaded, and our layers for `load_in_4bit`.

The dense weights stay mapped from the files until they are needed, so they take no memory. Each linear layer is
quantized when its model is sharded, every rank its own slices, or whole at the first use before that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from fullshard import runtime
from fullshard.fsdp.strategy import dtype_of
from fullshard.integrations import loaded_values
from fullshard.parallelize.model import build_mesh, shard_model
from fullshard.parallelize.settings import EngineSettings
from fullshard.quant import sharded_groups
from fullshard.quant.config import Quantization
from fullshard.quant.linear import NF4Linear
from fullshard.quant.quantizable import LinearForm
from fullshard.quant.quantize import linears, packed_parameters
from fullshard.weights.dtypes import dtypes_kept
from fullshard.weights.slice_reader import Cuts, Job, TensorReader
from fullshard.weights.transforms import piece_of


def from_pretrained(original: Callable[..., Any]) -> Callable[..., Any]:
    """Seam of `PreTrainedModel.from_pretrained`."""

    def load(cls: Any, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        chosen, wanted = None, None
        if _asks_for_4_bits(kwargs.get("quantization_config")):
            chosen = Quantization.of(kwargs.pop("quantization_config"))
            given = [kwargs.pop(name, None) for name in ("dtype", "torch_dtype")]
            wanted = next((dtype for dtype in given if dtype not in (None, "auto")), None)
            # In the dtype of the files: transformers then maps the weights instead of reading them.
            kwargs |= {"dtype": "auto", "device_map": None}
        model, info = original(cls, *args, output_loading_info=True, **kwargs)
        loaded_values.mark(model, {*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])})
        if chosen is not None:
            quantize_later(model, chosen, dtype_of(wanted) or model.dtype)
        return (model, info) if output_loading_info else model

    return load


def _asks_for_4_bits(config: Any) -> bool:
    fields = config if isinstance(config, dict) else getattr(config, "__dict__", {})
    return bool(fields.get("load_in_4bit") or fields.get("_load_in_4bit"))


def quantize_later(model: Any, chosen: Quantization, dtype: torch.dtype) -> None:
    """Put 4-bit layers in the place of the model's linear layers; what stays dense is cast to `dtype`."""
    made: dict[nn.Module, DeferredNF4Linear] = {}
    for name, linear, form in list(linears(model, chosen.skip)):
        if linear not in made:
            made[linear] = DeferredNF4Linear.deferred(linear, chosen, form, dtype)
        model.set_submodule(name, made[linear])
    packed, parameters = packed_parameters(model), dict(model.named_parameters())
    kept = dtypes_kept(model, dtype, parameters)
    for name, parameter in parameters.items():
        if id(parameter) not in packed and parameter.is_floating_point():
            parameter.data = parameter.data.to(kept.get(name, dtype))  # no write: it counts as loaded
    model.config.dtype = dtype
    model.config.quantization_config = chosen.to_config()
    model.is_loaded_in_4bit = True  # what PEFT and TRL look at


class DeferredNF4Linear(NF4Linear):
    """A 4-bit layer that is quantized when its values are first needed."""

    dense: torch.Tensor | None = None
    """The weight as it was loaded; None once the layer has its 4-bit values."""

    @classmethod
    def deferred(cls, linear: Any, chosen: Quantization, form: LinearForm, dtype: torch.dtype) -> DeferredNF4Linear:
        layer = cls(
            form.in_features, form.out_features, linear.bias is not None, scheme=chosen.scheme,
            compute_dtype=chosen.compute_dtype, device="meta", dtype=dtype,
        )  # fmt: skip
        for name, part in layer.parts.items():  # not zeros: memory that is not written to is not taken
            empty = torch.empty_like(part, device=linear.weight.device)
            setattr(layer, name, nn.Parameter(empty, requires_grad=False))
        layer.transposed, layer.dense = form.transposed, linear.weight.detach()
        if linear.bias is not None:
            layer.bias = linear.bias
        layer.train(linear.training)
        return layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.quantize()
        return super().forward(x)

    def whole_parts(self) -> sharded_groups.Parts:
        self.quantize()
        return super().whole_parts()

    def quantize(self) -> None:
        """Quantize the whole weight here, if that has not been done."""
        if self.dense is not None:
            rows = (self.dense.T if self.transposed else self.dense).to(self.packed.device, self.dtype)  # [out, in]
            self.set_parts(sharded_groups.quantize_shard(rows.reshape(-1), rows.numel(), self.scheme))
            self.dense = None


def wrap(settings: EngineSettings, model: nn.Module, options: dict[str, Any]) -> Any:
    """The model sharded in place; each rank quantizes its own slices of the layers that have no 4-bit values yet."""
    layers = [m for m in model.modules() if isinstance(m, DeferredNF4Linear) and m.dense is not None]
    runtime.use_spmd()
    mesh = build_mesh(settings)
    if settings.sync_module_states and not any(p.is_meta for p in model.parameters()):
        later = {id(p) for layer in layers for p in layer.parts.values()}
        loaded_values.share(model, mesh, later)
        options = {**options, "sync_module_states": False}
    wrapped = shard_model(model, settings, mesh, **options)
    _quantize_slices(wrapped, layers)
    return wrapped


def _quantize_slices(model: Any, layers: list[DeferredNF4Linear]) -> None:
    """Give the layers of a sharded model their 4-bit values, each rank its own slices. All ranks must call it."""
    places = {site: p for unit in model._fullshard_engine.units for p in unit.parameters for site in p.sites}
    for layer in layers:
        pieces = {name: piece_of(places[layer, name]) for name in layer.made_parameters()}
        assert layer.dense is not None
        read = layer.read_files({"weight": _Loaded(layer.dense)}, pieces)
        layer.finish_reading(read, pieces)
        layer.dense = None


class _Loaded(TensorReader):
    """A tensor in memory, or mapped from a file."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor, self.shape, self.dtype = tensor, tuple(tensor.shape), tensor.dtype

    def jobs(self, out: torch.Tensor, cuts: Cuts) -> Iterator[Job]:
        def copy() -> None:
            out.copy_(self.tensor[cuts])

        yield copy
