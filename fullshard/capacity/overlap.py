"""How compute and communication of a step overlap in time.

A step is a row of stages, the forward or backward of one unit each. The engine gathers a unit while the one before it
computes, and reduces its gradients while the one after it does.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from fullshard.fsdp.strategy import BackwardPrefetch


@dataclass
class Stage:
    """A unit's forward or backward, in seconds."""

    products: float = 0.0
    """Matrix products and attention."""
    memory: float = 0.0
    """Operations that memory bandwidth limits."""
    arrives: float = 0.0
    """Gathering its parameters, which must come before its compute."""
    leaves: float = 0.0
    """Reducing its gradients, which must come after it."""
    bus: float = 0.0
    """Moving activations to or from the host, beside its compute."""

    @property
    def compute(self) -> float:
        return max(self.products + self.memory, self.bus)


def overlapped(
    forward: Sequence[Stage],
    backward: Sequence[Stage],
    forward_prefetch: bool = True,
    backward_prefetch: BackwardPrefetch = BackwardPrefetch.BACKWARD_PRE,
    reduces: bool = True,
) -> float:
    """Seconds of one micro-batch; without `reduces`, gradients are held back (`no_sync`)."""
    timeline = _Timeline()
    timeline.run(forward, forward_prefetch, reduces=False)
    timeline.run(backward, backward_prefetch is BackwardPrefetch.BACKWARD_PRE, reduces)
    return max(timeline.computed, timeline.link)


class _Timeline:
    """Two resources: the device's compute, and the links that gathers and reductions share."""

    def __init__(self) -> None:
        self.computed = 0.0
        """When compute so far is over."""
        self.link = 0.0
        """When the communication so far is over."""

    def run(self, stages: Sequence[Stage], prefetch: bool, reduces: bool) -> None:
        """One pass; with `prefetch` the next unit is gathered from the beginning of a unit's compute on."""
        reduced = [0.0, 0.0]
        gathered = self._send(stages[0].arrives, self.computed) if stages else 0.0
        for stage, following in itertools.pairwise((*stages, Stage())):
            # At most one unit's gradients are reduced while another's are computed.
            begins = max(self.computed, gathered, reduced[-2])
            self.computed = begins + stage.compute
            if prefetch:
                gathered = self._send(following.arrives, begins)
            reduced.append(self._send(stage.leaves, self.computed) if reduces else 0.0)
            if not prefetch:
                gathered = self._send(following.arrives, self.computed)

    def _send(self, seconds: float, earliest: float) -> float:
        """Use the links for some time; returns when that is over."""
        if not seconds:
            return 0.0
        self.link = max(self.link, earliest) + seconds
        return self.link
