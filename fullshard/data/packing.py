"""Packing: documents of different lengths share rows of one length, best fit first, longest documents first.

Arithmetic on lengths only. That documents in a row do not see each other is left to `loader.py` (positions start
again) and `models/packed_inputs.py` (what a model needs besides).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
AT_ONCE = 65536
"""Documents turned into Python numbers at a time: so many objects, however large the data."""


def best_fit_decreasing(lengths: Sequence[int] | npt.NDArray[np.integer], capacity: int) -> tuple[Integers, Integers]:
    """Where each row starts in a list of documents, and that list; the lengths in a row sum to at most `capacity`.

    Each document, from the longest on, goes into the fullest row that still takes it. The rows that have some room r
    left are kept under r, and the set of all such r is one integer with a bit for each, so the best fit is the lowest
    set bit from the document's length upwards.
    """
    sizes = np.asarray(lengths)
    if sizes.size and (int(sizes.max()) > capacity or int(sizes.min()) < 1):
        raise ValueError(f"lengths must lie between 1 and {capacity}")
    order = np.argsort(-sizes, kind="stable")
    row_of = np.empty(len(sizes), dtype=np.int64)  # by place in `order`
    rows = 0
    rows_with_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = 0  # bit r is set while some row has exactly r left
    for start in range(0, len(order), AT_ONCE):
        placed = []
        for length in sizes[order[start : start + AT_ONCE]].tolist():
            fitting = rooms >> length
            if fitting:
                room = length + (fitting & -fitting).bit_length() - 1
                row = rows_with_room[room].pop()
                if not rows_with_room[room]:
                    rooms ^= 1 << room
            else:
                room, row = capacity, rows
                rows += 1
            placed.append(row)
            if left := room - length:
                if not rows_with_room[left]:
                    rooms |= 1 << left
                rows_with_room[left].append(row)
        row_of[start : start + len(placed)] = placed
    starts = np.concatenate([[0], np.cumsum(np.bincount(row_of, minlength=rows))]).astype(np.int64)
    return starts, order[np.argsort(row_of, kind="stable")].astype(np.int64)
