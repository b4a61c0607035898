"""The watchdog's threads: one exchanges messages through the job's store, one watches this rank and ends it if needed.

Store traffic per rank and heartbeat is one `set` and one `multi_get` of two small keys, whatever the number of ranks.
There is more only while a rank waits for long (see `investigate.py`).

The store may be held by a process that is stopped; a call then never returns. So the second thread never touches it.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from typing import Any

import torch.distributed as dist

from fullshard.device.torch_private import default_store
from fullshard.distributed import groups, runtime
from fullshard.distributed.processes import Process, state_of
from fullshard.distributed.watchdog import abort, heartbeat, investigate, rank_state
from fullshard.distributed.watchdog.diagnosis import Failure
from fullshard.distributed.watchdog.heartbeat import HeartbeatRing, Liveness, beat_every
from fullshard.distributed.watchdog.investigate import Investigation
from fullshard.distributed.watchdog.messages import Messages

POLL = 0.5
"""Seconds between two checks of what this rank waits for; nothing is sent for that."""


class WatchThreads:
    """The threads of one process in one job."""

    def __init__(self, store: Any, world: Any):
        self.world = world
        self.messages = Messages(store)
        self.investigation = Investigation(self.messages)
        self._rank_0: Process | None = None
        """The process of rank 0, which may hold the store."""
        self._stop = threading.Event()
        self._store_answered = time.monotonic()
        self._store_error = ""
        self._store_reported = False
        self._threads = [
            threading.Thread(target=self._exchange_messages, name="fullshard-watch-store", daemon=True),
            threading.Thread(target=self._watch_rank, name="fullshard-watch", daemon=True),
        ]

    @classmethod
    def start(cls) -> WatchThreads | None:
        """Start the threads of this process; None where there are no other ranks."""
        store, world = default_store(), dist.group.WORLD
        if runtime.world_size() == 1 or groups.is_simulated(world):
            return None
        with contextlib.suppress(Exception):
            store = store.clone()  # a connection of its own, where the store has such: no other wait blocks it
        watch = cls(store, world)
        for thread in watch._threads:
            thread.start()
        return watch

    def running(self) -> bool:
        """Whether the threads watch the current process group."""
        return dist.group.WORLD is self.world and not self._stop.is_set()

    def forget(self) -> None:
        """Ignore the failures so far."""
        self.messages.skip_failures()
        self.investigation.end()

    def leave(self) -> None:
        """Report that this rank exits, and end the threads."""
        self._stop.set()
        self.messages.wake.set()
        for thread in self._threads:
            # A thread that is inside torch when the interpreter ends takes the process with it.
            if thread is not threading.current_thread():
                thread.join(2 * heartbeat.BEAT)

    # --- the store --------------------------------------------------------------------------------------------------

    def _exchange_messages(self) -> None:
        messages, ring = self.messages, None
        while not self._stop.is_set() and dist.group.WORLD is self.world:
            try:
                if ring is None:
                    ring = HeartbeatRing(messages.store, messages.rank, messages.size)
                    messages.open()
                messages.publish_failure()
                self._beat(ring, time.monotonic())
                self._store_answered, self._store_error = time.monotonic(), ""
            except Exception as error:  # a store that ends with rank 0 must not end this rank
                self._store_error = str(error) or type(error).__name__
                runtime.get_logger().debug("watchdog: %s", error)
                if not dist.is_initialized():
                    return
            messages.wake.wait(beat_every(messages.size))
            messages.wake.clear()
        if ring is not None:
            with contextlib.suppress(Exception):
                messages.publish_failure()
                messages.publish_last_status()
                ring.leave(rank_state.position())

    def _beat(self, ring: HeartbeatRing, now: float) -> None:
        """One heartbeat, and everything that is done with it."""
        ring.beat(rank_state.position())
        keys = [*(f"beat/{rank}" for rank in ring.watched()), "news"]
        keys += ["process/0"] if self._rank_0 is None else []
        waits = rank_state.waits(now)
        long = investigate.is_long(waits)
        keys += ["leader"] if long else []
        values = self.messages.store.read(keys)
        if self._rank_0 is None and "process/0" in values:
            self._rank_0 = Process.parse(values["process/0"])
        for change in ring.check(values, now):
            self.messages.publish_liveness(change)
        self.messages.read_news(int(values.get("news", 0)), now)
        state = rank_state.current
        if state.broken is not None:
            self.investigation.name_cause(state.broken, now)
        elif long and state.failure is None:
            self.investigation.lead_if_needed(int(values.get("leader", 0)), waits, now)
        else:
            self.investigation.end()

    # --- this rank --------------------------------------------------------------------------------------------------

    def _watch_rank(self) -> None:
        while not self._stop.wait(POLL) and dist.group.WORLD is self.world:
            try:
                now = time.monotonic()
                rank_state.current.external.scan(now)
                failed = rank_state.finish_followed(now)
                if failed is not None:
                    operation, why = failed
                    self._connection_broke(operation, why, now, timed_out="timed out" in why)
                self._check_timeouts(now)
                self._check_store(now)
            except Exception as error:
                runtime.get_logger().debug("watchdog: %s", error)
            if rank_state.current.failure is not None:
                self._end_waits(rank_state.current.failure)

    def _connection_broke(self, operation: rank_state.Operation, why: str, now: float, timed_out: bool) -> None:
        if rank_state.current.broken is None:
            broken = rank_state.BrokenConnection(operation.what, why, operation.log.ranks, now, timed_out)
            rank_state.current.broken = broken
            self.messages.wake.set()

    def _check_timeouts(self, now: float) -> None:
        """torch's own timeout is switched off on NCCL (see `groups.disable_nccl_abort`), so it is enforced here."""
        for operation, wait in rank_state.waits(now):
            limit = abort.timeout_of(operation.log.group) if wait.on_device else None
            if limit is not None and wait.seconds > limit and rank_state.current.failure is None:
                self._connection_broke(operation, f"timed out after {limit:g} s", now, timed_out=True)

    def _check_store(self, now: float) -> None:
        """The store ends, or stops, with the process that holds it: rank 0 or its launcher."""
        waits = rank_state.waits(now)
        if not waits or waits[0][1].seconds < investigate.REPORT_AFTER or rank_state.current.failure is not None:
            return
        quiet, state = now - self._store_answered, state_of(self._rank_0)
        if quiet < heartbeat.SILENT_AFTER and not (self._store_error and quiet > 2 * heartbeat.BEAT):
            return
        wait = waits[0][1]
        patient = wait.external and state == "alive"
        if state in ("dead", "stopped"):
            cause = str(Liveness(0, state, "an unknown place", str(self._rank_0)))
        else:
            cause = "the job's store does not answer; rank 0, or the launcher on its machine, holds it"
        broken = rank_state.current.broken is not None and state in ("dead", "stopped")
        if broken or self._store_error and state != "alive" or quiet > heartbeat.LOST_AFTER and not patient:
            text = f"rank {self.messages.rank} waits in {wait.what}, but {cause}"
            self.messages.end_run(Failure(text, True, wait.what))
        elif not self._store_reported and not patient:
            self._store_reported = True
            runtime.get_logger(all_ranks=True).warning("waiting for %.0f s in %s: %s", wait.seconds, wait.what, cause)

    def _end_waits(self, failure: Failure) -> None:
        """Make every wait of this rank raise; if the program does not return from it, end the process."""
        waiting = rank_state.current.waiting
        rank_state.wait_until_issued()
        abort.all_communicators(waiting[0].log.group if waiting is not None else None)
        end = time.monotonic() + abort.GIVE_UP
        aborted = not failure.rank_lost
        while time.monotonic() < end and not self._stop.wait(POLL):
            if rank_state.current.raised or rank_state.current.failure is None:
                break
            rank_state.current.external.scan(time.monotonic())
            if rank_state.current.external.by_thread and not aborted:
                aborted = True
                abort.all_on_gloo()
        else:
            if not self._stop.is_set():
                abort.end_process(self.messages.rank, failure.text)
        while not self._stop.wait(POLL) and rank_state.current.failure is failure and dist.group.WORLD is self.world:
            pass


# --- the threads of this process ------------------------------------------------------------------------------------

_current: WatchThreads | None = None
_unwatched: Any = None
"""A process group without other ranks; there are no threads for it."""
_starting = threading.Lock()


def ensure_started() -> WatchThreads | None:
    """The watchdog's threads, started if they do not run; None where there is nobody to watch."""
    global _current, _unwatched
    if _current is not None and _current.running():
        return _current
    if not dist.is_initialized() or dist.group.WORLD is _unwatched:
        return None
    with _starting:
        if _current is None or not _current.running():
            _current = WatchThreads.start()
            _unwatched = dist.group.WORLD if _current is None else None
    return _current


def started() -> WatchThreads | None:
    """The threads that were started last, whether or not they still run."""
    return _current


@atexit.register
def _leave_at_exit() -> None:
    if _current is not None:
        _current.leave()
