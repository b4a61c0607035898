"""The watchdog: notices ranks that diverge, stop or disappear. This file is what the rest of the package calls.

Every rank records its position (step, unit, operation) and numbers its operations on each communicator. An operation
that waits for long is *reported*, with the ranks that have not entered it and the position of each. The run is *ended*
only when it can never continue: a rank is gone, or ranks entered different operations. A rank that is merely slow
(compiling, downloading, waiting for data) is left alone.

On Gloo the host waits, inside `waiting`. On NCCL the device does, and the host continues until it needs a result: there
`OperationLog.follow` receives what was issued. In both cases `raise_failure` raises once the run cannot continue. It is
called wherever a result would be used, shown or saved.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from fullshard.config.errors import FSDPError, first_line
from fullshard.distributed import runtime
from fullshard.distributed.watchdog import investigate, rank_state, threads
from fullshard.distributed.watchdog.diagnosis import unexplained_failure
from fullshard.distributed.watchdog.external_waits import collective_of
from fullshard.distributed.watchdog.rank_state import (
    BrokenConnection,
    Operation,
    OperationLog,
    at,
    begin_pass,
    begin_step,
    doing,
    failure_flag,
    is_known,
    issuing,
    position,
    raise_failure,
    stepped,
)

__all__ = [
    "Operation",
    "OperationLog",
    "at",
    "begin_pass",
    "begin_step",
    "cause",
    "doing",
    "failed",
    "failure_flag",
    "failures",
    "forget",
    "is_known",
    "issuing",
    "position",
    "raise_failure",
    "stepped",
    "waiting",
    "watch_for",
]

_BROKEN = ("connection closed by peer", "connection reset by peer", "gloo/transport", "broken pipe", "pair closure")
_LATE = ("timed out", "time-out", "timeout")


def watch_for(purpose: str, ranks: tuple[int, ...], group: Any) -> OperationLog:
    """The operation log of a communicator, which is watched from now on."""
    if len(ranks) > 1:
        threads.ensure_started()
    return rank_state.log_of(purpose, ranks, group)


@contextlib.contextmanager
def waiting(operation: Operation) -> Iterator[None]:
    """Around a wait of the host that other ranks may never end."""
    rank_state.current.waiting = (operation, time.monotonic())
    try:
        yield
    except RuntimeError as error:
        raise failed(operation.what, operation.log.ranks, error) from error
    finally:
        rank_state.current.waiting = None


def failures() -> int:
    """How many failures there were, equal on all ranks. Ranks may have stopped at different places, so no communicator
    made before the last one is used again."""
    return rank_state.current.failures


def failed(what: str, ranks: tuple[int, ...], error: Exception) -> FSDPError:
    """The error for communication that broke; it names the rank that is gone, if there is one."""
    text, reason = str(error).lower(), first_line(error)
    late = any(word in text for word in _LATE)
    if late or any(word in text for word in _BROKEN):
        # Gloo's message is about sockets and lines of its source.
        runtime.get_logger().debug("watchdog: %s", reason)
        reason = "timed out" if late else "a connection broke"
    running, state = threads.ensure_started(), rank_state.current
    if state.failure is None and running is not None:
        # The threads find out which rank is gone, or that none is.
        with rank_state.changed:
            state.broken = BrokenConnection(what, reason, ranks, time.monotonic(), late)
            running.messages.wake.set()
            rank_state.changed.wait_for(lambda: state.failure is not None, investigate.NAME_WITHIN + 2)
    if state.failure is None:
        failure = unexplained_failure(runtime.rank(), what, reason)
        if running is None:
            state.failures += 1
            return rank_state.error_of(failure)
        running.messages.end_run(failure)
    assert state.failure is not None
    return rank_state.error_of(state.failure)


def cause(error: BaseException) -> FSDPError | None:
    """Why the run cannot continue, if it cannot: an error raised then is only a consequence.

    Communication outside the engine (a metric's all-reduce, say) raises torch's own error, before the cause is known.
    """
    state = rank_state.current
    if state.failure is not None:
        return rank_state.error_of(state.failure)
    text = str(error).lower()
    broken = isinstance(error, dist.DistError) or isinstance(error, RuntimeError) and any(w in text for w in _BROKEN)
    if not broken or not isinstance(error, Exception) or threads.ensure_started() is None:
        return None
    collective = collective_of(error)
    where = f"step {state.step}, {collective}" if collective else position()
    return failed(where, tuple(range(runtime.world_size())), error)


def forget() -> None:
    """Continue after a failure that the ranks can recover from, on new communicators. All ranks must call it."""
    if (running := threads.started()) is not None:
        running.forget()
    state = rank_state.current
    state.failure, state.broken, state.raised = None, None, False
    failure_flag().zero_()
    for log in state.logs.values():
        log.followed.clear()
