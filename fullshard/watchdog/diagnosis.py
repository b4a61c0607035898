"""What the ranks' notes say together: which rank is late, and whether a wait can ever end.

A note is what a rank tells of itself while somebody waits: where it is, what it waits for, and its last operations on
each communicator. Everything here is a function of notes; how they travel is in `threads.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from fullshard.watchdog.heartbeat import Loss

NAMED = 16
"""How many ranks a report shows."""


@dataclass
class Wait:
    """One operation that a rank waits in."""

    key: str
    """The communicator."""
    number: int
    what: str
    seconds: float
    followed: bool = False
    """Whether the device waits, not the host: it may then also be busy with what was to be computed before."""
    outside: bool = False
    """Whether the engine did not issue it (see `torch_collectives.py`): it has no number."""


@dataclass
class Note:
    """What a rank tells of itself."""

    asked: int
    """Which request it answers."""
    where: str
    waits: list[Wait] = field(default_factory=list)
    last: dict[str, int] = field(default_factory=dict)
    """The number of the last operation issued on each communicator."""
    done: dict[str, dict[str, str]] = field(default_factory=dict)
    """Some of its operations on each communicator, by number."""

    def text(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def parse(cls, text: str) -> Note:
        found = json.loads(text)
        return cls(**{**found, "waits": [Wait(**w) for w in found["waits"]]})


@dataclass(frozen=True)
class Verdict:
    """Why the run cannot go on."""

    text: str
    lost: bool
    """Whether a rank is gone; else the ranks disagree about what to do."""
    at: str = ""
    """Where a rank was that lost it."""


def kind_of(what: str) -> str:
    """An operation without its step: what must agree between ranks."""
    return what.split(", ", 1)[1]


def judge(notes: Mapping[int, Note], losses: Mapping[int, Loss], connection_broke: bool = False) -> Verdict | None:
    """Why some wait can never end; None if all may. With a broken connection, silence is enough to be gone."""
    members: dict[str, list[int]] = {}
    waiting: dict[tuple[str, int], list[tuple[int, Wait]]] = {}
    for rank, note in notes.items():
        for key in note.last:
            members.setdefault(key, []).append(rank)
        for wait in note.waits:
            waiting.setdefault((wait.key, wait.number), []).append((rank, wait))
    gone = [loss for loss in losses.values() if _is_gone(loss, connection_broke)]
    for (key, number), waiters in waiting.items():
        rank, wait = waiters[0]
        for loss in gone:
            if loss.how != "exited" or not wait.outside and _misses(loss, key, number, notes):
                return Verdict(f"rank {rank} waits in {wait.what}, but {loss}", lost=True, at=wait.what)
        for other in members.get(key, ()):
            if other != rank and (told := _disagree(rank, wait, other, waiters, notes)):
                return Verdict(told, lost=False)
    return None


def _is_gone(loss: Loss, connection_broke: bool) -> bool:
    return loss.how in ("dead", "lost", "exited") or connection_broke and loss.how in ("silent", "stopped")


def _misses(loss: Loss, key: str, number: int, notes: Mapping[int, Note]) -> bool:
    """Whether an operation waits for a rank that has exited."""
    note = notes.get(loss.rank)
    return belongs(loss.rank, key) and (note is None or note.last.get(key, 0) < number)


def belongs(rank: int, key: str) -> bool:
    """Whether a rank is one of a communicator's, as its key says (see `groups.short_name`); True if it does not say."""
    found = re.fullmatch(r"(\d+)-(\d+)(?::(\d+))?", key.rpartition("/")[2])
    if found is None:
        return True
    first, last, step = int(found[1]), int(found[2]), int(found[3] or 1)
    return rank in range(first, last + 1, step)


def _disagree(rank: int, wait: Wait, other: int, waiters: Sequence[tuple[int, Wait]], notes: Mapping[int, Note]) -> str:
    """How two ranks went different ways; empty if they may still meet."""
    mine, theirs = notes[rank], notes[other]
    for number, what in mine.done.get(wait.key, {}).items():
        their = theirs.done.get(wait.key, {}).get(number)
        if int(number) >= wait.number and their is not None and kind_of(their) != kind_of(what):
            return f"ranks entered different operations: rank {rank} is in {what}, rank {other} in {their}"
    if theirs.last.get(wait.key, 0) >= wait.number:
        return ""
    for their_wait in theirs.waits:
        for who, _ in waiters[:NAMED]:
            if notes[who].last.get(their_wait.key, their_wait.number) < their_wait.number:
                return (
                    f"ranks entered different operations: rank {who} is in {wait.what}, rank {other} in "
                    f"{their_wait.what}"
                )
    return ""


def missing(wait: Wait, ranks: Sequence[int], notes: Mapping[int, Note]) -> list[int]:
    """The ranks that have not entered an operation, as far as is known."""
    if wait.outside:
        return [rank for rank in ranks if rank not in notes or not any(w.outside for w in notes[rank].waits)]
    return [rank for rank in ranks if rank not in notes or notes[rank].last.get(wait.key, 0) < wait.number]


def report(
    wait: Wait, ranks: Sequence[int], notes: Mapping[int, Note], losses: Mapping[int, Loss], last: Mapping[int, str]
) -> str:
    """A wait in words: who has not come, and where everybody is. `last` says it of ranks without a note."""
    late = missing(wait, ranks, notes)
    named = ", ".join(map(str, late[:NAMED])) + (f" and {len(late) - NAMED} more" if len(late) > NAMED else "")
    lines = [
        f"waiting for {wait.seconds:.0f} s in {wait.what}: "
        + (f"not entered by rank(s) {named}" if late else "all ranks have entered it")
    ]
    shown = list(ranks) if len(ranks) <= NAMED else sorted({*late[:NAMED], *[r for r in ranks if r not in late][:1]})
    for rank in shown:
        if rank in losses and losses[rank].how != "back":
            lines.append(f"  {losses[rank]}")
        elif rank in notes:
            lines.append(f"  rank {rank}: {notes[rank].where}{' (waiting)' if notes[rank].waits else ''}")
        else:
            lines.append(f"  rank {rank}: {last.get(rank) or 'has not communicated yet'}")
    return "\n".join(lines)
