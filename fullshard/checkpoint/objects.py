"""The objects in a saved state as JSON entries and tensors, and back.

A `StateDescription` lists what one rank saves, without copying. A `RestorePlan` lists which tensors one rank reads,
what does not match, and what is left to do after the tensors are read. This module handles plain values and objects
with a `state_dict`; `model_state.py`, `optimizer_state.py` and `rng_state.py` handle the rest.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fullshard import spmd
from fullshard.checkpoint import json_tree
from fullshard.checkpoint.manifest import Manifest
from fullshard.checkpoint.shard_index import (
    TensorShard,
    TensorToLoad,
    empty_sharded,
    has_layout,
    layout_to_save,
    mismatch,
    shards_of,
    to_load,
)
from fullshard.config.errors import CheckpointError, UserError
from fullshard.distributed import runtime
from fullshard.distributed.ranks import describe_error
from fullshard.spmd.mesh import Mesh
from fullshard.spmd.spec import Layout
from fullshard.spmd.tensor import unmarked
from fullshard.weights.safetensors_files import DTYPES

LARGEST = 2**63
"""The largest number of an optimizer or schedule."""
ABOUT = ("config", "generation_config", "adapter_configs", "plan", "mesh")
"""Keys of a model's entry that only rank 0 writes."""


@dataclass
class StateDescription:
    """What one rank saves: JSON entries by name, and tensor shards."""

    entries: dict[str, dict[str, Any]] = field(default_factory=dict)
    """For each name, everything that is not a tensor."""
    pieces: list[TensorShard] = field(default_factory=list)

    def put(self, name: str, tensor: torch.Tensor) -> dict[str, Any]:
        """Add a tensor; returns the reference that takes its place in the JSON entry."""
        tensor = unmarked(tensor)
        self.pieces += shards_of(name, tensor)
        ref: dict[str, Any] = {"name": name}
        layout = layout_to_save(tensor)
        if layout is not None:
            ref["spec"] = layout.spec
        elif tensor.device.type != "cpu":
            ref["device"] = "accelerator"
        return ref


@dataclass
class RestorePlan:
    """What one rank reads, what does not match, and what to do once the tensors are read.

    First the new tensors are read, then everything that may still refuse its values is tried (`trials`). Only then does
    anything of the state change.
    """

    manifest: Manifest
    new: list[TensorToLoad] = field(default_factory=list)
    """Tensors that were made for this restore."""
    tensors: list[TensorToLoad] = field(default_factory=list)
    """Tensors of the state itself."""
    problems: list[str] = field(default_factory=list)
    values: dict[str, Callable[[], Any]] = field(default_factory=dict)
    """The plain values, by name."""
    trials: list[Callable[[], None]] = field(default_factory=list)
    """Raise if an object of the state refuses its values; run once the new tensors are read."""
    undo: list[Callable[[], None]] = field(default_factory=list)
    """Take back what the trials changed."""
    finish: list[Callable[[], None]] = field(default_factory=list)
    casts: set[str] = field(default_factory=set)

    def fill(self, name: str, tensor: torch.Tensor) -> None:
        """Read a stored tensor into one of the state; each rank reads its own shards."""
        self._read(name, tensor, self.tensors)

    def fill_new(self, name: str, tensor: torch.Tensor) -> None:
        """Read a stored tensor into one that was made for it."""
        self._read(name, tensor, self.new)

    def _read(self, name: str, tensor: torch.Tensor, among: list[TensorToLoad]) -> None:
        tensor = unmarked(tensor)
        stored_name = self.manifest.rank_name(name, runtime.rank())
        if problem := mismatch(stored_name, tensor, self.manifest):
            self.problems.append(problem)
            return
        stored = DTYPES[self.manifest.tensors[stored_name].dtype]
        if stored != tensor.dtype:
            self.casts.add(f"{str(stored)[6:]} to {str(tensor.dtype)[6:]}")
        among.append(to_load(stored_name, tensor))

    def make(self, ref: dict[str, Any], like: torch.Tensor | None, mesh: Mesh | None, now: Any = None) -> torch.Tensor:
        """A tensor to read a stored one into: `now` if it has the right shape, dtype and kind, else a new one.

        A tensor of the shape of `like` gets its layout. Another one that was sharded gets the saved layout if the mesh
        has those axes, else it is replicated. A plain tensor goes to the kind of device it was saved from.
        """
        name = ref["name"]
        stored = self.manifest.tensors.get(self.manifest.rank_name(name, runtime.rank()))
        if stored is None:
            self.problems.append(f"{name} is not in the checkpoint")
            return torch.empty(0)
        shape, dtype = stored.shape, DTYPES[stored.dtype]
        layout = self._layout(ref, shape, like, mesh)
        if isinstance(now, torch.Tensor) and tuple(now.shape) == shape and now.dtype == dtype:
            if has_layout(now, layout):
                self.fill(name, now)
                return now
        if layout is not None:
            tensor = empty_sharded(layout, shape, dtype, like)
        elif "spec" in ref or "device" in ref:
            beside = like.device if like is not None and "spec" in ref else runtime.device()
            tensor = torch.empty(shape, dtype=dtype, device=beside)
        else:
            tensor = torch.empty(shape, dtype=dtype)
        self.fill_new(name, tensor)
        return tensor

    def _layout(
        self, ref: dict[str, Any], shape: tuple[int, ...], like: torch.Tensor | None, mesh: Mesh | None
    ) -> Layout | None:
        """The layout of a tensor to read into; None for a plain one."""
        of_like = spmd.sharding_of(like) if like is not None and spmd.is_sharded(like) else None
        if of_like is not None and like is not None and tuple(like.shape) == shape:
            return of_like
        mesh = of_like.mesh if of_like is not None else mesh
        return _saved_layout(mesh, ref["spec"], len(shape)) if mesh is not None and "spec" in ref else None


def _saved_layout(mesh: Mesh, spec: list[Any], rank: int) -> Layout:
    try:
        return Layout.of(mesh, [tuple(e) if isinstance(e, list) else e for e in spec])
    except UserError:  # it was saved on a mesh with other axes
        return Layout(mesh, ((),) * rank)


# --- states ---------------------------------------------------------------------------------------------------------


def kind_of(value: Any) -> str:
    """How a value is saved: as `model`, `optimizer`, `state` (has `state_dict`) or `value`."""
    if isinstance(value, nn.Module):
        return "model"
    if isinstance(value, type):
        raise CheckpointError(f"a class ({value.__name__}) was given; expected an object")
    if isinstance(value, torch.optim.Optimizer):
        return "optimizer"
    return "state" if hasattr(value, "state_dict") and hasattr(value, "load_state_dict") else "value"


def check_state(state: Any) -> None:
    """Raise if `state` is not a dict with usable names."""
    if not isinstance(state, Mapping) or not all(isinstance(name, str) and name for name in state):
        raise CheckpointError(
            f"expected a dict of name → object or value, such as {{'model': model, 'optimizer': optimizer}}; got "
            f"{type(state).__name__}"
        )
    for name in state:
        if name == "rng" or "/" in name or "@" in name:
            raise CheckpointError(
                f"a state cannot be named {name!r}: 'rng', '/' and '@' are reserved; choose another name"
            )


def models_in(state: Mapping[str, Any]) -> dict[str, nn.Module]:
    """The models of a training state by name."""
    return {name: value for name, value in state.items() if kind_of(value) == "model"}


def parameter_names(state: Mapping[str, Any]) -> dict[int, str]:
    """The name of every parameter of the models, prefixed with the model's name if there are several models."""
    models = models_in(state)
    return {
        id(p): f"{model_name}.{name}" if len(models) > 1 else name
        for model_name, model in models.items()
        for name, p in model.named_parameters()
    }


def describe_value(description: StateDescription, name: str, value: Any) -> None:
    """Describe a plain value, or the `state_dict` of an object."""
    kind = kind_of(value)
    data = value.state_dict() if kind == "state" else value
    entry = {"kind": kind, "value": json_tree.encode(data, description.put, name)}
    if kind == "state":
        entry["class"] = type(value).__qualname__
    description.entries[name] = entry


def prepare_value(plan: RestorePlan, name: str, entry: dict[str, Any], state: Any, mesh: Mesh | None) -> None:
    """Plan to restore a plain value in `state`, or the `state_dict` of an object."""
    data = entry_value(entry, name, plan.manifest)
    tensors = {ref["name"]: plan.make(ref, None, mesh) for ref in json_tree.tensor_refs(data)}

    def value() -> Any:
        return json_tree.decode(data, lambda ref: tensors[ref["name"]])

    if entry["kind"] == "value":
        plan.values[name] = value
        plan.finish.append(lambda: state.__setitem__(name, value()))
        return
    target = state[name]
    before = _copy(target.state_dict())
    if type(target).__module__.startswith("torch.") and before is not None:
        plan.problems += [f"{name}: {wrong}" for wrong in type_difference(value(), before)]

    def load() -> None:
        if (saved := value()) != {}:  # a disabled GradScaler has an empty state, which its load_state_dict rejects
            target.load_state_dict(saved)

    def try_to_load() -> None:
        try:
            load()
        except Exception as error:
            raise CheckpointError(f"{name} does not take its saved state ({describe_error(error)})") from error

    plan.trials.append(try_to_load)
    plan.undo.append(lambda: target.load_state_dict(before) if before else None)
    plan.finish.append(load)


def _copy(state: Any) -> Any:
    """A copy of an object's state to go back to; None where it cannot be copied."""
    try:
        return copy.deepcopy(state)
    except (RuntimeError, TypeError, NotImplementedError):
        return None


def type_difference(saved: Any, now: Any, where: str = "") -> list[str]:
    """Where a saved value is of another type than the present one, or out of range."""
    if isinstance(now, Mapping) and isinstance(saved, Mapping):
        inner = {f"{where}.{key}".lstrip("."): (saved[key], now[key]) for key in now if key in saved}
        return [wrong for name, pair in inner.items() for wrong in type_difference(*pair, name)]
    if isinstance(now, list | tuple) and isinstance(saved, list | tuple) and len(saved) == len(now):
        pairs = enumerate(zip(saved, now, strict=True))
        return [wrong for i, pair in pairs for wrong in type_difference(*pair, f"{where}[{i}]")]
    if isinstance(saved, torch.Tensor) or isinstance(now, torch.Tensor):  # not read yet
        return [] if _is_number(saved) and _is_number(now) else _types_differ(saved, now, where)
    if _is_number(saved) and _is_number(now):
        if abs(saved) <= LARGEST or (not math.isfinite(saved) and not math.isfinite(now)):
            return []
        return [f"{where} is out of range in the checkpoint"]
    if type(saved) is type(now) and not isinstance(now, list | tuple):
        return []
    return _types_differ(saved, now, where)


def _types_differ(saved: Any, now: Any, where: str) -> list[str]:
    if isinstance(saved, torch.Tensor) and isinstance(now, torch.Tensor):
        return []
    return [f"{where} is {_shown(saved)} in the checkpoint and {_shown(now)} here"]


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, int | float) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    text = repr(value) if isinstance(value, float | str | bool | None) else f"a {type(value).__name__}"
    return text if len(text) < 40 else text[:37] + "..."


def entry_value(entry: dict[str, Any], name: str, manifest: Manifest) -> Any:
    """This rank's value of a state entry."""
    if "ranks" not in entry:
        return entry["value"]
    if manifest.world_size != runtime.world_size():
        raise CheckpointError(
            f"the state {name!r} was saved with a different value on each of {manifest.world_size} ranks, so it cannot "
            f"be restored on {runtime.world_size()}; resume on {manifest.world_size} ranks, leave {name!r} out of the "
            f"state, or save a value that is the same on every rank (a position in the global data, for example)"
        )
    return entry["ranks"][runtime.rank()]


def merge_entries(entries: list[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Merge the entries of all ranks: one entry where they agree, else one value per rank."""
    out = {}
    for name, first in entries[0].items():
        per_rank = [_without_about(theirs.get(name)) for theirs in entries]
        if all(theirs == per_rank[0] for theirs in per_rank):
            out[name] = first
            continue
        others = [rank for rank, theirs in enumerate(per_rank) if theirs is None or theirs["kind"] != first["kind"]]
        if others or first["kind"] in ("model", "optimizer"):
            odd = others or [rank for rank, theirs in enumerate(per_rank) if theirs != per_rank[0]]
            raise CheckpointError(
                f"ranks disagree about {name!r}: rank(s) {', '.join(map(str, odd))} differ from rank 0 in "
                f"{_difference(per_rank[0], per_rank[odd[0]])}"
            )
        rest = {key: value for key, value in first.items() if key != "value"}
        out[name] = {**rest, "ranks": [theirs["value"] for theirs in per_rank if theirs is not None]}
    return out


def _without_about(entry: dict[str, Any] | None) -> dict[str, Any] | None:
    return entry and {key: value for key, value in entry.items() if key not in ABOUT}


def _difference(one: Any, other: Any, where: str = "") -> str:
    """Describe the first difference between two values."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        key = next(k for k in one if one[k] != other[k])
        return _difference(one[key], other[key], f"{where}/{key}")
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        index = next(index for index, values in enumerate(zip(one, other, strict=True)) if values[0] != values[1])
        return _difference(one[index], other[index], f"{where}/{index}")
    return f"{where or 'its kind'}: {json.dumps(one)[:80]} and {json.dumps(other)[:80]}"
