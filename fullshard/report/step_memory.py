"""The memory of one device along a training step, as pictures show it: by moment and part, over time, and its limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fullshard.config.byte_size import memory_size

PARTS = (
    "shards", "gathered", "gradients", "optimizer", "activations", "logits", "communication", "buffers", "workspace",
)  # fmt: skip
"""The parts of memory in the order of pictures; others follow."""


@dataclass(frozen=True)
class GatheredMoment:
    """A part of a step, and the bytes that are gathered in it."""

    phase: str
    """"forward", "loss" or "backward"."""
    unit: str
    """The unit that runs; empty for the root."""
    bytes: int


@dataclass(frozen=True)
class StepMemory:
    """Bytes on the device that needs the most."""

    moments: Mapping[str, Mapping[str, int]]
    """Moment → part → bytes at the peak of that moment."""
    timeline: Sequence[tuple[str, int]] = ()
    """(what, allocated bytes) along one step."""
    reserved: int = 0
    """Memory beside what torch allocates."""
    limit: int | None = None
    """The memory of the device, if it is known."""
    host: Mapping[str, int] = field(default_factory=dict)
    """Host memory of one node by part."""
    host_limit: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts that need memory in some moment."""
        names = {part for own in self.moments.values() for part, size in own.items() if size}
        return (*(part for part in PARTS if part in names), *sorted(names - {*PARTS}))

    @property
    def bars(self) -> dict[str, dict[str, int]]:
        """The moments, each with all parts in the same order, and with what is reserved."""
        more = {"reserved": self.reserved} if self.reserved else {}
        return {name: {part: own.get(part, 0) for part in self.parts} | more for name, own in self.moments.items()}

    @property
    def peak(self) -> tuple[str, int]:
        """The moment that needs the most, and its bytes."""
        sums = {moment: sum(parts.values()) for moment, parts in self.bars.items()}
        return max(sums.items(), key=lambda item: item[1])

    @property
    def host_words(self) -> str:
        """Host memory of a node in words; empty if none is needed."""
        if not self.host:
            return ""
        parts = ", ".join(f"{part} {memory_size(size)}" for part, size in self.host.items() if size)
        limit = f" of {memory_size(self.host_limit)}" if self.host_limit else ""
        return f"{memory_size(sum(self.host.values()))}{limit} ({parts})"
