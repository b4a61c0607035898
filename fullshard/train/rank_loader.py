"""A torch `DataLoader` dealt out over the ranks: every rank draws the same order and keeps its own batches.

All ranks get the same number of batches: where the data does not divide, the first samples of the order fill up
(`drop_last=True` in the loader drops the rest instead).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler

from fullshard import runtime
from fullshard.errors import ConfigError


class RankBatches(Sampler[list[int]]):
    """This rank's batches of an order that is the same on every rank."""

    def __init__(self, batches: Any, rank: int, world_size: int, seed: int):
        self.batches, self.rank, self.world_size, self.seed = batches, rank, world_size, seed
        self.epoch = 0
        self.generator = _own_generator(batches)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        if self.generator is not None:
            self.generator.manual_seed(self.seed + self.epoch)
        self.epoch += 1
        yield from deal(self.batches, self.rank, self.world_size, self._size(), self._drops())

    def __len__(self) -> int:
        whole, rest = divmod(len(self.batches), self.world_size)
        return whole if self._drops() or not rest else whole + 1

    def _size(self) -> int | None:
        return getattr(self.batches, "batch_size", None)

    def _drops(self) -> bool:
        return bool(getattr(self.batches, "drop_last", False))


def deal(batches: Any, rank: int, world_size: int, size: int | None, drop: bool) -> Iterator[Any]:
    """Every `world_size`-th batch from `rank` on; the last ones are filled up from the first unless dropped.

    Batches of a known size are filled up sample by sample, others batch by batch.
    """
    first: list[Any] = []
    for step in parts(batches, world_size):
        first = first or step
        if len(step) == world_size and (size is None or len(step[-1]) == size):
            yield step[rank]
        elif drop:
            return
        elif size is None:
            yield [*step, *itertools.islice(itertools.cycle(first), world_size)][rank]
        else:
            samples = [sample for batch in step for sample in batch]
            filler = itertools.cycle([sample for batch in first for sample in batch])
            samples += itertools.islice(filler, world_size * size)
            yield samples[rank * size : (rank + 1) * size]


def parts(items: Any, n: int) -> Iterator[list[Any]]:
    """The items in lists of n, the last one shorter."""
    left = iter(items)
    while part := list(itertools.islice(left, n)):
        yield part


class RankItems(IterableDataset):
    """This rank's samples of a stream: of each `world_size × batch` samples, its own `batch`."""

    def __init__(self, dataset: Any, rank: int, world_size: int, batch_size: int | None, drop_last: bool):
        self.dataset, self.rank, self.world_size = dataset, rank, world_size
        self.size, self.drop_last = batch_size or 1, drop_last

    def __iter__(self) -> Iterator[Any]:
        for batch in deal(parts(self.dataset, self.size), self.rank, self.world_size, self.size, self.drop_last):
            yield from batch

    def __len__(self) -> int:
        whole, rest = divmod(len(self.dataset), self.world_size * self.size)
        return (whole if self.drop_last or not rest else whole + 1) * self.size


class RankLoader(DataLoader):
    """A `DataLoader` whose batches are this rank's own, on this rank's device."""

    @classmethod
    def of(cls, loader: DataLoader) -> RankLoader:
        rank, world = runtime.rank(), runtime.world_size()
        same = {
            name: getattr(loader, name)
            for name in ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "prefetch_factor",
                         "persistent_workers", "multiprocessing_context")
        }  # fmt: skip
        if isinstance(loader.dataset, IterableDataset):
            if loader.num_workers > 0 and world > 1:
                raise ConfigError(
                    "prepare: an IterableDataset with worker processes gives each of them the whole stream; set "
                    "num_workers=0, or split the stream yourself and leave this loader out of prepare"
                )
            items = RankItems(loader.dataset, rank, world, loader.batch_size, loader.drop_last)
            return cls(items, batch_size=loader.batch_size, drop_last=loader.drop_last, **same)
        seed = [int(torch.randint(2**31, ()).item())]
        if world > 1:
            dist.broadcast_object_list(seed, src=0)
        if loader.batch_sampler is None:
            return cls(
                loader.dataset, batch_size=None, sampler=RankBatches(loader.sampler, rank, world, seed[0]), **same
            )
        return cls(loader.dataset, batch_sampler=RankBatches(loader.batch_sampler, rank, world, seed[0]), **same)

    def set_epoch(self, epoch: int) -> None:
        """Take the order of this epoch next; epochs count up by themselves otherwise."""
        for sampler in (self.batch_sampler, self.sampler):
            if isinstance(sampler, RankBatches):
                sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        device = runtime.device()
        for batch in super().__iter__():
            yield tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, batch)


def _own_generator(batches: Any) -> torch.Generator | None:
    """Give the random sampler inside a generator of ours, which every rank seeds alike at each epoch."""
    sampler = batches.sampler if isinstance(batches, BatchSampler) else batches
    if not isinstance(sampler, RandomSampler):
        return None
    sampler.generator = torch.Generator()
    return sampler.generator
