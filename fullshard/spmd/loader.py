"""Batches over a mesh: which entry of a batch is split how, and a loader that does it for every batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fullshard import runtime
from fullshard.errors import BatchError, BatchKeyError, SpecError
from fullshard.spmd.mesh import Mesh
from fullshard.spmd.sharding import mark_sharding
from fullshard.spmd.spec import Layout, PartitionSpec
from fullshard.spmd.tensor import FromPiece, Relay, become_marked, is_sharded, torch_layout, unmarked
from fullshard.torch_private import DTensorSpec, TensorMeta, tree_map


@dataclass(frozen=True)
class ShardingSpec:
    """How the tensors of a batch are laid out.

    By default every rank brings the whole batch. With `minibatch` each rank brings its own part, in rank order, and the
    global batch is all of them one after the other.
    """

    mesh: Mesh
    partition_spec: PartitionSpec
    minibatch: bool = False

    def __post_init__(self) -> None:
        Layout.of(self.mesh, self.partition_spec)
        if self.minibatch and len(self.partition_spec) == 0:
            raise SpecError("minibatch=True needs a partition spec with at least one entry: dim 0 is the batch")

    def can_apply(self, t: torch.Tensor) -> bool:
        """Whether the spec fits the tensor: one entry per dim."""
        return len(t.shape) == len(self.partition_spec)

    def apply(self, t: torch.Tensor) -> torch.Tensor:
        """Lay `t` out, in place; returns the sharded tensor."""
        if not self.minibatch or is_sharded(unmarked(t)):
            return mark_sharding(t, self.mesh, self.partition_spec)
        sharded = self._join(t)
        if type(t) is torch.Tensor:
            become_marked(t, sharded)
        return sharded

    def _join(self, t: torch.Tensor) -> Any:
        """The ranks' parts as one tensor: split on dim 0 over all axes in rank order, then laid out as asked."""
        layout = Layout.of(self.mesh, self.partition_spec, t.shape)
        shapes: list[Any] = [None] * runtime.world_size()
        dist.all_gather_object(shapes, tuple(t.shape))
        shapes = [shapes[rank] for rank in self.mesh.device_ids]
        total, parts = sum(shape[0] for shape in shapes), layout.parts(0)
        if len(set(shapes)) > 1 or total % parts:
            raise BatchError(
                f"minibatch: the ranks bring parts of shapes {shapes}, together {total} rows to be split {parts} ways "
                f"over {self.mesh}; every rank must bring the same shape and the rows must divide (drop_last=True)"
            )
        full_shape = torch.Size((total, *t.shape[1:]))
        by_rank = Layout(self.mesh, (tuple(range(self.mesh.ndim)), *((),) * (t.ndim - 1)))
        device_mesh, placements = torch_layout(by_rank, full_shape)
        stride = torch.empty(full_shape, device="meta").stride()
        meta = TensorMeta(full_shape, stride, t.dtype)
        part = t.to(runtime.device()).contiguous()
        joined = FromPiece.apply(part, DTensorSpec(device_mesh, placements, tensor_meta=meta))
        return Relay.apply(joined, *torch_layout(layout, full_shape), False)


class ShardedLoader:
    """Wraps any iterable of batches and lays every tensor out by `input_sharding`.

    One `ShardingSpec` is applied to each tensor of the batch that it fits; a dict of them, by key, to the entries of
    batches that are dicts (None: leave that entry as it is). Tensors without a spec are moved to this rank's device.
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
        """Lay one batch out."""
        sharding = self.input_sharding
        if not isinstance(sharding, Mapping):
            return tree_map(lambda leaf: self._place_one(leaf, sharding), batch)
        if not isinstance(batch, Mapping):
            raise BatchError(
                f"input_sharding is a dict with keys {sorted(sharding)}, but the loader gave a {type(batch).__name__}; "
                f"give one ShardingSpec, or a loader whose batches are dicts"
            )
        absent, extra = sorted(set(sharding) - set(batch)), sorted(set(batch) - set(sharding))
        if absent or extra:
            problem = f"the batch lacks {absent}" if absent else f"no sharding for {extra} (None leaves an entry alone)"
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
