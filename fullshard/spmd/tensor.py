"""The sharded tensor: a `DTensor` that knows every operator, and the plain tensor that was marked in place.

`ShardedTensor` holds one rank's piece of a global value; operators on it go through `ops.dispatch`.
`MarkedTensor` is what `mark_sharding(t, ...)` turns `t` itself into when its result is thrown away: it hands
everything over to the sharded value it carries. Moving pieces from one layout to another (`relay`) lives here
too; which layout is meant is decided elsewhere.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from fullshard import accelerator, groups, runtime
from fullshard.errors import LayoutError
from fullshard.spmd.debug_check import digest_of, require_same
from fullshard.spmd.mesh import origin
from fullshard.spmd.spec import Layout
from fullshard.torch_private import (
    AsyncCollectiveTensor,
    DTensorSpec,
    TensorMeta,
    dtensor_new,
    is_in_mesh,
    local_of,
    no_torch_function,
    redistribute_local_tensor,
    spec_of,
    tree_map,
)

# torch warns, on every rank, that Gloo gathers where NCCL exchanges and that two mesh axes are gathered one by one.
for _name in ("_redistribute", "_collective_utils"):
    logging.getLogger(f"torch.distributed.tensor.{_name}").setLevel(logging.ERROR)


class ShardingType(IntEnum):
    """How a tensor lies on its mesh, in XLA's terms."""

    REPLICATED = 0
    """A copy on every device."""
    MAXIMAL = 1
    """On one device."""
    TUPLE = 2
    TILED = 3
    """A piece of its own on every device."""
    MANUAL = 4
    PARTIAL = 5
    """Each piece on several devices."""
    UNKNOWN = 6


@dataclass
class LocalShard:
    """A copy of one device's piece of a sharded tensor; `load_local_shards_` writes it back."""

    data: torch.Tensor
    """May be changed, and assigned anew; the tensor stays as it is."""
    indices: tuple[slice, ...]
    """Where the piece lies in the global tensor."""
    device: torch.device
    replica_id: int
    """0 for the first copy of this piece, 1 for the second, and so on."""

    @property
    def unpadded_data(self) -> torch.Tensor:
        """The same as `data`: pieces are never padded here."""
        return self.data


# torch 2.11 handles every subclass of DTensor itself, without asking the subclass. There a sharded tensor cannot be a
# DTensor; it has the same attributes and methods instead.
_Base: Any = DTensor if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12) else torch.Tensor


class ShardedTensor(_Base):
    """A global tensor of which each rank holds a piece (or a copy, or a term of a pending sum)."""

    meets_no_plain: str = ""
    """A name where plain tensors are no global values to it: those of the ranks differ. Views have it too."""
    __new__ = dtensor_new
    __torch_function__ = no_torch_function

    def __init__(self, local_tensor: torch.Tensor, spec: DTensorSpec, *, requires_grad: bool):
        super().__init__()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from fullshard.spmd.ops import dispatch

        return dispatch(func, args, kwargs or {})

    @property
    def device_mesh(self) -> DeviceMesh:
        return spec_of(self).mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        """How torch describes the layout: one placement per dim of `device_mesh`."""
        return spec_of(self).placements

    @property
    def sharding_spec(self) -> tuple[Any, ...]:
        """The partition spec that describes this tensor."""
        return layout_of(spec_of(self)).spec

    @property
    def sharding_type(self) -> ShardingType:
        """Whether the devices of the mesh hold copies, pieces, or copies of pieces."""
        layout = layout_of(spec_of(self))
        pieces = math.prod(layout.parts(dim) for dim in range(self.ndim))
        if layout.mesh.size() == 1:
            return ShardingType.MAXIMAL
        if pieces == 1:
            return ShardingType.REPLICATED
        return ShardingType.TILED if pieces == layout.mesh.size() else ShardingType.PARTIAL

    @property
    def global_tensor(self) -> ShardedTensor:
        """The tensor itself: its values are global."""
        return self

    @property
    def local_shards(self) -> list[LocalShard]:
        """A copy of this process's piece (in a list, since the interface allows for several devices a process)."""
        settled = relaid(self.detach(), spec_of(self).mesh, settle(self.placements))
        if not is_in_mesh(settled.device_mesh):
            return []
        me, local, layout = runtime.rank(), local_of(settled), layout_of(spec_of(self))
        return [LocalShard(local.clone(), layout.slices(self.shape, me), local.device, layout.replica_id(me))]

    @torch.no_grad()
    def load_local_shards_(self, shards: Sequence[LocalShard | torch.Tensor]) -> ShardedTensor:
        """Overwrite this process's piece with the given data. Ranks that hold the same piece must give the same."""
        given = [shard.data if isinstance(shard, LocalShard) else shard for shard in shards]
        problem = _misfit(self, given)
        agree = same_on_copies(given[0] if given and not problem else torch.empty(0), spec_of(self))
        if problem:
            raise LayoutError(problem)
        if not agree:
            raise LayoutError(
                f"{self.sharding_spec} on {layout_of(spec_of(self)).mesh} keeps a piece on several ranks, and not all "
                f"of them were given the same data; give every rank that holds a piece the same, or lay the tensor "
                f"out so that each piece is on one rank"
            )
        for data in given:
            local_of(self).copy_(data)
        return self

    def redistribute(
        self, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None, **_: Any
    ) -> ShardedTensor:
        mesh = device_mesh or self.device_mesh
        return Relay.apply(self, mesh, tuple(placements or [Replicate()] * mesh.ndim), False)

    def full_tensor(self, *, grad_placements: Any = None) -> torch.Tensor:
        """The whole value as a plain tensor, on every rank."""
        return ToPlain.apply(self)

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """This rank's piece as a plain tensor; its gradient is that of the piece."""
        return ToPiece.apply(self, tuple(grad_placements) if grad_placements else None)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"ShardedTensor({local_of(self)}, shape={tuple(self.shape)}, {layout_of(spec_of(self))})"

    @staticmethod
    def __tensor_unflatten__(inner: Any, flatten_spec: Any, outer_size: Any, outer_stride: Any) -> ShardedTensor:
        plain = DTensor.__tensor_unflatten__(inner, flatten_spec, outer_size, outer_stride)
        return ShardedTensor(local_of(plain), spec_of(plain), requires_grad=plain.requires_grad)


def _misfit(t: ShardedTensor, given: Sequence[torch.Tensor]) -> str:
    """Why these cannot be this process's pieces; empty where they can."""
    mine = t.local_shards
    if len(given) != len(mine):
        return f"{len(given)} shard(s) given; this process holds {len(mine)} of the tensor"
    for data, old in zip(given, mine, strict=True):
        if data.shape != old.data.shape:
            return (
                f"the shard given has shape {tuple(data.shape)}; this rank's piece of the {tuple(t.shape)} "
                f"tensor laid out as {t.sharding_spec} has shape {tuple(old.data.shape)} (indices {old.indices})"
            )
    if any(p.is_partial() for p in t.placements):
        return "this tensor is a pending sum over ranks; mark_sharding it before loading shards into it"
    return ""


def is_sharded(t: Any) -> TypeGuard[DTensor]:
    """Whether `t` is a sharded tensor, ours or torch's."""
    return isinstance(t, DTensor | ShardedTensor)


class MarkedTensor(torch.Tensor):
    """A plain tensor that `mark_sharding` sharded in place. It carries its sharded value and acts as it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*tree_map(unmarked, args), **tree_map(unmarked, kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        return getattr(unmarked(self), name)

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # is_sharded(t) is asked before t is used as one
        return ShardedTensor

    def __reduce_ex__(self, protocol: Any) -> Any:
        return unmarked(self).__reduce_ex__(protocol)


_set_class = object.__dict__["__class__"].__set__


def become_marked(t: torch.Tensor, sharded: ShardedTensor) -> None:
    """Turn the plain tensor `t` into the bearer of `sharded`; its own storage is let go."""
    t.data = t.detach().new_empty(0)
    t.__dict__["_sharded"] = sharded
    _set_class(t, MarkedTensor)


def become_plain(t: torch.Tensor, value: torch.Tensor) -> None:
    """Undo `become_marked`: `t` is a plain tensor that holds `value`."""
    _set_class(t, torch.Tensor)
    t.__dict__.pop("_sharded")
    t.data = value.detach()


def unmarked(t: Any) -> Any:
    """The sharded value of a tensor marked in place; anything else as it is."""
    return t.__dict__["_sharded"] if type(t) is MarkedTensor else t


# --- layouts in torch's terms -------------------------------------------------------------------------------------


def layout_of(spec: DTensorSpec) -> Layout:
    """The layout of a tensor in the user's terms; a pending sum counts as copies."""
    mesh, groups = origin(spec.mesh)
    dims: list[tuple[int, ...]] = [() for _ in spec.shape]
    for group, placement in zip(groups, spec.placements, strict=True):
        if isinstance(placement, Shard):
            dims[placement.dim] += group
    return Layout(mesh, tuple(dims))


def torch_layout(layout: Layout, shape: Sequence[int]) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    """The torch mesh and placements that cut a tensor of this shape into the layout's very pieces."""
    groups = layout.groups(shape)
    placements: list[Placement] = []
    for group in groups:
        dim = next((dim for dim, axes in enumerate(layout.dims) if set(group) <= set(axes)), None)
        placements.append(Replicate() if dim is None else Shard(dim))
    return layout.mesh.device_mesh_for(groups), tuple(placements)


def replicated(mesh: DeviceMesh) -> tuple[Placement, ...]:
    return (Replicate(),) * mesh.ndim


def settle(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """The same placements with pending sums carried out."""
    return tuple(Replicate() if p.is_partial() else p for p in placements)


def meta_of(t: torch.Tensor) -> TensorMeta:
    return TensorMeta(t.shape, t.stride(), t.dtype)


def respec(spec: DTensorSpec, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensorSpec:
    return DTensorSpec(mesh, tuple(placements), tensor_meta=spec.tensor_meta)


def relay(local: torch.Tensor, src: DTensorSpec, dst: DTensorSpec) -> torch.Tensor:
    """Move one rank's piece from layout `src` to layout `dst`. Every rank of the mesh takes part.

    All communication of sharded tensors goes through here.
    """
    if src.mesh == dst.mesh and src.placements == dst.placements:
        return local
    pending = any(p.is_partial() for p in src.placements)
    if src.mesh != dst.mesh:
        _same_devices(src.mesh, dst.mesh)
        if not pending and layout_of(src) == layout_of(dst):
            return local
    if pending and local.dtype == torch.float16:  # terms may be finite, and their sum in one order but not in another
        return relay(local.float(), src, dst).half()
    whole = respec(src, src.mesh, replicated(src.mesh))
    if src.placements != whole.placements and _over_gloo(local):
        if local.is_complex():
            return torch.complex(relay(local.real, src, dst), relay(local.imag, src, dst))
        if local.dtype not in GLOO_DTYPES:
            wide = torch.float32 if local.is_floating_point() else torch.int64
            return relay(local.to(wide), src, dst).to(local.dtype)
        if accelerator.is_accelerator(local.device):
            # Its functional collectives crash on CUDA tensors, and it has no all-to-all.
            local, src = _arrived(redistribute_local_tensor(local.cpu(), src, whole)).to(local.device), whole
    if src.mesh != dst.mesh:
        local = redistribute_local_tensor(local, src, whole)
        src = respec(src, dst.mesh, replicated(dst.mesh))
    # Terms of a pending sum are made of a whole value, not of pieces.
    pairs = list(zip(src.placements, dst.placements, strict=True))
    via = respec(dst, dst.mesh, [Replicate() if new.is_partial() and new != old else new for old, new in pairs])
    local = redistribute_local_tensor(local, src, via)
    return _arrived(redistribute_local_tensor(local, via, dst) if via.placements != dst.placements else local)


def same_on_copies(piece: torch.Tensor, spec: DTensorSpec) -> bool:
    """Whether all ranks that hold a copy of the same piece give the same; one answer for all ranks of the mesh."""
    if all(isinstance(p, Shard) or size == 1 for p, size in zip(spec.placements, spec.mesh.shape, strict=True)):
        return True  # no piece has a copy
    sign = torch.tensor([int(digest_of(piece)[:15], 16)], device=runtime.device())
    if not is_in_mesh(spec.mesh):
        return True

    def reduced(value: torch.Tensor, placements: Sequence[Placement]) -> torch.Tensor:
        source = DTensorSpec(spec.mesh, tuple(placements), tensor_meta=meta_of(value))
        return relay(value, source, respec(source, spec.mesh, replicated(spec.mesh)))

    most = reduced(sign, [Replicate() if isinstance(p, Shard) else Partial("max") for p in spec.placements])
    return bool(reduced((most == sign).to(sign.dtype), [Partial("min")] * spec.mesh.ndim).item())


NARROW = {torch.float16, torch.bfloat16}
"""Float types in which a sum of many terms loses digits, or overflows."""
GLOO_DTYPES = {
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool,
}  # fmt: skip


def _over_gloo(t: torch.Tensor) -> bool:
    assert dist.group.WORLD is not None
    return groups.backend_of(dist.group.WORLD, t.device) == "gloo"


def _arrived(t: torch.Tensor) -> torch.Tensor:
    return t.wait() if isinstance(t, AsyncCollectiveTensor) else t


def relaid(t: DTensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> ShardedTensor:
    """`t` in another layout, without a gradient."""
    target = respec(spec_of(t), mesh, placements)
    return ShardedTensor(relay(local_of(t), spec_of(t), target), target, requires_grad=False)


def _same_devices(one: DeviceMesh, other: DeviceMesh) -> None:
    devices, others = (sorted(mesh.mesh.flatten().tolist()) for mesh in (one, other))
    if devices != others:
        raise LayoutError(
            f"one tensor lies on devices {devices} ({origin(one)[0]}) and another on {others} ({origin(other)[0]}); "
            f"they must lie on the same devices to meet: gather one with .full_tensor() and mark it on the other mesh"
        )


# --- crossing between plain and sharded, with gradients -----------------------------------------------------------


class Relay(torch.autograd.Function):
    """The same global value in another layout. The gradient keeps the layout it comes in, or takes the same one."""

    @staticmethod
    def forward(ctx: Any, t: DTensor, mesh: DeviceMesh, placements: tuple[Placement, ...], gradient_too: bool) -> Any:
        ctx.target = (mesh, placements) if gradient_too else None
        return relaid(t, mesh, placements)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        if ctx.target is not None:
            mesh, placements = ctx.target
            grad = relaid(grad, mesh, settle(placements))
        return grad, None, None, None


class ToSharded(torch.autograd.Function):
    """A plain global value, the same on every rank → its pieces."""

    @staticmethod
    def forward(ctx: Any, t: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Any:
        return sharded_copy(t, mesh, placements)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return local_of(relaid(grad, grad.device_mesh, replicated(grad.device_mesh))), None, None


class ToPlain(torch.autograd.Function):
    """A sharded value → the whole of it as a plain tensor on every rank."""

    @staticmethod
    def forward(ctx: Any, t: DTensor) -> torch.Tensor:
        ctx.mesh = t.device_mesh
        whole = relay(local_of(t), spec_of(t), respec(spec_of(t), ctx.mesh, replicated(ctx.mesh)))
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return taken_as_global(grad, ctx.mesh)


class ToPiece(torch.autograd.Function):
    """A sharded value → this rank's piece as a plain tensor."""

    @staticmethod
    def forward(ctx: Any, t: DTensor, grad_placements: tuple[Placement, ...] | None) -> torch.Tensor:
        ctx.spec = respec(spec_of(t), t.device_mesh, grad_placements or settle(t.placements))
        return local_of(t).view_as(local_of(t))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return ShardedTensor(grad, ctx.spec, requires_grad=False), None


class FromPiece(torch.autograd.Function):
    """Each rank's piece → the sharded value they make up."""

    @staticmethod
    def forward(ctx: Any, piece: torch.Tensor, spec: DTensorSpec) -> Any:
        ctx.spec = spec
        return ShardedTensor(piece.view_as(piece), spec, requires_grad=False)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return local_of(relaid(grad, ctx.spec.mesh, settle(ctx.spec.placements))), None


def sharded_copy(t: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> ShardedTensor:
    """The pieces of a plain global value, in storage of their own."""
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=meta_of(t.detach().contiguous()))
    if not is_in_mesh(mesh):
        return ShardedTensor(t.new_empty(0), spec, requires_grad=False)
    piece = t.detach()[layout_of(spec).slices(t.shape, runtime.rank())]
    device = t.device if t.is_meta else runtime.device()
    piece = piece.to(device, copy=True, memory_format=torch.contiguous_format)
    return ShardedTensor(piece, spec, requires_grad=False)


def taken_as_global(t: torch.Tensor, mesh: DeviceMesh) -> ShardedTensor:
    """A plain tensor that meets a sharded one: a global value of which every rank has a copy."""
    require_same(t, mesh)
    # Detached, since torch warns where a piece needs a gradient and its tensor does not; the memory is the same.
    return ShardedTensor(t.detach(), DTensorSpec(mesh, replicated(mesh), tensor_meta=meta_of(t)), requires_grad=False)
