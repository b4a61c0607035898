"""The functions that set the layouts of tensors and modules: `mark_sharding`, its variants and `distribute_module`.

Sharded tensors themselves are in `tensor.py`; batches are sharded in `loader.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from fullshard.config.errors import LayoutError, MeshError
from fullshard.device.torch_private import (
    DTensorSpec,
    TensorMeta,
    buffers_of,
    parameters_of,
    spec_of,
    take_shard,
    tree_flatten,
    tree_unflatten,
)
from fullshard.distributed import runtime
from fullshard.spmd import unused_annotations
from fullshard.spmd.debug_check import require_same
from fullshard.spmd.mesh import Mesh, get_global_mesh
from fullshard.spmd.redistribute import layout_of, replicated, torch_layout, without_partial
from fullshard.spmd.spec import Layout, PartitionSpec
from fullshard.spmd.tensor import (
    FromLocal,
    MarkedTensor,
    Redistribute,
    ShardedTensor,
    ToFull,
    ToSharded,
    become_marked,
    become_plain,
    is_sharded,
    redistributed,
    unmarked,
)


def mark_sharding(t: torch.Tensor, mesh: Mesh, partition_spec: PartitionSpec) -> torch.Tensor:
    """Shard `t` over the mesh, in place, and return the sharded tensor.

    - A plain tensor (the same global value on every rank) is split; each rank keeps its shard.
    - A sharded tensor is redistributed; gradients flow.
    - A parameter that is not sharded yet only records the layout; `distribute_module` and `FSDPv2` apply it.
    """
    layout = Layout.of(mesh, partition_spec, shape_of(t))
    t_in, t = t, unmarked(t)
    if is_sharded(t):
        device_mesh, placements = torch_layout(layout, t.shape)
        _redistribute_in_place(t, device_mesh, placements)
        return t
    if isinstance(t, nn.Parameter):
        t._fullshard_layout = layout
        unused_annotations.marked(t, layout)
        return t
    sharded = shard(t, layout)
    if type(t) is not torch.Tensor:
        raise LayoutError(
            f"mark_sharding shards plain tensors in place; got a {type(t).__name__}: convert it to a plain tensor first"
        )
    become_marked(t_in, sharded)
    return sharded


def shard(t: torch.Tensor, layout: Layout) -> ShardedTensor:
    """A sharded copy of a plain global value. If `t` is a leaf the copy is one too; otherwise gradients flow to `t`."""
    device_mesh, placements = torch_layout(layout, t.shape)
    require_same(t, device_mesh)
    if t.requires_grad and not t.is_leaf:
        return ToSharded.apply(t, device_mesh, placements)
    return ToSharded.apply(t.detach(), device_mesh, placements).requires_grad_(t.requires_grad)


def clear_sharding(t: torch.Tensor) -> torch.Tensor:
    """Remove the layout: a tensor marked in place becomes plain and full again, a sharded one replicated."""
    if type(t) is MarkedTensor:
        sharded = unmarked(t)
        become_plain(t, sharded.full_tensor())
        return t.requires_grad_(sharded.requires_grad) if t.is_leaf else t
    if is_sharded(t):
        _redistribute_in_place(t, t.device_mesh, replicated(t.device_mesh))
    elif hasattr(t, "_fullshard_layout"):
        del t._fullshard_layout
        unused_annotations.cleared(t)
    return t


def mark_sharding_with_gradients(t: torch.Tensor, mesh: Mesh, partition_spec: PartitionSpec) -> torch.Tensor:
    """A new tensor with the value of `t`, sharded over the mesh, and its gradient too. `t` is not changed."""
    layout = Layout.of(mesh, partition_spec, shape_of(t))
    t = unmarked(t)
    device_mesh, placements = torch_layout(layout, t.shape)
    if not is_sharded(t):
        t = ToSharded.apply(t, device_mesh, placements)
    return Redistribute.apply(t, device_mesh, placements, True)


def shard_as(a: Any, b: Any) -> tuple[Any, Any]:
    """Two trees of tensors with equal layouts at each position: that of the sharded one, of `a` if both are."""
    return in_pairs(a, b, lambda x, y: _with_same_layout(unmarked(x), unmarked(y)))


def in_pairs(a: Any, b: Any, pair: Callable[[Any, Any], tuple[Any, Any]]) -> tuple[Any, Any]:
    """`shard_as` of two trees, given that of two tensors of the same shape."""
    ours, tree = tree_flatten(a)
    theirs, other_tree = tree_flatten(b)
    if tree != other_tree:
        raise LayoutError(f"shard_as: the two arguments have different structures: {tree} and {other_tree}")
    for x, y in zip(ours, theirs, strict=True):
        if shape_of(x) != shape_of(y):
            raise LayoutError(
                f"shard_as: tensors of shapes {tuple(x.shape)} and {tuple(y.shape)} cannot have the same layout"
            )
    pairs = [pair(x, y) for x, y in zip(ours, theirs, strict=True)]
    return tree_unflatten([x for x, _ in pairs], tree), tree_unflatten([y for _, y in pairs], tree)


def _with_same_layout(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    layout = sharding_of(x) or sharding_of(y)
    if layout is None:
        return x, y
    layout = layout if any(layout.dims) or not is_sharded(y) else layout_of(spec_of(y))
    return (
        mark_sharding_with_gradients(x, layout.mesh, layout.spec),
        mark_sharding_with_gradients(y, layout.mesh, layout.spec),
    )


annotate_custom_sharding = mark_sharding  # annotating a tensor also shards its data


def wrap_if_sharded(t: Any) -> Any:
    """The sharded value of a tensor that was marked in place; anything else unchanged."""
    return unmarked(t)


def unwrap_sharded_tensor(t: Any) -> Any:
    """The global value: a sharded tensor is its own global value."""
    return unmarked(t)


def apply_xla_patch_to_nn_linear(module: nn.Module, patched_function: Any = None) -> nn.Module:
    """Returns the module unchanged: `nn.Linear` already keeps the layout of its batch dims."""
    return module


def apply_backward_optimization_barrier(module: nn.Module) -> nn.Module:
    """Returns the module unchanged: no compiler moves work across layers."""
    return module


def sharding_of(t: torch.Tensor) -> Layout | None:
    """The layout of a sharded tensor, or the recorded layout of a parameter; None for a plain tensor."""
    t = unmarked(t)
    return layout_of(spec_of(t)) if is_sharded(t) else getattr(t, "_fullshard_layout", None)


def layout_on(t: DTensor, mesh: Mesh, apart_from: Collection[str]) -> Layout | None:
    """The layout over `mesh` of a tensor that torch's own means have laid out over some of its axes, such as
    `parallelize_module(module, device_mesh["tp"], …)`. None where those are not axes of the mesh, or are among
    `apart_from`."""
    coordinate = mesh.coordinate(runtime.rank())
    names = t.device_mesh.mesh_dim_names or ("",) * t.device_mesh.ndim
    dims: list[tuple[int, ...]] = [()] * t.ndim
    for index, (name, placement) in enumerate(zip(names, t.placements, strict=True)):
        ranks = dist.get_process_group_ranks(t.device_mesh.get_group(index))
        axes = [axis for axis in range(mesh.ndim) if coordinate is not None and mesh.line(axis, coordinate) == ranks]
        axes.sort(key=lambda axis: mesh.axis_names is None or mesh.axis_names[axis] != name)  # of several, its own
        if not axes or placement.is_partial() or mesh.axis_names and mesh.axis_names[axes[0]] in apart_from:
            return None
        if isinstance(placement, Shard):
            dims[placement.dim] += (axes[0],)
    return Layout(mesh, tuple(dims))


def enable_manual_sharding(t: torch.Tensor, partition_spec: PartitionSpec, *, mesh: Mesh | None = None) -> torch.Tensor:
    """This rank's shard as a plain tensor, padded with zeros so that all ranks have the same shape."""
    mesh = mesh_or_global(mesh)
    layout = Layout.of(mesh, partition_spec, shape_of(t))
    device_mesh, placements = torch_layout(layout, t.shape)
    t = unmarked(t)
    sharded = t if is_sharded(t) else ToSharded.apply(t, device_mesh, placements)
    local = Redistribute.apply(sharded, device_mesh, placements, False).to_local()
    missing = [full - size for full, size in zip(layout.shard_shape(t.shape), local.shape, strict=True)]
    pads = [n for size in reversed(missing) for n in (0, size)]
    return nn.functional.pad(local, pads) if any(missing) else local


def disable_manual_sharding(
    t: torch.Tensor, partition_spec: PartitionSpec, full_shape: Sequence[int], *, mesh: Mesh | None = None
) -> torch.Tensor:
    """The sharded tensor of shape `full_shape` whose shards are the ranks' `t`s, without their padding."""
    layout, full_shape = layout_of_shard(t, partition_spec, full_shape, mesh)
    own = layout.slices(full_shape, runtime.rank())
    local = t[tuple(slice(0, s.stop - s.start) for s in own)].contiguous()
    device_mesh, placements = torch_layout(layout, full_shape)
    stride = torch.empty(full_shape, device="meta").stride()
    meta = TensorMeta(torch.Size(full_shape), stride, t.dtype)
    return FromLocal.apply(local, DTensorSpec(device_mesh, placements, tensor_meta=meta))


def _redistribute_in_place(t: DTensor, device_mesh: Any, placements: Any) -> None:
    """Redistribute `t` in place. Its gradient is a global value too, so autograd's graph stays valid."""
    with torch.no_grad():
        new = redistributed(t, device_mesh, placements)
        if (t.is_leaf or t.retains_grad) and t.grad is not None and is_sharded(t.grad):
            _redistribute_in_place(t.grad, device_mesh, without_partial(placements))
    take_shard(t, new)
    if type(t) is DTensor and issubclass(ShardedTensor, DTensor):
        t.__class__ = ShardedTensor


def layout_of_shard(
    t: torch.Tensor, partition_spec: PartitionSpec, full_shape: Sequence[int], mesh: Mesh | None
) -> tuple[Layout, tuple[int, ...]]:
    """The layout of the tensor of which `t` is a shard, padded, and that tensor's shape."""
    full_shape = tuple(int(size) for size in full_shape)
    layout = Layout.of(mesh_or_global(mesh), partition_spec, full_shape)
    if tuple(t.shape) != layout.shard_shape(full_shape):
        raise LayoutError(
            f"the local tensor has shape {tuple(t.shape)}; a shard of a {full_shape} tensor with layout {layout} has "
            f"shape {layout.shard_shape(full_shape)} (padded)"
        )
    return layout, full_shape


def mesh_or_global(mesh: Mesh | None) -> Mesh:
    """The mesh of a call: the given one, else that of all calls."""
    mesh = mesh or get_global_mesh()
    if mesh is None:
        raise MeshError("no mesh: pass mesh=..., or set one for all calls with set_global_mesh(mesh)")
    return mesh


def shape_of(t: Any) -> torch.Size:
    """The shape of a tensor; anything else is an error."""
    if not isinstance(t, torch.Tensor):
        raise LayoutError(f"expected a tensor, got {type(t).__name__}: {t!r}")
    return t.shape


def full_tensor(t: torch.Tensor) -> torch.Tensor:
    """The full value of a sharded tensor as a plain one, on every rank; a plain tensor is its own full value."""
    t = unmarked(t)
    return ToFull.apply(t) if is_sharded(t) else t


# --- modules ----------------------------------------------------------------------------------------------------------


def distribute_module(module: nn.Module, mesh: Mesh) -> nn.Module:
    """Shard the marked parameters of a module and replicate the others, in place.

    Tied parameters stay tied. Existing gradients are sharded too, and every later gradient gets the layout of its
    parameter. Buffers are replicated, or keep the layout they were marked with.
    """
    runtime.refuse_foreign_wrappers(module)
    moved: dict[int, torch.Tensor] = {}
    for path, part in module.named_modules():
        for name, parameter in parameters_of(part).items():
            if parameter is not None:
                if id(parameter) not in moved:
                    full_name = f"{path}.{name}" if path else name
                    moved[id(parameter)] = _distributed_parameter(parameter, mesh, full_name)
                    unused_annotations.replaced(parameter, full_name)
                parameters_of(part)[name] = moved[id(parameter)]
        for name, buffer in buffers_of(part).items():
            if buffer is not None:
                if id(buffer) not in moved:
                    moved[id(buffer)] = _laid_out(buffer, _marked_layout(buffer, mesh, name))
                buffers_of(part)[name] = moved[id(buffer)]
    return module


def _distributed_parameter(old: nn.Parameter, mesh: Mesh, name: str) -> nn.Parameter:
    layout = _marked_layout(old, mesh, name)
    new = nn.Parameter(_laid_out(old.detach(), layout), requires_grad=old.requires_grad)
    if old.grad is not None:
        new.grad = _laid_out(old.grad, layout)
    if old.requires_grad:
        new.register_hook(_GradientLayout(new))
    return new


class _GradientLayout:
    """A hook that redistributes a gradient to the layout of its parameter."""

    def __init__(self, parameter: torch.Tensor):
        self.parameter = parameter

    def __call__(self, grad: torch.Tensor) -> torch.Tensor:
        assert is_sharded(self.parameter)
        if not is_sharded(grad):
            return shard(grad, layout_of(spec_of(self.parameter)))
        return redistributed(grad, self.parameter.device_mesh, without_partial(self.parameter.placements))


def _marked_layout(t: torch.Tensor, mesh: Mesh, name: str) -> Layout:
    marked = sharding_of(t)
    if marked is None:
        return Layout(mesh, ((),) * t.ndim)
    if marked.mesh != mesh:
        raise LayoutError(
            f"{name} is marked on {marked.mesh} and the module is distributed over {mesh}; use the same mesh"
        )
    return marked


def _laid_out(t: torch.Tensor, layout: Layout) -> ShardedTensor:
    t = unmarked(t)
    if is_sharded(t):
        return redistributed(t, *torch_layout(layout, t.shape))
    return shard(t.detach(), layout)
