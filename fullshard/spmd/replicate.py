"""Replicated execution: every rank gathers the full tensors and runs the operator on them.

The last resort for operators that no sharding rule covers. It is exact for every operator.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fullshard.device.torch_private import (
    DTensorSpec,
    is_in_mesh,
    local_of,
    set_local,
    set_spec,
    spec_of,
    tree_flatten,
    tree_map,
    tree_unflatten,
)
from fullshard.distributed import runtime
from fullshard.spmd.redistribute import meta_of, redistribute, replicated, spec_with, without_partial
from fullshard.spmd.rule_table import written_tensors
from fullshard.spmd.tensor import ShardedTensor, is_sharded
from fullshard.spmd.views import remember_base


def run_replicated(op: Any, flat: list[Any], tree: Any, mesh: DeviceMesh, why: str = "") -> Any:
    """Run the operator on full values on every rank. A result takes the layout of an input of the same shape.

    `why` is the reason for a warning, given once per operator; empty for no warning.
    """
    if why:
        name = str(op)
        runtime.warn_once(
            f"fallback {name}",
            f"{name} runs on full tensors on every rank: {why}. The result is exact; it costs an all-gather and the "
            f"memory of the full tensor. Shard its inputs on other dims to avoid that.",
        )
    full = [_gathered(leaf, mesh) if is_sharded(leaf) else leaf for leaf in flat]
    written = written_tensors(op, *tree_unflatten(flat, tree))
    back = {id(f): leaf for f, leaf in zip(full, flat, strict=True) if any(leaf is t for t in written)}
    if is_in_mesh(mesh):
        args, kwargs = tree_unflatten(full, tree)
        result = op(*args, **kwargs)
    else:
        metas = [_as_meta(leaf) for leaf in flat]
        args, kwargs = tree_unflatten(metas, tree)
        result = op(*args, **kwargs)
        back = {id(m): leaf for m, leaf in zip(metas, flat, strict=True) if any(leaf is t for t in written)}
    for value in full:
        if id(value) in back:
            _store(back[id(value)], value)
    layouts = {tuple(t.shape): without_partial(t.placements) for t in reversed(flat) if is_sharded(t)}

    def sharded(t: Any) -> Any:
        if not isinstance(t, torch.Tensor):
            return t
        if id(t) in back:
            return back[id(t)]
        spec = DTensorSpec(mesh, replicated(mesh), tensor_meta=meta_of(t))
        if t.is_meta and not is_in_mesh(mesh):
            t = torch.empty(0, dtype=t.dtype, device=runtime.device())
        target = spec_with(spec, mesh, layouts.get(tuple(spec.shape), replicated(mesh)))
        return ShardedTensor(redistribute(t, spec, target).contiguous(), target, requires_grad=False)

    out = tree_map(sharded, result)
    if op.is_view:
        first = next(leaf for leaf in flat if is_sharded(leaf))
        args, kwargs = tree_unflatten(flat, tree)
        remember_base(out, op, first, args[1:], kwargs)
    return out


def rule_replicated(op: Any, args: Any, kwargs: Any, why: str = "") -> Any:
    """`run_replicated` as a rule of an operator."""
    flat, tree = tree_flatten((args, kwargs))
    return run_replicated(op, flat, tree, next(leaf for leaf in flat if is_sharded(leaf)).device_mesh, why)


def _gathered(t: DTensor, mesh: DeviceMesh) -> torch.Tensor:
    """The full value of `t` with the strides of `t`: the results of some operators depend on them."""
    full = redistribute(local_of(t), spec_of(t), spec_with(spec_of(t), mesh, replicated(mesh)))
    if full.stride() == t.stride() or 0 in t.stride() or not is_in_mesh(mesh):
        return full
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=full.device).copy_(full)


def _store(t: DTensor, value: torch.Tensor) -> None:
    """Write a full value into the shards of `t`."""
    source = DTensorSpec(t.device_mesh, replicated(t.device_mesh), tensor_meta=meta_of(value))
    target = spec_with(source, t.device_mesh, without_partial(t.placements))
    shard = redistribute(value, source, target)
    if without_partial(t.placements) == tuple(t.placements) and shard.shape == local_of(t).shape:
        local_of(t).copy_(shard)
    else:
        set_local(t, shard)
    set_spec(t, spec_with(spec_of(t), t.device_mesh, target.placements))


def _as_meta(leaf: Any) -> Any:
    if not is_sharded(leaf):
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
