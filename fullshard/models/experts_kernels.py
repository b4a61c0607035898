"""Triton kernels around the grouped products of experts: the adapters' products and updates, the gate and the sum over
experts.

None of them waits for the host, and none adds with atomics: results are the same bits each time. The numbers of rows of
the experts stay on the device. A program of `add_update` or `narrow_product` works on rows of one expert; which one it
is follows from `ends` (`_tile_of_group`), so the grid has a program for each full tile and one more for each expert.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from fullshard.device.triton_jit import Kernel, tl, triton
from fullshard.lora.fused_dropout import Dropout
from fullshard.lora.fused_kernels import _kept, launch
from fullshard.lora.gated_mlp_kernels import ACTIVATIONS, _activated

UPDATE = {"ROWS": 64, "COLUMNS": 128, "STAGES": 2, "num_warps": 4}
NARROW = {"ROWS": 64, "COLUMNS": 128, "STAGES": 3, "num_warps": 4}
OUTER = {"ROWS": 64, "COLUMNS": 128, "STAGES": 3, "num_warps": 4}
GATE = {"ROWS": 16, "COLUMNS": 256, "STAGES": 2, "num_warps": 4}
SUM = {"ROWS": 16, "COLUMNS": 256, "STAGES": 2, "num_warps": 4}
"""The tile that a program works on at a time, how many tiles are loaded ahead, and its warps."""
UNLIMITED = 3.0e38


# --- adapters and biases ----------------------------------------------------------------------------------------------


def add_update(
    out: torch.Tensor, ends: torch.Tensor, h: torch.Tensor | None, matrices: torch.Tensor | None,
    bias: torch.Tensor | None, dropout: Dropout | None,
) -> None:  # fmt: skip
    """Add `h @ matrix + bias` of each group to its rows, in place: [rows, rank] and [groups, rank, size]."""
    (rows, size), groups = out.shape, len(ends)
    rank = 0 if h is None else h.shape[1]
    strides = (0, 0, 0) if matrices is None else matrices.stride()
    launch(
        _add_update, UPDATE,
        lambda tile: (triton.cdiv(size, UPDATE["COLUMNS"]), triton.cdiv(rows, tile) + groups), out,
        out, ends, out if h is None else h.contiguous(), out if matrices is None else matrices, *strides,
        out if bias is None else bias.contiguous(), ends if dropout is None else dropout.seed,
        0 if dropout is None else dropout.threshold, 1.0 if dropout is None else dropout.scale,
        size=size, rank=rank, groups=groups, GROUPS=triton.next_power_of_2(groups),
        RANK=max(16, triton.next_power_of_2(rank)), UPDATES=h is not None, BIASED=bias is not None,
        DROPS=dropout is not None,
    )  # fmt: skip


@triton.jit
def _tile_of_group(ends, tile, groups: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The group of a tile (`groups` if there is no such tile), its first row, and the end of the group's rows."""
    g = tl.arange(0, GROUPS)
    end = tl.load(ends + g, mask=g < groups, other=0)
    start = tl.load(ends + g - 1, mask=(g > 0) & (g < groups), other=0)
    tiles = tl.where(g < groups, (end - start + ROWS - 1) // ROWS, 0)
    before = tl.cumsum(tiles, 0)
    group = tl.sum(tl.where((before <= tile) & (g < groups), 1, 0), 0)
    mine = g == group
    row = tl.sum(tl.where(mine, start + (tile - before + tiles) * ROWS, 0), 0)
    return group, row, tl.sum(tl.where(mine, end, 0), 0)


@Kernel
def _add_update(  # type: ignore[no-untyped-def]
    out, ends, h, matrices, group_stride, rank_stride, size_stride, bias, seed, threshold, scale,
    size: tl.constexpr, rank: tl.constexpr, groups: tl.constexpr, GROUPS: tl.constexpr, RANK: tl.constexpr,
    UPDATES: tl.constexpr, BIASED: tl.constexpr, DROPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    group, first_row, end = _tile_of_group(ends, tl.program_id(1), groups, GROUPS, ROWS)
    if group < groups:
        first_column = tl.program_id(0) * COLUMNS
        row, k = first_row + tl.arange(0, ROWS), first_column + tl.arange(0, COLUMNS)
        r = tl.arange(0, RANK)
        inside = (row < end)[:, None] & (k < size)[None, :]
        place = out + row.to(tl.int64)[:, None] * size + k[None, :]
        sums = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        if UPDATES:
            own = (row < end)[:, None] & (r < rank)[None, :]
            narrow = tl.load(h + row.to(tl.int64)[:, None] * rank + r[None, :], mask=own, other=0.0)
            matrix = matrices + group.to(tl.int64) * group_stride
            matrix += r[:, None] * rank_stride + k[None, :].to(tl.int64) * size_stride
            factor = tl.load(matrix, mask=(r < rank)[:, None] & (k < size)[None, :], other=0.0)
            update = tl.dot(narrow, factor, input_precision="ieee")
            if DROPS:
                keep = _kept(tl.load(seed), 0, first_row, first_column, threshold, ROWS, COLUMNS)
                update = tl.where(keep, update * scale, 0.0)
            sums += update
        if BIASED:
            added = tl.load(bias + group.to(tl.int64) * size + k, mask=k < size, other=0.0)
            sums += added.to(tl.float32)[None, :]
        tl.store(place, sums.to(out.dtype.element_ty), mask=inside)


# --- products of adapters ---------------------------------------------------------------------------------------------


def narrow_product(
    x: torch.Tensor, index: torch.Tensor | None, matrices: torch.Tensor, ends: torch.Tensor, dropout: Dropout | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of `x` at `index` (`x` itself without), and their products with the matrices of their groups
    [groups, size, rank], which are computed while the rows are copied."""
    x, (groups, size, rank) = x.contiguous(), matrices.shape
    rows = x if index is None else x.new_empty(len(index), size)
    h = x.new_empty(len(rows), rank)
    launch(
        _narrow_product, NARROW, lambda tile: (triton.cdiv(len(rows), tile) + groups,), x,
        x, ends if index is None else index, ends, matrices, *matrices.stride(), rows, h,
        ends if dropout is None else dropout.seed, 0 if dropout is None else dropout.threshold,
        1.0 if dropout is None else dropout.scale,
        size=size, rank=rank, groups=groups, GROUPS=triton.next_power_of_2(groups),
        RANK=max(16, triton.next_power_of_2(rank)), GATHERS=index is not None, DROPS=dropout is not None,
    )  # fmt: skip
    return rows, h


@Kernel
def _narrow_product(  # type: ignore[no-untyped-def]
    x, index, ends, matrices, group_stride, size_stride, rank_stride, rows, h, seed, threshold, scale,
    size: tl.constexpr, rank: tl.constexpr, groups: tl.constexpr, GROUPS: tl.constexpr, RANK: tl.constexpr,
    GATHERS: tl.constexpr, DROPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    group, first_row, end = _tile_of_group(ends, tl.program_id(0), groups, GROUPS, ROWS)
    if group < groups:
        row, r = first_row + tl.arange(0, ROWS), tl.arange(0, RANK)
        there, source = row < end, row.to(tl.int64)
        if GATHERS:
            source = tl.load(index + row, mask=there, other=0).to(tl.int64)
        matrix = matrices + group.to(tl.int64) * group_stride
        sums = tl.zeros((ROWS, RANK), dtype=tl.float32)
        for start in tl.range(0, size, COLUMNS, num_stages=STAGES):
            k = start + tl.arange(0, COLUMNS)
            inside = there[:, None] & (k < size)[None, :]
            values = tl.load(x + source[:, None] * size + k[None, :], mask=inside, other=0.0)
            if GATHERS:
                tl.store(rows + row.to(tl.int64)[:, None] * size + k[None, :], values, mask=inside)
            if DROPS:
                keep = _kept(tl.load(seed), 0, first_row, start, threshold, ROWS, COLUMNS)
                values = tl.where(keep, values, 0.0).to(x.dtype.element_ty)
            place = k[:, None].to(tl.int64) * size_stride + r[None, :] * rank_stride
            factor = tl.load(matrix + place, mask=(k < size)[:, None] & (r < rank)[None, :], other=0.0)
            sums += tl.dot(values, factor, input_precision="ieee")
        if DROPS:
            sums *= scale
        own = there[:, None] & (r < rank)[None, :]
        tl.store(h + row.to(tl.int64)[:, None] * rank + r[None, :], sums.to(h.dtype.element_ty), mask=own)


def narrow_outer(
    h: torch.Tensor, x: torch.Tensor, index: torch.Tensor | None, ends: torch.Tensor, dropout: Dropout | None
) -> torch.Tensor:
    """`hᵀ @ x` of each group's rows [groups, rank, size], for the rows of `x` at `index`; zeros for groups without."""
    x, h, groups, (rank, size) = x.contiguous(), h.contiguous(), len(ends), (h.shape[1], x.shape[1])
    out = x.new_empty(groups, rank, size)
    launch(
        _narrow_outer, OUTER, lambda tile: (groups, triton.cdiv(size, OUTER["COLUMNS"])), x,
        h, x, ends if index is None else index, ends, out, ends if dropout is None else dropout.seed,
        0 if dropout is None else dropout.threshold, 1.0 if dropout is None else dropout.scale,
        size=size, rank=rank, RANK=max(16, triton.next_power_of_2(rank)), GATHERS=index is not None,
        DROPS=dropout is not None,
    )  # fmt: skip
    return out


@Kernel
def _narrow_outer(  # type: ignore[no-untyped-def]
    h, x, index, ends, out, seed, threshold, scale, size: tl.constexpr, rank: tl.constexpr, RANK: tl.constexpr,
    GATHERS: tl.constexpr, DROPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    group, first_column = tl.program_id(0), tl.program_id(1) * COLUMNS
    end = tl.load(ends + group)
    start = tl.load(ends + group - 1, mask=group > 0, other=0)
    k, r = first_column + tl.arange(0, COLUMNS), tl.arange(0, RANK)
    sums = tl.zeros((RANK, COLUMNS), dtype=tl.float32)
    for block in tl.range(0, (end - start + ROWS - 1) // ROWS, num_stages=STAGES):
        first_row = start + block * ROWS
        row = first_row + tl.arange(0, ROWS)
        there, source = row < end, row.to(tl.int64)
        if GATHERS:
            source = tl.load(index + row, mask=there, other=0).to(tl.int64)
        inside = there[:, None] & (k < size)[None, :]
        values = tl.load(x + source[:, None] * size + k[None, :], mask=inside, other=0.0)
        if DROPS:
            keep = _kept(tl.load(seed), 0, first_row, first_column, threshold, ROWS, COLUMNS)
            values = tl.where(keep, values, 0.0).to(x.dtype.element_ty)
        own = there[:, None] & (r < rank)[None, :]
        narrow = tl.load(h + row.to(tl.int64)[:, None] * rank + r[None, :], mask=own, other=0.0)
        sums += tl.dot(tl.trans(narrow), values, input_precision="ieee")
    if DROPS:
        sums *= scale
    place = out + group.to(tl.int64) * rank * size + r[:, None] * size + k[None, :]
    tl.store(place, sums.to(out.dtype.element_ty), mask=(r < rank)[:, None] & (k < size)[None, :])


# --- the gate ---------------------------------------------------------------------------------------------------------


def _constants(gate: Any, size: int) -> dict[str, Any]:
    return {
        "size": size, "alpha": gate.alpha, "limit": min(gate.limit, UNLIMITED), "offset": gate.offset,
        "ACTIVATION": ACTIVATIONS.index(gate.activation), "GATED": gate.gated, "INTERLEAVED": gate.interleaved,
        "LIMITED": math.isfinite(gate.limit),
    }  # fmt: skip


def gate_forward(inner: torch.Tensor, gate: Any) -> torch.Tensor:
    """The gate's output [rows, size] for `inner` [rows, 2·size], or [rows, size] where there is one branch."""
    rows, size = len(inner), inner.shape[1] // (2 if gate.gated else 1)
    out = inner.new_empty(rows, size)
    launch(
        _gate_forward, GATE, lambda tile: (triton.cdiv(rows, tile), triton.cdiv(size, GATE["COLUMNS"])), inner,
        inner, out, rows, **_constants(gate, size),
    )  # fmt: skip
    return out


def gate_backward(
    grad_out: torch.Tensor, inner: torch.Tensor, weights: torch.Tensor | None, gate: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradient of `inner` and the gate's output, both times the rows' weights, and the gradients of these."""
    rows, size = len(inner), inner.shape[1] // (2 if gate.gated else 1)
    d_inner, out = torch.empty_like(inner), inner.new_empty(rows, size)
    d_weights = inner.new_empty(rows, dtype=torch.float32)
    launch(
        _gate_backward, GATE, lambda tile: (triton.cdiv(rows, tile),), inner,
        grad_out.contiguous(), inner, inner if weights is None else weights, d_inner, out, d_weights, rows,
        WEIGHTED=weights is not None, **_constants(gate, size),
    )  # fmt: skip
    return d_inner, out, d_weights


@triton.jit
def _branches(  # type: ignore[no-untyped-def]
    inner, row, k, inside, size: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """Gate and other branch of a tile, in fp32."""
    if GATED:
        if INTERLEAVED:
            place = row.to(tl.int64)[:, None] * (2 * size) + 2 * k[None, :]
            other = place + 1
        else:
            place = row.to(tl.int64)[:, None] * (2 * size) + k[None, :]
            other = place + size
        g = tl.load(inner + place, mask=inside, other=0.0).to(tl.float32)
        return g, tl.load(inner + other, mask=inside, other=0.0).to(tl.float32)
    else:
        g = tl.load(inner + row.to(tl.int64)[:, None] * size + k[None, :], mask=inside, other=0.0).to(tl.float32)
        return g, g


@triton.jit
def _gate(  # type: ignore[no-untyped-def]
    g, u, alpha: tl.constexpr, limit: tl.constexpr, offset: tl.constexpr, ACTIVATION: tl.constexpr,
    GATED: tl.constexpr, LIMITED: tl.constexpr,
):  # fmt: skip
    """The factor of the activation, the activation, and the derivatives of the gate with respect to both branches,
    without the factor that is the gradient."""
    if LIMITED:
        activated, slope = _activated(tl.minimum(g, limit) * alpha, ACTIVATION)
        slope = tl.where(g <= limit, slope, 0.0)
    else:
        activated, slope = _activated(g * alpha, ACTIVATION)
    activated = activated / alpha
    other = activated
    if GATED:
        factor = u + offset
        if LIMITED:
            factor = tl.minimum(tl.maximum(u, -limit), limit) + offset
            other = tl.where(tl.abs(u) <= limit, activated, 0.0)
    else:
        factor = u * 0.0 + 1.0
    return factor, activated, factor * slope, other


@Kernel
def _gate_forward(  # type: ignore[no-untyped-def]
    inner, out, rows, size: tl.constexpr, alpha: tl.constexpr, limit: tl.constexpr, offset: tl.constexpr,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, LIMITED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row, k = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (k < size)[None, :]
    g, u = _branches(inner, row, k, inside, size, GATED, INTERLEAVED)
    factor, activated, _, _ = _gate(g, u, alpha, limit, offset, ACTIVATION, GATED, LIMITED)
    place = row.to(tl.int64)[:, None] * size + k[None, :]
    tl.store(out + place, (factor * activated).to(out.dtype.element_ty), mask=inside)


@Kernel
def _gate_backward(  # type: ignore[no-untyped-def]
    grad_out, inner, weights, d_inner, out, d_weights, rows, WEIGHTED: tl.constexpr, size: tl.constexpr,
    alpha: tl.constexpr, limit: tl.constexpr, offset: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr, LIMITED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = row < rows
    if WEIGHTED:
        weight = tl.load(weights + row, mask=there, other=0.0).to(tl.float32)
    sums = tl.zeros((ROWS,), dtype=tl.float32)
    for start in tl.range(0, size, COLUMNS, num_stages=STAGES):
        k = start + tl.arange(0, COLUMNS)
        inside = there[:, None] & (k < size)[None, :]
        place = row.to(tl.int64)[:, None] * size + k[None, :]
        g, u = _branches(inner, row, k, inside, size, GATED, INTERLEAVED)
        d = tl.load(grad_out + place, mask=inside, other=0.0).to(tl.float32)
        factor, activated, d_gate, d_other = _gate(g, u, alpha, limit, offset, ACTIVATION, GATED, LIMITED)
        value = factor * activated
        sums += tl.sum(tl.where(inside, d * value, 0.0), 1)
        if WEIGHTED:
            d, value = d * weight[:, None], value * weight[:, None]
        tl.store(out + place, value.to(out.dtype.element_ty), mask=inside)
        if GATED:
            if INTERLEAVED:
                first = row.to(tl.int64)[:, None] * (2 * size) + 2 * k[None, :]
                other = first + 1
            else:
                first = row.to(tl.int64)[:, None] * (2 * size) + k[None, :]
                other = first + size
            tl.store(d_inner + first, (d * d_gate).to(d_inner.dtype.element_ty), mask=inside)
            tl.store(d_inner + other, (d * d_other).to(d_inner.dtype.element_ty), mask=inside)
        else:
            tl.store(d_inner + place, (d * d_gate).to(d_inner.dtype.element_ty), mask=inside)
    tl.store(d_weights + row, sums, mask=there)


# --- the sum over experts ---------------------------------------------------------------------------------------------


def combine(
    rows: torch.Tensor, weights: torch.Tensor | None, position: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:
    """The weighted sum over the experts of each token: [rows, size] to [tokens, size]."""
    (tokens, choices), size = position.shape, rows.shape[1]
    out = rows.new_empty(tokens, size)
    launch(
        _combine, SUM, lambda tile: (triton.cdiv(tokens, tile), triton.cdiv(size, SUM["COLUMNS"])), rows,
        rows, position if weights is None else weights.contiguous(), position, ends, out, tokens,
        size=size, choices=choices, groups=len(ends), WEIGHTED=weights is not None,
    )  # fmt: skip
    return out


@Kernel
def _combine(  # type: ignore[no-untyped-def]
    rows, weights, position, ends, out, tokens, size: tl.constexpr, choices: tl.constexpr, groups: tl.constexpr,
    WEIGHTED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    token, k = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there, total = token < tokens, tl.load(ends + groups - 1)
    sums = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for choice in tl.static_range(choices):
        pair = token.to(tl.int64) * choices + choice
        row = tl.load(position + pair, mask=there, other=0)
        present = there & (row < total)
        inside = present[:, None] & (k < size)[None, :]
        value = tl.load(rows + row[:, None] * size + k[None, :], mask=inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            value *= tl.load(weights + pair, mask=there, other=0.0).to(tl.float32)[:, None]
        sums += value
    inside = there[:, None] & (k < size)[None, :]
    tl.store(out + token.to(tl.int64)[:, None] * size + k[None, :], sums.to(out.dtype.element_ty), mask=inside)
