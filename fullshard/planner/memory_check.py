"""Whether a planned model fits into memory, checked before any weight is read.

Only what is certain is counted: sharded parameters, gradients and optimizer state (`planner/memory.py`). Activations
and gathered layers come on top: `planned_memory.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fullshard.config.byte_size import memory_size
from fullshard.config.errors import ConfigError
from fullshard.device import accelerator
from fullshard.distributed import runtime
from fullshard.distributed.ranks import agree
from fullshard.fsdp.plan import ShardingPlan
from fullshard.lora.model_size import dense_line, summary
from fullshard.planner.memory import MemoryNeed, need_of
from fullshard.planner.optimizer_state import OptimizerMemory, names_apart


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


def check_and_report(
    model: Any, optim: str | None, on_host: bool, say: Callable[[str], None], **arguments: Any
) -> None:
    """Refuse a sharded model that does not fit; print its plan, memory and trainable parameters. All ranks must call
    it."""

    def check() -> MemoryNeed:
        optimizer = OptimizerMemory(optim, arguments, names_apart(model, optim))
        return check_fit(need_of(model.plan, optimizer, on_host), on_host)

    need = agree(check, "memory check")[0]
    for line in (*describe(model.plan, need), dense_line(model), summary(model)):
        if line is not None:
            say(line)


def check_fit(need: MemoryNeed, on_host: bool) -> MemoryNeed:
    """The memory that is needed; an error if that is more than there is."""
    there, where = available(on_host)
    if need.total > there:
        raise ConfigError(
            f"the model does not fit: each rank needs at least {memory_size(need.total)} of {where} (shards "
            f"{memory_size(need.shards)}, gradients {memory_size(need.gradients)}, optimizer "
            f"{memory_size(need.optimizer)}), but has {memory_size(there)}. "
            f"Use more ranks, use_peft_lora, a sharded strategy, optim adamw_8bit, or fsdp_offload_params."
        )
    return need


def describe(plan: ShardingPlan, need: MemoryNeed) -> list[str]:
    """The plan in a few lines."""
    axes = " × ".join(f"{size} {name}" for name, size in plan.axes)
    layers: dict[str, int] = {}
    for unit in plan.units[1:]:
        layers[unit.module] = layers.get(unit.module, 0) + 1
    units = ", ".join(f"{count} {name}" for name, count in layers.items()) or "none but the whole model"
    host = f"; embedding on the host {memory_size(plan.host_bytes)}" if plan.host_bytes else ""
    return [
        f"plan: {plan.strategy} on {axes}; units: {units}",
        f"      memory on each rank: shards {memory_size(need.shards)}, gradients {memory_size(need.gradients)},",
        f"      optimizer {memory_size(need.optimizer)}; at most {memory_size(need.gathered)} gathered at once{host}",
    ]
