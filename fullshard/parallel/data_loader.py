"""A torch `DataLoader` split over the ranks: every rank draws the same order and keeps the batches of its rows.

`sampler.py` selects the rows; `fsdp/uneven_batches.py` weights the gradients of ranks with different row counts.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from fullshard.config.errors import ConfigError
from fullshard.device.torch_private import forget_iterator, tree_map
from fullshard.distributed import data_ranks, runtime
from fullshard.fsdp import uneven_batches
from fullshard.parallel.sampler import RankBatch, RankBatches, RankItems, SharedRandomOrder

REDUCTIONS = ("mean", "sum")


class RankLoader(DataLoader):
    """A `DataLoader` that yields this rank's batches on this rank's device."""

    order: SharedRandomOrder
    share: uneven_batches.Share | None
    """This rank's share of the step whose batch was yielded last; None before the first and after the last."""
    loss_reduction: str
    _next: tuple[int, int] | None
    """Epoch and step at which the next iteration starts."""
    _sampled: RankBatches | RankItems | None
    """Selects this rank's rows; None if a single process reads a stream."""

    @classmethod
    def of(cls, loader: DataLoader, loss_reduction: str = "mean") -> RankLoader:
        """A copy of `loader` that yields this rank's batches. Attributes and methods of subclasses are kept."""
        rank, world, joins = data_ranks.data_rank(), data_ranks.data_size(), runtime.addressable_device_count()
        _check(loader, world, loss_reduction)
        new: Any = copy.copy(loader)
        forget_iterator(new)
        new.__class__ = _extended(type(loader))
        streams = isinstance(loader.dataset, IterableDataset)
        holders = (loader, *_samplers(loader))
        generators = [g for one in holders if isinstance(g := getattr(one, "generator", None), torch.Generator)]
        order = SharedRandomOrder(generators, runtime.world_size(), loader.generator is None)
        sampled: RankBatches | RankItems | None = None
        # DataLoader.__setattr__ refuses to change these after construction, so they are set in __dict__.
        changed: dict[str, Any] = {"in_order": True if runtime.world_size() > 1 else loader.in_order}
        if streams and world * joins > 1:
            sampled = RankItems(loader.dataset, rank, world, loader.batch_size, loader.drop_last, order, joins)
            changed |= {"dataset": sampled, "drop_last": False}
        elif not streams and loader.batch_sampler is not None:
            changed["batch_sampler"] = sampled = RankBatches(loader.batch_sampler, rank, world, order, joins)
        elif not streams:
            changed["sampler"] = sampled = RankBatches(loader.sampler, rank, world, order)
        changed |= {"order": order, "share": None, "loss_reduction": loss_reduction}
        vars(new).update(changed, _next=None, _sampled=sampled)
        return new

    @property
    def is_stand_in(self) -> bool:
        """Whether the last batch is a placeholder with weight zero, because no row was left for this rank."""
        return self.share is not None and self.share.rows == 0

    def set_epoch(self, epoch: int, step: int = 0) -> None:
        """Start the next iteration with the order of this epoch, at this step. Otherwise epochs count up from 0.

        If the sampler or dataset has a `set_epoch`, it is called, and the sampler decides the order.
        """
        self._next = (epoch, step)
        for one in (*_samplers(self), self.dataset):
            inner = one.batches if isinstance(one, RankBatches) else one.dataset if isinstance(one, RankItems) else one
            if hasattr(inner, "set_epoch"):
                inner.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        skip = self._begin()
        pending: deque[RankBatch] = deque()
        if self._sampled is not None:
            self._sampled.pending = pending
        share = uneven_batches.Share()
        with uneven_batches.activate(share):
            try:
                for number, batch in enumerate(super().__iter__()):
                    if pending:
                        self._set_weight(share, pending.popleft())
                    if number >= skip:
                        uneven_batches.to_front(share)
                        self.share = share
                        yield tree_map(_placed, batch)
            finally:
                if self.share is share:
                    self.share = None

    def _begin(self) -> int:
        """Start an epoch; returns how many of its batches the caller must skip."""
        position, self._next = self._next, None
        epoch, step = position or (self.order.epoch, 0)
        source = self._sampled
        if isinstance(source, RankBatches):
            samplers = (source.batches, getattr(source.batches, "sampler", None))
            if position and not any(hasattr(one, "set_epoch") for one in samplers):
                self.order.go_to(epoch, lambda: deque(self.order.draws(source.batches), maxlen=0))
            source.skip, step = step, 0
        self.order.begin()
        return step

    def _set_weight(self, share: uneven_batches.Share, batch: RankBatch) -> None:
        ranks = data_ranks.data_size()
        share.rows, share.total = batch.rows, batch.total
        if self.loss_reduction == "sum":
            share.weight = float(ranks) if batch.rows else 0.0
        else:
            share.weight = batch.rows * ranks / batch.total


def _check(loader: DataLoader, world: int, loss_reduction: str) -> None:
    if loss_reduction not in REDUCTIONS:
        raise ConfigError(f"prepare: loss_reduction is {loss_reduction!r}; expected mean or sum")
    if isinstance(loader.dataset, IterableDataset) and loader.num_workers > 0 and world > 1:
        raise ConfigError(
            "prepare: each worker process of an IterableDataset would read the whole stream; set num_workers=0, or "
            "split the stream yourself and do not pass this loader to prepare"
        )
    if any(isinstance(one, DistributedSampler) and one.num_replicas > 1 for one in _samplers(loader)):
        raise ConfigError(
            "prepare: the loader has a DistributedSampler, which already splits the rows over the ranks; use "
            "shuffle=True or another sampler instead, or do not pass this loader to prepare"
        )


def _samplers(loader: DataLoader) -> list[Any]:
    """The samplers of a loader, outermost first."""
    samplers = [loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None), loader.sampler]
    return [
        one for i, one in enumerate(samplers) if one is not None and not any(one is other for other in samplers[:i])
    ]


_classes: dict[type, type] = {}


def _extended(plain: type) -> type:
    """A subclass of the loader's class and of `RankLoader`."""
    if plain is DataLoader:
        return RankLoader
    if plain not in _classes:
        _classes[plain] = type(plain.__name__, (RankLoader, plain), {"__module__": plain.__module__})
    return _classes[plain]


def _placed(leaf: Any) -> Any:
    """A tensor of a batch, or another object that has `to`, on this rank's device."""
    if isinstance(leaf, torch.Tensor):
        return runtime.place(leaf)
    return leaf.to(runtime.device()) if hasattr(leaf, "to") else leaf
