"""Assigns the rows of each step to ranks, in an order that is the same on every rank without communication.

A step consists of one batch of the loader per rank. No row is skipped and none counts twice: the rows of an incomplete
last step are spread over the ranks, and a rank without rows gets a placeholder batch with weight zero.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, IterableDataset, Sampler

from fullshard.distributed import runtime


@dataclass(frozen=True)
class RankBatch:
    """One rank's part of a step."""

    batch: Any
    rows: int
    """Number of rows; 0 for a placeholder."""
    total: int
    """Number of rows of the step on all ranks."""


def rank_batches(batches: Any, rank: int, world_size: int, size: int | None, drop: bool) -> Iterator[RankBatch]:
    """Every `world_size`-th batch, starting at `rank`, and this rank's part of an incomplete last step.

    If `size` (the rows of a batch) is known, the rows of an incomplete step are spread evenly; otherwise batches stay
    as they are. With `drop`, an incomplete step is skipped.
    """
    for step in chunks(batches, world_size):
        complete = len(step) == world_size and (size is None or len(step[-1]) == size)
        if drop and not complete:
            return
        if not complete and size is not None:
            step = spread([row for batch in step for row in batch], world_size)
        counts = [row_count(batch) for batch in step]
        if len(set(counts)) > 1 and complete:
            runtime.warn_once(
                "prepare: batches of different sizes",
                "prepare: the batches of a step have different numbers of rows, so each rank's gradients are weighted "
                "by its rows; if the loss is a mean over something else, such as tokens, run the forward pass inside "
                "fullshard.weighted(number of tokens)",
            )
        if rank < len(step) and counts[rank]:
            yield RankBatch(step[rank], counts[rank], sum(counts))
        else:
            yield RankBatch(step[0][:1] if isinstance(step[0], list | tuple) else step[0], 0, sum(counts))


def chunks(items: Any, n: int) -> Iterator[list[Any]]:
    """The items in lists of `n`; the last list may be shorter."""
    left = iter(items)
    while chunk := list(itertools.islice(left, n)):
        yield chunk


def joined(batches: Any, n: int) -> Any:
    """The batches of indices, `n` of them in one."""
    return batches if n == 1 else ([row for batch in chunk for row in batch] for chunk in chunks(batches, n))


def spread(rows: list[Any], n: int) -> list[list[Any]]:
    """The rows in `n` lists, in order, with lengths that differ by at most one."""
    each, more = divmod(len(rows), n)
    ends = [i * each + min(i, more) for i in range(n + 1)]
    return [rows[start:end] for start, end in itertools.pairwise(ends)]


def row_count(batch: Any) -> int:
    """Number of rows in a batch of indices; a single index is one row."""
    return len(batch) if isinstance(batch, list | tuple) else 1


class RankBatches(Sampler[Any]):
    """A sampler that yields this rank's batches; other attributes are those of the sampler it replaces."""

    def __init__(self, batches: Any, rank: int, world_size: int, order: SharedRandomOrder, joins: int = 1):
        self.batches, self.rank, self.world_size, self.order, self.joins = batches, rank, world_size, order, joins
        """`joins` batches, one for each device of the rank, make one of the rank's."""
        own = isinstance(batches, BatchSampler) and type(batches).__iter__ is BatchSampler.__iter__
        self.size: int | None = batches.batch_size * joins if own else None
        """Rows per batch; None for a user-defined batch sampler, whose batches must not be split."""
        self.drop = bool(getattr(batches, "drop_last", False))
        self.pending: deque[RankBatch] = deque()
        """Batches drawn but not yet yielded by the loader: worker processes prefetch."""
        self.skip = 0
        """Steps to skip at the start of the next epoch."""

    def __iter__(self) -> Iterator[Any]:
        pending, skip = self.pending, self.skip
        drawn = joined(self.order.draws(self.batches), self.joins)
        mine = rank_batches(drawn, self.rank, self.world_size, self.size, self.drop)
        for one in itertools.islice(mine, skip, None):
            pending.append(one)
            yield one.batch

    def __len__(self) -> int:
        whole, rest = divmod(len(self.batches), self.world_size * self.joins)
        if self.drop or not rest:
            return whole
        return whole + 1

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "batches" not in vars(self):
            raise AttributeError(name)
        return getattr(self.batches, name)


class RankItems(IterableDataset):
    """A stream of this rank's samples: `batch_size` of each `world_size × batch_size` samples."""

    def __init__(
        self, dataset: Any, rank: int, world_size: int, batch_size: int | None, drop: bool, order: SharedRandomOrder,
        joins: int = 1,
    ):  # fmt: skip
        self.dataset, self.rank, self.world_size, self.order = dataset, rank, world_size, order
        self.size, self.drop = (batch_size or 1) * joins, drop
        self.pending: deque[RankBatch] = deque()

    def __iter__(self) -> Iterator[Any]:
        pending = self.pending
        batches = chunks(self.order.draws(self.dataset), self.size)
        for one in rank_batches(batches, self.rank, self.world_size, self.size, self.drop):
            pending.append(one)
            yield from one.batch

    def __len__(self) -> int:
        whole, rest = divmod(len(self.dataset), self.world_size * self.size)
        if self.drop or not rest:
            return whole * self.size
        return whole * self.size + max(1, len(spread([None] * rest, self.world_size)[self.rank]))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "dataset" not in vars(self):
            raise AttributeError(name)
        return getattr(self.dataset, name)


# --- random numbers ---------------------------------------------------------------------------------------------------


class SharedRandomOrder:
    """The random numbers that samplers and streams draw, the same on every rank.

    With several ranks they come from a separate sequence, which starts from rank 0's generators (torch's, Python's,
    numpy's and the sampler's own) when the loader is prepared. The generators of the rest of the program are not
    affected. A single process draws from its usual generators until `go_to` is called.
    """

    def __init__(self, generators: list[torch.Generator], world_size: int, seeds_workers: bool):
        self.generators = list({id(g): g for g in generators}.values())
        self.seeds_workers = seeds_workers
        """Whether torch's loader draws a seed for its workers from the global generator at the start of each epoch."""
        self.apart = world_size > 1
        """Whether the sequence is separate from the generators of the process."""
        start = [(_global_state(), [g.get_state() for g in self.generators])]
        if world_size > 1:
            dist.broadcast_object_list(start, src=0)
        self.state: Any = None
        self._restore(start[0])
        self.epoch = 0
        self._begun = {0: start[0]}

    def begin(self) -> None:
        """Start an epoch."""
        if self.apart:
            self._begun[self.epoch] = (self.state, [g.get_state() for g in self.generators])
        self.epoch += 1

    def go_to(self, epoch: int, draw_epoch: Callable[[], Any]) -> None:
        """Go to the start of an epoch; the orders of epochs not seen yet are drawn with `draw_epoch` and discarded."""
        self.apart = True
        known = max(e for e in self._begun if e <= epoch)
        self._restore(self._begun[known])
        for e in range(known, epoch):
            for generator in self.generators[:1] if not self.seeds_workers else ():
                torch.empty((), dtype=torch.int64).random_(generator=generator)
            draw_epoch()
            self._begun[e + 1] = (self.state, [g.get_state() for g in self.generators])
        self.epoch = epoch

    def draws(self, source: Any) -> Iterator[Any]:
        """Iterate over `source`, with its random numbers drawn from this sequence."""
        with self.drawing():
            if self.apart and self.seeds_workers:
                torch.empty((), dtype=torch.int64).random_()
            left = iter(source)
        while True:
            with self.drawing():
                try:
                    item = next(left)
                except StopIteration:
                    return
            yield item

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """Inside, the global generators are those of this sequence."""
        if not self.apart:
            yield
            return
        outside = _global_state()
        _set_global_state(self.state)
        try:
            yield
        finally:
            self.state = _global_state()
            _set_global_state(outside)

    def _restore(self, begun: Any) -> None:
        self.state, states = begun
        for generator, state in zip(self.generators, states, strict=True):
            generator.set_state(state)


def _global_state() -> Any:
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def _set_global_state(state: Any) -> None:
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    np.random.set_state(state[2])
