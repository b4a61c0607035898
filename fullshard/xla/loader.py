"""Sharding of batches on XLA: the specs and the loader of `spmd.loader`, whose tensors become annotated ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fullshard import runtime
from fullshard.spmd import loader
from fullshard.spmd.mesh import get_1d_mesh
from fullshard.xla.sharding import mark_sharding

REPLACES = ("place",)


@dataclass(frozen=True)
class ShardingSpec(loader.ShardingSpec):
    """The layout of the tensors of a batch, of which every process loads the full global batch."""

    def apply(self, t: torch.Tensor) -> torch.Tensor:
        """Shard a tensor of a batch."""
        return mark_sharding(t, self.mesh, self.partition_spec)


ShardedLoader = loader.ShardedLoader


def place(value: torch.Tensor, pin: bool = False) -> torch.Tensor:
    """A tensor of this process's batch on its devices, split over them by rows. `pin` changes nothing."""
    placed = value.to(runtime.device())
    if not value.ndim:
        return placed
    return mark_sharding(placed, get_1d_mesh("batch"), ("batch", *(None for _ in value.shape[1:])))
