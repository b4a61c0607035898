"""An output head of which each rank has the rows of some tokens: its losses from slices of the logits.

Each rank holds the logits of its own tokens. What a loss needs of all of them (the largest, the sum of exponentials,
the label's) is a number per token, which the ranks exchange; no rank has whole logits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fullshard.distributed.autograd_collectives import (
    RankGroup,
    gather_slices,
    max_over_ranks,
    total_over_ranks,
)

MARK = "_fullshard_outputs"


def set_slice(head: nn.Module, group: RankGroup) -> None:
    """Record that each rank of a group has a slice of the layer's outputs."""
    setattr(head, MARK, group)


def slice_of(head: Any) -> RankGroup | None:
    """The ranks that share a layer's outputs; None if every rank has all."""
    group: RankGroup | None = getattr(head, MARK, None)
    return group if group is not None and group.size > 1 else None


def whole_logits(logits: torch.Tensor, head: Any) -> torch.Tensor:
    """The logits of all tokens."""
    group = slice_of(head)
    return logits if group is None else gather_slices(logits, -1, group)


class SliceStatistics:
    """What the losses of tokens need of their logits [n, v], of which this rank may have a slice of columns."""

    def __init__(self, values: torch.Tensor, targets: torch.Tensor, group: RankGroup | None) -> None:
        """`values` are detached logits and `targets` [n, 1] the labels."""
        self.group = group or RankGroup("", 1, 0)
        columns = values.shape[1]
        self.vocabulary = columns * self.group.size
        places = targets - self.group.place * columns
        self.own = (
            (places >= 0) & (places < columns) if self.group.size > 1 else torch.ones_like(places, dtype=torch.bool)
        )
        """Which labels are among this rank's columns [n, 1]."""
        self.places = places.masked_fill(~self.own, 0)
        """The columns of those labels [n, 1]."""
        largest = values.amax(1, keepdim=True)
        self.largest = max_over_ranks(largest, self.group)
        base = self.largest.masked_fill(self.largest.isinf(), 0)
        sums = (values - base).exp_().sum(1, keepdim=True)
        labels = values.gather(1, self.places).masked_fill_(~self.own, 0)
        labels.masked_fill_((targets < 0) | (targets >= self.vocabulary), torch.nan)
        sums, self.target_logits = self.total(torch.cat([sums, labels], 1)).split(1, 1)
        self.lse = sums.log().add_(base)
        first = values.argmax(1, keepdim=True) + self.group.place * columns
        if self.group.size > 1:  # of equal logits the first counts
            first = -max_over_ranks(-first.masked_fill(largest != self.largest, self.vocabulary), self.group)
        self.correct = (first == targets).to(self.lse.dtype)

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks' columns."""
        return total_over_ranks(values, self.group)

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """The mean of the logits of each token [n, 1]."""
        return self.total(values.sum(1, keepdim=True)) / self.vocabulary

    def entropies(self, values: torch.Tensor) -> torch.Tensor:
        """The entropy of each token's distribution [n, 1]."""
        return self.lse - self.total(((values - self.lse).exp_() * values).sum(1, keepdim=True))
