"""Whether a run fits on a machine, because of what, and what would have to change: values in plain words."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Change:
    """A change of settings, priced like the run itself."""

    settings: dict[str, object]
    """The options that change, by name, with their new values."""
    words: str
    """The change in words."""
    peak: int
    """Device memory that the run then needs, in bytes."""


@dataclass(frozen=True)
class Verdict:
    """Whether a run fits, and why."""

    fits: bool | None
    """None where it cannot be known, because the model's activations could not be traced."""
    needs: int
    """Device memory that the run needs, in bytes, with what is reserved beside torch's allocations."""
    has: int
    """Device memory of the machine."""
    needs_host: int
    """Host memory that the ranks of a node need."""
    has_host: int
    moment: str
    """The moment of the peak."""
    part: str
    """The part that takes the most memory at that moment."""
    change: Change | None = None
    """The smallest change that would make it fit; None where it fits, or nothing that was tried is enough."""
