"""Sharded tensors on XLA: ordinary tensors of the logical device that carry an annotation of the compiler.

The annotation is the only truth about a layout; this file translates it to and from `Layout`. `ShardedTensor` adds the
methods of the torch engine's class to an annotated tensor and holds no data of its own. Results of operators are plain
tensors; `sharding_of`, `full_tensor` and `wrap_if_sharded` work on any of them.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
import torch_xla
from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard
from torch_xla.distributed import spmd as upstream

from fullshard.config.errors import LayoutError, UnsupportedError
from fullshard.device.torch_private import no_torch_function
from fullshard.distributed import runtime
from fullshard.spmd.draw import ShardGrid, parse_sharding
from fullshard.spmd.mesh import Mesh
from fullshard.spmd.spec import Layout
from fullshard.spmd.tensor import LocalShard as LocalShard
from fullshard.spmd.tensor import ShardingType as ShardingType

_compiler = torch_xla._XLAC
_meshes: dict[Mesh, None] = {}  # that tensors were marked on, to name the axes of layouts that the compiler chose


class ShardedTensor(torch.Tensor):
    """A global tensor whose shards are on the devices. It is the same object as the tensor that was marked."""

    __torch_function__ = no_torch_function

    @property
    def sharding_spec(self) -> tuple[Any, ...]:
        """The partition spec of this tensor."""
        return _layout(self).spec

    @property
    def sharding_type(self) -> ShardingType:
        """Whether the devices of the mesh hold copies, different shards, or copies of shards."""
        return ShardingType.of(_layout(self))

    @property
    def placements(self) -> tuple[Placement, ...]:
        """torch's description of the layout: one placement per axis of the mesh."""
        layout = _layout(self)
        dims = {axis: dim for dim, axes in enumerate(layout.dims) for axis in axes}
        return tuple(Shard(dims[axis]) if axis in dims else Replicate() for axis in range(layout.mesh.ndim))

    @property
    def global_tensor(self) -> torch.Tensor:
        """The tensor itself: its values are global."""
        return self

    @property
    def local_shards(self) -> list[LocalShard]:
        """Copies of the shards of this process's devices, in host memory, without padding."""
        return local_shards(self)

    def load_local_shards_(self, shards: Sequence[LocalShard | torch.Tensor]) -> torch.Tensor:
        """Overwrite the shards of this process's devices, given in the order of `local_shards`."""
        return load_local_shards_(self, shards)

    def full_tensor(self, *, grad_placements: Any = None) -> torch.Tensor:
        """The full value as a plain tensor in host memory."""
        return full_tensor(self)

    def redistribute(
        self, device_mesh: Mesh | None = None, placements: Sequence[Placement] | None = None, **_: Any
    ) -> torch.Tensor:
        """A copy in another layout: one placement per axis of the mesh (a `fullshard.spmd.Mesh`)."""
        mesh = device_mesh or _layout(self).mesh
        dims: list[tuple[int, ...]] = [()] * self.ndim
        for axis, placement in enumerate(placements or ()):
            if isinstance(placement, Shard):
                dims[placement.dim] += (axis,)
        return annotate(self.clone(), Layout(mesh, tuple(dims)))

    def to_local(self, **_: Any) -> NoReturn:
        """Refused: a process has several shards."""
        raise UnsupportedError("to_local(): a process has the shards of several devices on XLA; use t.local_shards")

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) not in memo:
            with torch.no_grad():
                copy = self.clone()
            kind = nn.Parameter if isinstance(self, nn.Parameter) else torch.Tensor
            copy = nn.Parameter(copy) if kind is nn.Parameter else copy
            memo[id(self)] = become_sharded(copy.requires_grad_(self.requires_grad))
        return memo[id(self)]

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"ShardedTensor({self.detach().cpu()}, {sharding_of(self)})"


class ShardedParameter(ShardedTensor, nn.Parameter):
    """A parameter with a layout."""


XLAShardedTensor, XLAShard = ShardedTensor, LocalShard


def become_sharded(t: torch.Tensor) -> torch.Tensor:
    """Give an annotated tensor the methods of `ShardedTensor`; it stays the same object."""
    if type(t) in (torch.Tensor, nn.Parameter):
        t.__class__ = ShardedParameter if type(t) is nn.Parameter else ShardedTensor
    return t


def become_plain(t: torch.Tensor) -> torch.Tensor:
    """Undo `become_sharded`."""
    if type(t) in (ShardedTensor, ShardedParameter):
        t.__class__ = nn.Parameter if type(t) is ShardedParameter else torch.Tensor
    return t


def is_xla_tensor(t: Any) -> bool:
    """Whether `t` is a tensor on the logical device."""
    return isinstance(t, torch.Tensor) and t.device.type == "xla"


def is_sharded(t: Any) -> bool:
    """Whether `t` is a tensor with a layout: one that was marked, or that the compiler has chosen."""
    return is_xla_tensor(t) and bool(annotation(t))


def annotation(t: torch.Tensor) -> str:
    """The compiler's annotation of a tensor, in XLA's notation; empty without one."""
    return str(_compiler._get_xla_sharding_spec(t) or "")


def sharding_of(t: torch.Tensor) -> Layout | None:
    """The layout of a sharded tensor, or the recorded layout of a parameter in host memory; None for a plain tensor.

    A layout that the compiler has chosen is named after a mesh that tensors were marked on, where one fits.
    """
    recorded: Layout | None = getattr(t, "_fullshard_layout", None)
    text = annotation(t) if is_xla_tensor(t) else ""
    if not text:
        return None if is_xla_tensor(t) else recorded
    if recorded is not None and _fits(recorded, text, t.ndim):
        return recorded
    return _layout_from(text, t.ndim, tuple(reversed(_meshes)))


def annotate(t: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Give a tensor on the logical device a layout; it stays the same object."""
    text = annotation(t)
    if text and not _fits(layout, text, t.ndim):  # clearing the old annotation would break tensors that share the value
        _compiler._xla_annotate_custom_sharding(t, op_sharding(layout))
    elif not text:
        try:
            _compiler._xla_mark_sharding(t, op_sharding(layout))
        except RuntimeError:  # a step that is still running computes it
            _compiler._xla_wait_device_ops([])
            _compiler._xla_mark_sharding(t, op_sharding(layout))
    remember(t, layout)
    return become_sharded(t)


def clear(t: torch.Tensor) -> None:
    """Give every device the full value of a tensor, and remove the annotation."""
    if annotation(t):
        _compiler._xla_annotate_custom_sharding(t, op_sharding(Layout(_layout(t).mesh, ((),) * t.ndim)))
        _materialize(t)
        _compiler._xla_clear_sharding(t)


def remember(t: torch.Tensor, layout: Layout) -> None:
    """Record with which layout a tensor was marked: several specs may describe the same annotation."""
    t._fullshard_layout = layout
    _meshes[layout.mesh] = _meshes.pop(layout.mesh, None)


@functools.cache
def op_sharding(layout: Layout) -> Any:
    """The compiler's object for a layout."""
    if layout.mesh.size() != runtime.global_runtime_device_count():
        raise UnsupportedError(
            f"{layout.mesh} has {layout.mesh.size()} of the job's {runtime.global_runtime_device_count()} devices; "
            f"XLA lays tensors out over all devices. Use a mesh of all of them, or the torch engine."
        )
    return _compiler.OpSharding(*_tiles(layout))


@functools.cache
def _tiles(layout: Layout) -> tuple[Any, ...]:
    """What torch_xla makes of a layout: tiles, groups, replication groups and the type of the sharding."""
    if not layout.dims:  # a scalar
        return [], [], [], int(ShardingType.REPLICATED)
    mesh = upstream.Mesh(layout.mesh.device_ids, layout.mesh.mesh_shape)
    return mesh._get_op_sharding_args(tuple(axes or None for axes in layout.dims))


def from_parts(t: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The global tensor of which each process has the rows of its own devices."""
    spec = transfer_spec(t, layout, parts=True)
    return _compiler._xla_tensors_from_aten([t.detach().cpu()], [str(runtime.device())], [spec])[0]


def transfer_spec(t: torch.Tensor, layout: Layout, parts: bool) -> Any:
    """What torch_xla needs to send a host tensor in a layout; `parts` if each process has the rows of its devices."""
    return _compiler.XlaShardingSpec(t, *_tiles(layout), parts)


def _layout(t: torch.Tensor) -> Layout:
    layout = sharding_of(t)
    if layout is None:
        raise LayoutError(
            f"a tensor of shape {tuple(t.shape)} has no layout: mark_sharding(t, mesh, spec) gives it one"
        )
    return layout


def _places(grid: ShardGrid, ndim: int) -> dict[int, tuple[int, ...]]:
    """The position in the grid of shards of each device."""
    return {device: place or (0,) * ndim for place, devices in grid.holders.items() for device in devices}


@functools.cache
def _fits(layout: Layout, text: str, ndim: int) -> bool:
    """Whether an annotation puts the same shards on the same devices as a layout."""
    return len(layout.dims) == ndim and _places(ShardGrid.of(layout, (1,) * ndim), ndim) == _places(
        parse_sharding(text), ndim
    )


@functools.cache
def _layout_from(text: str, ndim: int, meshes: tuple[Mesh, ...]) -> Layout:
    """A layout for an annotation, on one of the meshes if possible, else on a mesh with one axis per tensor dim."""
    grid = parse_sharding(text)
    counts = grid.counts or (1,) * ndim
    for mesh in meshes:
        for dims in _splits(mesh, counts, frozenset(range(mesh.ndim))):
            layout = Layout(mesh, dims)
            if _fits(layout, text, ndim):
                return layout
    devices = [device for place in sorted(grid.holders) for device in grid.holders[place]]
    copies = len(devices) // math.prod(counts)
    mesh = Mesh(devices, (*counts, copies))
    return Layout(mesh, tuple((dim,) if count > 1 else () for dim, count in enumerate(counts)))


def _splits(mesh: Mesh, counts: Sequence[int], free: frozenset[int]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """All ways to split the dims of a tensor into `counts` shards by axes of a mesh."""
    if not counts:
        yield ()
        return
    for length in range(len(free) + 1):
        for axes in itertools.permutations(sorted(free), length):
            if math.prod(mesh.mesh_shape[axis] for axis in axes) == counts[0] and (counts[0] > 1 or not axes):
                yield from ((axes, *rest) for rest in _splits(mesh, counts[1:], free - {*axes}))


# --- values -----------------------------------------------------------------------------------------------------------


def full_tensor(t: torch.Tensor) -> torch.Tensor:
    """The full value of a tensor as a plain one in host memory; a tensor in host memory is its own full value."""
    return t.detach().cpu() if is_xla_tensor(t) else t


def local_shards(t: torch.Tensor) -> list[LocalShard]:
    """Copies of the shards of this process's devices, in host memory, without padding."""
    _materialize(t)
    shards = _compiler._get_local_shards([t])[0]
    places = _compiler._get_local_shard_replica_and_indices([t])[0]
    return [
        _local_shard(t.shape, data, name, replica, indices)
        for (data, name), (replica, indices) in zip(shards, places, strict=True)
    ]


def _local_shard(shape: torch.Size, data: torch.Tensor, name: str, replica: int, indices: Any) -> LocalShard:
    whole = [slice(0, size) for size in shape]
    own = tuple(slice(part.start, part.stop) for part in (whole if indices is Ellipsis else indices))
    unpadded = data[tuple(slice(0, part.stop - part.start) for part in own)]
    return LocalShard(unpadded, own, torch.device("xla", int(name.split(":")[1])), replica)


@torch.no_grad()
def load_local_shards_(t: torch.Tensor, shards: Sequence[LocalShard | torch.Tensor]) -> torch.Tensor:
    """Overwrite the shards of this process's devices, given in the order of `local_shards`."""
    layout = _layout(t)
    own = local_shards(t)
    if len(shards) != len(own):
        raise LayoutError(f"{len(shards)} shard(s) given; this process holds {len(own)} of the tensor")
    data = [(value.data if isinstance(value, LocalShard) else value).detach().cpu().to(t.dtype) for value in shards]
    for value, old in zip(data, own, strict=True):
        if value.shape != old.data.shape:
            raise LayoutError(
                f"the shard given has shape {tuple(value.shape)}; that of device {old.device.index} of the "
                f"{tuple(t.shape)} tensor with layout {layout.spec} has shape {tuple(old.data.shape)} (indices "
                f"{old.indices})"
            )
        first = next(other for other, shard in zip(data, own, strict=True) if shard.indices == old.indices)
        if not torch.equal(first, value):
            raise LayoutError(
                f"{layout} puts the same shard on several devices, and they were given different data; pass the same "
                f"data for each copy of a shard"
            )
    if any(layout.dims):
        names = [name for _, name in _compiler._get_local_shards([t])[0]]
        _compiler._load_local_shards(t, [padded(value, layout.shard_shape(t.shape)) for value in data], names)
    else:
        t.copy_(data[0])
    return t


def padded(shard: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A shard in the size that all devices hold: the last ones are padded."""
    if tuple(shard.shape) == shape:
        return shard.contiguous()
    out = shard.new_zeros(shape)
    out[tuple(slice(0, n) for n in shard.shape)] = shard
    return out


def _materialize(t: torch.Tensor) -> None:
    """Compute a tensor whose operators were only recorded so far."""
    _compiler._xla_sync_multi([t], devices=[], wait=True, sync_xla_data=True)
    _compiler._xla_wait_device_ops([])  # it may be on its way from an earlier step


def wrap_if_sharded(t: Any) -> Any:
    """The tensor with the methods of `ShardedTensor` if it has a layout; anything else unchanged."""
    return become_sharded(t) if is_sharded(t) else t


def unwrap_sharded_tensor(t: Any) -> Any:
    """The global value: a sharded tensor is its own global value."""
    return t
