"""Resized vocabularies: embeddings with more rows than in the files, with new rows at the mean of the old ones.

All ranks sum the mean together in a fixed order, so no rank holds the whole table and the result does not depend on the
number of ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from fullshard import runtime
from fullshard.errors import WeightsError
from fullshard.ranks import agree_locally, host_group
from fullshard.weights.slice_reader import Cuts, Job, Joined, TensorReader

ROWS = 256
"""Number of rows summed at a time."""


class Repeated(TensorReader):
    """One row, repeated."""

    def __init__(self, row: torch.Tensor, count: int, dtype: torch.dtype):
        self.row, self.shape, self.dtype = row, (count, *row.shape), dtype

    def jobs(self, out: torch.Tensor, cuts: Cuts) -> Iterator[Job]:
        if out.numel():
            yield lambda: out.copy_(self.row[cuts[1:]].expand(out.shape))


class PickedRows(TensorReader):
    """Selected rows of a tensor, rounded to `dtype`, the dtype of their layer."""

    def __init__(self, reader: TensorReader, rows: Sequence[int], dtype: torch.dtype):
        self.reader, self.rows, self.dtype = reader, list(rows), dtype
        self.shape = (len(self.rows), *reader.shape[1:])

    def jobs(self, out: torch.Tensor, cuts: Cuts) -> Iterator[Job]:
        def pick() -> None:
            for target, row in zip(out, self.rows[cuts[0]], strict=True):
                rounded = torch.empty((1, *target.shape), dtype=self.dtype)
                self.reader.read_into(rounded, (slice(row, row + 1), *cuts[1:]))
                target.copy_(rounded[0])

        if out.numel():
            yield pick


def grown_reader(reader: TensorReader, rows: int, alone: bool = False) -> TensorReader:
    """A reader for the tensor with `rows` rows. All ranks must call it, unless `alone`."""
    row = _mean(_block_sums(reader, 0, 1), reader.shape[0]) if alone else mean_row(reader)
    return Joined([reader, Repeated(row, rows - reader.shape[0], reader.dtype)], 0)


def mean_row(reader: TensorReader) -> torch.Tensor:
    """The mean over dim 0, in fp64."""
    block_sums = functools.partial(_block_sums, reader, runtime.rank(), runtime.world_size())
    sums = agree_locally(block_sums, "mean of token rows", error=WeightsError)
    if runtime.world_size() > 1:
        dist.all_reduce(sums, group=host_group())  # each block is zero on all ranks but one: exact
    return _mean(sums, reader.shape[0])


def _block_sums(table: TensorReader | torch.Tensor, first: int, step: int) -> torch.Tensor:
    """Sums over blocks of rows: of the blocks `first`, `first + step`, …; zero for the others."""
    rows = table.shape[0]
    blocks = range(0, rows, ROWS)
    sums = torch.zeros(len(blocks), *table.shape[1:], dtype=torch.float64)
    for i in range(first, len(blocks), step):
        sums[i] = table[blocks[i] : min(blocks[i] + ROWS, rows)].double().sum(0)
    return sums


def _mean(sums: torch.Tensor, rows: int) -> torch.Tensor:
    return sums.sum(0) / rows


def grow_in_memory(weight: torch.Tensor, rows: int) -> None:
    """Set the rows of a tensor from `rows` on to the mean of the others, as `grown_reader` does."""
    with torch.no_grad():
        weight[rows:] = _mean(_block_sums(weight[:rows].detach().cpu(), 0, 1), rows).to(weight)


def may_grow(model: PreTrainedModel | None, names: dict[int, list[str]]) -> set[str]:
    """The names of the parameters with one row per token. `names` has the names of all parameters by id."""
    if model is None:
        return set()
    layers = [model.get_input_embeddings(), model.get_output_embeddings()]
    tables = [p for layer in layers if layer is not None for p in layer.parameters()]
    return {name for p in tables for name in names.get(id(p), ())}
