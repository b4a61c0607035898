"""Double quantisation: the scales of 4-bit blocks, themselves in 8 bits.

The mean of a tensor's scales is taken off, the rest is stored in blocks of 256. bitsandbytes' results depend on its
thread count and its device, through the order in which that mean is summed. Here it is always summed by one CPU thread,
so that a model has the same bytes however many ranks load it; the rest is exact on every device.
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
    """The mean of all scales of one tensor, a scalar on their device."""
    return means_of([absmax])[0]


def means_of(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The mean of the scales of each of several tensors."""
    with _one_thread():
        return [absmax.cpu().mean().to(absmax.device) for absmax in tensors]


def quantize_scales(absmax: torch.Tensor, offset: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales [blocks] fp32, less their mean, as codes [blocks] uint8 and scales of their own [ceil(blocks/256)] fp32.

    Blocks of 256 do not depend on each other: any run of whole ones can be worked on alone.
    """
    n = absmax.numel()
    rest = torch.nn.functional.pad(absmax - offset, (0, -n % NESTED_BLOCK)).view(-1, NESTED_BLOCK)
    # A value that is not a number counts for nothing, and a block without any other has the scale 0.
    largest = rest.abs().nan_to_num(nan=0.0, posinf=float("inf")).amax(dim=1, keepdim=True)
    scaled = (rest * (1.0 / largest)).clamp(-1, 1)
    # To the nearest point of the grid, rounded once (in fp64 product and sum are exact).
    place = (((scaled + 1) * 0.5).double() * NESTED_GRID + 0.5).float().nan_to_num(nan=0.0).int()
    code = codebooks.nested_table(absmax.device)[place.where(largest > 0, 0).long()]
    return code.where(largest > 0, 0).view(-1)[:n], largest.view(-1)


def dequantize_scales(
    code: torch.Tensor, absmax: torch.Tensor, offset: torch.Tensor, table: torch.Tensor | None = None
) -> torch.Tensor:
    """Scales [blocks] fp32 from their codes; `table` [256] fp32 where a file brings its own."""
    table = codebooks.nested_values(code.device) if table is None else table
    found = table.index_select(0, code.reshape(-1).int())
    return found * absmax.repeat_interleave(NESTED_BLOCK)[: found.numel()] + offset
