"""Whether a planned model fits into memory, checked before any weight is read.

Only what is certain is counted: sharded parameters, gradients and optimizer state. Activations and gathered layers come
on top.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullshard import accelerator, runtime
from fullshard.byte_size import memory_size
from fullshard.errors import ConfigError
from fullshard.fsdp.bnb_optimizers import BLOCK
from fullshard.fsdp.plan import ParameterPlan, ShardingPlan, item_size
from fullshard.lora.model_size import dense_line, summary
from fullshard.optimizers.muon import embeddings_of, is_hidden_matrix, tables_of
from fullshard.optimizers.names import SERVED
from fullshard.ranks import agree

SMALL = 4096
"""Parameters of fewer elements have 32-bit state with the 8-bit optimizers of bitsandbytes."""


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


def need_of(
    plan: ShardingPlan,
    optim: str | None,
    apart: AbstractSet[str] = frozenset(),
    on_host: bool = False,
    **arguments: Any,
) -> MemoryNeed:
    """The memory that a plan needs with an optimizer and its `optim_args`; None stands for one of the user's, whose
    state is unknown.

    `apart` are the names of parameters that have other state than the rest: see `names_apart`. `on_host` is whether all
    of it is in host memory, which has the embedding in any case if that is offloaded.
    """
    trained = [p for unit in plan.units for p in unit.parameters if p.trainable]
    gradients = sum(p.shard_bytes for p in trained)
    state = sum(_state_bytes(p, optim, not apart.isdisjoint(p.names), arguments) for p in trained) if optim else 0
    shards = plan.shard_bytes - (0 if on_host else plan.host_bytes)
    return MemoryNeed(shards, gradients, state, plan.gathered_bound())


def names_apart(model: Any, optim: str | None) -> set[str]:
    """The parameters whose state differs from that of most: embeddings have 32-bit state with 8-bit optimizers, and
    `muon` updates embeddings, head and what is not a matrix with AdamW."""
    named = list(model.named_parameters(remove_duplicate=False))
    if optim == "muon":
        tables = tables_of(model)
        return {name for name, p in named if not is_hidden_matrix(name, p, tables)}
    wide = embeddings_of(model) if optim in SERVED and SERVED[optim].bits == 8 else set()
    return {name for name, p in named if p in wide}


def _state_bytes(p: ParameterPlan, optim: str, apart: bool, arguments: Mapping[str, Any]) -> int:
    """The optimizer state of this rank's piece of a parameter."""
    kind, count = SERVED[optim], math.prod(p.piece)
    if optim == "adafactor" and len(p.shape) > 1:
        return (math.prod(p.piece[:-1]) + math.prod((*p.piece[:-2], p.piece[-1]))) * max(item_size(p.dtype), 4)
    if optim == "adafactor":
        return count * max(item_size(p.dtype), 4)
    states = kind.states + bool(arguments.get("momentum") and optim != "muon") + bool(arguments.get("centered"))
    if optim == "muon" and apart:
        states = 2
    if kind.bits == 8 and not apart and math.prod(p.shape) >= SMALL:
        return states * (count + 4 * -(-count // BLOCK))
    return states * count * (4 if kind.bits else item_size(p.dtype))


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
        return check_fit(need_of(model.plan, optim, names_apart(model, optim), on_host, **arguments), on_host)

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
