"""Block-wise 4-bit quantization and dequantization of flat tensors in plain torch.

This is the reference implementation and the one used on CPUs. It works slice by slice, so it needs almost no memory
besides input and output. CUDA tensors use the Triton kernels (`triton_kernels.py`), which produce the same bits.
"""

from __future__ import annotations

import torch

from fullshard import accelerator
from fullshard.quant import codebooks
from fullshard.quant.codebooks import SMALLEST_SCALE

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
        found = pairs.index_select(0, packed[start // 2 : -(-end // 2)].int()).view(-1)[: end - start]
        scales = absmax[start // blocksize : -(-end // blocksize)]
        whole = found.numel() - found.numel() % blocksize
        if whole:
            out[start : start + whole] = (
                found[:whole].view(-1, blocksize).mul_(scales[: whole // blocksize, None]).view(-1)
            )
        if whole < found.numel():
            out[start + whole : end] = found[whole:] * scales[-1]
    return out
