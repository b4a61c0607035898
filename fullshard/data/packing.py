"""Packing: documents of different lengths share rows of one length, best fit first, longest documents first.

Arithmetic on lengths only. That documents in a row do not see each other is left to `loader.py` (positions start
again).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def best_fit_decreasing(lengths: Sequence[int] | npt.NDArray[np.int64], capacity: int) -> list[list[int]]:
    """Rows of document numbers; the lengths in a row sum to at most `capacity`.

    Each document, from the longest on, goes into the fullest row that still takes it. The rows that have some room r
    left are kept under r, and the set of all such r is one integer with a bit for each, so the best fit is the lowest
    set bit from the document's length upwards.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    if sizes.size and (int(sizes.max()) > capacity or int(sizes.min()) < 0):
        raise ValueError(f"lengths must lie between 0 and {capacity}")
    order = np.argsort(-sizes, kind="stable")
    rows: list[list[int]] = []
    rows_with_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = 0  # bit r is set while some row has exactly r left
    for document in order.tolist():
        length = int(sizes[document])
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            row = rows_with_room[room].pop()
            if not rows_with_room[room]:
                rooms ^= 1 << room
            rows[row].append(document)
        else:
            room, row = capacity, len(rows)
            rows.append([document])
        left = room - length
        if not rows_with_room[left]:
            rooms |= 1 << left
        rows_with_room[left].append(row)
    return rows
