"""An optimizer in a checkpoint: its state by parameter name, and the options of its parameter groups.

torch identifies an optimizer's parameters by number. A checkpoint uses their names, so that order and sharding may
change. Restored state gets the layout that its parameter has now.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from fullshard.checkpoint import json_tree
from fullshard.checkpoint.objects import RestorePlan, StateDescription, type_difference
from fullshard.config.errors import CheckpointError
from fullshard.optim.bnb import SCALES, is_bnb
from fullshard.optim.sharded import initial_state
from fullshard.spmd.mesh import Mesh

STEP = "step"
"""The key of a parameter's step count: a number, whatever the parameter's layout."""
IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")
"""Options of a parameter group that say how an optimizer computes, which is its own choice where it is restored: what
one engine or device has, another may not."""


SIZES = (2, 3, 5, 7, 11, 13)
"""Sizes of the dims of a parameter that an optimizer is tried with."""


def _names(optimizer: torch.optim.Optimizer, names: dict[int, str], label: str) -> list[list[str]]:
    """The parameter names of each parameter group."""
    unknown = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in names]
    if unknown:
        raise CheckpointError(
            f"{label}: {len(unknown)} of its parameters (the first of shape {tuple(unknown[0].shape)}) belong to no "
            f"model in the state. Save and restore the model together with its optimizer: "
            f"{{'model': model, {label!r}: …}}, and create the optimizer after the model is wrapped"
        )
    return [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def describe_optimizer(
    description: StateDescription, label: str, optimizer: torch.optim.Optimizer, names: dict[int, str]
) -> None:
    """Describe an optimizer."""
    groups = []
    for i, (group, members) in enumerate(zip(optimizer.param_groups, _names(optimizer, names, label), strict=True)):
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        groups.append({
            "parameters": members,
            "options": json_tree.encode(options, description.put, f"{label}/group-{i}"),
        })  # fmt: skip
    state = {}
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        for p, name in zip(group["params"], saved["parameters"], strict=True):
            if p in optimizer.state:
                state[name] = json_tree.encode(dict(optimizer.state[p]), description.put, f"{label}/{name}")
    description.entries[label] = {
        "kind": "optimizer", "class": type(optimizer).__qualname__, "groups": groups, "state": state,
    }  # fmt: skip


def prepare_optimizer(
    plan: RestorePlan,
    label: str,
    entry: dict[str, Any],
    optimizer: torch.optim.Optimizer,
    names: dict[int, str],
    mesh: Mesh | None,
) -> None:
    """Plan to restore an optimizer: new state tensors with the layout of its parameters, then `load_state_dict`."""
    members = _names(optimizer, names, label)
    saved = [group["parameters"] for group in entry["groups"]]
    if [sorted(group) for group in saved] != [sorted(group) for group in members]:
        plan.problems.append(_groups_differ(label, saved, members))
        return
    if entry["class"] != type(optimizer).__qualname__:
        plan.problems.append(f"{label} is a {type(optimizer).__qualname__}; the checkpoint has a {entry['class']}")
        return
    parameters = {
        name: p
        for group, group_names in zip(optimizer.param_groups, members, strict=True)
        for p, name in zip(group["params"], group_names, strict=True)
    }
    tensors: dict[str, torch.Tensor] = {}
    if strange := sorted(entry["state"].keys() - parameters.keys()):
        plan.problems.append(f"{label}: it has state of {strange[0]}, which is in none of its groups")
        return
    for name, data in entry["state"].items():
        present = initial_state(optimizer, parameters[name])
        for key, value in data.items():
            for ref in json_tree.tensor_refs(value):
                now = present.get(key) if ref is value else None
                like = parameters[name] if key != STEP else None
                tensors[ref["name"]] = tensor = plan.make(ref, like, mesh, now)
                if key in SCALES and isinstance(now, torch.Tensor) and now.shape != tensor.shape:
                    plan.problems.append(
                        f"{label}: the 8-bit state of {name} was quantized in blocks that begin at its shards, and it "
                        f"is divided into other shards here; resume on {plan.manifest.world_size} rank(s) with the "
                        f"same strategy"
                    )
    for group in entry["groups"]:
        for ref in json_tree.tensor_refs(group["options"]):
            tensors[ref["name"]] = plan.make(ref, None, mesh)

    def take(ref: dict[str, Any]) -> torch.Tensor:
        return tensors[ref["name"]]

    states = {name: json_tree.decode(data, take) for name, data in entry["state"].items()}
    for i, (group, now) in enumerate(zip(entry["groups"], optimizer.param_groups, strict=True)):
        options = {k: v for k, v in json_tree.decode(group["options"], take).items() if k not in IMPLEMENTATION}
        own = {name: states[name] for name in members[i] if states.get(name)}
        shapes = {name: parameters[name].shape for name in own}
        wrong = type_difference(options, now) or _refused(optimizer, options, shapes, own)
        plan.problems += [f"{label}: {text}" for text in wrong[:5]]

    def finish() -> None:
        numbers: dict[str, int] = {}
        for name in (name for group in members for name in group):
            numbers.setdefault(name, len(numbers))
        state = {numbers[name]: json_tree.decode(data, take) for name, data in entry["state"].items()}
        groups = []
        for group, group_names, now in zip(entry["groups"], members, optimizer.param_groups, strict=True):
            kept = {key: now[key] for key in IMPLEMENTATION if key in now}
            absent = {key: now[key] for key in optimizer.defaults if key in now}  # if an older version has saved
            params = [numbers[name] for name in group_names]
            groups.append({**absent, **json_tree.decode(group["options"], take), **kept, "params": params})
        if is_bnb(optimizer):  # its own load_state_dict copies all state, out of paged memory too
            optimizer.load_state_dict({"state": {}, "param_groups": groups})
            optimizer.state.update({parameters[name]: state[i] for name, i in numbers.items() if i in state})
            return
        optimizer.load_state_dict({"state": state, "param_groups": groups})
        # torch casts state to its parameter's dtype; restore the dtype that the optimizer used.
        for name, i in numbers.items():
            for key, value in state.get(i, {}).items():
                now = optimizer.state[parameters[name]].get(key)
                if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor) and now.dtype != value.dtype:
                    optimizer.state[parameters[name]][key] = value.to(now.device)

    plan.finish.append(finish)


def _like(optimizer: torch.optim.Optimizer, options: dict[str, Any], shape: Sequence[int]) -> Any:
    """An optimizer of the same class and options with one parameter. Raises whatever the class does not accept."""
    accepted = inspect.signature(type(optimizer)).parameters
    plain = {k: v for k, v in options.items() if k in accepted and not isinstance(v, torch.Tensor)}
    return type(optimizer)([torch.nn.Parameter(torch.zeros(shape))], **plain)


def _refused(
    optimizer: torch.optim.Optimizer, options: dict[str, Any], shapes: dict[str, torch.Size], states: dict[str, Any]
) -> list[str]:
    """What an optimizer's class says against the options of a group, and how states differ from those it makes."""
    numbers = {f"{n}.{k}": v for n, state in states.items() for k, v in state.items() if type(v) in (int, float)}
    wrong = type_difference(numbers, dict.fromkeys(numbers, 0))
    wrong += [
        f"{name} is {value}: a count is not negative"
        for name, value in numbers.items()
        if type(value) is int and value < 0
    ]
    if wrong or is_bnb(optimizer):
        return wrong
    of_torch = type(optimizer).__module__.startswith("torch.optim.")
    try:
        _like(optimizer, options, (2, 3))
    except (ValueError, TypeError, RuntimeError) as error:
        return [f"{type(optimizer).__name__} refuses its options ({error})"] if of_torch else []
    expected = {dims: _expected_state(optimizer, options, dims) for dims in {len(shape) for shape in shapes.values()}}
    return [
        f"state of {name}: {text}"
        for name, state in states.items()
        for text in _unlike_state(expected[len(shapes[name])], shapes[name], state, whole=of_torch)
    ]


def _unlike_state(expected: dict[str, Any], shape: tuple[int, ...], saved: dict[str, Any], whole: bool) -> list[str]:
    """How the state of a parameter differs from the state that its class makes for one of as many dims. `whole`: shapes
    are compared too, not only keys and types."""
    sizes = dict(zip(SIZES, shape, strict=False))
    wrong = [f"it lacks {key}" for key in sorted(expected.keys() - saved.keys())]
    for key in expected.keys() & saved.keys():
        now, value = expected[key], saved[key]
        if isinstance(now, torch.Tensor) and isinstance(value, torch.Tensor):
            global_shape = tuple(sizes.get(n, n) for n in now.shape)
            if whole and tuple(value.shape) != global_shape:
                wrong.append(f"{key} has shape {tuple(value.shape)} in the checkpoint; expected {global_shape}")
        elif isinstance(now, torch.Tensor) and key != STEP:
            wrong.append(f"{key} is {value!r} in the checkpoint; expected a tensor")
        elif now is not None:
            wrong += type_difference(value, now, key)
    return wrong


def _expected_state(optimizer: torch.optim.Optimizer, options: dict[str, Any], dims: int) -> dict[str, Any]:
    """The state that an optimizer makes for a parameter in one step; empty where that cannot be tried."""
    try:
        with torch.random.fork_rng(devices=[]):
            tried = _like(optimizer, options, SIZES[:dims])
            (parameter,) = tried.param_groups[0]["params"]
            parameter.grad = torch.zeros_like(parameter)
            tried.step()
            return dict(tried.state[parameter])
    except Exception:  # it needs a closure, sparse gradients or a matrix
        return {}


def _groups_differ(label: str, saved: list[list[str]], members: list[list[str]]) -> str:
    ours, theirs = {n for g in members for n in g}, {n for g in saved for n in g}
    parts = [f"{label}: its parameter groups differ from those of the checkpoint"]
    if len(saved) != len(members):
        parts.append(f"{len(members)} group(s) here, {len(saved)} there")
    for where, names in (("only here", sorted(ours - theirs)), ("only in the checkpoint", sorted(theirs - ours))):
        if names:
            parts.append(f"{where}: {', '.join(names[:3])}" + (f" and {len(names) - 3} more" if len(names) > 3 else ""))
    if ours == theirs and len(saved) == len(members):
        moved = next(n for a, b in zip(members, saved, strict=True) for n in a if n not in b)
        parts.append(f"{moved} is in another group")
    return "; ".join(parts)
