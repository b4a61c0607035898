"""Block-wise 4-bit quantization and dequantization of flat tensors in plain torch.

This is the reference implementation and the one used on CPUs. It works slice by slice, so it needs almost no memory
besides input and output. CUDA tensors use the Triton kernels (`triton_kernels.py`), which produce the same bits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch

from fullshard.device import accelerator
from fullshard.quant import codebooks
from fullshard.quant.codebooks import NESTED_BLOCK, NESTED_GRID, SMALLEST_SCALE


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
    scales = table.index_select(0, code.reshape(-1).int())
    return scales * absmax.repeat_interleave(NESTED_BLOCK)[: scales.numel()] + offset


SLICE = 1 << 16
"""Number of weights processed at a time; a multiple of every block size."""


def quantize(flat: torch.Tensor, blocksize: int, quant_type: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a flat tensor to packed codes [ceil(n/2)] uint8 and each block's absmax [ceil(n/blocksize)] fp32."""
    if accelerator.runs_triton(flat.device):
        from fullshard.quant import triton_kernels

        return triton_kernels.quantize(flat, blocksize, quant_type)
    n = flat.numel()
    packed = torch.empty(-(-n // 2), dtype=torch.uint8, device=flat.device)
    absmax = torch.empty(-(-n // blocksize), dtype=torch.float32, device=flat.device)
    bounds = codebooks.midpoints(quant_type, flat.device)
    order = codebooks.codes_ascending(quant_type, flat.device)
    for start in range(0, n, SLICE):
        part = flat[start : start + SLICE].float()
        scaled, scales = _scaled(part, blocksize)
        absmax[start // blocksize :][: scales.numel()] = scales
        if scaled.numel() % 2:
            scaled = torch.nn.functional.pad(scaled, (0, 1))
        code = torch.bucketize(scaled, bounds, out_int32=True)
        code = code.to(torch.uint8) if quant_type == "nf4" else order[code]
        packed[start // 2 :][: code.numel() // 2] = (code[::2] << 4) | code[1::2]
    return packed, absmax


def _scaled(part: torch.Tensor, blocksize: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights divided by the absmax of their block, and each block's absmax."""
    n = part.numel()
    whole = n - n % blocksize
    blocks = part[:whole].view(-1, blocksize)
    scales = blocks.abs().amax(dim=1) if whole else part.new_empty(0)
    scaled = (blocks * (1.0 / scales.clamp(min=SMALLEST_SCALE)).view(-1, 1)).clamp(-1, 1).view(-1)
    if whole == n:
        return scaled, scales
    # A short last block. bitsandbytes divides here, but multiplies by the inverse in full blocks.
    last = part[whole:].abs().max().clamp(min=SMALLEST_SCALE)
    return torch.cat([scaled, (part[whole:] / last).clamp(-1, 1)]), torch.cat([scales, last.view(1)])


def dequantize(
    packed: torch.Tensor, absmax: torch.Tensor, blocksize: int, quant_type: str, out: torch.Tensor
) -> torch.Tensor:
    """Dequantize the first weights into `out` [n], from packed codes [bytes] uint8 and scales [blocks] fp32."""
    if accelerator.runs_triton(packed.device):
        from fullshard.quant import triton_kernels

        return triton_kernels.dequantize(packed, absmax, None, blocksize, quant_type, out)
    n = out.numel()
    pairs = codebooks.value_pairs(quant_type, packed.device)
    for start in range(0, n, SLICE):
        end = min(start + SLICE, n)
        values = pairs.index_select(0, packed[start // 2 : -(-end // 2)].int()).view(-1)[: end - start]
        scales = absmax[start // blocksize : -(-end // blocksize)]
        whole = values.numel() - values.numel() % blocksize
        if whole:
            out[start : start + whole] = (
                values[:whole].view(-1, blocksize).mul_(scales[: whole // blocksize, None]).view(-1)
            )
        if whole < values.numel():
            out[start + whole : end] = values[whole:] * scales[-1]
    return out
