"""Sharding a module's parameters: this rank's shard of each, as the plan says.

Parameters are sharded one by one, so that besides the module itself only one whole parameter is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from fullshard.device.torch_private import DTensorSpec, buffers_of, local_of, parameters_of, share_hooks
from fullshard.distributed import runtime
from fullshard.fsdp.local_axes import copy_local_axes
from fullshard.fsdp.offload import host_copy
from fullshard.fsdp.parameter import ShardedParameter
from fullshard.fsdp.plan import ParameterPlan
from fullshard.fsdp.strategy import dtype_of
from fullshard.spmd.mesh import Mesh, origin
from fullshard.spmd.redistribute import meta_of, torch_layout
from fullshard.spmd.sharding import sharding_of
from fullshard.spmd.spec import Layout
from fullshard.spmd.tensor import ShardedTensor, full_of, is_sharded, redistributed

replaced: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""The sharded parameter by the original parameter it replaced. An optimizer that holds a key was built too early."""


@runtime_checkable
class ReadsSlices(Protocol):
    """A parameter whose values are not in memory."""

    def read_slices(self, cuts: tuple[slice, ...]) -> torch.Tensor:
        """Some of its values, on the host."""


def make_shard(
    parameter: nn.Parameter, plan: ParameterPlan, mesh: Mesh, *, sync: bool, meets_plain: bool
) -> nn.Parameter:
    """This rank's shard of a parameter: a `DTensor` parameter."""
    layout = Layout.of(mesh, plan.spec, plan.shape)
    device_mesh, placements = torch_layout(layout, plan.shape)
    # torch's own class has the fastest optimizer steps. Ours is needed where tensors of several torch meshes are
    # combined, or where lists of optimizers and of `clip_grad_norm_` have sharded and plain tensors.
    kind = DTensor if device_mesh == mesh.device_mesh and not meets_plain else ShardedTensor
    dtype = dtype_of(plan.dtype)
    slices = layout.slices(plan.shape, runtime.rank())
    value: Any = parameter if isinstance(parameter, ReadsSlices) and not sync else parameter.detach()
    if is_sharded(value) and origin(value.device_mesh)[0] != mesh:  # tensor-parallel, by torch's own means
        value = local_of(value).new_empty(value.shape) if value.is_meta else full_of(value)
    if is_sharded(value):
        local = local_of(redistributed(value, device_mesh, placements)).to(dtype)
    else:
        if value.is_meta and sync:
            value = torch.empty(value.shape, dtype=value.dtype, device=runtime.device())
        if sync:
            value = broadcast(value.to(runtime.device()).contiguous(), mesh)
        piece = value.read_slices(slices) if isinstance(value, ReadsSlices) else value[slices]
        where = piece.device if piece.is_meta else runtime.device()
        local = piece.to(device=where, dtype=dtype, memory_format=torch.contiguous_format)
        if plan.parts > 1 or local.shape != value.shape:
            local = local.clone() if local.untyped_storage().nbytes() > local.numel() * local.itemsize else local
    if plan.in_host_memory and not local.is_meta:
        local = host_copy(local)
    meta = meta_of(torch.empty(plan.shape, dtype=dtype, device="meta"))
    tensor = kind(local, DTensorSpec(device_mesh, placements, tensor_meta=meta), requires_grad=False)
    shard = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
    share_hooks(parameter, shard)
    for name, extra in vars(parameter).items():
        if name != "_fullshard_layout" and not hasattr(shard, name):
            setattr(shard, name, extra)
    return shard


def install(parameter: nn.Parameter, sharded: ShardedParameter) -> None:
    """Replace the parameter by its shard in every module that holds it."""
    sharded.show_shard()
    replaced[parameter] = sharded


def broadcast(value: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """Broadcast the value of the mesh's first rank to every rank; `value` is overwritten."""
    coordinate = mesh.coordinate(runtime.rank())
    assert coordinate is not None
    for axis in range(mesh.ndim):
        if mesh.mesh_shape[axis] > 1:
            first = tuple(0 if a == axis else i for a, i in enumerate(coordinate))
            dist.broadcast(value, src=int(mesh.get_logical_mesh()[first]), group=mesh.get_group(axis))
    return value


def read_values(root: nn.Module, ignored: set[nn.Module]) -> None:
    """Let modules whose values are not in memory yet read them (`before_sharding`)."""
    for module in root.modules():
        if module not in ignored and (read := getattr(type(module), "before_sharding", None)) is not None:
            read(module)


def materialize(
    root: nn.Module, ignored: set[nn.Module], init: Callable[[nn.Module], Any], device: torch.device
) -> None:
    """Allocate every parameter and buffer that is on the meta device, and call `init` on the modules that hold them.

    Tied parameters stay tied.
    """
    materialized: dict[int, torch.Tensor] = {}
    touched = []
    for module in [m for m in root.modules() if m not in ignored]:
        if any(t is not None and t.is_meta for t in [*parameters_of(module).values(), *buffers_of(module).values()]):
            touched.append(module)
        for name, old in parameters_of(module).items():
            if old is not None and old.is_meta:
                if id(old) not in materialized:
                    new = nn.Parameter(torch.empty_like(old, device=device), requires_grad=old.requires_grad)
                    if (layout := sharding_of(old)) is not None:
                        new._fullshard_layout = layout
                    copy_local_axes(old, new)
                    materialized[id(old)] = new
                parameters_of(module)[name] = materialized[id(old)]
        for name, buffer in buffers_of(module).items():
            if buffer is not None and buffer.is_meta:
                buffers_of(module)[name] = torch.empty_like(buffer, device=device)
    for module in touched:
        init(module)


def place_buffers(root: nn.Module, mesh: Mesh, ignored: set[nn.Module], dtype: torch.dtype | None, sync: bool) -> None:
    """Move buffers to the device, cast floating-point ones, and make them equal on all ranks. Buffers stay whole."""
    for module in root.modules():
        if module in ignored:
            continue
        for name, buffer in buffers_of(module).items():
            if buffer is None or buffer.is_meta or is_sharded(buffer):
                continue
            value = buffer.to(runtime.device())
            if dtype is not None and value.is_floating_point():
                value = value.to(dtype)
            if sync and value.numel() and mesh.size() > 1:
                value = broadcast(value.contiguous(), mesh)
            buffers_of(module)[name] = value
