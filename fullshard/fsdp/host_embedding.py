"""A frozen table in host memory whose rows the accelerator reads in place: an embedding that needs no device memory.

The accelerator reads page-locked host memory over the bus. A lookup reads one row per token, so neither the table nor
the token ids have to be copied, and nothing waits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fullshard.device import accelerator
from fullshard.device.torch_private import make_wrapper_subclass, tree_map
from fullshard.device.triton_jit import Kernel, tl, triton

MARK = "_fullshard_on_host"


def keep_on_host(parameter: nn.Parameter) -> None:
    """Let the engine keep a frozen parameter whole in host memory, instead of sharding it. Call it before sharding."""
    setattr(parameter, MARK, True)


def stays_on_host(parameter: nn.Parameter) -> bool:
    """Whether `keep_on_host` was called for a parameter that is still frozen."""
    return getattr(parameter, MARK, False) and not parameter.requires_grad


class HostTable(torch.Tensor):
    """A table [rows, width] in host memory as modules see it: on the device, in the compute dtype, without memory.

    `embedding` reads rows in place. Any other operation copies the whole table to the device first.
    """

    rows: torch.Tensor
    """The values, in host memory, in the dtype that they are stored in."""

    @staticmethod
    def __new__(cls, rows: torch.Tensor, dtype: torch.dtype, device: torch.device) -> HostTable:
        table: Any = make_wrapper_subclass(cls, rows.shape, dtype=dtype, device=device, requires_grad=False)
        table.rows = rows
        return table

    def __init__(self, rows: torch.Tensor, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()

    def __repr__(self) -> str:
        return f"HostTable({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = args[0] if args else None
        if func is torch.ops.aten.embedding.default and isinstance(first, cls):
            return lookup(first.rows, args[1], first.dtype)
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(args[0].rows, args[0].dtype, args[0].device)
        args, kwargs = tree_map(lambda t: _copied(t) if isinstance(t, cls) else t, (args, kwargs or {}))
        return func(*args, **kwargs)


def _copied(table: HostTable) -> torch.Tensor:
    return table.rows.to(table.device, table.dtype)


def lookup(rows: torch.Tensor, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The rows of a table in host memory at `ids`, on the device of `ids`."""
    if accelerator.runs_triton(ids.device) and rows.is_pinned():
        return read_rows(rows, ids, dtype)
    return torch.embedding(rows, ids.to(rows.device)).to(ids.device, dtype)


# --- the kernel: rows of a table in page-locked host memory, read by the accelerator ----------------------------------

BLOCK = 2048
"""Values of a row per program."""


def read_rows(rows: torch.Tensor, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
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
