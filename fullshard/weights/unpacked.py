"""Readers for weights in a released model's formats: `PartRows`, a part as rows of bytes, and `Unpacked`, the dense
weight, which is unpacked slice by slice while it is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from fullshard.quant.shipped_layers import ATTRIBUTE
from fullshard.quant.stored_files import check_reader, dense_rows, file_names, read_rows
from fullshard.quant.stored_format import StoredWeight
from fullshard.weights.slice_reader import JOB_BYTES, Cuts, Job, TensorReader


class PartRows(TensorReader):
    """A part of a weight as rows of bytes."""

    dtype = torch.uint8

    def __init__(self, weight: StoredWeight, part: str, reader: TensorReader):
        self.weight, self.part, self.reader = weight, part, reader
        self.shape = weight.part_shapes()[part]

    def jobs(self, out: torch.Tensor, cuts: Cuts) -> Iterator[Job]:
        """A job for every few rows; columns are never split."""
        assert cuts[1] == slice(0, self.shape[1])
        step = max(1, JOB_BYTES // self.shape[1])
        for start in range(cuts[0].start, cuts[0].stop, step):
            stop = min(start + step, cuts[0].stop)
            yield self._job(out[start - cuts[0].start : stop - cuts[0].start], slice(start, stop))

    def _job(self, into: torch.Tensor, rows: slice) -> Job:
        def read() -> None:
            into.copy_(read_rows(self.weight, self.part, self.reader, rows))

        return read


class Unpacked(TensorReader):
    """A weight in the shape of the model's parameter. `readers` are by part."""

    def __init__(self, weight: StoredWeight, readers: Mapping[str, TensorReader], dtype: torch.dtype):
        self.weight, self.readers, self.dtype = weight, dict(readers), dtype
        self.shape = weight.shape

    def jobs(self, out: torch.Tensor, cuts: Cuts) -> Iterator[Job]:
        """A job for some rows of a matrix."""
        weight = self.weight
        if not weight.experts:
            out, cuts = out[None], (slice(0, 1), *cuts)
        if weight.format.transposed:
            out, cuts = out.transpose(1, 2), (cuts[0], cuts[2], cuts[1])
        block = weight.format.coding.block[0] or 1
        step = max(JOB_BYTES // (4 * weight.columns) // block * block, block)
        for expert in range(cuts[0].start, cuts[0].stop):
            for matrix in range(weight.joined):
                first = matrix * weight.rows
                start, stop = max(cuts[1].start, first), min(cuts[1].stop, first + weight.rows)
                while start < stop:
                    end = min(first + ((start - first) // step + 1) * step, stop)
                    into = out[expert - cuts[0].start, start - cuts[1].start : end - cuts[1].start]
                    rows = slice(start - first, end - first)
                    yield self._job(into, expert * weight.joined + matrix, rows, cuts[2])
                    start = end

    def _job(self, into: torch.Tensor, matrix: int, rows: slice, columns: slice) -> Job:
        def read() -> None:
            into.copy_(dense_rows(self.weight, self.readers, matrix, rows, into.dtype)[:, columns])

        return read


def unpack(model: Any, readers: dict[str, TensorReader]) -> list[tuple[str, str]]:
    """Replace the readers of packed parts by those of the dense weights that are unpacked while loading. Returns the
    names of parts that are missing or do not fit, and why."""
    problems = []
    weights: dict[str, StoredWeight] = getattr(model, ATTRIBUTE, {})
    for name, weight in weights.items():
        parts = {part: readers.pop(file, None) for part, file in file_names(weight, name).items()}
        for part, file in file_names(weight, name).items():
            reader = parts[part]
            why = f"{weight.format.name} weights need it" if reader is None else check_reader(weight, part, reader)
            if why:
                problems.append((file, why))
        found = {part: reader for part, reader in parts.items() if reader is not None}
        if len(found) == len(parts):
            readers[name] = Unpacked(weight, found, model.dtype)
    return problems
