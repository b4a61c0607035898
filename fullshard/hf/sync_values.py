"""Which values of a model the ranks have alike; the others are taken from the first rank.

Values that are still in their files (`lazy_parameters.py`) are not looked at, except for a few: every rank reads its
own slices of them. All others are compared by a checksum of every byte, whatever a script has done to them and by which
means. Only those that differ are sent through the network.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fullshard.device.torch_private import buffers_of
from fullshard.distributed import runtime
from fullshard.fsdp.shard import broadcast
from fullshard.hf.lazy_parameters import LazyTensor
from fullshard.spmd.mesh import Mesh

CHUNK = 2**17
"""64-bit words that are summed at a time."""
SAMPLE = 64
"""How many of the values in the files are compared, in case the ranks have loaded different files."""


def share(model: nn.Module, mesh: Mesh, skipped: set[int]) -> None:
    """Give every parameter and buffer that the ranks have differently the first rank's value.

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
    """Which parameters are the same on every rank."""
    if runtime.world_size() == 1 or not parameters:
        return [True] * len(parameters)
    mine = torch.stack([_fingerprint(p).to(runtime.device()) for p in parameters])  # [parameters, 2]
    first = mine.clone()
    dist.broadcast(first, src=0)
    same: Any = (mine == first).all(1).int()
    dist.all_reduce(same, op=dist.ReduceOp.MIN)
    return [bool(one) for one in same.tolist()]


def _fingerprint(parameter: nn.Parameter) -> torch.Tensor:
    """A checksum of a parameter's values, and whether they are in memory."""
    read = not isinstance(parameter, LazyTensor)
    value = parameter.detach() if read else parameter.read_slices(_sample(parameter.shape))
    return torch.stack([checksum(value), torch.full((), int(read), device=value.device)])


def _sample(shape: torch.Size) -> tuple[slice, ...]:
    """A run of values along the last dim, in the middle of the others."""
    return (*(slice(n // 2, n // 2 + 1) for n in shape[:-1]), *(slice(0, min(n, SAMPLE)) for n in shape[-1:]))


@torch.no_grad()
def checksum(value: torch.Tensor) -> torch.Tensor:
    """A 64-bit checksum of a tensor's bytes, as a tensor on its device; neither values nor their order can change."""
    data = value.contiguous().reshape(-1).view(torch.uint8)
    total = torch.full((), data.numel(), dtype=torch.int64, device=data.device)
    weights = _weights(data.device)
    for chunk in data.split(8 * CHUNK):
        if len(chunk) % 8 or chunk.storage_offset() % 8:
            chunk = nn.functional.pad(chunk.clone(), (0, -len(chunk) % 8))
        words = chunk.view(torch.int64)
        # Without the shift, two changed signs could cancel out: the highest bit times any odd number is itself.
        total = total * 31 + ((words ^ (words >> 29)) * weights[: len(words)]).sum()
    return total


@functools.cache
def _weights(device: torch.device) -> torch.Tensor:
    """Odd 64-bit numbers, the same on every rank."""
    numbers = torch.randint(-(2**63), 2**63 - 1, (CHUNK,), generator=torch.Generator().manual_seed(0))
    return (numbers | 1).to(device)
