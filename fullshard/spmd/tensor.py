"""`ShardedTensor`: a global tensor of which each rank holds a shard, with conversions to and from plain tensors.

`ops.py` runs the operators: it registers itself here, so that this module depends on no operator. Moving shards
between layouts is in `redistribute.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeGuard

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from fullshard.config.errors import LayoutError
from fullshard.device.torch_private import (
    DTensorSpec,
    dtensor_new,
    is_in_mesh,
    local_of,
    no_torch_function,
    set_local,
    spec_of,
    tree_map,
)
from fullshard.distributed import runtime
from fullshard.spmd.debug_check import require_same
from fullshard.spmd.redistribute import (
    has_partial,
    layout_of,
    meta_of,
    redistribute,
    replicated,
    same_on_replicas,
    spec_with,
    without_partial,
)
from fullshard.spmd.spec import Layout


class ShardingType(IntEnum):
    """How a tensor is distributed over its mesh, in XLA's terms."""

    REPLICATED = 0
    """A copy on every device."""
    MAXIMAL = 1
    """On one device."""
    TUPLE = 2
    TILED = 3
    """A different shard on every device."""
    MANUAL = 4
    PARTIAL = 5
    """Each shard on several devices."""
    UNKNOWN = 6

    @classmethod
    def of(cls, layout: Layout) -> ShardingType:
        """How a layout distributes a tensor."""
        shards = math.prod(layout.parts(dim) for dim in range(len(layout.dims)))
        if layout.mesh.size() == 1:
            return cls.MAXIMAL
        if shards == 1:
            return cls.REPLICATED
        return cls.TILED if shards == layout.mesh.size() else cls.PARTIAL


@dataclass
class LocalShard:
    """A copy of one device's shard of a tensor; `load_local_shards_` writes it back."""

    data: torch.Tensor
    """May be changed or replaced; the tensor itself does not change."""
    indices: tuple[slice, ...]
    """The position of the shard in the global tensor."""
    device: torch.device
    replica_id: int
    """0 for the first copy of this shard, 1 for the second, and so on."""

    @property
    def unpadded_data(self) -> torch.Tensor:
        """The same as `data`: shards have no padding."""
        return self.data


_run_operator: Callable[[Any, Any, Any], Any]


def runs_operators(function: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    """Let `function(op, args, kwargs)` run every operator that has a `ShardedTensor` among its arguments."""
    global _run_operator
    _run_operator = function
    return function


@torch.no_grad()
def assign_data(t: DTensor, value: torch.Tensor) -> None:
    """`t.data = value`: replace the shard. A plain value is the full tensor, the same on every rank.

    torch's own setter changes only the outer tensor, whose memory is never read, and raises no error.
    """
    if value.shape != t.shape or value.dtype != t.dtype:
        raise LayoutError(
            f".data of a sharded tensor of shape {tuple(t.shape)} and {t.dtype} was assigned one of shape "
            f"{tuple(value.shape)} and {value.dtype}; shape and dtype must be the same (module.to(dtype) casts "
            f"parameters)"
        )
    if is_sharded(value):
        shard = redistribute(local_of(value), spec_of(value), spec_with(spec_of(value), t.device_mesh, t.placements))
    else:
        shard = value[layout_of(spec_of(t)).slices(t.shape, runtime.rank())]
    # Not a copy into the old memory: `a.data, b.data = b.data, a.data` swaps.
    set_local(t, shard.detach().to(local_of(t).device).contiguous())
    torch.autograd.graph.increment_version(t)


DATA = property(torch.Tensor.data.__get__, assign_data)

# torch 2.11 handles every subclass of DTensor in C++ and never calls the subclass. There a sharded tensor cannot be a
# DTensor; it has the same attributes and methods instead.
_Base: Any = DTensor if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12) else torch.Tensor


class ShardedTensor(_Base):
    """A global tensor of which each rank holds a shard, a copy, or one term of a sum (`Partial`)."""

    meets_no_plain: str = ""
    """The parameter's name if operators must refuse plain tensors beside it, because each rank has a different one.
    What is computed from it inherits the name."""
    __new__ = dtensor_new
    __torch_function__ = no_torch_function
    data = DATA

    def __init__(self, local_tensor: torch.Tensor, spec: DTensorSpec, *, requires_grad: bool):
        super().__init__()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run_operator(func, args, kwargs or {})

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh of torch that the tensor is sharded on."""
        return spec_of(self).mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        """torch's description of the layout: one placement per dim of `device_mesh`."""
        return spec_of(self).placements

    @property
    def sharding_spec(self) -> tuple[Any, ...]:
        """The partition spec of this tensor."""
        return layout_of(spec_of(self)).spec

    @property
    def sharding_type(self) -> ShardingType:
        """Whether the devices of the mesh hold copies, different shards, or copies of shards."""
        return ShardingType.of(layout_of(spec_of(self)))

    @property
    def global_tensor(self) -> ShardedTensor:
        """The tensor itself: its values are global."""
        return self

    @property
    def local_shards(self) -> list[LocalShard]:
        """A copy of this process's shard (a list, because XLA's interface allows several devices per process)."""
        reduced = redistributed(self.detach(), spec_of(self).mesh, without_partial(self.placements))
        if not is_in_mesh(reduced.device_mesh):
            return []
        me, local, layout = runtime.rank(), local_of(reduced), layout_of(spec_of(self))
        return [LocalShard(local.clone(), layout.slices(self.shape, me), local.device, layout.replica_id(me))]

    @torch.no_grad()
    def load_local_shards_(self, shards: Sequence[LocalShard | torch.Tensor]) -> ShardedTensor:
        """Overwrite this process's shard. Ranks that hold the same shard must pass the same data."""
        values = [shard.data if isinstance(shard, LocalShard) else shard for shard in shards]
        problem = _shard_problem(self, values)
        agree = same_on_replicas(values[0] if values and not problem else torch.empty(0), spec_of(self))
        if problem:
            raise LayoutError(problem)
        if not agree:
            raise LayoutError(
                f"{self.sharding_spec} on {layout_of(spec_of(self)).mesh} puts the same shard on several ranks, and "
                f"they were given different data; pass the same data on every rank that holds a shard, or lay the "
                f"tensor out so that each shard is on one rank"
            )
        for data in values:
            local_of(self).copy_(data)
        return self

    def redistribute(
        self, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None, **_: Any
    ) -> ShardedTensor:
        """The same tensor in another layout, differentiable."""
        mesh = device_mesh or self.device_mesh
        return Redistribute.apply(self, mesh, tuple(placements or [Replicate()] * mesh.ndim), False)

    def full_tensor(self, *, grad_placements: Any = None) -> torch.Tensor:
        """The full value as a plain tensor, on every rank."""
        return ToFull.apply(self)

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """This rank's shard as a plain tensor; its gradient is the gradient of the shard."""
        return ToLocal.apply(self, tuple(grad_placements) if grad_placements else None)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"ShardedTensor({local_of(self)}, shape={tuple(self.shape)}, {layout_of(spec_of(self))})"

    @staticmethod
    def __tensor_unflatten__(inner: Any, flatten_spec: Any, outer_size: Any, outer_stride: Any) -> ShardedTensor:
        plain = DTensor.__tensor_unflatten__(inner, flatten_spec, outer_size, outer_stride)
        return ShardedTensor(local_of(plain), spec_of(plain), requires_grad=plain.requires_grad)


def is_sharded(t: Any) -> TypeGuard[DTensor]:
    """Whether `t` is a sharded tensor: a `ShardedTensor` or torch's `DTensor`."""
    return isinstance(t, (DTensor, ShardedTensor))


def redistributed(t: DTensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> ShardedTensor:
    """`t` in another layout, without a gradient."""
    target = spec_with(spec_of(t), mesh, placements)
    return ShardedTensor(redistribute(local_of(t), spec_of(t), target), target, requires_grad=False)


def full_of(t: DTensor) -> torch.Tensor:
    """The full value of `t` as a plain tensor on every rank, without a gradient."""
    return local_of(redistributed(t, t.device_mesh, replicated(t.device_mesh)))


def _shard_problem(t: ShardedTensor, values: Sequence[torch.Tensor]) -> str:
    """Why `values` cannot be this process's shards of `t`; empty if it can."""
    own = t.local_shards
    if len(values) != len(own):
        return f"{len(values)} shard(s) given; this process holds {len(own)} of the tensor"
    for data, old in zip(values, own, strict=True):
        if data.shape != old.data.shape:
            return (
                f"the shard given has shape {tuple(data.shape)}; this rank's shard of the {tuple(t.shape)} "
                f"tensor with layout {t.sharding_spec} has shape {tuple(old.data.shape)} (indices {old.indices})"
            )
    if has_partial(t.placements):
        return "this tensor is a sum over ranks that was not reduced yet; mark_sharding it before loading shards"
    return ""


# --- plain tensors to sharded ones and back, with gradients -----------------------------------------------------------


class Redistribute(torch.autograd.Function):
    """The same global value in another layout. The gradient keeps its own layout, or also takes the new one."""

    @staticmethod
    def forward(ctx: Any, t: DTensor, mesh: DeviceMesh, placements: tuple[Placement, ...], gradient_too: bool) -> Any:
        """Redistribute the value."""
        ctx.target = (mesh, placements) if gradient_too else None
        return redistributed(t, mesh, placements)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        """Redistribute the gradient, if it takes the new layout too."""
        if ctx.target is not None:
            mesh, placements = ctx.target
            grad = redistributed(grad, mesh, without_partial(placements))
        return grad, None, None, None


class ToSharded(torch.autograd.Function):
    """A plain global value, the same on every rank → a sharded tensor."""

    @staticmethod
    def forward(ctx: Any, t: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Any:
        """Take this rank's shard of the value."""
        return sharded_copy(t, mesh, placements)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        """Gather the gradient."""
        return full_of(grad), None, None


class ToFull(torch.autograd.Function):
    """A sharded tensor → its full value as a plain tensor on every rank."""

    @staticmethod
    def forward(ctx: Any, t: DTensor) -> torch.Tensor:
        """Gather the value."""
        ctx.mesh = t.device_mesh
        full = redistribute(local_of(t), spec_of(t), spec_with(spec_of(t), ctx.mesh, replicated(ctx.mesh)))
        return full.view_as(full)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """Take the gradient, which is the same on every rank, as replicated."""
        return as_replicated(grad, ctx.mesh)


class ToLocal(torch.autograd.Function):
    """A sharded tensor → this rank's shard as a plain tensor."""

    @staticmethod
    def forward(ctx: Any, t: DTensor, grad_placements: tuple[Placement, ...] | None) -> torch.Tensor:
        """Take this rank's shard."""
        ctx.spec = spec_with(spec_of(t), t.device_mesh, grad_placements or without_partial(t.placements))
        return local_of(t).view_as(local_of(t))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """Take the gradient as a shard of a sharded gradient."""
        return ShardedTensor(grad, ctx.spec, requires_grad=False), None


class FromLocal(torch.autograd.Function):
    """Each rank's shard → the sharded tensor that they form."""

    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor, spec: DTensorSpec) -> Any:
        """Take the shards as one tensor."""
        ctx.spec = spec
        return ShardedTensor(shard.view_as(shard), spec, requires_grad=False)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        """Take this rank's shard of the gradient."""
        return local_of(redistributed(grad, ctx.spec.mesh, without_partial(ctx.spec.placements))), None


def sharded_copy(t: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> ShardedTensor:
    """A plain global value as a sharded tensor with memory of its own."""
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=meta_of(t.detach().contiguous()))
    if not is_in_mesh(mesh):
        return ShardedTensor(t.new_empty(0), spec, requires_grad=False)
    shard = t.detach()[layout_of(spec).slices(t.shape, runtime.rank())]
    device = t.device if t.is_meta else runtime.device()
    shard = shard.to(device, copy=True, memory_format=torch.contiguous_format)
    return ShardedTensor(shard, spec, requires_grad=False)


def as_replicated(t: torch.Tensor, mesh: DeviceMesh) -> ShardedTensor:
    """A plain tensor beside a sharded one: a global value that every rank has a copy of."""
    require_same(t, mesh)
    # Detached, because torch warns if a shard needs a gradient and its tensor does not; the memory is the same.
    return ShardedTensor(t.detach(), DTensorSpec(mesh, replicated(mesh), tensor_meta=meta_of(t)), requires_grad=False)


# --- plain tensors that were sharded in place -----------------------------------------------------------------------


class MarkedTensor(torch.Tensor):
    """A plain tensor that `mark_sharding` has sharded in place. torch cannot turn a plain tensor object into a sharded
    one: the object keeps its identity, holds a `ShardedTensor` and forwards every function and attribute to it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*tree_map(unmarked, args), **tree_map(unmarked, kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        return getattr(unmarked(self), name)

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # so that is_sharded(t) is true
        return ShardedTensor

    def __reduce_ex__(self, protocol: Any) -> Any:
        return unmarked(self).__reduce_ex__(protocol)


_set_class = object.__dict__["__class__"].__set__


def become_marked(t: torch.Tensor, sharded: ShardedTensor) -> None:
    """Make the plain tensor `t` hold `sharded`; its own memory is freed."""
    t.data = t.detach().new_empty(0)
    t.__dict__["_sharded"] = sharded
    _set_class(t, MarkedTensor)


def become_plain(t: torch.Tensor, value: torch.Tensor) -> None:
    """Undo `become_marked`: `t` is a plain tensor that holds `value`."""
    _set_class(t, torch.Tensor)
    t.__dict__.pop("_sharded")
    t.data = value.detach()


def unmarked(t: Any) -> Any:
    """The sharded value of a tensor that was marked in place; anything else unchanged."""
    return t.__dict__["_sharded"] if type(t) is MarkedTensor else t
