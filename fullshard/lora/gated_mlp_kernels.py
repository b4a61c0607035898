"""Triton kernels between the products of a gated MLP with adapters: one pass forward, one backward.

Forward reads the products of the frozen gate and up weights once, adds the adapters' updates, applies the activation
and multiplies; on the way out it computes `h` of the down projection's adapter. Backward recomputes all of that from
the same two products and gives their gradients, the product of the branches, and the gradients of `h` of gate and up.
A program works on whole rows, so that sums over columns stay in registers.
"""

from __future__ import annotations

from typing import Any

import torch

from fullshard.device.triton_jit import Kernel, exp, sigmoid, tl, triton
from fullshard.lora.fused_kernels import _kept, _row_of_mask, is_slice, launch

FORWARD = {"ROWS": 64, "COLUMNS": 64, "STAGES": 4, "num_warps": 4}
BACKWARD = {"ROWS": 128, "COLUMNS": 64, "STAGES": 3, "num_warps": 8}
"""The tile that a program works on at a time, how many tiles are loaded ahead, and its warps."""
ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "relu", "relu2")


def _tile(columns: int) -> int:
    return max(16, triton.next_power_of_2(columns))


def forward(
    gate: torch.Tensor, up: torch.Tensor, h: torch.Tensor, b_gate: torch.Tensor, b_up: torch.Tensor,
    scales: tuple[float, float], a_down: torch.Tensor, activation: str, seed: torch.Tensor | None, threshold: int,
    keep_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The product of the branches [tokens, inner], and `h` of the down projection [tokens, rank].

    `h` [tokens, 2·width] has the rank-sized activations of gate and up, as many columns for each as the larger rank.
    """
    tokens = len(gate)
    middle, h_down = torch.empty_like(gate), gate.new_empty(tokens, len(a_down))
    launch(
        _forward, FORWARD, lambda rows: (triton.cdiv(tokens, rows),), gate,
        gate, up, h, b_gate, b_up, a_down, middle, h_down, gate if seed is None else seed, tokens, *scales,
        threshold, keep_scale, **_constants(gate, h, b_gate, b_up, a_down, activation, seed),
    )  # fmt: skip
    return middle, h_down


def backward(
    d_middle: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, h: torch.Tensor, b_gate: torch.Tensor,
    b_up: torch.Tensor, scales: tuple[float, float], dh_down: torch.Tensor, a_down: torch.Tensor, activation: str,
    seed: torch.Tensor | None, threshold: int, keep_scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The gradients of gate and up [tokens, inner], that of their `h`, and the product of the branches. `d_middle` is
    the gradient of that product by way of the frozen down weight."""
    d_middle = d_middle.contiguous()
    tokens, width = len(gate), h.shape[1] // 2
    d_gate, d_up, middle = torch.empty_like(gate), torch.empty_like(up), torch.empty_like(gate)
    dh = torch.zeros_like(h) if min(b_gate.shape[1], b_up.shape[1]) < width else torch.empty_like(h)
    launch(
        _backward, BACKWARD, lambda rows: (triton.cdiv(tokens, rows),), gate,
        d_middle, gate, up, h, b_gate, b_up, dh_down.contiguous(), a_down, d_gate, d_up, dh, middle,
        gate if seed is None else seed, tokens, *scales, threshold, keep_scale,
        **_constants(gate, h, b_gate, b_up, a_down, activation, seed),
    )  # fmt: skip
    return d_gate, d_up, dh, middle


def _constants(
    gate: torch.Tensor, h: torch.Tensor, b_gate: torch.Tensor, b_up: torch.Tensor, a_down: torch.Tensor,
    activation: str, seed: torch.Tensor | None,
) -> dict[str, Any]:  # fmt: skip
    """What the kernels are compiled for."""
    width = h.shape[1] // 2
    return {
        "inner": gate.shape[1], "width": width, "gate_rank": b_gate.shape[1], "up_rank": b_up.shape[1],
        "down_rank": len(a_down), "ACTIVATION": ACTIVATIONS.index(activation), "DROPS": seed is not None,
        "SLICED": is_slice(seed),
        "RANK": _tile(width), "DOWN_RANK": _tile(len(a_down)),
    }  # fmt: skip


@triton.jit
def _activated(x, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    """An activation function and its derivative; the numbers are those of `ACTIVATIONS`."""
    if ACTIVATION == 0:
        s = sigmoid(x)
        activated = x * s
        return activated, s + activated * (1 - s)
    elif ACTIVATION == 1:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        t = 2 * sigmoid(2 * inner) - 1
        slope = 0.5 * x * (1 - t * t) * 0.7978845608028654 * (1 + 3 * 0.044715 * x * x)
        return 0.5 * x * (1 + t), 0.5 * (1 + t) + slope
    elif ACTIVATION == 2:
        cdf = 0.5 * (1 + tl.erf(x * 0.7071067811865476))
        return x * cdf, cdf + x * exp(-0.5 * x * x) * 0.3989422804014327
    elif ACTIVATION == 3:
        return tl.maximum(x, 0.0), tl.where(x > 0, 1.0, 0.0)
    else:
        positive = tl.maximum(x, 0.0)
        return positive * positive, 2 * positive


@triton.jit
def _columns_of(table, row, c, columns, count, inside):  # type: ignore[no-untyped-def]
    """Some columns of a narrow table [tokens, columns], zero beyond `count` of them."""
    where = row.to(tl.int64)[:, None] * columns + c[None, :]
    return tl.load(table + where, mask=inside[:, None] & (c < count)[None, :], other=0.0)


@triton.jit
def _tile_of(matrix, row, column, rows, columns):  # type: ignore[no-untyped-def]
    """A tile of a matrix [rows, columns], zero outside."""
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    return tl.load(matrix + row[:, None] * columns + column[None, :], mask=inside, other=0.0)


@Kernel
def _forward(  # type: ignore[no-untyped-def]
    gate, up, h, b_gate, b_up, a_down, middle, h_down, seed, tokens, gate_scale, up_scale, threshold, keep_scale,
    inner: tl.constexpr, width: tl.constexpr, gate_rank: tl.constexpr, up_rank: tl.constexpr, down_rank: tl.constexpr,
    ACTIVATION: tl.constexpr, DROPS: tl.constexpr, SLICED: tl.constexpr, RANK: tl.constexpr, DOWN_RANK: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    first_row = tl.program_id(0) * ROWS
    row = first_row + tl.arange(0, ROWS)
    r, d = tl.arange(0, RANK), tl.arange(0, DOWN_RANK)
    there = row < tokens
    h_gate = _columns_of(h, row, r, 2 * width, gate_rank, there)
    h_up = _columns_of(h + width, row, r, 2 * width, up_rank, there)
    sums = tl.zeros((ROWS, DOWN_RANK), dtype=tl.float32)
    for start in tl.range(0, inner, COLUMNS, num_stages=STAGES):
        k = start + tl.arange(0, COLUMNS)
        inside = there[:, None] & (k < inner)[None, :]
        place = row.to(tl.int64)[:, None] * inner + k[None, :]
        g = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
        u = tl.load(up + place, mask=inside, other=0.0).to(tl.float32)
        g += gate_scale * tl.dot(h_gate, tl.trans(_tile_of(b_gate, k, r, inner, gate_rank)), input_precision="ieee")
        u += up_scale * tl.dot(h_up, tl.trans(_tile_of(b_up, k, r, inner, up_rank)), input_precision="ieee")
        activated, _ = _activated(g, ACTIVATION)
        value = (activated * u).to(middle.dtype.element_ty)
        tl.store(middle + place, value, mask=inside)
        if DROPS:
            mask_row = _row_of_mask(seed, first_row, SLICED)
            keep = _kept(tl.load(seed), 0, mask_row, start, threshold, ROWS, COLUMNS)
            value = tl.where(keep, value, 0.0).to(value.dtype)
        a = _tile_of(a_down, d, k, down_rank, inner)
        sums += tl.dot(value, tl.trans(a), input_precision="ieee")
    scaled = (sums * keep_scale).to(h_down.dtype.element_ty)
    tl.store(
        h_down + row.to(tl.int64)[:, None] * down_rank + d[None, :],
        scaled,
        mask=there[:, None] & (d < down_rank)[None, :],
    )


@Kernel
def _backward(  # type: ignore[no-untyped-def]
    d_middle, gate, up, h, b_gate, b_up, dh_down, a_down, d_gate, d_up, dh, middle, seed, tokens, gate_scale, up_scale,
    threshold, keep_scale, inner: tl.constexpr, width: tl.constexpr, gate_rank: tl.constexpr, up_rank: tl.constexpr,
    down_rank: tl.constexpr, ACTIVATION: tl.constexpr, DROPS: tl.constexpr, SLICED: tl.constexpr, RANK: tl.constexpr,
    DOWN_RANK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    first_row = tl.program_id(0) * ROWS
    row = first_row + tl.arange(0, ROWS)
    r, d = tl.arange(0, RANK), tl.arange(0, DOWN_RANK)
    there = row < tokens
    h_gate = _columns_of(h, row, r, 2 * width, gate_rank, there)
    h_up = _columns_of(h + width, row, r, 2 * width, up_rank, there)
    dh_out = _columns_of(dh_down, row, d, down_rank, down_rank, there)
    gate_sums = tl.zeros((ROWS, RANK), dtype=tl.float32)
    up_sums = tl.zeros((ROWS, RANK), dtype=tl.float32)
    for start in tl.range(0, inner, COLUMNS, num_stages=STAGES):
        k = start + tl.arange(0, COLUMNS)
        inside = there[:, None] & (k < inner)[None, :]
        place = row.to(tl.int64)[:, None] * inner + k[None, :]
        rows_gate, rows_up = _tile_of(b_gate, k, r, inner, gate_rank), _tile_of(b_up, k, r, inner, up_rank)
        a = _tile_of(a_down, d, k, down_rank, inner)
        update = tl.dot(dh_out, a, input_precision="ieee")
        if DROPS:
            mask_row = _row_of_mask(seed, first_row, SLICED)
            keep = _kept(tl.load(seed), 0, mask_row, start, threshold, ROWS, COLUMNS)
            update = tl.where(keep, keep_scale * update, 0.0)
        gradient = tl.load(d_middle + place, mask=inside, other=0.0).to(tl.float32) + update
        g = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
        g += gate_scale * tl.dot(h_gate, tl.trans(rows_gate), input_precision="ieee")
        u = tl.load(up + place, mask=inside, other=0.0).to(tl.float32)
        u += up_scale * tl.dot(h_up, tl.trans(rows_up), input_precision="ieee")
        activated, slope = _activated(g, ACTIVATION)
        tl.store(middle + place, (activated * u).to(middle.dtype.element_ty), mask=inside)
        dg = (gradient * u * slope).to(d_gate.dtype.element_ty)
        du = (gradient * activated).to(d_up.dtype.element_ty)
        tl.store(d_gate + place, dg, mask=inside)
        tl.store(d_up + place, du, mask=inside)
        gate_sums += tl.dot(dg, rows_gate, input_precision="ieee")
        up_sums += tl.dot(du, rows_up, input_precision="ieee")
    out = row.to(tl.int64)[:, None] * (2 * width) + r[None, :]
    tl.store(dh + out, (gate_scale * gate_sums).to(dh.dtype.element_ty), mask=there[:, None] & (r < gate_rank)[None, :])
    tl.store(
        dh + width + out, (up_scale * up_sums).to(dh.dtype.element_ty), mask=there[:, None] & (r < up_rank)[None, :]
    )
