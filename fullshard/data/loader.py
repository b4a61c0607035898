"""The batches of each training step: which rows they hold, and their tensors.

A sampler chooses the rows of each step. For a token table they depend on (seed, step) alone; for a stream, on its
position (`stream.py`). Every rank knows the whole global batch and takes its part. In a packed sequence the position
ids restart with each document; `models/packed_inputs.py` provides what else a model needs to keep documents apart.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from fullshard.config.errors import DataError
from fullshard.data.encode import TextSettings
from fullshard.data.pretokenized import IGNORED
from fullshard.data.sources import DataSource
from fullshard.data.token_table import MANIFEST, TokenTable, cache_root, make_table, open_table, table_key
from fullshard.distributed import runtime
from fullshard.distributed.progress import TokenizingProgress
from fullshard.distributed.ranks import exchange, once_per_node, run_on_all_ranks

Batch = dict[str, torch.Tensor]


def load_table(
    source: DataSource, tokenizer: Any, settings: TextSettings, cache: str | None = None, workers: int = 0,
    progress: str = "quiet",
) -> TokenTable:  # fmt: skip
    """The token table of this data, created by one rank per node if it is not in the cache. All ranks must call this.

    `workers` processes tokenize, with the same result for any number; `progress` is the option of that name.
    """

    def make(folder: Path) -> None:
        with TokenizingProgress(source.name, progress) as shown:
            make_table(source, tokenizer, settings, folder, workers, shown)

    def begin() -> str:
        folder = cache_root(cache) / table_key(source, tokenizer, settings)
        if open_table(folder) is None:
            if folder.exists():
                _say_damaged(folder, "files are missing, or not as they were written")
            make(folder)
        return str(folder)

    def mend(damage: str) -> TokenTable:
        again = _remake_table(folder, lambda: make(folder), damage)
        if again.facts["check"] != table.facts["check"]:
            raise DataError(f"{source.name} has changed since the run began, and its token cache was damaged.")
        return again

    folder = Path(once_per_node(begin, "tokenizing"))
    table = run_on_all_ranks(lambda: _opened(folder, source, mend), "token table")
    check_same(exchange(table.facts["check"], "token table"), source)
    return table


def _remake_table(folder: Path, make: Callable[[], None], damage: str) -> TokenTable:
    """The table of a folder in which damage was found. The first process to find it calls `make`; the others, which
    may share the folder, wait for that."""
    with _one_process_at_a_time(folder.parent):
        table = open_table(folder)
        if table is None or not table.is_sound():
            _say_damaged(folder, damage)
            # Should this process be killed now, the next start sees that there is no table.
            (folder / MANIFEST).unlink(missing_ok=True)
            make()
            table = open_table(folder)
    if table is None:
        raise DataError(f"the token cache {folder} was made anew, but cannot be read.")
    return table


def _say_damaged(folder: Path, damage: str) -> None:
    """Log that a table is made anew."""
    runtime.get_logger().warning("the token cache %s is damaged (%s): the data is tokenized again", folder, damage)


@contextlib.contextmanager
def _one_process_at_a_time(folder: Path) -> Iterator[None]:
    """Inside, no other process of this machine is in here with the same folder."""
    handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: each process makes its own, all equal
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def cached_table(
    source: DataSource, tokenizer: Any, settings: TextSettings, cache: str | None = None
) -> TokenTable | None:
    """The token table of this data, if it is in the cache of this machine and undamaged."""
    table = open_table(cache_root(cache) / table_key(source, tokenizer, settings))
    return table if table is not None and table.is_sound() else None


def _opened(folder: Path, source: DataSource, mend: Callable[[str], TokenTable]) -> TokenTable:
    table = open_table(folder, mend)
    if table is None:
        raise DataError(
            f"the tokens of {source.name} were written to {folder}, but not every rank of the node can read them."
        )
    return table


def check_same(checks: Sequence[Any], source: DataSource) -> None:
    """Raise if the checksums of tokens that the ranks have, or the sizes of their files, differ."""
    if any(check != checks[0] for check in checks):
        others = ", ".join(str(rank) for rank, check in enumerate(checks) if check != checks[0])
        raise DataError(
            f"{source.name}: ranks {others} read other data than rank 0; every node needs the same files, tokenizer "
            f"and settings."
        )


# --- sampling -------------------------------------------------------------------------------------------------------


class TokenRows(Protocol):
    """Tokenized rows by number: a `TokenTable`, or rows of a stream."""

    def documents(self, row: int) -> list[tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]]:
        """The tokens and loss mask of each document in a row."""


@dataclass(frozen=True)
class GlobalBatch:
    """The rows of one step's global batch, the same on every rank."""

    number: int
    rows: npt.NDArray[np.int64]
    source: TokenRows
    """Holds those rows."""
    targets: int
    """Tokens in the global batch that contribute to the loss, by which it is divided. Needs no communication."""
    tokens: int
    epoch: float
    """Epochs completed after this step."""
    ends_epoch: bool
    position: dict[str, Any] | None = None
    """The data position after this step, as plain data; None if the step number determines it."""
    facts: dict[str, Any] | None = None
    """Dataset statistics so far, if they are not known in advance."""


class BatchSampler(Protocol):
    """Chooses the rows of each step."""

    @property
    def batch(self) -> int:
        """Rows in a global batch: of all ranks and micro-batches together."""

    def picks(self, start: int, end: int, position: dict[str, Any] | None) -> Generator[GlobalBatch, None, None]:
        """The rows of steps `start` to `end` - 1; `position` is the data position to resume from."""


@dataclass(frozen=True)
class RowOrder:
    """Which rows of a table each optimizer step trains on."""

    rows: int
    batch: int
    """Rows in a global batch: of all ranks and micro-batches together."""
    seed: int
    shuffle: bool = True
    drop_last: bool = False

    @property
    def steps_per_epoch(self) -> int:
        """The number of global batches in one epoch."""
        return max(1, self.rows // self.batch) if self.drop_last else -(-self.rows // self.batch)

    def step(self, step: int) -> npt.NDArray[np.int64]:
        """The rows of global step `step` (from 0); the last step of an epoch may have fewer."""
        epoch, index = divmod(step, self.steps_per_epoch)
        start = index * self.batch
        return _permutation(self.rows, self.seed, epoch, self.shuffle)[start : start + self.batch]


@dataclass(frozen=True)
class TableSampler:
    """Samples the rows of a table in a `RowOrder`."""

    table: TokenTable
    order: RowOrder

    @property
    def batch(self) -> int:
        """The number of rows in a global batch."""
        return self.order.batch

    def pick(self, step: int) -> GlobalBatch:
        """The rows of a step's global batch."""
        rows, done = self.order.step(step), step + 1
        targets, tokens = int(self.table.row_targets[rows].sum()), int(self.table.row_sizes[rows].sum())
        length = self.order.steps_per_epoch
        return GlobalBatch(step, rows, self.table, targets, tokens, done / length, done % length == 0)

    def picks(self, start: int, end: int, position: dict[str, Any] | None) -> Generator[GlobalBatch, None, None]:
        """The global batches of a range of steps."""
        yield from map(self.pick, range(start, end))


@lru_cache(maxsize=2)
def _permutation(rows: int, seed: int, epoch: int, shuffle: bool) -> npt.NDArray[np.int64]:
    if not shuffle:
        return np.arange(rows)
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(rows)


def micro_batch_rows(rows: Sequence[int] | npt.NDArray[np.int64], rank: int, world: int, size: int) -> list[list[int]]:
    """This rank's micro-batches of a global batch: the same number on every rank, at most `size` rows each.

    A short last batch is spread evenly over the micro-batches and ranks; some may be empty.
    """
    count = max(1, -(-len(rows) // (world * size)))
    mine: list[list[int]] = []
    for block in np.array_split(np.asarray(rows), count):
        mine.append(np.array_split(block, world)[rank].tolist())
    return mine


# --- tensors --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Collator:
    """Collates rows into tensors. Padding is on the right, where causal attention ignores it, so no mask is needed."""

    pad_token_id: int
    isolate: bool = False
    """Rows are packed: add position ids that restart with each document."""
    flatten: bool = False
    """One row without padding, as flash attention's variable-length kernels expect."""
    multiple: int | None = None
    """Row lengths are padded up to a multiple of this. None: 8, or no padding with `flatten`."""
    mask: str | None = None
    """The name under which to add which tokens are no padding: `attention_mask` for code that expects it, `real_tokens`
    for routers of experts. None adds nothing: the model itself does not need it."""
    rows: int = 1
    """The least number of rows; those that are missing are padding."""
    length: int = 1
    """The least length of rows, padding included."""

    def padded(self, length: int) -> int:
        """The length of rows of which the longest has this length."""
        multiple = self.multiple or (1 if self.flatten else 8)
        return -(-max(length, self.length) // multiple) * multiple

    def __call__(self, table: TokenRows, rows: Sequence[int]) -> Batch:
        """`input_ids`, `labels` and, if packed, `position_ids`. An empty batch becomes one row without loss."""
        packed = [row_arrays(table, row) for row in rows]
        if self.flatten and packed:
            ids, targets, position_ids = (np.concatenate(parts) for parts in zip(*packed, strict=True))
            packed = [(ids, targets, position_ids)]
        length = self.padded(max((len(ids) for ids, _, _ in packed), default=1))
        shape = (max(self.rows, len(packed)), length)
        input_ids = np.full(shape, self.pad_token_id, dtype=np.int64)
        labels = np.full(shape, IGNORED, dtype=np.int64)
        # Padding counts as a separate document: its position ids restart as well.
        positions = np.tile(np.arange(length), (shape[0], 1))
        for i, (tokens, targets, position_ids) in enumerate(packed):
            n = len(tokens)
            input_ids[i, :n], labels[i, :n], positions[i, :n] = tokens, targets, position_ids
            positions[i, n:] = np.arange(length - n)
        batch = {"input_ids": torch.from_numpy(input_ids), "labels": torch.from_numpy(labels)}
        if self.isolate or self.flatten:
            batch["position_ids"] = torch.from_numpy(positions)
        if self.mask is not None:
            lengths = torch.tensor([len(tokens) for tokens, _, _ in packed] + [0] * (shape[0] - len(packed)))
            batch[self.mask] = (torch.arange(length) < lengths[:, None]).long()
        return batch


def row_arrays(table: TokenRows, row: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
    """Tokens, labels and position ids of a row. A document's first token is never predicted."""
    tokens, labels, positions = [], [], []
    for ids, loss_mask in table.documents(row):
        target = np.where(loss_mask.astype(bool), ids, IGNORED).astype(np.int64)
        target[0] = IGNORED
        tokens.append(ids)
        labels.append(target)
        positions.append(np.arange(len(ids)))
    return np.concatenate(tokens), np.concatenate(labels), np.concatenate(positions)


def row_of(table: TokenRows, row: int) -> dict[str, list[int]]:
    """A row as TRL's preparation gives it."""
    tokens, labels, _ = row_arrays(table, row)
    return {"input_ids": tokens.tolist(), "labels": labels.tolist()}


@dataclass(frozen=True)
class Step:
    """One step on one rank: its micro-batches of the global batch."""

    pick: GlobalBatch
    mine: list[list[int]]
    """The rows of each of this rank's micro-batches."""
    batches: list[Batch]

    @property
    def number(self) -> int:
        """The number of the optimizer step."""
        return self.pick.number


class Loader:
    """Loads a rank's batches, starting at any step. `workers` threads prepare the next steps."""

    def __init__(
        self, sampler: BatchSampler, collator: Callable[[TokenRows, Sequence[int]], Batch], size: int, rank: int,
        world: int, workers: int = 0, repeats_rows: bool = False,
    ) -> None:  # fmt: skip
        self.sampler, self.collator = sampler, collator
        self.repeats_rows = repeats_rows
        """Whether a rank without rows in a micro-batch gets another's, for code that cannot handle an empty one."""
        self.size, self.rank, self.world, self.workers = size, rank, world, workers

    def load(self, pick: GlobalBatch) -> Step:
        """This rank's micro-batches of a global batch."""
        mine = micro_batch_rows(pick.rows, self.rank, self.world, self.size)
        spare = pick.rows[:1].tolist() if self.repeats_rows else []
        return Step(pick, mine, [self.collator(pick.source, part or spare) for part in mine])

    def steps(self, start: int, end: int, position: dict[str, Any] | None = None) -> Generator[Step, None, None]:
        """Steps `start` to `end` - 1. Close the generator when leaving early: a stream holds processes and files."""
        with contextlib.closing(self.sampler.picks(start, end, position)) as picks:
            yield from self._ahead(picks) if self.workers else map(self.load, picks)

    def _ahead(self, picks: Iterator[GlobalBatch]) -> Iterator[Step]:
        with ThreadPoolExecutor(self.workers, thread_name_prefix="fullshard-data") as pool:
            pending: deque[Future[Step]] = deque()
            try:
                for pick in _errors_in_order(picks):
                    pending.append(pool.submit(self._load, pick))
                    if len(pending) > self.workers:
                        yield pending.popleft().result()
                while pending:
                    yield pending.popleft().result()
            finally:
                for future in pending:
                    future.cancel()

    def _load(self, pick: GlobalBatch | Exception) -> Step:
        if isinstance(pick, Exception):
            raise pick
        return self.load(pick)


def _errors_in_order(picks: Iterator[GlobalBatch]) -> Iterator[GlobalBatch | Exception]:
    """Yield an error in order, so that the steps before it are trained first, as without threads."""
    try:
        yield from picks
    except Exception as error:
        yield error
