"""What a user says about layouts: mark, clear, and leave or enter the local view.

`mark_sharding` is the one verb; the rest are its variations. The tensors themselves are in `tensor.py`, the
distribution of whole modules in `module.py`, of batches in `loader.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard import runtime
from fullshard.errors import LayoutError, MeshError
from fullshard.spmd import unused_annotations
from fullshard.spmd.debug_check import require_same
from fullshard.spmd.mesh import Mesh, get_global_mesh
from fullshard.spmd.spec import Layout, PartitionSpec
from fullshard.spmd.tensor import (
    FromPiece,
    MarkedTensor,
    Relay,
    ShardedTensor,
    ToSharded,
    become_marked,
    become_plain,
    is_sharded,
    layout_of,
    relaid,
    replicated,
    settle,
    torch_layout,
    unmarked,
)
from fullshard.torch_private import DTensorSpec, TensorMeta, spec_of, take_shard, tree_flatten, tree_unflatten


def mark_sharding(t: torch.Tensor, mesh: Mesh, partition_spec: PartitionSpec) -> torch.Tensor:
    """Lay `t` out over the mesh. `t` itself is sharded afterwards, and the sharded tensor is returned.

    - A plain tensor (the same global value on every rank) is cut into pieces; each rank keeps its own.
    - A sharded tensor is laid out anew; gradients flow.
    - A parameter that is not sharded yet only takes note of its layout, which `distribute_module` and `FSDPv2` honour.
    """
    layout = Layout.of(mesh, partition_spec, _shape(t))
    t_in, t = t, unmarked(t)
    if is_sharded(t):
        device_mesh, placements = torch_layout(layout, t.shape)
        _relay_in_place(t, device_mesh, placements)
        return t
    if isinstance(t, nn.Parameter):
        t._fullshard_layout = layout
        unused_annotations.marked(t, layout)
        return t
    sharded = shard(t, layout)
    if type(t) is not torch.Tensor:
        raise LayoutError(
            f"mark_sharding shards plain tensors in place; {type(t).__name__} cannot be: convert it first"
        )
    become_marked(t_in, sharded)
    return sharded


def shard(t: torch.Tensor, layout: Layout) -> ShardedTensor:
    """The pieces of a plain global value; `t` stays as it is. A leaf gives a leaf, others pass gradients on."""
    device_mesh, placements = torch_layout(layout, t.shape)
    require_same(t, device_mesh)
    if t.requires_grad and not t.is_leaf:
        return ToSharded.apply(t, device_mesh, placements)
    return ToSharded.apply(t.detach(), device_mesh, placements).requires_grad_(t.requires_grad)


def clear_sharding(t: torch.Tensor) -> torch.Tensor:
    """Take the layout off: a tensor marked in place is plain and whole again, a sharded one copied to every rank."""
    if type(t) is MarkedTensor:
        sharded = unmarked(t)
        become_plain(t, sharded.full_tensor())
        return t.requires_grad_(sharded.requires_grad) if t.is_leaf else t
    if is_sharded(t):
        _relay_in_place(t, t.device_mesh, replicated(t.device_mesh))
    elif hasattr(t, "_fullshard_layout"):
        del t._fullshard_layout
        unused_annotations.cleared(t)
    return t


def mark_sharding_with_gradients(t: torch.Tensor, mesh: Mesh, partition_spec: PartitionSpec) -> torch.Tensor:
    """A new tensor with the value of `t`, laid out over the mesh, and its gradient alike. `t` is not changed."""
    layout = Layout.of(mesh, partition_spec, _shape(t))
    t = unmarked(t)
    device_mesh, placements = torch_layout(layout, t.shape)
    if not is_sharded(t):
        t = ToSharded.apply(t, device_mesh, placements)
    return Relay.apply(t, device_mesh, placements, True)


def shard_as(a: Any, b: Any) -> tuple[Any, Any]:
    """Two trees of tensors, those at the same place laid out alike: as the one that is sharded (first of `a`)."""
    ours, tree = tree_flatten(a)
    theirs, other_tree = tree_flatten(b)
    if tree != other_tree:
        raise LayoutError(f"shard_as: the two hold tensors in different structures: {tree} and {other_tree}")
    pairs = [_alike(unmarked(x), unmarked(y)) for x, y in zip(ours, theirs, strict=True)]
    return tree_unflatten([x for x, _ in pairs], tree), tree_unflatten([y for _, y in pairs], tree)


def _alike(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if _shape(x) != _shape(y):
        raise LayoutError(f"shard_as: tensors of shapes {tuple(x.shape)} and {tuple(y.shape)} cannot be laid out alike")
    layout = sharding_of(x) or sharding_of(y)
    if layout is None:
        return x, y
    layout = layout if any(layout.dims) or not is_sharded(y) else layout_of(spec_of(y))
    return (
        mark_sharding_with_gradients(x, layout.mesh, layout.spec),
        mark_sharding_with_gradients(y, layout.mesh, layout.spec),
    )


annotate_custom_sharding = mark_sharding  # an annotation and the layout of the data are one thing here


def wrap_if_sharded(t: Any) -> Any:
    """The sharded tensor that `t` stands for; anything else as it is."""
    return unmarked(t)


def unwrap_sharded_tensor(t: Any) -> Any:
    """The global value, which a sharded tensor is itself."""
    return unmarked(t)


def apply_xla_patch_to_nn_linear(module: nn.Module, patched_function: Any = None) -> nn.Module:
    """The module as it is: `nn.Linear` keeps the layout of its batch dims."""
    return module


def apply_backward_optimization_barrier(module: nn.Module) -> nn.Module:
    """The module as it is: no compiler moves work across layers."""
    return module


def sharding_of(t: torch.Tensor) -> Layout | None:
    """The layout of a sharded tensor, or the one a parameter is marked with; None for a plain tensor."""
    t = unmarked(t)
    return layout_of(spec_of(t)) if is_sharded(t) else getattr(t, "_fullshard_layout", None)


def enable_manual_sharding(t: torch.Tensor, partition_spec: PartitionSpec, *, mesh: Mesh | None = None) -> torch.Tensor:
    """Enter the local view: this rank's piece as a plain tensor. Pieces are padded with zeros to one shape."""
    mesh = _given_or_global(mesh)
    layout = Layout.of(mesh, partition_spec, _shape(t))
    device_mesh, placements = torch_layout(layout, t.shape)
    t = unmarked(t)
    sharded = t if is_sharded(t) else ToSharded.apply(t, device_mesh, placements)
    piece = Relay.apply(sharded, device_mesh, placements, False).to_local()
    missing = [full - size for full, size in zip(layout.piece_shape(t.shape), piece.shape, strict=True)]
    pads = [n for size in reversed(missing) for n in (0, size)]
    return nn.functional.pad(piece, pads) if any(missing) else piece


def disable_manual_sharding(
    t: torch.Tensor, partition_spec: PartitionSpec, full_shape: Sequence[int], *, mesh: Mesh | None = None
) -> torch.Tensor:
    """Leave the local view: the sharded tensor of shape `full_shape` whose pieces (padding cut off) are the `t`s."""
    mesh = _given_or_global(mesh)
    full_shape = tuple(int(size) for size in full_shape)
    layout = Layout.of(mesh, partition_spec, full_shape)
    if tuple(t.shape) != layout.piece_shape(full_shape):
        raise LayoutError(
            f"the local tensor has shape {tuple(t.shape)}; a piece of a {full_shape} tensor laid out as {layout} has "
            f"shape {layout.piece_shape(full_shape)} (padded)"
        )
    own = layout.slices(full_shape, runtime.rank())
    piece = t[tuple(slice(0, cut.stop - cut.start) for cut in own)].contiguous()
    device_mesh, placements = torch_layout(layout, full_shape)
    stride = torch.empty(full_shape, device="meta").stride()
    meta = TensorMeta(torch.Size(full_shape), stride, t.dtype)
    return FromPiece.apply(piece, DTensorSpec(device_mesh, placements, tensor_meta=meta))


def _relay_in_place(t: DTensor, device_mesh: Any, placements: Any) -> None:
    """Another layout for the same object. A gradient is a global value too, so what was recorded stays right."""
    with torch.no_grad():
        new = relaid(t, device_mesh, placements)
        if (t.is_leaf or t.retains_grad) and t.grad is not None and is_sharded(t.grad):
            _relay_in_place(t.grad, device_mesh, settle(placements))
    take_shard(t, new)
    if type(t) is DTensor and issubclass(ShardedTensor, DTensor):
        t.__class__ = ShardedTensor


def _given_or_global(mesh: Mesh | None) -> Mesh:
    mesh = mesh or get_global_mesh()
    if mesh is None:
        raise MeshError("no mesh: pass mesh=..., or set one for all calls with set_global_mesh(mesh)")
    return mesh


def _shape(t: Any) -> torch.Size:
    if not isinstance(t, torch.Tensor):
        raise LayoutError(f"expected a tensor, got {type(t).__name__}: {t!r}")
    return t.shape
