"""The Triton kernel that unpacks the formats of released models: the same bits as `stored_values.py`.

A program unpacks a tile of one matrix. Codes are looked up in a table of at most 256 values, which stays in cache, so
one kernel serves every format; which parts there are is known when it is compiled.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fullshard.device import accelerator
from fullshard.device.triton_jit import Kernel, tl, triton
from fullshard.quant.stored_format import Coding, Tile, part_as, table

ROWS = 16
COLUMNS = 128
"""Rows and columns of the tile that a program unpacks."""
ROUNDED = {"": 0, "bfloat16": 1, "float16": 2}
_FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def decode(coding: Coding, tensors: Sequence[torch.Tensor], tile: Tile, out: torch.Tensor) -> torch.Tensor:
    """`stored_values.decode` on a GPU."""
    parts = dict(zip(coding.parts, tensors, strict=True))
    packed, device = parts["packed"], out.device
    scales = part_as(parts["scales"], _FLOATS.get(coding.scale, torch.uint8))
    count, height, columns = tile.shape
    down, across = coding.grid(tile.rows, columns)
    shapes = coding.shapes(tile.rows, columns)
    with accelerator.using(device):
        _decode[(triton.cdiv(height, ROWS), triton.cdiv(columns, COLUMNS), count)](
            packed.contiguous(), scales,
            part_as(parts["divisor"], torch.float32) if coding.divisor else scales,
            part_as(parts["zeros"], torch.int32) if coding.zeros else packed,
            part_as(parts["order"], torch.int32) if coding.order else packed,
            table(coding.codes, device), table("e4m3" if coding.scale == "e4m3" else "exponent", device), out,
            tile.rows, columns, tile.first, tile.step, tile.start, height, down, across,
            shapes["packed"][1], shapes["zeros"][0] if coding.zeros else 0,
            BITS=coding.bits, BLOCK_ROWS=coding.block[0], BLOCK_COLUMNS=coding.block[1],
            LOOKED_UP=coding.scale not in _FLOATS, DIVISOR=coding.divisor, ZEROS=coding.zeros, ORDER=coding.order,
            ROUNDED=ROUNDED[coding.rounded], ROWS=ROWS, COLUMNS=COLUMNS, enable_fp_fusion=False,
        )  # fmt: skip
    return out


@Kernel
def _decode(  # type: ignore[no-untyped-def]
    packed, scales, divisors, zeros, orders, values, scale_values, out,
    rows, columns, first, step, start, height, down, across, width, zero_rows,
    BITS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, LOOKED_UP: tl.constexpr,
    DIVISOR: tl.constexpr, ZEROS: tl.constexpr, ORDER: tl.constexpr, ROUNDED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    PER: tl.constexpr = 8 // BITS
    matrix = first + tl.program_id(2).to(tl.int64) * step
    own_row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = (start + own_row).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (own_row < height)[:, None] & (column < columns)[None, :]
    byte = tl.load(packed + ((matrix * rows + row) * width)[:, None] + (column // PER)[None, :], mask=inside, other=0)
    code = (byte.to(tl.int32) >> ((column % PER) * BITS)[None, :]) & ((1 << BITS) - 1)
    weight = tl.load(values + code)
    line = row // BLOCK_ROWS if BLOCK_ROWS > 0 else row * 0
    group = column // BLOCK_COLUMNS if BLOCK_COLUMNS > 0 else column * 0
    if ORDER:
        order = tl.load(orders + matrix * columns + column, mask=column < columns, other=0)
        group = tl.where(order < 0, group, order)
    at = ((matrix * down + line) * across)[:, None] + group[None, :]
    if LOOKED_UP:
        scale = tl.load(scale_values + tl.load(scales + at, mask=inside, other=0).to(tl.int32))
    else:
        scale = tl.load(scales + at, mask=inside, other=0).to(tl.float32)
    if DIVISOR:
        divisor = tl.load(divisors + matrix)
        scale = tl.div_rn(scale, tl.broadcast_to(divisor, [ROWS, COLUMNS]))
    if ZEROS:
        word = tl.load(
            zeros + ((matrix * zero_rows + line * BITS // 32) * across)[:, None] + group[None, :], mask=inside, other=0
        )
        zero = (word >> ((line * BITS) % 32).to(tl.int32)[:, None]) & ((1 << BITS) - 1)
        weight = weight - tl.load(values + zero)
    weight = weight * scale
    if ROUNDED == 1:
        weight = weight.to(tl.bfloat16).to(tl.float32)
    if ROUNDED == 2:
        weight = weight.to(tl.float16).to(tl.float32)
    there = out + ((tl.program_id(2).to(tl.int64) * height + own_row) * columns)[:, None] + column[None, :]
    tl.store(there, weight.to(out.dtype.element_ty), mask=inside)
