"""Triton kernels for fp8 products: rows are quantized in one pass over memory, and weights are transposed as bytes.

The same bits as the plain torch code in `fp8.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fullshard.device import accelerator
from fullshard.device.triton_jit import Kernel, tl, triton

LARGEST: tl.constexpr = tl.constexpr(448.0)
"""The largest value of float8_e4m3fn."""
SMALLEST: tl.constexpr = tl.constexpr(1e-30)
"""Lower bound for the largest value of a row: a row of zeros must not divide by zero."""
WIDEST = 16384
"""Elements of a row that one program holds in registers; longer rows are read twice, the second time from cache."""
MOST = 4
"""Matrices that are quantized side by side in one pass."""
CHUNK = 2048
"""Elements of a longer row that a program reads at a time."""
TILE = 128
"""Rows and columns of the tile that one program of `transpose` moves."""


def quantize_rows(
    inputs: Sequence[torch.Tensor], factors: Sequence[torch.Tensor] | None, values: torch.Tensor, scales: torch.Tensor
) -> None:
    """Quantize up to four matrices [rows, …] into `values` [rows, sum of columns], with one scale per row. Columns of
    `values` beyond that sum get zeros."""
    assert len(inputs) <= MOST
    rows, device = values.shape[0], values.device
    spare = values.shape[1] - sum(x.shape[1] for x in inputs)
    if not rows:
        return
    a, b, c, d = (*inputs, *[inputs[0]] * MOST)[:MOST]
    fa, fb, fc, fd = [scales] * MOST if factors is None else (*factors, *[factors[0]] * MOST)[:MOST]
    one = len(inputs) == 1 and not spare and a.shape[1] <= WIDEST
    with accelerator.using(device):
        if one:
            block = triton.next_power_of_2(a.shape[1])
            _quantize_row[(rows,)](
                a, fa, values, scales, a.shape[1], a.stride(0), values.stride(0), FOLD=factors is not None,
                BLOCK=block, num_warps=min(max(block // 1024, 1), 8), enable_fp_fusion=False,
            )  # fmt: skip
        else:
            _quantize_long_row[(rows,)](
                a, b, c, d, fa, fb, fc, fd, values, scales, a.stride(0), b.stride(0), c.stride(0), d.stride(0),
                values.stride(0), WIDE_A=a.shape[1], WIDE_B=b.shape[1], WIDE_C=c.shape[1], WIDE_D=d.shape[1],
                SPARE=spare, COUNT=len(inputs), FOLD=factors is not None,
                BLOCK=CHUNK, num_warps=16 if values.shape[1] > WIDEST else 8, enable_fp_fusion=False,
            )  # fmt: skip


@Kernel
def _quantize_row(  # type: ignore[no-untyped-def]
    x, factors, values, scales, columns, stride, values_stride, FOLD: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    v = tl.load(x + row * stride + at, mask=inside, other=0).to(tl.float32)
    if FOLD:
        v *= tl.load(factors + at, mask=inside, other=0)
    largest = tl.maximum(tl.max(tl.abs(v), axis=0), SMALLEST)
    tl.store(scales + row, tl.div_rn(largest, LARGEST))
    v *= tl.div_rn(LARGEST, largest)
    tl.store(values + row * values_stride + at, v.to(values.dtype.element_ty), mask=inside)


@Kernel
def _quantize_long_row(  # type: ignore[no-untyped-def]
    a, b, c, d, fa, fb, fc, fd, values, scales, stride_a, stride_b, stride_c, stride_d, values_stride,
    WIDE_A: tl.constexpr, WIDE_B: tl.constexpr, WIDE_C: tl.constexpr, WIDE_D: tl.constexpr, SPARE: tl.constexpr,
    COUNT: tl.constexpr, FOLD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    maxima = _largest(tl.zeros([BLOCK], tl.float32), a + row * stride_a, fa, WIDE_A, FOLD, BLOCK)
    if COUNT > 1:
        maxima = _largest(maxima, b + row * stride_b, fb, WIDE_B, FOLD, BLOCK)
    if COUNT > 2:
        maxima = _largest(maxima, c + row * stride_c, fc, WIDE_C, FOLD, BLOCK)
    if COUNT > 3:
        maxima = _largest(maxima, d + row * stride_d, fd, WIDE_D, FOLD, BLOCK)
    largest = tl.maximum(tl.max(maxima, axis=0), SMALLEST)
    tl.store(scales + row, tl.div_rn(largest, LARGEST))
    inverse = tl.div_rn(LARGEST, largest)
    target = values + row * values_stride
    _write(target, inverse, a + row * stride_a, fa, WIDE_A, SPARE if COUNT == 1 else 0, FOLD, BLOCK)
    if COUNT > 1:
        target += WIDE_A
        _write(target, inverse, b + row * stride_b, fb, WIDE_B, SPARE if COUNT == 2 else 0, FOLD, BLOCK)
    if COUNT > 2:
        target += WIDE_B
        _write(target, inverse, c + row * stride_c, fc, WIDE_C, SPARE if COUNT == 3 else 0, FOLD, BLOCK)
    if COUNT > 3:
        target += WIDE_C
        _write(target, inverse, d + row * stride_d, fd, WIDE_D, SPARE, FOLD, BLOCK)


@triton.jit
def _chunk(x, factors, start, COLUMNS: tl.constexpr, FOLD: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = start + tl.arange(0, BLOCK)
    v = tl.load(x + at, mask=at < COLUMNS, other=0).to(tl.float32)
    if FOLD:
        v *= tl.load(factors + at, mask=at < COLUMNS, other=0)
    return v


@triton.jit
def _largest(maxima, x, factors, COLUMNS: tl.constexpr, FOLD: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    for start in range(0, COLUMNS, BLOCK):
        maxima = tl.maximum(maxima, tl.abs(_chunk(x, factors, start, COLUMNS, FOLD, BLOCK)))
    return maxima


@triton.jit
def _write(  # type: ignore[no-untyped-def]
    values, inverse, x, factors, COLUMNS: tl.constexpr, SPARE: tl.constexpr, FOLD: tl.constexpr, BLOCK: tl.constexpr
):
    for start in range(0, COLUMNS + SPARE, BLOCK):
        at = start + tl.arange(0, BLOCK)
        v = _chunk(x, factors, start, COLUMNS, FOLD, BLOCK) * inverse
        tl.store(values + at, v.to(values.dtype.element_ty), mask=at < COLUMNS + SPARE)


def transpose(matrix: torch.Tensor, out: torch.Tensor) -> None:
    """Write the transpose of a matrix of bytes [rows, columns] into `out` [columns, rows], which may be a slice, and
    zeros into columns that it has beyond these."""
    rows, columns = matrix.shape
    width = out.shape[1]
    with accelerator.using(matrix.device):
        _transpose[(triton.cdiv(width, TILE), triton.cdiv(columns, TILE))](
            matrix, out, rows, columns, width, matrix.stride(0), out.stride(0), TILE=TILE, num_warps=8
        )


@Kernel
def _transpose(matrix, out, rows, columns, width, stride, out_stride, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tile = tl.load(matrix + row[:, None] * stride + column[None, :], mask=inside, other=0)
    there = (column < columns)[:, None] & (row < width)[None, :]
    tl.store(out + column[:, None] * out_stride + row[None, :], tl.trans(tile), mask=there)
