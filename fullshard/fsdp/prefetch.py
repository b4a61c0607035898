"""Prefetching: gathering units before they are needed.

The order of the units is that of the last forward pass. Backward runs through the calls in the reverse of the order in
which they ended.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from fullshard.fsdp.strategy import BackwardPrefetch
from fullshard.fsdp.unit import Unit, UnitState


@dataclass
class PrefetchSettings:
    """Which units are gathered ahead, and how many."""

    forward_prefetch: bool = True
    backward_prefetch: BackwardPrefetch = BackwardPrefetch.BACKWARD_PRE
    in_flight: int = 1
    """How many units may be gathered ahead of the one that runs."""


class Prefetcher:
    """Starts the gathers of the units that come next; `start` gathers one."""

    def __init__(self, units: Sequence[Unit], settings: PrefetchSettings, start: Callable[[Unit], None]):
        self._units, self._settings, self._start = units, settings, start
        self._last_pass: list[Unit] = []
        """The units in the order in which the last complete pass called them."""
        self._called: list[Unit] = []
        """The same for the current pass, so far."""
        self._ended: list[Unit] = []
        """The units in the order in which their calls ended."""
        self._has_backward: dict[Unit, bool] = {}
        """Whether a backward may reach the unit, by its last call."""
        self._over: set[Unit] = set()
        """The units whose backward has ended in the current one; a unit around others ends after them."""

    def begin_pass(self) -> None:
        """Begin a forward pass."""
        self._called, self._ended = [], []

    def forward_begins(self, unit: Unit) -> None:
        """Record a call; gather what followed it in the last pass."""
        index = len(self._called)
        self._called.append(unit)
        if self._settings.forward_prefetch and self._last_pass[index : index + 1] == [unit]:
            self._gather(unit, self._last_pass[index + 1 :])

    def forward_ends(self, unit: Unit, has_backward: bool) -> None:
        """Record that a unit's forward has ended, and whether it has a backward."""
        self._ended.append(unit)
        self._has_backward[unit] = has_backward

    def end_pass(self) -> None:
        """End a forward pass: its order of units predicts the next one's."""
        self._last_pass = self._called

    def backward_begins(self, unit: Unit) -> None:
        """Gather the next unit before a unit's backward, if settings say so."""
        if self._settings.backward_prefetch is BackwardPrefetch.BACKWARD_PRE:
            self._gather(unit, self._next_in_backward(unit))

    def backward_ends(self, unit: Unit) -> None:
        """Gather the next unit after a unit's backward, if settings say so."""
        if self._settings.backward_prefetch is BackwardPrefetch.BACKWARD_POST:
            self._over.add(unit)
            self._gather(unit, (u for u in self._next_in_backward(unit) if u not in self._over))

    def end_backward(self) -> None:
        """End a backward pass."""
        self._over.clear()

    def reset(self) -> None:
        """Forget the order of units."""
        self._last_pass, self._ended = [], []
        self._over.clear()

    def _next_in_backward(self, unit: Unit) -> Iterator[Unit]:
        """The units whose backward follows, nearest first."""
        if unit not in self._ended:
            return iter(())
        # Backward of a call begins at its output, so a unit's own call comes before those of the units inside it.
        index = len(self._ended) - 1 - self._ended[::-1].index(unit)
        return (u for u in reversed(self._ended[:index]) if u is not unit and self._has_backward.get(u))

    def _gather(self, current: Unit, following: Iterable[Unit]) -> None:
        """Start to gather the units after the current one, up to the number that may be in flight."""
        limit = self._settings.in_flight
        nearest = [u for u in itertools.islice(following, limit) if u.state is UnitState.SHARDED]
        if not nearest:
            return
        in_flight = len([u for u in self._units if u.state is UnitState.GATHERING and u is not current])
        for unit in nearest[: max(limit - in_flight, 0)]:
            if unit.state is UnitState.SHARDED:  # not twice, if it is called twice
                self._start(unit)
