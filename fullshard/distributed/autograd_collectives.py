"""Collectives inside a forward pass, with gradients: what a layer needs whose parameters are split over ranks.

All ranks of the group compute with the same rows. Between these operators each has either the same whole value, a term
of a sum, or a slice:

| operator | forward | backward |
|---|---|---|
| `sum_gradients` | the value | the sum of the ranks' gradients |
| `sum_terms` | the sum of the ranks' terms | the gradient |
| `gather_slices` | the ranks' slices, side by side | this rank's slice |
| `own_slice` | this rank's slice | the ranks' slices, side by side |

The collectives are custom operators, so that `torch.compile`, recomputation and tracing on the meta device see them.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fullshard.device.torch_private import group_named
from fullshard.distributed.watchdog import collectives

sent: Counter[str] = Counter()
"""The `bytes` that this rank has sent here, by what rings of ranks send."""


class RankGroup(NamedTuple):
    """The ranks along an axis of a mesh. Plain values: an operator takes them, also where the ranks do not exist."""

    name: str
    """Of the process group; empty in a plan."""
    size: int
    place: int
    """This rank's number among them."""


def group_of(group: dist.ProcessGroup) -> RankGroup:
    """A process group as operators take it."""
    return RankGroup(group.group_name, group.size(), group.rank())


def sum_gradients(x: torch.Tensor, group: RankGroup) -> torch.Tensor:
    """The value itself, for computations of which each rank does a part: its gradient is summed over the ranks."""
    out: torch.Tensor = _SumGradients.apply(x, group.name) if group.size > 1 else x
    return out


def sum_terms(x: torch.Tensor, group: RankGroup) -> torch.Tensor:
    """The sum of the ranks' terms, on every rank."""
    out: torch.Tensor = _SumTerms.apply(x, group.name) if group.size > 1 else x
    return out


def gather_slices(x: torch.Tensor, dim: int, group: RankGroup) -> torch.Tensor:
    """The ranks' slices side by side along a dim, on every rank, for computations that all ranks do alike."""
    out: torch.Tensor = _GatherSlices.apply(x, dim % x.ndim, group) if group.size > 1 else x
    return out


def own_slice(x: torch.Tensor, dim: int, group: RankGroup) -> torch.Tensor:
    """This rank's slice along a dim of a value that all ranks have."""
    out: torch.Tensor = _OwnSlice.apply(x, dim % x.ndim, group) if group.size > 1 else x
    return out


def max_over_ranks(x: torch.Tensor, group: RankGroup) -> torch.Tensor:
    """The largest of the ranks' values, without a gradient."""
    return _reduced(x.detach(), group.name, True) if group.size > 1 else x.detach()


def total_over_ranks(x: torch.Tensor, group: RankGroup) -> torch.Tensor:
    """The sum of the ranks' values, without a gradient."""
    return _reduced(x.detach(), group.name, False) if group.size > 1 else x.detach()


# --- autograd ---------------------------------------------------------------------------------------------------------


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: str) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return _reduced(grad, ctx.group, False), None


class _SumTerms(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: str) -> torch.Tensor:
        return _reduced(x, group, False)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return grad, None


class _GatherSlices(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, group: RankGroup) -> torch.Tensor:
        ctx.dim, ctx.group = dim, group
        return _gathered(x, dim, group.name, group.size)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return _cut(grad, ctx.dim, ctx.group), None, None


class _OwnSlice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, group: RankGroup) -> torch.Tensor:
        ctx.dim, ctx.group = dim, group
        return _cut(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return _gathered(grad, ctx.dim, ctx.group.name, ctx.group.size), None, None


def _cut(x: torch.Tensor, dim: int, group: RankGroup) -> torch.Tensor:
    size = x.shape[dim] // group.size
    return x.narrow(dim, group.place * size, size).contiguous()


class ThreadGroup:
    """Ranks that are threads of this process, for trials. `ranks` are their `RankGroup`s."""

    def __init__(self, size: int, patience: float) -> None:
        self.barrier = threading.Barrier(size, timeout=patience)
        self.values: list[Any] = [None] * size
        self.ranks = [RankGroup(f"threads/{id(self)}/{place}", size, place) for place in range(size)]
        _threads.update({one.name: (self, one.place) for one in self.ranks})

    def exchange(self, place: int, value: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's value."""
        self.values[place] = value
        self.barrier.wait()
        values = list(self.values)
        self.barrier.wait()
        return values

    def close(self) -> None:
        """Forget the ranks; a rank that still waits gets an error."""
        self.barrier.abort()
        for one in self.ranks:
            _threads.pop(one.name, None)


_threads: dict[str, tuple[ThreadGroup, int]] = {}


# --- operators --------------------------------------------------------------------------------------------------------


@torch.library.custom_op("fullshard::reduced_over_ranks", mutates_args=())
def _reduced(x: torch.Tensor, group: str, largest: bool) -> torch.Tensor:
    """The sum, or the largest, of the ranks' values."""
    if x.is_meta:
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    if group in _threads:
        threads, place = _threads[group]
        stacked = torch.stack(threads.exchange(place, x.detach()))
        return stacked.amax(0) if largest else stacked.sum(0)
    out, ranks = x.clone(memory_format=torch.contiguous_format), group_named(group)
    op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
    sent["bytes"] += 2 * (ranks.size() - 1) * out.nbytes // ranks.size()
    collectives.finish("sum between layers", lambda: dist.all_reduce(out, op, ranks, async_op=True), ranks)
    return out


@_reduced.register_fake
def _(x: torch.Tensor, group: str, largest: bool) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("fullshard::gathered_over_ranks", mutates_args=())
def _gathered(x: torch.Tensor, dim: int, group: str, size: int) -> torch.Tensor:
    """The ranks' values side by side along a dim."""
    if x.is_meta:
        return x.new_empty([n * size if d == dim else n for d, n in enumerate(x.shape)])
    if group in _threads:
        threads, place = _threads[group]
        return torch.cat(threads.exchange(place, x.detach()), dim)
    x, ranks = x.contiguous(), group_named(group)
    sent["bytes"] += (size - 1) * x.nbytes
    rows = [torch.empty_like(x) for _ in range(size)]
    collectives.finish("gather between layers", lambda: dist.all_gather(rows, x, ranks, async_op=True), ranks)
    return torch.cat(rows, dim)


@_gathered.register_fake
def _(x: torch.Tensor, dim: int, group: str, size: int) -> torch.Tensor:
    return x.new_empty([n * size if d == dim else n for d, n in enumerate(x.shape)])
