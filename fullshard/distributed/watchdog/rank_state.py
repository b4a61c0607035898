"""Whether the device has finished a collective, without touching the device.

An NCCL work has a future that a thread of torch completes. Asking the work itself queries a CUDA event while holding
the GIL. That can take as long as another thread's kernel launch: forever, if the launch queue is full behind a
collective that hangs.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fullshard.config.errors import FSDPError, RankLostError, RanksDivergedError, first_line
from fullshard.device import accelerator
from fullshard.distributed import runtime
from fullshard.distributed.groups import short_name
from fullshard.distributed.watchdog import abort
from fullshard.distributed.watchdog.diagnosis import Failure, RankStatus, Wait
from fullshard.distributed.watchdog.external_waits import ExternalWaits

BLOCKING = any(os.environ.get(name) == "1" for name in ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"))
"""Whether torch waits on the host; then it has no thread that completes futures."""
SUCCESS, TIMED_OUT = 0, 1  # torch's `WorkResult`


def probe(work: Any) -> Any:
    """The object that `is_done` asks about a work; it keeps no tensors alive."""
    try:
        return work if BLOCKING else work.get_future_result()
    except (AttributeError, RuntimeError):
        return work


def is_done(probe: Any) -> bool:
    """Whether a work is finished; raises if it failed."""
    if not hasattr(probe, "done"):
        return bool(probe.is_completed())
    if not probe.done():
        return False
    result = int(probe.value())
    if result != SUCCESS:
        raise RuntimeError("timed out" if result == TIMED_OUT else "NCCL reports a broken connection")
    return True


ISSUED_WITHIN = 2.0
"""Seconds that communicators are not aborted while the program issues a collective."""
FOLLOWED = 1024
"""How many operations that the device has not finished are kept, per communicator."""
REMEMBERED = 256
"""How many of its last operations a rank remembers, per communicator."""
PUBLISHED = 8
"""How many operations a status contains, from the one waited for and from the last, per communicator."""


# --- operations -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Operation:
    """One operation on one communicator."""

    log: OperationLog
    number: int
    what: str


@dataclass
class OperationLog:
    """The operations of this rank on one communicator."""

    purpose: str
    """What distinguishes this communicator from others of the same ranks."""
    ranks: tuple[int, ...]
    group: Any = None
    number: int = 0
    history: dict[int, str] = field(default_factory=dict)
    followed: deque[tuple[Operation, list[Any], float]] = field(default_factory=lambda: deque(maxlen=FOLLOWED))
    """Operations that the device has not finished, oldest first; only the watchdog's thread removes them."""
    oldest: tuple[Operation | None, float] = (None, 0.0)
    """The first of them, and since when it has been the first."""

    def __post_init__(self) -> None:
        self.key = f"{self.purpose}/{short_name(self.ranks)}"

    def issue(self) -> Operation:
        """Number the operation that the current position describes."""
        self.number += 1
        what = current.position()
        self.history[self.number] = what
        self.history.pop(self.number - REMEMBERED, None)
        return Operation(self, self.number, what)

    def follow(self, operation: Operation, works: Sequence[Any]) -> None:
        """Watch works of a backend whose `work.wait()` does not block the host (NCCL).

        Only what `device_work.is_done` needs is kept, until the work is done.
        """
        probes = [probe(work) for item in works for work in getattr(item, "works", [item])]
        self.followed.append((operation, probes, time.monotonic()))


# --- state ----------------------------------------------------------------------------------------------------------


@dataclass
class BrokenConnection:
    """Communication that failed, before its cause is known."""

    what: str
    reason: str
    ranks: tuple[int, ...]
    since: float
    timed_out: bool = False


@dataclass
class RankState:
    """The state of this rank."""

    step: int = 0
    unit: str | None = ""
    operation: str = "start"
    waiting: tuple[Operation, float] | None = None
    """The operation that the host waits for, and since when."""
    broken: BrokenConnection | None = None
    failure: Failure | None = None
    raised: bool = False
    """Whether the failure was raised in the program."""
    logs: dict[str, OperationLog] = field(default_factory=dict)
    optimizer_step: int = 0
    """The current optimizer step, from 1."""
    stepped: bool = True
    """Whether an optimizer has stepped since the last forward with gradients."""
    external: ExternalWaits = field(default_factory=ExternalWaits)
    failures: int = 0
    """How many failures there were, equal on all ranks."""

    def position(self) -> str:
        """Where the program is, for messages."""
        unit = "" if self.unit is None else f"unit {self.unit or '(root)'}, "
        return f"step {self.step}, {unit}{self.operation}"


current = RankState()
failed_flag: torch.Tensor | None = None
"""1 once there is a failure; see `failure_flag`."""
changed = threading.Condition()
"""Notified when there is a failure."""


def log_of(purpose: str, ranks: tuple[int, ...], group: Any) -> OperationLog:
    """The operation log of a communicator. Models that share the communicator share it."""
    new = OperationLog(purpose, ranks, group)
    log = current.logs.get(new.key)
    if log is None or log.group is not group:
        log = current.logs[new.key] = new
    return log


def is_known(log: OperationLog) -> bool:
    """Whether a log belongs to this job."""
    return current.logs.get(log.key) is log


def at(step: int, unit: str | None, operation: str) -> None:
    """Set this rank's position; `unit` is None for an operation of the whole job."""
    current.step, current.unit, current.operation = step, unit, operation


def doing(operation: str) -> None:
    """Set this rank's position to an operation of the whole job, in the current step."""
    current.unit, current.operation = None, operation


def begin_step(number: int) -> None:
    """Set the current optimizer step, from 1. Without it, `begin_pass` counts."""
    current.step = current.optimizer_step = number
    current.stepped = False


def begin_pass() -> int:
    """The optimizer step that a forward with gradients belongs to: micro-batches are not steps."""
    if current.stepped:
        begin_step(current.optimizer_step + 1)
    return current.optimizer_step


def stepped() -> None:
    """Record that an optimizer steps."""
    current.stepped = True


def position() -> str:
    """Where this rank is: step, unit, operation."""
    return current.position()


# --- failures -------------------------------------------------------------------------------------------------------


def set_failure(failure: Failure) -> None:
    """Record why the run cannot continue, and stop waiting for the cause of a broken connection."""
    with changed:
        if current.failure is None:
            abort.take_over()
            if failed_flag is not None:
                failed_flag.fill_(1)
            current.failure = failure
            current.failures += 1
        current.broken = None
        changed.notify_all()


def error_of(failure: Failure) -> FSDPError:
    """The exception for a failure."""
    current.raised = True
    return RankLostError(failure.text, failure.at) if failure.rank_lost else RanksDivergedError(failure.text)


def raise_failure() -> None:
    """Raise if the run cannot continue. What was computed since may be wrong and must not be used."""
    if current.failure is not None:
        raise error_of(current.failure)


def failure_flag() -> torch.Tensor:
    """A number in pinned host memory: 1 once the run cannot continue, else 0.

    It is set before communicators are aborted, so a copy that the device makes after a collective tells whether the
    collective was aborted: then what was computed from its results must not be used.
    """
    global failed_flag
    with changed:
        if failed_flag is None:
            failed_flag = accelerator.pinned((), torch.float32).fill_(current.failure is not None)
        return failed_flag


_issuing = threading.Lock()


@contextlib.contextmanager
def issuing() -> Iterator[None]:
    """Around issuing a collective: its communicator is not aborted meanwhile, and not used afterwards."""
    with _issuing:
        raise_failure()
        yield


def wait_until_issued() -> None:
    """Wait briefly until nobody is inside `issuing`; after a failure nobody enters it again."""
    if _issuing.acquire(timeout=ISSUED_WITHIN):
        _issuing.release()


# --- waits ----------------------------------------------------------------------------------------------------------


def waits(now: float) -> list[tuple[Operation, Wait]]:
    """What this rank waits for, longest first."""
    pending = []
    waiting = current.waiting
    if waiting is not None:
        pending.append((waiting[0], now - waiting[1], False))
    for log in list(current.logs.values()):
        operation, since = log.oldest
        if operation is not None:
            pending.append((operation, now - since, True))
    pending.sort(key=lambda one: -one[1])
    waits = [(op, Wait(op.log.key, op.number, op.what, seconds, on_device)) for op, seconds, on_device in pending]
    # An external wait comes last: less is known about it.
    external = current.external.longest(None if waiting is None else threading.main_thread().ident)
    if external is not None:
        operation = _external_operation(f"step {current.step}, {external.what}", runtime.world_size())
        waits.append((operation, Wait(operation.log.key, 0, operation.what, now - external.since, external=True)))
    return waits


@functools.lru_cache(maxsize=16)
def _external_operation(what: str, world: int) -> Operation:
    return Operation(OperationLog("external", tuple(range(world))), 0, what)


def status(request: int, now: float) -> RankStatus:
    """What this rank publishes about itself."""
    open_waits = waits(now)
    operations: dict[str, dict[str, str]] = {}
    for key, log in list(current.logs.items()):
        starts = [operation.number for operation, _ in open_waits if operation.log is log]
        numbers = {n for first in [*starts, log.number - PUBLISHED + 1] for n in range(first, first + PUBLISHED)}
        operations[key] = {str(n): what for n in sorted(numbers) if (what := log.history.get(n)) is not None}
    last = {key: log.number for key, log in list(current.logs.items())}
    external = bool(open_waits) and open_waits[0][1].external
    place = open_waits[0][1].what if external else current.position()
    return RankStatus(request, place, [wait for _, wait in open_waits], last, operations)


def finish_followed(now: float) -> tuple[Operation, str] | None:
    """Drop followed operations that are done; returns the first that failed, and why."""
    for log in list(current.logs.values()):
        while log.followed:
            try:
                operation, probes, issued = log.followed[0]
                if not all(is_done(one) for one in probes):
                    if log.oldest[0] is not operation:
                        log.oldest = (operation, max(now, issued) if log.oldest[0] is not None else issued)
                    break
                log.followed.popleft()
            except IndexError:  # the queue was full, and the main thread has just pushed the oldest out
                continue
            except Exception as error:
                log.followed.clear()
                return operation, first_line(error)
        if not log.followed:
            log.oldest = (None, 0.0)
    return None
