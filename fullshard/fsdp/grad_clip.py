"""Gradient clipping: the total norm of all gradients, exact on any mesh."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Shard

from fullshard.config.errors import FSDPError
from fullshard.device.torch_private import foreach_mul_, foreach_norm, local_of
from fullshard.distributed import runtime
from fullshard.distributed.watchdog import collectives, watch
from fullshard.spmd.mesh import Mesh, origin
from fullshard.spmd.tensor import is_sharded

Split = tuple[Mesh, tuple[int, ...]]
"""A mesh, and the axes of it that split a gradient."""
PLAIN = (-1,)
"""Stands for the axes of a gradient that is not sharded."""


def clip_grad_norm_(
    parameters: Sequence[nn.Parameter], mesh: Mesh, max_norm: float, norm_type: float, error_if_nonfinite: bool
) -> torch.Tensor:
    """Scale the gradients to a total norm of at most `max_norm`; returns the norm before scaling.

    Each shard counts once: norms are summed along the axes that split a parameter, not over replicas. Plain gradients
    (of ignored modules) may differ between ranks, so the mean of their norms counts, and all ranks scale alike. All
    ranks must call it, also those whose shards are empty.
    """
    watch.raise_failure()
    p = check_norm_type(norm_type)
    # The axes that split a gradient decide over which ranks its terms are summed. The order is the same on every rank.
    by_axes: dict[Split, list[torch.Tensor]] = {}
    for parameter in parameters:
        grad = parameter.grad
        assert grad is not None
        if is_sharded(grad):
            by_axes.setdefault(_split_by(grad.device_mesh, grad.placements), []).append(local_of(grad))
        else:
            by_axes.setdefault((mesh, PLAIN), []).append(grad)
    device = runtime.device()
    terms = [torch.zeros((), dtype=torch.float64, device=device)]
    for split in sorted(by_axes, key=str):
        power, (on, axes) = _power(by_axes[split], p, device), split
        terms.append(_mean(power, mesh, p) if axes == PLAIN else _sum_along(power, axes, on, p))
    stacked = torch.stack(terms)
    norm = stacked.max() if math.isinf(p) else stacked.sum() ** (1.0 / p)
    if error_if_nonfinite:
        refuse_nonfinite(norm)
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    every = [local for locals_ in by_axes.values() for local in locals_]
    for (place, dtype), alike in _by_kind(every).items():
        foreach_mul_(alike, factor.to(device=place, dtype=dtype))
    return norm if any(g.dtype == torch.float64 for g in every) else norm.to(torch.float32)


def check_norm_type(norm_type: float) -> float:
    """The exponent of a norm; raises if it is none."""
    if (p := float(norm_type)) <= 0:
        raise FSDPError(f"clip_grad_norm_: norm_type={norm_type} is not a norm; expected a positive number or inf")
    return p


def refuse_nonfinite(norm: torch.Tensor) -> None:
    """Raise if the norm of the gradients is not finite."""
    if not math.isfinite(value := norm.item()):
        raise FSDPError(f"clip_grad_norm_: the norm of the gradients is {value}, which is not finite")


def _split_by(device_mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Split:
    """The axes that split a tensor."""
    mesh, groups = origin(device_mesh)
    axes = [axis for group, at in zip(groups, placements, strict=True) if isinstance(at, Shard) for axis in group]
    return mesh, tuple(sorted(axes))


def _power(locals_: list[torch.Tensor], p: float, device: torch.device) -> torch.Tensor:
    """The sum of |x|^p over the pieces (their maximum for inf), in fp64."""
    filled = [t for t in locals_ if t.numel()]
    if not filled:
        return torch.zeros((), dtype=torch.float64, device=device)
    dtype = torch.float64 if any(t.dtype == torch.float64 for t in filled) else torch.float32
    powers = [torch.stack(foreach_norm(alike, p, dtype)).to(device) for alike in _by_kind(filled).values()]
    norms = torch.cat(powers).double()
    return norms.max() if math.isinf(p) else (norms**p).sum()


def _by_kind(tensors: list[torch.Tensor]) -> dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]:
    """Tensors that one launch can handle, by device and dtype."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for t in tensors:
        by_kind.setdefault((t.device, t.dtype), []).append(t)
    return by_kind


def _mean(value: torch.Tensor, mesh: Mesh, p: float) -> torch.Tensor:
    total = _sum_along(value, tuple(range(mesh.ndim)), mesh, p)
    return total if math.isinf(p) else total / mesh.size()


def _sum_along(value: torch.Tensor, axes: tuple[int, ...], mesh: Mesh, p: float) -> torch.Tensor:
    op = dist.ReduceOp.MAX if math.isinf(p) else dist.ReduceOp.SUM
    for axis in axes:
        if mesh.mesh_shape[axis] > 1:
            group = mesh.get_group(axis)
            issue = functools.partial(dist.all_reduce, value, op, group, async_op=True)
            collectives.finish("norm of the gradients", issue, group)
    return value
