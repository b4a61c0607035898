"""The threads behind the watch: one talks to the job's store, one looks after this rank and ends it if need be.

Store traffic, per rank and heartbeat: one `set` and one `multi_get` of two small keys, whatever the number of ranks.
Only while some rank waits for long does more happen (see `investigate.py`).

The store may be held by a process that is stopped; a call then never returns. So the second thread never touches it.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import threading
import time
from typing import Any

import torch.distributed as dist

from fullshard import runtime
from fullshard.processes import Process, state_of
from fullshard.torch_private import default_store
from fullshard.watchdog import abort, heartbeat, watch
from fullshard.watchdog.diagnosis import Verdict
from fullshard.watchdog.heartbeat import Board, Loss, Ring, beat_every
from fullshard.watchdog.investigate import ASK_AT, Inquiry

ANSWER_FOR = 10.0
"""Seconds for which a rank that was asked goes on to publish its note."""


class Lookout:
    """The threads of one process in one job."""

    def __init__(self, store: Any, world: Any):
        self.world, self.rank, self.size = world, runtime.rank(), runtime.world_size()
        self.board = Board(store)
        self.losses: dict[int, Loss] = {}
        self.first: Process | None = None
        """The process of rank 0, which may be the one that holds the store."""
        self._stop = threading.Event()
        self._hurry = threading.Event()
        self._since = time.monotonic()  # when the store last answered
        self._store_error = ""
        self._news = -1
        self._losses_read = self._verdict_read = 0
        self._outbox: Verdict | None = None
        self.asked, self._answer_until, self._answered = 0, 0.0, ""
        self._store_told = False
        self.inquiry = Inquiry(self)
        self._threads = [
            threading.Thread(target=self._talk, name="fullshard-watch-store", daemon=True),
            threading.Thread(target=self._look, name="fullshard-watch", daemon=True),
        ]

    @classmethod
    def start(cls) -> Lookout | None:
        """Start the threads of this process; None where there is nobody to hear of."""
        store, world = default_store(), dist.group.WORLD
        if runtime.world_size() == 1 or "fake" in str(dist.get_backend_config(world)).lower():
            return None
        with contextlib.suppress(Exception):
            store = store.clone()  # a connection of its own, where the store has such: nobody else's wait holds it up
        made = cls(store, world)
        for thread in made._threads:
            thread.start()
        return made

    def runs(self) -> bool:
        return dist.group.WORLD is self.world and not self._stop.is_set()

    def hurry(self) -> None:
        """Look now, not at the next heartbeat."""
        self._hurry.set()

    def forget(self) -> None:
        """Pass over the verdicts there are."""
        self._verdict_read = self.board.add("verdicts", 0)
        self._outbox = None
        self.inquiry.end()

    def leave(self) -> None:
        """Say goodbye; then the threads end."""
        self._stop.set()
        self._hurry.set()
        for thread in self._threads:
            # A thread that is inside torch when the interpreter ends takes the process with it.
            if thread is not threading.current_thread():
                thread.join(2 * heartbeat.BEAT)

    # --- talking to the store -----------------------------------------------------------------------------------------

    def _talk(self) -> None:
        ring: Ring | None = None
        while not self._stop.is_set() and dist.group.WORLD is self.world:
            try:
                if ring is None:
                    ring = Ring(self.board, self.rank, self.size)
                    self._verdict_read = self.board.add("verdicts", 0)
                    self.board.add("news", 0)
                self._publish_verdict()
                self._round(ring, time.monotonic())
                self._since, self._store_error = time.monotonic(), ""
            except Exception as error:  # a store that goes away with rank 0 must not take this rank with it
                self._store_error = str(error) or type(error).__name__
                runtime.get_logger().debug("watch: %s", error)
                if not dist.is_initialized():
                    return
            self._hurry.wait(beat_every(self.size))
            self._hurry.clear()
        if ring is not None:
            with contextlib.suppress(Exception):
                self._publish_verdict()
                self.board.put(f"note/{self.rank}", watch.note(1 << 60, time.monotonic()).text())
                ring.part(watch.position())

    def _round(self, ring: Ring, now: float) -> None:
        """One heartbeat."""
        ring.beat(watch.position())
        keys = [*(f"beat/{rank}" for rank in ring.watched()), "news"]
        keys += ["process/0"] if self.first is None else []
        waits = watch.waits(now)
        long = any(wait.seconds > ASK_AT * watch.REPORT_AFTER for _, wait in waits)
        keys += ["lead"] if long else []
        values = self.board.read(keys)
        if self.first is None and "process/0" in values:
            self.first = Process.parse(values["process/0"])
        for loss in ring.look(values, now):
            self._tell_loss(loss)
        if (news := int(values.get("news", 0))) != self._news:
            self._read_news(now)
            self._news = news
        if now < self._answer_until:
            self.answer(now)
        if watch._here.broken is not None:
            self.inquiry.name_cause(watch._here.broken, now)
        elif long and watch._here.verdict is None:
            self.inquiry.lead_if_needed(int(values.get("lead", 0)), waits, now)
        else:
            self.inquiry.end()

    def ask(self, now: float) -> None:
        """Ask all ranks for notes."""
        self.asked, self._answer_until = self.board.add("asked", 1), now + ANSWER_FOR
        self._publish_news()
        self.answer(now)

    def _tell_loss(self, loss: Loss) -> None:
        if loss.how not in ("back", "exited", "dead") and watch._here.verdict is None:
            runtime.get_logger().warning("%s", loss)
        self.board.put(f"loss/{self.board.add('losses', 1)}", loss.text())
        self._publish_news()

    def _publish_news(self) -> None:
        self.board.add("news", 1)

    def _read_news(self, now: float) -> None:
        """Losses, requests and verdicts since the last time."""
        values = self.board.read(["losses", "asked", "verdict"])
        count = int(values.get("losses", 0))
        for text in self.board.read([f"loss/{n}" for n in range(self._losses_read + 1, count + 1)]).values():
            loss = Loss.parse(text)
            self.losses[loss.rank] = loss
        self._losses_read = count
        if (asked := int(values.get("asked", 0))) != self.asked:
            self.asked, self._answer_until = asked, now + ANSWER_FOR
        if "verdict" in values:
            found = json.loads(values["verdict"])
            if found["number"] > self._verdict_read:
                self._verdict_read = found["number"]
                self._set(Verdict(found["text"], found["lost"], found["at"]))

    def heard_verdict(self, now: float) -> bool:
        """Whether another rank has ended the run, as the store knows by now."""
        self._read_news(now)
        return watch._here.verdict is not None

    def answer(self, now: float) -> None:
        """Publish this rank's note if it has changed."""
        text = watch.note(self.asked, now).text()
        if text != self._answered:
            self.board.put(f"note/{self.rank}", text)
            self._answered = text

    # --- deciding ---------------------------------------------------------------------------------------------------

    def decide(self, verdict: Verdict) -> None:
        """End the run: on this rank now, on all others when the store answers."""
        self._set(verdict)
        self._outbox = verdict
        self.hurry()

    def _set(self, verdict: Verdict) -> None:
        with watch._changed:
            if watch._here.verdict is None:
                abort.take_over()
                watch._here.verdict = verdict
                watch.failures += 1
            watch._here.broken = None
            watch._changed.notify_all()

    def _publish_verdict(self) -> None:
        verdict = self._outbox
        if verdict is None:
            return
        number = self.board.add("verdicts", 1)
        self._verdict_read = max(self._verdict_read, number)
        self.board.put("verdict", json.dumps({"number": number, **dataclasses.asdict(verdict)}))
        self._publish_news()
        self._outbox = None

    # --- looking after this rank ------------------------------------------------------------------------------------

    def _look(self) -> None:
        while not self._stop.wait(watch.POLL) and dist.group.WORLD is self.world:
            try:
                now = time.monotonic()
                watch._here.outside.look(now)
                failure = watch.finish_followed(now)
                if failure is not None and watch._here.broken is None:
                    label, why = failure
                    watch._here.broken = watch.Broken(label.what, why, label.watch.ranks, now, "time-out" in why)
                    self.hurry()
                self._look_at_times(now)
                self._look_at_store(now)
            except Exception as error:
                runtime.get_logger().debug("watch: %s", error)
            if watch._here.verdict is not None:
                self._end(watch._here.verdict)

    def _look_at_times(self, now: float) -> None:
        """torch's own limit is switched off on NCCL (see `groups.leave_time_outs_to_us`), so it is kept here."""
        for label, wait in watch.waits(now):
            limit = abort.time_out(label.watch.group) if wait.followed else None
            if limit is None or wait.seconds <= limit or watch._here.verdict is not None:
                continue
            if watch._here.broken is None:
                why = f"its time-out of {limit:g} s is over"
                watch._here.broken = watch.Broken(wait.what, why, label.watch.ranks, now, timed_out=True)
                self.hurry()

    def _look_at_store(self, now: float) -> None:
        """The store ends, or stops, with the process that holds it: rank 0 or its launcher."""
        waits = watch.waits(now)
        if not waits or waits[0][1].seconds < watch.REPORT_AFTER or watch._here.verdict is not None:
            return
        quiet, state = now - self._since, state_of(self.first)
        if quiet < heartbeat.SILENT_AFTER and not (self._store_error and quiet > 2 * heartbeat.BEAT):
            return
        what, patient = waits[0][1].what, waits[0][1].outside and state == "alive"
        if state in ("dead", "stopped"):
            first = str(Loss(0, state, "an unknown place", str(self.first)))
        else:
            first = "the job's store does not answer; rank 0, or the launcher on its machine, holds it"
        broken = watch._here.broken is not None and state in ("dead", "stopped")
        if broken or self._store_error and state != "alive" or quiet > heartbeat.LOST_AFTER and not patient:
            self.decide(Verdict(f"rank {self.rank} waits in {what}, but {first}", True, what))
        elif not self._store_told and not patient:
            self._store_told = True
            runtime.get_logger(all_ranks=True).warning("waiting for %.0f s in %s: %s", waits[0][1].seconds, what, first)

    def _end(self, verdict: Verdict) -> None:
        """Make every wait of this rank raise; if the program does not come back from it, end the process."""
        waiting = watch._here.waiting
        watch.settle_issuing()
        abort.all_communicators(waiting[0].watch if waiting is not None else None)
        end = time.monotonic() + abort.GIVE_UP
        aborted = not verdict.lost
        while time.monotonic() < end and not self._stop.wait(watch.POLL):
            if watch._here.raised or watch._here.verdict is None:
                break
            watch._here.outside.look(time.monotonic())
            if watch._here.outside.standing and not aborted:
                aborted = True
                abort.all_on_gloo()
        else:
            if not self._stop.is_set():
                abort.give_up(self.rank, verdict.text)
        while not self._stop.wait(watch.POLL) and watch._here.verdict is verdict and dist.group.WORLD is self.world:
            pass


@atexit.register
def _say_goodbye() -> None:
    if watch._lookout is not None:
        watch._lookout.leave()
