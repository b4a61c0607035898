"""How an operator runs on sharded tensors.

`dispatch` gets every operator that has a sharded tensor among its arguments. It uses the first of these that applies:
a rule of our own (`rules.py`), torch's sharding rule if it is exact for these shards (`torch_rules.py`), a
decomposition into simpler operators, or replicated execution with one warning per operator (`replicate.py`).
The choice depends on global shapes and layouts only and is made before any local kernel runs. So all ranks make
the same choice, and no rank raises an error while another waits for it in a collective.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from fullshard.config.errors import LayoutError, LossLayoutError
from fullshard.device.torch_private import (
    current_graph_task_id,
    is_composite,
    local_of,
    no_dispatch,
    overload_name,
    schema_of,
    spec_of,
    take_shard,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
)
from fullshard.spmd import foreach_ops, rules
from fullshard.spmd.mesh import origin
from fullshard.spmd.redistribute import NARROW, has_partial, replicated, without_partial
from fullshard.spmd.replicate import run_replicated
from fullshard.spmd.rule_table import aten, written_tensors
from fullshard.spmd.tensor import ShardedTensor, as_replicated, full_of, is_sharded, redistributed, runs_operators
from fullshard.spmd.torch_rules import choose, run_by_torch
from fullshard.spmd.views import is_copy, remember_base, write_through


@runs_operators
def dispatch(op: Any, args: Any, kwargs: Any) -> Any:
    """Run one operator on global values; returns global values."""
    flat, tree = tree_flatten((args, kwargs))
    written = written_tensors(op, args, kwargs)
    name = _meets_no_plain(flat)
    if foreach_ops.is_list_operator(op):
        out = foreach_ops.run(op, args, kwargs, written)
        if out is not NotImplemented:
            for t in written:
                write_through(t)
            return _inherited(out, name, written)
    _refuse_activations(flat, written)
    if name and any(isinstance(t, torch.Tensor) and not is_sharded(t) for t in flat):
        flat = beside_plain(flat, written)
        if not any(map(is_sharded, flat)):
            args, kwargs = tree_unflatten(flat, tree)
            return op(*args, **kwargs)
    if any(not is_sharded(t) for t in written):
        return _write_to_plain(op, flat, tree, written)
    if torch.Tag.inplace_view in op.tags:
        return _reshape_in_place(op, args, kwargs)

    for t in written:
        if has_partial(t.placements):  # a write to one term of a sum is not a write to the sum
            take_shard(t, redistributed(t, t.device_mesh, without_partial(t.placements)))
    # A tensor that is written to keeps its mesh; the others are moved to it.
    mesh = _common_mesh([t for t in written or flat if is_sharded(t)])
    flat = [_on_mesh(leaf, mesh) if isinstance(leaf, torch.Tensor) else leaf for leaf in flat]
    if any(is_sharded(leaf) and leaf.dtype in NARROW for leaf in flat):
        flat = [_wide_sum_reduced(leaf) for leaf in flat]
    out = _run(op, flat, tree, mesh)
    if op.is_view and any(out is leaf for leaf in flat):  # a squeeze of nothing: autograd needs a new tensor
        out = aten.alias.default(out)
    for t in written:
        write_through(t)
    # A write to a view of a copy, or of a sum that is not reduced yet, must reach the base.
    if op.is_view and (is_copy(args[0]) or has_partial(args[0].placements)):
        remember_base(out, op, args[0], args[1:], kwargs)
    return _inherited(out, name, written)


def _run(op: Any, flat: list[Any], tree: Any, mesh: DeviceMesh) -> Any:
    rule = rules.find_rule(op, flat)
    if rule is not None:
        args, kwargs = tree_unflatten(flat, tree)
        out = rule(op, args, kwargs)
        if out is not NotImplemented:
            return out
    choice = choose(op, flat, tree)
    if choice.by_torch:
        return run_by_torch(op, flat, tree, choice)
    args, kwargs = tree_unflatten(flat, tree)
    if is_composite(op):
        return op.decompose(*args, **kwargs)
    return run_replicated(op, flat, tree, mesh, choice.why)


def _refuse_activations(flat: list[Any], written: list[torch.Tensor]) -> None:
    """Refuse plain tensors, other than scalars, beside a parameter that meets none: each rank has different ones."""
    name = _meets_no_plain(t for t in flat if not any(t is w for w in written))
    for t in flat if name else ():
        if isinstance(t, torch.Tensor) and not is_sharded(t) and t.ndim:
            raise LayoutError(
                f"{name} is sharded and was used together with a plain tensor of shape {tuple(t.shape)}, which differs "
                f"between ranks, outside the forward of its unit. Call the model, or make the module that was called a "
                f"unit of its own (auto_wrap_policy)"
            )


def _meets_no_plain(leaves: Iterable[Any]) -> str:
    """The name of a parameter that meets no plain tensors, and that one of these was computed from; "" if none was."""
    return next((name for t in leaves if (name := getattr(t, "meets_no_plain", ""))), "")


def beside_plain(flat: list[Any], written: list[torch.Tensor]) -> list[Any]:
    """The arguments to run an operator with that has values of parameters beside plain tensors of this rank.

    Where no gradient flows to sharded scalars (a penalty), their full values count, and the result is this rank's. A
    plain tensor without a gradient is a constant beside all others, as in backward. The rest is refused, because the
    gradient would be a global tensor, which each rank's own graph cannot continue with.
    """
    sharded = [t for t in flat if is_sharded(t)]
    plain = [t for t in flat if isinstance(t, torch.Tensor) and not is_sharded(t)]
    differentiable = torch.is_grad_enabled() and any(t.requires_grad for t in sharded)
    stays_sharded = any(t.ndim for t in sharded) or any(is_sharded(t) for t in written)
    if not (differentiable or stays_sharded or current_graph_task_id() != -1):
        return [full_of(t) if is_sharded(t) else t for t in flat]
    if any(t.requires_grad or (differentiable and any(t is w for w in written)) for t in plain):
        raise LossLayoutError(
            "a value that was computed from sharded parameters, such as a penalty, and a plain tensor that needs a "
            "gradient, such as the loss of this rank, are arguments of the same function: write loss + penalty (or -, "
            "*, /), where the full value of the penalty counts, or use penalty.full_tensor()"
        )
    return [leaf if any(leaf is w for w in written) else _scalar_reduced(leaf) for leaf in flat]


def _scalar_reduced(leaf: Any) -> Any:
    """A sum over ranks beside a constant: its terms would be multiplied by the constants of several ranks."""
    if is_sharded(leaf) and not leaf.ndim and has_partial(leaf.placements):
        reduced = redistributed(leaf, leaf.device_mesh, without_partial(leaf.placements))
        return type(leaf)(local_of(reduced), spec_of(reduced), requires_grad=False)
    return leaf


def _inherited(out: Any, name: str, written: list[torch.Tensor]) -> Any:
    """The results of an operator, which meet no plain tensors if one of its arguments, a parameter of this name, does
    not."""
    for t in tree_leaves(out) if name else ():
        if isinstance(t, ShardedTensor) and not any(t is w for w in written):
            t.meets_no_plain = name
    return out


def _wide_sum_reduced(leaf: Any) -> Any:
    """Beside fp16 or bf16, the terms of a sum in a wider type would be rounded before they are added: reduce it."""
    if is_sharded(leaf) and leaf.dtype not in NARROW and has_partial(leaf.placements):
        return redistributed(leaf, leaf.device_mesh, without_partial(leaf.placements))
    return leaf


# --- writes -----------------------------------------------------------------------------------------------------------


def _write_to_plain(op: Any, flat: list[Any], tree: Any, written: list[torch.Tensor]) -> Any:
    """Run an operator that writes to a plain tensor, which is a global value."""
    if not any(map(is_sharded, written)):  # the other arguments are gathered
        full = [full_of(leaf) if is_sharded(leaf) else leaf for leaf in flat]
        args, kwargs = tree_unflatten(full, tree)
        return op(*args, **kwargs)
    # It also writes to sharded tensors: the plain ones count as replicated tensors that share their memory.
    mesh = _common_mesh([t for t in written if is_sharded(t)])
    stand_ins = {id(t): (t, as_replicated(t, mesh)) for t in written if not is_sharded(t)}
    flat = [stand_ins[id(leaf)][1] if id(leaf) in stand_ins else leaf for leaf in flat]
    args, kwargs = tree_unflatten(flat, tree)
    out = dispatch(op, args, kwargs)
    for t, stand_in in stand_ins.values():
        value = full_of(stand_in)
        if value.data_ptr() != t.data_ptr() or value.shape != t.shape:
            t.resize_(value.shape).copy_(value)
    originals = {id(stand_in): t for t, stand_in in stand_ins.values()}
    return tree_map(lambda t: originals.get(id(t), t), out)


def _reshape_in_place(op: Any, args: Any, kwargs: Any) -> Any:
    """`squeeze_`, `t_` and the like: the tensor takes the result of the operator without the underscore."""
    packet = getattr(aten, schema_of(op).name.removeprefix("aten::").rstrip("_"))
    new = getattr(packet, overload_name(op) if overload_name(op) in packet.overloads() else "int")(*args, **kwargs)
    t = args[0]
    take_shard(t, new)
    with no_dispatch():
        op(*args, **kwargs)  # the outer shape
    return t


# --- meshes -----------------------------------------------------------------------------------------------------------


def _common_mesh(tensors: list[DTensor]) -> DeviceMesh:
    """The torch mesh to move tensors of several meshes to, at the least cost."""
    meshes = {t.device_mesh: None for t in tensors}
    if len(meshes) == 1:
        return next(iter(meshes))
    split = {t.device_mesh: None for t in tensors if any(not p.is_replicate() for p in t.placements)}
    if len(split) == 1:
        return next(iter(split))
    owners = {origin(mesh)[0]: None for mesh in split or meshes}
    if len(owners) == 1:
        return next(iter(owners)).device_mesh
    return next(iter(split or meshes))


def _on_mesh(t: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    if not is_sharded(t):
        return as_replicated(t, mesh)
    if t.device_mesh == mesh:
        return t
    # Keep each split that this mesh can express; replicate the other dims.
    owner, groups = origin(t.device_mesh)
    target: list[Placement] = list(replicated(mesh))
    new_owner, new_groups = origin(mesh)
    if owner == new_owner:
        for group, placement in zip(groups, t.placements, strict=True):
            axes = [new_groups.index((axis,)) for axis in group if (axis,) in new_groups]
            parts = t.device_mesh.size(groups.index(group))
            if isinstance(placement, Shard) and len(axes) == len(group) and axes == sorted(axes):
                if t.shape[placement.dim] % parts == 0:
                    for axis in axes:
                        target[axis] = Shard(placement.dim)
    return redistributed(t, mesh, target)
