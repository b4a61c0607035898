"""Counts the watchdog's store traffic: calls and bytes per rank and second, normally and while a rank is missing.

It is a simulation without processes and clocks: each rank's store thread is called round by round on a counting store.
With many ranks, only a sample is simulated in full (`sampled`); the others only update their heartbeats.

    python benchmarks/watch_traffic.py
"""

from __future__ import annotations

import json
import sys
from typing import Any
from unittest import mock

import torch.distributed as dist

from fullshard.distributed import runtime
from fullshard.distributed.watchdog import rank_state, threads, watch
from fullshard.distributed.watchdog.heartbeat import HeartbeatRing, beat_every

UNITS = 80
"""Units of the model whose operations are in the statuses."""


class CountingStore:
    """A store that counts what one rank sends and receives."""

    def __init__(self, shared: Any):
        self.shared, self.calls, self.bytes = shared, 0, 0

    def _count(self, *parts: Any) -> None:
        self.calls += 1
        self.bytes += sum(len(part) for part in parts)

    def set(self, key: str, value: bytes) -> None:
        self._count(key, value)
        self.shared.set(key, value)

    def get(self, key: str) -> bytes:
        value = self.shared.get(key)
        self._count(key, value)
        return bytes(value)

    def compare_set(self, key: str, expected: bytes, value: bytes) -> bytes:
        found = bytes(self.shared.compare_set(key, expected, value))
        self._count(key, expected, value, found)
        return found

    def check(self, keys: list[str]) -> bool:
        self._count(*keys)
        return bool(self.shared.check(keys))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        values = [bytes(self.shared.get(key)) for key in keys]
        self._count(*keys, *values)
        return values


class Rank:
    """One rank's part of the watch, with a state of its own."""

    def __init__(self, rank: int, world: int, shared: Any):
        self.rank, self.store, self.state = rank, CountingStore(shared), rank_state.RankState()
        with mock.patch.multiple(runtime, rank=lambda: rank, world_size=lambda: world):
            self.threads = threads.WatchThreads(self.store, None)
        self.ring = HeartbeatRing(self.threads.messages.store, rank, world)
        self.threads.messages.store.add("news", 0)
        with mock.patch.object(rank_state, "current", self.state), mock.patch.object(threads, "ensure_started"):
            everyone = tuple(range(world))
            gather, *others = [watch.watch_for(purpose, everyone, None) for purpose in ("gather", "reduce", "replica")]
            for step in range(2):
                for unit in range(UNITS):
                    watch.at(step, f"model.layers.{unit}", "gather")
                    self.label = gather.issue()
                    for other in others:
                        other.issue()

    def round(self, now: float) -> None:
        quiet = mock.patch.object(runtime, "get_logger")
        with mock.patch.object(rank_state, "current", self.state), quiet:
            self.threads._beat(self.ring, now)


def measure(world: int, seconds: float = 30.0, sampled: int = 8) -> dict[str, Any]:
    """Mean traffic of a rank, and of the busiest one."""
    shared = dist.HashStore()
    others = runtime.watch_store(shared)
    chosen = sorted({int(i * world / sampled) for i in range(sampled)} | {world - 2, world - 1})
    ranks = [Rank(rank, world, shared) for rank in chosen]
    status = published_status(ranks[0])
    for rank in set(range(world)) - set(chosen):  # the others answer too; each has a heartbeat and a status
        others.put(f"beat/{rank}", "1 step 2, unit model.layers.79, gather")
        others.put(f"process/{rank}", f"node {rank} 5 host")
        others.put(f"status/{rank}", status)
    others.put(f"process/{world - 1}", "elsewhere 1 5 host")  # the one that will be missing
    beat = beat_every(world)
    found: dict[str, Any] = {"ranks": world, "beat_s": beat, "status_bytes": len(status)}
    now = 1000.0
    for state in ("calm", "missing"):
        for rank in ranks:
            rank.round(now)  # what is read once
            rank.store.calls = rank.store.bytes = 0
        here = ranks[:-1] if state == "missing" else ranks
        for _ in range(int(seconds / beat)):
            now += beat
            for rank in set(range(world)) - set(chosen):
                others.put(f"beat/{rank}", f"{now:.0f} step 2, unit model.layers.79, gather")
            for rank in here:
                if state == "missing":
                    rank.state.waiting = (rank.label, 1000.0 + int(seconds / beat) * beat)
                    rank.state.failure = None
                rank.round(now)
        ordinary = [rank for rank in here if not rank.threads.investigation.leads]
        found[state] = {
            "calls": round(sum(r.store.calls for r in ordinary) / len(ordinary) / seconds, 2),
            "bytes": round(sum(r.store.bytes for r in ordinary) / len(ordinary) / seconds),
            "busiest_calls": round(max(r.store.calls for r in here) / seconds, 2),
            "busiest_bytes": round(max(r.store.bytes for r in here) / seconds),
        }
    return found


def published_status(rank: Rank) -> str:
    with mock.patch.object(rank_state, "current", rank.state):
        return rank_state.status(1 << 60, 0.0).text()


if __name__ == "__main__":
    json.dump({"what": "store traffic per rank and second", "found": [measure(n) for n in (8, 256, 4096)]}, sys.stdout)
    print()
