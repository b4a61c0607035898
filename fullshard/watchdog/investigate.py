"""Finding out why ranks wait: one of them, the lead, asks all for notes, reads them and says what it found.

Any rank that waits for long may lead; an atomic count in the store decides. The lead counts up on every heartbeat, and
one that stops doing so is replaced by another rank that waits: it may be the very one that was stopped.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, TypeAlias

from fullshard import runtime
from fullshard.processes import Process, state_of
from fullshard.watchdog import watch
from fullshard.watchdog.diagnosis import Note, Verdict, Wait, judge, missing, report
from fullshard.watchdog.heartbeat import Loss, beat_every

if TYPE_CHECKING:
    from fullshard.watchdog.threads import Lookout

ASK_AT = 0.6
"""The part of `REPORT_AFTER` after which notes are asked for, so that they are there when it is over."""
ASK_AGAIN = 5.0
"""Seconds after which the lead asks again."""
LEAD_LASTS = 3
"""Heartbeats after which a lead that has stopped counting is replaced."""
SWEPT = 64
"""Up to how many ranks of a broken communicator are looked up one by one; in larger ones the ring finds them."""

Waits: TypeAlias = list[tuple[watch.Label, Wait]]


class Inquiry:
    """One rank's part in finding out."""

    def __init__(self, lookout: Lookout):
        self.lookout = lookout
        self._lead: tuple[int, float] | None = None  # the lead's count, and when it last changed
        self._leads: int | None = None  # the same while this rank leads
        self._asked_at = 0.0
        self._suspect = ""
        self._told: tuple[Any, float] = (None, 0.0)  # which wait was reported, and when

    def lead_if_needed(self, count: int, waits: Waits, now: float) -> None:
        """Look into this rank's wait, unless another rank that waits does so for all."""
        if self._leads is not None:
            if count == self._leads:
                self._leads = self.lookout.board.add("lead", 1)
                self._investigate(waits, now)
            else:
                self._leads = None  # another rank took over while this one was held up
            return
        if self._lead is None or self._lead[0] != count:
            self._lead = (count, now)
        if now - self._lead[1] < (LEAD_LASTS * beat_every(self.lookout.size) if count else 0):
            return
        if self.lookout.board.add(f"claim/{count}", 1) == 1:
            self._leads = self.lookout.board.add("lead", 1)
            self._suspect = ""
            self._ask(now)

    def _ask(self, now: float) -> None:
        self.lookout.ask(now)
        self._asked_at = now

    def _notes(self, now: float) -> dict[int, Note]:
        """The notes of all ranks that have published one, perhaps in answer to an earlier request."""
        self.lookout.answer(now)
        texts = self.lookout.board.read([f"note/{rank}" for rank in range(self.lookout.size)])
        return {int(key.rpartition("/")[2]): Note.parse(text) for key, text in texts.items()}

    def end(self) -> None:
        """This rank no longer waits for long."""
        self._lead = self._leads = None
        self._suspect = ""

    @property
    def leads(self) -> bool:
        return self._leads is not None

    def _investigate(self, waits: Waits, now: float) -> None:
        if now - self._asked_at > ASK_AGAIN:
            self._ask(now)
            return
        label, wait = waits[0]  # one of the engine's where there is one
        notes = self._notes(now)
        answers = {rank: note for rank, note in notes.items() if note.asked >= self.lookout.asked}
        found = judge(answers, self.lookout.losses)
        if found is not None and found.text == self._suspect:
            # Seen twice: not a note that was just out of date.
            ranks = [*label.watch.ranks]
            self.lookout.decide(Verdict(f"{found.text}\n{self._report(wait, ranks, notes)}", found.lost, found.at))
            return
        self._suspect = "" if found is None else found.text
        again = self._told[0] is not label or now - self._told[1] > watch.REPEAT_AFTER
        if wait.seconds < watch.REPORT_AFTER or not again:
            return
        late = missing(wait, label.watch.ranks, notes)
        size, losses = self.lookout.size, self.lookout.losses
        if late and len(answers) < size and now - self._asked_at < 2 * beat_every(size):
            return  # their answers may be on the way
        silent = [rank for rank in label.watch.ranks if rank in losses and losses[rank].how != "back"]
        if not silent and (wait.outside or wait.followed and not late):
            return  # somebody takes their time; the device is still busy with what comes before
        self._told = (label, now)
        runtime.get_logger().warning(self._report(wait, list(label.watch.ranks), notes))

    def _report(self, wait: Wait, ranks: list[int], notes: dict[int, Note]) -> str:
        late = missing(wait, ranks, notes)
        beats = self.lookout.board.read([f"beat/{rank}" for rank in late[:64] if rank not in notes])
        last = {int(key.rpartition("/")[2]): text.partition(" ")[2] for key, text in beats.items()}
        return report(wait, ranks, notes, self.lookout.losses, last)

    def name_cause(self, broken: watch.Broken, now: float) -> None:
        """Communication broke: find the rank that is gone. It may be on another node and only fall silent."""
        losses, ranks = self.lookout.losses, broken.ranks
        gone = [losses[rank] for rank in ranks if rank in losses and losses[rank].how not in ("back", "busy")]
        if all(loss.how == "exited" for loss in gone) and len(ranks) <= SWEPT:
            gone += self._gone_here(ranks, broken.timed_out)
        cannot = f"rank {self.lookout.rank} cannot go on in {broken.what}"
        if gone:
            worst = min(gone, key=lambda loss: ("dead", "lost", "silent", "stopped", "exited").index(loss.how))
            if worst.how == "exited" and self.lookout.heard_verdict(now):
                return  # it had a reason, and has said so
            why = f" ({broken.reason})" if broken.timed_out else ""
            self.lookout.decide(Verdict(f"{cannot}: {worst}{why}", True, broken.what))
        elif broken.timed_out:
            self.lookout.decide(Verdict(f"{cannot}: {broken.reason}{self._where_they_are(now)}", True, broken.what))
        elif now - broken.since > watch.NAME_WITHIN:
            self.lookout.decide(watch.unnamed(broken.what, broken.reason))
        else:
            threading.Timer(0.2, self.lookout.hurry).start()

    def _where_they_are(self, now: float) -> str:
        """Who is too late for this rank's wait."""
        waits = watch.waits(now)
        return "" if not waits else "\n" + self._report(waits[0][1], [*waits[0][0].watch.ranks], self._notes(now))

    def _gone_here(self, ranks: tuple[int, ...], stopped: bool) -> list[Loss]:
        """Ranks whose processes have ended on this node (or are `stopped`), or that have exited: the ring may not have
        come round yet."""
        found = self.lookout.board.read([f"{kind}/{rank}" for rank in ranks for kind in ("process", "beat")])
        losses = []
        for rank in ranks:
            beat = found.get(f"beat/{rank}", "")
            process = found.get(f"process/{rank}")
            where = beat.partition(" ")[2]
            how = state_of(Process.parse(process)) if process else ""
            if beat.startswith("exited"):
                losses.append(Loss(rank, "exited", where))
            elif process and (how == "dead" or stopped and how == "stopped"):
                losses.append(Loss(rank, how, where, str(Process.parse(process))))
        return losses
