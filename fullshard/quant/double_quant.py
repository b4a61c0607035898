"""Double quantization: the scales of 4-bit blocks, stored in 8 bits.

The mean of a tensor's scales is subtracted and the remainder is quantized in blocks of 256. bitsandbytes' result
depends on its thread count and device, because both change the order in which the mean is summed. Here one CPU thread
always sums it, so a model has the same bytes for any number of ranks. The other steps are exact on every device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch

from fullshard.quant import codebooks
from fullshard.quant.codebooks import NESTED_BLOCK, NESTED_GRID


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def mean_of(absmax: torch.Tensor) -> torch.Tensor:
    """The mean of one tensor's scales, a scalar on their device."""
    return means_of([absmax])[0]


def means_of(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The mean of the scales of each tensor."""
    with _one_thread():
        return [absmax.cpu().mean().to(absmax.device) for absmax in tensors]


def quantize_scales(absmax: torch.Tensor, offset: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize scales [blocks] fp32 after subtracting `offset`, their mean.

    Returns codes [blocks] uint8 and second-level scales [ceil(blocks/256)] fp32. Blocks of 256 are independent, so any
    range of whole ones can be quantized on its own.
    """
    n = absmax.numel()
    rest = torch.nn.functional.pad(absmax - offset, (0, -n % NESTED_BLOCK)).view(-1, NESTED_BLOCK)
    # NaNs are ignored; a block with nothing else has the scale 0.
    largest = rest.abs().nan_to_num(nan=0.0, posinf=float("inf")).amax(dim=1, keepdim=True)
    scaled = (rest * (1.0 / largest)).clamp(-1, 1)
    # Rounded once, to the nearest grid point: in fp64 the product and the sum are exact.
    point = (((scaled + 1) * 0.5).double() * NESTED_GRID + 0.5).float().nan_to_num(nan=0.0).int()
    code = codebooks.nested_table(absmax.device)[point.where(largest > 0, 0).long()]
    return code.where(largest > 0, 0).view(-1)[:n], largest.view(-1)


def dequantize_scales(
    code: torch.Tensor, absmax: torch.Tensor, offset: torch.Tensor, table: torch.Tensor | None = None
) -> torch.Tensor:
    """Dequantize scales to [blocks] fp32. `table` [256] fp32 replaces the default map if a file contains its own."""
    table = codebooks.nested_values(code.device) if table is None else table
    found = table.index_select(0, code.reshape(-1).int())
    return found * absmax.repeat_interleave(NESTED_BLOCK)[: found.numel()] + offset
