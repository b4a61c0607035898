"""Gathered bytes along one training step, unit by unit: the schedule of `engine_memory.py` over a plan alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fullshard.capacity.engine_memory import EngineMemory, Schedule
from fullshard.capacity.ledger import Ledger
from fullshard.capacity.unit_memory import Transport, units_of
from fullshard.fsdp.plan import ShardingPlan
from fullshard.fsdp.strategy import ShardingStrategy
from fullshard.reporting.step_memory import GatheredMoment


def gathered_timeline(plan: ShardingPlan, schedule: Schedule | None = None) -> tuple[GatheredMoment, ...]:
    """What is gathered while each unit runs forward, in the loss, and while each runs backward. Units run in the plan's
    order; nothing is rounded to the blocks of an allocator."""
    schedule = schedule or Schedule(ShardingStrategy[plan.strategy])
    units = units_of(plan, Transport.of(plan, accelerator=False, point_to_point=False, offload=False))
    order = list(units)
    ledger = Ledger()
    engine = EngineMemory(units, order, schedule, ledger)
    moments: list[GatheredMoment] = []

    def record(phase: str, name: str) -> None:
        moments.append(GatheredMoment(phase, name, ledger.held["gathered"]))

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
