"""Triton kernels for the products of adapters behind dropout: masks are drawn from a counter where they are needed.

Eight neighboring elements of a row share one call of Philox, whose counter is (column / 8, row, adapter): 16 random
bits for each. So a mask does not depend on how a kernel divides its work, and each thread draws the bits of one
16-byte load. `x` and its gradient are read once for all adapters of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from fullshard.device import accelerator
from fullshard.device.triton_jit import Kernel, tl, triton

ROWS, COLUMNS, STAGES, WARPS = 64, 128, 2, 4
"""The tile of `x` that a program works on at a time, how many tiles are loaded ahead, and its warps."""
TILE = {"ROWS": ROWS, "COLUMNS": COLUMNS, "STAGES": STAGES, "num_warps": WARPS}
RANKS = 64
"""The largest number of columns of `h` that a program computes."""
PROGRAMS = 528
"""How many programs `grad_weight` is divided into, so that all processors have work."""


_fitting: dict[Any, dict[str, int]] = {}


def launch(
    kernel: Any, tile: dict[str, int], grid: Callable[[int], tuple[int, ...]], like: torch.Tensor, *args: Any,
    **constants: Any,
) -> None:  # fmt: skip
    """Launch a kernel with the first of ever smaller tiles that fits into the shared memory of the device: GPUs differ,
    and so do ranks of adapters. `grid` is a function of the rows of a tile, `like` a tensor with the device and dtype
    that the kernel works on."""
    key = kernel, like.device, like.dtype, *constants.values()
    with accelerator.using(like.device):
        for options in [_fitting[key]] if key in _fitting else _ever_smaller(tile, like.element_size()):
            try:
                kernel[grid(options["ROWS"])](*args, **constants, **options)
            except triton.runtime.errors.OutOfResources as error:
                too_large = error
                continue
            _fitting[key] = options
            return
        raise too_large


def _ever_smaller(tile: dict[str, int], element_size: int) -> Iterator[dict[str, int]]:
    """The tile with fewer and fewer loaded ahead (wide elements never are), then with fewer rows, down to 16."""
    for ahead in range(tile["STAGES"] if element_size <= 2 else 1, 0, -1):
        yield tile | {"STAGES": ahead}
    rows, warps = tile["ROWS"] // 2, tile["num_warps"] // 2
    while rows >= 16:
        yield tile | {"STAGES": 1, "ROWS": rows, "num_warps": max(4, warps)}
        rows, warps = rows // 2, warps // 2


class Tiles(NamedTuple):
    """How the columns of `h` are divided: tiles with several adapters, or adapters in several tiles."""

    number: int
    width: int
    """Columns of a tile, a power of two: at least 16, as matrix units need."""
    adapters: int
    """Adapters in a tile."""
    parts: int
    """Tiles of an adapter."""

    @classmethod
    def of(cls, columns: int, width: int) -> Tiles:
        """The tiles of so many adapter columns of one width."""
        adapters, parts = min(columns // width, max(1, RANKS // width)), triton.cdiv(width, RANKS)
        tile = RANKS if parts > 1 else max(16, triton.next_power_of_2(adapters * width))
        return cls(triton.cdiv(columns // width, adapters) * parts, tile, adapters, parts)

    def options(self) -> dict[str, int]:
        """The tiles as a kernel's constants."""
        return {"TILE": self.width, "ADAPTERS": self.adapters, "PARTS": self.parts}


def product(
    x: torch.Tensor, a: torch.Tensor, width: int, seed: torch.Tensor, threshold: int, scale: float
) -> torch.Tensor:
    """`dropout_i(x) @ A_iᵀ` for all adapters i: [tokens, in] and [adapters·width, in] to [tokens, adapters·width]."""
    x, a = x.contiguous(), a.contiguous()
    (tokens, size), columns = x.shape, len(a)
    h = torch.empty(tokens, columns, dtype=x.dtype, device=x.device)
    tiles = Tiles.of(columns, width)
    launch(
        _product, TILE, lambda rows: (triton.cdiv(tokens, rows), tiles.number), x,
        x, a, h, seed, tokens, threshold, scale, size=size, columns=columns, width=width, SLICED=is_slice(seed),
        **tiles.options(),
    )  # fmt: skip
    return h


def grad_weight(
    dh: torch.Tensor, x: torch.Tensor, width: int, seed: torch.Tensor, threshold: int, scale: float
) -> torch.Tensor:
    """`dh_iᵀ @ dropout_i(x)` for all adapters: [adapters·width, in]."""
    x, dh = x.contiguous(), dh.contiguous()
    (tokens, size), columns = x.shape, dh.shape[1]
    tiles = Tiles.of(columns, width)
    programs, blocks = triton.cdiv(size, COLUMNS) * tiles.number, triton.cdiv(tokens, ROWS)
    length = triton.next_power_of_2(triton.cdiv(blocks * programs, PROGRAMS))  # few values, so few compilations
    parts = triton.cdiv(blocks, length)
    sums = torch.empty(parts, columns, size, dtype=torch.float32, device=x.device)
    with accelerator.using(x.device):
        _grad_weight[(triton.cdiv(size, COLUMNS), tiles.number, parts)](
            dh, x, sums, seed, tokens, threshold, size, columns, width,
            LENGTH=length, SLICED=is_slice(seed), **tiles.options(),
            **TILE | {"STAGES": STAGES if x.element_size() <= 2 else 1},
        )  # fmt: skip
    return sums.sum(0).mul_(scale).to(x.dtype)


def grad_input(
    dx: torch.Tensor | None, dh: torch.Tensor, a: torch.Tensor, width: int, seed: torch.Tensor, threshold: int,
    scale: float,
) -> torch.Tensor:  # fmt: skip
    """The sum of `dropout_i(dh_i @ A_i)` over all adapters: [tokens, in]. If `dx` is given, it is added there."""
    dh, a = dh.contiguous(), a.contiguous()
    tokens, size = len(dh), a.shape[1]
    out = dh.new_empty(tokens, size) if dx is None else dx
    assert out.is_contiguous()
    launch(
        _grad_input, TILE, lambda rows: (triton.cdiv(size, COLUMNS), triton.cdiv(tokens, rows)), out,
        out, dh, a, seed, tokens, threshold, scale, size=size, columns=len(a), width=width, ADDS=dx is not None,
        SLICED=is_slice(seed), TILE=Tiles.of(width, width).width,
    )  # fmt: skip
    return out


def apply_dropout(x: torch.Tensor, seed: torch.Tensor, threshold: int, scale: float) -> torch.Tensor:
    """`x` behind dropout, with the mask of the first adapter."""
    x = x.contiguous()
    out = torch.empty_like(x)
    grid = (triton.cdiv(x.shape[0], ROWS), triton.cdiv(x.shape[1], COLUMNS))
    with accelerator.using(x.device):
        _drop[grid](
            x, out, seed, *x.shape, threshold, scale, ROWS=ROWS, COLUMNS=COLUMNS, SLICED=is_slice(seed), num_warps=WARPS
        )
    return out


def dropout_mask(shape: tuple[int, int], adapter: int, seed: torch.Tensor, threshold: int) -> torch.Tensor:
    """The mask of an adapter."""
    mask = torch.empty(shape, dtype=torch.int8, device=seed.device)
    grid = (triton.cdiv(shape[0], ROWS), triton.cdiv(shape[1], COLUMNS))
    with accelerator.using(seed.device):
        _mask[grid](
            mask, seed, *shape, adapter, threshold, ROWS=ROWS, COLUMNS=COLUMNS, SLICED=is_slice(seed), num_warps=WARPS
        )
    return mask.bool()


def is_slice(seed: torch.Tensor | None) -> bool:
    """Whether a seed comes with the first row of a slice of the sequence."""
    return seed is not None and seed.numel() == 2


@triton.jit
def _row_of_mask(seed, first_row, SLICED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The row of the mask that belongs to a row of the tensor: in a slice, rows count from those of the whole."""
    if SLICED:
        first_row += tl.load(seed + 1)
    return first_row


@triton.jit
def _kept(key, adapter, first_row, first_column, threshold, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The mask of a tile."""
    row = (first_row + tl.arange(0, ROWS)).to(tl.uint32)[:, None]
    column = (first_column // 8 + tl.arange(0, COLUMNS // 8)).to(tl.uint32)[None, :]
    zero = row * 0 + column * 0
    which = (zero + adapter).to(tl.uint32)
    r0, r1, r2, r3 = tl.philox(key, zero + column, zero + row, which, zero, n_rounds=7)
    words = tl.join(tl.join(r0, r1), tl.join(r2, r3))
    bits = tl.join(words & 0xFFFF, words >> 16)
    return tl.reshape(bits, (ROWS, COLUMNS)).to(tl.int32) >= threshold


@triton.jit
def _first(columns_of_tile, width: tl.constexpr, ADAPTERS: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first adapter of a tile, and its columns of `h`; those of other tiles are negative."""
    adapter = columns_of_tile // PARTS * ADAPTERS
    inner = columns_of_tile % PARTS * TILE + tl.arange(0, TILE)
    return adapter, tl.where(inner < ADAPTERS * width, adapter * width + inner, -1)


@Kernel
def _product(  # type: ignore[no-untyped-def]
    x, a, h, seed, tokens, threshold, scale, size: tl.constexpr, columns: tl.constexpr, width: tl.constexpr,
    SLICED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, TILE: tl.constexpr,
    ADAPTERS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    first_row = tl.program_id(0) * ROWS
    row = first_row + tl.arange(0, ROWS)
    first, c = _first(tl.program_id(1), width, ADAPTERS, PARTS, TILE)
    mine = (c >= 0) & (c < columns)
    key, mask_row = tl.load(seed), _row_of_mask(seed, first_row, SLICED)
    sums = tl.zeros((ROWS, TILE), dtype=tl.float32)
    for start in tl.range(0, size, COLUMNS, num_stages=STAGES):
        k = start + tl.arange(0, COLUMNS)
        inside = (row < tokens)[:, None] & (k < size)[None, :]
        values = tl.load(x + row.to(tl.int64)[:, None] * size + k[None, :], mask=inside, other=0.0)
        rows = tl.load(a + c[:, None] * size + k[None, :], mask=mine[:, None] & (k < size)[None, :], other=0.0)
        for i in tl.static_range(ADAPTERS):
            keep = _kept(key, first + i, mask_row, start, threshold, ROWS, COLUMNS)
            own = tl.where((c // width == first + i)[:, None], rows, 0.0).to(rows.dtype)
            sums += tl.dot(tl.where(keep, values, 0.0).to(values.dtype), tl.trans(own), input_precision="ieee")
    inside = (row < tokens)[:, None] & mine[None, :]
    tl.store(h + row.to(tl.int64)[:, None] * columns + c[None, :], (sums * scale).to(h.dtype.element_ty), mask=inside)


@Kernel
def _grad_weight(  # type: ignore[no-untyped-def]
    dh, x, out, seed, tokens, threshold, size: tl.constexpr, columns: tl.constexpr, width: tl.constexpr,
    SLICED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, LENGTH: tl.constexpr,
    TILE: tl.constexpr, ADAPTERS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    first_column = tl.program_id(0) * COLUMNS
    k = first_column + tl.arange(0, COLUMNS)
    first, c = _first(tl.program_id(1), width, ADAPTERS, PARTS, TILE)
    mine = (c >= 0) & (c < columns)
    key = tl.load(seed)
    sums = tl.zeros((TILE, COLUMNS), dtype=tl.float32)
    for block in tl.range(0, LENGTH, num_stages=STAGES):
        start = (tl.program_id(2) * LENGTH + block) * ROWS
        row = start + tl.arange(0, ROWS)
        inside = (row < tokens)[:, None] & (k < size)[None, :]
        values = tl.load(x + row.to(tl.int64)[:, None] * size + k[None, :], mask=inside, other=0.0)
        inside = (row < tokens)[:, None] & mine[None, :]
        grads = tl.load(dh + row.to(tl.int64)[:, None] * columns + c[None, :], mask=inside, other=0.0)
        for i in tl.static_range(ADAPTERS):
            keep = _kept(key, first + i, _row_of_mask(seed, start, SLICED), first_column, threshold, ROWS, COLUMNS)
            own = tl.where((c // width == first + i)[None, :], grads, 0.0).to(grads.dtype)
            sums += tl.dot(tl.trans(own), tl.where(keep, values, 0.0).to(values.dtype), input_precision="ieee")
    place = out + tl.program_id(2).to(tl.int64) * columns * size + c[:, None] * size + k[None, :]
    tl.store(place, sums, mask=mine[:, None] & (k < size)[None, :])


@Kernel
def _grad_input(  # type: ignore[no-untyped-def]
    dx, dh, a, seed, tokens, threshold, scale, size: tl.constexpr, columns: tl.constexpr, width: tl.constexpr,
    ADDS: tl.constexpr, TILE: tl.constexpr, SLICED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    first_column, first_row = tl.program_id(0) * COLUMNS, tl.program_id(1) * ROWS
    row, k = first_row + tl.arange(0, ROWS), first_column + tl.arange(0, COLUMNS)
    inside = (row < tokens)[:, None] & (k < size)[None, :]
    place = dx + row.to(tl.int64)[:, None] * size + k[None, :]
    key, mask_row = tl.load(seed), _row_of_mask(seed, first_row, SLICED)
    sums = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    if ADDS:
        sums += tl.load(place, mask=inside, other=0.0).to(tl.float32)
    for adapter in range(columns // width):
        part = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for start in tl.range(0, width, TILE, num_stages=STAGES):
            r = start + tl.arange(0, TILE)
            c = adapter * width + r
            own = (row < tokens)[:, None] & (r < width)[None, :]
            grads = tl.load(dh + row.to(tl.int64)[:, None] * columns + c[None, :], mask=own, other=0.0)
            rows = tl.load(
                a + c[:, None] * size + k[None, :], mask=(r < width)[:, None] & (k < size)[None, :], other=0.0
            )
            part += tl.dot(grads, rows, input_precision="ieee")
        keep = _kept(key, adapter, mask_row, first_column, threshold, ROWS, COLUMNS)
        sums += tl.where(keep, part * scale, 0.0)
    tl.store(place, sums.to(dx.dtype.element_ty), mask=inside)


@Kernel
def _mask(out, seed, tokens, size, adapter, threshold, SLICED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    first_row, first_column = tl.program_id(0) * ROWS, tl.program_id(1) * COLUMNS
    row, k = first_row + tl.arange(0, ROWS), first_column + tl.arange(0, COLUMNS)
    mask_row = _row_of_mask(seed, first_row, SLICED)
    keep = _kept(tl.load(seed), adapter, mask_row, first_column, threshold, ROWS, COLUMNS)
    inside = (row < tokens)[:, None] & (k < size)[None, :]
    tl.store(out + row.to(tl.int64)[:, None] * size + k[None, :], keep.to(tl.int8), mask=inside)


@Kernel
def _drop(  # type: ignore[no-untyped-def]
    x, out, seed, tokens, size, threshold, scale, SLICED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    first_row, first_column = tl.program_id(0) * ROWS, tl.program_id(1) * COLUMNS
    row, k = first_row + tl.arange(0, ROWS), first_column + tl.arange(0, COLUMNS)
    inside = (row < tokens)[:, None] & (k < size)[None, :]
    place = row.to(tl.int64)[:, None] * size + k[None, :]
    mask_row = _row_of_mask(seed, first_row, SLICED)
    keep = _kept(tl.load(seed), 0, mask_row, first_column, threshold, ROWS, COLUMNS)
    values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, tl.where(keep, values * scale, 0.0).to(out.dtype.element_ty), mask=inside)
