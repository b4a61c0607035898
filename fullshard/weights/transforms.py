"""How a value is changed on its way from the files into the shards.

Two ways, both slice by slice. A `transform` sees each ordinary parameter's slice and may return another one. A module
that stores something else than its files hold (packed, quantised weights) reads the files itself: it says which file
tensors it takes, is handed a `TensorReader` for each, asks for the ranges that concern this rank, and writes to its own
shards. `docs/weights.md` has the protocol and an example.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from fullshard import runtime
from fullshard.fsdp.parameter import ShardedParameter
from fullshard.fsdp.strategy import dtype_of
from fullshard.spmd.mesh import Mesh
from fullshard.weights.slice_reader import Cuts, TensorReader


@dataclass(frozen=True)
class Piece:
    """One parameter, and what this rank holds of it."""

    name: str
    """In the model."""
    shape: tuple[int, ...]
    """Of the whole."""
    dtype: torch.dtype
    cuts: Cuts
    """Which part of the whole this rank holds, dim by dim."""
    local: torch.Tensor
    """The memory of that part, to be written to."""
    mesh: Mesh

    @property
    def rows(self) -> slice:
        """This rank's part of dim 0."""
        return self.cuts[0]


Transform = Callable[[str, torch.Tensor, Piece], torch.Tensor | None]
"""`transform(name, value, piece)`: this rank's slice of a parameter as it was read. What it returns takes its place;
None leaves it."""


@runtime_checkable
class ReadsFiles(Protocol):
    """A module whose parameters are made from file tensors of another form."""

    def file_tensors(self) -> Mapping[str, tuple[int, ...]]:
        """The tensors it takes, by the name they would have in it, with their shapes: `{"weight": (out, in)}`."""

    def made_parameters(self) -> tuple[str, ...]:
        """Its parameters that are made from them. Those it does not name are loaded as usual."""

    def read_files(self, readers: Mapping[str, TensorReader], pieces: Mapping[str, Piece]) -> Any:
        """Read what this rank needs; no communication here. Called for one module at a time."""

    def finish_reading(self, read: Any, pieces: Mapping[str, Piece]) -> None:
        """Called on every rank, in the same order, once all have read: may communicate, and writes the pieces."""


@runtime_checkable
class WritesFiles(Protocol):
    """A module that also knows the way back, so that a model with it can be exported."""

    def made_parameters(self) -> tuple[str, ...]:
        """As in `ReadsFiles`."""

    def as_files(self, values: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """The tensors that files hold, by the name they would have in the module, from its whole made parameters. Of
        meta tensors it gives meta tensors of the same form."""


def piece_of(p: ShardedParameter) -> Piece:
    dtype = dtype_of(p.plan.dtype)
    assert dtype is not None
    cuts = p.layout.slices(p.plan.shape, runtime.rank())
    return Piece(p.plan.name, p.plan.shape, dtype, cuts, p.local.detach(), p.layout.mesh)


def own_readers(root: nn.Module) -> dict[str, Any]:
    """The modules that read the files themselves, by name."""
    return {name: module for name, module in root.named_modules() if isinstance(module, ReadsFiles)}
