"""Embeddings with more rows than the files have: the new ones start at the mean of the old.

The mean is summed by all ranks together in a fixed order, so that nobody holds the table and the result does not
depend on how many ranks there are.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from fullshard import runtime
from fullshard.weights.meeting import front_group
from fullshard.weights.reader import Cuts, Job, Joined, Reader
from fullshard.weights.report import together

ROWS = 256
"""Rows that are added up in one go."""


class Repeated(Reader):
    """The same row again and again."""

    def __init__(self, row: torch.Tensor, count: int, dtype: torch.dtype):
        self.row, self.shape, self.dtype = row, (count, *row.shape), dtype

    def jobs(self, out: torch.Tensor, cuts: Cuts) -> Iterator[Job]:
        if out.numel():
            yield lambda: out.copy_(self.row[cuts[1:]].expand(out.shape))


def grown(reader: Reader, rows: int) -> Reader:
    """The tensor with so many rows. All ranks must ask."""
    return Joined([reader, Repeated(mean_row(reader), rows - reader.shape[0], reader.dtype)], 0)


def mean_row(reader: Reader) -> torch.Tensor:
    """The mean over dim 0, in fp64."""
    rows = reader.shape[0]
    blocks = range(0, rows, ROWS)
    sums = torch.zeros(len(blocks), *reader.shape[1:], dtype=torch.float64)

    def add_up() -> None:
        for i in range(runtime.rank(), len(blocks), runtime.world_size()):
            sums[i] = reader[blocks[i] : min(blocks[i] + ROWS, rows)].double().sum(0)

    together(add_up, "mean of token rows")
    if runtime.world_size() > 1:
        dist.all_reduce(sums, group=front_group())  # each block is zero on all ranks but one: exact
    return sums.sum(0) / rows


def may_grow(model: PreTrainedModel | None, names: dict[int, list[str]]) -> set[str]:
    """Names of the parameters that have one row per token. `names` gives every parameter's, by its id."""
    if model is None:
        return set()
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    held = [p for end in ends if end is not None for p in end.parameters()]
    return {name for p in held for name in names.get(id(p), ())}
