"""Whether a planned model fits into memory, checked before any weight is read.

Only what is certain is counted: sharded parameters, gradients and optimizer state. Activations and gathered layers come
on top.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullshard import accelerator, runtime
from fullshard.byte_size import memory_size
from fullshard.errors import ConfigError
from fullshard.fsdp.plan import ParameterPlan, ShardingPlan
from fullshard.fsdp.strategy import dtype_of
from fullshard.lora.model_size import dense_line, summary
from fullshard.ranks import agree

STATES = {"sgd": 0, "adamw_torch": 2, "adamw_torch_fused": 2}
"""Values of optimizer state per parameter."""


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


def need_of(plan: ShardingPlan, optim: str) -> MemoryNeed:
    """The memory that a plan needs with an optimizer."""
    rest = sum(_shard_bytes(p) for unit in plan.units for p in unit.parameters if p.trainable)
    return MemoryNeed(plan.shard_bytes, rest, STATES[optim] * rest, plan.gathered_bound())


def _shard_bytes(p: ParameterPlan) -> int:
    dtype = dtype_of(p.dtype)
    assert dtype is not None
    return math.prod(p.piece) * dtype.itemsize


def available(on_host: bool) -> tuple[int, str]:
    """The bytes that a rank can use, and the kind of memory."""
    if not on_host and accelerator.is_accelerator(runtime.device()):
        return accelerator.total_memory(runtime.device()), "GPU memory"
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return free // runtime.local_world_size(), "host memory"


def check_and_report(model: Any, optim: str, on_host: bool, say: Callable[[str], None]) -> None:
    """Refuse a sharded model that does not fit; print its plan, memory and trainable parameters. All ranks must call
    it."""
    need = agree(lambda: check_fit(model.plan, optim, on_host), "memory check")[0]
    for line in (*describe(model.plan, need), dense_line(model), summary(model)):
        if line is not None:
            say(line)


def check_fit(plan: ShardingPlan, optim: str, on_host: bool) -> MemoryNeed:
    """The memory that the plan needs; an error if that is more than there is."""
    need, (there, where) = need_of(plan, optim), available(on_host)
    if need.total > there:
        raise ConfigError(
            f"the model does not fit: each rank needs at least {memory_size(need.total)} of {where} (shards "
            f"{memory_size(need.shards)}, gradients {memory_size(need.gradients)}, optimizer "
            f"{memory_size(need.optimizer)}), but has {memory_size(there)}. "
            f"Use more ranks, use_peft_lora, a sharded strategy, or fsdp_offload_params."
        )
    return need


def describe(plan: ShardingPlan, need: MemoryNeed) -> list[str]:
    """The plan in a few lines."""
    axes = " × ".join(f"{size} {name}" for name, size in plan.axes)
    layers: dict[str, int] = {}
    for unit in plan.units[1:]:
        layers[unit.module] = layers.get(unit.module, 0) + 1
    units = ", ".join(f"{count} {name}" for name, count in layers.items()) or "none but the whole model"
    return [
        f"plan: {plan.strategy} on {axes}; units: {units}",
        f"      memory on each rank: shards {memory_size(need.shards)}, gradients {memory_size(need.gradients)},",
        f"      optimizer {memory_size(need.optimizer)}; at most {memory_size(need.gathered)} gathered at once",
    ]
