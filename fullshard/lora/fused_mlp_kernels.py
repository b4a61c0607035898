"""Triton kernels for the middle of a gated MLP with LoRA (`fused_mlp.py`): one pass forward, one pass back.

Forward, a program owns some rows and runs along the wide dim; backward, it owns some columns and runs along the tokens,
and the sums over columns that the adapters of gate and up need are added up afterwards.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fullshard.lora.fused_kernels import _kept, on_device
from fullshard.lora.fused_math import InnerGradients, Middle

FORWARD, BACKWARD = (32, 128, 4), (32, 128, 8)
"""Rows, columns and warps of a program's tile."""
PROGRAMS = 528
"""How many programs the pass back is divided into, so that all processors have work."""


def _tile(rank: int) -> int:
    return max(16, triton.next_power_of_2(rank))


def _ranks(middle: Middle) -> dict[str, int]:
    gate, up, down = (layer.a.shape[0] for layer in (middle.gate, middle.up, middle.down))
    return {
        "rank_gate": gate, "rank_up": up, "rank_down": down, "width": middle.width,
        "TILE": _tile(middle.width), "TILE_DOWN": _tile(down),
    }  # fmt: skip


def _drawn(middle: Middle) -> tuple[torch.Tensor, int, int, float, bool]:
    """Seed, adapter, threshold and scale of down's dropout, and whether there is any."""
    if middle.dropout is None:
        return middle.h, 0, 0, 1.0, False
    return middle.dropout.seed, middle.dropout.first, middle.dropout.threshold, middle.dropout.scale, True


def inner(middle: Middle, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`f(gate) · up` with the updates of both, and its product with down's A behind dropout."""
    (tokens, size), (rows, columns, warps) = gate.shape, FORWARD
    out = torch.empty_like(gate)
    h_down = torch.empty(tokens, middle.down.a.shape[0], dtype=gate.dtype, device=gate.device)
    seed, adapter, threshold, drop_scale, drops = _drawn(middle)
    with on_device(gate.device):
        _inner[(triton.cdiv(tokens, rows),)](
            gate, up, out, middle.h, middle.gate.b.contiguous(), middle.up.b.contiguous(), middle.down.a.contiguous(),
            h_down, seed, tokens, threshold, drop_scale, middle.gate.scale, middle.up.scale, size=size,
            adapter=adapter, **_ranks(middle), ACTIVATION=middle.activation, DROPS=drops, ROWS=rows, COLUMNS=columns,
            num_warps=warps,
        )  # fmt: skip
    return out, h_down


def inner_backward(
    middle: Middle, gate: torch.Tensor, up: torch.Tensor, dinner: torch.Tensor, dh_down: torch.Tensor
) -> InnerGradients:
    """The pass back, for the gradient through down's frozen weight and that of the input of its B."""
    (tokens, size), (rows, columns, warps), width = gate.shape, BACKWARD, middle.width
    ranks = _ranks(middle)
    dgate, dup = torch.empty_like(gate), torch.empty_like(up)
    programs, blocks = triton.cdiv(size, columns), triton.cdiv(tokens, rows)
    length = triton.next_power_of_2(triton.cdiv(blocks * programs, PROGRAMS))  # few values, so few compilations
    parts = triton.cdiv(blocks, length)
    wide = {"dtype": torch.float32, "device": gate.device}
    dh = torch.empty(programs, tokens, 2 * width, **wide)  # type: ignore[call-overload]
    if not ranks["rank_gate"] == ranks["rank_up"] == width:
        dh.zero_()
    db_gate, db_up, da = (torch.empty(parts, size, layer.a.shape[0], **wide) for layer in middle[:3])  # type: ignore[call-overload]
    seed, adapter, threshold, drop_scale, drops = _drawn(middle)
    with on_device(gate.device):
        _inner_backward[(programs, parts)](
            gate, up, dinner, middle.h, dh_down, middle.gate.b.contiguous(), middle.up.b.contiguous(),
            middle.down.a.contiguous(), dgate, dup, dh, db_gate, db_up, da, seed, tokens, threshold, drop_scale,
            middle.gate.scale, middle.up.scale, size=size, adapter=adapter, **ranks, ACTIVATION=middle.activation,
            DROPS=drops, ROWS=rows, COLUMNS=columns, LENGTH=length, num_warps=warps,
        )  # fmt: skip
    dtype = gate.dtype
    return InnerGradients(
        dgate, dup, dh.sum(0).to(dtype), db_gate.sum(0).mul_(middle.gate.scale).to(dtype),
        db_up.sum(0).mul_(middle.up.scale).to(dtype), da.sum(0).mul_(drop_scale).t().contiguous().to(dtype),
    )  # fmt: skip


@triton.jit
def _activated(gate, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    """f(gate) and its derivative, in fp32."""
    if ACTIVATION == "silu":
        s = 1.0 / (1.0 + tl.exp(-gate))
        return gate * s, s * (1.0 + gate * (1.0 - s))
    elif ACTIVATION == "gelu_tanh":
        z = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        t = 2.0 / (1.0 + tl.exp(-2.0 * z)) - 1.0
        slope = 0.7978845608028654 * (1.0 + 3.0 * 0.044715 * gate * gate)
        return 0.5 * gate * (1.0 + t), 0.5 * (1.0 + t) + 0.5 * gate * (1.0 - t * t) * slope
    else:
        e = tl.erf(gate * 0.7071067811865476)
        return 0.5 * gate * (1.0 + e), 0.5 * (1.0 + e) + gate * 0.3989422804014327 * tl.exp(-0.5 * gate * gate)


@triton.jit
def _inner(  # type: ignore[no-untyped-def]
    gate, up, out, h, b_gate, b_up, a, h_down, seed, tokens, threshold, drop_scale, scale_gate, scale_up,
    size: tl.constexpr, adapter: tl.constexpr, rank_gate: tl.constexpr, rank_up: tl.constexpr,
    rank_down: tl.constexpr, width: tl.constexpr, ACTIVATION: tl.constexpr, DROPS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr, TILE_DOWN: tl.constexpr,
):  # fmt: skip
    first_row = tl.program_id(0) * ROWS
    row, r, c = first_row + tl.arange(0, ROWS), tl.arange(0, TILE), tl.arange(0, TILE_DOWN)
    long = row.to(tl.int64)[:, None]
    real = (row < tokens)[:, None]
    h_gate = tl.load(h + long * (2 * width) + r[None, :], mask=real & (r < rank_gate)[None, :], other=0.0)
    h_up = tl.load(h + long * (2 * width) + width + r[None, :], mask=real & (r < rank_up)[None, :], other=0.0)
    if DROPS:
        key = tl.load(seed)
    sums = tl.zeros((ROWS, TILE_DOWN), dtype=tl.float32)
    for start in range(0, size, COLUMNS):
        k = start + tl.arange(0, COLUMNS)
        inside, fits = real & (k < size)[None, :], (k < size)[None, :]
        own_gate, own_up = fits & (r < rank_gate)[:, None], fits & (r < rank_up)[:, None]
        columns_gate = tl.load(b_gate + k[None, :] * rank_gate + r[:, None], mask=own_gate, other=0.0)
        columns_up = tl.load(b_up + k[None, :] * rank_up + r[:, None], mask=own_up, other=0.0)
        g = tl.load(gate + long * size + k[None, :], mask=inside, other=0.0).to(tl.float32)
        g += scale_gate * tl.dot(h_gate, columns_gate, input_precision="ieee")
        u = tl.load(up + long * size + k[None, :], mask=inside, other=0.0).to(tl.float32)
        u += scale_up * tl.dot(h_up, columns_up, input_precision="ieee")
        value, _ = _activated(g, ACTIVATION)
        found = (value * u).to(out.dtype.element_ty)
        tl.store(out + long * size + k[None, :], found, mask=inside)
        if DROPS:
            keep = _kept(key, adapter, first_row, start, threshold, ROWS, COLUMNS)
            found = tl.where(keep, found, 0.0).to(out.dtype.element_ty)
        own_down = (k < size)[:, None] & (c < rank_down)[None, :]
        rows_a = tl.load(a + c[None, :] * size + k[:, None], mask=own_down, other=0.0)
        sums += tl.dot(found, rows_a, input_precision="ieee")
    place = h_down + long * rank_down + c[None, :]
    tl.store(place, (sums * drop_scale).to(h_down.dtype.element_ty), mask=real & (c < rank_down)[None, :])


@triton.jit
def _inner_backward(  # type: ignore[no-untyped-def]
    gate, up, dinner, h, dh_down, b_gate, b_up, a, dgate, dup, dh, db_gate, db_up, da, seed, tokens, threshold,
    drop_scale, scale_gate, scale_up,
    size: tl.constexpr, adapter: tl.constexpr, rank_gate: tl.constexpr, rank_up: tl.constexpr,
    rank_down: tl.constexpr, width: tl.constexpr, ACTIVATION: tl.constexpr, DROPS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, LENGTH: tl.constexpr, TILE: tl.constexpr, TILE_DOWN: tl.constexpr,
):  # fmt: skip
    first_column = tl.program_id(0) * COLUMNS
    k, r, c = first_column + tl.arange(0, COLUMNS), tl.arange(0, TILE), tl.arange(0, TILE_DOWN)
    fits = (k < size)[:, None]
    own_gate, own_up, own_down = (r < rank_gate)[None, :], (r < rank_up)[None, :], (c < rank_down)[None, :]
    rows_gate = tl.load(b_gate + k[:, None] * rank_gate + r[None, :], mask=fits & own_gate, other=0.0)
    rows_up = tl.load(b_up + k[:, None] * rank_up + r[None, :], mask=fits & own_up, other=0.0)
    columns_a = tl.load(a + c[None, :] * size + k[:, None], mask=fits & own_down, other=0.0)
    sums_gate = tl.zeros((COLUMNS, TILE), dtype=tl.float32)
    sums_up = tl.zeros((COLUMNS, TILE), dtype=tl.float32)
    sums_down = tl.zeros((COLUMNS, TILE_DOWN), dtype=tl.float32)
    if DROPS:
        key = tl.load(seed)
    for block in range(LENGTH):
        start = (tl.program_id(1) * LENGTH + block) * ROWS
        row = start + tl.arange(0, ROWS)
        long, real = row.to(tl.int64)[:, None], (row < tokens)[:, None]
        inside, wide = real & (k < size)[None, :], long * size + k[None, :]
        h_gate = tl.load(h + long * (2 * width) + r[None, :], mask=real & own_gate, other=0.0)
        h_up = tl.load(h + long * (2 * width) + width + r[None, :], mask=real & own_up, other=0.0)
        d = tl.load(dh_down + long * rank_down + c[None, :], mask=real & own_down, other=0.0)
        g = tl.load(gate + wide, mask=inside, other=0.0).to(tl.float32)
        g += scale_gate * tl.dot(h_gate, tl.trans(rows_gate), input_precision="ieee")
        u = tl.load(up + wide, mask=inside, other=0.0).to(tl.float32)
        u += scale_up * tl.dot(h_up, tl.trans(rows_up), input_precision="ieee")
        through = tl.dot(d, tl.trans(columns_a), input_precision="ieee") * drop_scale
        value, slope = _activated(g, ACTIVATION)
        found = (value * u).to(dgate.dtype.element_ty)
        if DROPS:
            keep = _kept(key, adapter, start, first_column, threshold, ROWS, COLUMNS)
            through = tl.where(keep, through, 0.0)
            found = tl.where(keep, found, 0.0).to(dgate.dtype.element_ty)
        grad = tl.load(dinner + wide, mask=inside, other=0.0).to(tl.float32) + through
        dg, du = (grad * u * slope).to(dgate.dtype.element_ty), (grad * value).to(dgate.dtype.element_ty)
        tl.store(dgate + wide, dg, mask=inside)
        tl.store(dup + wide, du, mask=inside)
        sums_gate += tl.dot(tl.trans(dg), h_gate, input_precision="ieee")
        sums_up += tl.dot(tl.trans(du), h_up, input_precision="ieee")
        sums_down += tl.dot(tl.trans(found), d, input_precision="ieee")
        place = dh + (tl.program_id(0).to(tl.int64) * tokens + long) * (2 * width) + r[None, :]
        tl.store(place, scale_gate * tl.dot(dg, rows_gate, input_precision="ieee"), mask=real & own_gate)
        tl.store(place + width, scale_up * tl.dot(du, rows_up, input_precision="ieee"), mask=real & own_up)
    part = tl.program_id(1).to(tl.int64) * size
    tl.store(db_gate + (part + k)[:, None] * rank_gate + r[None, :], sums_gate, mask=fits & own_gate)
    tl.store(db_up + (part + k)[:, None] * rank_up + r[None, :], sums_up, mask=fits & own_up)
    tl.store(da + (part + k)[:, None] * rank_down + c[None, :], sums_down, mask=fits & own_down)
