"""Sharding of batches on XLA: the specs and the loader of `spmd.loader`, whose tensors become annotated ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fullshard.config.errors import BatchError
from fullshard.distributed import runtime
from fullshard.spmd import loader
from fullshard.spmd.spec import Layout
from fullshard.xla.sharding import mark_sharding
from fullshard.xla.tensor import become_sharded, from_parts, is_sharded, remember, transfer_spec

ShardedLoader = loader.ShardedLoader


@dataclass(frozen=True)
class ShardingSpec(loader.ShardingSpec):
    """The layout of the tensors of a batch.

    By default every process loads the full global batch. With `minibatch` each process loads the rows of its own
    devices, and the global batch is the parts in the order of processes.
    """

    def xla_spec(self, t: torch.Tensor) -> Any:
        """The spec for torch_xla's own loaders (`MpDeviceLoader`); None for a tensor that it does not fit."""
        if not self.can_apply(t):
            return None
        return transfer_spec(t, Layout.of(self.mesh, self.partition_spec, t.shape), parts=self.minibatch)

    def apply(self, t: torch.Tensor) -> torch.Tensor:
        """Shard `t` in place; returns it. With `minibatch` on several processes, a new tensor."""
        if not self.minibatch or is_sharded(t):
            return mark_sharding(t, self.mesh, self.partition_spec)
        layout = Layout.of(self.mesh, self.partition_spec, t.shape)
        rows, processes = t.shape[0], runtime.world_size()
        if rows * processes % layout.parts(0) or (processes > 1 and layout.parts(0) != self.mesh.size()):
            raise BatchError(
                f"minibatch: this process loaded {rows} rows, {rows * processes} in total, to be split "
                f"{layout.parts(0)} ways over {self.mesh}; that number must divide the rows (drop_last=True), and on "
                f"several processes dim 0 must be split over all axes of the mesh"
            )
        if processes == 1:
            return mark_sharding(t, self.mesh, self.partition_spec)
        joined = from_parts(t, layout)
        remember(joined, layout)
        return become_sharded(joined)
