"""Watching for ranks that fall out of step.

Every rank notes where it is (step, unit, operation) and numbers its operations on each communicator. A thread per
process shares these notes through the job's key-value store. An operation that waits for long is *reported* with the
ranks
that have not entered it and where each of them is. It is *aborted* only when it can never finish: a rank has exited,
or has entered a different operation. A rank that is merely slow (compiling, downloading, waiting for data) is left
alone.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import threading
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fullshard import runtime
from fullshard.errors import FSDPError

REPORT_AFTER = 5.0
"""Seconds an operation waits before it is reported."""
REPEAT_AFTER = 60.0
"""Seconds until the same wait is reported again."""
POLL = 1.0
"""Seconds between two looks."""
REMEMBERED = 16
"""How many of its last operations a rank tells the others, per communicator."""


@dataclass(frozen=True)
class Label:
    """One operation on one communicator."""

    watch: Watch
    number: int
    what: str


def kind_of(what: str) -> str:
    """An operation without its step: what must agree between ranks."""
    return what.split(", ", 1)[1]


@dataclass
class Watch:
    """One communicator's operations on this rank."""

    purpose: str
    """What tells this communicator from others of the same ranks."""
    ranks: tuple[int, ...]
    group: Any = None
    number: int = 0
    history: dict[int, str] = field(default_factory=dict)

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
            _thread_runs()
        _here.waiting, _here.since = label, time.monotonic()
        try:
            yield
        except RuntimeError as error:
            raise failed(label.what, self.ranks, error) from error
        finally:
            _here.waiting = None

    @property
    def key(self) -> str:
        return f"{self.purpose}:{','.join(map(str, self.ranks))}"


@dataclass
class _Here:
    """Where this rank is."""

    step: int = 0
    unit: str | None = ""
    operation: str = "start"
    waiting: Label | None = None
    since: float = 0.0
    verdict: str = ""
    watches: dict[str, Watch] = field(default_factory=dict)

    def text(self) -> str:
        unit = "" if self.unit is None else f"unit {self.unit or '(root)'}, "
        return f"step {self.step}, {unit}{self.operation}"


_here = _Here()
_thread: threading.Thread | None = None
_stop = threading.Event()
failures = 0
"""How often a communicator failed. Ranks may have stopped in different places, so none made before is used again."""


def watch_for(purpose: str, ranks: tuple[int, ...], group: Any) -> Watch:
    """The watch of a communicator. Models that share the communicator share it."""
    made = Watch(purpose, ranks, group)
    known = _here.watches.get(made.key)
    if known is None or known.group is not group:
        known = _here.watches[made.key] = made
    return known


def at(step: int, unit: str | None, operation: str) -> None:
    """Note where this rank is; `unit` is None for what concerns the whole job."""
    _here.step, _here.unit, _here.operation = step, unit, operation


def position() -> str:
    """Where this rank is, in words."""
    return _here.text()


def failed(what: str, ranks: tuple[int, ...], error: Exception) -> FSDPError:
    """The error for communication that broke."""
    global failures
    failures += 1
    return FSDPError(_here.verdict or _lost(what, ranks, error))


def _lost(what: str, ranks: tuple[int, ...], error: Exception) -> str:
    """What to say when a connection broke: who is gone, where known."""
    first = str(error).splitlines()[0] if str(error) else type(error).__name__
    gone: list[str] = []
    with contextlib.suppress(Exception):  # the store may have gone with them
        time.sleep(0.2)  # a process that dies closes its connections before it is gone
        notes = _notes(dist.distributed_c10d._get_default_store(), ranks)
        gone = [f"rank {r} (last in {n['where']})" for r, n in notes.items() if n is not None and _gone(n)]
    who = f"{', '.join(gone)} has exited" if gone else "another rank has failed or exited"
    return f"rank {runtime.rank()} cannot go on in {what}: {who}; its own output says why ({first})"


# --- the thread -----------------------------------------------------------------------------------------------------


def _thread_runs() -> None:
    global _thread, _stop
    if _thread is None or not _thread.is_alive():
        store = dist.distributed_c10d._get_default_store()
        with contextlib.suppress(Exception):
            store = store.clone()  # a connection of its own, where the store has such: nobody else's wait holds it up
        _stop = threading.Event()
        arguments = (store, dist.group.WORLD, _stop)
        _thread = threading.Thread(target=_look, args=arguments, name="fullshard-watch", daemon=True)
        _thread.start()


def _look(store: Any, world: Any, stop: threading.Event) -> None:
    told: tuple[int, float] = (0, 0.0)  # which wait was reported, and when
    suspects: dict[str, Any] = {}
    published = ""
    while not stop.wait(POLL) and dist.group.WORLD is world:
        try:
            note = json.dumps(_note())
            if note != published:
                store.set(f"fullshard/watch/{runtime.rank()}", note)
                published = note
            label, since = _here.waiting, _here.since
            if label is None or time.monotonic() - since < REPORT_AFTER:
                continue
            notes = _notes(store, label.watch.ranks)
            fatal = _fatal(label, notes)
            if fatal and suspects.get("why") == fatal:  # seen twice: not a note that was just out of date
                _abort(label, fatal + "\n" + _report(label, since, notes))
            suspects["why"] = fatal
            again = told[0] != id(label) or time.monotonic() - told[1] > REPEAT_AFTER
            if again and _speaks(label, notes):
                told = (id(label), time.monotonic())
                runtime.get_logger().warning(_report(label, since, notes))
        except Exception as error:  # a store that goes away with rank 0 must not take this rank with it
            runtime.get_logger().debug("watch: %s", error)
            if not dist.is_initialized():
                return


def _note() -> dict[str, Any]:
    label = _here.waiting
    return {
        "where": _here.text(),
        "waiting": [label.watch.key, label.number] if label else None,
        "done": {key: dict(watch.history) for key, watch in list(_here.watches.items())},
        "last": {key: watch.number for key, watch in list(_here.watches.items())},
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "exited": False,
    }


@atexit.register
def _say_goodbye() -> None:
    _stop.set()
    if _thread is not None:
        _thread.join(2 * POLL)  # a thread that is inside torch when the interpreter ends takes the process with it
    if _thread is not None and dist.is_initialized():
        with contextlib.suppress(Exception):
            store = dist.distributed_c10d._get_default_store()
            store.set(f"fullshard/watch/{runtime.rank()}", json.dumps({**_note(), "exited": True}))


def _notes(store: Any, ranks: tuple[int, ...]) -> dict[int, dict[str, Any] | None]:
    found: dict[int, dict[str, Any] | None] = {}
    for rank in ranks:
        key = f"fullshard/watch/{rank}"
        found[rank] = json.loads(store.get(key)) if store.check([key]) else None
    return found


def _gone(note: dict[str, Any]) -> bool:
    if note["exited"]:
        return True
    if note["host"] != socket.gethostname():
        return False
    try:
        os.kill(note["pid"], 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    with contextlib.suppress(OSError):  # a process that nobody has waited for yet still has its number
        return Path(f"/proc/{note['pid']}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    return False


def _entered(label: Label, note: dict[str, Any] | None) -> bool:
    return note is not None and note["last"].get(label.watch.key, 0) >= label.number


def _fatal(label: Label, notes: dict[int, dict[str, Any] | None]) -> str:
    """Why an operation can never finish; empty if it may."""
    me = runtime.rank()
    for rank, note in notes.items():
        if rank == me or note is None:
            continue
        if _gone(note):
            return f"rank {me} waits in {label.what}, but rank {rank} has exited (it was last in {note['where']})"
        theirs = note["done"].get(label.watch.key, {}).get(str(label.number))
        if theirs is not None and kind_of(theirs) != kind_of(label.what):
            return f"ranks entered different operations: rank {me} is in {label.what}, rank {rank} in {theirs}"
        if not _entered(label, note) and note["waiting"] is not None:
            key, number = note["waiting"]
            mine = _here.watches.get(key)
            if mine is not None and me in mine.ranks and mine.number < number:
                return (
                    f"ranks entered different operations: rank {me} is in {label.what}, rank {rank} in {note['where']}"
                )
    return ""


def _report(label: Label, since: float, notes: dict[int, dict[str, Any] | None]) -> str:
    missing = [rank for rank, note in notes.items() if not _entered(label, note)]
    lines = [
        f"waiting for {time.monotonic() - since:.0f} s in {label.what}: "
        + (f"not entered by rank(s) {', '.join(map(str, missing))}" if missing else "all ranks have entered it")
    ]
    for rank, note in notes.items():
        where = note["where"] if note else "has not communicated yet"
        lines.append(f"  rank {rank}: {where}{'' if note is None or note['waiting'] is None else ' (waiting)'}")
    return "\n".join(lines)


def _speaks(label: Label, notes: dict[int, dict[str, Any] | None]) -> bool:
    """One rank of those that wait reports: the lowest."""
    waiting = [r for r, n in notes.items() if n is not None and n["waiting"] == [label.watch.key, label.number]]
    return not waiting or runtime.rank() <= min(waiting)


def _abort(label: Label, verdict: str) -> None:
    """Make the wait raise."""
    _here.verdict = verdict
    group = label.watch.group
    runtime.get_logger(all_ranks=True).error(verdict)
    if dist.get_backend(group) == "nccl":
        group._get_backend(runtime.device()).abort()
        return
    # Gloo has no abort. A receive that times out closes its connections, which ends every wait on them.
    other = next(i for i, rank in enumerate(label.watch.ranks) if rank != runtime.rank())
    with contextlib.suppress(RuntimeError):
        group.recv([torch.empty(1)], other, (1 << 30) + 1).wait(timedelta(milliseconds=1))
