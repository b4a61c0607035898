"""bitsandbytes' 4-bit functions: `quantize_4bit`, `dequantize_4bit` and `QuantState`.

Packed bytes and fp32 scales equal bitsandbytes'; double-quantized scales equal its CPU backend with one thread. The
arithmetic is in `blocks.py` and `double_quant.py`; sharding is in `sharded_groups.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from fullshard.config.errors import QuantizationError
from fullshard.fsdp.strategy import dtype_name, dtype_of
from fullshard.quant import blocks, codebooks

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
STORAGE = (torch.uint8, torch.float16, torch.bfloat16, torch.float32)


@dataclass
class NestedState:
    """The second-level scales of a double-quantized tensor."""

    absmax: torch.Tensor
    """[ceil(blocks/256)] fp32."""
    code: torch.Tensor
    """The value of each 8-bit code, [256] fp32."""
    blocksize: int = codebooks.NESTED_BLOCK
    dtype: torch.dtype = torch.float32


@dataclass
class QuantState:
    """Everything besides the packed bytes that `dequantize_4bit` needs."""

    absmax: torch.Tensor
    """Each block's scale, [blocks]: fp32, or uint8 codes if double-quantized."""
    shape: torch.Size
    dtype: torch.dtype
    """The dtype before quantization, and the default dtype of `dequantize_4bit`."""
    blocksize: int = 64
    quant_type: str = "nf4"
    offset: torch.Tensor | None = None
    """The mean subtracted from the scales, a scalar; None unless double-quantized."""
    nested: NestedState | None = None

    @property
    def scales(self) -> torch.Tensor:
        """Each block's scale in fp32."""
        if self.nested is None:
            return self.absmax
        assert self.offset is not None
        return blocks.dequantize_scales(self.absmax, self.nested.absmax, self.offset, self.nested.code)

    def to(self, device: Any) -> QuantState:
        """The same state on another device."""
        inner = self.nested and NestedState(
            self.nested.absmax.to(device), self.nested.code.to(device), self.nested.blocksize, self.nested.dtype
        )
        offset = None if self.offset is None else self.offset.to(device)
        return QuantState(
            self.absmax.to(device), self.shape, self.dtype, self.blocksize, self.quant_type, offset, inner
        )


def storage_dtype(value: Any) -> torch.dtype:
    """Convert a dtype or its name to a storage dtype."""
    dtype = dtype_of(value)
    if dtype not in STORAGE:
        names = ", ".join(dtype_name(d) for d in STORAGE)
        raise QuantizationError(f"4-bit weights cannot be stored as {value!r}; choose one of {names}")
    return dtype


def quantize_4bit(
    w: torch.Tensor,
    *,
    blocksize: int = 64,
    compress_statistics: bool = False,
    quant_type: str = "nf4",
    quant_storage: torch.dtype = torch.uint8,
) -> tuple[torch.Tensor, QuantState]:
    """Quantize a tensor to 4 bits in blocks of `blocksize` values.

    Returns the packed values, [n/2, 1] bytes viewed as `quant_storage`, and the state for `dequantize_4bit`.
    `compress_statistics` (double quantization) stores scales in 8 bits instead of 32.
    """
    codebooks.check_format(quant_type, blocksize)
    if w.dtype not in FLOATS:
        names = ", ".join(dtype_name(d) for d in FLOATS)
        raise QuantizationError(f"cannot quantize a tensor of {w.dtype}; expected one of {names}")
    storage = storage_dtype(quant_storage)
    if w.numel() == 0:
        raise QuantizationError(f"cannot quantize an empty tensor (shape {tuple(w.shape)})")
    packed, absmax = blocks.quantize(w.detach().reshape(-1), blocksize, quant_type)
    state = QuantState(absmax, w.shape, w.dtype, blocksize, quant_type)
    if compress_statistics:
        state.offset = blocks.mean_of(absmax)
        state.absmax, largest = blocks.quantize_scales(absmax, state.offset)
        state.nested = NestedState(largest, codebooks.nested_values(w.device).clone())
    return stored_as(packed, storage), state


def dequantize_4bit(packed: torch.Tensor, state: QuantState, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Dequantize packed values to `dtype`, by default the dtype before quantization."""
    codebooks.check_format(state.quant_type, state.blocksize)
    n = math.prod(state.shape)
    flat_bytes = packed.contiguous().view(-1).view(torch.uint8)
    if flat_bytes.numel() != -(-n // 2):
        raise QuantizationError(
            f"the packed values have {flat_bytes.numel()} bytes; the shape {tuple(state.shape)} needs {-(-n // 2)}"
        )
    out = torch.empty(n, dtype=state.dtype if dtype is None else dtype, device=packed.device)
    return blocks.dequantize(flat_bytes, state.scales, state.blocksize, state.quant_type, out).view(state.shape)


def stored_as(packed: torch.Tensor, storage: torch.dtype) -> torch.Tensor:
    """View packed bytes [n] as bitsandbytes stores them: [n/itemsize, 1] of the storage dtype, the same bytes."""
    if packed.numel() % storage.itemsize:
        raise QuantizationError(
            f"{packed.numel()} bytes of packed values cannot be viewed as {dtype_name(storage)}, which has "
            f"{storage.itemsize} bytes per element; use uint8 for this tensor"
        )
    return packed.view(storage).view(-1, 1)
