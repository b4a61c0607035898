"""The gradients of parameters, from the gathered values where autograd leaves them to the `.grad` of the shards.

`reduction.py` sums the gradients of a unit over the ranks between the two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate

from fullshard.config.errors import FSDPError
from fullshard.device.torch_private import (
    backward_hooks,
    local_of,
    make_wrapper_subclass,
    no_torch_function,
    post_accumulate_hooks,
    spec_of,
)
from fullshard.fsdp.offload import HostTraffic
from fullshard.fsdp.parameter import Copy, ShardedParameter, copy_together
from fullshard.spmd.mesh import origin
from fullshard.spmd.redistribute import torch_layout
from fullshard.spmd.tensor import is_sharded, redistributed

aten = torch.ops.aten
_LINEAR = {
    aten.zero_.default,
    aten.mul_.Scalar,
    aten.mul_.Tensor,
    aten.div_.Scalar,
    aten.div_.Tensor,
    aten._foreach_zero_.default,
    aten._foreach_mul_.Scalar,
    aten._foreach_mul_.Tensor,
    aten._foreach_div_.Scalar,
    aten._foreach_div_.Tensor,
}
"""Operations that can be applied to the terms of a sum instead of the sum."""


class UnreducedGradient(torch.Tensor):
    """A gradient that `no_sync` holds back: this rank's term of the sum, in the shape and dtype of the shard's."""

    term: torch.Tensor
    """The whole gradient of this rank, in the dtype it will be reduced in."""
    base: torch.Tensor | None
    """The gradient that was reduced before, to which the sum will be added."""

    @staticmethod
    def __new__(cls, shard: torch.Tensor, term: torch.Tensor, base: torch.Tensor | None) -> UnreducedGradient:
        gradient = make_wrapper_subclass(
            cls, shard.shape, strides=shard.stride(), dtype=shard.dtype, device=shard.device
        )
        gradient.term, gradient.base = term, base
        return gradient

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def __repr__(self) -> str:
        return f"UnreducedGradient({tuple(self.shape)}, held back by no_sync)"

    __torch_function__ = no_torch_function

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.detach.default:
            return args[0]
        factors = [a for a in args[1:] if isinstance(a, torch.Tensor)]
        if func not in _LINEAR or any(isinstance(f, UnreducedGradient) or f.ndim for f in factors):
            raise FSDPError(
                f"{func} on a gradient that no_sync() holds back: it has not been summed over the ranks. Call "
                f"backward() of the last micro-batch outside no_sync() first, or drop the gradients with zero_grad()"
            )
        several = isinstance(args[0], list | tuple)
        for target in args[0] if several else args[:1]:
            for value in (target.term, target.base) if isinstance(target, UnreducedGradient) else (target,):
                if value is not None:
                    func([value] if several else value, *args[1:], **(kwargs or {}))
        return None if several else args[0]


# --- from autograd ----------------------------------------------------------------------------------------------------


TOGETHER = 4 * 2**20
"""Bytes of a gradient up to which its conversion to another dtype shares a launch with others."""


def take(parameters: Sequence[ShardedParameter]) -> list[torch.Tensor | None]:
    """Remove and return this rank's terms of the gradients: what backward left on the gathered values, plus what
    `no_sync` held back."""
    totals: list[torch.Tensor | None] = [_take_unreduced(p) for p in parameters]
    small: list[tuple[int, Copy]] = []
    for i, p in enumerate(parameters):
        for leaf in (p.full, p.full_global):
            if leaf is None or leaf.grad is None:
                continue
            grad, leaf.grad = leaf.grad, None
            term = _data_parallel_term(p, grad) if is_sharded(grad) else grad
            if term.layout is not torch.strided:
                term = term.to_dense()
            if term.dtype != p.reduce_dtype and term.numel() * p.reduce_dtype.itemsize <= TOGETHER:
                small.append((i, (torch.empty(term.shape, dtype=p.reduce_dtype, device=term.device), term)))
            else:
                totals[i] = _plus(totals[i], term.to(p.reduce_dtype).contiguous())
    copy_together([copy for _, copy in small])
    for i, (term, _) in small:
        totals[i] = _plus(totals[i], term)
    return totals


def _plus(total: torch.Tensor | None, term: torch.Tensor) -> torch.Tensor:
    return term if total is None else total.add_(term)


def _take_unreduced(p: ShardedParameter) -> torch.Tensor | None:
    """What `no_sync` held back; the shard keeps the gradient that it had before."""
    if (gradient := unreduced_gradient(p)) is None:
        return None
    p.shard.grad = gradient.base
    return gradient.term


def drop(p: ShardedParameter) -> None:
    """Drop what a failed backward has left. What `no_sync` holds back is from earlier passes and stays."""
    for leaf in (p.full, p.full_global):
        if leaf is not None:
            leaf.grad = None


def _data_parallel_term(p: ShardedParameter, grad: DTensor) -> torch.Tensor:
    """A global gradient as this rank's term of a sum along the data axes, split as annotated along the others."""
    if p.module_spec is not None:  # not global along the data axes: each rank has its own
        return local_of(redistributed(grad, p.module_spec.mesh, p.module_spec.placements))
    mesh, placements = torch_layout(p.gathered_layout, p.plan.shape)
    groups = origin(mesh)[1]
    same_mesh = grad.device_mesh == mesh
    target: list[Placement] = []
    summed = []
    for i, (group, placement) in enumerate(zip(groups, placements, strict=True)):
        along_data = set(group) <= p.data_axes
        partial = same_mesh and along_data and grad.placements[i].is_partial()
        target.append(grad.placements[i] if partial else Replicate() if along_data else placement)
        if along_data and not partial:
            summed.append(i)
    local = local_of(redistributed(grad, mesh, target))
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    # Along axes where every rank already has the sum, only the first rank contributes it.
    return torch.zeros_like(local) if any(coordinate[i] != 0 for i in summed) else local


# --- no_sync ----------------------------------------------------------------------------------------------------------


def unreduced_gradient(p: ShardedParameter) -> UnreducedGradient | None:
    """The gradient that `no_sync` holds back, unless it was dropped since."""
    grad = p.shard.grad
    return grad if isinstance(grad, UnreducedGradient) else None


def hold_back(parameters: Sequence[ShardedParameter]) -> None:
    """Under `no_sync`: hold this rank's gradients back, in the dtype they will be summed in."""
    parameters = [p for p in parameters if p.plan.trainable]
    if p := next((p for p in parameters if hooks_on(p)), None):
        raise FSDPError(
            f"a hook on {p.plan.name} and no_sync(): hooks on parameters receive the gradient summed over the ranks, "
            f"which no_sync() delays. Leave out no_sync() (every micro-batch is reduced then), or remove the hook"
        )
    for p, term in zip(parameters, take(parameters), strict=True):
        if term is not None and p.shard.requires_grad:
            p.shard.grad = UnreducedGradient(p.shard, term, p.shard.grad)


# --- to the shard -----------------------------------------------------------------------------------------------------


def pack(p: ShardedParameter, grad: torch.Tensor, rows: torch.Tensor) -> list[Copy]:
    """The copies that cut a gradient into pieces, one per row of its slot in a bucket; padding is left as it is."""
    if not grad.numel():
        return []
    pieces = rows[:, : math.prod(p.piece)].view(-1, *p.piece)
    return [(piece, whole) for whole, piece in p.blocks(grad, pieces)]


def trim(p: ShardedParameter, piece: torch.Tensor) -> torch.Tensor:
    """A reduced piece in the shape of the shard."""
    if piece.shape == p.local.shape:
        return piece
    piece = piece.reshape(-1)[: math.prod(p.piece)].view(p.piece)
    if p.plan.dim is not None:
        piece = piece.narrow(p.plan.dim, 0, p.local.shape[p.plan.dim])
    return piece


def accumulate(p: ShardedParameter, grad: torch.Tensor, host: HostTraffic) -> None:
    """Add a reduced piece to the shard's gradient; not if it was frozen since its forward, as on one device."""
    if not p.shard.requires_grad:
        return
    local = p.local
    if grad.dtype != local.dtype:
        grad = grad.to(local.dtype)
    if grad.device != local.device:
        grad = host.to_host(grad)
    grad = _run_hooks(p, grad, host)
    current = p.shard.grad
    if current is None:
        assert is_sharded(p.shard)
        p.shard.grad = type(p.shard)(grad, spec_of(p.shard), requires_grad=False)
    else:
        assert is_sharded(current)
        host.add(local_of(current), grad)


# --- hooks of the user ------------------------------------------------------------------------------------------------


def hooks_on(p: ShardedParameter) -> list[Any]:
    """The user's hooks on the parameter: `register_hook` and `register_post_accumulate_grad_hook`."""
    both = (backward_hooks(p.shard), post_accumulate_hooks(p.shard))
    return [hook for hooks in both for hook in (hooks or {}).values()]


def _run_hooks(p: ShardedParameter, grad: torch.Tensor, host: HostTraffic) -> torch.Tensor:
    """The reduced piece after the hooks of `register_hook` have seen or replaced it."""
    hooks = backward_hooks(p.shard)
    if not hooks:
        return grad
    if p.plan.offloaded:
        host.arrived()
    assert is_sharded(p.shard)
    value: Any = type(p.shard)(grad, spec_of(p.shard), requires_grad=False)
    for hook in list(hooks.values()):
        with torch.no_grad():
            result = hook(value)
        if result is None:
            continue
        if not is_sharded(result) or result.shape != p.shard.shape:
            raise FSDPError(
                f"the hook on {p.plan.name} returned a {type(result).__name__} of shape "
                f"{tuple(getattr(result, 'shape', ()))}; it receives the gradient summed over the ranks, a DTensor of "
                f"shape {p.plan.shape}, and must return one like it or None"
            )
        value = redistributed(result.detach(), p.shard.device_mesh, p.shard.placements)
    local = local_of(value)
    return local.to(p.local.dtype)


def run_post_hooks(p: ShardedParameter) -> None:
    """Run the hooks of `register_post_accumulate_grad_hook`, once the shard has its gradient."""
    if hooks := post_accumulate_hooks(p.shard):
        with torch.no_grad():
            for hook in list(hooks.values()):
                hook(p.shard)
