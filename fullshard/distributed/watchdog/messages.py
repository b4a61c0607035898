"""What the ranks' watchdogs tell each other through the job's store.

These are changes of liveness, requests for statuses and the answers, and failures. A counter, "news", is incremented
with each message, so an idle rank reads one small key per heartbeat.
"""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from typing import Any

from fullshard.distributed import runtime
from fullshard.distributed.job_store import parse
from fullshard.distributed.watchdog import rank_state
from fullshard.distributed.watchdog.diagnosis import Failure, RankStatus
from fullshard.distributed.watchdog.heartbeat import Liveness

ANSWER_FOR = 10.0
"""Seconds for which a rank publishes its status after a request."""


class Messages:
    """This rank's messages to and from the others."""

    def __init__(self, store: Any):
        self.rank, self.size = runtime.rank(), runtime.world_size()
        self.store = runtime.watch_store(store)
        self.liveness: dict[int, Liveness] = {}
        self.request = 0
        """The number of the last request for statuses."""
        self.wake = threading.Event()
        """Set to read and send messages now, not at the next heartbeat."""
        self._news = -1
        self._liveness_read = self._failures_read = 0
        self._unsent: Failure | None = None
        self._answer_until, self._answered = 0.0, ""

    def open(self) -> None:
        """Create the counters; failures before this moment concern an earlier part of the job."""
        self.skip_failures()
        self.store.add("news", 0)

    def skip_failures(self) -> None:
        """Ignore the failures published so far."""
        self._failures_read = self.store.add("failures", 0)
        self._unsent = None

    def read_news(self, count: int, now: float) -> None:
        """Read what other ranks published since the last time, given the counter of news."""
        if count != self._news:
            self._read(now)
            self._news = count
        if now < self._answer_until:
            self.answer(now)

    def _read(self, now: float) -> None:
        values = self.store.read(["changes", "request", "failure"])
        count = int(values.get("changes", 0))
        for text in self.store.read([f"change/{n}" for n in range(self._liveness_read + 1, count + 1)]).values():
            change = Liveness.parse(text)
            self.liveness[change.rank] = change
        self._liveness_read = max(count, self._liveness_read)
        if (request := int(values.get("request", 0))) > self.request:
            self.request, self._answer_until = request, now + ANSWER_FOR
        if "failure" in values:
            failure = parse(values["failure"])
            if (number := failure.pop("number")) > self._failures_read:
                self._failures_read = number
                rank_state.set_failure(Failure(**failure))

    def _publish_news(self) -> None:
        self.store.add("news", 1)

    # --- liveness ---------------------------------------------------------------------------------------------------

    def publish_liveness(self, change: Liveness) -> None:
        """Tell all ranks that a rank is gone or back."""
        if change.state not in ("back", "exited", "dead") and rank_state.current.failure is None:
            runtime.get_logger().warning("%s", change)
        self.store.put(f"change/{self.store.add('changes', 1)}", change.text())
        self._publish_news()

    # --- statuses ---------------------------------------------------------------------------------------------------

    def request_statuses(self, now: float) -> None:
        """Ask all ranks for their statuses."""
        self.request, self._answer_until = self.store.add("request", 1), now + ANSWER_FOR
        self._publish_news()
        self.answer(now)

    def answer(self, now: float) -> None:
        """Publish this rank's status if it has changed."""
        text = rank_state.status(self.request, now).text()
        if text != self._answered:
            self.store.put(f"status/{self.rank}", text)
            self._answered = text

    def read_statuses(self, now: float) -> dict[int, RankStatus]:
        """The statuses of all ranks that have published one, perhaps in answer to an earlier request."""
        self.answer(now)
        texts = self.store.read([f"status/{rank}" for rank in range(self.size)])
        return {int(key.rpartition("/")[2]): RankStatus.parse(text) for key, text in texts.items()}

    def publish_last_status(self) -> None:
        """Publish a status that answers every later request: this rank exits."""
        self.store.put(f"status/{self.rank}", rank_state.status(1 << 60, time.monotonic()).text())

    # --- failures ---------------------------------------------------------------------------------------------------

    def end_run(self, failure: Failure) -> None:
        """End the run: on this rank now, on all others once the store answers."""
        rank_state.set_failure(failure)
        self._unsent = failure
        self.wake.set()

    def publish_failure(self) -> None:
        """Send a failure found on this rank, if there is one to send."""
        failure = self._unsent
        if failure is None:
            return
        number = self.store.add("failures", 1)
        self._failures_read = max(self._failures_read, number)
        self.store.replace("failure", json.dumps({"number": number, **dataclasses.asdict(failure)}))
        self._publish_news()
        self._unsent = None

    def heard_failure(self, now: float) -> bool:
        """Whether another rank has ended the run, according to the store."""
        self._read(now)
        return rank_state.current.failure is not None
