"""Partition specs: which tensor dim is split over which mesh axes, and which shard each device holds.

This module only computes with shapes; it has no tensors and no communication. A spec has one entry per tensor dim:
None, an axis (name or index), or a tuple of axes, major to minor. A dim of size n split k ways has shards of size
ceil(n / k); the last ones may be smaller or empty. The tensor is replicated over the axes that a spec does not name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from fullshard.config.errors import SpecError
from fullshard.spmd.mesh import AxisGroups, Mesh

PartitionSpec = Sequence[Any]


@dataclass(frozen=True)
class Layout:
    """A validated partition spec: for each tensor dim the mesh axes that split it, major to minor."""

    mesh: Mesh
    dims: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, mesh: Mesh, spec: PartitionSpec, shape: Sequence[int] | None = None) -> Layout:
        """Validate `spec` against the mesh and, if given, against the shape of its tensor."""
        if not isinstance(mesh, Mesh):
            raise SpecError(f"expected a fullshard.spmd.Mesh, got {type(mesh).__name__}: {mesh!r}")
        what = f"partition spec {spec!r} for " + (
            f"a tensor of shape {tuple(shape)}" if shape is not None else "a tensor"
        )
        what += f" on {mesh}"
        if isinstance(spec, str) or not isinstance(spec, Sequence | np.ndarray):
            raise SpecError(f"{what}: a spec is a tuple with one entry per tensor dim, such as ('data', None)")
        if shape is not None and len(spec) != len(shape):
            raise SpecError(
                f"{what}: the spec has {len(spec)} entries and the tensor {len(shape)} dims; "
                f"give one entry per dim, None for a dim that is not split"
            )
        dims = tuple(_axes(entry, mesh, what) for entry in spec)
        used = [axis for axes in dims for axis in axes]
        twice = sorted({axis for axis in used if used.count(axis) > 1})
        if twice:
            named = [_name(mesh, axis) for axis in twice]
            raise SpecError(
                f"{what}: axis {', '.join(map(repr, named))} is used more than once; an axis can split one dim"
            )
        return cls(mesh, dims)

    @cached_property
    def spec(self) -> tuple[Any, ...]:
        """The spec in its shortest form, with names where the mesh has them."""
        entries = []
        for axes in self.dims:
            named = tuple(_name(self.mesh, axis) for axis in axes)
            entries.append(None if not named else named[0] if len(named) == 1 else named)
        return tuple(entries)

    def parts(self, dim: int) -> int:
        """The number of shards along a tensor dim."""
        return math.prod(self.mesh.mesh_shape[axis] for axis in self.dims[dim])

    def is_even(self, shape: Sequence[int]) -> bool:
        """Whether all shards have the same size."""
        return all(size % self.parts(dim) == 0 for dim, size in enumerate(shape))

    def shard_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the first (largest) shard."""
        return tuple(-(-size // self.parts(dim)) for dim, size in enumerate(shape))

    def slices(self, shape: Sequence[int], device_id: int) -> tuple[slice, ...]:
        """The part of a tensor of the given shape that a device holds."""
        coordinate = self.mesh.coordinate(device_id)
        assert coordinate is not None, f"device {device_id} is not in {self.mesh}"
        slices = []
        for dim, (size, length) in enumerate(zip(shape, self.shard_shape(shape), strict=True)):
            index = self.index_along(self.dims[dim], coordinate)
            slices.append(slice(min(index * length, size), min((index + 1) * length, size)))
        return tuple(slices)

    def replica_id(self, device_id: int) -> int:
        """Which copy of its shard a device holds: 0 for the first, and 0 if there is only one."""
        coordinate = self.mesh.coordinate(device_id)
        assert coordinate is not None, f"device {device_id} is not in {self.mesh}"
        used = {axis for axes in self.dims for axis in axes}
        return self.index_along(tuple(axis for axis in range(self.mesh.ndim) if axis not in used), coordinate)

    def groups(self, shape: Sequence[int]) -> AxisGroups:
        """The mesh dims for which torch's nested splitting produces exactly these shards.

        torch splits a dim over one mesh dim after another, in mesh order. If that differs from one split over all axes
        (axes in another order, or a size that does not divide), the axes are merged into one mesh dim.
        """
        merged: list[tuple[int, ...]] = [
            axes for dim, axes in enumerate(self.dims)
            if len(axes) > 1 and (list(axes) != sorted(axes) or shape[dim] % self.parts(dim))
        ]  # fmt: skip
        single: list[tuple[int, ...]] = [
            (axis,) for axis in range(self.mesh.ndim) if not any(axis in axes for axes in merged)
        ]
        return tuple(sorted(merged + single, key=min))

    def index_along(self, axes: tuple[int, ...], coordinate: tuple[int, ...]) -> int:
        """The position of a device along several mesh axes taken as one, major to minor."""
        index = 0
        for axis in axes:
            index = index * self.mesh.mesh_shape[axis] + coordinate[axis]
        return index

    def __str__(self) -> str:
        return f"{self.spec} on {self.mesh}"


def _name(mesh: Mesh, axis: int) -> str | int:
    return mesh.axis_names[axis] if mesh.axis_names else axis


def _axes(entry: Any, mesh: Mesh, what: str) -> tuple[int, ...]:
    if entry is None:
        return ()
    if isinstance(entry, tuple | list | np.ndarray):
        for inner in entry:
            if inner is None:
                raise SpecError(
                    f"{what}: None inside the tuple {entry!r}; for a dim that is not split write None alone"
                )
            if isinstance(inner, tuple | list | np.ndarray):
                raise SpecError(
                    f"{what}: the tuple {entry!r} contains another tuple; list its axes flat, major to minor"
                )
        return tuple(_axis(inner, mesh, what) for inner in entry)
    return (_axis(entry, mesh, what),)


def _axis(entry: Any, mesh: Mesh, what: str) -> int:
    if isinstance(entry, str):
        if mesh.axis_names is None:
            raise SpecError(
                f"{what}: axis name {entry!r} on a mesh whose axes have no names; "
                f"use an index from 0 to {mesh.ndim - 1}, or build the Mesh with axis_names"
            )
        index = mesh.get_axis_name_idx(entry)
        if index is None:
            raise SpecError(f"{what}: the mesh has no axis {entry!r}; its axes are {list(mesh.axis_names)}")
        return index
    if isinstance(entry, bool | np.bool_) or not isinstance(entry, int | np.integer):
        raise SpecError(
            f"{what}: entry {entry!r} is a {type(entry).__name__}; an entry is None, an axis name, an axis index, "
            f"or a tuple of these"
        )
    if not 0 <= entry < mesh.ndim:
        raise SpecError(f"{what}: axis index {int(entry)} is out of range; the mesh has axes 0 to {mesh.ndim - 1}")
    return int(entry)
