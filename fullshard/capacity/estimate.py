"""What a run needs and costs, as one value: what `fullshard plan` prints and a run's `plan.json` holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fullshard.capacity.machines import Machine
from fullshard.capacity.memory import MemoryEstimate
from fullshard.capacity.step_trace import BatchShape
from fullshard.capacity.verdict import Verdict
from fullshard.fsdp.activation_memory import Level
from fullshard.fsdp.plan import ShardingPlan


@dataclass(frozen=True)
class Estimate:
    """One training step of a run on a machine: memory, traffic, time."""

    model: str
    """The model's name or folder."""
    machine: Machine
    settings: dict[str, Any]
    """The settings that are not at their defaults."""
    plan: ShardingPlan
    batch: BatchShape
    """The largest batch of the run."""
    layers: tuple[str, ...]
    """The names of the model's layers."""
    levels: tuple[Level, ...]
    """What each layer keeps for backward."""
    memory: MemoryEstimate
    traffic: Any
    time: Any
    flops_per_token: float
    verdict: Verdict
    assumptions: tuple[str, ...] = ()
    """What was not given and is assumed, and what the numbers leave out."""
