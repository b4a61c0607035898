"""Which rows make up a step, and what they look like as tensors.

The rows of a step are a function of (seed, step) alone, so every rank knows the whole global batch, takes its slice,
and training resumes anywhere at once. Documents that share a row are kept apart by positions that start again:
transformers turns those into block-diagonal attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fullshard.data.encode import TextSettings
from fullshard.data.formats import Source
from fullshard.data.once import agree, once_per_node
from fullshard.data.tokens import TokenTable, cache_root, make_table, open_table, table_key
from fullshard.errors import DataError

IGNORED = -100
Batch = dict[str, torch.Tensor]


def load_table(source: Source, tokenizer: Any, settings: TextSettings, cache: str | None = None) -> TokenTable:
    """The token table of this data, made by one process per node if it is not there. All ranks must call this."""

    def make() -> str:
        folder = cache_root(cache) / table_key(source, tokenizer, settings)
        if open_table(folder) is None:
            make_table(source, tokenizer, settings, folder)
        return str(folder)

    folder = Path(once_per_node(make))
    agree(lambda: _must_open(folder, source))
    table = open_table(folder)
    assert table is not None
    return table


def _must_open(folder: Path, source: Source) -> None:
    if open_table(folder) is None:
        raise DataError(
            f"the tokens of {source.name} were written to {folder}, but not every rank of the node sees them."
        )


# --- the order of rows ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Order:
    """Which rows each optimizer step trains on."""

    rows: int
    batch: int
    """Rows in a global batch: of all ranks and micro-batches together."""
    seed: int
    shuffle: bool = True
    drop_last: bool = False

    @property
    def steps_per_epoch(self) -> int:
        return max(1, self.rows // self.batch) if self.drop_last else -(-self.rows // self.batch)

    def step(self, step: int) -> npt.NDArray[np.int64]:
        """The rows of global step `step` (from 0); the last of an epoch may be fewer."""
        epoch, index = divmod(step, self.steps_per_epoch)
        start = index * self.batch
        return _permutation(self.rows, self.seed, epoch, self.shuffle)[start : start + self.batch]


@lru_cache(maxsize=2)
def _permutation(rows: int, seed: int, epoch: int, shuffle: bool) -> npt.NDArray[np.int64]:
    if not shuffle:
        return np.arange(rows)
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(rows)


def share(rows: Sequence[int] | npt.NDArray[np.int64], rank: int, world: int, size: int) -> list[list[int]]:
    """This rank's micro-batches of a global batch: as many on every rank, at most `size` rows each, some maybe empty.

    Rows are dealt out in blocks, micro-batch by micro-batch, so a short last batch is spread as evenly as it goes.
    """
    count = max(1, -(-len(rows) // (world * size)))
    mine: list[list[int]] = []
    for block in np.array_split(np.asarray(rows), count):
        mine.append(np.array_split(block, world)[rank].tolist())
    return mine


# --- tensors --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Collator:
    """Rows as tensors. Padding comes last, where nothing before it can see it, so there is no mask."""

    pad_token_id: int
    isolate: bool = False
    """Rows hold several documents: give positions that start again with each."""
    flatten: bool = False
    """One long row without padding, as flash attention's kernels for documents of different lengths want it."""
    multiple: int = 8
    """Row lengths are padded up to a multiple of this."""

    def __call__(self, table: TokenTable, rows: Sequence[int]) -> Batch:
        """`input_ids`, `labels`, and what attention needs. A batch without rows is one row that teaches nothing."""
        packed = [_row(table, row) for row in rows]
        if self.flatten and packed:
            ids, targets, places = (np.concatenate(parts) for parts in zip(*packed, strict=True))
            packed = [(ids, targets, places)]
        length = max((len(ids) for ids, _, _ in packed), default=1)
        if not self.flatten:
            length = -(-length // self.multiple) * self.multiple
        shape = (max(1, len(packed)), length)
        input_ids = np.full(shape, self.pad_token_id, dtype=np.int64)
        labels = np.full(shape, IGNORED, dtype=np.int64)
        # Padding counts as a document of its own: its positions start again as well.
        positions = np.tile(np.arange(length), (shape[0], 1))
        for i, (tokens, targets, places) in enumerate(packed):
            n = len(tokens)
            input_ids[i, :n], labels[i, :n], positions[i, :n] = tokens, targets, places
            positions[i, n:] = np.arange(length - n)
        batch = {"input_ids": torch.from_numpy(input_ids), "labels": torch.from_numpy(labels)}
        if self.isolate or self.flatten:
            batch["position_ids"] = torch.from_numpy(positions)
        return batch


def _row(table: TokenTable, row: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
    """Tokens, labels and positions of a row. A document's first token is never a target."""
    tokens, labels, positions = [], [], []
    for ids, learnt in table.documents(row):
        target = np.where(learnt.astype(bool), ids, IGNORED).astype(np.int64)
        target[0] = IGNORED
        tokens.append(ids)
        labels.append(target)
        positions.append(np.arange(len(ids)))
    return np.concatenate(tokens), np.concatenate(labels), np.concatenate(positions)


@dataclass(frozen=True)
class Step:
    """One global batch, as one rank sees it."""

    number: int
    rows: npt.NDArray[np.int64]
    """All rows of the global batch, in order, alike on every rank."""
    mine: list[list[int]]
    """The rows of each of this rank's micro-batches."""
    batches: list[Batch]
    targets: int
    """Learnt tokens in the global batch: what the loss is divided by. Known to every rank without asking."""
    tokens: int


class Loader:
    """A rank's steps, from any step on. `workers` threads prepare coming steps."""

    def __init__(
        self, table: TokenTable, order: Order, collator: Collator, size: int, rank: int, world: int, workers: int = 0
    ) -> None:
        self.table, self.order, self.collator = table, order, collator
        self.size, self.rank, self.world, self.workers = size, rank, world, workers

    def load(self, step: int) -> Step:
        rows = self.order.step(step)
        mine = share(rows, self.rank, self.world, self.size)
        batches = [self.collator(self.table, part) for part in mine]
        targets, tokens = int(self.table.row_targets[rows].sum()), int(self.table.row_sizes[rows].sum())
        return Step(step, rows, mine, batches, targets, tokens)

    def steps(self, start: int, end: int) -> Iterator[Step]:
        """Steps `start` to `end` - 1."""
        if not self.workers:
            yield from map(self.load, range(start, end))
            return
        with ThreadPoolExecutor(self.workers, thread_name_prefix="fullshard-data") as pool:
            coming: list[Future[Step]] = []
            try:
                for step in range(start, end):
                    while len(coming) <= self.workers and step + len(coming) < end:
                        coming.append(pool.submit(self.load, step + len(coming)))
                    yield coming.pop(0).result()
            finally:
                for future in coming:
                    future.cancel()


def one_pass(table: TokenTable, collator: Collator, size: int, rank: int, world: int) -> Iterator[Step]:
    """Every row once, in order, for evaluation; each rank takes part in every batch."""
    order = Order(len(table), size * world, seed=0, shuffle=False)
    return Loader(table, order, collator, size, rank, world).steps(0, order.steps_per_epoch)
