"""How an operator runs on sharded tensors.

`dispatch` receives every operator that meets a sharded tensor and picks, in this order: a rule of ours
(`rules.py`), torch's own sharding rule where it is exact for these pieces, a decomposition into simpler operators,
or replicated execution with one warning per operator. The choice is made from global shapes and layouts alone, so it
is the same on every rank, and before any local kernel runs, so no rank raises where another goes on to wait for it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from fullshard import runtime
from fullshard.errors import LayoutError
from fullshard.spmd import foreach_ops, rules
from fullshard.spmd.mesh import origin
from fullshard.spmd.tensor import (
    NARROW,
    ShardedTensor,
    is_sharded,
    meta_of,
    relaid,
    relay,
    replicated,
    respec,
    settle,
    taken_as_global,
)
from fullshard.spmd.views import is_copy, remember_base, write_through
from fullshard.torch_private import (
    DTensorSpec,
    is_composite,
    is_in_mesh,
    local_of,
    no_dispatch,
    overload_name,
    schema_of,
    set_local,
    set_spec,
    spec_of,
    take_shard,
    torch_sharding,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
)

aten = torch.ops.aten
Op = Any


def dispatch(op: Op, args: Any, kwargs: Any) -> Any:
    """Run one operator on global values; returns global values."""
    flat, tree = tree_flatten((args, kwargs))
    written = _written(op, args, kwargs)
    if foreach_ops.is_list_operator(op):
        out = foreach_ops.run(op, args, kwargs, written)
        if out is not NotImplemented:
            for t in written:
                write_through(t)
            return out
    _check_plain(flat, written)
    if any(not is_sharded(t) for t in written):
        return _into_plain(op, flat, tree, written)
    if torch.Tag.inplace_view in op.tags:
        return _reshaped_in_place(op, args, kwargs)

    for t in written:
        if _is_pending(t):  # a term of a sum cannot be written like a value
            settled = relaid(t, t.device_mesh, settle(t.placements))
            take_shard(t, settled)
    # A tensor that is written into stays where it is; the others come to it.
    mesh = _common_mesh([t for t in written or flat if is_sharded(t)])
    flat = [_on_mesh(leaf, mesh) if isinstance(leaf, torch.Tensor) else leaf for leaf in flat]
    if any(is_sharded(leaf) and leaf.dtype in NARROW for leaf in flat):
        flat = [_wide_sum_done(leaf) for leaf in flat]
    out = _run(op, flat, tree, mesh)
    if op.is_view and any(out is leaf for leaf in flat):  # a squeeze of nothing: autograd wants a tensor of its own
        out = aten.alias.default(out)
    for t in written:
        write_through(t)
    # A view of a copy, or of a pending sum (which a write will carry out, elsewhere): a write must go back further.
    if op.is_view and (is_copy(args[0]) or _is_pending(args[0])):
        remember_base(out, op, args[0], args[1:], kwargs)
    if op.is_view and isinstance(out, ShardedTensor) and (name := getattr(args[0], "meets_no_plain", "")):
        out.meets_no_plain = name
    return out


def _check_plain(flat: list[Any], written: list[torch.Tensor]) -> None:
    name = next((n for t in flat if (n := getattr(t, "meets_no_plain", "")) and not any(t is w for w in written)), "")
    if not name:
        return
    for t in flat:
        if isinstance(t, torch.Tensor) and t.ndim and not is_sharded(t):
            raise LayoutError(
                f"{name} is sharded and meets a plain tensor of shape {tuple(t.shape)}, of which each rank has its "
                f"own, outside the forward of its unit. Call the model, or make the module that was called a unit "
                f"of its own (auto_wrap_policy)"
            )


def _run(op: Op, flat: list[Any], tree: Any, mesh: DeviceMesh) -> Any:
    rule = rules.find(op, flat)
    if rule is not None:
        args, kwargs = tree_unflatten(flat, tree)
        out = rule(op, args, kwargs)
        if out is not NotImplemented:
            return out
    choice = _choose(op, flat, tree)
    if choice.by_torch:
        return _by_torch(op, flat, tree, choice)
    args, kwargs = tree_unflatten(flat, tree)
    if is_composite(op):
        return op.decompose(*args, **kwargs)
    return by_copies(op, flat, tree, mesh, choice.why)


# --- torch's own rules -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """How one operator runs on tensors of given shapes and layouts."""

    by_torch: bool
    why: str = ""
    """Why torch's rule is not used."""
    placements: tuple[tuple[Placement, ...] | None, ...] = ()
    """The layout each argument is brought into first; None where it is no sharded tensor."""


_choices: dict[Any, Choice] = {}
MOST_CHOICES = 50_000
"""Shapes may differ from batch to batch: past this many, what is known is forgotten."""
_torch_meta_log = logging.getLogger("torch._subclasses.fake_tensor")


def _choose(op: Op, flat: list[Any], tree: Any) -> Choice:
    # The numbers of an elementwise operator, such as a step size, have no say in how its tensors are laid out.
    values = torch.Tag.pointwise not in op.tags
    key = (op, tree, *(_trait(leaf, values) for leaf in flat))
    try:
        known = _choices.get(key)
    except TypeError:  # an argument that cannot be hashed, such as a generator
        return _choose_anew(op, flat, tree)
    if known is None:
        if len(_choices) >= MOST_CHOICES:
            _choices.clear()
        known = _choices[key] = _choose_anew(op, flat, tree)
    return known


def _trait(leaf: Any, values: bool) -> Any:
    """What of an argument the choice depends on."""
    if is_sharded(leaf):
        return spec_of(leaf)
    return (type(leaf), leaf) if values or not isinstance(leaf, int | float | complex) else type(leaf)


def _choose_anew(op: Op, flat: list[Any], tree: Any) -> Choice:
    why = "its sharding rule is not exact for these pieces"
    _torch_meta_log.disabled = True  # it would print a traceback for every operator that torch has no rule for
    try:
        for attempt in _attempts(op, flat, tree):
            try:
                placements = _torch_rule(op, attempt, tree)
            except Exception as error:
                # torch signals "no rule" in many ways; whatever it was, a replicated run raises what one device would.
                why = f"torch has no sharding rule for it ({type(error).__name__})"
                continue
            if placements is not None:
                return Choice(True, placements=placements)
    finally:
        _torch_meta_log.disabled = False
    return Choice(False, why=why)


def _attempts(op: Op, flat: list[Any], tree: Any) -> Iterator[list[Any]]:
    """The layouts to try torch's rule with: as they are, then with less and less split."""
    yield flat
    tensors = [leaf for leaf in flat if is_sharded(leaf)]
    uneven = {id(t): _uneven_dims(spec_of(t)) for t in tensors}
    written = _written(op, *tree_unflatten(flat, tree))
    if any(uneven.values()) and not any(uneven[id(t)] for t in written):
        yield [_opened(leaf, uneven[id(leaf)]) if is_sharded(leaf) else leaf for leaf in flat]
    if len(tensors) == 1 and not written:  # a view that would merge split dims: one of them may be enough
        for dim in reversed(range(tensors[0].ndim)):
            yield [_opened(leaf, (dim, *uneven[id(leaf)])) if is_sharded(leaf) else leaf for leaf in flat]


def _torch_rule(op: Op, flat: list[Any], tree: Any) -> tuple[tuple[Placement, ...] | None, ...] | None:
    """The layouts in which torch's rule wants the arguments; None where the rule is not exact for these pieces."""
    args, kwargs = tree_unflatten([_bare(leaf) for leaf in flat], tree)
    sharding = torch_sharding(op, args, kwargs)
    specs = [spec_of(leaf) for leaf in flat if is_sharded(leaf)]
    wanted = list(specs)
    if sharding.needs_redistribute:
        asked = [s for s in tree_leaves(sharding.redistribute_schema.args_schema) if isinstance(s, DTensorSpec)]
        wanted[: len(asked)] = asked  # keyword arguments come last and are never asked for
    if any(p.is_partial() and not _is_pending_sum(p) for spec in wanted for p in spec.placements):
        return None
    out = [s for s in tree_leaves(sharding.output_spec) if isinstance(s, DTensorSpec)]
    written = [spec_of(t).placements for t in _written(op, args, kwargs)]
    # A tensor that is written into must stay where it is; results are listed in the order of such arguments.
    stays = not written or (
        wanted[0].placements == specs[0].placements and written == [s.placements for s in out]
    )  # fmt: skip
    if not stays or not all(_exact(op, spec) for spec in specs + wanted + out):
        return None
    remaining = iter(wanted)
    return tuple(next(remaining).placements if is_sharded(leaf) else None for leaf in flat)


def _exact(op: Op, spec: DTensorSpec) -> bool:
    if not all(p.is_replicate() or p.is_partial() or type(p) is Shard for p in spec.placements):
        return False  # a piece that is several stripes has no place in a partition spec
    dims = _uneven_dims(spec)
    if not dims:
        return True
    cut_twice = any(sum(isinstance(p, Shard) and p.dim == dim for p in spec.placements) > 1 for dim in dims)
    return not cut_twice and (torch.Tag.pointwise in op.tags or op in rules.EXACT_ON_UNEVEN)


def _is_pending(t: Any) -> bool:
    return any(p.is_partial() for p in t.placements)


def _wide_sum_done(leaf: Any) -> Any:
    """Terms of a pending sum that meet fp16 or bf16 would be rounded before they are added up."""
    if is_sharded(leaf) and leaf.dtype not in NARROW and _is_pending(leaf):
        return relaid(leaf, leaf.device_mesh, settle(leaf.placements))
    return leaf


def _is_pending_sum(placement: Placement) -> bool:
    return type(placement) is Partial and placement.reduce_op == "sum"


def _uneven_dims(spec: DTensorSpec) -> tuple[int, ...]:
    parts = [1] * len(spec.shape)
    for size, placement in zip(spec.mesh.shape, spec.placements, strict=True):
        if isinstance(placement, Shard):
            parts[placement.dim] *= size
    return tuple(dim for dim, size in enumerate(spec.shape) if size % parts[dim])


def _opened(t: DTensor, dims: Sequence[int]) -> DTensor:
    """A stand-in for `t` with some dims whole on every rank. Its layout is right, its data not."""
    placements = tuple(Replicate() if isinstance(p, Shard) and p.dim in dims else p for p in t.placements)
    return DTensor(local_of(t), respec(spec_of(t), t.device_mesh, placements), requires_grad=False)


def _by_torch(op: Op, flat: list[Any], tree: Any, choice: Choice) -> Any:
    ready = [
        leaf if target is None or target == leaf.placements else relaid(leaf, leaf.device_mesh, target)
        for leaf, target in zip(flat, choice.placements, strict=True)
    ]
    bare = [_bare(leaf) for leaf in ready]
    args, kwargs = tree_unflatten(bare, tree)
    owner = {id(b): leaf for b, leaf in zip(bare, flat, strict=True) if is_sharded(b)}

    def own(t: Any) -> Any:
        if not is_sharded(t):
            return t
        if id(t) in owner:  # an operator that writes into its argument returns that argument
            leaf = owner[id(t)]
            take_shard(leaf, t)
            return leaf
        # Pending maxima, means and norms mix with nothing else: they are carried out at once.
        done = [Replicate() if p.is_partial() and not _is_pending_sum(p) else p for p in t.placements]
        return relaid(t, t.device_mesh, done)

    out = tree_map(own, op(*args, **kwargs))
    if op.is_view and ready[0] is not flat[0]:
        remember_base(out, op, flat[0], args[1:], kwargs)
    return out


def _bare(leaf: Any) -> Any:
    """The same tensor as torch's own class, whose operators torch handles itself."""
    return DTensor(local_of(leaf), spec_of(leaf), requires_grad=False) if is_sharded(leaf) else leaf


# --- replicated execution ------------------------------------------------------------------------------------------


def by_copies(op: Op, flat: list[Any], tree: Any, mesh: DeviceMesh, why: str = "") -> Any:
    """Run the operator on whole values on every rank. Results take the layout of an input of the same shape."""
    if why:
        name = str(op)
        runtime.warn_once(
            f"fallback {name}",
            f"{name} runs on whole tensors on every rank: {why}. The result is exact; it costs a gather and the memory "
            f"of the whole tensor. Lay its inputs out on other dims to avoid that.",
        )
    whole = [_gathered(leaf, mesh) if is_sharded(leaf) else leaf for leaf in flat]
    written = _written(op, *tree_unflatten(flat, tree))
    back = {id(w): leaf for w, leaf in zip(whole, flat, strict=True) if any(leaf is t for t in written)}
    if is_in_mesh(mesh):
        args, kwargs = tree_unflatten(whole, tree)
        result = op(*args, **kwargs)
    else:
        metas = [_as_meta(leaf) for leaf in flat]
        args, kwargs = tree_unflatten(metas, tree)
        result = op(*args, **kwargs)
        back = {id(m): leaf for m, leaf in zip(metas, flat, strict=True) if any(leaf is t for t in written)}
    for value in whole:
        if id(value) in back:
            leaf = back[id(value)]
            _store(leaf, value)
    layouts = {tuple(t.shape): settle(t.placements) for t in reversed(flat) if is_sharded(t)}

    def share(t: Any) -> Any:
        if not isinstance(t, torch.Tensor):
            return t
        if id(t) in back:
            return back[id(t)]
        spec = DTensorSpec(mesh, replicated(mesh), tensor_meta=meta_of(t))
        if t.is_meta and not is_in_mesh(mesh):
            t = torch.empty(0, dtype=t.dtype, device=runtime.device())
        target = respec(spec, mesh, layouts.get(tuple(spec.shape), replicated(mesh)))
        return ShardedTensor(relay(t, spec, target).contiguous(), target, requires_grad=False)

    out = tree_map(share, result)
    if op.is_view:
        first = next(leaf for leaf in flat if is_sharded(leaf))
        args, kwargs = tree_unflatten(flat, tree)
        remember_base(out, op, first, args[1:], kwargs)
    return out


def _gathered(t: DTensor, mesh: DeviceMesh) -> torch.Tensor:
    """The whole of `t`, in memory as `t` says it lies there: some operators depend on that."""
    whole = relay(local_of(t), spec_of(t), respec(spec_of(t), mesh, replicated(mesh)))
    if whole.stride() == t.stride() or 0 in t.stride() or not is_in_mesh(mesh):
        return whole
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=whole.device).copy_(whole)


def _store(t: DTensor, value: torch.Tensor) -> None:
    """Write a whole value back into the pieces of `t`."""
    source = DTensorSpec(t.device_mesh, replicated(t.device_mesh), tensor_meta=meta_of(value))
    target = respec(source, t.device_mesh, settle(t.placements))
    piece = relay(value, source, target)
    if settle(t.placements) == tuple(t.placements) and piece.shape == local_of(t).shape:
        local_of(t).copy_(piece)
    else:
        set_local(t, piece)
    set_spec(t, respec(spec_of(t), t.device_mesh, target.placements))


def _as_meta(leaf: Any) -> Any:
    if not is_sharded(leaf):
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")


# --- arguments -----------------------------------------------------------------------------------------------------


def _written(op: Op, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors an operator writes into."""
    schema = schema_of(op).arguments
    if not any(a.alias_info is not None and a.alias_info.is_write for a in schema):
        return []
    named = {a.name: value for a, value in zip(schema, args, strict=False)} | kwargs
    values = [named.get(a.name) for a in schema if a.alias_info is not None and a.alias_info.is_write]
    return [t for t in tree_leaves(values) if isinstance(t, torch.Tensor)]


def _into_plain(op: Op, flat: list[Any], tree: Any, written: list[torch.Tensor]) -> Any:
    """An operator that writes into a plain tensor, which is a global value."""
    if not any(map(is_sharded, written)):  # the others are gathered for it
        whole = [
            local_of(relaid(leaf, leaf.device_mesh, replicated(leaf.device_mesh))) if is_sharded(leaf) else leaf
            for leaf in flat
        ]
        args, kwargs = tree_unflatten(whole, tree)
        return op(*args, **kwargs)
    # It writes into sharded ones too: the plain ones take part as copies on every rank, in their own memory.
    mesh = _common_mesh([t for t in written if is_sharded(t)])
    stand_ins = {id(t): (t, taken_as_global(t, mesh)) for t in written if not is_sharded(t)}
    flat = [stand_ins[id(leaf)][1] if id(leaf) in stand_ins else leaf for leaf in flat]
    args, kwargs = tree_unflatten(flat, tree)
    out = dispatch(op, args, kwargs)
    for t, stand_in in stand_ins.values():
        value = local_of(relaid(stand_in, mesh, replicated(mesh)))
        if value.data_ptr() != t.data_ptr() or value.shape != t.shape:
            t.resize_(value.shape).copy_(value)
    given = {id(stand_in): t for t, stand_in in stand_ins.values()}
    return tree_map(lambda t: given.get(id(t), t), out)


def _reshaped_in_place(op: Op, args: Any, kwargs: Any) -> Any:
    """`squeeze_`, `t_` and the like: the tensor becomes what the operator without the underscore would return."""
    plain = getattr(aten, schema_of(op).name.removeprefix("aten::").rstrip("_"))
    new = getattr(plain, overload_name(op) if overload_name(op) in plain.overloads() else "int")(*args, **kwargs)
    t = args[0]
    take_shard(t, new)
    with no_dispatch():
        op(*args, **kwargs)  # the shape that torch sees from outside
    return t


def _common_mesh(tensors: list[DTensor]) -> DeviceMesh:
    """The torch mesh on which tensors of several meshes can meet at the least cost."""
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
        return taken_as_global(t, mesh)
    if t.device_mesh == mesh:
        return t
    # Cut as before where this mesh can cut so; whole where it cannot.
    owner, groups = origin(t.device_mesh)
    target: list[Placement] = list(replicated(mesh))
    same_owner, new_groups = origin(mesh)
    if owner == same_owner:
        for group, placement in zip(groups, t.placements, strict=True):
            axes = [new_groups.index((axis,)) for axis in group if (axis,) in new_groups]
            parts = t.device_mesh.size(groups.index(group))
            if isinstance(placement, Shard) and len(axes) == len(group) and axes == sorted(axes):
                if t.shape[placement.dim] % parts == 0:
                    for axis in axes:
                        target[axis] = Shard(placement.dim)
    return relaid(t, mesh, target)
