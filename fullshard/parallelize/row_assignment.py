"""Who gets which rows of a step, and the random numbers that decide their order: alike on every rank, without asking.

A step is as many batches of the loader as there are ranks. No row is left out and none counts twice: the rows of an
incomplete last step are spread over the ranks, and a rank for which none is left gets a stand-in that counts nothing.
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

from fullshard import runtime


@dataclass(frozen=True)
class Dealt:
    """What one rank gets of a step."""

    batch: Any
    rows: int
    """How many rows of the step these are; 0 for a stand-in."""
    total: int
    """How many rows the step has on all ranks."""


def deal(batches: Any, rank: int, world_size: int, size: int | None, drop: bool) -> Iterator[Dealt]:
    """Every `world_size`-th batch from `rank` on, and this rank's part of the last step if that is incomplete.

    Batches of a known size may be cut anew to spread the last rows evenly; others stay as they are. With `drop` an
    incomplete step is left out.
    """
    steps = parts(batches, world_size)
    for step in steps:
        complete = len(step) == world_size and (size is None or len(step[-1]) == size)
        if drop and not complete:
            return
        if not complete and size is not None:
            step = spread([row for batch in step for row in batch], world_size)
        counts = [row_count(batch) for batch in step]
        if len(set(counts)) > 1 and complete:
            runtime.warn_once(
                "prepare: batches of different sizes",
                "prepare: the batches of a step have different numbers of rows, and each rank's gradients count by its "
                "rows; if the loss is a mean over something else, such as tokens, run the forward inside "
                "fullshard.weighted(number of tokens)",
            )
        if rank < len(step) and counts[rank]:
            yield Dealt(step[rank], counts[rank], sum(counts))
        else:
            yield Dealt(step[0][:1] if isinstance(step[0], list | tuple) else step[0], 0, sum(counts))


def parts(items: Any, n: int) -> Iterator[list[Any]]:
    """The items in lists of n, the last one shorter."""
    left = iter(items)
    while part := list(itertools.islice(left, n)):
        yield part


def spread(rows: list[Any], n: int) -> list[list[Any]]:
    """The rows in n lists, in order, whose lengths differ by at most one."""
    each, more = divmod(len(rows), n)
    ends = [i * each + min(i, more) for i in range(n + 1)]
    return [rows[start:end] for start, end in itertools.pairwise(ends)]


def row_count(batch: Any) -> int:
    """The rows of a batch of indices; a single index counts as one."""
    return len(batch) if isinstance(batch, list | tuple) else 1


class RankBatches(Sampler[Any]):
    """This rank's batches of an order that is the same on every rank. Otherwise like the sampler it stands for."""

    def __init__(self, batches: Any, rank: int, world_size: int, order: Order):
        self.batches, self.rank, self.world_size, self.order = batches, rank, world_size, order
        own = isinstance(batches, BatchSampler) and type(batches).__iter__ is BatchSampler.__iter__
        self.size: int | None = batches.batch_size if own else None
        """Rows of every batch but the last; None if batches are the user's own and must stay as they are."""
        self.drop = bool(getattr(batches, "drop_last", False))
        self.dealt: deque[Dealt] = deque()
        """What was dealt and not handed out yet. Worker processes fetch ahead."""
        self.skip = 0
        """Steps to pass over at the beginning of the next epoch."""

    def __iter__(self) -> Iterator[Any]:
        dealt, skip = self.dealt, self.skip
        drawn = self.order.draws(self.batches)
        for one in itertools.islice(deal(drawn, self.rank, self.world_size, self.size, self.drop), skip, None):
            dealt.append(one)
            yield one.batch

    def __len__(self) -> int:
        whole, rest = divmod(len(self.batches), self.world_size)
        if self.drop or not rest:
            return whole
        return whole + 1

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "batches" not in vars(self):
            raise AttributeError(name)
        return getattr(self.batches, name)


class RankItems(IterableDataset):
    """This rank's samples of a stream: of each `world_size × batch` samples, its own `batch`."""

    def __init__(self, dataset: Any, rank: int, world_size: int, batch_size: int | None, drop: bool, order: Order):
        self.dataset, self.rank, self.world_size, self.order = dataset, rank, world_size, order
        self.size, self.drop = batch_size or 1, drop
        self.dealt: deque[Dealt] = deque()

    def __iter__(self) -> Iterator[Any]:
        dealt = self.dealt
        batches = parts(self.order.draws(self.dataset), self.size)
        for one in deal(batches, self.rank, self.world_size, self.size, self.drop):
            dealt.append(one)
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


class Order:
    """The random numbers that samplers and streams draw.

    Several ranks draw them from one sequence that begins with the state of rank 0 when the loader is prepared, beside
    the generators that the rest of the program uses: torch's, Python's and numpy's, and those that the sampler holds.
    One process draws them as it would without us, until an epoch is asked for by number.
    """

    def __init__(self, generators: list[torch.Generator], world_size: int, seeds_workers: bool):
        self.generators = list({id(g): g for g in generators}.values())
        self.seeds_workers = seeds_workers
        """Whether torch's loader draws a seed for its workers from the global generator as each epoch begins."""
        self.apart = world_size > 1
        """Whether the sequence is ours; else it is that of the process."""
        start = [(_global_state(), [g.get_state() for g in self.generators])]
        if world_size > 1:
            dist.broadcast_object_list(start, src=0)
        self.state: Any = None
        self._restore(start[0])
        self.epoch = 0
        self._begun = {0: start[0]}

    def begin(self) -> None:
        """An epoch begins."""
        if self.apart:
            self._begun[self.epoch] = (self.state, [g.get_state() for g in self.generators])
        self.epoch += 1

    def go_to(self, epoch: int, pass_through: Callable[[], Any]) -> None:
        """Return to the beginning of an epoch; one never reached is reached by drawing all orders before it."""
        self.apart = True
        known = max(e for e in self._begun if e <= epoch)
        self._restore(self._begun[known])
        for e in range(known, epoch):
            for generator in self.generators[:1] if not self.seeds_workers else ():
                torch.empty((), dtype=torch.int64).random_(generator=generator)
            pass_through()
            self._begun[e + 1] = (self.state, [g.get_state() for g in self.generators])
        self.epoch = epoch

    def draws(self, source: Any) -> Iterator[Any]:
        """What the source gives, with its random numbers taken from our sequence."""
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
