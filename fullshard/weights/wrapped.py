"""A wrapped model as loading and saving see it, on either engine: its root, and its parameters with their plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fullshard.distributed import engines
from fullshard.fsdp import state_dict
from fullshard.fsdp.parameter import ShardedParameter
from fullshard.spmd import full_tensor


@dataclass(frozen=True)
class Wrapped:
    """A model that `FSDPv2` has wrapped."""

    root: nn.Module
    parameters: list[ShardedParameter]
    """Where a process holds several shards of each: what has the same interface for loading."""
    buffer_dtype: torch.dtype | None


def wrapped(model: nn.Module) -> Wrapped | None:
    """The wrapped model that a module is the root or a unit of; None for a plain module."""
    engine: Any = getattr(model, "_fullshard_engine", None) or getattr(model, "_fullshard_model", None)
    if engine is None:
        return None
    parameters = [p for unit in engine.units for p in unit.parameters]
    if (on_host := engines.current().host_shards) is not None:
        parameters = [on_host.loadable(p) for p in parameters]
    return Wrapped(engine.units[0].module, parameters, engine.units[0].precision.buffer_dtype)


@torch.no_grad()
def set_whole(p: ShardedParameter, value: torch.Tensor) -> None:
    """Set a parameter to a whole value: each process writes the parts that it holds."""
    for cuts, memory in p.parts():
        memory.copy_(value[cuts])
    p.written()


def whole_value(p: ShardedParameter) -> torch.Tensor:
    """The whole stored value of a parameter. All ranks must call it."""
    return state_dict.whole_value(p) if isinstance(p, ShardedParameter) else full_tensor(p.shard)
