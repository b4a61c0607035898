"""Communication between ranks along a mesh axis: all-gather, reduce-scatter, all-reduce, all-to-all.

A `Link` is this rank's connection to the others along one axis, for one purpose. `build.py` makes links;
`unit.py` and `reduction.py` decide which tensors are sent. The links here use collectives (NCCL, and every backend but
Gloo); those for Gloo are in `point_to_point.py`.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fullshard.device.streams import AsyncWork
from fullshard.device.torch_private import coalescing_manager
from fullshard.distributed import groups
from fullshard.distributed.watchdog import watch as watching
from fullshard.distributed.watchdog.watch import OperationLog
from fullshard.fsdp.counters import Meter

# torch 2.13 renamed these: there the old names warn, and 2.11 has only the old ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Pending(AsyncWork):
    """Communication in progress. `wait()` returns when its results may be used."""

    def __init__(
        self, works: Sequence[Any], link: Link, finish: Callable[[], list[torch.Tensor]] | None = None, keep: Any = None
    ):
        super().__init__(keep)
        self._works, self._finish = list(works), finish
        self.label = link.watch.issue()
        if not link.holds_host:  # no host wait will show it to the watchdog
            link.watch.follow(self.label, self._works)

    def _wait(self) -> None:
        watching.raise_failure()
        if self._works:
            with watching.waiting(self.label):
                for work in self._works:
                    work.wait()
            watching.raise_failure()
        self._works = []

    def wait(self) -> list[torch.Tensor]:
        """The results of a reduction; an empty list for a gather, whose outputs were given when it was issued."""
        self.join()
        finish, self._finish = self._finish, None
        return finish() if finish is not None else []


class Link(ABC):
    """The ranks along one axis. With `size` 1 there are no others, and no method is ever called.

    Operations take the index of their unit in the model's plan. `model` numbers the models that share a communicator.
    """

    from_host = False
    """Whether pieces may be in host memory although the device is an accelerator."""
    holds_host = False
    """Whether waiting blocks the host, not only the current stream."""

    def __init__(
        self, group: dist.ProcessGroup | None, watch: OperationLog, device: torch.device, meter: Meter, model: int = 0
    ):
        self.group, self.watch, self.device, self.meter, self.model = group, watch, device, meter, model
        self.size = group.size() if group is not None else 1
        self.index = group.rank() if group is not None else 0

    @abstractmethod
    def gather(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], unit: int) -> Pending:
        """All-gather: fill each `whole` (contiguous, `size` equal pieces along dim 0) from every rank's `piece`."""

    @abstractmethod
    def scatter_sum(self, wholes: Sequence[torch.Tensor], average: bool, unit: int) -> Pending:
        """Reduce-scatter each contiguous `whole`; the results are this rank's pieces (1/size of the elements)."""

    @abstractmethod
    def sum(self, values: Sequence[torch.Tensor], average: bool, unit: int) -> Pending:
        """All-reduce each contiguous value; the results are whole."""

    @abstractmethod
    def exchange(
        self, tensors: Sequence[torch.Tensor], sent: Sequence[int], received: Sequence[int], unit: int
    ) -> Pending:
        """All-to-all: of each contiguous tensor send the next `sent[r]` rows to rank r; of each result `received[r]`
        rows came from rank r, in rank order."""


class Collectives(Link):
    """Every backend but Gloo: the collectives of a unit in one launch if the backend can, on the communicator's own
    stream.

    The order in which they are issued is what matches them, so they need no tags.
    """

    def gather(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], unit: int) -> Pending:
        """All-gather, a collective per pair."""
        with self._coalesced() as issued:
            for whole, piece in pairs:
                issued.append(_all_gather(whole.view(-1), piece.view(-1), group=self.group, async_op=True))
                self.meter.bytes_sent += (self.size - 1) * piece.numel() * piece.element_size()
        return Pending(issued, self, keep=pairs)

    def scatter_sum(self, wholes: Sequence[torch.Tensor], average: bool, unit: int) -> Pending:
        """Reduce-scatter, a collective per tensor."""
        pieces = [w.new_empty(w.numel() // self.size) for w in wholes]
        works: list[Any] = []
        for pairs in _by_dtype(list(zip(pieces, wholes, strict=True))):
            with self._coalesced() as issued:
                for piece, whole in pairs:
                    options = {"op": _sum(average), "group": self.group, "async_op": True}
                    issued.append(_reduce_scatter(piece, whole.view(-1), **options))
                    self.meter.bytes_sent += (self.size - 1) * piece.numel() * piece.element_size()
            works += issued
        return Pending(works, self, lambda: pieces, keep=wholes)

    def sum(self, values: Sequence[torch.Tensor], average: bool, unit: int) -> Pending:
        """All-reduce, a collective per tensor."""
        works: list[Any] = []
        for those in _by_dtype([(value,) for value in values]):
            with self._coalesced() as issued:
                for (value,) in those:
                    issued.append(dist.all_reduce(value, op=_sum(average), group=self.group, async_op=True))
                    self.meter.bytes_sent += 2 * (self.size - 1) * value.numel() * value.element_size() // self.size
            works += issued
        return Pending(works, self, lambda: list(values), keep=values)

    def exchange(
        self, tensors: Sequence[torch.Tensor], sent: Sequence[int], received: Sequence[int], unit: int
    ) -> Pending:
        """All-to-all, a collective per tensor."""
        results = [t.new_empty(sum(received), *t.shape[1:]) for t in tensors]
        works: list[Any] = []
        with self._errors_named():
            for result, t in zip(results, tensors, strict=True):
                options = {"group": self.group, "async_op": True}
                works.append(dist.all_to_all_single(result, t, list(received), list(sent), **options))
                self.meter.bytes_sent += bytes_to_others(t, sent, self.index)
        return Pending(works, self, lambda: results, keep=tensors)

    @contextlib.contextmanager
    def _errors_named(self) -> Iterator[None]:
        """Issue collectives inside. A communicator that lost a rank may refuse them."""
        with watching.issuing():
            try:
                yield
                return
            except dist.DistError as error:
                broken = error
        raise watching.failed(watching.position(), self.watch.ranks, broken) from broken

    @contextlib.contextmanager
    def _coalesced(self) -> Iterator[list[Any]]:
        """Issue the collectives inside, as one launch if the backend can. At the end the list, to which each is added,
        holds the works to wait for.

        torch's manager gets no device: with one, it issues two works and returns the second. Nobody waits for the
        first, so it holds its tensors until a thread of torch finds it done and the next collective is issued.
        """
        issued: list[Any] = []
        with self._errors_named():
            if not groups.coalesces(self.group, self.device):
                yield issued
                return
            with coalescing_manager(group=self.group, async_ops=True) as launch:
                yield issued
            issued[:] = launch.works


def bytes_to_others(t: torch.Tensor, sent: Sequence[int], index: int) -> int:
    """The bytes of an exchange that leave this rank, the one at `index`."""
    return (sum(sent) - sent[index]) * t[:1].numel() * t.element_size()


Tensors = TypeVar("Tensors", bound=tuple[torch.Tensor, ...])


def _by_dtype(items: list[Tensors]) -> list[list[Tensors]]:
    """Groups that can be summed in one launch: torch, unlike NCCL, does not accept several dtypes in one."""
    by_dtype: dict[torch.dtype, list[Tensors]] = {}
    for item in items:
        by_dtype.setdefault(item[0].dtype, []).append(item)
    return list(by_dtype.values())


def _sum(average: bool) -> Any:
    return dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
