"""Packing: assigns documents of different lengths to sequences of one length, by best-fit decreasing.

Works on lengths only. `loader.py` (position ids) and `models/packed_inputs.py` (attention) keep the documents of a
packed sequence from attending to each other.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
AT_ONCE = 65536
"""Lengths converted to Python integers at a time, which bounds memory."""


def best_fit_decreasing(lengths: Sequence[int] | npt.NDArray[np.integer], capacity: int) -> tuple[Integers, Integers]:
    """Pack documents into rows whose lengths sum to at most `capacity`: (start of each row in the list, list of
    documents).

    Documents are placed from the longest to the shortest, each into the fullest row that still has room. Rows are
    grouped by the room r they have left, and the set of all such r is the bits of one integer. So the best fit is the
    lowest set bit at or above the document's length.
    """
    sizes = np.asarray(lengths)
    if sizes.size and (int(sizes.max()) > capacity or int(sizes.min()) < 1):
        raise ValueError(f"lengths must be between 1 and {capacity}")
    order = np.argsort(-sizes, kind="stable")
    row_of = np.empty(len(sizes), dtype=np.int64)  # by index in `order`
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
