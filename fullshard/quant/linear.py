"""`NF4Linear`: a linear layer with a frozen 4-bit weight.

The weight is dequantized for the product in forward and again in backward; no dense copy is kept in between.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fullshard.config.errors import QuantizationError
from fullshard.quant import bnb_format, ops, sharded_groups
from fullshard.quant.nf4 import QuantState
from fullshard.quant.quantizable import LinearForm
from fullshard.quant.quantized_linear import QuantizedLinear
from fullshard.quant.sharded_groups import GroupLoader, Scheme


class NF4Linear(QuantizedLinear):
    """A linear layer with a frozen 4-bit weight (NF4 or FP4)."""

    FORMAT = "4-bit"
    PARTS = ("packed", "absmax", "nested")
    stored: dict[str, tuple[int, ...]] | None = None
    """Names and shapes of bitsandbytes' tensors if the files to load from store the weight in 4 bits."""

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
        self.scheme = scheme or Scheme()
        self._set_up(in_features, out_features, bias, compute_dtype, device, dtype)

    @classmethod
    def of(
        cls,
        linear: Any,
        scheme: Scheme | None = None,
        compute_dtype: torch.dtype | None = None,
        form: LinearForm | None = None,
    ) -> NF4Linear:
        """Quantize a linear layer; a layer on the meta device stays there. `form` is `form_of(linear)`, if known."""
        layer, rows = cls._like(linear, form, scheme=scheme, compute_dtype=compute_dtype)
        if rows is not None:
            layer.set_parts(sharded_groups.quantize_shard(rows.reshape(-1), rows.numel(), layer.scheme))
        return layer

    # --- the weight ---------------------------------------------------------------------------------------------------

    def part_shapes(self) -> dict[str, tuple[int, int]]:
        """The shapes of the parameters."""
        return self.scheme.shapes(self.in_features * self.out_features)

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
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
        return self.stored or super().file_tensors()

    def read_files(self, readers: Any, pieces: Any) -> Any:
        """Read only this rank's groups of the weight, and quantize them on the device that the layer runs on."""
        return self.group_loader().read(readers, pieces["packed"].rows)

    def finish_reading(self, read: Any, pieces: Any) -> None:
        """Do the steps that need all ranks, and store this rank's rows."""
        group = sharded_groups.ranks_of_shards(self.packed)
        for name, part in self.group_loader().finish(read, group).items():
            pieces[name].local.copy_(part)

    def group_loader(self) -> GroupLoader:
        """How the weight is read from files."""
        return GroupLoader(self.shape, self.scheme, self.dtype, self.transposed, self.stored is not None)

    def from_files(self, readers: Any, device: torch.device) -> torch.Tensor:
        loader = self.group_loader()
        parts = loader.finish(loader.read(readers, slice(0, self.packed.shape[0])), None)
        whole = {name: part.to(device) for name, part in parts.items()}
        return sharded_groups.dense(whole, self.shape, self.scheme, self.dtype)

    def as_files(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Convert the whole parts to bitsandbytes' file tensors; meta tensors give meta tensors."""
        packed, state = sharded_groups.to_state(dict(values), self.shape, self.scheme, self.dtype)
        return bnb_format.to_tensors(packed, state, length=bnb_format.STATE_LENGTH)

    # --- computing ----------------------------------------------------------------------------------------------------

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype, out_dtype = self.product_dtypes(x)
        parts = (self.packed, self.absmax, self.nested)
        out = ops.linear(x.to(dtype), parts, self.out_features, self.scheme.blocksize, self.scheme.quant_type)
        if self.bias is not None:
            out = out + self.bias.to(dtype)
        return out.to(out_dtype)

    def extra_repr(self) -> str:
        s = self.scheme
        double = ", double" if s.double else ""
        return f"{super().extra_repr()}, {s.quant_type}, blocks of {s.blocksize}{double}"
