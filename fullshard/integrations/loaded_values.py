"""Which values of a model the ranks have alike, because they loaded them, and which are taken from the first rank.

transformers maps weights from their files: they take no memory until they are written to, and every rank reads only
what it keeps once the model is sharded. Sending them through the network, as the engine does with values it knows
nothing about, would bring all of them into memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fullshard import runtime
from fullshard.fsdp.shard import broadcast
from fullshard.spmd.mesh import Mesh
from fullshard.torch_private import buffers_of, version_of

MARK = "_fullshard_loaded"
"""On a parameter that came from files: how often it had been written to by then."""
SAMPLES = 32
"""Elements of a loaded parameter that the ranks compare, in case a script wrote to it unseen (through `.data`)."""


def mark(model: nn.Module, missing: Iterable[str]) -> None:
    """Note that this model's parameters came from files, except those that the files lack."""
    lacking = set(missing)
    for name, parameter in model.named_parameters():
        if name not in lacking:
            setattr(parameter, MARK, version_of(parameter))


def share(model: nn.Module, mesh: Mesh, skipped: set[int]) -> None:
    """Give every parameter and buffer that the ranks may have differently the first rank's value.

    All ranks must call it. `skipped` has the ids of parameters that get their values later.
    """
    parameters = [p for p in model.parameters() if id(p) not in skipped]
    for parameter, alike in zip(parameters, _alike(parameters), strict=True):
        if not alike:
            parameter.data = _first_rank_s(parameter.detach(), mesh)
    for module in model.modules():
        for name, buffer in list(buffers_of(module).items()):
            if buffer is not None and not buffer.is_meta and buffer.numel():
                buffers_of(module)[name] = _first_rank_s(buffer, mesh)


def _first_rank_s(value: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    return broadcast(value.to(runtime.device(), copy=True).contiguous(), mesh).to(value.device)


def _alike(parameters: list[nn.Parameter]) -> list[bool]:
    """Which parameters are as loaded on every rank. Only samples of their values are looked at."""
    if runtime.world_size() == 1 or not parameters:
        return [True] * len(parameters)
    mine = torch.stack([_samples(p) for p in parameters]).to(runtime.device())
    first = mine.clone()
    dist.broadcast(first, src=0)
    same: Any = ((mine == first).all(1) & ~mine.isnan().any(1)).int()  # a NaN also stands for "not loaded"
    dist.all_reduce(same, op=dist.ReduceOp.MIN)
    return [bool(one) for one in same.tolist()]


def _samples(parameter: nn.Parameter) -> torch.Tensor:
    out = torch.full((SAMPLES,), float("nan"), dtype=torch.float64)
    if getattr(parameter, MARK, None) == version_of(parameter) and parameter.numel():
        flat = parameter.detach().reshape(-1)
        at = torch.linspace(0, len(flat) - 1, SAMPLES, dtype=torch.float64).long()
        out = flat[at.to(flat.device)].to("cpu", torch.float64)
    return out
