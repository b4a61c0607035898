"""The products of rows that are sorted by group with a stack of matrices, one per group, whatever its storage.

`ends` [groups], int32, says where the rows of each group end. It stays on the device: no product waits for its values.
Rows behind the last group have undefined results. A stack is a form and a list of tensors, as in `base_product.py`:

| form | tensors |
|---|---|
| `dense` | matrices [groups, rows, columns] |
| `nf4:64:128x1536x2048`, `fp4:…` | packed, absmax and, with double quantization, nested (blocks of 64) |
| `stored:e2m1:1x32:exponent:::128x1x1536x2048`, … | the parts of a released model's weight (`stored_format.py`) |

A new kind of storage adds an entry to `KINDS`: how its matrices become dense for one product.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F

from fullshard.device import accelerator
from fullshard.quant import workspace
from fullshard.quant.sharded_groups import Scheme
from fullshard.quant.stored_format import Coding, Tile
from fullshard.quant.stored_values import decode

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
    def kind(self) -> Kind:
        """How its matrices are stored."""
        return KINDS[self.form.partition(":")[0]]

    @property
    def shape(self) -> tuple[int, int, int]:
        """(groups, rows, columns)."""
        return self.kind.shape(self)

    def dense_parts(self, dtype: torch.dtype, size: int) -> Iterator[DensePart]:
        """The matrices in `dtype`, all at once or some rows of each, of about `size` bytes. Each part is valid until
        the next is asked for."""
        return self.kind.dense_parts(self, dtype, size)

    @contextlib.contextmanager
    def dense_matrix(self, index: int, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        """One matrix in `dtype`, for one product, which is inside."""
        one = self.kind.matrix(self, index)
        with contextlib.closing(one.dense_parts(dtype, sys.maxsize)) as parts:  # type: ignore[type-var]
            _, matrices = next(parts)
            yield matrices[0]


def quantized(scheme: Scheme, shape: Sequence[int], parts: dict[str, torch.Tensor]) -> Stack:
    """The stack of 4-bit parts (`sharded_groups`)."""
    tensors = [parts[name] for name in ("packed", "absmax", "nested") if name in parts]
    return Stack(f"{scheme.quant_type}:{scheme.blocksize}:{'x'.join(map(str, shape))}", tensors)


class Kind(Protocol):
    """How the matrices of a stack become dense for one product."""

    def shape(self, stack: Stack) -> tuple[int, int, int]:
        """(groups, rows, columns)."""

    def dense_parts(self, stack: Stack, dtype: torch.dtype, size: int) -> Iterator[DensePart]:
        """As `Stack.dense_parts`."""

    def matrix(self, stack: Stack, index: int) -> Stack:
        """The stack of one of the matrices."""


class Dense:
    """Matrices as they are."""

    def shape(self, stack: Stack) -> tuple[int, int, int]:
        groups, rows, columns = stack.tensors[0].shape
        return groups, rows, columns

    def dense_parts(self, stack: Stack, dtype: torch.dtype, size: int) -> Iterator[DensePart]:
        matrices = stack.tensors[0]
        yield slice(0, matrices.shape[1]), matrices.to(dtype)

    def matrix(self, stack: Stack, index: int) -> Stack:
        return Stack("dense", [stack.tensors[0][index : index + 1]])


class FourBit:
    """4-bit matrices of bitsandbytes: all are dequantized in one launch, or a bounded part of each."""

    def shape(self, stack: Stack) -> tuple[int, int, int]:
        groups, rows, columns = stack.form.split(":")[2].split("x")
        return int(groups), int(rows), int(columns)

    def _scheme(self, stack: Stack) -> Scheme:
        quant_type, blocksize, _ = stack.form.split(":")
        return Scheme(quant_type, int(blocksize))

    def dense_parts(self, stack: Stack, dtype: torch.dtype, size: int) -> Iterator[DensePart]:
        (count, rows, columns), scheme = self.shape(stack), self._scheme(stack)
        per, values = scheme.groups(rows * columns), scheme.group
        packed, absmax, nested = (*stack.tensors, None)[:3]
        whole_rows = columns // math.gcd(values, columns)  # so many groups end with a row
        fitting = size // (count * values * dtype.itemsize) // whole_rows * whole_rows
        step = min(max(fitting, whole_rows), per)
        for first in range(0, per, step):
            last = min(first + step, per)
            own = [_some(part, count, per, first, last) for part in (packed, absmax, nested)]
            start, stop = first * values // columns, min(last * values // columns, rows) if last < per else rows
            shape = (count * (last - first) * values,)
            assert own[0] is not None and own[1] is not None
            with workspace.dequantized(
                own[0], own[1], own[2], shape, scheme.blocksize, scheme.quant_type, dtype
            ) as flat:
                used = flat.view(count, -1)[:, : (stop - start) * columns]
                yield slice(start, stop), used.view(count, stop - start, columns)

    def matrix(self, stack: Stack, index: int) -> Stack:
        (_, rows, columns), scheme = self.shape(stack), self._scheme(stack)
        per = scheme.groups(rows * columns)
        tensors = [part[index * per : (index + 1) * per] for part in stack.tensors]
        return Stack(f"{scheme.quant_type}:{scheme.blocksize}:1x{rows}x{columns}", tensors)


def _some(part: torch.Tensor | None, count: int, per: int, first: int, last: int) -> torch.Tensor | None:
    """Some of the `per` rows that a part has for each matrix."""
    if part is None or (first, last) == (0, per):
        return part
    return part.view(count, per, -1)[:, first:last].reshape(count * (last - first), -1)


class Stored:
    """Matrices of a released model, as its files store them: all are unpacked in one launch, or some rows of each."""

    def _sizes(self, stack: Stack) -> tuple[int, int, int, int]:
        """(groups, joined matrices of each, rows of these, columns)."""
        groups, joined, rows, columns = stack.form.rpartition(":")[2].split("x")
        return int(groups), int(joined), int(rows), int(columns)

    def shape(self, stack: Stack) -> tuple[int, int, int]:
        groups, joined, rows, columns = self._sizes(stack)
        return groups, joined * rows, columns

    def dense_parts(self, stack: Stack, dtype: torch.dtype, size: int) -> Iterator[DensePart]:
        coding = Coding.parse(*stack.form.split(":")[1:-1])
        groups, joined, rows, columns = self._sizes(stack)
        fitting = size // (groups * columns * dtype.itemsize)
        if fitting >= joined * rows:
            tiles = [(slice(0, joined * rows), Tile(groups * joined, rows, columns))]
        else:
            height = coding.block[0] or 1
            step = min(max(fitting // height * height, height), rows)
            tiles = [
                (
                    slice(i * rows + start, i * rows + min(start + step, rows)),
                    Tile(groups * joined, rows, columns, i, joined, start, min(start + step, rows)),
                )
                for i in range(joined)
                for start in range(0, rows, step)
            ]
        for span, tile in tiles:
            shape = (groups, span.stop - span.start, columns)
            fill = functools.partial(decode, coding, stack.tensors, tile)
            with workspace.filled(shape, dtype, stack.tensors[0].device, fill) as matrices:
                yield span, matrices

    def matrix(self, stack: Stack, index: int) -> Stack:
        groups, joined, rows, columns = self._sizes(stack)
        tensors = [part.view(groups, -1, part.shape[-1])[index] for part in stack.tensors]
        return Stack(f"{stack.form.rpartition(':')[0]}:1x{joined}x{rows}x{columns}", tensors)


KINDS: dict[str, Kind] = {"dense": Dense(), "nf4": FourBit(), "fp4": FourBit(), "stored": Stored()}
"""The kinds of storage by the first word of a form."""


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
