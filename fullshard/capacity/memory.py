"""Peak memory of a training step, per device and per node, by part and by moment: arithmetic over a sharding plan.

No tensors and no communication. What a step's operators allocate comes from `activations.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class MemoryEstimate:
    """What one device, and the host of one node, need at most."""

    moments: dict[str, dict[str, int]]
    """"load", "forward", "loss", "backward", "optimizer step", "save" → part → bytes at the peak of that moment. Parts:
    "shards", "gathered", "gradients", "optimizer", "activations", "logits", "buffers", "workspace"."""
    timeline: tuple[tuple[str, int], ...] = ()
    """(what, allocated bytes) along one step."""
    reserved: int = 0
    """Device memory beside what torch allocates: context, communicators, fragmentation."""
    host: dict[str, int] = field(default_factory=dict)
    """Host memory per node, by part."""

    @property
    def peak(self) -> int:
        """The most bytes that torch allocates at once on one device."""
        return max((sum(parts.values()) for parts in self.moments.values()), default=0)

    @property
    def peak_moment(self) -> str:
        """The moment at which `peak` is reached."""
        return max(self.moments, key=lambda moment: sum(self.moments[moment].values()), default="")

    @property
    def device(self) -> int:
        """All memory that one device needs."""
        return self.peak + self.reserved

    @property
    def host_total(self) -> int:
        return sum(self.host.values())
