"""Finding out why ranks wait: one rank, the leader, requests all statuses, compares them and reports what it found.

Any rank that waits for long may lead; an atomic counter in the store decides which. The leader increments the counter
with every heartbeat. If it stops doing so, another waiting rank replaces it: the leader may be the very rank that was
stopped.
"""

from __future__ import annotations

import threading
from typing import Any, TypeAlias

from fullshard.distributed import runtime
from fullshard.distributed.processes import Process, state_of
from fullshard.distributed.watchdog import rank_state
from fullshard.distributed.watchdog.diagnosis import (
    Failure,
    RankStatus,
    Wait,
    describe_wait,
    find_failure,
    late_ranks,
    unexplained_failure,
)
from fullshard.distributed.watchdog.heartbeat import Liveness, beat_every
from fullshard.distributed.watchdog.messages import Messages

REPORT_AFTER = 5.0
"""Seconds an operation waits before it is reported."""
REPEAT_AFTER = 60.0
"""Seconds until the same wait is reported again."""
NAME_WITHIN = 9.0
"""Seconds a rank with a broken connection looks for the rank that is gone, before it gives up without a name."""
REQUEST_AT = 0.6
"""The part of `REPORT_AFTER` after which statuses are requested, so that they are there in time."""
REQUEST_AGAIN = 5.0
"""Seconds after which the leader requests statuses again."""
LEADER_TIMEOUT = 3
"""Heartbeats after which a leader that has stopped counting is replaced."""
CHECKED_DIRECTLY = 64
"""Up to how many ranks of a broken communicator are checked one by one; in larger ones the ring finds them."""

Waits: TypeAlias = list[tuple[rank_state.Operation, Wait]]


def is_long(waits: Waits) -> bool:
    """Whether a wait is long enough to be investigated."""
    return any(wait.seconds > REQUEST_AT * REPORT_AFTER for _, wait in waits)


class Investigation:
    """One rank's part in finding out why ranks wait."""

    def __init__(self, messages: Messages):
        self.messages = messages
        self._leader: tuple[int, float] | None = None  # the leader's count, and when it last changed
        self._own_count: int | None = None  # the count while this rank leads
        self._requested_at = 0.0
        self._suspicion = ""
        self._reported: tuple[Any, float] = (None, 0.0)  # which wait was reported, and when

    @property
    def leads(self) -> bool:
        """Whether this rank investigates for all."""
        return self._own_count is not None

    def end(self) -> None:
        """This rank no longer waits for long."""
        self._leader = self._own_count = None
        self._suspicion = ""

    def lead_if_needed(self, count: int, waits: Waits, now: float) -> None:
        """Investigate this rank's wait, unless another waiting rank does so for all."""
        store = self.messages.store
        if self._own_count is not None:
            if count == self._own_count:
                self._own_count = store.add("leader", 1)
                self._investigate(waits, now)
            else:
                self._own_count = None  # another rank took over while this one was stopped
            return
        if self._leader is None or self._leader[0] != count:
            self._leader = (count, now)
        if now - self._leader[1] < (LEADER_TIMEOUT * beat_every(self.messages.size) if count else 0):
            return
        if store.add(f"claim/{count}", 1) == 1:
            self._own_count = store.add("leader", 1)
            self._suspicion = ""
            self._request(now)

    def _request(self, now: float) -> None:
        self.messages.request_statuses(now)
        self._requested_at = now

    def _investigate(self, waits: Waits, now: float) -> None:
        if now - self._requested_at > REQUEST_AGAIN:
            self._request(now)
            return
        operation, wait = waits[0]  # one of the engine's, where there is one
        ranks = list(operation.log.ranks)
        statuses = self.messages.read_statuses(now)
        answers = {rank: status for rank, status in statuses.items() if status.request >= self.messages.request}
        failure = find_failure(answers, self.messages.liveness)
        if failure is not None and failure.text == self._suspicion:
            # Seen twice: no status was merely out of date.
            text = f"{failure.text}\n{self._describe(wait, ranks, statuses)}"
            self.messages.end_run(Failure(text, failure.rank_lost, failure.at))
            return
        self._suspicion = "" if failure is None else failure.text
        again = self._reported[0] is not operation or now - self._reported[1] > REPEAT_AFTER
        if wait.seconds < REPORT_AFTER or not again:
            return
        late, size, liveness = late_ranks(wait, ranks, statuses), self.messages.size, self.messages.liveness
        if late and len(answers) < size and now - self._requested_at < 2 * beat_every(size):
            return  # their answers may be on the way
        silent = [rank for rank in ranks if rank in liveness and liveness[rank].state != "back"]
        if not silent and (wait.external or wait.on_device and not late):
            return  # a rank takes its time, or the device is still busy with earlier computation
        self._reported = (operation, now)
        runtime.get_logger().warning(self._describe(wait, ranks, statuses))

    def _describe(self, wait: Wait, ranks: list[int], statuses: dict[int, RankStatus]) -> str:
        late = late_ranks(wait, ranks, statuses)
        beats = self.messages.store.read([f"beat/{rank}" for rank in late[:64] if rank not in statuses])
        last_seen = {int(key.rpartition("/")[2]): text.partition(" ")[2] for key, text in beats.items()}
        return describe_wait(wait, ranks, statuses, self.messages.liveness, last_seen)

    # --- broken connections -----------------------------------------------------------------------------------------

    def name_cause(self, broken: rank_state.BrokenConnection, now: float) -> None:
        """Find the rank that is gone after a connection broke. It may be on another node and only become silent."""
        messages, ranks = self.messages, broken.ranks
        peers = [messages.liveness[rank] for rank in ranks if rank in messages.liveness]
        lost = [peer for peer in peers if peer.state not in ("back", "busy")]
        if all(peer.state == "exited" for peer in lost) and len(ranks) <= CHECKED_DIRECTLY:
            lost += self._check_directly(ranks, broken.timed_out)
        cannot = f"rank {messages.rank} cannot continue in {broken.what}"
        if lost:
            worst = min(lost, key=lambda peer: ("dead", "lost", "silent", "stopped", "exited").index(peer.state))
            if worst.state == "exited" and messages.heard_failure(now):
                return  # it had a reason, and has published it
            why = f" ({broken.reason})" if broken.timed_out else ""
            messages.end_run(Failure(f"{cannot}: {worst}{why}", True, broken.what))
        elif broken.timed_out:
            messages.end_run(Failure(f"{cannot}: {broken.reason}{self._describe_own_wait(now)}", True, broken.what))
        elif now - broken.since > NAME_WITHIN:
            messages.end_run(unexplained_failure(messages.rank, broken.what, broken.reason))
        else:
            threading.Timer(0.2, messages.wake.set).start()

    def _describe_own_wait(self, now: float) -> str:
        waits = rank_state.waits(now)
        if not waits:
            return ""
        operation, wait = waits[0]
        return "\n" + self._describe(wait, [*operation.log.ranks], self.messages.read_statuses(now))

    def _check_directly(self, ranks: tuple[int, ...], stopped: bool) -> list[Liveness]:
        """Ranks that have exited or whose processes on this node have ended (or are `stopped`), before the ring
        notices."""
        entries = self.messages.store.read([f"{kind}/{rank}" for rank in ranks for kind in ("process", "beat")])
        lost = []
        for rank in ranks:
            beat = entries.get(f"beat/{rank}", "")
            process = entries.get(f"process/{rank}")
            position = beat.partition(" ")[2]
            state = state_of(Process.parse(process)) if process else ""
            if beat.startswith("exited"):
                lost.append(Liveness(rank, "exited", position))
            elif process and (state == "dead" or stopped and state == "stopped"):
                lost.append(Liveness(rank, state, position, str(Process.parse(process))))
        return lost
