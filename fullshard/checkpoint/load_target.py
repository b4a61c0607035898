"""The memory that a restore reads into: the shards of each tensor that this process holds.

On the torch engine that is the memory of the tensor itself. The memory of XLA devices is filled from host memory, a few
tensors at a time, so that a restore needs little of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from fullshard.checkpoint.manifest import Manifest
from fullshard.checkpoint.shard_index import on_xla, shard_of
from fullshard.weights.safetensors_index import DTYPE_NAMES, DTYPES

STAGED_BYTES = 2**30
"""Restored tensors of XLA devices are together in host memory up to this size."""


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


class XlaTensorToLoad(TensorToLoad):
    """A tensor on XLA devices: its targets are in host memory, and `finish` loads them into the devices."""

    def __init__(self, name: str, tensor: torch.Tensor):
        super().__init__(name, tensor)
        self.staged_bytes = tensor.numel() * tensor.element_size()

    def targets(self) -> list[LoadTarget]:
        from fullshard.xla import shards as xla

        self._staging = xla.Staging(self.tensor)
        return [LoadTarget(self.name, memory, xla.starts(cuts)) for cuts, memory in self._staging.parts()]

    def finish(self) -> None:
        self._staging.commit()


def to_load(name: str, tensor: torch.Tensor) -> TensorToLoad:
    """The tensor as what a stored one called `name` is read into."""
    if on_xla(tensor):
        return XlaTensorToLoad(name, tensor)
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
