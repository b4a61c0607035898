"""Work that one process per node does for all of its ranks, and errors that all ranks then share.

Every rank calls `once_per_node`; the first of each node works, the others wait, and if any worker failed every rank
raises the same error, so that none is left waiting for another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from fullshard import runtime
from fullshard.errors import DataError, UserError
from fullshard.ranks import exchange

Value = TypeVar("Value")


def once_per_node(work: Callable[[], Value]) -> Value:
    """What `work` gives on the first rank of this node: a small value. All ranks call this and leave it together."""
    local = runtime.local_rank()
    values = agree(work if local == 0 else lambda: None)
    return values[runtime.rank() - local]


def agree(work: Callable[[], Value], own: bool = False) -> Any:
    """Run `work` on this rank; every rank gets the list of all values, or raises the error of one that failed.

    With `own` values stay where they are (they may be large), and each rank gets its own.
    """
    value, failure = None, None
    try:
        value = work()
    except Exception as error:
        failure = error
    told = (type(failure), str(failure)) if isinstance(failure, UserError) else (DataError, repr(failure))
    report = (None if own else value, told if failure is not None else None)
    reports = exchange(report, 0, "work that is done once", watched=False)  # others may take their time
    if failure is not None:
        raise failure
    for _, other in reports:
        if other is not None:
            raise other[0](other[1])
    return value if own else [value for value, _ in reports]
