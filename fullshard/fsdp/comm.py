"""Communication between ranks along a mesh axis: all-gather, reduce-scatter, all-reduce.

A `Link` is this rank's connection to the others along one axis, for one purpose: gathers and reductions have a
communicator each, so that neither waits for the other. `unit.py` and `reduction.py` decide which tensors are sent.

On Gloo the pieces are sent point to point, directly from and into their final memory: Gloo's own all-gather copies
through a flat buffer, and its reduce-scatter is an all-reduce internally. The sums are then computed here: in rank
order, so that they repeat bit for bit, and in fp32 for narrower gradients. On every other backend (NCCL) the
collectives of a unit are one launch.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fullshard import accelerator, groups, runtime
from fullshard.errors import MeshError
from fullshard.fsdp.counters import Meter
from fullshard.fsdp.streams import AsyncWork
from fullshard.spmd.mesh import Mesh
from fullshard.torch_private import coalescing_manager
from fullshard.watchdog import watch as watching
from fullshard.watchdog.watch import OperationLog, watch_for

# torch 2.13 renamed these: there the old names warn, and 2.11 has only the old ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


SMALL_SUM = 8192
"""Elements up to which an all-reduce takes one exchange; at least as many as there can be ranks."""


class Exchange(enum.IntEnum):
    """The kinds of messages between ranks."""

    GATHER = 0
    SCATTER_SUM = 1
    SUM = 2
    SUMMED_SLICES = 3
    """The second half of a large sum."""


def message_tag(model: int, unit: int, kind: Exchange, call: int) -> int:
    """The tag of an operation's messages on a communicator, in the 31 bits that Gloo has for it.

    Ranks that run different operations (units, models) never accept each other's messages. Operations that share a tag
    because a number wrapped around are matched in the order in which they were issued.
    """
    return (model % 2**6) << 25 | (unit % 2**11) << 14 | kind << 12 | call % 2**12


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
        watching.check()
        if self._works:
            with watching.waiting(self.label):
                for work in self._works:
                    work.wait()
            watching.check()
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


class PointToPoint(Link):
    """Gloo: tensors in host memory; those of an accelerator are copied through page-locked host memory."""

    from_host = holds_host = True

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._calls = itertools.count()

    def _send(self, t: torch.Tensor, to: int, tag: int) -> Any:
        assert self.group is not None
        self.meter.bytes_sent += t.numel() * t.element_size()
        try:
            return self.group.send([t], to, tag)
        except RuntimeError as error:
            raise watching.failed(watching.position(), self.watch.ranks, error) from error

    def _receive(self, t: torch.Tensor, source: int, tag: int) -> Any:
        assert self.group is not None
        try:
            return self.group.recv([t], source, tag)
        except RuntimeError as error:
            raise watching.failed(watching.position(), self.watch.ranks, error) from error

    def _others(self) -> list[int]:
        # Each rank begins with its neighbor, so that not all of them send to rank 0 first.
        return [(self.index + step) % self.size for step in range(1, self.size)]

    def gather(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], unit: int) -> Pending:
        targets = [whole for whole, _ in pairs]
        if self._through_host:
            pairs = [(accelerator.pinned(whole.shape, whole.dtype), _to_host(piece)) for whole, piece in pairs]
            accelerator.current_stream(self.device).synchronize()
        works: list[Any] = []
        tag = message_tag(self.model, unit, Exchange.GATHER, next(self._calls))
        views = [whole.view(-1).view(self.size, -1) for whole, _ in pairs]
        for rows in views:
            works += [self._receive(rows[other], other, tag) for other in reversed(self._others())]
        for _, piece in pairs:
            works += [self._send(piece, other, tag) for other in self._others()]
        for rows, (_, piece) in zip(views, pairs, strict=True):
            rows[self.index].copy_(piece.view(-1))

        def to_device() -> list[torch.Tensor]:
            for target, (whole, _) in zip(targets, pairs, strict=True):
                target.copy_(whole, non_blocking=True)
            return []

        return Pending(works, self, to_device if self._through_host else None, keep=(pairs, targets))

    def scatter_sum(self, wholes: Sequence[torch.Tensor], average: bool, unit: int) -> Pending:
        tag = message_tag(self.model, unit, Exchange.SCATTER_SUM, next(self._calls))
        return self._exchange([self._equal_rows(self._host(w)) for w in wholes], average, tag)

    def sum(self, values: Sequence[torch.Tensor], average: bool, unit: int) -> Pending:
        call = next(self._calls)
        hosted = [self._host(v) for v in values]
        # Small values are sent whole to every rank and summed everywhere in the same order, so with the same bits.
        # Of large ones each rank sums one slice, and the slices are gathered again.
        whole = [v.numel() <= SMALL_SUM for v in hosted]
        rows = [
            [v.view(-1)] * self.size if w else list(torch.tensor_split(v.view(-1), self.size))
            for v, w in zip(hosted, whole, strict=True)
        ]
        first, second = (message_tag(self.model, unit, k, call) for k in (Exchange.SUM, Exchange.SUMMED_SLICES))
        exchange = self._exchange(rows, average, first, to_device=False)
        pending = Pending([], self, lambda: self._complete(exchange, hosted, rows, whole, pending, second))
        return pending

    def _complete(
        self,
        exchange: Pending,
        hosted: Any,
        rows: list[list[torch.Tensor]],
        whole: list[bool],
        pending: Pending,
        tag: int,
    ) -> list[torch.Tensor]:
        """The second half of an all-reduce: send the slices summed here to every rank."""
        summed = [piece.to(v.dtype) for piece, v in zip(exchange.wait(), hosted, strict=True)]
        sliced = [(slices, piece) for slices, piece, w in zip(rows, summed, whole, strict=True) if not w]
        works = []
        for slices, _ in sliced:
            works += [self._receive(slices[o], o, tag) for o in reversed(self._others())]
        for slices, piece in sliced:
            works += [self._send(piece, o, tag) for o in self._others()]
            slices[self.index].copy_(piece)
        with watching.waiting(pending.label):
            for work in works:
                work.wait()
        results = [piece.view(v.shape) if w else v for piece, v, w in zip(summed, hosted, whole, strict=True)]
        return [self._back(r) for r in results]

    def _exchange(self, rows: list[list[torch.Tensor]], average: bool, tag: int, to_device: bool = True) -> Pending:
        """Send row r of each list to rank r; the results are the sums of the rows received and this rank's own."""
        works: list[Any] = []
        received: list[dict[int, torch.Tensor]] = []
        for slices in rows:
            mine = slices[self.index]
            buffers = {other: torch.empty_like(mine) for other in self._others()}
            works += [self._receive(buffers[o], o, tag) for o in reversed(self._others())]
            received.append({**buffers, self.index: mine})
        for slices in rows:
            works += [self._send(slices[o], o, tag) for o in self._others()]

        def add_up() -> list[torch.Tensor]:
            sums = []
            while received:  # release each set of terms once it is summed
                sums.append(self._in_rank_order(received.pop(0), average))
            return [self._back(s) for s in sums] if to_device else sums

        return Pending(works, self, add_up, keep=rows)

    def _in_rank_order(self, terms: dict[int, torch.Tensor], average: bool) -> torch.Tensor:
        order = sorted(terms)
        first, second = terms[order[0]], terms[order[1]]
        if first.is_floating_point() and first.element_size() < 4:
            total = first.float().add_(second)
        elif order[0] == self.index:
            # Not into this rank's own term: it is a slice of a gradient that can then be freed. a + b equals b + a bit
            # for bit.
            total = second.add_(first)
        else:
            total = first.add_(second)
        for rank in order[2:]:
            total.add_(terms[rank])
        return total.div_(self.size) if average else total

    def _equal_rows(self, whole: torch.Tensor) -> list[torch.Tensor]:
        return list(whole.view(-1).view(self.size, -1).unbind(0))

    def _host(self, t: torch.Tensor) -> torch.Tensor:
        if not self._through_host:
            return t
        hosted = _to_host(t)
        accelerator.current_stream(self.device).synchronize()
        return hosted

    def _back(self, t: torch.Tensor) -> torch.Tensor:
        return t.to(self.device, non_blocking=True) if self._through_host else t

    @property
    def _through_host(self) -> bool:
        """Whether pieces are copied through host memory."""
        return accelerator.is_accelerator(self.device)


def _to_host(t: torch.Tensor) -> torch.Tensor:
    if not accelerator.is_accelerator(t.device):
        return t
    return accelerator.pinned(t.shape, t.dtype).copy_(t, non_blocking=True)


class Collectives(Link):
    """Every other backend (NCCL): the collectives of a unit in one launch, on the communicator's own stream.

    The order in which they are issued is what matches them, so they need no tags.
    """

    def gather(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], unit: int) -> Pending:
        with self._coalesced() as issued:
            for whole, piece in pairs:
                _all_gather(whole.view(-1), piece.view(-1), group=self.group, async_op=True)
                self.meter.bytes_sent += (self.size - 1) * piece.numel() * piece.element_size()
        return Pending(issued.works, self, keep=pairs)

    def scatter_sum(self, wholes: Sequence[torch.Tensor], average: bool, unit: int) -> Pending:
        pieces = [w.new_empty(w.numel() // self.size) for w in wholes]
        works: list[Any] = []
        for pairs in _by_dtype(list(zip(pieces, wholes, strict=True))):
            with self._coalesced() as issued:
                for piece, whole in pairs:
                    _reduce_scatter(piece, whole.view(-1), op=_sum(average), group=self.group, async_op=True)
                    self.meter.bytes_sent += (self.size - 1) * piece.numel() * piece.element_size()
            works += issued.works
        return Pending(works, self, lambda: pieces, keep=wholes)

    def sum(self, values: Sequence[torch.Tensor], average: bool, unit: int) -> Pending:
        works: list[Any] = []
        for those in _by_dtype([(value,) for value in values]):
            with self._coalesced() as issued:
                for (value,) in those:
                    dist.all_reduce(value, op=_sum(average), group=self.group, async_op=True)
                    self.meter.bytes_sent += 2 * (self.size - 1) * value.numel() * value.element_size() // self.size
            works += issued.works
        return Pending(works, self, lambda: list(values), keep=values)

    @contextlib.contextmanager
    def _coalesced(self) -> Iterator[Any]:
        """Issue the collectives inside as one launch; a communicator that lost a rank may refuse them."""
        with watching.issuing():
            try:
                with coalescing_manager(group=self.group, device=self.device, async_ops=True) as issued:
                    yield issued
                return
            except dist.DistError as error:
                broken = error
        raise watching.failed(watching.position(), self.watch.ranks, broken) from broken


Tensors = TypeVar("Tensors", bound=tuple[torch.Tensor, ...])


def _by_dtype(items: list[Tensors]) -> list[list[Tensors]]:
    """Groups that can be summed in one launch: torch, unlike NCCL, does not accept several dtypes in one."""
    found: dict[torch.dtype, list[Tensors]] = {}
    for item in items:
        found.setdefault(item[0].dtype, []).append(item)
    return list(found.values())


def _sum(average: bool) -> Any:
    return dist.ReduceOp.AVG if average else dist.ReduceOp.SUM


# --- making links -----------------------------------------------------------------------------------------------------


def make_link(mesh: Mesh, axes: tuple[str, ...], purpose: str, timeout: float | None, meter: Meter) -> Link:
    """The link along one axis, or along several merged into one, for one purpose. Collective: all ranks of the mesh
    must call it."""
    ranks, device = _ranks_along(mesh, axes), runtime.device()
    communicator = _communicator(ranks, purpose, timeout)
    group, model = communicator.group, next(communicator.models)
    kind = PointToPoint if uses_point_to_point(group) else Collectives
    return kind(group, watch_for(purpose, ranks, group), device, meter, model)


def uses_point_to_point(group: dist.ProcessGroup | None) -> bool:
    """Whether tensors of this rank's device are sent point to point in a group, not in collectives."""
    return group is None or groups.backend_of(group, runtime.device()) == "gloo"


def _ranks_along(mesh: Mesh, axes: tuple[str, ...]) -> tuple[int, ...]:
    """The ranks that differ from this one only along the given axes, in mesh order."""
    indices = [mesh.get_axis_name_idx(axis) for axis in axes]
    coordinate = mesh.coordinate(runtime.rank())
    if coordinate is None:
        raise MeshError(f"rank {runtime.rank()} is not in {mesh}; wrap the module on the ranks of the mesh only")
    index = tuple(slice(None) if axis in indices else coordinate[axis] for axis in range(mesh.ndim))
    return tuple(int(rank) for rank in mesh.get_logical_mesh()[index].reshape(-1))


@dataclass
class _Communicator:
    """A process group for one purpose. Models on the same ranks share it."""

    group: dist.ProcessGroup | None
    models: Iterator[int] = field(default_factory=itertools.count)
    """Numbers its models, the same on every rank."""


def _communicator(ranks: tuple[int, ...], purpose: str, timeout: float | None) -> _Communicator:
    if len(ranks) == 1:
        return _Communicator(None)
    known = _communicators()
    key = (ranks, purpose, timeout)
    if key not in known:
        options: dict[str, Any] = {} if timeout is None else {"timeout": timedelta(seconds=timeout)}
        known[key] = _Communicator(groups.new_group(ranks, **options))
    return known[key]


_cache: tuple[Any, dict[Any, _Communicator]] = (None, {})


def _communicators() -> dict[Any, _Communicator]:
    """The communicators made so far. They become invalid with the default process group, and when one of them fails."""
    global _cache
    age = (dist.group.WORLD, watching.failures())
    if _cache[0] is None or _cache[0][0] is not age[0] or _cache[0][1] != age[1]:
        _cache = (age, {})
    return _cache[1]
