"""Watching for ranks that fall out of step, stop or disappear.

Every rank notes where it is (step, unit, operation) and numbers its operations on each communicator. An operation that
waits for long is *reported* with the ranks that have not entered it and where each of them is. The run is *ended* only
when it can never go on: a rank is gone, or ranks entered different operations. A rank that is merely slow (compiling,
downloading, waiting for data) is left alone. This file holds what the rest of the package calls; the threads behind it
are in `threads.py`.

On Gloo the host waits, inside `Watch.waiting`. On NCCL the device does, and the host runs on until it needs a result:
there `Watch.follow` is given what was issued. Either way `check()` raises once the run cannot go on, and is called
wherever a result would be used, shown or saved.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from fullshard import runtime
from fullshard.errors import FSDPError, RankLostError, RanksDivergedError, first_line
from fullshard.groups import short_name
from fullshard.watchdog import device_work as works_of
from fullshard.watchdog.diagnosis import Note, Verdict, Wait, kind_of
from fullshard.watchdog.torch_collectives import Outside, raised_in

REPORT_AFTER = 5.0
"""Seconds an operation waits before it is reported."""
REPEAT_AFTER = 60.0
"""Seconds until the same wait is reported again."""
POLL = 0.5
"""Seconds between two looks at what this rank waits for; nothing is sent for that."""
NAME_WITHIN = 9.0
"""Seconds a rank whose connection broke looks for the rank that is gone, before it gives up without a name."""
ISSUED_WITHIN = 2.0
"""Seconds that communicators are left alone while the program gives one of them something to do."""
FOLLOWED = 1024
"""How many operations that the device has not finished are kept, per communicator."""
REMEMBERED = 256
"""How many of its last operations a rank remembers, per communicator."""
TOLD = 8
"""How many operations it tells the others, from the one it waits in and from the last, per communicator."""


@dataclass(frozen=True)
class Label:
    """One operation on one communicator."""

    watch: Watch
    number: int
    what: str


@dataclass
class Watch:
    """One communicator's operations on this rank."""

    purpose: str
    """What tells this communicator from others of the same ranks."""
    ranks: tuple[int, ...]
    group: Any = None
    number: int = 0
    history: dict[int, str] = field(default_factory=dict)
    followed: deque[tuple[Label, list[Any], float]] = field(default_factory=lambda: deque(maxlen=FOLLOWED))
    """Operations issued whose device has not finished them, oldest first; only the watch's thread takes away."""
    front: tuple[Label | None, float] = (None, 0.0)
    """The oldest of them, and since when it is that."""

    def __post_init__(self) -> None:
        self.key = f"{self.purpose}/{short_name(self.ranks)}"

    def next_tag(self) -> int:
        """A number for the messages of the operation about to be issued.

        Its upper part tells operations apart: ranks that enter different ones never take each other's messages for
        their own.
        """
        kind = zlib.crc32(kind_of(_here.text()).encode()) & 0x3FFF
        return kind << 16 | ((self.number + 1) % (1 << 15)) << 1

    def issue(self) -> Label:
        """Number the operation that the current position describes."""
        self.number += 1
        what = _here.text()
        self.history[self.number] = what
        self.history.pop(self.number - REMEMBERED, None)
        return Label(self, self.number, what)

    @contextlib.contextmanager
    def waiting(self, label: Label) -> Iterator[None]:
        """Around a wait that other ranks may never end."""
        if len(self.ranks) > 1:
            _threads_run()
        _here.waiting = (label, time.monotonic())
        try:
            yield
        except RuntimeError as error:
            raise failed(label.what, self.ranks, error) from error
        finally:
            _here.waiting = None

    def follow(self, label: Label, works: Sequence[Any]) -> None:
        """Watch what was issued on a backend whose `work.wait()` does not hold the host up (NCCL).

        What is kept is only what says whether a work is done, and no longer than until it is.
        """
        if len(self.ranks) > 1:
            _threads_run()
        probes = [works_of.probe(work) for found in works for work in getattr(found, "works", [found])]
        self.followed.append((label, probes, time.monotonic()))


@dataclass
class Broken:
    """Communication that failed."""

    what: str
    reason: str
    ranks: tuple[int, ...]
    since: float
    timed_out: bool = False


@dataclass
class _Here:
    """Where this rank is."""

    step: int = 0
    unit: str | None = ""
    operation: str = "start"
    waiting: tuple[Label, float] | None = None
    """What the host waits in, and since when."""
    broken: Broken | None = None
    verdict: Verdict | None = None
    raised: bool = False
    """Whether the program has been told the verdict."""
    watches: dict[str, Watch] = field(default_factory=dict)
    steps: int = 0
    """The optimizer step under way, from 1."""
    stepped: bool = True
    """Whether an optimizer has stepped since the last forward with gradients."""
    outside: Outside = field(default_factory=Outside)

    def text(self) -> str:
        unit = "" if self.unit is None else f"unit {self.unit or '(root)'}, "
        return f"step {self.step}, {unit}{self.operation}"


_here = _Here()
_changed = threading.Condition()
"""Notified when there is a verdict, and when a failure was looked into without one."""
failures = 0
"""How many verdicts there were, alike on all ranks. They may have stopped in different places, so no communicator made
before is used again."""


def watch_for(purpose: str, ranks: tuple[int, ...], group: Any) -> Watch:
    """The watch of a communicator. Models that share the communicator share it."""
    made = Watch(purpose, ranks, group)
    known = _here.watches.get(made.key)
    if known is None or known.group is not group:
        known = _here.watches[made.key] = made
    if len(ranks) > 1:
        _threads_run()
    return known


def is_known(watch: Watch) -> bool:
    """Whether a watch is one of this job's."""
    return _here.watches.get(watch.key) is watch


def at(step: int, unit: str | None, operation: str) -> None:
    """Note where this rank is; `unit` is None for what concerns the whole job."""
    _here.step, _here.unit, _here.operation = step, unit, operation


def doing(operation: str) -> None:
    """Note what this rank does for the whole job, in the step it is in."""
    _here.unit, _here.operation = None, operation


def begin_step(number: int) -> None:
    """Say which optimizer step is under way, from 1. A program that does not is counted by `begin_pass`."""
    _here.step = _here.steps = number
    _here.stepped = False


def begin_pass() -> int:
    """The number of the optimizer step that a forward with gradients belongs to: micro-batches are no steps."""
    if _here.stepped:
        begin_step(_here.steps + 1)
    return _here.steps


def stepped() -> None:
    """Note that an optimizer steps."""
    _here.stepped = True


def position() -> str:
    """Where this rank is, in words."""
    return _here.text()


def check() -> None:
    """Raise if the run cannot go on. What was computed since then may be wrong and must not be used."""
    if _here.verdict is not None:
        raise _error(_here.verdict)


def cause(error: BaseException) -> FSDPError | None:
    """Why the run cannot go on, if it cannot: an error that is raised then only follows from it.

    Communication outside the engine (a metric's sum, say) breaks with torch's own error, before a verdict is there.
    """
    if _here.verdict is not None:
        return _error(_here.verdict)
    text = str(error).lower()
    broken = isinstance(error, dist.DistError) or isinstance(error, RuntimeError) and any(w in text for w in _BROKEN)
    if not broken or not isinstance(error, Exception) or not _threads_run():
        return None
    outside = raised_in(error)
    where = f"step {_here.step}, {outside}" if outside else position()
    return failed(where, tuple(range(runtime.world_size())), error)


_BROKEN = ("connection closed by peer", "connection reset by peer", "gloo/transport", "broken pipe", "pair closure")
_LATE = ("timed out", "time-out", "timeout")


@contextlib.contextmanager
def issuing() -> Iterator[None]:
    """Around giving a communicator something to do: it is not taken apart meanwhile, and not used after that."""
    with _issuing:
        check()
        yield


_issuing = threading.Lock()


def settle_issuing() -> None:
    """Wait, for a moment, until nobody is inside `issuing`; with a verdict nobody enters it again."""
    if _issuing.acquire(timeout=ISSUED_WITHIN):
        _issuing.release()


def _error(verdict: Verdict) -> FSDPError:
    _here.raised = True
    return RankLostError(verdict.text, verdict.at) if verdict.lost else RanksDivergedError(verdict.text)


def failed(what: str, ranks: tuple[int, ...], error: Exception) -> FSDPError:
    """The error for communication that broke: it names the rank that is gone, where one is."""
    global failures
    text, reason = str(error).lower(), first_line(error)
    late = any(word in text for word in _LATE)
    if late or any(word in text for word in _BROKEN):
        # What Gloo says is about sockets and places in its source.
        runtime.get_logger().debug("watch: %s", reason)
        reason = "its time-out is over" if late else "a connection broke"
    runs = _threads_run()
    if _here.verdict is None and runs:
        # The threads find out which rank is gone, or that none is.
        with _changed:
            _here.broken = Broken(what, reason, ranks, time.monotonic(), late)
            _lookout.hurry()
            _changed.wait_for(lambda: _here.verdict is not None, NAME_WITHIN + 2)
    if _here.verdict is None:
        verdict = unnamed(what, reason)
        if not runs:
            failures += 1
            return _error(verdict)
        _lookout.decide(verdict)
    assert _here.verdict is not None
    return _error(_here.verdict)


def unnamed(what: str, reason: str) -> Verdict:
    """A failure of which nobody knows whose it was."""
    me = runtime.rank()
    return Verdict(f"rank {me} cannot go on in {what}: another rank has failed, or is too late ({reason})", True, what)


def forget() -> None:
    """Go on after a verdict that the ranks can recover from, on new communicators. All ranks must call it, together."""
    if _lookout is not None:
        _lookout.forget()
    _here.verdict, _here.broken, _here.raised = None, None, False
    for watch in _here.watches.values():
        watch.followed.clear()


# --- for the threads ------------------------------------------------------------------------------------------------


_lookout: Any = None
_unwatched: Any = None
"""A process group without anybody else in it; there are no threads for it."""
_starting = threading.Lock()


def _threads_run() -> bool:
    """Start the watch's threads where they do not run; whether they do now."""
    global _lookout, _unwatched
    if _lookout is not None and _lookout.runs():
        return True
    if not dist.is_initialized() or dist.group.WORLD is _unwatched:
        return False
    from fullshard.watchdog.threads import Lookout

    with _starting:
        if _lookout is None or not _lookout.runs():
            _lookout = Lookout.start()
            _unwatched = dist.group.WORLD if _lookout is None else None
    return _lookout is not None


def waits(now: float) -> list[tuple[Label, Wait]]:
    """What this rank waits in, longest first."""
    found = []
    waiting = _here.waiting
    if waiting is not None:
        found.append((waiting[0], now - waiting[1], False))
    for watch in list(_here.watches.values()):
        label, since = watch.front
        if label is not None:
            found.append((label, now - since, True))
    found.sort(key=lambda one: -one[1])
    waits = [(label, Wait(label.watch.key, label.number, label.what, s, device)) for label, s, device in found]
    # A wait outside the engine comes last: there is less to say about it.
    standing = _here.outside.longest(but=None if waiting is None else threading.main_thread().ident)
    if standing is not None:
        label = _outside_label(f"step {_here.step}, {standing.what}", runtime.world_size())
        waits.append((label, Wait(label.watch.key, 0, label.what, now - standing.since, outside=True)))
    return waits


@functools.lru_cache(maxsize=16)
def _outside_label(what: str, world: int) -> Label:
    return Label(Watch("outside", tuple(range(world))), 0, what)


def note(asked: int, now: float) -> Note:
    """What this rank tells of itself."""
    open_waits = waits(now)
    done: dict[str, dict[str, str]] = {}
    for key, watch in list(_here.watches.items()):
        starts = [label.number for label, _ in open_waits if label.watch is watch]
        told = {n for first in [*starts, watch.number - TOLD + 1] for n in range(first, first + TOLD)}
        done[key] = {str(n): what for n in sorted(told) if (what := watch.history.get(n)) is not None}
    last = {key: watch.number for key, watch in list(_here.watches.items())}
    where = open_waits[0][1].what if open_waits and open_waits[0][1].outside else _here.text()
    return Note(asked, where, [wait for _, wait in open_waits], last, done)


def finish_followed(now: float) -> tuple[Label, str] | None:
    """Let go of followed operations that are done; the first that failed, and why."""
    for watch in list(_here.watches.values()):
        while watch.followed:
            try:
                label, probes, issued = watch.followed[0]
                if not all(works_of.is_done(probe) for probe in probes):
                    if watch.front[0] is not label:
                        watch.front = (label, max(now, issued) if watch.front[0] is not None else issued)
                    break
                watch.followed.popleft()
            except IndexError:  # the queue was full, and the main thread has just pushed the oldest out
                continue
            except Exception as error:
                watch.followed.clear()
                return label, first_line(error)
        if not watch.followed:
            watch.front = (None, 0.0)
    return None
