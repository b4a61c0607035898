"""`StoredLinear`: a linear layer whose frozen weight is kept as a released model stores it.

Nothing is quantized while loading: each rank reads the bytes of its rows. The weight is unpacked for the product in
forward and again in backward; no dense copy is kept in between.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fullshard.quant import stored_files
from fullshard.quant.frozen_product import frozen_linear
from fullshard.quant.quantizable import LinearForm
from fullshard.quant.quantized_linear import QuantizedLinear
from fullshard.quant.stored_format import PARTS, StoredFormat, StoredWeight, Tile
from fullshard.quant.stored_values import decode


class StoredLinear(QuantizedLinear):
    """A linear layer with a frozen weight in the format of a released model's files."""

    PARTS = PARTS

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        stored: StoredFormat,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        nn.Module.__init__(self)  # nn.Linear's would allocate a dense weight
        self.stored_weight, self.FORMAT = StoredWeight(stored, out_features, in_features), stored.name
        self.form, self.own_parts = self.stored_weight.form, self.stored_weight.parts
        self._set_up(in_features, out_features, bias, None, device, dtype)

    @classmethod
    def of(cls, linear: Any, form: StoredFormat, linear_form: LinearForm | None = None) -> StoredLinear:
        """A layer in the place of a dense one on the meta device."""
        layer, _ = cls._like(linear, linear_form, stored=form)
        return layer

    # --- the weight ---------------------------------------------------------------------------------------------------

    def stored_weights(self) -> dict[str, StoredWeight]:
        """The weights in files, by the name of the dense one."""
        return {"weight": self.stored_weight}

    def stored_form(self, name: str) -> tuple[str, int]:
        """The format of a parameter, and how many weights it has the codes of (`fsdp/plan_model.py`)."""
        codes = self.in_features * self.out_features if name == "packed" else 0
        return (self.FORMAT, codes) if name in self.PARTS else ("", 0)

    def part_shapes(self) -> dict[str, tuple[int, int]]:
        """The shapes of the parameters."""
        return self.stored_weight.part_shapes()

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self._dense(self.whole_parts(), dtype or self.dtype)

    def _dense(self, parts: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        tensors = [parts[part] for part in self.stored_weight.parts]
        out = torch.empty(self.shape, dtype=dtype, device=tensors[0].device)
        return decode(self.stored_weight.format.coding, tensors, Tile(1, *self.shape), out)

    def base_form(self) -> tuple[str, list[torch.Tensor]]:
        """The weight for `base_product`."""
        return self.form, [getattr(self, part) for part in self.own_parts]

    # --- loading: the protocol `KeepsFiles` of `weights/transforms.py` ------------------------------------------------

    def file_tensors(self) -> dict[str, tuple[int, ...]]:
        """The tensors that files store."""
        return stored_files.file_shapes(self.stored_weight, "weight")

    def part_files(self) -> dict[str, tuple[StoredWeight, str, str]]:
        """The weight, part and file tensor of each parameter that is read as bytes."""
        names = stored_files.file_names(self.stored_weight, "weight")
        return {part: (self.stored_weight, part, name) for part, name in names.items()}

    def from_files(self, readers: Any, device: torch.device) -> torch.Tensor:
        names = stored_files.file_names(self.stored_weight, "weight")
        parts = stored_files.read_weight(self.stored_weight, {part: readers[name] for part, name in names.items()})
        return self._dense({part: value.to(device) for part, value in parts.items()}, self.dtype)

    def as_files(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors that files store, from the whole parts."""
        names = stored_files.file_names(self.stored_weight, "weight")
        return {
            name: stored_files.as_file_tensor(self.stored_weight, part, values[part]) for part, name in names.items()
        }

    # --- computing ----------------------------------------------------------------------------------------------------

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype, out_dtype = self.product_dtypes(x)
        form, tensors = self.base_form()
        out = frozen_linear(x.to(dtype), form, tensors)
        if self.bias is not None:
            out = out + self.bias.to(dtype)
        return out.to(out_dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.FORMAT}"
