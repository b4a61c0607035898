"""Counters of the engine: collectives per unit, bytes, gathered memory. For tests, benchmarks and reports."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from fullshard.distributed.watchdog import watch


@dataclass
class Meter:
    """Counts since the last `reset()`; `reset()` does not change `live`."""

    gathers: Counter[str] = field(default_factory=Counter)
    """Gathers that communicated, by unit."""
    reduces: Counter[str] = field(default_factory=Counter)
    """Reductions that communicated, by unit."""
    reduced_parameters: Counter[str] = field(default_factory=Counter)
    """Gradients passed to a reduction, by parameter."""
    bytes_gathered: int = 0
    """Bytes of the values that gathers produced."""
    bytes_reduced: int = 0
    """Bytes of the gradients that reductions took."""
    bytes_sent: int = 0
    """Bytes this rank sent: measured with point-to-point messages, otherwise what a ring algorithm would send."""
    gather_sent: Counter[str] = field(default_factory=Counter)
    """Of `bytes_sent`, those of gathers, by unit."""
    reduce_sent: Counter[str] = field(default_factory=Counter)
    """Of `bytes_sent`, those of reductions, by unit."""
    tokens_sent: Counter[str] = field(default_factory=Counter)
    """Of `bytes_sent`, those of tokens to their experts and back, by layer of experts."""
    live: int = 0
    """Bytes of gathered values allocated now."""
    peak: int = 0
    """The most bytes of gathered values allocated at once."""
    observer: Callable[[str, str], None] | None = None
    """Called with unit and operation wherever the engine is, in a step that is measured."""

    def reset(self) -> None:
        """Set all counts to zero."""
        for counter in (
            self.gathers, self.reduces, self.reduced_parameters, self.gather_sent, self.reduce_sent, self.tokens_sent,
        ):  # fmt: skip
            counter.clear()
        self.bytes_gathered = self.bytes_reduced = self.bytes_sent = 0
        self.peak = self.live

    def at(self, step: int, unit: str, operation: str) -> None:
        """Record the engine's position, for the watchdog too."""
        watch.at(step, unit, operation)
        if self.observer is not None:
            self.observer(unit, operation)

    @contextlib.contextmanager
    def sending(self, sent: Counter[str], unit: str) -> Iterator[None]:
        """Count the bytes sent inside as those of a unit."""
        before = self.bytes_sent
        yield
        sent[unit] += self.bytes_sent - before

    def allocated(self, size: int) -> None:
        """Count gathered memory that was allocated."""
        self.live += size
        self.peak = max(self.peak, self.live)

    def freed(self, size: int) -> None:
        """Count gathered memory that was freed."""
        self.live -= size
        assert self.live >= 0, "more gathered memory freed than allocated"
