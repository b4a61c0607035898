"""Layouts as torch describes them (`DTensorSpec`, placements), and moving a shard from one layout to another.

All communication of sharded tensors goes through `redistribute`. The tensor class is in `tensor.py`, partition specs
are in `spec.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from fullshard.config.errors import LayoutError
from fullshard.device import accelerator
from fullshard.device.torch_private import (
    AsyncCollectiveTensor,
    DTensorSpec,
    TensorMeta,
    is_in_mesh,
    redistribute_local_tensor,
)
from fullshard.distributed import groups, runtime
from fullshard.spmd.debug_check import digest_of
from fullshard.spmd.mesh import origin
from fullshard.spmd.spec import Layout

# On every rank, torch warns that Gloo uses an all-gather for an all-to-all and that two mesh axes are gathered in turn.
for _name in ("_redistribute", "_collective_utils"):
    logging.getLogger(f"torch.distributed.tensor.{_name}").setLevel(logging.ERROR)

NARROW = {torch.float16, torch.bfloat16}
"""Float types in which a sum of many terms loses precision or overflows."""
GLOO_DTYPES = {
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool,
}  # fmt: skip


# --- layouts ----------------------------------------------------------------------------------------------------------


def layout_of(spec: DTensorSpec) -> Layout:
    """The partition spec behind a `DTensorSpec`; `Partial` counts as replicated."""
    mesh, axis_groups = origin(spec.mesh)
    dims: list[tuple[int, ...]] = [() for _ in spec.shape]
    for axes, placement in zip(axis_groups, spec.placements, strict=True):
        if isinstance(placement, Shard):
            dims[placement.dim] += axes
    return Layout(mesh, tuple(dims))


def torch_layout(layout: Layout, shape: Sequence[int]) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    """The torch mesh and placements that split a tensor of this shape into exactly the shards of `layout`."""
    axis_groups = layout.groups(shape)
    placements: list[Placement] = []
    for axes in axis_groups:
        dim = next((dim for dim, split_by in enumerate(layout.dims) if set(axes) <= set(split_by)), None)
        placements.append(Replicate() if dim is None else Shard(dim))
    return layout.mesh.device_mesh_for(axis_groups), tuple(placements)


def replicated(mesh: DeviceMesh) -> tuple[Placement, ...]:
    """Placements that replicate a tensor on a mesh."""
    return (Replicate(),) * mesh.ndim


def has_partial(placements: Sequence[Placement]) -> bool:
    """Whether a placement waits for a reduction."""
    return any(p.is_partial() for p in placements)


def without_partial(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """The placements after every `Partial` is reduced: `Replicate` in its place."""
    return tuple(Replicate() if p.is_partial() else p for p in placements)


def unsplit(t: DTensor, dims: Collection[int]) -> tuple[Placement, ...]:
    """The placements of `t` with `dims` not split and every `Partial` reduced."""
    return tuple(Replicate() if isinstance(p, Shard) and p.dim in dims else p for p in without_partial(t.placements))


def meta_of(t: torch.Tensor) -> TensorMeta:
    """Shape, strides and dtype of a tensor."""
    return TensorMeta(t.shape, t.stride(), t.dtype)


def spec_with(spec: DTensorSpec, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensorSpec:
    """The spec of the same global tensor on another mesh or with other placements."""
    return DTensorSpec(mesh, tuple(placements), tensor_meta=spec.tensor_meta)


# --- moving shards ----------------------------------------------------------------------------------------------------


def redistribute(local: torch.Tensor, src: DTensorSpec, dst: DTensorSpec) -> torch.Tensor:
    """Turn this rank's shard in layout `src` into its shard in layout `dst`. A collective: every rank of the mesh calls
    it."""
    if src.mesh == dst.mesh and src.placements == dst.placements:
        return local
    partial = has_partial(src.placements)
    if src.mesh != dst.mesh:
        _require_same_devices(src.mesh, dst.mesh)
        if not partial and layout_of(src) == layout_of(dst):
            return local
    if partial and local.dtype == torch.float16:  # finite terms may overflow in one order of summation, not in another
        return redistribute(local.float(), src, dst).half()
    full = spec_with(src, src.mesh, replicated(src.mesh))
    if src.placements != full.placements and _over_gloo(local):
        if local.is_complex():
            return torch.complex(redistribute(local.real, src, dst), redistribute(local.imag, src, dst))
        if local.dtype not in GLOO_DTYPES:
            wide = torch.float32 if local.is_floating_point() else torch.int64
            return redistribute(local.to(wide), src, dst).to(local.dtype)
        if accelerator.is_accelerator(local.device):
            # Gloo's functional collectives crash on CUDA tensors, and it has no all-to-all.
            local, src = _waited(redistribute_local_tensor(local.cpu(), src, full)).to(local.device), full
    if src.mesh != dst.mesh:
        local = redistribute_local_tensor(local, src, full)
        src = spec_with(src, dst.mesh, replicated(dst.mesh))
    # torch makes the terms of a `Partial` from a replicated value, not from shards.
    pairs = list(zip(src.placements, dst.placements, strict=True))
    via = spec_with(dst, dst.mesh, [Replicate() if new.is_partial() and new != old else new for old, new in pairs])
    local = redistribute_local_tensor(local, src, via)
    return _waited(redistribute_local_tensor(local, via, dst) if via.placements != dst.placements else local)


def same_on_replicas(shard: torch.Tensor, spec: DTensorSpec) -> bool:
    """Whether all ranks that hold the same shard pass the same data. Every rank of the mesh gets the same answer."""
    if all(isinstance(p, Shard) or size == 1 for p, size in zip(spec.placements, spec.mesh.shape, strict=True)):
        return True  # each shard is on one rank only
    digest = torch.tensor([int(digest_of(shard)[:15], 16)], device=runtime.device())
    if not is_in_mesh(spec.mesh):
        return True

    def reduced(value: torch.Tensor, placements: Sequence[Placement]) -> torch.Tensor:
        source = DTensorSpec(spec.mesh, tuple(placements), tensor_meta=meta_of(value))
        return redistribute(value, source, spec_with(source, spec.mesh, replicated(spec.mesh)))

    largest = reduced(digest, [Replicate() if isinstance(p, Shard) else Partial("max") for p in spec.placements])
    return bool(reduced((largest == digest).to(digest.dtype), [Partial("min")] * spec.mesh.ndim).item())


def _over_gloo(t: torch.Tensor) -> bool:
    assert dist.group.WORLD is not None
    return groups.backend_of(dist.group.WORLD, t.device) == "gloo"


def _waited(t: torch.Tensor) -> torch.Tensor:
    return t.wait() if isinstance(t, AsyncCollectiveTensor) else t


def _require_same_devices(one: DeviceMesh, other: DeviceMesh) -> None:
    devices, others = (sorted(mesh.mesh.flatten().tolist()) for mesh in (one, other))
    if devices != others:
        raise LayoutError(
            f"an operator got a tensor on devices {devices} ({origin(one)[0]}) and one on devices {others} "
            f"({origin(other)[0]}); all its tensors must be on the same devices: gather one with .full_tensor() and "
            f"mark it on the other mesh"
        )
