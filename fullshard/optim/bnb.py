"""Optimizers of bitsandbytes on sharded parameters: its kernels update each rank's shard, with state for that shard.

The state is sharded like its parameter, so that checkpoints can move it to other numbers of ranks. 8-bit state has one
scale per block of 256 values in memory order. Where every shard begins at a multiple of a block (hidden sizes are
usually multiples of 256), blocks and results are those of one device. Elsewhere the blocks begin at the shards: results
differ by quantization error, and the state fits the same division into shards only.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from fullshard.config.errors import FSDPError
from fullshard.device.torch_private import DTensorSpec, TensorMeta, local_of, spec_of
from fullshard.spmd.redistribute import layout_of
from fullshard.spmd.tensor import is_sharded

BLOCK = 256
"""Values that share a scale."""
SCALES = ("absmax1", "absmax2")


def is_bnb(optimizer: torch.optim.Optimizer) -> bool:
    """Whether this is an optimizer of bitsandbytes."""
    return any(
        kind.__name__ == "Optimizer8bit" and kind.__module__.startswith("bitsandbytes.")
        for kind in type(optimizer).__mro__
    )


def work_on_shards(optimizer: Any) -> None:
    """Change the class of an optimizer of bitsandbytes, so that it updates sharded parameters too."""
    if isinstance(optimizer, OnShards):
        return
    kind: Any = type(optimizer)
    if optimizer.args.max_unorm > 0:
        raise FSDPError(
            f"{kind.__name__} of bitsandbytes scales updates by the norm of the whole parameter, and its kernels see "
            f"one shard; use AdamW, Lion or RMSprop of bitsandbytes"
        )
    if getattr(optimizer, "optimizer_name", "") == "ademamix":
        raise FSDPError("AdEMAMix of bitsandbytes cannot be sharded: its state stacks two averages; use AdamW")
    optimizer.__class__ = _on_shards(kind)
    optimizer.check_overrides()  # otherwise at the first step, which comes after the first state is made here


@functools.cache
def _on_shards(kind: Any) -> type:
    # The same name: a checkpoint stores it and compares it.
    return type(kind.__name__, (OnShards, kind), {"__module__": kind.__module__, "__qualname__": kind.__qualname__})


class OnShards:
    """The methods with which an optimizer of bitsandbytes makes and uses the state of one parameter."""

    state: dict[Any, dict[str, Any]]
    param_groups: list[dict[str, Any]]

    def get_config(self, gindex: int, pindex: int, group: dict[str, Any]) -> dict[str, Any]:
        """The options of a parameter. A group's `optim_bits` overrides the optimizer's. Whether a parameter is large
        enough for 8 bits depends on its whole size, as on one device."""
        config: dict[str, Any] = super().get_config(gindex, pindex, group)  # type: ignore[misc]
        config["optim_bits"] = group.get("optim_bits", config["optim_bits"])
        large = self.param_groups[gindex]["params"][pindex].numel() >= config["min_8bit_size"]
        return {**config, "min_8bit_size": 0 if large else sys.maxsize}

    def init_state(self, group: dict[str, Any], p: nn.Parameter, gindex: int, pindex: int) -> None:
        """Make the state of a parameter: that of its shard, sharded as the parameter is."""
        if not is_sharded(p):
            super().init_state(group, p, gindex, pindex)  # type: ignore[misc]
            return
        with self._local(p) as piece:
            super().init_state(group, piece, gindex, pindex)  # type: ignore[misc]
            state = dict(self.state[piece])
        for name, value in state.items():
            if name in SCALES:
                state[name] = _scales(value, p)
            elif name in ("state1", "state2"):
                state[name] = _wrapped(value, p, p.shape, p.placements)
        self.state[p] = state

    def to_gpu(self) -> None:
        """Nothing: state stays where it was made, with its shard or in paged memory; bitsandbytes would move it to the
        device before the first step."""

    def prefetch_state(self, p: nn.Parameter) -> None:
        """Start to copy paged state of this rank's shard to the device."""
        with self._local(p) as piece:
            super().prefetch_state(piece)  # type: ignore[misc]

    def update_step(self, group: dict[str, Any], p: nn.Parameter, gindex: int, pindex: int) -> None:
        """Update this rank's shard of a parameter."""
        with self._local(p) as piece:
            if piece.numel():
                super().update_step(group, piece, gindex, pindex)  # type: ignore[misc]
            else:  # this rank holds nothing of a small parameter
                self.state[piece]["step"] += 1

    @contextlib.contextmanager
    def _local(self, p: nn.Parameter) -> Iterator[nn.Parameter]:
        """This rank's shard as a plain parameter, with its gradient and its part of the state."""
        if not is_sharded(p):
            yield p
            return
        piece = nn.Parameter(local_of(p).detach(), requires_grad=False)
        piece.grad = None if p.grad is None else local_of(p.grad)
        state = self.state[p]
        self.state[piece] = {name: _piece_of(name, value, piece) for name, value in state.items()}
        try:
            yield piece
            if state:
                state["step"] = self.state[piece]["step"]
        finally:
            del self.state[piece]


def _piece_of(name: str, value: Any, piece: torch.Tensor) -> Any:
    if not isinstance(value, torch.Tensor) or not is_sharded(value):
        return value
    local = local_of(value)
    return local.view(-1)[: -(-piece.numel() // BLOCK)] if name in SCALES else local


def _scales(scales: torch.Tensor, p: nn.Parameter) -> torch.Tensor:
    """The scales of this rank's blocks, as a part of the scales of the whole parameter.

    If shards are runs of rows that begin at blocks, they have the shape (groups of rows, blocks in a group): a group is
    the fewest rows that fill whole blocks, so the scales are divided among ranks as the rows are. Otherwise the shape
    is (shards, 1, blocks in a shard), which no other division into shards has.
    """
    needed = -(-local_of(p).numel() // BLOCK)
    if scales.numel() != needed:
        raise FSDPError(
            f"bitsandbytes keeps {scales.numel()} scales for {local_of(p).numel()} values; expected one per {BLOCK}. "
            f"Install bitsandbytes 0.45 or newer"
        )
    layout = layout_of(spec_of(p))
    rows, width = (p.shape[0], math.prod(p.shape[1:])) if p.dim() else (1, 1)
    group = BLOCK // math.gcd(width, BLOCK)
    shards = math.prod(layout.parts(dim) for dim in range(p.dim()))
    shard_rows = layout.shard_shape(p.shape)[0] if p.dim() else 1
    shape: tuple[int, ...]
    mine: tuple[int, ...]
    if shards == 1 or (shards == layout.parts(0) and shard_rows % group == 0):
        shape = (-(-rows // group), group * width // BLOCK)
        mine = (-(-(local_of(p).shape[0] if p.dim() else 1) // group), shape[1])
    else:
        shape = (shards, 1, -(-math.prod(layout.shard_shape(p.shape)) // BLOCK))
        mine = (1, *shape[1:])
    local = scales.new_zeros(mine)
    placements = [Shard(0) if isinstance(at, Shard) else Replicate() for at in p.placements]
    return _wrapped(local, p, shape, placements)


def _wrapped(local: torch.Tensor, p: Any, shape: Any, placements: Any) -> torch.Tensor:
    """A sharded tensor with this rank's shard, on the mesh of a parameter."""
    stride = torch.empty(shape, device="meta").stride()
    meta = TensorMeta(torch.Size(shape), stride, local.dtype)
    kind = type(p.detach())
    tensor: torch.Tensor = kind(
        local, DTensorSpec(p.device_mesh, tuple(placements), tensor_meta=meta), requires_grad=False
    )
    return tensor
