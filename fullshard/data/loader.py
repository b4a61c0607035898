"""Which rows make up a step, and what they look like as tensors.

A feed says which rows each step has: those of a table are a function of (seed, step) alone, those of a stream of the
position it has come to (`stream.py`). Every rank knows the whole global batch and takes its slice. Documents that share
a row are told apart by positions that start again; `models/packed_inputs.py` has what a model needs besides to keep
them apart.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from fullshard.data.encode import TextSettings
from fullshard.data.sources import Source
from fullshard.data.token_table import TokenTable, cache_root, make_table, open_table, table_key
from fullshard.errors import DataError
from fullshard.progress import TokenizingProgress
from fullshard.ranks import agree, once_per_node

IGNORED = -100
Batch = dict[str, torch.Tensor]


def load_table(
    source: Source, tokenizer: Any, settings: TextSettings, cache: str | None = None, workers: int = 0,
    progress: str = "quiet",
) -> TokenTable:  # fmt: skip
    """The token table of this data, made by one rank per node if it is not there. All ranks must call this.

    `workers` processes tokenise, with the same result for any number; `progress` is the option of that name.
    """

    def make() -> str:
        folder = cache_root(cache) / table_key(source, tokenizer, settings)
        if open_table(folder) is None:
            with TokenizingProgress(source.name, progress) as shown:
                make_table(source, tokenizer, settings, folder, workers, shown)
        return str(folder)

    folder = Path(once_per_node(make, "tokenizing"))
    agree(lambda: _must_open(folder, source), "token table")
    table = open_table(folder)
    assert table is not None
    return table


def _must_open(folder: Path, source: Source) -> None:
    if open_table(folder) is None:
        raise DataError(
            f"the tokens of {source.name} were written to {folder}, but not every rank of the node sees them."
        )


# --- the order of rows ----------------------------------------------------------------------------------------------


class Rows(Protocol):
    """Something that has rows."""

    def documents(self, row: int) -> list[tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]]: ...


@dataclass(frozen=True)
class Pick:
    """The rows of one step, before they are tensors; alike on every rank."""

    number: int
    rows: npt.NDArray[np.int64]
    source: Rows
    """Where those rows are."""
    targets: int
    """Learnt tokens in the global batch: what the loss is divided by. Known to every rank without asking."""
    tokens: int
    epoch: float
    """Epochs gone through when this step is done."""
    ends_epoch: bool
    position: dict[str, Any] | None = None
    """Where the data stands after this step, in plain data, if the step's number does not say it."""
    facts: dict[str, Any] | None = None
    """Counts of the data gone through so far, where they are not known beforehand."""


class Feed(Protocol):
    """Says which rows each step has."""

    @property
    def batch(self) -> int:
        """Rows in a global batch: of all ranks and micro-batches together."""

    def picks(self, start: int, end: int, position: dict[str, Any] | None) -> Generator[Pick, None, None]:
        """The rows of steps `start` to `end` - 1; `position` is where an earlier run stood before them."""


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


@dataclass(frozen=True)
class TableFeed:
    """The rows of a table in an order."""

    table: TokenTable
    order: Order

    @property
    def batch(self) -> int:
        return self.order.batch

    def pick(self, step: int) -> Pick:
        rows, done = self.order.step(step), step + 1
        targets, tokens = int(self.table.row_targets[rows].sum()), int(self.table.row_sizes[rows].sum())
        length = self.order.steps_per_epoch
        return Pick(step, rows, self.table, targets, tokens, done / length, done % length == 0)

    def picks(self, start: int, end: int, position: dict[str, Any] | None) -> Generator[Pick, None, None]:
        yield from map(self.pick, range(start, end))


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

    def __call__(self, table: Rows, rows: Sequence[int]) -> Batch:
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


def _row(table: Rows, row: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
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

    pick: Pick
    mine: list[list[int]]
    """The rows of each of this rank's micro-batches."""
    batches: list[Batch]

    @property
    def number(self) -> int:
        return self.pick.number


class Loader:
    """A rank's steps, from any step on. `workers` threads prepare coming steps."""

    def __init__(self, feed: Feed, collator: Collator, size: int, rank: int, world: int, workers: int = 0) -> None:
        self.feed, self.collator = feed, collator
        self.size, self.rank, self.world, self.workers = size, rank, world, workers

    def load(self, pick: Pick) -> Step:
        mine = share(pick.rows, self.rank, self.world, self.size)
        return Step(pick, mine, [self.collator(pick.source, part) for part in mine])

    def steps(self, start: int, end: int, position: dict[str, Any] | None = None) -> Generator[Step, None, None]:
        """Steps `start` to `end` - 1. Close it if it is left early: a stream has processes and files."""
        with contextlib.closing(self.feed.picks(start, end, position)) as picks:
            yield from self._ahead(picks) if self.workers else map(self.load, picks)

    def _ahead(self, picks: Iterator[Pick]) -> Iterator[Step]:
        with ThreadPoolExecutor(self.workers, thread_name_prefix="fullshard-data") as pool:
            coming: deque[Future[Step]] = deque()
            try:
                for pick in _failures_last(picks):
                    coming.append(pool.submit(self._load, pick))
                    if len(coming) > self.workers:
                        yield coming.popleft().result()
                while coming:
                    yield coming.popleft().result()
            finally:
                for future in coming:
                    future.cancel()

    def _load(self, pick: Pick | Exception) -> Step:
        if isinstance(pick, Exception):
            raise pick
        return self.load(pick)


def _failures_last(picks: Iterator[Pick]) -> Iterator[Pick | Exception]:
    """An error takes its turn, so that the steps before it are done first, as they are without threads."""
    try:
        yield from picks
    except Exception as error:
        yield error


def one_pass(table: TokenTable, collator: Collator, size: int, rank: int, world: int) -> Iterator[Step]:
    """Every row once, in order, for evaluation; each rank takes part in every batch."""
    order = Order(len(table), size * world, seed=0, shuffle=False)
    return Loader(TableFeed(table, order), collator, size, rank, world).steps(0, order.steps_per_epoch)
