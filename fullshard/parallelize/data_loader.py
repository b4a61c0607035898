"""A torch `DataLoader` dealt out over the ranks: every rank draws the same order and keeps its own batches.

Which rows those are is in `row_assignment.py`; how a rank's rows count in the gradient is in `fsdp/uneven_batches.py`.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from fullshard import runtime
from fullshard.errors import ConfigError
from fullshard.fsdp import uneven_batches
from fullshard.parallelize.row_assignment import Dealt, Order, RankBatches, RankItems
from fullshard.torch_private import forget_iterator, tree_map

REDUCTIONS = ("mean", "sum")


class RankLoader(DataLoader):
    """A `DataLoader` whose batches are this rank's own, on this rank's device. In one process: all of them."""

    order: Order
    share: uneven_batches.Share | None
    """This rank's part of the step whose batch was handed out last; None before the first and after the last."""
    loss_reduction: str
    _next: tuple[int, int] | None
    """Epoch and step to begin the next iteration with."""
    _sampled: RankBatches | RankItems | None
    """What deals out; None where one process reads a stream."""

    @classmethod
    def of(cls, loader: DataLoader, loss_reduction: str = "mean") -> RankLoader:
        """A loader like the given one, which stays as it is; subclasses keep what they add."""
        rank, world = runtime.rank(), runtime.world_size()
        _check(loader, world, loss_reduction)
        new: Any = copy.copy(loader)
        forget_iterator(new)
        new.__class__ = _extended(type(loader))
        streams = isinstance(loader.dataset, IterableDataset)
        holders = (loader, *_samplers(loader))
        generators = [g for one in holders if isinstance(g := getattr(one, "generator", None), torch.Generator)]
        order = Order(generators, world, loader.generator is None)
        sampled: RankBatches | RankItems | None = None
        # torch's loader lets none of these be set once it is made, so that nobody changes them between two epochs.
        changed: dict[str, Any] = {"in_order": True if world > 1 else loader.in_order}
        if streams and world > 1:
            sampled = RankItems(loader.dataset, rank, world, loader.batch_size, loader.drop_last, order)
            changed |= {"dataset": sampled, "drop_last": False}
        elif not streams and loader.batch_sampler is not None:
            changed["batch_sampler"] = sampled = RankBatches(loader.batch_sampler, rank, world, order)
        elif not streams:
            changed["sampler"] = sampled = RankBatches(loader.sampler, rank, world, order)
        changed |= {"order": order, "share": None, "loss_reduction": loss_reduction}
        vars(new).update(changed, _next=None, _sampled=sampled)
        return new

    @property
    def is_stand_in(self) -> bool:
        """Whether the batch handed out last counts nothing: there was no row left for this rank in the last step."""
        return self.share is not None and self.share.rows == 0

    def set_epoch(self, epoch: int, step: int = 0) -> None:
        """Begin the next iteration with this epoch's order, at this step; epochs count up by themselves otherwise.

        Samplers and data sets that have a `set_epoch` of their own are told; what they draw is their own matter then.
        """
        self._next = (epoch, step)
        for one in (*_samplers(self), self.dataset):
            inner = one.batches if isinstance(one, RankBatches) else one.dataset if isinstance(one, RankItems) else one
            if hasattr(inner, "set_epoch"):
                inner.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        skip = self._begin()
        dealt: deque[Dealt] = deque()
        if self._sampled is not None:
            self._sampled.dealt = dealt
        share = uneven_batches.Share()
        with uneven_batches.opened(share):
            try:
                for number, batch in enumerate(super().__iter__()):
                    if dealt:
                        self._weigh(share, dealt.popleft())
                    if number >= skip:
                        uneven_batches.to_front(share)
                        self.share = share
                        yield _on_device(batch, runtime.device())
            finally:
                if self.share is share:
                    self.share = None

    def _begin(self) -> int:
        """Begin an epoch; how many of its batches are still to be passed over."""
        wanted, self._next = self._next, None
        epoch, step = wanted or (self.order.epoch, 0)
        source = self._sampled
        if isinstance(source, RankBatches):
            told = any(hasattr(one, "set_epoch") for one in (source.batches, getattr(source.batches, "sampler", None)))
            if wanted and not told:
                self.order.go_to(epoch, lambda: deque(self.order.draws(source.batches), maxlen=0))
            source.skip, step = step, 0
        self.order.begin()
        return step

    def _weigh(self, share: uneven_batches.Share, dealt: Dealt) -> None:
        ranks = runtime.world_size()
        share.rows, share.total = dealt.rows, dealt.total
        if self.loss_reduction == "sum":
            share.weight = float(ranks) if dealt.rows else 0.0
        else:
            share.weight = dealt.rows * ranks / dealt.total


def _check(loader: DataLoader, world: int, loss_reduction: str) -> None:
    if loss_reduction not in REDUCTIONS:
        raise ConfigError(f"prepare: loss_reduction is {loss_reduction!r}; expected mean or sum")
    if isinstance(loader.dataset, IterableDataset) and loader.num_workers > 0 and world > 1:
        raise ConfigError(
            "prepare: an IterableDataset with worker processes gives each of them the whole stream; set "
            "num_workers=0, or split the stream yourself and leave this loader out of prepare"
        )
    if any(isinstance(one, DistributedSampler) and one.num_replicas > 1 for one in _samplers(loader)):
        raise ConfigError(
            "prepare: the loader has a DistributedSampler, which gives each rank its own rows already; give it "
            "shuffle=True or a plain sampler instead, or leave this loader out of prepare"
        )


def _samplers(loader: DataLoader) -> list[Any]:
    """The samplers of a loader, from the outside in."""
    found = [loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None), loader.sampler]
    return [one for i, one in enumerate(found) if one is not None and not any(one is other for other in found[:i])]


_classes: dict[type, type] = {}


def _extended(plain: type) -> type:
    """The loader's class with `RankLoader` in front."""
    if plain is DataLoader:
        return RankLoader
    if plain not in _classes:
        _classes[plain] = type(plain.__name__, (RankLoader, plain), {"__module__": plain.__module__})
    return _classes[plain]


def _on_device(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors, and objects that can move themselves, on this device."""
    return tree_map(lambda leaf: leaf.to(device) if hasattr(leaf, "to") else leaf, batch)
