"""`NF4Linear`: a linear layer with a frozen 4-bit weight.

It is an `nn.Linear`, so PEFT and wrapping policies recognize it. The weight is dequantized for the product in forward
and again in backward; no dense copy is kept in between. The parts of the weight are uint8 parameters, which `FSDPv2`
shards and gathers like any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fullshard.errors import QuantizationError
from fullshard.quant import bnb_format, ops, sharded_groups
from fullshard.quant.load_groups import GroupLoader
from fullshard.quant.nf4 import QuantState
from fullshard.quant.quantizable import LinearForm, form_of
from fullshard.quant.sharded_groups import Parts, Scheme
from fullshard.spmd.tensor import is_sharded
from fullshard.torch_private import local_of, make_wrapper_subclass, schema_of, tree_map


class NF4Linear(nn.Linear):
    """A linear layer with a frozen 4-bit weight (NF4 or FP4).

    `compute_dtype` is the dtype of the product; by default that of the input, or autocast's. The output has the dtype
    of the input. `dtype` is the dtype of the bias, and of the weight before quantization.
    """

    stored: dict[str, tuple[int, ...]] | None = None
    """Names and shapes of bitsandbytes' tensors if the files to load from store the weight in 4 bits."""
    transposed = False
    """Whether files store the dense weight as (in, out): the layer replaces a `Conv1D`."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        scheme: Scheme | None = None,
        compute_dtype: torch.dtype | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        nn.Module.__init__(self)  # nn.Linear's would allocate a dense weight
        self.in_features, self.out_features = in_features, out_features
        self.scheme = scheme or Scheme()
        self.compute_dtype = compute_dtype
        self.dtype = dtype or torch.get_default_dtype()
        shapes = self.scheme.shapes(in_features * out_features)
        for name in ("packed", "absmax", "nested"):
            part = torch.zeros(shapes[name], dtype=torch.uint8, device=device) if name in shapes else None
            self.register_parameter(name, None if part is None else nn.Parameter(part, requires_grad=False))
        value = nn.Parameter(torch.zeros(out_features, dtype=self.dtype, device=device)) if bias else None
        self.register_parameter("bias", value)

    @classmethod
    def of(
        cls,
        linear: Any,
        scheme: Scheme | None = None,
        compute_dtype: torch.dtype | None = None,
        form: LinearForm | None = None,
    ) -> NF4Linear:
        """Quantize a linear layer; a layer on the meta device stays there. `form` is `form_of(linear)`, if known."""
        weight, bias, form = linear.weight, linear.bias, form or form_of(linear)
        if form is None:
            raise QuantizationError(
                f"{type(linear).__name__} cannot be quantized: it does not compute the same as nn.Linear"
            )
        layer = cls(
            form.in_features, form.out_features, bias is not None, scheme=scheme, compute_dtype=compute_dtype,
            device=weight.device, dtype=weight.dtype,
        )  # fmt: skip
        layer.transposed = form.transposed
        if bias is not None:
            layer.bias = bias
        if not weight.is_meta:
            rows = (weight.T if form.transposed else weight).detach()  # [out, in]
            layer.set_parts(sharded_groups.quantize_shard(rows.reshape(-1), weight.numel(), layer.scheme))
        return layer.train(linear.training)

    # --- the weight ---------------------------------------------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, int]:
        return self.out_features, self.in_features

    @property
    def parts(self) -> Parts:
        """The current parts of the weight: gathered while the layer's unit runs, otherwise sharded."""
        return {n: p for n in ("packed", "absmax", "nested") if (p := getattr(self, n)) is not None}

    def whole_parts(self) -> Parts:
        """The parts of the whole weight as plain tensors; raises if this rank has only its shard."""
        parts = {name: local_of(part) if is_sharded(part) else part.data for name, part in self.parts.items()}
        for name, shape in self.scheme.shapes(self.in_features * self.out_features).items():
            if tuple(parts[name].shape) != shape:
                raise QuantizationError(
                    f"this rank has only {tuple(parts[name].shape)} of the {shape} {name} bytes of a 4-bit weight; "
                    f"read the whole weight inside `with model.summon_full_params():`"
                )
        return parts

    @torch.no_grad()
    def set_parts(self, parts: Parts) -> None:
        """Set the weight from its parts."""
        for name, part in parts.items():
            getattr(self, name).data.copy_(part)

    @property
    def weight(self) -> torch.Tensor:
        """A read-only tensor of the dense shape that is dequantized when it is used."""
        return QuantizedWeight(self)

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The weight as a dense tensor."""
        return sharded_groups.dense(self.whole_parts(), self.shape, self.scheme, dtype or self.dtype)

    def quant_state(self) -> tuple[torch.Tensor, QuantState]:
        """The weight in bitsandbytes' form: packed values and state."""
        return sharded_groups.to_state(self.whole_parts(), self.shape, self.scheme, self.dtype)

    def set_quant_state(self, packed: torch.Tensor, state: QuantState) -> None:
        """Set the weight from bitsandbytes' form."""
        if tuple(state.shape) != self.shape:
            raise QuantizationError(f"the 4-bit weight has shape {tuple(state.shape)}, the layer {self.shape}")
        parts, scheme = sharded_groups.from_state(packed, state)
        if (scheme.quant_type, scheme.blocksize, scheme.double) != (
            self.scheme.quant_type, self.scheme.blocksize, self.scheme.double,
        ):  # fmt: skip
            raise QuantizationError(f"the weight is quantized as {scheme}, but the layer expects {self.scheme}")
        self.scheme, self.dtype = scheme, state.dtype
        self.set_parts(parts)

    def base_form(self) -> tuple[str, list[torch.Tensor]]:
        """The weight for `base_product`."""
        s = self.scheme
        return f"{s.quant_type}:{s.blocksize}:{self.out_features}x{self.in_features}", list(self.parts.values())

    # --- loading: the protocol of `weights/transforms.py` -------------------------------------------------------------

    def file_tensors(self) -> dict[str, tuple[int, ...]]:
        """The dense weight, or bitsandbytes' tensors if `stored` is set."""
        return self.stored or {"weight": self.shape[::-1] if self.transposed else self.shape}

    def made_parameters(self) -> tuple[str, ...]:
        return tuple(self.parts)

    def read_files(self, readers: Any, pieces: Any) -> Any:
        """Read only this rank's groups of the weight, and quantize them on the device that the layer runs on."""
        return self.group_loader().read(readers, pieces["packed"].rows)

    def finish_reading(self, read: Any, pieces: Any) -> None:
        """Do the steps that need all ranks, and store this rank's rows."""
        mesh, split = pieces["packed"].mesh, any(p.is_shard() for p in self.packed.placements)
        group = mesh.get_group(mesh.get_axis_name_idx("fsdp")) if split else None
        for name, part in self.group_loader().finish(read, group).items():
            pieces[name].local.copy_(part)

    def group_loader(self) -> GroupLoader:
        """How the weight is read from files."""
        return GroupLoader(self.shape, self.scheme, self.dtype, self.transposed, self.stored is not None)

    def as_files(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Convert the whole parts to bitsandbytes' file tensors; meta tensors give meta tensors."""
        packed, state = sharded_groups.to_state(dict(values), self.shape, self.scheme, self.dtype)
        return bnb_format.to_tensors(packed, state, length=bnb_format.STATE_LENGTH)

    # --- computing ----------------------------------------------------------------------------------------------------

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out_dtype = x.dtype
        dtype = self.compute_dtype
        if dtype is None:
            kind = x.device.type
            dtype = out_dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else out_dtype
        parts = (self.packed, self.absmax, self.nested)
        out = ops.linear(x.to(dtype), parts, self.out_features, self.scheme.blocksize, self.scheme.quant_type)
        if self.bias is not None:
            out = out + self.bias.to(dtype)
        return out.to(out_dtype)

    def requires_grad_(self, requires_grad: bool = True) -> NF4Linear:
        if requires_grad:
            raise QuantizationError(
                "4-bit weights are frozen and cannot be trained. Add adapters (LoRA) to train, or load the model "
                "without quantization"
            )
        return super().requires_grad_(False)

    def reset_parameters(self) -> None:
        raise QuantizationError(
            "a 4-bit layer cannot be initialized; initialize an nn.Linear and quantize that (NF4Linear.of)"
        )

    def extra_repr(self) -> str:
        s = self.scheme
        double = ", double" if s.double else ""
        return f"{super().extra_repr()}, {s.quant_type}, blocks of {s.blocksize}{double}"


class ReadOnlyWeight(torch.Tensor):
    """A tensor whose `.data` cannot be assigned."""

    @property
    def data(self) -> torch.Tensor:
        return self

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        raise read_only_error()


class QuantizedWeight(ReadOnlyWeight):
    """A 4-bit weight seen as a dense tensor. Using it dequantizes it; writing to it raises an error."""

    _layer: NF4Linear
    _is_hf_initialized = True  # transformers' initializers skip it

    @staticmethod
    def __new__(cls, layer: NF4Linear) -> QuantizedWeight:
        made: Any = make_wrapper_subclass(
            cls, layer.shape, dtype=layer.compute_dtype or layer.dtype, device=layer.packed.device, requires_grad=False
        )
        made._layer = layer
        return made

    def __init__(self, layer: NF4Linear) -> None:
        super().__init__()

    def __repr__(self) -> str:
        return f"QuantizedWeight({self._layer.extra_repr()})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(args[0]._layer)
        named = zip(schema_of(func).arguments, args, strict=False)
        if any(a.alias_info is not None and a.alias_info.is_write and isinstance(v, cls) for a, v in named):
            raise read_only_error()
        dense = tree_map(lambda t: t._layer.dequantize(t.dtype) if isinstance(t, cls) else t, (args, kwargs))
        return func(*dense[0], **dense[1])


def read_only_error() -> QuantizationError:
    """The error for writing to a 4-bit weight."""
    return QuantizationError(
        "a 4-bit weight cannot be changed in place, so an adapter cannot be merged into it: rounding to 4 bits again "
        "would lose most of what was trained. Merge into dense weights instead: load the base model without "
        "quantization, load the adapter on it and merge there, or dequantize this model first "
        "(fullshard.quant.dequantize_model)"
    )
