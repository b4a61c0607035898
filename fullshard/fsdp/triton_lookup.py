"""Triton kernel for `host_table.py`: rows of a table in page-locked host memory, read by the accelerator."""

from __future__ import annotations

import torch

from fullshard.device.triton_jit import Kernel, tl, triton

BLOCK = 2048
"""Values of a row per program."""


def lookup(rows: torch.Tensor, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The rows [*ids.shape, width] at `ids`. An id without a row gives NaN."""
    count, width = rows.shape
    out = torch.empty((*ids.shape, width), dtype=dtype, device=ids.device)
    if out.numel():
        _lookup[(ids.numel(), triton.cdiv(width, BLOCK))](rows, ids.contiguous(), out, count, width, BLOCK=BLOCK)
    return out


@Kernel
def _lookup(rows, ids, out, count, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(ids + token).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    known = (row >= 0) & (row < count)
    values = tl.load(rows + row * width + column, mask=(column < width) & known, other=float("nan"))
    tl.store(out + token * width + column, values.to(out.dtype.element_ty), mask=column < width)
