"""The gathered bytes of a plan over a step are those that the engine has allocated, unit by unit."""

from __future__ import annotations

from typing import Any

import pytest

from fullshard.fsdp import FSDPv2, transformer_auto_wrap_policy
from fullshard.fsdp.strategy import BackwardPrefetch, ShardingStrategy
from fullshard.fsdp.unit import UnitState
from fullshard.planner.engine_memory import Schedule, gathered_timeline
from tests.fsdp.programs import llama, mesh_for, step
from tests.pool import ranks


def watch(model: Any) -> list[tuple[str, str, int]]:
    """(phase, unit, gathered bytes) of the passes that follow, as the engine's units hold them."""
    units = model._fullshard_engine.units
    seen: list[tuple[str, str, int]] = []

    def look(phase: str, unit: str) -> None:
        held = sum(one.plan.gathered_bytes for one in units if one.state is not UnitState.SHARDED)
        seen.append((phase, unit, held))

    def follow(inside: Any, unit: str) -> None:
        """`inside` runs after the unit was gathered, and its gradient comes after the unit's backward has begun."""

        def forward(module: Any, args: Any) -> None:
            look("forward", unit)
            args[0].register_hook(lambda grad: look("backward", unit))

        inside.register_forward_pre_hook(forward)

    model.model.embed_tokens.register_forward_pre_hook(lambda module, args: look("forward", ""))
    for name, module in model.named_modules():
        if name.startswith("model.layers.") and name.endswith(".mlp"):
            follow(module, name.removesuffix(".mlp"))

    def head(module: Any, args: Any) -> None:
        look("loss", "")
        args[0].register_hook(lambda grad: look("backward", ""))

    model.lm_head.register_forward_pre_hook(head)
    return seen


@pytest.mark.slow
@ranks(2)
@pytest.mark.parametrize(
    ("strategy", "forward", "backward", "in_flight"),
    [
        ("FULL_SHARD", True, "BACKWARD_PRE", 1),
        pytest.param("SHARD_GRAD_OP", True, "BACKWARD_PRE", 1, marks=pytest.mark.slow),
        pytest.param("FULL_SHARD", True, "BACKWARD_POST", 1, marks=pytest.mark.slow),
        pytest.param("FULL_SHARD", False, None, 1, marks=pytest.mark.slow),
        pytest.param("FULL_SHARD", True, "BACKWARD_PRE", 2, marks=pytest.mark.slow),
        pytest.param("NO_SHARD", True, "BACKWARD_PRE", 1, marks=pytest.mark.slow),
    ],
)
def test_the_timeline_is_the_engine_s(strategy: str, forward: bool, backward: str | None, in_flight: int) -> None:
    model = FSDPv2(
        llama(layers=4), mesh_for(strategy), strategy=strategy, auto_wrap_policy=transformer_auto_wrap_policy,
        forward_prefetch=forward, backward_prefetch=backward, gathers_in_flight=in_flight,
    )  # fmt: skip
    step(model)  # the first pass tells the order of the units
    seen = watch(model)
    step(model)
    schedule = Schedule(ShardingStrategy[strategy], forward, BackwardPrefetch.of(backward), in_flight)
    planned = [(one.phase, one.unit, one.bytes) for one in gathered_timeline(model.plan, schedule)]
    assert planned == seen and len(planned) == 11
