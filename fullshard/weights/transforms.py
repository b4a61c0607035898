"""Changes to values during loading, slice by slice.

There are two ways. A `transform` function gets this rank's slice of each ordinary parameter and may return another one.
A module whose parameters have another form than its files (quantized weights) reads the files itself: it names the file
tensors it needs, gets a `TensorReader` for each, reads the ranges for this rank and writes its own shards
(`ReadsFiles`); one that keeps the bytes of file tensors only names them (`KeepsFiles`). `docs/weights.md` describes the
protocols.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from fullshard.config.errors import WeightsError
from fullshard.distributed import runtime
from fullshard.distributed.ranks import host_group, run_on_all_ranks
from fullshard.fsdp.parameter import ShardedParameter
from fullshard.fsdp.strategy import dtype_of
from fullshard.quant.stored_format import StoredWeight
from fullshard.spmd.mesh import Mesh
from fullshard.weights.slice_reader import Cuts, Job, Joined, TensorReader

ROWS = 256
"""Number of rows summed at a time."""


class Repeated(TensorReader):
    """One row, repeated."""

    def __init__(self, row: torch.Tensor, count: int, dtype: torch.dtype):
        self.row, self.shape, self.dtype = row, (count, *row.shape), dtype

    def jobs(self, out: torch.Tensor, cuts: Cuts) -> Iterator[Job]:
        """One job, which copies the row."""
        if out.numel():
            yield lambda: out.copy_(self.row[cuts[1:]].expand(out.shape))


class PickedRows(TensorReader):
    """Selected rows of a tensor, rounded to `dtype`, the dtype of their layer."""

    def __init__(self, reader: TensorReader, rows: Sequence[int], dtype: torch.dtype):
        self.reader, self.rows, self.dtype = reader, list(rows), dtype
        self.shape = (len(self.rows), *reader.shape[1:])

    def jobs(self, out: torch.Tensor, cuts: Cuts) -> Iterator[Job]:
        """One job, which reads the rows one by one."""

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
    sums = run_on_all_ranks(block_sums, "mean of token rows", error=WeightsError)
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


@dataclass(frozen=True)
class Piece:
    """One parameter and this rank's shard of it."""

    name: str
    """Its name in the model."""
    shape: tuple[int, ...]
    """The full shape."""
    dtype: torch.dtype
    cuts: Cuts
    """The slice of the full tensor on this rank."""
    local: torch.Tensor
    """The memory of that slice, to write to."""
    mesh: Mesh

    @property
    def rows(self) -> slice:
        """This rank's slice of dim 0."""
        return self.cuts[0]


Transform = Callable[[str, torch.Tensor, Piece], torch.Tensor | None]
"""`transform(name, value, piece)`: `value` is this rank's slice of a parameter as loaded. The returned tensor replaces
it; None keeps it."""


@runtime_checkable
class ReadsFiles(Protocol):
    """A module whose parameters are computed from file tensors of another form."""

    def file_tensors(self) -> Mapping[str, tuple[int, ...]]:
        """Names (relative to the module) and shapes of the file tensors it needs: `{"weight": (out, in)}`."""

    def made_parameters(self) -> tuple[str, ...]:
        """The names of its parameters that are computed from them. Other parameters are loaded as usual."""

    def read_files(self, readers: Mapping[str, TensorReader], pieces: Mapping[str, Piece]) -> Any:
        """Read what this rank needs. Must not communicate. Called for one module at a time."""

    def finish_reading(self, read: Any, pieces: Mapping[str, Piece]) -> None:
        """Write the pieces. Called on every rank in the same order after all have read; may communicate."""


@runtime_checkable
class KeepsFiles(Protocol):
    """A module whose parameters are the bytes of file tensors, in rows: weights as a released model stores them."""

    def file_tensors(self) -> Mapping[str, tuple[int, ...]]:
        """As in `ReadsFiles`."""

    def made_parameters(self) -> tuple[str, ...]:
        """As in `ReadsFiles`."""

    def part_files(self) -> Mapping[str, tuple[StoredWeight, str, str]]:
        """The weight, part and file tensor of each of these parameters, by name."""


@runtime_checkable
class WritesFiles(Protocol):
    """A module that can also convert its parameters back to file tensors, for export."""

    def made_parameters(self) -> tuple[str, ...]:
        """As in `ReadsFiles`."""

    def as_files(self, values: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """The file tensors by name (relative to the module), from the unsharded values of its made parameters. Meta
        tensors give meta tensors."""


def pieces_of(p: ShardedParameter, keep: bool = False) -> list[Piece]:
    """The pieces of a sharded parameter on this process; `keep` as in `ShardedParameter.parts`."""
    dtype = dtype_of(p.plan.dtype)
    assert dtype is not None
    parts = p.parts(keep)
    return [Piece(p.plan.name, p.plan.shape, dtype, cuts, memory, p.layout.mesh) for cuts, memory in parts]


def piece_of(p: ShardedParameter) -> Piece:
    """The piece of a sharded parameter on this rank of the torch engine, which has one."""
    (piece,) = pieces_of(p)
    return piece


def own_readers(root: nn.Module) -> dict[str, Any]:
    """The modules that say what they need of files (`ReadsFiles`, `KeepsFiles`), by name."""
    return {name: module for name, module in root.named_modules() if isinstance(module, ReadsFiles | KeepsFiles)}
