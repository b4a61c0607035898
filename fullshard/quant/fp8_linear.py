"""`FP8Linear`: a linear layer with a frozen fp8 weight, multiplied in fp8.

The bytes and the scale of an output row are sharded together: both parts are split along their rows. A rank reads only
its own rows from files and quantizes them on its device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fullshard.distributed import runtime
from fullshard.quant import fp8
from fullshard.quant.frozen_product import frozen_linear
from fullshard.quant.quantizable import LinearForm
from fullshard.quant.quantized_linear import QuantizedLinear


class FP8Linear(QuantizedLinear):
    """A linear layer with a frozen weight in fp8 (`float8_e4m3fn`), with one fp32 scale per output row."""

    FORMAT = "fp8"
    PARTS = ("packed", "scales")

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        compute_dtype: torch.dtype | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        nn.Module.__init__(self)  # nn.Linear's would allocate a dense weight
        self._set_up(in_features, out_features, bias, compute_dtype, device, dtype)

    @classmethod
    def of(cls, linear: Any, compute_dtype: torch.dtype | None = None, form: LinearForm | None = None) -> FP8Linear:
        """Quantize a linear layer; a layer on the meta device stays there. `form` is `form_of(linear)`, if known."""
        layer, rows = cls._like(linear, form, compute_dtype=compute_dtype)
        if rows is not None:
            layer.set_parts(_parts(fp8.pack(rows)))
        return layer

    # --- the weight ---------------------------------------------------------------------------------------------------

    def part_shapes(self) -> dict[str, tuple[int, int]]:
        """The shapes of the parameters: values, and scales by row."""
        return {"packed": self.shape, "scales": (self.out_features, 4)}

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        return fp8.dequantize(fp8.Weight(*self.whole_parts().values()), dtype or self.dtype)

    def base_form(self) -> tuple[str, list[torch.Tensor]]:
        """The weight for `base_product`."""
        return "fp8", [self.packed, self.scales]

    # --- loading: the protocol of `weights/transforms.py` -------------------------------------------------------------

    def read_files(self, readers: Any, pieces: Any) -> fp8.Weight:
        """Read only this rank's rows of the weight, and quantize them on the device that the layer runs on."""
        return self._read(readers["weight"], pieces["packed"].rows, runtime.device())

    def finish_reading(self, read: fp8.Weight, pieces: Any) -> None:
        """Store this rank's rows."""
        for name, part in _parts(read).items():
            pieces[name].local.copy_(part)

    def from_files(self, readers: Any, device: torch.device) -> torch.Tensor:
        return fp8.dequantize(self._read(readers["weight"], slice(0, self.out_features), device), self.dtype)

    def _read(self, reader: Any, rows: slice, device: torch.device) -> fp8.Weight:
        dense = reader[:, rows].T if self.transposed else reader[rows]
        return fp8.pack(dense.to(device=device, dtype=self.dtype).contiguous())

    def as_files(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The dequantized weight from the whole parts; meta tensors give meta tensors."""
        weight = fp8.dequantize(fp8.Weight(values["packed"], values["scales"]), self.dtype)
        return {"weight": weight.T.contiguous() if self.transposed else weight}

    # --- computing ----------------------------------------------------------------------------------------------------

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype, out_dtype = self.product_dtypes(x)
        out = frozen_linear(x.to(dtype), *self.base_form())
        if self.bias is not None:
            out = out + self.bias.to(dtype)
        return out.to(out_dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, fp8"


def _parts(weight: fp8.Weight) -> dict[str, torch.Tensor]:
    return {"packed": weight.packed, "scales": weight.scale_bytes}
