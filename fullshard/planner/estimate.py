"""What a run needs and costs, as one value: what `fullshard plan` prints and a run's `plan.json` holds."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from fullshard.activations.levels import Level, LevelChoice
from fullshard.fsdp.plan import ShardingPlan, UnitPlan
from fullshard.planner.machines import Machine
from fullshard.planner.memory import MemoryEstimate
from fullshard.planner.step_time import StepTime
from fullshard.planner.step_trace import BatchShape
from fullshard.planner.traffic import Traffic
from fullshard.planner.verdict import Verdict
from fullshard.version import __version__

FORMAT = 1
"""The version of the JSON form."""


@dataclass(frozen=True)
class Estimate:
    """One training step of a run on a machine: memory, traffic, time."""

    model: str
    """The model's name or folder."""
    machine: Machine
    settings: dict[str, Any]
    """The settings that are not at their defaults."""
    plan: ShardingPlan
    parameters: int
    """The number of parameters; quantized weights count as the weights they store."""
    batch: BatchShape
    """The largest batch of the run."""
    layers: tuple[str, ...]
    """The names of the model's layers."""
    levels: tuple[Level, ...]
    """What each layer keeps for backward."""
    memory: MemoryEstimate
    traffic: Traffic
    time: StepTime
    flops_per_token: float
    verdict: Verdict
    assumptions: tuple[str, ...] = ()
    """What was not given and is assumed, and what the numbers leave out."""
    seconds: dict[str, float] = field(default_factory=dict)
    """How long each part of planning took."""
    choice: LevelChoice[str] | None = None
    """What decided the levels under a budget; None without one."""

    @property
    def tokens(self) -> int:
        """Tokens in a step of all devices."""
        return self.batch.tokens * self.batch.accumulation * self.machine.num_processes

    @property
    def trained(self) -> int:
        """The number of parameters that train."""
        return sum(math.prod(p.shape) for unit in self.plan.units for p in unit.parameters if p.trainable)

    def to_json(self) -> dict[str, Any]:
        """The estimate as plain data; docs/planning.md describes it. Sizes are bytes, times seconds."""
        memory, plan = self.memory, self.plan
        return {
            "format": FORMAT,
            "fullshard": __version__,
            "model": self.model,
            "settings": self.settings,
            "machine": {**asdict(self.machine), "nodes": self.machine.nodes},
            "parameters": {"all": self.parameters, "trained": self.trained},
            "mesh": dict(plan.axes),
            "strategy": plan.strategy,
            "batch": {**asdict(self.batch), "tokens_per_step": self.tokens},
            "verdict": {**asdict(self.verdict), "sentences": self.verdict.sentences()},
            "memory": {
                "peak": memory.peak,
                "peak_moment": memory.peak_moment,
                "reserved": memory.reserved,
                "device": memory.device,
                "moments": memory.moments,
                "timeline": [list(entry) for entry in memory.timeline],
                "host": memory.host,
            },
            "units": [_unit(unit) for unit in plan.units],
            "layers": list(self.layers),
            "levels": [level.name.lower() for level in self.levels],
            "traffic": asdict(self.traffic),
            "flops_per_token": self.flops_per_token,
            "time": {
                "parts": self.time.parts,
                "total": self.time.total,
                "tokens_per_second": self.time.tokens_per_second,
                "flops": self.time.flops,
            },
            "assumptions": list(self.assumptions),
            "planned_in": self.seconds,
        }


def _unit(unit: UnitPlan) -> dict[str, Any]:
    """What a unit holds and sends."""
    return {
        "name": unit.name,
        "shard": unit.shard_bytes,
        "gathered": unit.gathered_bytes,
        "gather": unit.gather_traffic[0],
        "reduce": unit.reduce_traffic[0],
    }
