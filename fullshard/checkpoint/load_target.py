"""The memory that a restore reads into: the shards of each tensor that this process holds.

Where a process holds one shard that is the memory of the tensor itself. Where it holds several, they are filled from
host memory, a few tensors at a time, so that a restore needs little of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from fullshard.checkpoint.manifest import Manifest
from fullshard.checkpoint.shard_index import host_shards, shard_of, starts
from fullshard.engines import HostShards
from fullshard.weights.safetensors_index import DTYPE_NAMES, DTYPES

STAGED_BYTES = 2**30
"""Restored tensors that are staged are together in host memory up to this size."""


@dataclass(frozen=True)
class LoadTarget:
    """Memory to read into: a shard of a stored tensor."""

    name: str
    """Name of the stored tensor."""
    local: torch.Tensor
    offsets: tuple[int, ...]


class TensorToLoad:
    """A tensor that a stored one is read into."""

    staged_bytes = 0
    """Host memory that `targets` takes: at most the whole tensor, so that all ranks read the same ones together."""

    def __init__(self, name: str, tensor: torch.Tensor):
        self.name, self.tensor = name, tensor

    def targets(self) -> list[LoadTarget]:
        """The memory of the shards that this process holds."""
        shard = shard_of(self.name, self.tensor)
        return [] if shard is None else [LoadTarget(self.name, shard.local, shard.offsets)]

    def finish(self) -> None:
        """Called once the targets are filled."""


class StagedTensor(TensorToLoad):
    """A tensor whose targets are in host memory; `finish` loads them into the devices of this process."""

    def __init__(self, name: str, tensor: torch.Tensor, shards: HostShards):
        super().__init__(name, tensor)
        self._shards = shards
        self.staged_bytes = tensor.numel() * tensor.element_size()

    def targets(self) -> list[LoadTarget]:
        self._staging = self._shards.stage(self.tensor)
        return [LoadTarget(self.name, memory, starts(cuts)) for cuts, memory in self._staging.parts()]

    def finish(self) -> None:
        self._staging.commit()


def to_load(name: str, tensor: torch.Tensor) -> TensorToLoad:
    """The tensor as what a stored one called `name` is read into."""
    if (on_host := host_shards(tensor)) is not None:
        return StagedTensor(name, tensor, on_host)
    shard_of(name, tensor)  # raises for a tensor that nothing can be read into
    return TensorToLoad(name, tensor)


def together(tensors: Iterable[TensorToLoad]) -> Iterator[list[TensorToLoad]]:
    """The tensors in groups that are read together: at least one group, the same ones on every rank."""
    group: list[TensorToLoad] = []
    for tensor in tensors:
        if group and sum(t.staged_bytes for t in group) + tensor.staged_bytes > STAGED_BYTES:
            yield group
            group = []
        group.append(tensor)
    yield group


def mismatch(name: str, tensor: torch.Tensor, manifest: Manifest) -> str:
    """Why a stored tensor cannot be read into `tensor`; empty if it can."""
    stored = manifest.tensors.get(name)
    if stored is None:
        return f"{name} is not in the checkpoint"
    if tuple(stored.shape) != tuple(tensor.shape):
        return f"{name} has shape {tuple(stored.shape)} in the checkpoint and {tuple(tensor.shape)} here"
    dtype = DTYPES[stored.dtype]
    if dtype.is_floating_point != tensor.dtype.is_floating_point or (
        not dtype.is_floating_point and dtype != tensor.dtype
    ):
        return f"{name} is {stored.dtype} in the checkpoint and {DTYPE_NAMES.get(tensor.dtype, tensor.dtype)} here"
    return ""
