"""Sharding of batches on XLA: the specs and the loader of `spmd.loader`, whose tensors become annotated ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fullshard.spmd import loader
from fullshard.xla.sharding import mark_sharding


@dataclass(frozen=True)
class ShardingSpec(loader.ShardingSpec):
    """The layout of the tensors of a batch, of which every process loads the full global batch."""

    def apply(self, t: torch.Tensor) -> torch.Tensor:
        """Shard a tensor of a batch."""
        return mark_sharding(t, self.mesh, self.partition_spec)


ShardedLoader = loader.ShardedLoader
