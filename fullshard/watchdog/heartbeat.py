"""Which ranks are alive: heartbeats through the job's store, and what the system knows of processes on this node.

Every rank counts up a small key, and looks at its successor's only (a ring), so that a rank's traffic does not grow
with the number of ranks. Processes of the same node are also looked up in /proc. What follows from a rank that is gone
is decided in `threads.py`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fullshard.processes import Process, state_of, this_process

BEAT = 1.0
"""Seconds between two heartbeats of a rank, in jobs of up to 2,048 ranks."""
SLOWEST_BEAT = 1.5
"""The same in the largest jobs, as a multiple of `BEAT`."""
SILENT_AFTER = 6.0
"""Seconds without a heartbeat after which a rank is named."""
LOST_AFTER = 30.0
"""Seconds without a heartbeat after which a rank on another node, or a stopped one, is given up."""
IN_A_ROW = 64
"""How many ranks that follow each other one rank looks at, when all of them are silent."""


def beat_every(world: int) -> float:
    """Seconds between two heartbeats in a job of this many ranks."""
    return BEAT * min(SLOWEST_BEAT, max(1.0, world / 2048))


# --- the store --------------------------------------------------------------------------------------------------------


class Board:
    """The watch's keys in the job's store."""

    def __init__(self, store: Any):
        self._store = store
        self._there: set[str] = set()
        self._many = True

    def put(self, key: str, text: str) -> None:
        self._store.set(f"watch/{key}", text)

    def add(self, key: str, amount: int) -> int:
        """Count up a number that all ranks share; the number after that."""
        return int(self._store.add(f"watch/{key}", amount))

    def read(self, keys: Sequence[str]) -> dict[str, str]:
        """The values of those keys that exist, in as few calls as that takes: keys seen before are not looked for."""
        unseen = [key for key in keys if key not in self._there]
        self._there.update(self._existing(unseen))
        known = [key for key in keys if key in self._there]
        return dict(zip(known, self._values(known), strict=True))

    def _existing(self, keys: list[str]) -> list[str]:
        if not keys:
            return []
        if self._store.check([f"watch/{key}" for key in keys]):
            return keys
        if len(keys) == 1:
            return []
        half = len(keys) // 2
        return self._existing(keys[:half]) + self._existing(keys[half:])

    def _values(self, keys: list[str]) -> list[str]:
        names = [f"watch/{key}" for key in keys]
        if self._many and len(names) > 1:
            try:
                return [bytes(value).decode() for value in self._store.multi_get(names)]
            except (NotImplementedError, RuntimeError) as error:
                if "not implemented" not in str(error).lower() and "extended api" not in str(error).lower():
                    raise
                self._many = False  # a store of files, for example
        return [bytes(self._store.get(name)).decode() for name in names]


# --- the ring ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loss:
    """What became of a rank's heartbeat."""

    rank: int
    how: str
    """"dead": the process ended without a word; "exited": it said so; "stopped", "busy", "silent": no heartbeat, and
    the process is stopped, is alive, is on another node; "lost": for long; "back": it beats again."""
    where: str
    """Where the rank was at its last heartbeat."""
    process: str = ""

    def text(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def parse(cls, text: str) -> Loss:
        return cls(**json.loads(text))

    def __str__(self) -> str:
        told = {
            "dead": f"rank {self.rank}{self.process} ended without a word, as a process does that is killed",
            "exited": f"rank {self.rank} has exited",
            "stopped": f"rank {self.rank}{self.process} is stopped (SIGSTOP, or a debugger)",
            "busy": f"rank {self.rank}{self.process} is alive, but its Python threads do not run",
            "silent": f"rank {self.rank}{self.process} gives no sign of life",
            "lost": f"rank {self.rank}{self.process} has given no sign of life for {LOST_AFTER:g} s",
            "back": f"rank {self.rank} is back",
        }[self.how]
        return f"{told} (it was last in {self.where})"


@dataclass
class _Heard:
    """A rank's heartbeat as this rank sees it."""

    value: str = ""
    since: float = 0.0
    """When it last changed, on this rank's clock: clocks of nodes differ."""
    process: Process | None = None
    how: str = "back"


class Ring:
    """This rank's heartbeat, and those of the ranks that follow it."""

    def __init__(self, board: Board, rank: int, world: int):
        self.board, self.rank, self.world = board, rank, world
        self._count = 0
        self._heard: dict[int, _Heard] = {}
        self._looked = 0.0
        board.put(f"process/{rank}", this_process().text())

    def beat(self, where: str) -> None:
        self._count += 1
        self.board.put(f"beat/{self.rank}", f"{self._count} {where}")

    def part(self, where: str) -> None:
        """The last heartbeat: this rank leaves in order."""
        self.board.put(f"beat/{self.rank}", f"exited {where}")

    def watched(self) -> list[int]:
        """The successor; those after it too while it and they are silent or gone."""
        ranks = [(self.rank + 1) % self.world]
        while self._heard.get(ranks[-1], _Heard()).how != "back" and len(ranks) < min(IN_A_ROW, self.world - 1):
            ranks.append((ranks[-1] + 1) % self.world)
        return ranks

    def look(self, values: dict[str, str], now: float) -> list[Loss]:
        """What changed among the ranks watched, given their heartbeats."""
        found = []
        held_up, self._looked = now - self._looked > SILENT_AFTER, now
        for rank in self.watched():
            value = values.get(f"beat/{rank}", "")
            heard = self._heard.setdefault(rank, _Heard(since=now))
            if value != heard.value or held_up:  # this rank's silence is not the other's: both may have been stopped
                heard.value, heard.since = value, now
            if heard.process is None:
                told = self.board.read([f"process/{rank}"]).get(f"process/{rank}")
                heard.process = Process.parse(told) if told else None
            how = self._how(heard, now)
            if how != heard.how:
                heard.how = how
                found.append(Loss(rank, how, value.partition(" ")[2] or "its start", str(heard.process or "")))
        return found

    def _how(self, heard: _Heard, now: float) -> str:
        if heard.value.startswith("exited"):
            return "exited"
        state = state_of(heard.process)
        if state == "dead":
            return "dead"
        quiet = now - heard.since
        if quiet < SILENT_AFTER or not heard.value and state != "stopped":
            return "back"  # or has not begun
        if state == "alive":
            return "busy"
        if quiet >= LOST_AFTER:
            return "lost"
        return "stopped" if state == "stopped" else "silent"
