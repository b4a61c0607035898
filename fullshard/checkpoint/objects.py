"""The things a user saves, each as JSON and tensors, and back: any object with a state, and plain values.

A `Description` takes a state down without copying anything; a `Loading` knows where the values of a checkpoint belong,
what does not fit, and what is left to do once the tensors have been read. Models and optimizers have files of their
own; storage is not this file's business.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard import runtime
from fullshard.checkpoint import json_tree
from fullshard.checkpoint.dcp_planner import Target, mismatch
from fullshard.checkpoint.manifest import Manifest
from fullshard.checkpoint.shard_index import Held, held
from fullshard.errors import CheckpointError, UserError
from fullshard.spmd.marked import unmarked
from fullshard.spmd.mesh import Mesh
from fullshard.spmd.redistribute import layout_of, torch_layout
from fullshard.spmd.spec import Layout
from fullshard.spmd.tensor import ShardedTensor, is_sharded
from fullshard.torch_private import DTensorSpec, TensorMeta, local_of, spec_of
from fullshard.weights.safetensors_index import DTYPES

ABOUT = ("config", "generation_config", "adapter_configs", "plan", "mesh")
"""What only the first rank says of a model."""


@dataclass
class Description:
    """What one rank has to save."""

    entries: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By name, everything that is not a tensor."""
    pieces: list[Held] = field(default_factory=list)

    def put(self, name: str, tensor: torch.Tensor) -> dict[str, Any]:
        """Take a tensor in; what to write down for it."""
        tensor = unmarked(tensor)
        piece = held(name, tensor)
        if piece is not None:
            self.pieces.append(piece)
        noted: dict[str, Any] = {"name": name}
        if is_sharded(tensor):
            noted["spec"] = layout_of(spec_of(tensor)).spec
        elif tensor.device.type != "cpu":
            noted["device"] = "accelerator"
        return noted


@dataclass
class Loading:
    """What one rank has to read, and to do afterwards."""

    manifest: Manifest
    targets: list[Target] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    finish: list[Callable[[], None]] = field(default_factory=list)
    casts: set[str] = field(default_factory=set)

    def fill(self, name: str, tensor: torch.Tensor) -> None:
        """Read a stored tensor into `tensor`, each rank its piece."""
        tensor = unmarked(tensor)
        piece = held(name, tensor)
        if piece is None:
            return
        target = Target(self.manifest.rank_name(name, runtime.rank()), piece.local, piece.offsets)
        if problem := mismatch(target, piece.shape, self.manifest):
            self.problems.append(problem)
            return
        stored = DTYPES[self.manifest.tensors[target.name].dtype]
        if stored != piece.local.dtype:
            self.casts.add(f"{str(stored)[6:]} to {str(piece.local.dtype)[6:]}")
        self.targets.append(target)

    def make(
        self, noted: dict[str, Any], like: torch.Tensor | None, mesh: Mesh | None, now: Any = None
    ) -> torch.Tensor:
        """A tensor for a stored one, to be filled: `now`, if that is such a tensor already, else a new one.

        A sharded one is laid out as `like` where their shapes agree, else as written down if this mesh has such axes,
        else copied to all ranks. A plain one goes to the kind of device it was on.
        """
        name = noted["name"]
        stored = self.manifest.tensors.get(self.manifest.rank_name(name, runtime.rank()))
        if stored is None:
            self.problems.append(f"{name} is not in the checkpoint")
            return torch.empty(0)
        shape, dtype = stored.shape, DTYPES[stored.dtype]
        if isinstance(now, torch.Tensor) and tuple(now.shape) == shape and now.dtype == dtype:
            if is_sharded(now) == ("spec" in noted):
                self.fill(name, now)
                return now
        device = runtime.device() if noted.get("device") else torch.device("cpu")
        if "spec" not in noted:
            made = torch.empty(shape, dtype=dtype, device=device)
        elif like is not None and is_sharded(like):
            layout = layout_of(spec_of(like))
            if tuple(like.shape) != shape:
                layout = _layout(layout.mesh, noted["spec"], len(shape))
            made = _sharded(layout, shape, dtype, local_of(like).device, type(like.detach()))
        elif mesh is not None:
            made = _sharded(_layout(mesh, noted["spec"], len(shape)), shape, dtype, runtime.device(), ShardedTensor)
        else:
            made = torch.empty(shape, dtype=dtype, device=like.device if like is not None else runtime.device())
        self.fill(name, made)
        return made


def _layout(mesh: Mesh, spec: list[Any], rank: int) -> Layout:
    try:
        return Layout.of(mesh, [tuple(e) if isinstance(e, list) else e for e in spec])
    except UserError:  # another mesh than the one it was saved on
        return Layout(mesh, ((),) * rank)


def _sharded(layout: Layout, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, kind: Any) -> Any:
    """A sharded tensor without values yet."""
    device_mesh, placements = torch_layout(layout, shape)
    if layout.mesh.coordinate(runtime.rank()) is None:
        local = torch.empty(0, dtype=dtype, device=device)
    else:
        cuts = layout.slices(shape, runtime.rank())
        local = torch.empty([cut.stop - cut.start for cut in cuts], dtype=dtype, device=device)
    stride = torch.empty(shape, device="meta").stride()
    meta = TensorMeta(torch.Size(shape), stride, dtype)
    kind = kind if kind in (DTensor, ShardedTensor) else ShardedTensor
    return kind(local, DTensorSpec(device_mesh, placements, tensor_meta=meta), requires_grad=False)


# --- all states -----------------------------------------------------------------------------------------------------


def kind_of(value: Any) -> str:
    """How a value is saved."""
    if isinstance(value, nn.Module):
        return "model"
    if isinstance(value, type):
        raise CheckpointError(f"a class ({value.__name__}) was given where an object was expected")
    if isinstance(value, torch.optim.Optimizer):
        return "optimizer"
    return "state" if hasattr(value, "state_dict") and hasattr(value, "load_state_dict") else "value"


def check_state(state: Any) -> None:
    """Refuse what cannot be a state before anything is done with it."""
    if not isinstance(state, Mapping) or not all(isinstance(name, str) and name for name in state):
        raise CheckpointError(
            f"expected a dict of name → object or value, such as {{'model': model, 'optimizer': optimizer}}; got "
            f"{type(state).__name__}"
        )
    for name in state:
        if name == "rng" or "/" in name or "@" in name:
            raise CheckpointError(
                f"a state cannot be called {name!r}: 'rng', '/' and '@' are taken; choose another name"
            )


def models_in(state: Mapping[str, Any]) -> dict[str, nn.Module]:
    return {name: value for name, value in state.items() if kind_of(value) == "model"}


def parameter_names(state: Mapping[str, Any]) -> dict[int, str]:
    """The name of every parameter of the models; led by the model's name where there are several models."""
    models = models_in(state)
    return {
        id(p): f"{model_name}.{name}" if len(models) > 1 else name
        for model_name, model in models.items()
        for name, p in model.named_parameters()
    }


def describe_value(description: Description, name: str, value: Any) -> None:
    """Write down a plain value, or what an object says of itself."""
    kind = kind_of(value)
    data = value.state_dict() if kind == "state" else value
    entry = {"kind": kind, "value": json_tree.encode(data, description.put, name)}
    if kind == "state":
        entry["class"] = type(value).__qualname__
    description.entries[name] = entry


def prepare_value(loading: Loading, name: str, entry: dict[str, Any], state: Any, mesh: Mesh | None) -> None:
    """Have a plain value put back into `state`, or an object given its state."""
    data = entry_value(entry, name, loading.manifest)
    made = {noted["name"]: loading.make(noted, None, mesh) for noted in json_tree.tensors_in(data)}

    def finish() -> None:
        value = json_tree.decode(data, lambda noted: made[noted["name"]])
        if entry["kind"] == "value":
            state[name] = value
        elif value != {}:  # a GradScaler that is off has no state, and refuses to be given none
            state[name].load_state_dict(value)

    loading.finish.append(finish)


def entry_value(entry: dict[str, Any], name: str, manifest: Manifest) -> Any:
    """This rank's value of a state."""
    if "ranks" not in entry:
        return entry["value"]
    if manifest.world_size != runtime.world_size():
        raise CheckpointError(
            f"the state {name!r} differed from rank to rank when it was saved on {manifest.world_size} ranks, so it "
            f"cannot be given to {runtime.world_size()}; resume on {manifest.world_size} ranks, leave {name!r} out of "
            f"the state, or save one that is the same on every rank (a position in the global data, for example)"
        )
    return entry["ranks"][runtime.rank()]


def merged(entries: list[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """What the ranks say as one: written once where they say the same, else once per rank."""
    out = {}
    for name, first in entries[0].items():
        all_of_it = [_without_about(said.get(name)) for said in entries]
        if all(said == all_of_it[0] for said in all_of_it):
            out[name] = first
            continue
        others = [rank for rank, said in enumerate(all_of_it) if said is None or said["kind"] != first["kind"]]
        if others or first["kind"] in ("model", "optimizer"):
            odd = others or [rank for rank, said in enumerate(all_of_it) if said != all_of_it[0]]
            raise CheckpointError(
                f"ranks disagree about {name!r}: rank(s) {', '.join(map(str, odd))} differ from rank 0 in "
                f"{_difference(all_of_it[0], all_of_it[odd[0]])}"
            )
        rest = {key: value for key, value in first.items() if key != "value"}
        out[name] = {**rest, "ranks": [said["value"] for said in all_of_it if said is not None]}
    return out


def _without_about(entry: dict[str, Any] | None) -> dict[str, Any] | None:
    return entry and {key: value for key, value in entry.items() if key not in ABOUT}


def _difference(one: Any, other: Any, where: str = "") -> str:
    """The first place where two values differ."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        key = next(k for k in one if one[k] != other[k])
        return _difference(one[key], other[key], f"{where}/{key}")
    return f"{where or 'its kind'}: {json.dumps(one)[:80]} and {json.dumps(other)[:80]}"
