"""Communication on Gloo: point-to-point messages instead of Gloo's collectives.

Pieces are sent directly from and into their final memory: Gloo's own all-gather copies through a flat buffer, and its
reduce-scatter is an all-reduce internally. The sums are computed here: in rank order, so that they repeat bit for bit,
and in fp32 for narrower gradients.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Sequence
from typing import Any

import torch

from fullshard.device import accelerator
from fullshard.distributed.watchdog import watch as watching
from fullshard.fsdp.comm import Link, Pending

SMALL_SUM = 8192
"""Elements up to which an all-reduce takes one exchange; at least as many as there can be ranks."""


class Exchange(enum.IntEnum):
    """The kinds of messages between ranks."""

    GATHER = 0
    SCATTER_SUM = 1
    SUM = 2
    SUMMED_SLICES = 3
    """The second half of a large sum."""
    ROWS = 4


def message_tag(model: int, unit: int, kind: Exchange, call: int) -> int:
    """The tag of an operation's messages on a communicator, in the 31 bits that Gloo has for it.

    Ranks that run different operations (units, models) never accept each other's messages. Operations that share a tag
    because a number wrapped around are matched in the order in which they were issued.
    """
    return (model % 2**6) << 25 | (unit % 2**11) << 14 | kind << 11 | call % 2**11


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
        """All-gather: every rank sends its piece to every other one."""
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
        """Reduce-scatter: every rank receives the terms of its own piece, and adds them up."""
        tag = message_tag(self.model, unit, Exchange.SCATTER_SUM, next(self._calls))
        return self._exchange([self._equal_rows(self._host(w)) for w in wholes], average, tag)

    def sum(self, values: Sequence[torch.Tensor], average: bool, unit: int) -> Pending:
        """All-reduce: small values are exchanged whole, large ones in slices."""
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

    def exchange(
        self, tensors: Sequence[torch.Tensor], sent: Sequence[int], received: Sequence[int], unit: int
    ) -> Pending:
        """All-to-all: a message for each rank that gets rows."""
        tag = message_tag(self.model, unit, Exchange.ROWS, next(self._calls))
        hosted = [self._host(t) for t in tensors]
        results = [t.new_empty(sum(received), *t.shape[1:]) for t in hosted]
        incoming = [result.split(list(received)) for result in results]
        outgoing = [t.split(list(sent)) for t in hosted]
        works = [self._receive(p[o], o, tag) for p in incoming for o in reversed(self._others()) if p[o].numel()]
        works += [self._send(p[o], o, tag) for p in outgoing for o in self._others() if p[o].numel()]
        for own, mine in zip(incoming, outgoing, strict=True):
            own[self.index].copy_(mine[self.index])
        return Pending(works, self, lambda: [self._back(r) for r in results], keep=hosted)

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
