"""Named meshes: the devices, their order, and the axes they are arranged along.

A `Mesh` is a row-major arrangement of device ids (ranks) with an optional name per axis. It creates the
`torch.distributed.DeviceMesh`es that layouts need: one with a mesh dim per axis, and flattened ones, where several axes
form a single mesh dim in a given order. `spec.py` maps tensor dims to axes.
"""

from __future__ import annotations

import inspect
import math
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fullshard.config.errors import MeshError, UnsupportedError
from fullshard.device.torch_private import mesh_without_groups, root_mesh
from fullshard.distributed import engines, runtime

AxisGroups = tuple[tuple[int, ...], ...]
"""The mesh dims of a `DeviceMesh`, each as the mesh axes it merges, major to minor."""


class Mesh:
    """A named, row-major arrangement of devices.

    ```python
    mesh = Mesh(np.arange(4), (2, 2), ("data", "model"))
    ```
    """

    def __init__(
        self, device_ids: Sequence[int] | np.ndarray, mesh_shape: Sequence[int], axis_names: Sequence[str] | None = None
    ):
        self._arrange(device_ids, mesh_shape, axis_names)
        _check_present(self.device_ids.tolist())

    def _arrange(
        self, device_ids: Sequence[int] | np.ndarray, mesh_shape: Sequence[int], axis_names: Sequence[str] | None
    ) -> None:
        self.mesh_shape = _check_shape(mesh_shape)
        self.device_ids = _check_ids(device_ids, self.mesh_shape)
        self.axis_names = _check_names(axis_names, self.mesh_shape)
        self._coordinates: dict[int, tuple[int, ...] | None] = {}

    def size(self) -> int:
        """The number of devices."""
        return math.prod(self.mesh_shape)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.mesh_shape)

    def shape(self) -> OrderedDict[str | int, int]:
        """Axis name (or index, on an unnamed mesh) → size, in order."""
        names: Sequence[str | int] = self.axis_names or range(self.ndim)
        return OrderedDict(zip(names, self.mesh_shape, strict=True))

    def get_logical_mesh(self) -> np.ndarray:
        """The device ids, arranged in the mesh's shape."""
        return self.device_ids.reshape(self.mesh_shape)

    def get_axis_name_idx(self, name: str) -> int | None:
        """The index of the axis called `name`, or None."""
        return self.axis_names.index(name) if self.axis_names and name in self.axis_names else None

    def coordinate(self, device_id: int) -> tuple[int, ...] | None:
        """The position of a device in the mesh; None for a device that is not in it."""
        if device_id not in self._coordinates:
            positions = np.argwhere(self.get_logical_mesh() == device_id)
            self._coordinates[device_id] = tuple(int(i) for i in positions[0]) if len(positions) else None
        return self._coordinates[device_id]

    def line(self, axis: int, coordinate: tuple[int, ...]) -> list[int]:
        """The device ids along an axis, through the device at a coordinate."""
        index: list[Any] = list(coordinate)
        index[axis] = slice(None)
        line: list[int] = self.get_logical_mesh()[tuple(index)].tolist()
        return line

    @property
    def device_mesh(self) -> DeviceMesh:
        """The torch mesh with one mesh dim per axis."""
        return self.device_mesh_for(tuple((axis,) for axis in range(self.ndim)))

    def device_mesh_for(self, groups: AxisGroups) -> DeviceMesh:
        """The torch mesh whose dims merge the given axes. A collective: all ranks must call it."""
        assert sorted(axis for group in groups for axis in group) == list(range(self.ndim)), groups
        engines.require("device meshes of torch", "Mesh.device_mesh")
        runtime.use_spmd()
        known = _device_meshes()
        key = (self, groups)
        if key not in known:
            order = [axis for group in groups for axis in group]
            sizes = [math.prod(self.mesh_shape[axis] for axis in group) for group in groups]
            ranks = self.get_logical_mesh().transpose(order).reshape(sizes)
            axes = self.axis_names or [f"axis{axis}" for axis in range(self.ndim)]
            names = tuple("_".join(axes[axis] for axis in group) for group in groups)
            known[key] = _make_device_mesh(ranks, names, self)
            known[key]._fullshard_origin = (self, groups)
        return known[key]

    def get_group(self, axis: str | int) -> dist.ProcessGroup:
        """The process group of this rank along one axis."""
        index = self.get_axis_name_idx(axis) if isinstance(axis, str) else axis
        if index is None or not 0 <= index < self.ndim:
            raise MeshError(f"mesh {self} has no axis {axis!r}; its axes are {list(self.shape())}")
        return self.device_mesh.get_group(index)

    # Meshes are compared, hashed and printed for every parameter, and may have thousands of ids.

    @cached_property
    def _key(self) -> tuple[Any, ...]:
        return (self.device_ids.tobytes(), self.mesh_shape, self.axis_names)

    @cached_property
    def _hash(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Mesh) and self._key == other._key)

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return self._text

    @cached_property
    def _text(self) -> str:
        axes = ", ".join(f"{name}={size}" for name, size in self.shape().items())
        plain = self.device_ids.tolist() == list(range(self.size()))
        return f"Mesh({axes})" if plain else f"Mesh({axes}, device_ids={self.device_ids.tolist()})"

    __str__ = __repr__


class HybridMesh(Mesh):
    """A mesh over two networks: a fast one inside each group of devices (a node) and a slow one between groups.

    Axis i has size `ici_mesh_shape[i] * dcn_mesh_shape[i]`; along it, devices of one group are contiguous.
    """

    def __init__(
        self,
        ici_mesh_shape: Sequence[int],
        dcn_mesh_shape: Sequence[int] | None = None,
        axis_names: Sequence[str] | None = None,
    ):
        inner = _check_shape(ici_mesh_shape)
        outer = _check_shape(dcn_mesh_shape) if dcn_mesh_shape is not None else (1,) * len(inner)
        if len(inner) != len(outer):
            raise MeshError(
                f"ici_mesh_shape {inner} and dcn_mesh_shape {outer} differ in length ({len(inner)} and {len(outer)}); "
                f"give both one size per mesh axis, 1 where a network does not split that axis"
            )
        # Devices are numbered group by group: [outer axes..., inner axes...] → interleave → merge each pair.
        ids = np.arange(math.prod(outer) * math.prod(inner)).reshape(outer + inner)
        pairs = [axis for i in range(len(inner)) for axis in (i, i + len(inner))]
        shape = tuple(o * i for o, i in zip(outer, inner, strict=True))
        super().__init__(ids.transpose(pairs).reshape(-1), shape, axis_names)
        self.ici_mesh_shape, self.dcn_mesh_shape = inner, outer


class VirtualMesh(Mesh):
    """A mesh whose devices need not exist: for plans. Nothing can be sharded or sent over it."""

    def __init__(self, mesh_shape: Sequence[int], axis_names: Sequence[str] | None = None):
        self._arrange(np.arange(math.prod(_check_shape(mesh_shape))), mesh_shape, axis_names)

    @cached_property
    def _key(self) -> tuple[Any, ...]:
        return ("absent", self.mesh_shape, self.axis_names)

    def device_mesh_for(self, groups: AxisGroups) -> DeviceMesh:
        """Refused: the devices are not part of this job."""
        raise MeshError(
            f"{self} is for plans: its {self.size()} device(s) are not part of this job, so nothing can be sharded or "
            f"sent over it; use fullshard.spmd.Mesh over the ranks of the job"
        )


def get_1d_mesh(axis_name: str | None = None) -> Mesh:
    """All devices along one axis."""
    count = runtime.global_runtime_device_count()
    return Mesh(np.arange(count), (count,), (axis_name,) if axis_name is not None else None)


_global_mesh: Mesh | None = None


def set_global_mesh(mesh: Mesh | None) -> None:
    """Set the mesh for functions that are called without one."""
    global _global_mesh
    if mesh is not None and not isinstance(mesh, Mesh):
        raise MeshError(f"set_global_mesh takes a fullshard.spmd.Mesh, not {type(mesh).__name__}")
    _global_mesh = mesh


def get_global_mesh() -> Mesh | None:
    """The mesh that `set_global_mesh` has set, if any."""
    return _global_mesh


def origin(device_mesh: DeviceMesh) -> tuple[Mesh, AxisGroups]:
    """The `Mesh` and axes that a torch mesh was made from; for a foreign torch mesh, a `Mesh` of the same shape."""
    known = getattr(device_mesh, "_fullshard_origin", None)
    if known is None:
        ranks = device_mesh.mesh
        mesh = Mesh(ranks.flatten().tolist(), tuple(ranks.shape), device_mesh.mesh_dim_names)
        known = (mesh, tuple((axis,) for axis in range(mesh.ndim)))
        device_mesh._fullshard_origin = known
        _device_meshes().setdefault(known, device_mesh)
    return known


def data_mesh(device_mesh: DeviceMesh) -> Mesh:
    """The `Mesh` for a torch mesh over which `fully_shard` would shard a model (one dim, or replicas by shards), with
    the dims beside it in the mesh that it is a part of. A mesh with a dim called `fsdp` is taken whole."""
    root = root_mesh(device_mesh)
    names = list(root.mesh_dim_names or [f"axis{dim}" for dim in range(root.ndim)])
    if "fsdp" not in names:
        data = [names.index(name) for name in device_mesh.mesh_dim_names or names]
        if len(data) > 2:
            raise MeshError(
                f"FSDPv2: {device_mesh} has {device_mesh.ndim} dims; pass the one that shards the model, "
                f"device_mesh['dp'], the two of replicas and shards, or a mesh with a dim called 'fsdp'"
            )
        for dim, role in zip(data, ("replica", "fsdp")[-len(data) :], strict=True):
            names[dim] = role
    return Mesh(root.mesh.flatten().tolist(), tuple(root.mesh.shape), names)


def is_own(device_mesh: DeviceMesh) -> bool:
    """Whether a torch mesh was made from a `Mesh`."""
    return hasattr(device_mesh, "_fullshard_origin")


def _check_shape(mesh_shape: Sequence[int]) -> tuple[int, ...]:
    try:
        shape = tuple(int(size) for size in mesh_shape)
    except (TypeError, ValueError):
        raise MeshError(f"mesh_shape must be a sequence of integers such as (4, 1), not {mesh_shape!r}") from None
    if not shape or any(size < 1 for size in shape) or any(s != g for s, g in zip(shape, mesh_shape, strict=True)):
        raise MeshError(f"mesh_shape must have at least one size, each an integer of 1 or more; got {mesh_shape!r}")
    return shape


def _check_ids(device_ids: Sequence[int] | np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    ids = np.asarray(device_ids).reshape(-1)
    if not np.issubdtype(ids.dtype, np.integer):
        raise MeshError(f"device_ids must be integers (ranks) such as np.arange(4), not {device_ids!r}")
    id_list = ids.tolist()
    if len(id_list) != math.prod(shape):
        raise MeshError(
            f"{len(id_list)} device ids {id_list} do not fit a mesh of shape {shape}, which has {math.prod(shape)} "
            f"positions; the product of mesh_shape must equal the number of ids"
        )
    if len(set(id_list)) != len(id_list):
        twice = sorted({i for i in id_list if id_list.count(i) > 1})
        raise MeshError(f"device ids {id_list} contain {twice} more than once; each device can have one position only")
    return ids.astype(np.int64)


def _check_present(device_ids: list[int]) -> None:
    count = runtime.global_runtime_device_count()
    outside = [i for i in device_ids if not 0 <= i < count]
    if outside:
        raise MeshError(
            f"device ids {outside} are out of range: this job has {count} device(s), numbered 0 to {count - 1}; "
            f"{runtime.more_devices(max(device_ids) + 1)} or use ids of existing devices"
        )


def _check_names(axis_names: Sequence[str] | None, shape: tuple[int, ...]) -> tuple[str, ...] | None:
    if axis_names is None:
        return None
    if isinstance(axis_names, str) or not all(isinstance(name, str) for name in axis_names):
        raise MeshError(f"axis_names must be a sequence of names such as ('data', 'model'), not {axis_names!r}")
    names = tuple(axis_names)
    if len(names) != len(shape):
        raise MeshError(
            f"{len(names)} axis names {names} for a mesh of {len(shape)} axes {shape}; give one name per axis"
        )
    if len(set(names)) != len(names) or not all(names):
        raise MeshError(f"axis names {names} must be unique and not empty")
    return names


_cache: tuple[object, dict[tuple[Mesh, AxisGroups], DeviceMesh]] = (None, {})


def _device_meshes() -> dict[tuple[Mesh, AxisGroups], DeviceMesh]:
    """The torch meshes made so far with the current default process group."""
    global _cache
    if _cache[0] is not dist.group.WORLD:
        _cache = (dist.group.WORLD, {})
    return _cache[1]


def _lines(ranks: np.ndarray, dim: int) -> list[list[int]]:
    """The ranks along one mesh dim, a list per line."""
    return np.moveaxis(ranks, dim, -1).reshape(-1, ranks.shape[dim]).tolist()


def _make_device_mesh(ranks: np.ndarray, names: tuple[str, ...], mesh: Mesh) -> DeviceMesh:
    kind = runtime.device().type
    lines = [_lines(ranks, dim) for dim in range(ranks.ndim)]
    tensor = torch.from_numpy(ranks.astype(np.int32))
    if all(line == sorted(line) for dim in lines for line in dim):
        return DeviceMesh(kind, tensor, mesh_dim_names=names)

    # By default torch sorts the ranks of a group; a gather over it would return shards in the wrong order.
    if "sort_ranks" not in inspect.signature(dist.new_group).parameters:
        raise UnsupportedError(
            f"{mesh} needs the device order {ranks.tolist()}, which process groups of torch {torch.__version__} do "
            f"not keep (2.12 does); use ascending device ids, and list the axes of a tuple in the mesh's order"
        )
    me = runtime.rank()
    own_groups = []
    for dim in lines:
        for line in dim:
            group = dist.new_group(line, sort_ranks=False)
            if me in line:
                own_groups.append(group)
    if not own_groups:
        return mesh_without_groups(kind, tensor, names)
    return DeviceMesh.from_group(own_groups, kind, mesh=tensor, mesh_dim_names=names)
