"""What the ranks' statuses show together: which rank is late, and whether a wait can ever end.

A rank publishes its status while some rank waits: where it is, what it waits for, and its last operations on each
communicator. Everything here is a pure function of statuses; `messages.py` sends and receives them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from fullshard.distributed.job_store import parse
from fullshard.distributed.watchdog.heartbeat import Liveness

SHOWN = 16
"""How many ranks a report lists."""


@dataclass
class Wait:
    """One operation that a rank waits for."""

    key: str
    """The communicator."""
    number: int
    what: str
    seconds: float
    on_device: bool = False
    """Whether the device waits, not the host. The device may then still be busy with earlier computation."""
    external: bool = False
    """Whether the engine did not issue it (see `external_waits.py`): it has no number."""


@dataclass
class RankStatus:
    """What a rank publishes about itself."""

    request: int
    """The request that it answers."""
    position: str
    waits: list[Wait] = field(default_factory=list)
    last: dict[str, int] = field(default_factory=dict)
    """The number of the last operation issued on each communicator."""
    operations: dict[str, dict[str, str]] = field(default_factory=dict)
    """Some of its operations on each communicator, by number."""

    def text(self) -> str:
        """The status as JSON; see `parse`."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def parse(cls, text: str) -> RankStatus:
        """A status from its JSON."""
        fields = parse(text)
        return cls(**{**fields, "waits": [Wait(**wait) for wait in fields["waits"]]})


@dataclass(frozen=True)
class Failure:
    """Why the run cannot continue."""

    text: str
    rank_lost: bool
    """Whether a rank is gone; otherwise ranks entered different operations."""
    at: str = ""
    """The position of a rank that waited for the lost one."""


def unexplained_failure(rank: int, what: str, reason: str) -> Failure:
    """A failure for which no rank could be named."""
    text = f"rank {rank} cannot continue in {what}: another rank failed, or did not arrive in time ({reason})"
    return Failure(text, True, what)


def kind_of(what: str) -> str:
    """An operation without its step: the part that must be equal on all ranks."""
    return what.split(", ", 1)[1]


def find_failure(
    statuses: Mapping[int, RankStatus], liveness: Mapping[int, Liveness], connection_broke: bool = False
) -> Failure | None:
    """Why some wait can never end; None if every wait may. After a broken connection, a silent rank counts as gone."""
    members: dict[str, list[int]] = {}
    waiting: dict[tuple[str, int], list[tuple[int, Wait]]] = {}
    for rank, status in statuses.items():
        for key in status.last:
            members.setdefault(key, []).append(rank)
        for wait in status.waits:
            waiting.setdefault((wait.key, wait.number), []).append((rank, wait))
    lost_peers = [peer for peer in liveness.values() if _is_gone(peer, connection_broke)]
    for (key, number), waiters in waiting.items():
        rank, wait = waiters[0]
        for peer in lost_peers:
            if peer.state != "exited" or not wait.external and _is_missed(peer, key, number, statuses):
                return Failure(f"rank {rank} waits in {wait.what}, but {peer}", rank_lost=True, at=wait.what)
        for other in members.get(key, ()):
            if other != rank and (difference := _difference(rank, wait, other, waiters, statuses)):
                return Failure(difference, rank_lost=False)
    return None


def _is_gone(peer: Liveness, connection_broke: bool) -> bool:
    return peer.state in ("dead", "lost", "exited") or connection_broke and peer.state in ("silent", "stopped")


def _is_missed(peer: Liveness, key: str, number: int, statuses: Mapping[int, RankStatus]) -> bool:
    """Whether an operation waits for a rank that has exited."""
    status = statuses.get(peer.rank)
    return is_member(peer.rank, key) and (status is None or status.last.get(key, 0) < number)


def is_member(rank: int, key: str) -> bool:
    """Whether a rank belongs to a communicator, judging by its key (see `groups.short_name`); True if unknown."""
    match = re.fullmatch(r"(\d+)-(\d+)(?::(\d+))?", key.rpartition("/")[2])
    if match is None:
        return True
    first, last, step = int(match[1]), int(match[2]), int(match[3] or 1)
    return rank in range(first, last + 1, step)


def _difference(
    rank: int, wait: Wait, other: int, waiters: Sequence[tuple[int, Wait]], statuses: Mapping[int, RankStatus]
) -> str:
    """How two ranks entered different operations; empty if the wait may still end."""
    mine, theirs = statuses[rank], statuses[other]
    for number, what in mine.operations.get(wait.key, {}).items():
        their = theirs.operations.get(wait.key, {}).get(number)
        if int(number) >= wait.number and their is not None and kind_of(their) != kind_of(what):
            return f"ranks entered different operations: rank {rank} is in {what}, rank {other} in {their}"
    if theirs.last.get(wait.key, 0) >= wait.number:
        return ""
    for their_wait in theirs.waits:
        for waiter, _ in waiters[:SHOWN]:
            if statuses[waiter].last.get(their_wait.key, their_wait.number) < their_wait.number:
                return (
                    f"ranks entered different operations: rank {waiter} is in {wait.what}, rank {other} in "
                    f"{their_wait.what}"
                )
    return ""


def late_ranks(wait: Wait, ranks: Sequence[int], statuses: Mapping[int, RankStatus]) -> list[int]:
    """The ranks that have not entered an operation, as far as is known."""
    if wait.external:
        return [rank for rank in ranks if rank not in statuses or not any(w.external for w in statuses[rank].waits)]
    return [rank for rank in ranks if rank not in statuses or statuses[rank].last.get(wait.key, 0) < wait.number]


def ranks_elsewhere(wait: Wait, ranks: Sequence[int], statuses: Mapping[int, RankStatus]) -> list[int]:
    """The ranks that have entered another operation in its place, as far as is known."""
    entered = _operations_from(wait, ranks, statuses).get(wait.number, {})
    return [rank for rank, what in entered.items() if kind_of(what) != kind_of(wait.what)]


def _operations_from(wait: Wait, ranks: Sequence[int], statuses: Mapping[int, RankStatus]) -> dict[int, dict[int, str]]:
    """The known operations on the communicator from the one that is waited for: by number and rank."""
    entered: dict[int, dict[int, str]] = {}
    for rank in ranks if not wait.external else ():
        for number, what in statuses[rank].operations.get(wait.key, {}).items() if rank in statuses else ():
            if int(number) >= wait.number:
                entered.setdefault(int(number), {})[rank] = what
    return entered


def _state_of(
    wait: Wait, late: list[int], elsewhere: list[int], ranks: Sequence[int], statuses: Mapping[int, RankStatus]
) -> str:
    """Which ranks have entered an operation."""
    clauses = [f"not entered by rank(s) {_named(late)}"] if late else []
    if elsewhere:
        clauses.append(f"rank(s) {_named(elsewhere)} entered another operation in its place")
    if clauses:
        return ", ".join(clauses)
    after = _operations_from(wait, ranks, statuses).values()
    parted = any(len({kind_of(what) for what in entered.values()}) > 1 for entered in after)
    return "all ranks have entered it" + (", and different operations after it" if parted else "")


def describe_wait(
    wait: Wait,
    ranks: Sequence[int],
    statuses: Mapping[int, RankStatus],
    liveness: Mapping[int, Liveness],
    last_seen: Mapping[int, str],
) -> str:
    """A report: which ranks are late, and where every rank is. `last_seen` is for ranks without a status."""
    late, elsewhere = late_ranks(wait, ranks, statuses), ranks_elsewhere(wait, ranks, statuses)
    lines = [f"waiting for {wait.seconds:.0f} s in {wait.what}: {_state_of(wait, late, elsewhere, ranks, statuses)}"]
    late += elsewhere
    shown = list(ranks) if len(ranks) <= SHOWN else sorted({*late[:SHOWN], *[r for r in ranks if r not in late][:1]})
    for rank in shown:
        if rank in liveness and liveness[rank].state != "back":
            lines.append(f"  {liveness[rank]}")
        elif rank in statuses:
            lines.append(f"  rank {rank}: {statuses[rank].position}{' (waiting)' if statuses[rank].waits else ''}")
        else:
            lines.append(f"  rank {rank}: {last_seen.get(rank) or 'has not communicated yet'}")
    return "\n".join(lines)


def _named(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:SHOWN])) + (f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else "")
