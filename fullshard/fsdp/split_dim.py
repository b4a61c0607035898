"""Which dim of a parameter the `fsdp` axis splits. Only arithmetic on shapes.

A dim is split into equal pieces, the last ones padded when they are sent. A dim much shorter than the axis therefore
multiplies the traffic: (8, 4096) split by rows over 4,096 ranks sends 512 times its size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

DIM0_RATIO = 1.15
"""The ratio of padded to unpadded size up to which dim 0 is always chosen: blocks of rows are contiguous, so that they
are read from files in one piece and, where the rows divide evenly, gathered without a copy."""
FREE_PADDING = 4096
"""Bytes of padding, over all ranks, that do not justify another layout."""
WHOLE_RATIO = 1.5
"""The ratio of padded to unpadded size above which a small parameter is not split at all."""
WHOLE_BYTES = 256 * 1024
"""The most bytes of a parameter that every rank may hold whole. With gradient and two optimizer states in fp32, 100
parameters of this size cost a rank 100 MiB; splitting a small one that is mostly padding costs time in every gather."""


def padded(shape: Sequence[int], dim: int, parts: int) -> int:
    """The number of elements of all pieces together when a dim is split."""
    return math.prod(-(-n // parts) * parts if i == dim else n for i, n in enumerate(shape))


def choose_dim(shape: Sequence[int], itemsize: int, parts: int, candidates: Sequence[int]) -> int | None:
    """The dim to split into `parts`; None if every rank should hold the whole parameter.

    `candidates` are in order of preference. The first is chosen unless its padding is large and at least twice that of
    another. A small parameter that would be mostly padding with any of them stays whole.
    """
    own = math.prod(shape)
    if not candidates or own == 0:
        return candidates[0] if candidates else None
    first = candidates[0]
    best = min(candidates, key=lambda dim: padded(shape, dim, parts))  # the earliest of equals
    excess = padded(shape, first, parts) - own
    if excess * itemsize <= FREE_PADDING or excess <= (DIM0_RATIO - 1) * own:
        return first
    if 2 * (padded(shape, best, parts) - own) > excess:
        best = first
    excess = padded(shape, best, parts) - own
    if excess * itemsize > FREE_PADDING and own + excess > WHOLE_RATIO * own and own * itemsize <= WHOLE_BYTES:
        return None
    return best
