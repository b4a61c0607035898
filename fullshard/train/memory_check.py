"""Whether a planned model fits, said with numbers before any weight is read.

Only what is certain is counted: shards, gradients and the optimizer's state at rest. Activations and gathered layers
come on top.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from fullshard import accelerator, runtime
from fullshard.byte_size import memory_size
from fullshard.errors import ConfigError
from fullshard.fsdp.plan import ParameterPlan, ShardingPlan
from fullshard.fsdp.strategy import dtype_of

STATES = {"sgd": 0, "adamw_torch": 2, "adamw_torch_fused": 2}
"""Values that an optimizer keeps for each parameter."""


@dataclass(frozen=True)
class Need:
    """Bytes a rank needs at rest."""

    shards: int
    gradients: int
    optimizer: int
    gathered: int
    """The most that is gathered at once, on top of the rest."""

    @property
    def total(self) -> int:
        return self.shards + self.gradients + self.optimizer


def need_of(plan: ShardingPlan, optim: str) -> Need:
    rest = sum(_shard_bytes(p) for unit in plan.units for p in unit.parameters if p.trainable)
    return Need(plan.shard_bytes, rest, STATES[optim] * rest, plan.gathered_bound())


def _shard_bytes(p: ParameterPlan) -> int:
    dtype = dtype_of(p.dtype)
    assert dtype is not None
    return math.prod(p.piece) * dtype.itemsize


def available(on_host: bool) -> tuple[int, str]:
    """Bytes a rank can have, and where."""
    if not on_host and accelerator.is_accelerator(runtime.device()):
        return accelerator.total_memory(runtime.device()), "GPU memory"
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return free // runtime.local_world_size(), "host memory"


def check_fit(plan: ShardingPlan, optim: str, on_host: bool) -> Need:
    """What the plan needs; stops if that is more than there is."""
    need, (there, where) = need_of(plan, optim), available(on_host)
    if need.total > there:
        raise ConfigError(
            f"the model does not fit: each rank needs at least {memory_size(need.total)} of {where} at rest (shards "
            f"{memory_size(need.shards)}, gradients {memory_size(need.gradients)}, optimizer "
            f"{memory_size(need.optimizer)}), but has {memory_size(there)}. "
            f"Use more ranks, use_peft_lora, a sharded strategy, or fsdp_offload_params."
        )
    return need


def describe(plan: ShardingPlan, need: Need) -> list[str]:
    """The plan in a few lines."""
    axes = " × ".join(f"{size} {name}" for name, size in plan.axes)
    layers: dict[str, int] = {}
    for unit in plan.units[1:]:
        layers[unit.module] = layers.get(unit.module, 0) + 1
    units = ", ".join(f"{count} {name}" for name, count in layers.items()) or "none but the whole model"
    return [
        f"plan: {plan.strategy} on {axes}; units: {units}",
        f"      at rest on each rank: shards {memory_size(need.shards)}, gradients {memory_size(need.gradients)},",
        f"      optimizer {memory_size(need.optimizer)}; gathered at once at most {memory_size(need.gathered)}",
    ]
