"""The engine's memory along a training step: what is gathered, reduced and accumulated when a layer runs.

`EngineMemory` follows `fsdp/engine.py`, `fsdp/prefetch.py` and `fsdp/reduction.py` call by call, in the order of a step
that is not the first one, and writes what they allocate and release into a ledger.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fullshard.fsdp.plan import ShardingPlan
from fullshard.fsdp.strategy import BackwardPrefetch, ShardingStrategy
from fullshard.planner.unit_memory import Transport, UnitMemory, units_of
from fullshard.report.step_memory import GatheredMoment


@dataclass(frozen=True)
class Schedule:
    """When units are gathered and gradients reduced."""

    strategy: ShardingStrategy
    forward_prefetch: bool = True
    backward_prefetch: BackwardPrefetch = BackwardPrefetch.BACKWARD_PRE
    in_flight: int = 1
    """How many units may be gathered ahead of the one that runs."""
    keep_copies: bool = False
    """Whether copies in the compute dtype are kept: see `Engine.keep_copies`."""


class Ledger:
    """Allocated bytes by part; the peak of each moment, and a timeline."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = defaultdict(int)
        self.total = 0
        self.moments: dict[str, dict[str, int]] = {}
        """The parts at the peak of each moment."""
        self.timeline: list[tuple[str, int]] = []
        """(what, the most bytes during it)"""
        self._peaks: dict[str, int] = {}
        self._moment = ""
        self._since = 0
        """The most bytes since the last entry of the timeline."""

    @property
    def peak(self) -> int:
        """The most bytes allocated at once."""
        return max(self._peaks.values())

    def begin(self, moment: str) -> None:
        """What follows belongs to this moment."""
        self._moment = moment
        self._look()

    def hold(self, part: str, size: int) -> None:
        """Allocate; a negative size releases."""
        self.sizes[part] += size
        self.total += size
        self._look()

    def release(self, part: str, size: int) -> None:
        """Release; what `hold` has allocated."""
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
            self.moments[self._moment] = {part: size for part, size in self.sizes.items() if size}


class EngineMemory:
    """Gathers, frees and reduces units as the engine does; `order` are the units in the order of their calls, the root
    first."""

    def __init__(self, units: Mapping[str, UnitMemory], order: Sequence[str], schedule: Schedule, ledger: Ledger):
        self.units, self.schedule, self.ledger = units, schedule, ledger
        self.calls, self.order = list(order), list(dict.fromkeys(order))
        self._gathering: dict[str, int] = {}
        """Units whose gather is in progress, and what it holds besides the gathered values."""
        self._gathered: set[str] = set()
        self._kept: set[str] = set()
        """Units whose gathered memory is kept between passes."""
        self.whole: dict[str, int] = {}
        """Gradients that backward has left on gathered values."""
        self._unreduced: set[str] = set()
        """Units whose whole gradients `no_sync` keeps."""
        self._reduced: set[str] = set()
        """Units whose shards have gradients."""
        self._reducing: str | None = None
        self._landing = 0
        self.sync = True

    # --- gathering ----------------------------------------------------------------------------------------------------

    def _keeps_memory(self, name: str) -> bool:
        return self.schedule.keep_copies and self.units[name].only_casts

    def _start(self, name: str) -> None:
        unit = self.units[name]
        if name not in self._kept:
            self.ledger.hold("gathered", unit.gathered)
        self.ledger.pass_through("communication", unit.copying)
        self.ledger.hold("communication", unit.gathering)
        self._gathering[name] = unit.gathering
        if self._keeps_memory(name):
            self._kept.add(name)

    def _finish(self, name: str) -> None:
        if name in self._gathering:
            self.ledger.release("communication", self._gathering.pop(name))
            self._gathered.add(name)

    def _free(self, name: str) -> None:
        self._finish(name)
        if name in self._gathered:
            self._gathered.remove(name)
            if name not in self._kept:
                self.ledger.release("gathered", self.units[name].gathered)

    def _make_ready(self, name: str, following: Sequence[str]) -> None:
        if name not in self._gathered and name not in self._gathering:
            self._start(name)
        self._prefetch(name, following)
        self._finish(name)

    def _prefetch(self, current: str, following: Sequence[str]) -> None:
        busy = sum(name != current for name in self._gathering)
        for name in following[: self.schedule.in_flight]:
            if name not in self._gathered and name not in self._gathering and busy < self.schedule.in_flight:
                self._start(name)
                busy += 1

    # --- forward ------------------------------------------------------------------------------------------------------

    def begin_forward(self, call: int) -> None:
        """Call number `call` of the order begins."""
        name = self.calls[call]
        self._make_ready(name, self.calls[call + 1 :] if self.schedule.forward_prefetch else ())

    def end_forward(self, call: int) -> None:
        """Call number `call` of the order ends."""
        name = self.calls[call]
        if not (self.schedule.strategy.keeps_after_forward or self._keeps_memory(name)):
            self._free(name)

    def end_pass(self) -> None:
        """The model's forward ends: the root stays gathered."""
        for name in [name for name in self._gathering if name != self.order[0]]:
            self._free(name)

    # --- backward -----------------------------------------------------------------------------------------------------

    def begin_backward(self, name: str) -> None:
        """The backward of a unit begins."""
        following = self._next(name) if self.schedule.backward_prefetch is BackwardPrefetch.BACKWARD_PRE else ()
        self._make_ready(name, following)

    def _next(self, name: str) -> list[str]:
        """The units whose backward follows, nearest first; that of the root begins first."""
        layers = self.order[1:]
        return layers[: layers.index(name)][::-1] if name in layers else layers[::-1]

    def add_gradients(self, name: str, size: int) -> None:
        """Backward leaves gradients on gathered values. The ledger has them already."""
        self.whole[name] = self.whole.get(name, 0) + size

    def end_backward(self, name: str) -> None:
        """The backward of a unit ends: it is freed, and its gradients are reduced."""
        self._free(name)
        if self.schedule.backward_prefetch is BackwardPrefetch.BACKWARD_POST and name != self.order[0]:
            self._prefetch(name, self._next(name))  # that of the root ends last
        if not self.sync:
            self._take(name)
            self._unreduced.add(name)
            return
        self.finish_reduction()
        self._reduce(name)

    def end_pass_backward(self) -> None:
        """The pass is over: the root's gradients are reduced last."""
        self.end_backward(self.order[0])
        self.finish_reduction()
        self.ledger.release("communication", self._landing)
        self._landing = 0
        for name in self.order:
            self._free(name)

    # --- gradients ----------------------------------------------------------------------------------------------------

    def _take(self, name: str) -> None:
        """Convert gradients to the dtype in which they are reduced, and add those that were held back."""
        unit = self.units[name]
        self.ledger.pass_through("gradients", unit.converting)
        self.ledger.release("gradients", self.whole.pop(name, 0))
        if name not in self._unreduced:
            self.ledger.hold("gradients", unit.whole_gradients)

    def _reduce(self, name: str) -> None:
        unit = self.units[name]
        self._take(name)
        self._unreduced.discard(name)
        self._reducing = name
        self.ledger.hold("communication", unit.reducing)
        if not unit.alone and not unit.transport.accelerator:
            self.ledger.release("gradients", unit.bucketed)

    def finish_reduction(self) -> None:
        """Wait for the reduction in progress; its sums become gradients of the shards."""
        name, self._reducing = self._reducing, None
        if name is None:
            return
        unit, ledger = self.units[name], self.ledger
        ledger.release("communication", unit.reducing)
        kept = unit.alone or unit.transport.accelerator
        ledger.release("gradients", unit.whole_gradients - (0 if kept else unit.bucketed))
        ledger.pass_through("communication", unit.finishing)
        if unit.transport.offload:
            ledger.release("communication", self._landing)
            self._landing = unit.pieces
            ledger.hold("communication", self._landing)
        elif name not in self._reduced:
            ledger.hold("gradients", unit.gradients)
        self._reduced.add(name)

    def zero_grad(self) -> None:
        """Release the gradients of the shards."""
        for name in self._reduced:
            self.ledger.release("gradients", self.units[name].gradients)
        self._reduced.clear()


def gathered_timeline(plan: ShardingPlan, schedule: Schedule | None = None) -> tuple[GatheredMoment, ...]:
    """What is gathered while each unit runs forward, in the loss, and while each runs backward. Units run in the plan's
    order; nothing is rounded to the blocks of an allocator."""
    schedule = schedule or Schedule(ShardingStrategy[plan.strategy])
    units = units_of(plan, Transport.of(plan, accelerator=False, point_to_point=False))
    order = list(units)
    ledger = Ledger()
    engine = EngineMemory(units, order, schedule, ledger)
    moments: list[GatheredMoment] = []

    def record(phase: str, name: str) -> None:
        moments.append(GatheredMoment(phase, name, ledger.sizes["gathered"]))

    calls = list(_calls(order))
    for name, begins in calls:
        if begins:
            engine.begin_forward(order.index(name))
            record("forward", name)
        elif name != order[0]:
            engine.end_forward(order.index(name))
    engine.end_pass()
    record("loss", order[0])
    # Backward enters a unit where its forward ended, and leaves it where its forward began.
    for name, began in reversed(calls):
        if not began:
            engine.begin_backward(name)
            record("backward", name)
        elif name != order[0]:
            engine.end_backward(name)
    engine.end_pass_backward()
    return tuple(moments)


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
