"""Tokens to the ranks that hold their experts, and back.

Along the mesh axis `ep` each rank holds some of a layer's experts. A rank sends each of its tokens once to every rank
that holds one of its experts, with the numbers and routing weights of its experts. The experts there run as they do on
one device, for the tokens of all ranks, and each token's sum over the experts of one rank returns to where the token
came from. There the sums are added up in rank order, so results repeat bit for bit.

Ranks along `tp` compute with the same tokens: each sends its part of them, and gets all results.

Counts are exchanged first, so that messages have the size of what they carry; a rank without tokens takes part in every
exchange. Backward makes the same exchanges in reverse. In a plan the other ranks are `AbsentRanks`: the same code runs
on the meta device, for the rank with the busiest expert.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from fullshard.device import accelerator
from fullshard.distributed.autograd_collectives import RankGroup, gather_slices, own_slice
from fullshard.fsdp.comm import Link, bytes_to_others
from fullshard.fsdp.counters import Meter
from fullshard.models.experts_math import Routing, combine

NUMBERS = {torch.float32: torch.int32, torch.float64: torch.int64}
"""The dtype in which numbers of experts travel beside routing weights of a dtype."""


class Sent(NamedTuple):
    """The tokens that one call of a layer's experts has sent and received."""

    routing: Routing
    """Pairs of a token and a rank, sorted by rank: the rows that this rank sends."""
    sent: list[int]
    """The number of rows sent to each rank."""
    received: list[int]
    """The number of rows received from each."""
    pairs: int
    """The number of pairs of a received token and one of this rank's experts."""

    @property
    def tokens(self) -> int:
        """The number of tokens that this rank sends to their experts."""
        return len(self.routing.position)


class Received(NamedTuple):
    """The tokens that have experts on this rank."""

    x: torch.Tensor
    """[rows, in]"""
    weights: torch.Tensor
    """The routing weights of all their experts [rows, choices]."""
    routing: Routing
    """Their pairs with this rank's experts."""
    sent: Sent
    """What brings the results back."""


@dataclass
class AbsentRanks:
    """The ranks of `ep` in a plan: exchanges on the meta device, which are counted."""

    size: int
    index: int = 0
    meter: Meter = field(default_factory=Meter)

    def exchange(
        self, tensors: Sequence[torch.Tensor], sent: Sequence[int], received: Sequence[int]
    ) -> list[torch.Tensor]:
        """Tensors of the sizes that would arrive."""
        self.meter.bytes_sent += sum(bytes_to_others(t, sent, self.index) for t in tensors)
        return [t.new_empty(sum(received), *t.shape[1:]) for t in tensors]


class Dispatch:
    """The way of a layer's tokens to their experts."""

    def __init__(self, link: Link | AbsentRanks, experts: int, name: str, number: int, sharing: RankGroup) -> None:
        assert experts % link.size == 0, f"{experts} experts over {link.size} ranks"
        self.link, self.name = link, name
        self.number = number
        """Of the layer: ranks in different layers never accept each other's messages."""
        self.sharing = sharing
        """The ranks that compute with the same tokens (`tp`)."""
        self.count = experts // link.size
        """The number of experts of a rank."""
        self.first = self.count * link.index
        """The first of this rank's."""

    def __repr__(self) -> str:
        return f"Dispatch(experts {self.first} to {self.first + self.count - 1} of {self.count * self.link.size})"

    def own(self, values: torch.Tensor) -> torch.Tensor:
        """The values of this rank's experts, of a tensor with those of all."""
        return values[self.first : self.first + self.count]

    def send(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> Received:
        """Send tokens [tokens, in] with the weights and the numbers of their experts [tokens, choices]."""
        weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
        x, weights, chosen = (self._part(t) for t in (x, weights, chosen))
        sent = self._expected(chosen) if chosen.is_meta else self._counted(chosen)
        rows, weights, here = _Send.apply(self, sent, x, weights, chosen)
        return Received(rows, weights, Routing.of(here, self.count).cut(sent.pairs), sent)

    def back(self, out: torch.Tensor, sent: Sent, tokens: int) -> torch.Tensor:
        """The sum over the experts of each token, from the results for the rows received."""
        total: torch.Tensor = _Return.apply(self, sent, out)
        return gather_slices(total, 0, self.sharing)[:tokens]

    def _part(self, values: torch.Tensor) -> torch.Tensor:
        """Of values of each token, those of the tokens that this rank sends; some stand for none at the end."""
        if self.sharing.size == 1:
            return values
        return own_slice(F.pad(values, (0, 0, 0, -len(values) % self.sharing.size)), 0, self.sharing)

    def _counted(self, chosen: torch.Tensor) -> Sent:
        """Which tokens go where. The host waits for the counts."""
        size = self.link.size
        routing, pairs = self._by_rank(chosen)
        counts = torch.stack([routing.ends.diff(prepend=routing.ends.new_zeros(1)).long(), pairs.sum(0)], 1)
        (theirs,) = self.exchange([counts], [1] * size, [1] * size)
        sent, received, here = torch.cat([counts[:, 0], theirs[:, 0], theirs[:, 1]]).view(3, size).tolist()
        return Sent(routing.cut(sum(sent)), sent, received, sum(here))

    def _by_rank(self, chosen: torch.Tensor) -> tuple[Routing, torch.Tensor]:
        """Tokens sorted by the ranks that they go to, and the experts of each token on each rank [tokens, ranks]."""
        ranks = torch.arange(self.link.size, device=chosen.device)
        pairs = ((chosen // self.count)[:, :, None] == ranks).sum(1)
        return Routing.of(torch.where(pairs > 0, ranks, self.link.size), self.link.size), pairs

    def _expected(self, chosen: torch.Tensor) -> Sent:
        """The same in a plan, for the first rank, which has the busiest expert: a token chooses its experts at random,
        without repetition."""
        (tokens, choices), size = chosen.shape, self.link.size
        experts = self.count * size
        self.exchange([chosen.new_empty(size, 2, dtype=torch.int64)], [1] * size, [1] * size)
        routing, _ = self._by_rank(chosen)
        everyone = tokens * choices * size
        here = sum(accelerator.rows_of_groups(everyone, experts)[: self.count])

        def rows(share: float) -> int:
            """Of the tokens of a rank, those with an expert on a rank that has this share of all pairs."""
            missed = (max(0.0, (1 - share) * experts - i) / (experts - i) for i in range(choices))
            return math.ceil(tokens * (1 - math.prod(missed)))

        busiest = rows(here / everyone) if everyone else 0
        others = rows((1 - here / everyone) / (size - 1)) if everyone else 0
        sent = [busiest, *[others] * (size - 1)]
        return Sent(routing.cut(sum(sent)), sent, [busiest] * size, here)

    def exchange(self, tensors: list[torch.Tensor], sent: list[int], received: list[int]) -> list[torch.Tensor]:
        """Exchange rows of tensors between the ranks of `ep`."""
        meter = self.link.meter
        with meter.sending(meter.tokens_sent, self.name):
            if isinstance(self.link, AbsentRanks):
                return self.link.exchange(tensors, sent, received)
            return self.link.exchange(tensors, sent, received, self.number).wait()


class _Send(torch.autograd.Function):
    """Rows to the ranks that hold their experts; gradients come back and are added up."""

    @staticmethod
    def forward(ctx, dispatch, sent, x, weights, chosen):  # type: ignore[no-untyped-def]
        ctx.dispatch, ctx.sent, ctx.tokens = dispatch, sent, len(x)
        tokens = sent.routing.tokens
        beside = torch.cat([weights, chosen.to(NUMBERS[weights.dtype]).view(weights.dtype)], 1)  # in one message
        carried = [t.index_select(0, tokens) for t in (x, beside)]
        rows, beside = dispatch.exchange(carried, sent.sent, sent.received)
        weights, numbers = beside.chunk(2, 1)
        weights, here = weights.contiguous(), numbers.contiguous().view(NUMBERS[weights.dtype]) - dispatch.first
        here = torch.where((here >= 0) & (here < dispatch.count), here, dispatch.count)
        ctx.mark_non_differentiable(here)
        return rows, weights, here

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        dispatch, sent = ctx.dispatch, ctx.sent
        wanted = [i for i in range(2) if ctx.needs_input_grad[2 + i]]
        back = dispatch.exchange([grads[i].contiguous() for i in wanted], sent.received, sent.sent)
        sums = {i: combine(rows, None, sent.routing) for i, rows in zip(wanted, back, strict=True)}
        return None, None, sums.get(0), sums.get(1), None


class _Return(torch.autograd.Function):
    """Rows back to their tokens' rank, where those of a token are added up."""

    @staticmethod
    def forward(ctx, dispatch, sent, out):  # type: ignore[no-untyped-def]
        ctx.dispatch, ctx.sent = dispatch, sent
        (rows,) = dispatch.exchange([out.contiguous()], sent.received, sent.sent)
        return combine(rows, None, sent.routing)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        dispatch, sent = ctx.dispatch, ctx.sent
        rows = grad.index_select(0, sent.routing.tokens)
        (out,) = dispatch.exchange([rows], sent.sent, sent.received)
        return None, None, out
