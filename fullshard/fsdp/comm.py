"""Moving pieces between ranks: gather, sum-and-scatter, sum, along one mesh axis.

A `Link` is this rank's connection to the others along one axis for one purpose (gathers and reductions have a
communicator each, so that neither waits for the other). Which tensors travel, and when, is decided by `unit.py`.

On Gloo pieces go point to point, straight from and into their final memory: Gloo's own gather copies through a flat
buffer, and its reduce-scatter is an all-reduce inside. Sums are then ours: in rank order, so they repeat bit for bit,
and in fp32 for narrower gradients. On every other backend (NCCL) the collectives of a unit are one
launch.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fullshard import accelerator, groups, runtime
from fullshard.errors import MeshError
from fullshard.fsdp.counters import Meter
from fullshard.fsdp.streams import Beside
from fullshard.spmd.mesh import Mesh
from fullshard.torch_private import coalescing_manager
from fullshard.watchdog import watch as watching
from fullshard.watchdog.watch import OperationLog, watch_for

# torch 2.13 renamed these; the old names warn there, and 2.11 has no others.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


SMALL_SUM = 8192
"""Elements up to which a sum is made in one exchange; at least as many as there can be ranks."""


class Pending(Beside):
    """Communication under way. `wait()` returns when its results may be used."""

    def __init__(
        self, works: Sequence[Any], link: Link, finish: Callable[[], list[torch.Tensor]] | None = None, keep: Any = None
    ):
        super().__init__(keep)
        self._works, self._finish = list(works), finish
        self.label = link.watch.issue()
        if not link.holds_host:  # nobody will be seen to wait for it
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
        """The results, for reductions; an empty list for gathers, whose results were named when they were issued."""
        self.join()
        finish, self._finish = self._finish, None
        return finish() if finish is not None else []


class Link(ABC):
    """The ranks along one axis. `size` 1 means there is nobody else, and no method is ever called."""

    from_host = False
    """Whether pieces may lie on the host although the device is an accelerator."""
    holds_host = False
    """Whether waiting holds up the host, not only the stream that waits."""

    def __init__(self, group: dist.ProcessGroup | None, watch: OperationLog, device: torch.device, meter: Meter):
        self.group, self.watch, self.device, self.meter = group, watch, device, meter
        self.size = group.size() if group is not None else 1
        self.index = group.rank() if group is not None else 0

    @abstractmethod
    def gather(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Pending:
        """Fill each `whole` (contiguous, `size` equal pieces along dim 0) from every rank's `piece`."""

    @abstractmethod
    def scatter_sum(self, wholes: Sequence[torch.Tensor], average: bool) -> Pending:
        """Sum each contiguous `whole` over the ranks; the results are this rank's pieces (1/size of the elements)."""

    @abstractmethod
    def sum(self, values: Sequence[torch.Tensor], average: bool) -> Pending:
        """Sum each contiguous value over the ranks; the results are whole."""


class PointToPoint(Link):
    """Gloo: tensors in host memory; those of an accelerator pass through it, page-locked."""

    from_host = holds_host = True

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
        # Each rank begins with its neighbour, so that not all of them send to rank 0 first.
        return [(self.index + step) % self.size for step in range(1, self.size)]

    def gather(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Pending:
        targets = [whole for whole, _ in pairs]
        if self._hosts:
            pairs = [(accelerator.pinned(whole.shape, whole.dtype), _to_host(piece)) for whole, piece in pairs]
            accelerator.current_stream(self.device).synchronize()
        works, tag = [], self.watch.next_tag()
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

        return Pending(works, self, to_device if self._hosts else None, keep=(pairs, targets))

    def scatter_sum(self, wholes: Sequence[torch.Tensor], average: bool) -> Pending:
        return self._exchange([self._equal_rows(self._host(w)) for w in wholes], average, self.watch.next_tag())

    def sum(self, values: Sequence[torch.Tensor], average: bool) -> Pending:
        tag = self.watch.next_tag()
        hosted = [self._host(v) for v in values]
        # Small values go to everyone whole and are summed everywhere, in the same order and so to the same bits.
        # Large ones are summed slice by slice, each rank its own, and gathered again.
        whole = [v.numel() <= SMALL_SUM for v in hosted]
        rows = [
            [v.view(-1)] * self.size if w else list(torch.tensor_split(v.view(-1), self.size))
            for v, w in zip(hosted, whole, strict=True)
        ]
        exchange = self._exchange(rows, average, tag, to_device=False)
        pending = Pending([], self, lambda: self._complete(exchange, hosted, rows, whole, pending, tag + 1))
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
        """The second half of a sum: the slices summed here go to their places on every rank."""
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
        """Send row r of each list to rank r; the results are sums of the rows received and the own one."""
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
            while received:  # each set of terms is let go once it is summed
                sums.append(self._in_rank_order(received.pop(0), average))
            return [self._back(s) for s in sums] if to_device else sums

        return Pending(works, self, add_up, keep=rows)

    def _in_rank_order(self, terms: dict[int, torch.Tensor], average: bool) -> torch.Tensor:
        order = sorted(terms)
        first, second = terms[order[0]], terms[order[1]]
        if first.is_floating_point() and first.element_size() < 4:
            total = first.float().add_(second)
        elif order[0] == self.index:
            # Never into the own term, a slice of a gradient that can then be let go; a + b is b + a to the bit.
            total = second.add_(first)
        else:
            total = first.add_(second)
        for rank in order[2:]:
            total.add_(terms[rank])
        return total.div_(self.size) if average else total

    def _equal_rows(self, whole: torch.Tensor) -> list[torch.Tensor]:
        return list(whole.view(-1).view(self.size, -1).unbind(0))

    def _host(self, t: torch.Tensor) -> torch.Tensor:
        if not self._hosts:
            return t
        hosted = _to_host(t)
        accelerator.current_stream(self.device).synchronize()
        return hosted

    def _back(self, t: torch.Tensor) -> torch.Tensor:
        return t.to(self.device, non_blocking=True) if self._hosts else t

    @property
    def _hosts(self) -> bool:
        """Whether pieces pass through host memory on their way."""
        return accelerator.is_accelerator(self.device)


def _to_host(t: torch.Tensor) -> torch.Tensor:
    if not accelerator.is_accelerator(t.device):
        return t
    return accelerator.pinned(t.shape, t.dtype).copy_(t, non_blocking=True)


class Collectives(Link):
    """Every other backend (NCCL): the collectives of a unit in one launch, on the communicator's own stream."""

    def gather(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Pending:
        with self._coalesced() as issued:
            for whole, piece in pairs:
                _all_gather(whole.view(-1), piece.view(-1), group=self.group, async_op=True)
                self.meter.bytes_sent += (self.size - 1) * piece.numel() * piece.element_size()
        return Pending(issued.works, self, keep=pairs)

    def scatter_sum(self, wholes: Sequence[torch.Tensor], average: bool) -> Pending:
        pieces = [w.new_empty(w.numel() // self.size) for w in wholes]
        works: list[Any] = []
        for pairs in _by_dtype(list(zip(pieces, wholes, strict=True))):
            with self._coalesced() as issued:
                for piece, whole in pairs:
                    _reduce_scatter(piece, whole.view(-1), op=_sum(average), group=self.group, async_op=True)
                    self.meter.bytes_sent += (self.size - 1) * piece.numel() * piece.element_size()
            works += issued.works
        return Pending(works, self, lambda: pieces, keep=wholes)

    def sum(self, values: Sequence[torch.Tensor], average: bool) -> Pending:
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
        """Collectives issued inside are one launch. A communicator that lost a rank may refuse them."""
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
    """What can be summed in one launch: torch refuses several dtypes in one, as NCCL does not."""
    found: dict[torch.dtype, list[Tensors]] = {}
    for item in items:
        found.setdefault(item[0].dtype, []).append(item)
    return list(found.values())


def _sum(average: bool) -> Any:
    return dist.ReduceOp.AVG if average else dist.ReduceOp.SUM


# --- making links -----------------------------------------------------------------------------------------------------


def make_link(mesh: Mesh, axes: tuple[str, ...], purpose: str, timeout: float | None, meter: Meter) -> Link:
    """The link along one axis (or along several as one) for one purpose. Every rank of the mesh must ask alike."""
    line, device = _line(mesh, axes), runtime.device()
    group = _group(line, purpose, timeout)
    kind = PointToPoint if travels_by_messages(group) else Collectives
    return kind(group, watch_for(purpose, line, group), device, meter)


def travels_by_messages(group: dist.ProcessGroup | None) -> bool:
    """Whether pieces of this rank's device go point to point in a group, not in collectives."""
    return group is None or groups.backend_of(group, runtime.device()) == "gloo"


def _line(mesh: Mesh, axes: tuple[str, ...]) -> tuple[int, ...]:
    """The ranks that differ from this one only along the given axes, in mesh order."""
    indices = [mesh.get_axis_name_idx(axis) for axis in axes]
    where = mesh.coordinate(runtime.rank())
    if where is None:
        raise MeshError(f"rank {runtime.rank()} is not in {mesh}; wrap the module on the ranks of the mesh only")
    picked = tuple(slice(None) if axis in indices else where[axis] for axis in range(mesh.ndim))
    return tuple(int(rank) for rank in mesh.get_logical_mesh()[picked].reshape(-1))


def _group(line: tuple[int, ...], purpose: str, timeout: float | None) -> dist.ProcessGroup | None:
    """The process group of a line, kept apart by purpose; None when the line is this rank alone."""
    if len(line) == 1:
        return None
    known = _groups()
    key = (line, purpose, timeout)
    if key not in known:
        options: dict[str, Any] = {} if timeout is None else {"timeout": timedelta(seconds=timeout)}
        known[key] = groups.new_group(line, **options)
    return known[key]


_cache: tuple[Any, dict[Any, dist.ProcessGroup]] = (None, {})


def _groups() -> dict[Any, dist.ProcessGroup]:
    """The groups made so far; they die with the process group they were made in, and when one of them fails."""
    global _cache
    age = (dist.group.WORLD, watching.failures())
    if _cache[0] is None or _cache[0][0] is not age[0] or _cache[0][1] != age[1]:
        _cache = (age, {})
    return _cache[1]
