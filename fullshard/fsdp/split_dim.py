"""Which dim of a parameter the `fsdp` axis splits. Arithmetic on shapes, nothing else.

A dim is cut into equal pieces, the last of them padded on the way, so a dim much shorter than the axis travels many
times its size: (8, 4096) cut by its rows for 4,096 ranks would travel 512-fold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

DIM0_RATIO = 1.15
"""Padded size over own size up to which dim 0 is taken without looking further: rows of pieces are contiguous, so that
they are read from files in one run and, where they divide, gathered without a copy."""
FREE_PADDING = 4096
"""Bytes of padding, over all ranks, that are not worth another layout."""
WHOLE_RATIO = 1.5
"""Padded size over own size above which a small parameter is not split at all."""
WHOLE_BYTES = 256 * 1024
"""The most bytes of a parameter that every rank may hold whole. With gradient and two optimizer states in fp32, 100
parameters of this size cost a rank 100 MiB; a small one that is split in vain costs every gather instead."""


def padded(shape: Sequence[int], dim: int, parts: int) -> int:
    """Elements of all pieces together when a dim is cut."""
    return math.prod(-(-n // parts) * parts if i == dim else n for i, n in enumerate(shape))


def choose_dim(shape: Sequence[int], itemsize: int, parts: int, candidates: Sequence[int]) -> int | None:
    """The dim to split into so many parts; None where every rank should hold the whole.

    `candidates` come in order of preference. The first is taken unless its padding is both large and at least twice
    that of another; what would be mostly padding whichever way it is cut stays whole if it is small.
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
