"""The parameters of a wrapped model on XLA as loading and saving see them: the interface of
`fsdp.parameter.ShardedParameter`, with the values of all devices of this process."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fullshard.fsdp.strategy import dtype_of
from fullshard.torch_private import parameters_of
from fullshard.xla import shards
from fullshard.xla.tensor import annotate


class LoadableParameter:
    """A parameter of the plan, and host memory for its values while they are read or written."""

    def __init__(self, annotated: Any):
        self.plan, self.layout, self.sites = annotated.plan, annotated.layout, annotated.sites
        self.shard: nn.Parameter = annotated.parameter
        self._staging: shards.Staging | None = None

    @property
    def is_meta(self) -> bool:
        """Whether the parameter has no memory yet."""
        return self.shard.is_meta

    @property
    def staged_bytes(self) -> int:
        """Bytes of host memory that `parts` takes, at most."""
        return self.shard.numel() * self.shard.element_size()

    @property
    def held(self) -> int:
        """The number of values of the parameter that the devices of this process hold, copies counted once."""
        return shards.Staging(self.shard).numel

    def give_memory(self) -> None:
        """Move a parameter from the meta device to the devices; its values are not defined until they are loaded."""
        if self.is_meta:
            dtype = dtype_of(self.plan.dtype)
            assert dtype is not None
            empty = nn.Parameter(shards.empty(self.plan.shape, dtype, None), self.shard.requires_grad)
            torch.utils.swap_tensors(self.shard, annotate(empty, self.layout))  # an optimizer may hold it

    def parts(self, keep: bool = False) -> list[tuple[shards.Cuts, torch.Tensor]]:
        """The parts of the parameter on the devices of this process, each once, in host memory."""
        self._staging = shards.Staging(self.shard)
        parts = self._staging.parts()
        if keep:
            values = {shards.key(piece.cuts): piece.value for piece in shards.read(self.shard)}
            for cuts, memory in parts:
                memory.copy_(values[shards.key(cuts)])
        return parts

    def written(self) -> None:
        """Move the values of `parts` to the devices."""
        assert self._staging is not None
        self._staging.commit()
        self._staging = None

    def show_shard(self) -> None:
        """Let the modules hold the parameter again."""
        for module, name in self.sites:
            parameters_of(module)[name] = self.shard
