"""Reading and writing the values of a wrapped model on XLA: whole state dicts, and whole parameters for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from fullshard.distributed import runtime
from fullshard.fsdp.strategy import dtype_of
from fullshard.xla.tensor import full_tensor, is_xla_tensor
from fullshard.xla.units import ShardedModel


@contextlib.contextmanager
def summon_full_params(model: ShardedModel, writeback: bool, offload_to_cpu: bool) -> Iterator[None]:
    """Let modules hold whole parameters inside."""
    if model.summoned:
        yield  # already inside another one
        return
    runtime.sync()
    stored_values = [(p, p.parameter) for p in model.parameters]
    for p, stored in stored_values:
        whole = full_tensor(stored)
        p.hold(nn.Parameter(whole if offload_to_cpu else whole.to(runtime.device()), stored.requires_grad))
    model.summoned = True
    try:
        yield
        if writeback:
            with torch.no_grad():
                for p, stored in stored_values:
                    current = full_tensor(p.parameter).to(stored.dtype)
                    if not torch.equal(current, full_tensor(stored)):  # a write invalidates what autograd saved
                        stored.copy_(current)
    finally:
        model.summoned = False
        for p, stored in stored_values:
            p.hold(stored)
        model.settle()


def full_state_dict(model: Any, rank0_only: bool, cpu: bool) -> dict[str, torch.Tensor]:
    """Whole values, read one parameter at a time."""
    keeps = not rank0_only or runtime.is_main()
    runtime.sync()
    copies: dict[int, torch.Tensor] = {}  # tied values stay one tensor
    out: dict[str, Any] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor):
            if id(value) not in copies:
                whole = full_tensor(value.detach())  # all processes take part
                whole = whole if is_xla_tensor(value) or value.is_meta else whole.clone()
                copies[id(value)] = whole if cpu else whole.to(runtime.device())
            value = copies[id(value)]
        if keeps:
            out[name] = value
    return out


def give_memory(model: ShardedModel, part: Any, values: Mapping[str, Any]) -> None:
    """Allocate parameters on the meta device for which a state dict of `part` has values."""
    prefix = model.names[part]
    names = {f"{prefix}.{name}" if prefix else name for name in values}
    for p in model.parameters:
        if p.parameter.is_meta and names.intersection(p.plan.names):
            empty = torch.zeros(p.plan.shape, dtype=dtype_of(p.plan.dtype))
            p.place(nn.Parameter(empty, requires_grad=p.parameter.requires_grad))
