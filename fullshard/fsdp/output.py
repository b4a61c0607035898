"""What becomes of a unit's output: how global tensors are split, and what the user's `shard_output` says."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fullshard.errors import FSDPError
from fullshard.fsdp.tensor_tree import map_tensors, tensors_in
from fullshard.fsdp.unit import Unit
from fullshard.fsdp.write_count import piece_of
from fullshard.spmd.mesh import Mesh
from fullshard.spmd.sharding import disable_manual_sharding, mark_sharding, sharding_of
from fullshard.spmd.tensor import ShardedTensor
from fullshard.torch_private import storage_id


def outliving(unit: Unit, output: Any) -> Any:
    """An output in which nothing lies in the memory of the unit's gathered values.

    A module may return its parameters, or views of them. The gathered value's memory goes with the unit and its leaf is
    the same in every step, so what leaves is a copy, through which gradients flow.
    """

    gathered = {storage_id(p.full) for p in unit.parameters if p.full is not None}

    def borrowed(t: torch.Tensor) -> bool:
        t = piece_of(t)
        return t.layout is torch.strided and storage_id(t) in gathered

    if not any(borrowed(t) for t in tensors_in(output)):
        return output
    output = map_tensors(lambda t: t.clone() if borrowed(t) else t, output)
    if any(borrowed(t) for t in tensors_in(output)):
        raise FSDPError(
            f"unit {unit.name or '(root)'} returns one of its parameters (or a view of one) inside an object of a "
            f"class that is not known here, so it cannot be replaced by a copy that outlives the unit; return it in a "
            f"tuple, list, dict or dataclass, or return a clone() of it"
        )
    return output


@dataclass
class OutputRule:
    """Global outputs are split on dim 0 over the data axes; `shard_output` has its say about all."""

    shard_output: Callable[[Any, Mesh], Any] | None
    mesh: Mesh
    axes: tuple[str, ...]
    """The axes over which a batch is split, major to minor."""

    def __call__(self, output: Any, as_global: bool) -> Any:
        if as_global:
            self._split(output)
        if self.shard_output is None:
            return output
        replaced = self.shard_output(output if as_global else self._as_pieces(output), self.mesh)
        return output if replaced is None else replaced

    def _split(self, output: Any) -> None:
        """Split a tensor, or the first of a tuple, where neither its dim 0 nor the axes are in use already."""
        first = output[0] if isinstance(output, tuple) and output else output
        if not isinstance(first, ShardedTensor) or first.ndim == 0:
            return
        layout = sharding_of(first)
        assert layout is not None
        used = {axis for dims in layout.dims for axis in dims}
        if not layout.dims[0] and not used.intersection(self.mesh.get_axis_name_idx(axis) for axis in self.axes):
            mark_sharding(first, self.mesh, (self.axes, *layout.spec[1:]))

    def _as_pieces(self, output: Any) -> Any:
        """Per-rank outputs as the global tensors they are pieces of, split on dim 0; gradients flow."""
        parts = math.prod(self.mesh.shape()[axis] for axis in self.axes)

        def piece(t: torch.Tensor) -> torch.Tensor:
            if t.ndim == 0:
                return t
            spec = (self.axes, *(None for _ in t.shape[1:]))
            return disable_manual_sharding(t, spec, (t.shape[0] * parts, *t.shape[1:]), mesh=self.mesh)

        return map_tensors(piece, output)
