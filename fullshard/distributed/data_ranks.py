"""Which ranks read the same rows of a batch.

Along most axes of the mesh ranks have rows of their own. Along others (tensor parallelism) they compute parts of the
same rows: such ranks follow one another, read the same batches, draw the same random numbers, and count once in sums
over rows. Samplers, metrics and losses ask here instead of for rank and world size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from fullshard.distributed import runtime
from fullshard.distributed.watchdog import collectives

T = TypeVar("T")

_sharing = 1


def share_rows(ranks: int) -> None:
    """From here on, each run of this many consecutive ranks reads the same rows."""
    global _sharing
    _sharing = ranks


def ranks_per_row() -> int:
    """The number of ranks that read the same rows."""
    return _sharing if runtime.world_size() % _sharing == 0 else 1


def data_rank() -> int:
    """The index of this rank's rows, from 0."""
    return runtime.rank() // ranks_per_row()


def data_size() -> int:
    """The number of ranks with rows of their own."""
    return runtime.world_size() // ranks_per_row()


def data_devices() -> int:
    """The number of devices with rows of their own."""
    return runtime.global_device_count() // ranks_per_row()


def of_each_row(values: Sequence[T]) -> list[T]:
    """Of a value for each rank, those of ranks with rows of their own: of ranks that share them, the first."""
    return list(values[:: ranks_per_row()])


def sum_over_rows(what: str, values: torch.Tensor) -> torch.Tensor:
    """The sum of floating-point values over all ranks, in place; ranks that share rows count once. All ranks must call
    it; `what` names the sum in reports."""
    if runtime.world_size() > 1:
        collectives.finish(what, lambda: dist.all_reduce(values, async_op=True))
        values /= ranks_per_row()
    return values
