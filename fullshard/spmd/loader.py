"""Sharding of batches: a spec for the entries of a batch, and a loader that applies it to every batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fullshard.config.errors import BatchError, BatchKeyError, SpecError
from fullshard.device.torch_private import DTensorSpec, TensorMeta, tree_map
from fullshard.distributed import runtime
from fullshard.spmd.mesh import Mesh
from fullshard.spmd.redistribute import torch_layout
from fullshard.spmd.sharding import mark_sharding
from fullshard.spmd.spec import Layout, PartitionSpec
from fullshard.spmd.tensor import FromLocal, Redistribute, become_marked, is_sharded, unmarked


@dataclass(frozen=True)
class ShardingSpec:
    """The layout of the tensors of a batch.

    By default every rank loads the full global batch. With `minibatch` each rank loads its own part, and the global
    batch is the parts in rank order.
    """

    mesh: Mesh
    partition_spec: PartitionSpec
    minibatch: bool = False

    def __post_init__(self) -> None:
        Layout.of(self.mesh, self.partition_spec)
        if self.minibatch and len(self.partition_spec) == 0:
            raise SpecError("minibatch=True needs a partition spec with at least one entry: dim 0 is the batch")

    def can_apply(self, t: torch.Tensor) -> bool:
        """Whether the spec has one entry per dim of the tensor."""
        return len(t.shape) == len(self.partition_spec)

    def apply(self, t: torch.Tensor) -> torch.Tensor:
        """Shard `t` in place; returns the sharded tensor."""
        if not self.minibatch or is_sharded(unmarked(t)):
            return mark_sharding(t, self.mesh, self.partition_spec)
        sharded = self._join(t)
        if type(t) is torch.Tensor:
            become_marked(t, sharded)
        return sharded

    def _join(self, t: torch.Tensor) -> Any:
        """One tensor from the ranks' parts: split on dim 0 in rank order, then redistributed to the spec."""
        layout = Layout.of(self.mesh, self.partition_spec, t.shape)
        shapes: list[Any] = [None] * runtime.world_size()
        dist.all_gather_object(shapes, tuple(t.shape))
        shapes = [shapes[rank] for rank in self.mesh.device_ids]
        total, parts = sum(shape[0] for shape in shapes), layout.parts(0)
        if len(set(shapes)) > 1 or total % parts:
            raise BatchError(
                f"minibatch: the ranks loaded parts of shapes {shapes}, {total} rows in total to be split {parts} ways "
                f"over {self.mesh}; all ranks must load the same shape, and {parts} must divide the rows "
                f"(drop_last=True)"
            )
        full_shape = torch.Size((total, *t.shape[1:]))
        by_rank = Layout(self.mesh, (tuple(range(self.mesh.ndim)), *((),) * (t.ndim - 1)))
        device_mesh, placements = torch_layout(by_rank, full_shape)
        stride = torch.empty(full_shape, device="meta").stride()
        meta = TensorMeta(full_shape, stride, t.dtype)
        part = t.to(runtime.device()).contiguous()
        joined = FromLocal.apply(part, DTensorSpec(device_mesh, placements, tensor_meta=meta))
        return Redistribute.apply(joined, *torch_layout(layout, full_shape), False)


class ShardedLoader:
    """Wraps an iterable of batches and shards every tensor according to `input_sharding`.

    A single `ShardingSpec` applies to each tensor with as many dims as the spec has entries. A dict of specs applies by
    key to batches that are dicts (None: do not shard that entry). Tensors without a spec are moved to this rank's
    device.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        device: torch.device | str | None = None,
        *,
        input_sharding: ShardingSpec | Mapping[str, ShardingSpec | None] | None = None,
    ):
        self.loader = loader
        self.device = torch.device(device) if device is not None else runtime.device()
        self.input_sharding = input_sharding

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            yield self.place(batch)

    def place(self, batch: Any) -> Any:
        """Shard one batch."""
        sharding = self.input_sharding
        if not isinstance(sharding, Mapping):
            return tree_map(lambda leaf: self._place_one(leaf, sharding), batch)
        if not isinstance(batch, Mapping):
            raise BatchError(
                f"input_sharding is a dict with keys {sorted(sharding)}, but the loader returned a "
                f"{type(batch).__name__}; pass one ShardingSpec, or a loader whose batches are dicts"
            )
        absent, extra = sorted(set(sharding) - set(batch)), sorted(set(batch) - set(sharding))
        if absent or extra:
            problem = f"the batch lacks {absent}" if absent else f"no sharding for {extra} (None: do not shard it)"
            raise BatchKeyError(f"input_sharding has keys {sorted(sharding)} and the batch {sorted(batch)}: {problem}")
        return {
            key: tree_map(partial(self._place_one, sharding=sharding[key], must_fit=True), value)
            for key, value in batch.items()
        }

    def _place_one(self, leaf: Any, sharding: ShardingSpec | None, must_fit: bool = False) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if sharding is None or (not must_fit and not sharding.can_apply(leaf)):
            return leaf.to(self.device)
        return sharding.apply(leaf)
