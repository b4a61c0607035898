"""Keeps the books of a device's memory: bytes held by part, and the most at each moment of a training step."""

from __future__ import annotations

from collections import defaultdict


class Ledger:
    """Bytes held at a time, by part; the peak of each moment, and a timeline."""

    def __init__(self) -> None:
        self.held: dict[str, int] = defaultdict(int)
        self.total = 0
        self.moments: dict[str, dict[str, int]] = {}
        """The parts at the peak of each moment."""
        self.timeline: list[tuple[str, int]] = []
        """(what, the most bytes during it)"""
        self._peaks: dict[str, int] = {}
        self._moment = ""
        self._since = 0
        """The most bytes since the last entry of the timeline."""

    def begin(self, moment: str) -> None:
        """What follows belongs to this moment."""
        self._moment = moment
        self._look()

    def hold(self, part: str, size: int) -> None:
        """Allocate; a negative size releases."""
        self.held[part] += size
        self.total += size
        self._look()

    def release(self, part: str, size: int) -> None:
        self.hold(part, -size)

    def pass_through(self, part: str, size: int) -> None:
        """Allocate and release."""
        self.hold(part, size)
        self.release(part, size)

    def entry(self, what: str) -> None:
        """End an entry of the timeline."""
        self.timeline.append((what, self._since))
        self._since = self.total

    def _look(self) -> None:
        if self.total > self._since:
            self._since = self.total
        if self.total > self._peaks.get(self._moment, -1):
            self._peaks[self._moment] = self.total
            self.moments[self._moment] = {part: size for part, size in self.held.items() if size}
