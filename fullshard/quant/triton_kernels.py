"""Triton kernels for CUDA: the same bits as `blocks.py` and `double_quant.py`, limited by memory bandwidth, and what
grouped products need beside torch's.

A thread unpacks one 32-bit word into eight weights, so it reads 4 bytes and writes 16 bytes contiguously. The scale of
a double-quantized block is computed in the kernel and never stored.
"""

from __future__ import annotations

import torch

from fullshard.device import accelerator
from fullshard.device.triton_jit import Kernel, tl, triton
from fullshard.quant import codebooks
from fullshard.quant.codebooks import SMALLEST_SCALE

WORDS = 256
"""32-bit words (eight weights each) per program of `dequantize`."""
WARPS = 2
TILE = 4096
"""Minimum number of weights per program of `quantize`."""


def dequantize(
    packed: torch.Tensor,
    absmax: torch.Tensor,
    nested: torch.Tensor | None,
    blocksize: int,
    quant_type: str,
    out: torch.Tensor,
) -> torch.Tensor:
    """Dequantize the first weights into `out`, which is contiguous.

    `absmax` is fp32 [blocks]. With `nested` it is uint8 [blocks], and `nested` [groups, 2] fp32 has the second-level
    scale and the offset of every 256 of them. All may be given as bytes: the kernel needs addresses only, and views of
    other dtypes would take longer to make than the launch.
    """
    if packed.numel() % 4 or packed.data_ptr() % 4:
        packed = torch.nn.functional.pad(packed.reshape(-1), (0, -packed.numel() % 4)).clone()
    n, device = out.numel(), out.device
    if n:
        with accelerator.using(device):
            _dequantize[(triton.cdiv(n, 8 * WORDS),)](
                packed, absmax, absmax if nested is None else nested,
                codebooks.values(quant_type, device), codebooks.nested_values(device), out, n,
                WORDS_PER_BLOCK=blocksize // 8, NESTED_BLOCK=codebooks.NESTED_BLOCK, DOUBLE=nested is not None,
                WORDS=WORDS, num_warps=WARPS, enable_fp_fusion=False,
            )  # fmt: skip
    return out


@Kernel
def _dequantize(  # type: ignore[no-untyped-def]
    packed, absmax, nested, values, table, out, n,
    WORDS_PER_BLOCK: tl.constexpr, NESTED_BLOCK: tl.constexpr, DOUBLE: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    word = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    inside = word * 8 < n
    words = tl.load(packed.to(tl.pointer_type(tl.int32)) + word, mask=inside, other=0)
    block = word // WORDS_PER_BLOCK
    if DOUBLE:
        pair = nested.to(tl.pointer_type(tl.float32)) + 2 * (block // NESTED_BLOCK)
        code = tl.load(absmax + block, mask=inside, other=0).to(tl.int32)
        largest = tl.load(pair, mask=inside, other=0)
        offset = tl.load(pair + 1, mask=inside, other=0)
        scale = tl.load(table + code) * largest + offset
    else:
        scale = tl.load(absmax.to(tl.pointer_type(tl.float32)) + block, mask=inside, other=0)
    lane = tl.arange(0, 8)
    code4 = (words[:, None] >> ((lane ^ 1) * 4)[None, :]) & 15  # the first weight of a byte is in its high four bits
    weights = tl.load(values + code4) * scale[:, None]
    at = word[:, None] * 8 + lane[None, :]
    tl.store(out + at, weights.to(out.dtype.element_ty), mask=at < n)


def quantize(flat: torch.Tensor, blocksize: int, quant_type: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a flat tensor to packed codes [ceil(n/2)] uint8 and each block's absmax [ceil(n/blocksize)] fp32."""
    n, device = flat.numel(), flat.device
    packed = torch.empty(-(-n // 2), dtype=torch.uint8, device=device)
    absmax = torch.empty(-(-n // blocksize), dtype=torch.float32, device=device)
    rows = max(TILE // blocksize, 1)
    if n:
        with accelerator.using(device):
            _quantize[(triton.cdiv(n, rows * blocksize),)](
                flat.contiguous(),
                codebooks.midpoints(quant_type, device), codebooks.codes_ascending(quant_type, device),
                packed, absmax, n, SMALLEST=SMALLEST_SCALE, BLOCK=blocksize, ROWS=rows, IN_ORDER=quant_type == "nf4",
                enable_fp_fusion=False,
            )  # fmt: skip
    return packed, absmax


@Kernel
def _quantize(  # type: ignore[no-untyped-def]
    flat, bounds, order, packed, absmax, n,
    SMALLEST: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, IN_ORDER: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    weights = tl.load(flat + at, mask=at < n, other=0).to(tl.float32)
    has_nan = tl.max((weights != weights).to(tl.int32), axis=1) > 0  # torch's amax propagates NaN, Triton's does not
    largest = tl.where(has_nan, float("nan"), tl.max(tl.abs(weights), axis=1))
    divisor = tl.where(largest < SMALLEST, SMALLEST, largest)
    short = (row + 1) * BLOCK > n
    tl.store(absmax + row, tl.where(short, divisor, largest), mask=row * BLOCK < n)
    inverse = tl.div_rn(tl.full([ROWS], 1.0, tl.float32), divisor)
    divided = tl.div_rn(weights, tl.broadcast_to(divisor[:, None], [ROWS, BLOCK]))
    scaled = tl.where(short[:, None], divided, weights * inverse[:, None])
    scaled = tl.where(scaled > 1.0, 1.0, scaled)
    scaled = tl.where(scaled < -1.0, -1.0, scaled)
    code = tl.zeros([ROWS, BLOCK], tl.int32)
    for k in tl.static_range(15):
        code += 1 - (tl.load(bounds + k) >= scaled).to(tl.int32)
    if not IN_ORDER:
        code = tl.load(order + code).to(tl.int32)
    high, low = tl.split(tl.reshape(code, [ROWS, BLOCK // 2, 2]))
    byte = row[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
    tl.store(packed + byte, ((high << 4) | low).to(tl.uint8), mask=byte * 2 < n)


# --- groups without rows ----------------------------------------------------------------------------------------------

ZEROS = 8192
"""Elements that a program of `zero_empty_groups` writes."""


def zero_empty_groups(out: torch.Tensor, ends: torch.Tensor) -> None:
    """Set the matrices of groups without rows to zero [groups, rows, columns]; `ends` says where their rows end. The
    others are neither read nor written."""
    size = out[0].numel()
    with accelerator.using(out.device):
        _zero_empty_groups[(triton.cdiv(size, ZEROS), len(ends))](out, ends, size, TILE=ZEROS)


@Kernel
def _zero_empty_groups(out, ends, size, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    group = tl.program_id(1)
    start = tl.load(ends + group - 1, mask=group > 0, other=0)
    if tl.load(ends + group) == start:
        at = tl.program_id(0) * TILE + tl.arange(0, TILE)
        zeros = tl.zeros((TILE,), dtype=tl.float32).to(out.dtype.element_ty)
        tl.store(out + group.to(tl.int64) * size + at, zeros, mask=at < size)
