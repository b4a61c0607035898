"""`from_pretrained` under `fullshard launch` for 4-bit models: our layers, which can be sharded.

The weights stay in the files until they are needed, dense or in bitsandbytes' 4 bits. When the model is sharded each
rank reads its own slices of a layer, and quantizes dense ones; a layer that is used before that is read whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fullshard.config.errors import ConfigError, QuantizationError
from fullshard.distributed import runtime
from fullshard.hf import sync_values
from fullshard.hf.lazy_parameters import LazyTensor, Mapped
from fullshard.parallel.model import build_mesh, shard_model
from fullshard.parallel.settings import EngineSettings
from fullshard.quant import sharded_groups
from fullshard.quant.bitsandbytes_layers import foreign_layers
from fullshard.quant.config import Quantization
from fullshard.quant.linear import NF4Linear
from fullshard.quant.quantizable import LinearForm
from fullshard.quant.quantize import linears
from fullshard.quant.sharded_groups import Scheme
from fullshard.weights.slice_reader import TensorReader
from fullshard.weights.transforms import piece_of

FOREIGN = {"Linear4bit": "load_in_4bit", "Linear8bitLt": "load_in_8bit"}
"""bitsandbytes' layers, and what asks for them."""


def from_pretrained(original: Callable[..., Any]) -> Callable[..., Any]:
    """Patch of `PreTrainedModel.from_pretrained`."""

    def load(cls: Any, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        chosen = None
        _leave_tensor_parallelism(kwargs)
        if _asks_for_4_bits(kwargs.get("quantization_config")):
            chosen = Quantization.of(kwargs.pop("quantization_config"))
            kwargs["device_map"] = None
        model, info = original(cls, *args, output_loading_info=True, **kwargs)
        if stored := foreign_layers(model, "Linear4bit"):
            adopt(model, stored)
        elif chosen is not None:
            quantize_later(model, chosen)
        return (model, info) if output_loading_info else model

    return load


def _leave_tensor_parallelism(options: dict[str, Any]) -> None:
    """Leave out what would split the model as it is loaded: fullshard splits it when it is prepared."""
    plan = options.pop("tp_plan", None)
    if plan is None:
        return
    if plan != "auto":
        raise ConfigError(
            f"from_pretrained(tp_plan={plan!r}): expected 'auto'; give a plan of your own with tp_plan in the file of "
            f"fullshard launch"
        )
    for name in ("tp_size", "device_mesh"):
        options.pop(name, None)
    runtime.warn_once(
        "tp_plan", "from_pretrained(tp_plan='auto'): the model is split when it is prepared; set tp_size of fullshard "
        "launch or of ParallelismConfig"
    )  # fmt: skip


def load_on_host(original: Callable[..., Any]) -> Callable[..., Any]:
    """Patch of `Bnb4BitHfQuantizer.update_device_map`, for files that hold 4-bit weights."""
    return lambda self, device_map: {"": "cpu"}


def _asks_for_4_bits(config: Any) -> bool:
    fields = config if isinstance(config, dict) else getattr(config, "__dict__", {})
    return bool(fields.get("load_in_4bit") or fields.get("_load_in_4bit"))


def quantize_later(model: Any, chosen: Quantization) -> None:
    """Put 4-bit layers in the place of the model's linear layers."""
    replaced: dict[nn.Module, DeferredNF4Linear] = {}
    dtype = model.dtype
    for name, linear, form in list(linears(model, chosen.skip)):
        if linear not in replaced:
            weight = linear.weight
            reader = weight.reader if isinstance(weight, LazyTensor) else Mapped(weight.detach())
            replaced[linear] = DeferredNF4Linear.deferred(
                linear, form, {"weight": reader}, chosen.scheme, chosen.compute_dtype, weight.dtype
            )
        model.set_submodule(name, replaced[linear])
    model.config.dtype = dtype
    model.config.quantization_config = chosen.to_config()
    model.is_loaded_in_4bit = True  # what PEFT and TRL look at


def adopt(model: Any, layers: dict[str, Any]) -> None:
    """Put our layers in the place of bitsandbytes', which hold 4-bit weights from the files."""
    for name, layer in layers.items():
        state = layer.weight.quant_state
        tensors = {"": layer.weight.data, **{f".{key}": one for key, one in state.as_dict(packed=True).items()}}
        readers = {f"weight{key}": Mapped(one) for key, one in tensors.items()}
        scheme = Scheme(state.quant_type, state.blocksize, bool(state.nested), layer.weight.dtype)
        form = LinearForm(layer.in_features, layer.out_features, False)
        deferred = DeferredNF4Linear.deferred(layer, form, readers, scheme, layer.compute_dtype, state.dtype)
        deferred.stored = {key: reader.shape for key, reader in readers.items()}
        model.set_submodule(name, deferred)
    for attribute in ("hf_quantizer", "is_quantized", "quantization_method"):  # they are about bitsandbytes' layers
        vars(model).pop(attribute, None)


class DeferredNF4Linear(NF4Linear):
    """A 4-bit layer that is read, and quantized, when its values are first needed."""

    readers: dict[str, TensorReader] | None = None
    """The weight in the files, dense or in 4 bits; None once the layer has its values."""
    reads_slices = False
    """Whether the layer gets its values after it has been sharded, from `wrap`."""

    @classmethod
    def deferred(
        cls, linear: Any, form: LinearForm, readers: Any, scheme: Scheme, compute_dtype: Any, dtype: torch.dtype
    ) -> DeferredNF4Linear:
        """The layer in the place of `linear`, without values until `readers` are read."""
        layer = cls(
            form.in_features, form.out_features, linear.bias is not None, scheme=scheme, compute_dtype=compute_dtype,
            device="meta", dtype=dtype,
        )  # fmt: skip
        for name, part in layer.parts.items():  # not zeros: memory that is not written to is not taken
            empty = torch.empty_like(part, device=linear.weight.device)
            setattr(layer, name, nn.Parameter(empty, requires_grad=False))
        layer.transposed, layer.readers = form.transposed, readers
        if linear.bias is not None:
            layer.bias = linear.bias
        layer.train(linear.training)
        return layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.read()
        return super().forward(x)

    def whole_parts(self) -> sharded_groups.Parts:
        self.read()
        return super().whole_parts()

    def before_sharding(self) -> None:
        """Have the values that the engine divides, where nobody reads them slice by slice afterwards."""
        if not self.reads_slices:
            self.read()

    def read(self) -> None:
        """Read the whole weight here, if that has not been done."""
        if self.readers is not None:
            loader, readers, self.readers = self.group_loader(), self.readers, None
            self.set_parts(loader.finish(loader.read(readers, slice(0, len(self.packed))), None))


def wrap(settings: EngineSettings, model: nn.Module, options: dict[str, Any]) -> Any:
    """The model sharded in place; each rank reads its own slices of the layers that have no 4-bit values yet."""
    for kind, option in FOREIGN.items():
        if foreign := list(foreign_layers(model, kind)):
            raise QuantizationError(
                f"{type(model).__name__} has {len(foreign)} layer(s) of bitsandbytes ({foreign[0]}: {kind}), which "
                f"cannot be sharded. Load it with from_pretrained and load_in_4bit, or without {option}"
            )
    layers = [m for m in model.modules() if isinstance(m, DeferredNF4Linear) and m.readers is not None]
    for layer in layers:
        layer.reads_slices = True
    runtime.use_spmd()
    mesh = build_mesh(settings)
    if settings.sync_module_states and not any(p.is_meta for p in model.parameters()):
        later = {id(p) for layer in layers for p in layer.parts.values()}
        sync_values.share(model, mesh, later)
        options = {**options, "sync_module_states": False}
    wrapped = shard_model(model, settings, mesh, split_tables=False, **options)
    _read_slices(wrapped, layers)
    return wrapped


def _read_slices(model: Any, layers: list[DeferredNF4Linear]) -> None:
    """Give the layers of a sharded model their 4-bit values, each rank its own slices. All ranks must call it."""
    places = {site: p for unit in model._fullshard_engine.units for p in unit.parameters for site in p.sites}
    for layer in layers:
        pieces = {name: piece_of(places[layer, name]) for name in layer.made_parameters()}
        layer.finish_reading(layer.read_files(layer.readers, pieces), pieces)
        layer.readers = None
