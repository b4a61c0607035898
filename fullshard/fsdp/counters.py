"""What the engine did: collectives by unit, bytes, and gathered memory alive. For tests, benchmarks and reports."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Meter:
    """Counts since the last `reset()`; live bytes go on."""

    gathers: Counter[str] = field(default_factory=Counter)
    """Gathers that communicated, by unit."""
    reduces: Counter[str] = field(default_factory=Counter)
    """Reductions that communicated, by unit."""
    reduced_parameters: Counter[str] = field(default_factory=Counter)
    """Gradients handed to a reduction, by parameter."""
    bytes_gathered: int = 0
    """Sizes of the values that gathers produced."""
    bytes_reduced: int = 0
    """Sizes of the gradients that went into reductions."""
    bytes_sent: int = 0
    """What this rank put on the wire, where the transport lets us know; else what a ring would send."""
    live: int = 0
    """Bytes of gathered values alive now."""
    peak: int = 0
    """The most bytes of gathered values alive at once."""

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
