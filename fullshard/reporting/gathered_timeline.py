"""Which units of a plan are gathered when, along one training step: the engine's rules without an engine.

Units run in the plan's order. `fsdp/engine.py` gathers a unit before its forward and its backward, gathers the next
ones ahead (`fsdp/prefetch.py`), and keeps the outermost unit, and with ZeRO-2 strategies every unit, until its backward
is over.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fullshard.fsdp.plan import ShardingPlan
from fullshard.fsdp.prefetch import PrefetchSettings
from fullshard.fsdp.strategy import BackwardPrefetch, ShardingStrategy


@dataclass(frozen=True)
class Moment:
    """A part of a step, and the units that are gathered in it."""

    phase: str
    """"forward", "loss" or "backward"."""
    unit: str
    """The unit that runs; empty for the root."""
    gathered: tuple[str, ...]
    """The units whose memory is allocated, in the plan's order."""
    bytes: int
    """Gathered bytes of these units."""


class _Step:
    """The gathered units of a step as it proceeds."""

    def __init__(self, plan: ShardingPlan, settings: PrefetchSettings) -> None:
        self.sizes = {unit.name: unit.gathered_bytes for unit in plan.units}
        self.settings = settings
        self.gathered: set[str] = set()
        self.moments: list[Moment] = []

    def enter(self, phase: str, unit: str, following: Sequence[str], ahead: bool) -> None:
        self.gathered.add(unit)
        if ahead:
            self.prefetch(following)
        self.record(phase, unit)

    def prefetch(self, following: Sequence[str]) -> None:
        self.gathered.update(following[: self.settings.in_flight])

    def record(self, phase: str, unit: str) -> None:
        names = tuple(name for name in self.sizes if name in self.gathered)
        self.moments.append(Moment(phase, unit, names, sum(self.sizes[name] for name in names)))


def gathered_timeline(plan: ShardingPlan, settings: PrefetchSettings | None = None) -> tuple[Moment, ...]:
    """The moments of one forward and backward pass, from the second step on (the first one learns the order)."""
    settings = settings or PrefetchSettings()
    keeps = ShardingStrategy[plan.strategy].keeps_after_forward
    names = [unit.name for unit in plan.units]
    root = names[0]
    step = _Step(plan, settings)
    calls = list(_calls(names))
    begun = [name for name, begins in calls if begins]
    ended = [name for name, begins in calls if not begins]
    for name, begins in calls:
        if begins:
            step.enter("forward", name, begun[begun.index(name) + 1 :], settings.forward_prefetch)
        elif not keeps and name != root:
            step.gathered.discard(name)
    step.record("loss", root)
    # Backward enters a unit where its forward ended, and leaves it where its forward began.
    before = settings.backward_prefetch is BackwardPrefetch.BACKWARD_PRE
    after = settings.backward_prefetch is BackwardPrefetch.BACKWARD_POST
    for name, begins in reversed(calls):
        following = ended[: ended.index(name)][::-1]
        if not begins:
            step.enter("backward", name, following, before)
            continue
        step.gathered.discard(name)
        if after:
            step.prefetch(following)
    return tuple(step.moments)


def _calls(names: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Where each unit begins (True) and ends in forward; units inside another one run before it ends."""
    stack: list[str] = []
    for name in names:
        while stack and stack[-1] and not name.startswith(f"{stack[-1]}."):
            yield stack.pop(), False
        stack.append(name)
        yield name, True
    while stack:
        yield stack.pop(), False
