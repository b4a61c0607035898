"""The products of rows that are sorted by group with a stack of matrices, one per group, whatever its storage.

`ends` [groups], int32, says where the rows of each group end. It stays on the device: no product waits for its values.
Rows behind the last group have undefined results. A stack is a form and a list of tensors, as in `base_product.py`:

| form | tensors |
|---|---|
| `dense` | matrices [groups, rows, columns] |
| `nf4:64:128x1536x2048`, `fp4:…` | packed, absmax and, with double quantization, nested (blocks of 64) |

A new kind of storage adds an entry to `KINDS`: how its matrices become dense for one product.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from fullshard.device import accelerator
from fullshard.quant import workspace
from fullshard.quant.sharded_groups import Scheme

ALIGNMENT = 16
"""Bytes that rows must be a multiple of."""
BUFFER = 2**28
"""Bytes of matrices that are dequantized at a time, or as many as the rows of the product have."""

DensePart = tuple[slice, torch.Tensor]
"""Some rows of all matrices, and their dense values [groups, rows, columns]."""


class Stack(NamedTuple):
    """A stack of matrices: its form and its tensors."""

    form: str
    tensors: Sequence[torch.Tensor]

    @property
    def shape(self) -> tuple[int, int, int]:
        """(groups, rows, columns)."""
        if self.form == "dense":
            groups, rows, columns = self.tensors[0].shape
            return groups, rows, columns
        return _quantized_shape(self.form)[:3]

    def dense_parts(self, dtype: torch.dtype, size: int) -> Iterator[DensePart]:
        """The matrices in `dtype`, all at once or some rows of each, of about `size` bytes. Each part is valid until
        the next is asked for."""
        return KINDS[self.form.partition(":")[0]](self, dtype, size)


def quantized(scheme: Scheme, shape: Sequence[int], parts: dict[str, torch.Tensor]) -> Stack:
    """The stack of 4-bit parts (`sharded_groups`)."""
    tensors = [parts[name] for name in ("packed", "absmax", "nested") if name in parts]
    return Stack(f"{scheme.quant_type}:{scheme.blocksize}:{'x'.join(map(str, shape))}", tensors)


def _quantized_shape(form: str) -> tuple[int, int, int, int]:
    """(groups, rows, columns, block size) of a form with numbers."""
    _, blocksize, shape = form.split(":")
    groups, rows, columns = shape.split("x")
    return int(groups), int(rows), int(columns), int(blocksize)


def _whole(stack: Stack, dtype: torch.dtype, size: int) -> Iterator[DensePart]:
    matrices = stack.tensors[0]
    yield slice(0, matrices.shape[1]), matrices.to(dtype)


def _dequantized(stack: Stack, dtype: torch.dtype, most: int) -> Iterator[DensePart]:
    """All matrices in one launch, or a bounded part of each."""
    count, rows, columns, blocksize = _quantized_shape(stack.form)
    scheme = Scheme(stack.form.partition(":")[0], blocksize)
    per, size = scheme.groups(rows * columns), scheme.group
    packed, absmax, nested = (*stack.tensors, None)[:3]
    whole_rows = columns // math.gcd(size, columns)  # so many groups end with a row
    fitting = most // (count * size * dtype.itemsize) // whole_rows * whole_rows
    step = min(max(fitting, whole_rows), per)
    for first in range(0, per, step):
        last = min(first + step, per)
        own = [_some(part, count, per, first, last) for part in (packed, absmax, nested)]
        start, stop = first * size // columns, min(last * size // columns, rows) if last < per else rows
        shape = (count * (last - first) * size,)
        assert own[0] is not None and own[1] is not None
        with workspace.dequantized(own[0], own[1], own[2], shape, blocksize, scheme.quant_type, dtype) as flat:
            used = flat.view(count, -1)[:, : (stop - start) * columns]
            yield slice(start, stop), used.view(count, stop - start, columns)


def _some(part: torch.Tensor | None, count: int, per: int, first: int, last: int) -> torch.Tensor | None:
    """Some of the `per` rows that a part has for each matrix."""
    if part is None or (first, last) == (0, per):
        return part
    return part.view(count, per, -1)[:, first:last].reshape(count * (last - first), -1)


KINDS: dict[str, Callable[[Stack, torch.dtype, int], Iterator[DensePart]]] = {
    "dense": _whole,
    "nf4": _dequantized,
    "fp4": _dequantized,
}
"""The dense parts of a stack, by kind of storage."""


def product(x: torch.Tensor, stack: Stack, ends: torch.Tensor, transposed: bool = False) -> torch.Tensor:
    """`x @ matrixᵀ` of each group's rows, or `x @ matrix` if `transposed`."""
    outs, (_, rows_of_matrix, columns) = [], stack.shape
    bytes_of_rows = len(x) * (rows_of_matrix + columns) * x.element_size()
    for rows, matrices in stack.dense_parts(x.dtype, max(BUFFER, bytes_of_rows)):
        if not transposed:
            outs.append(grouped_mm(x, matrices.transpose(1, 2), ends))
        elif not outs:
            outs.append(grouped_mm(_columns(x, rows), matrices, ends))
        else:
            outs[0] += grouped_mm(_columns(x, rows), matrices, ends)
    return outs[0] if len(outs) == 1 else torch.cat(outs, 1)


def _columns(x: torch.Tensor, columns: slice) -> torch.Tensor:
    return x if columns == slice(0, x.shape[1]) else x[:, columns]


# --- products with dense matrices -------------------------------------------------------------------------------------


def grouped_mm(x: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """`x @ matrix` of each group's rows: [rows, k] and [groups, k, n] to [rows, n]."""
    if x.is_meta:
        return torch.mm(x, matrices[0])  # as many operations
    if _fits(x, matrices):
        return F.grouped_mm(x, matrices, offs=ends)
    out = x.new_empty(len(x), matrices.shape[2])
    for i, (start, stop) in enumerate(_bounds(ends)):
        if start < stop:
            torch.mm(x[start:stop], matrices[i], out=out[start:stop])
    return out


def grouped_outer(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """`aᵀ @ b` of each group's rows: [rows, m] and [rows, n] to [groups, m, n]. Zeros for groups without rows."""
    out: torch.Tensor
    if a.is_meta:
        out = a.new_empty(len(ends), a.shape[1], b.shape[1])
        torch.mm(a.t(), b, out=out[0])
        return out
    if _fits(a, b):
        out = F.grouped_mm(a.t(), b, offs=ends)
        if a.is_cuda:  # the kernel need not write what has no terms
            _zero_empty_groups(out, ends)
        return out
    out = a.new_empty(len(ends), a.shape[1], b.shape[1])
    for i, (start, stop) in enumerate(_bounds(ends)):
        torch.mm(a[start:stop].t(), b[start:stop], out=out[i])
    return out


def _zero_empty_groups(out: torch.Tensor, ends: torch.Tensor) -> None:
    if accelerator.runs_triton(out.device):
        from fullshard.quant import triton_kernels

        triton_kernels.zero_empty_groups(out, ends)
    else:
        out.masked_fill_((ends.diff(prepend=ends.new_zeros(1)) == 0)[:, None, None], 0)


def group_sums(x: torch.Tensor, ends: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
    """The sum of each group's rows, times their `weights` [rows] if given: [groups, columns]."""
    factor = x.new_ones(len(x)) if weights is None else weights.to(x.dtype)
    wide = x.new_zeros(len(x), ALIGNMENT // x.element_size())
    wide[:, 0] = factor
    return grouped_outer(wide, x, ends)[:, 0]


def group_dot(x: torch.Tensor, vectors: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The product of each row with the vector of its group: [rows, k] and [groups, k] to [rows]."""
    wide = F.pad(vectors[:, :, None], (0, ALIGNMENT // x.element_size() - 1))
    return grouped_mm(x, wide, ends)[:, 0]


def _fits(*tensors: torch.Tensor) -> bool:
    """Whether torch's grouped product takes them: it has no fp64, and needs aligned rows."""
    return all(
        t.numel() > 0 and t.dtype in (torch.bfloat16, torch.float16, torch.float32) and t.data_ptr() % ALIGNMENT == 0
        and 1 in t.stride()[-2:]
        and all(stride * t.element_size() % ALIGNMENT == 0 for stride in t.stride() if stride != 1)
        for t in tensors
    )  # fmt: skip


def _bounds(ends: torch.Tensor) -> Iterator[tuple[int, int]]:
    """The rows of each group; the host waits for them."""
    return itertools.pairwise([0, *ends.tolist()])
