"""Readers: tensors in files that are read slice by slice.

A `TensorReader` represents one tensor in a file (`Stored`) or one built from several (`Joined`, `Stacked`,
`Transposed`; `Computed` for conversions that need whole tensors). Indexing it reads only that slice. `key_mapping.py`
chooses the readers for a model's parameters.
"""

from __future__ import annotations

import itertools
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fullshard.device import accelerator
from fullshard.weights import block_checksums
from fullshard.weights.safetensors_files import Entry, SafetensorsFiles

Cuts = tuple[slice, ...]
"""A slice of a tensor: start and stop for each dim."""
Job = Callable[[], None]
"""A part of a read; jobs can run in parallel."""

JOB_BYTES = 8 * 2**20
"""Maximum number of bytes per job, so that threads share large tensors and buffers stay small."""
SHORT_RUN = 4 * 2**10
"""Contiguous runs shorter than this (bytes) are not read one by one: whole rows are read and sliced in memory."""
LONG_ROW = 2**20
"""Rows longer than this (bytes) are never read whole for a short run."""


class TensorReader(ABC):
    """A tensor that is read from files."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @abstractmethod
    def jobs(self, out: torch.Tensor, cuts: Cuts) -> Iterator[Job]:
        """Jobs that read the slice into `out` (any dtype, any device); they can run in any order."""

    def read_into(self, out: torch.Tensor, cuts: Cuts) -> None:
        """Read the slice into `out`."""
        for job in self.jobs(out, cuts):
            job()

    def __getitem__(self, key: Any) -> torch.Tensor:
        """Read a slice into host memory. `key` is a slice, or a tuple of slices, without steps."""
        indices = key if isinstance(key, tuple) else (key,)
        full = (*indices, *(slice(None),) * (len(self.shape) - len(indices)))
        cuts = tuple(slice(*cut.indices(size)[:2]) for cut, size in zip(full, self.shape, strict=True))
        out = torch.empty(lengths(cuts), dtype=self.dtype)
        self.read_into(out, cuts)
        return out

    def flat(self, start: int, stop: int) -> torch.Tensor:
        """Read elements `start` to `stop` of the flattened tensor."""
        width = math.prod(self.shape[1:])
        first = start // width
        rows = self[first : -(-stop // width)]
        return rows.reshape(-1)[start - first * width : stop - first * width]


class Stored(TensorReader):
    """One tensor of a file."""

    def __init__(self, source: SafetensorsFiles, entry: Entry):
        self.source, self.entry = source, entry
        self.shape, self.dtype = entry.shape, entry.dtype

    def flat(self, start: int, stop: int) -> torch.Tensor:
        """Read elements `start` to `stop` of the flattened tensor, in one piece."""
        out = torch.empty(stop - start, dtype=self.dtype)
        self._fetch(out, [start], stop - start)
        return out

    def jobs(self, out: torch.Tensor, cuts: Cuts) -> Iterator[Job]:
        """Reads of the file, of about `JOB_BYTES` each."""
        size = math.prod(lengths(self._widened(cuts))) * self.dtype.itemsize
        dim = next((dim for dim, n in enumerate(lengths(cuts)) if n > 1), None)
        if size <= JOB_BYTES or dim is None:
            if out.numel():
                yield lambda: self._read(out, cuts)
            return
        length = cuts[dim].stop - cuts[dim].start
        step = max(1, length * JOB_BYTES // size)
        row = math.prod(self.shape[dim + 1 :]) * self.dtype.itemsize
        whole = block_checksums.BLOCK // math.gcd(block_checksums.BLOCK, row)
        if step >= whole:  # jobs end where blocks end, which are then read once
            step -= step % whole
        begin, start = 0, cuts[dim].start
        while begin < length:
            end = min(begin + step - (start + begin) % step, length)
            part = slice(start + begin, start + end)
            yield from self.jobs(out.narrow(dim, begin, end - begin), (*cuts[:dim], part, *cuts[dim + 1 :]))
            begin = end

    def _read(self, out: torch.Tensor, cuts: Cuts) -> None:
        wide = self._widened(cuts)
        offsets, run = self._runs(wide)
        if wide == cuts and out.device.type == "cpu" and out.dtype == self.dtype and out.is_contiguous():
            self._fetch(out, offsets, run)
            return
        shape = lengths(wide)
        buffer = _buffer(math.prod(shape) * self.dtype.itemsize, out.device).view(self.dtype).view(shape)
        self._fetch(buffer, offsets, run)
        inner = tuple(slice(c.start - w.start, c.stop - w.start) for c, w in zip(cuts, wide, strict=True))
        out.copy_(buffer[inner])

    def _widened(self, cuts: Cuts) -> Cuts:
        """The smallest enclosing slice whose contiguous runs are long enough to read one by one."""
        _, run = self._runs(cuts)
        dim = self._innermost(cuts)
        if dim is None or dim == 0 or run * self.dtype.itemsize >= SHORT_RUN:
            return cuts
        if math.prod(self.shape[dim:]) * self.dtype.itemsize > LONG_ROW:
            return cuts
        return self._widened((*cuts[:dim], slice(0, self.shape[dim]), *cuts[dim + 1 :]))

    def _innermost(self, cuts: Cuts) -> int | None:
        """The last dim that is only partly read."""
        partial = [dim for dim, n in enumerate(self.shape) if lengths(cuts)[dim] != n]
        return partial[-1] if partial else None

    def _runs(self, cuts: Cuts) -> tuple[Iterator[int], int]:
        """The start of each contiguous run of the slice, in elements, and their length."""
        strides = [math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape))]
        dim = self._innermost(cuts)
        if dim is None:
            return iter([0]), math.prod(self.shape)
        outer = [range(cut.start * s, cut.stop * s, s) for cut, s in zip(cuts[:dim], strides[:dim], strict=True)]
        first = cuts[dim].start * strides[dim]
        starts = (sum(offsets) + first for offsets in itertools.product(*outer))
        return starts, (cuts[dim].stop - cuts[dim].start) * strides[dim]

    def _fetch(self, out: torch.Tensor, starts: Sequence[int] | Iterator[int], run: int) -> None:
        if not out.numel():
            return
        item = self.dtype.itemsize
        memory = memoryview(out.reshape(-1).view(torch.uint8).numpy())  # contiguous: a view, never a copy
        for i, start in enumerate(starts):
            into = memory[i * run * item : (i + 1) * run * item]
            self.source.read(self.entry, start * item, into)


class Joined(TensorReader):
    """Tensors concatenated along a dim."""

    def __init__(self, parts: Sequence[TensorReader], dim: int):
        self.parts, self.dim = list(parts), dim % len(parts[0].shape)
        self.shape = joined_shape([part.shape for part in parts], self.dim)
        self.dtype = parts[0].dtype

    def jobs(self, out: torch.Tensor, cuts: Cuts) -> Iterator[Job]:
        """The jobs of the parts that the slice touches."""
        span, begin = cuts[self.dim], 0
        for part in self.parts:
            end = begin + part.shape[self.dim]
            low, high = max(begin, span.start), min(end, span.stop)
            if low < high:
                cut = (*cuts[: self.dim], slice(low - begin, high - begin), *cuts[self.dim + 1 :])
                yield from part.jobs(out.narrow(self.dim, low - span.start, high - low), cut)
            begin = end


class Stacked(TensorReader):
    """Tensors of one shape stacked along a new dim."""

    def __init__(self, parts: Sequence[TensorReader], dim: int):
        self.parts, self.dim = list(parts), dim
        inner = parts[0].shape
        if any(part.shape != inner for part in parts):
            raise ValueError(f"tensors of shapes {sorted({part.shape for part in parts})} cannot be stacked")
        self.shape = (*inner[:dim], len(parts), *inner[dim:])
        self.dtype = parts[0].dtype

    def jobs(self, out: torch.Tensor, cuts: Cuts) -> Iterator[Job]:
        """The jobs of the parts that the slice selects."""
        span = cuts[self.dim]
        for i in range(span.start, span.stop):
            cut = (*cuts[: self.dim], *cuts[self.dim + 1 :])
            yield from self.parts[i].jobs(out.select(self.dim, i - span.start), cut)


class Transposed(TensorReader):
    """A tensor with two dims swapped."""

    def __init__(self, inner: TensorReader, dim0: int, dim1: int):
        self.inner = inner
        self.order = list(range(len(inner.shape)))
        self.order[dim0], self.order[dim1] = self.order[dim1], self.order[dim0]
        self.shape = tuple(inner.shape[dim] for dim in self.order)
        self.dtype = inner.dtype

    def jobs(self, out: torch.Tensor, cuts: Cuts) -> Iterator[Job]:
        """The jobs of the inner tensor."""
        yield from self.inner.jobs(out.permute(self.order), tuple(cuts[dim] for dim in self.order))


class AsMatrix(TensorReader):
    """A tensor without dims, or with one, as a matrix: a column, or a row if `row`."""

    def __init__(self, inner: TensorReader, row: bool):
        self.inner, self.dtype = inner, inner.dtype
        size = math.prod(inner.shape)
        self.shape = (1, size) if row else (size, 1)

    def jobs(self, out: torch.Tensor, cuts: Cuts) -> Iterator[Job]:
        """One job, which reads the whole tensor; it is small."""
        if out.numel():
            yield lambda: out.copy_(self.inner[()].view(self.shape)[cuts])


class Computed(TensorReader):
    """A tensor that is computed whole from whole tensors, and then sliced."""

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, compute: Callable[[Callable[[TensorReader], torch.Tensor]], Any]
    ):
        self.shape, self.dtype, self.compute = tuple(shape), dtype, compute

    def jobs(self, out: torch.Tensor, cuts: Cuts) -> Iterator[Job]:
        """One job, which computes the whole tensor."""

        def whole(reader: TensorReader) -> torch.Tensor:
            value = reader[()]
            return value.to(out.dtype) if value.is_floating_point() else value

        yield lambda: out.copy_(self.compute(whole)[cuts])


def lengths(cuts: Cuts) -> tuple[int, ...]:
    """The shape of a slice."""
    return tuple(cut.stop - cut.start for cut in cuts)


def joined_shape(shapes: Sequence[tuple[int, ...]], dim: int) -> tuple[int, ...]:
    """The shape of tensors concatenated along a dim."""
    rest = {(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}
    if len(rest) != 1:
        raise ValueError(f"tensors of shapes {sorted(set(shapes))} cannot be concatenated along dim {dim}")
    return (*shapes[0][:dim], sum(shape[dim] for shape in shapes), *shapes[0][dim + 1 :])


_buffers = threading.local()


def _buffer(size: int, device: torch.device) -> torch.Tensor:
    """A staging buffer for reads that change dtype, layout or device; one per thread, reused."""
    buffer = getattr(_buffers, "bytes", None)
    if buffer is None or buffer.numel() < size:
        buffer = _buffers.bytes = accelerator.staging(max(size, JOB_BYTES), device)
    return buffer[:size]
