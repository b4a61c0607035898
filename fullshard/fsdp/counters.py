"""Counters of the engine: collectives per unit, bytes, gathered memory. For tests, benchmarks and reports."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


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
    live: int = 0
    """Bytes of gathered values allocated now."""
    peak: int = 0
    """The most bytes of gathered values allocated at once."""

    def reset(self) -> None:
        self.gathers.clear()
        self.reduces.clear()
        self.reduced_parameters.clear()
        self.bytes_gathered = self.bytes_reduced = self.bytes_sent = 0
        self.peak = self.live

    def allocated(self, size: int) -> None:
        self.live += size
        self.peak = max(self.peak, self.live)

    def freed(self, size: int) -> None:
        self.live -= size
        assert self.live >= 0, "more gathered memory freed than allocated"
