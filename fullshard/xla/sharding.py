"""`mark_sharding` and its variants on XLA: a validated `Layout` becomes an annotation of the compiler.

Batches too: the specs and the loader of `spmd.loader`, whose tensors become annotated ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch_xla.distributed.spmd import xla_sharding as upstream

from fullshard.config.errors import BatchError, LayoutError
from fullshard.device.torch_private import buffers_of, parameters_of
from fullshard.distributed import runtime
from fullshard.spmd import loader
from fullshard.spmd.mesh import Mesh
from fullshard.spmd.sharding import in_pairs, layout_of_shard, mesh_or_global, shape_of
from fullshard.spmd.spec import Layout, PartitionSpec
from fullshard.xla.tensor import (
    _compiler,
    annotate,
    become_plain,
    become_sharded,
    clear,
    from_parts,
    is_sharded,
    is_xla_tensor,
    op_sharding,
    remember,
    sharding_of,
    transfer_spec,
)


def mark_sharding(t: torch.Tensor, mesh: Mesh, partition_spec: PartitionSpec) -> torch.Tensor:
    """Shard `t` over the mesh, in place, and return it.

    - A tensor in host memory moves to the devices.
    - A sharded tensor is redistributed; gradients flow.
    - A parameter in host memory only records the layout; `distribute_module` and `FSDPv2` apply it.
    """
    layout = Layout.of(mesh, partition_spec, shape_of(t))
    if not is_xla_tensor(t):
        if isinstance(t, nn.Parameter):
            t._fullshard_layout = layout
            return t
        torch.utils.swap_tensors(t, t.detach().to(runtime.device()).requires_grad_(t.requires_grad))
    return annotate(t, layout)


annotate_custom_sharding = mark_sharding


def clear_sharding(t: torch.Tensor) -> torch.Tensor:
    """Remove the layout: every device has the full value again."""
    if is_xla_tensor(t):
        clear(t)
    vars(t).pop("_fullshard_layout", None)
    return become_plain(t)


class _WithGradient(torch.autograd.Function):
    """A copy of a tensor in a layout, and of its gradient too."""

    @staticmethod
    def forward(ctx: Any, t: torch.Tensor, layout: Layout) -> torch.Tensor:
        ctx.layout = layout
        return annotate(t.clone(), layout)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return annotate(grad.clone(), ctx.layout), None


def mark_sharding_with_gradients(t: torch.Tensor, mesh: Mesh, partition_spec: PartitionSpec) -> torch.Tensor:
    """A new tensor with the value of `t`, sharded over the mesh, and its gradient too. `t` is not changed."""
    layout = Layout.of(mesh, partition_spec, shape_of(t))
    return _WithGradient.apply(t.to(runtime.device()), layout)


def shard_as(a: Any, b: Any) -> tuple[Any, Any]:
    """Two trees of tensors with equal layouts at each position: that of the sharded one, of `a` if both are."""
    return in_pairs(a, b, _with_same_layout)


def _with_same_layout(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    layout = sharding_of(x)
    if layout is None or not any(layout.dims):
        layout = sharding_of(y) or layout
    if layout is None:
        return x, y
    return (
        mark_sharding_with_gradients(x, layout.mesh, layout.spec),
        mark_sharding_with_gradients(y, layout.mesh, layout.spec),
    )


def enable_manual_sharding(t: torch.Tensor, partition_spec: PartitionSpec, *, mesh: Mesh | None = None) -> torch.Tensor:
    """The shard of each device as a tensor that the compiler does not partition; padded, so that shapes are equal."""
    sharded = mark_sharding_with_gradients(t, mesh_or_global(mesh), partition_spec)
    return _compiler._spmd_full_to_shard_shape(sharded)


def disable_manual_sharding(
    t: torch.Tensor, partition_spec: PartitionSpec, full_shape: Sequence[int], *, mesh: Mesh | None = None
) -> torch.Tensor:
    """The sharded tensor of shape `full_shape` whose shards are the devices' `t`s, without their padding."""
    layout, full_shape = layout_of_shard(t, partition_spec, full_shape, mesh)
    manual = _compiler.OpSharding([], [], [], 4)
    _compiler._mark_manual_sharding(t, manual)
    full = _compiler._spmd_shard_to_full_shape(t, op_sharding(layout), list(full_shape), t.dtype)
    remember(full, layout)
    return become_sharded(full)


def distribute_module(module: nn.Module, mesh: Mesh) -> nn.Module:
    """Move a module to the devices; shard its marked parameters and replicate the others. Tied ones stay tied."""
    runtime.refuse_foreign_wrappers(module)
    moved: dict[int, torch.Tensor] = {}
    for path, part in module.named_modules():
        for table in (parameters_of(part), buffers_of(part)):
            for name, old in table.items():
                if old is not None:
                    if id(old) not in moved:
                        moved[id(old)] = _distributed(old, mesh, f"{path}.{name}" if path else name)
                    table[name] = moved[id(old)]
    return module


def _distributed(old: torch.Tensor, mesh: Mesh, name: str) -> torch.Tensor:
    layout = sharding_of(old) or Layout(mesh, ((),) * old.ndim)
    if layout.mesh != mesh:
        raise LayoutError(
            f"{name} is marked on {layout.mesh} and the module is distributed over {mesh}; use the same mesh"
        )
    if is_xla_tensor(old):
        return annotate(old, layout)
    value = old.detach().to(runtime.device())
    new = nn.Parameter(value, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else value
    if old.grad is not None:
        new.grad = annotate(old.grad.to(runtime.device()), layout)
    return annotate(new, layout)


# --- sharding of batches ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ShardingSpec(loader.ShardingSpec):
    """The layout of the tensors of a batch.

    By default every process loads the full global batch. With `minibatch` each process loads the rows of its own
    devices, and the global batch is the parts in the order of processes.
    """

    def xla_spec(self, t: torch.Tensor) -> Any:
        """The spec for torch_xla's own loaders (`MpDeviceLoader`); None for a tensor that it does not fit."""
        if not self.can_apply(t):
            return None
        return transfer_spec(t, Layout.of(self.mesh, self.partition_spec, t.shape), parts=self.minibatch)

    def apply(self, t: torch.Tensor) -> torch.Tensor:
        """Shard `t` in place; returns it. With `minibatch` on several processes, a new tensor."""
        if not self.minibatch or is_sharded(t):
            return mark_sharding(t, self.mesh, self.partition_spec)
        layout = Layout.of(self.mesh, self.partition_spec, t.shape)
        rows, processes = t.shape[0], runtime.world_size()
        if rows * processes % layout.parts(0) or (processes > 1 and layout.parts(0) != self.mesh.size()):
            raise BatchError(
                f"minibatch: this process loaded {rows} rows, {rows * processes} in total, to be split "
                f"{layout.parts(0)} ways over {self.mesh}; that number must divide the rows (drop_last=True), and on "
                f"several processes dim 0 must be split over all axes of the mesh"
            )
        if processes == 1:
            return mark_sharding(t, self.mesh, self.partition_spec)
        joined = from_parts(t, layout)
        remember(joined, layout)
        return become_sharded(joined)


# --- help for the compiler --------------------------------------------------------------------------------------------


def apply_xla_patch_to_nn_linear(module: nn.Module, patched_function: Any = None) -> nn.Module:
    """Let the linear layers of a module multiply without flattening batch and sequence dims together, which would hide
    their layouts from the compiler. Layers and parameters stay the same objects."""
    for layer in module.modules():
        if type(layer) is nn.Linear:
            layer.__class__ = upstream.EinsumLinear
    return module


def apply_backward_optimization_barrier(module: nn.Module) -> nn.Module:
    """Keep the compiler from moving a module's backward pass across that of the next one."""
    upstream.apply_backward_optimization_barrier(module)
    return module
