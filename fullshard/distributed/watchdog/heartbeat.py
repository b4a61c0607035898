"""Which ranks are alive: heartbeats through the job's store, and the state of processes on this node.

Every rank increments a small key and reads only its successor's (a ring), so a rank's traffic does not grow with the
number of ranks. Processes of the same node are also looked up in /proc. `investigate.py` decides what follows when a
rank is gone.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from fullshard.distributed.job_store import JobStore, parse
from fullshard.distributed.processes import Process, state_of, this_process

BEAT = 1.0
"""Seconds between two heartbeats of a rank, in jobs of up to 2,048 ranks."""
SLOWEST_BEAT = 1.5
"""The same in the largest jobs, as a multiple of `BEAT`."""
SILENT_AFTER = 6.0
"""Seconds without a heartbeat after which a rank is reported."""
LOST_AFTER = 30.0
"""Seconds without a heartbeat after which a rank on another node, or a stopped one, counts as lost."""
SUCCESSORS = 64
"""How many successive ranks one rank reads, while all of them are silent."""


def beat_every(world: int) -> float:
    """Seconds between two heartbeats in a job of this many ranks."""
    return BEAT * min(SLOWEST_BEAT, max(1.0, world / 2048))


# --- the ring ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Liveness:
    """The state of a rank, judging by its heartbeat and its process."""

    rank: int
    state: str
    """
    - "dead": the process ended without reporting it; "exited": it reported its end
    - "stopped", "busy", "silent": no heartbeat, and the process is stopped, is alive, is on another node
    - "lost": no heartbeat for `LOST_AFTER` seconds
    - "back": it sends heartbeats again
    """
    position: str
    """The rank's position at its last heartbeat."""
    process: str = ""

    def text(self) -> str:
        """The liveness as JSON; see `parse`."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def parse(cls, text: str) -> Liveness:
        """The liveness from its JSON."""
        return cls(**parse(text))

    def __str__(self) -> str:
        name = f"rank {self.rank}{self.process}"
        state = {
            "dead": f"{name} ended without an error of its own, like a killed process",
            "exited": f"rank {self.rank} has exited",
            "stopped": f"{name} is stopped (SIGSTOP, or a debugger)",
            "busy": f"{name} is alive, but its Python threads do not run",
            "silent": f"{name} sends no heartbeat",
            "lost": f"{name} has sent no heartbeat for {LOST_AFTER:g} s",
            "back": f"rank {self.rank} is back",
        }[self.state]
        return f"{state} (last seen in {self.position})"


@dataclass
class _Heartbeat:
    """A rank's heartbeat as this rank sees it."""

    value: str = ""
    changed_at: float = 0.0
    """On this rank's clock: clocks of nodes differ."""
    process: Process | None = None
    state: str = "back"


class HeartbeatRing:
    """This rank's heartbeat, and those of the ranks that follow it."""

    def __init__(self, store: JobStore, rank: int, world: int):
        self.store, self.rank, self.world = store, rank, world
        self._count = 0
        self._heartbeats: dict[int, _Heartbeat] = {}
        self._checked_at = 0.0
        store.put(f"process/{rank}", this_process().text())

    def beat(self, position: str) -> None:
        """Publish that this rank is alive, and where its program is."""
        self._count += 1
        self.store.put(f"beat/{self.rank}", f"{self._count} {position}")

    def leave(self, position: str) -> None:
        """The last heartbeat: this rank exits normally."""
        self.store.put(f"beat/{self.rank}", f"exited {position}")

    def watched(self) -> list[int]:
        """The successor, and those after it as long as all before them are silent or gone."""
        ranks = [(self.rank + 1) % self.world]
        while self._heartbeats.get(ranks[-1], _Heartbeat()).state != "back" and len(ranks) < min(
            SUCCESSORS, self.world - 1
        ):
            ranks.append((ranks[-1] + 1) % self.world)
        return ranks

    def check(self, values: dict[str, str], now: float) -> list[Liveness]:
        """The watched ranks whose state changed, given their heartbeats."""
        changes = []
        # If this rank itself was stopped for a while, the others' silence means nothing: all may have been stopped.
        was_stopped, self._checked_at = now - self._checked_at > SILENT_AFTER, now
        for rank in self.watched():
            value = values.get(f"beat/{rank}", "")
            beat = self._heartbeats.setdefault(rank, _Heartbeat(changed_at=now))
            if value != beat.value or was_stopped:
                beat.value, beat.changed_at = value, now
            if beat.process is None:
                text = self.store.read([f"process/{rank}"]).get(f"process/{rank}")
                beat.process = Process.parse(text) if text else None
            state = self._state(beat, now)
            if state != beat.state:
                beat.state = state
                changes.append(Liveness(rank, state, value.partition(" ")[2] or "its start", str(beat.process or "")))
        return changes

    def _state(self, beat: _Heartbeat, now: float) -> str:
        if beat.value.startswith("exited"):
            return "exited"
        process = state_of(beat.process)
        if process == "dead":
            return "dead"
        quiet = now - beat.changed_at
        if quiet < SILENT_AFTER or not beat.value and process != "stopped":
            return "back"  # or has not started
        if process == "alive":
            return "busy"
        if quiet >= LOST_AFTER:
            return "lost"
        return "stopped" if process == "stopped" else "silent"
