"""What a rank holds between steps: sharded parameters, gradients and optimizer state, from the plan alone."""

from __future__ import annotations

from dataclasses import dataclass

from fullshard.capacity.optimizer_state import OptimizerMemory
from fullshard.fsdp.plan import ShardingPlan


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes that a rank needs between steps."""

    shards: int
    gradients: int
    optimizer: int
    gathered: int
    """The most bytes of gathered layers at once, on top of the rest."""

    @property
    def total(self) -> int:
        return self.shards + self.gradients + self.optimizer


def need_of(plan: ShardingPlan, optimizer: OptimizerMemory, on_host: bool = False) -> MemoryNeed:
    """The memory that a plan needs with an optimizer.

    `on_host` is whether all of it is in host memory, which has the embedding in any case if that is offloaded.
    """
    trained = [p for unit in plan.units for p in unit.parameters if p.trainable]
    gradients = sum(p.shard_bytes for p in trained)
    shards = plan.shard_bytes - (0 if on_host else plan.host_bytes)
    return MemoryNeed(shards, gradients, sum(map(optimizer.unit_state, plan.units)), plan.gathered_bound())
