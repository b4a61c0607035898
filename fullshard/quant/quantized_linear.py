"""`QuantizedLinear`: what linear layers with a frozen quantized weight have in common, in 4 bits or fp8.

They are `nn.Linear`s, so PEFT and wrapping policies recognize them. The parts of the weight are uint8 parameters, which
`FSDPv2` shards and gathers like any other; `weight` shows them as a dense tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import nn

from fullshard.config.errors import QuantizationError
from fullshard.device.torch_private import local_of, make_wrapper_subclass, schema_of, tree_map
from fullshard.quant.ops import compute_dtype
from fullshard.quant.quantizable import LinearForm, form_of
from fullshard.spmd.tensor import is_sharded


class QuantizedLinear(nn.Linear):
    """A linear layer with a frozen quantized weight.

    `compute_dtype` is the dtype of the product; by default that of the input, or autocast's. The output has the dtype
    of the input. `dtype` is the dtype of the bias, and of the weight before quantization.
    """

    FORMAT = ""
    """The format in error messages: "4-bit", "fp8"."""
    PARTS: tuple[str, ...] = ()
    """The names of the weight's parts."""
    transposed = False
    """Whether files store the dense weight as (in, out): the layer replaces a `Conv1D`."""

    compute_dtype: torch.dtype | None
    dtype: torch.dtype

    def part_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of each part of the whole weight."""
        raise NotImplementedError

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The weight as a dense tensor."""
        raise NotImplementedError

    def from_files(self, readers: Any, device: torch.device) -> torch.Tensor:
        """The whole weight as it is after quantization, dense, read from files."""
        raise NotImplementedError

    def _set_up(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        compute_dtype: torch.dtype | None,
        device: Any,
        dtype: Any,
    ) -> None:
        """Set sizes, dtypes, zero parts and a zero bias."""
        self.in_features, self.out_features = in_features, out_features
        self.compute_dtype = compute_dtype
        self.dtype = dtype or torch.get_default_dtype()
        shapes = self.part_shapes()
        for name in self.PARTS:
            part = torch.zeros(shapes[name], dtype=torch.uint8, device=device) if name in shapes else None
            self.register_parameter(name, None if part is None else nn.Parameter(part, requires_grad=False))
        value = nn.Parameter(torch.zeros(out_features, dtype=self.dtype, device=device)) if bias else None
        self.register_parameter("bias", value)

    @classmethod
    def _like(cls, linear: Any, form: LinearForm | None, **options: Any) -> tuple[Self, torch.Tensor | None]:
        """A layer of the sizes, bias and mode of a dense one, and that one's weight [out, in]; None on the meta
        device."""
        weight, bias, form = linear.weight, linear.bias, form or form_of(linear)
        if form is None:
            raise QuantizationError(
                f"{type(linear).__name__} cannot be quantized: it does not compute the same as nn.Linear"
            )
        layer = cls(
            form.in_features, form.out_features, bias is not None, device=weight.device, dtype=weight.dtype, **options
        )
        layer.transposed = form.transposed
        if bias is not None:
            layer.bias = bias
        layer.train(linear.training)
        return layer, None if weight.is_meta else (weight.T if form.transposed else weight).detach()

    # --- the weight ---------------------------------------------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the dense weight."""
        return self.out_features, self.in_features

    @property
    def parts(self) -> dict[str, torch.Tensor]:
        """The current parts of the weight: gathered while the layer's unit runs, otherwise sharded."""
        return {n: p for n in self.PARTS if (p := getattr(self, n)) is not None}

    def whole_parts(self) -> dict[str, torch.Tensor]:
        """The parts of the whole weight as plain tensors; raises if this rank has only its shard."""
        parts = {name: local_of(part) if is_sharded(part) else part.data for name, part in self.parts.items()}
        for name, shape in self.part_shapes().items():
            if tuple(parts[name].shape) != shape:
                raise QuantizationError(
                    f"this rank has only {tuple(parts[name].shape)} of the {shape} {name} bytes of a {self.FORMAT} "
                    f"weight; read the whole weight inside `with model.summon_full_params():`"
                )
        return parts

    @torch.no_grad()
    def set_parts(self, parts: Mapping[str, torch.Tensor]) -> None:
        """Set the weight from its parts."""
        for name, part in parts.items():
            getattr(self, name).data.copy_(part)

    @property
    def weight(self) -> torch.Tensor:
        """A read-only tensor of the dense shape that is dequantized when it is used."""
        return QuantizedWeight(self)

    def made_parameters(self) -> tuple[str, ...]:
        """The names of the parameters that are computed from files (`weights/transforms.py`)."""
        return tuple(self.parts)

    def file_tensors(self) -> dict[str, tuple[int, ...]]:
        """The dense weight in files."""
        return {"weight": self.shape[::-1] if self.transposed else self.shape}

    # --- computing ----------------------------------------------------------------------------------------------------

    def product_dtypes(self, x: torch.Tensor) -> tuple[torch.dtype, torch.dtype]:
        """The dtype of the product, and that of the output."""
        if self.compute_dtype is not None:
            return self.compute_dtype, x.dtype
        dtype = compute_dtype(x)
        return dtype, dtype

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        if requires_grad:
            raise QuantizationError(
                f"{self.FORMAT} weights are frozen and cannot be trained. Add adapters (LoRA) to train, or load the "
                f"model without quantization"
            )
        return super().requires_grad_(False)

    def reset_parameters(self) -> None:
        raise QuantizationError(
            f"a layer with a {self.FORMAT} weight cannot be initialized; initialize an nn.Linear and quantize that "
            f"({type(self).__name__}.of)"
        )


class ReadOnlyWeight(torch.Tensor):
    """A tensor whose `.data` cannot be assigned."""

    FORMAT = "4-bit"

    @property
    def data(self) -> torch.Tensor:
        return self

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        raise read_only_error(self.FORMAT)


class QuantizedWeight(ReadOnlyWeight):
    """A quantized weight seen as a dense tensor. Using it dequantizes it; writing to it raises an error."""

    _layer: QuantizedLinear
    _is_hf_initialized = True  # transformers' initializers skip it

    @staticmethod
    def __new__(cls, layer: QuantizedLinear) -> QuantizedWeight:
        device = next(iter(layer.parts.values())).device
        weight: Any = make_wrapper_subclass(
            cls, layer.shape, dtype=layer.compute_dtype or layer.dtype, device=device, requires_grad=False
        )
        weight._layer, weight.FORMAT = layer, layer.FORMAT
        return weight

    def __init__(self, layer: QuantizedLinear) -> None:
        super().__init__()

    def __repr__(self) -> str:
        return f"QuantizedWeight({self._layer.extra_repr()})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(args[0]._layer)
        named = zip(schema_of(func).arguments, args, strict=False)
        written = (v for a, v in named if a.alias_info is not None and a.alias_info.is_write and isinstance(v, cls))
        if (target := next(written, None)) is not None:
            raise read_only_error(target.FORMAT)
        dense = tree_map(lambda t: t._layer.dequantize(t.dtype) if isinstance(t, cls) else t, (args, kwargs))
        return func(*dense[0], **dense[1])


def read_only_error(kind: str = "4-bit") -> QuantizationError:
    """The error for writing to a quantized weight."""
    return QuantizationError(
        f"a {kind} weight cannot be changed in place, so an adapter cannot be merged into it: rounding it again "
        f"would lose most of what was trained. Merge into dense weights instead: load the base model without "
        f"quantization, load the adapter on it and merge there, or dequantize this model first "
        f"(fullshard.quant.dequantize_model)"
    )
