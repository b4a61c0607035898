"""The outputs of units: how global outputs are split, and the user's `shard_output`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fullshard.config.errors import FSDPError
from fullshard.device.torch_private import storage_id
from fullshard.fsdp.parameter import piece_of
from fullshard.fsdp.unit import Unit
from fullshard.spmd.mesh import Mesh
from fullshard.spmd.sharding import disable_manual_sharding, mark_sharding, sharding_of
from fullshard.spmd.tensor import ShardedTensor
from fullshard.spmd.tensor_tree import map_tensors, tensors_in


def without_gathered_memory(unit: Unit, output: Any) -> Any:
    """The output, with copies of those tensors that share memory with the unit's gathered values.

    A module may return its parameters, or views of them. That memory is released with the unit, so the caller gets a
    copy, through which gradients flow.
    """
    gathered = {storage_id(p.full) for p in unit.parameters if p.full is not None}

    def is_shared(t: torch.Tensor) -> bool:
        t = piece_of(t)
        return t.layout is torch.strided and storage_id(t) in gathered

    if not any(is_shared(t) for t in tensors_in(output)):
        return output
    output = map_tensors(lambda t: t.clone() if is_shared(t) else t, output)
    if any(is_shared(t) for t in tensors_in(output)):
        raise FSDPError(
            f"unit {unit.name or '(root)'} returns one of its parameters (or a view of one) inside an object of an "
            f"unknown class, where it cannot be replaced by a copy that outlives the unit; return it in a tuple, list, "
            f"dict or dataclass, or return a clone() of it"
        )
    return output


@dataclass
class OutputRule:
    """Splits global outputs on dim 0 over the data axes, then calls the user's `shard_output`."""

    shard_output: Callable[[Any, Mesh], Any] | None
    mesh: Mesh
    axes: tuple[str, ...]
    """The axes over which the batch is split, major to minor."""

    def __call__(self, output: Any, as_global: bool) -> Any:
        if as_global:
            self._split(output)
        if self.shard_output is None:
            return output
        replaced = self.shard_output(output if as_global else self._as_pieces(output), self.mesh)
        return output if replaced is None else replaced

    def _split(self, output: Any) -> None:
        """Split a tensor, or the first of a tuple, unless its dim 0 or the axes are already in use."""
        first = output[0] if isinstance(output, tuple) and output else output
        if not isinstance(first, ShardedTensor) or first.ndim == 0:
            return
        layout = sharding_of(first)
        assert layout is not None
        used = {axis for dims in layout.dims for axis in dims}
        if not layout.dims[0] and not used.intersection(self.mesh.get_axis_name_idx(axis) for axis in self.axes):
            mark_sharding(first, self.mesh, (self.axes, *layout.spec[1:]))

    def _as_pieces(self, output: Any) -> Any:
        """Per-rank outputs as pieces of global tensors that are split on dim 0; gradients flow through."""
        parts = math.prod(self.mesh.shape()[axis] for axis in self.axes)

        def piece(t: torch.Tensor) -> torch.Tensor:
            if t.ndim == 0:
                return t
            spec = (self.axes, *(None for _ in t.shape[1:]))
            return disable_manual_sharding(t, spec, (t.shape[0] * parts, *t.shape[1:]), mesh=self.mesh)

        return map_tensors(piece, output)
