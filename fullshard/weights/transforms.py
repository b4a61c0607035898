"""Changes to values during loading, slice by slice.

There are two ways. A `transform` function gets this rank's slice of each ordinary parameter and may return another one.
A module whose parameters have another form than its files (quantized weights) reads the files itself: it names the file
tensors it needs, gets a `TensorReader` for each, reads the ranges for this rank and writes its own shards
(`ReadsFiles`). `docs/weights.md` describes the protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from fullshard.fsdp.parameter import ShardedParameter
from fullshard.fsdp.strategy import dtype_of
from fullshard.spmd.mesh import Mesh
from fullshard.weights.slice_reader import Cuts, TensorReader


@dataclass(frozen=True)
class Piece:
    """One parameter and this rank's shard of it."""

    name: str
    """Its name in the model."""
    shape: tuple[int, ...]
    """The full shape."""
    dtype: torch.dtype
    cuts: Cuts
    """The slice of the full tensor on this rank."""
    local: torch.Tensor
    """The memory of that slice, to write to."""
    mesh: Mesh

    @property
    def rows(self) -> slice:
        """This rank's slice of dim 0."""
        return self.cuts[0]


Transform = Callable[[str, torch.Tensor, Piece], torch.Tensor | None]
"""`transform(name, value, piece)`: `value` is this rank's slice of a parameter as loaded. The returned tensor replaces
it; None keeps it."""


@runtime_checkable
class ReadsFiles(Protocol):
    """A module whose parameters are computed from file tensors of another form."""

    def file_tensors(self) -> Mapping[str, tuple[int, ...]]:
        """Names (relative to the module) and shapes of the file tensors it needs: `{"weight": (out, in)}`."""

    def made_parameters(self) -> tuple[str, ...]:
        """The names of its parameters that are computed from them. Other parameters are loaded as usual."""

    def read_files(self, readers: Mapping[str, TensorReader], pieces: Mapping[str, Piece]) -> Any:
        """Read what this rank needs. Must not communicate. Called for one module at a time."""

    def finish_reading(self, read: Any, pieces: Mapping[str, Piece]) -> None:
        """Write the pieces. Called on every rank in the same order after all have read; may communicate."""


@runtime_checkable
class WritesFiles(Protocol):
    """A module that can also convert its parameters back to file tensors, for export."""

    def made_parameters(self) -> tuple[str, ...]:
        """As in `ReadsFiles`."""

    def as_files(self, values: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """The file tensors by name (relative to the module), from the unsharded values of its made parameters. Meta
        tensors give meta tensors."""


def pieces_of(p: ShardedParameter, keep: bool = False) -> list[Piece]:
    """The pieces of a sharded parameter on this process; `keep` as in `ShardedParameter.parts`."""
    dtype = dtype_of(p.plan.dtype)
    assert dtype is not None
    parts = p.parts(keep)
    return [Piece(p.plan.name, p.plan.shape, dtype, cuts, memory, p.layout.mesh) for cuts, memory in parts]


def piece_of(p: ShardedParameter) -> Piece:
    """The piece of a sharded parameter on this rank of the torch engine, which has one."""
    (piece,) = pieces_of(p)
    return piece


def own_readers(root: nn.Module) -> dict[str, Any]:
    """The modules that read files themselves (`ReadsFiles`), by name."""
    return {name: module for name, module in root.named_modules() if isinstance(module, ReadsFiles)}
