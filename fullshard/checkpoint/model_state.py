"""A model in a checkpoint: its tensors by name, its tied tensors, and its base model.

Tied tensors are written once and stay tied. Frozen parameters that the base model's files provide are left out. Values
are read directly into the model's shards, so that resuming needs no more memory than training.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import nn

from fullshard.checkpoint import json_tree
from fullshard.checkpoint.objects import RestorePlan, StateDescription
from fullshard.config.errors import UserError
from fullshard.device.torch_private import local_of
from fullshard.distributed import runtime
from fullshard.lora.language_model import left_out_tensors
from fullshard.spmd.tensor import is_sharded
from fullshard.weights.source_files import (
    base_of,
    config_differences,
    difference,
    identity_of,
    quick_identity,
    that_compute,
)
from fullshard.weights.wrapped import wrapped


def provided_by_base(model: nn.Module) -> set[str]:
    """The frozen parameters whose values on this rank are still those of the base model's files."""
    base = base_of(model)
    if base is None:
        return set()
    values = model.state_dict(keep_vars=True)
    return {
        key
        for key, value in values.items()
        if isinstance(value, nn.Parameter) and not value.requires_grad and base.provides(key, value)
    }


def describe_model(description: StateDescription, name: str, model: nn.Module, omitted: set[str]) -> None:
    """Describe a model without the parameters in `omitted`."""
    entry: dict[str, Any] = {"kind": "model", "class": type(model).__qualname__, "tied": {}, "extra": {}}
    first_names: dict[int, str] = {}
    for key, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor):
            entry["extra"][key] = json_tree.encode(value, description.put, f"{name}/{key}")
        elif key in omitted:
            continue
        elif id(value) in first_names:
            entry["tied"][key] = first_names[id(value)]
        else:
            first_names[id(value)] = key
            description.put(f"{name}/{key}", value)
    base = base_of(model)
    entry["base"] = {"path": str(base.path), **base.identity} if base is not None else None
    entry["left_out"] = sorted({*omitted, *(left_out_tensors(model) if base is not None else ())})
    if isinstance(adapters := getattr(model, "peft_config", None), dict):
        entry["adapters"] = sorted(map(str, adapters))
    if runtime.is_main():
        entry.update(_about(model))
    description.entries[name] = entry


def _about(model: nn.Module) -> dict[str, Any]:
    """Configuration, plan and mesh of the model (the keys in `objects.ABOUT`); only rank 0 writes them."""
    about = {"config": _config(model), "generation_config": _json(model, "generation_config")}
    if isinstance(adapters := getattr(model, "peft_config", None), dict):
        about["adapter_configs"] = {str(name): _plain(config.to_dict()) for name, config in adapters.items()}
    if wrapped(model) is not None:
        plan: Any = model.plan
        about["plan"] = json.loads(plan.to_json())
        about["mesh"] = {str(axis): size for axis, size in model.mesh.shape().items()}
    return {key: value for key, value in about.items() if value is not None}


def _config(model: nn.Module) -> dict[str, Any] | None:
    """The content of config.json, as transformers writes it."""
    config = _json(model, "config")
    if config is not None and not config.get("architectures"):
        config["architectures"] = [type(model).__name__]
    return config


def _json(model: nn.Module, attribute: str) -> dict[str, Any] | None:
    config = getattr(model, attribute, None)
    return json.loads(config.to_json_string()) if config is not None and hasattr(config, "to_json_string") else None


def _plain(config: dict[str, Any]) -> dict[str, Any]:
    """A PEFT config as plain JSON data, as in adapter_config.json."""
    return json.loads(json.dumps(config, default=lambda value: sorted(value) if isinstance(value, set) else str(value)))


# --- loading --------------------------------------------------------------------------------------------------------


def prepare_model(plan: RestorePlan, name: str, entry: dict[str, Any], model: nn.Module) -> None:
    """Plan to read the stored values into a model."""
    _check_base(plan, name, entry, model)
    _compare_config(name, entry, model)
    stored, base = _stored_keys(plan, name, entry), base_of(model)
    omitted, tied, extra = set(entry["left_out"]), entry["tied"], dict(entry["extra"])
    _give_memory(model, stored)
    values = model.state_dict(keep_vars=True)
    live = {id(t) for t in (*model.parameters(), *model.buffers())}
    first: dict[int, str] = {}
    detour: dict[str, Any] = {}  # values that the module builds in `state_dict` and takes in `load_state_dict`
    missing = []
    for key, value in values.items():
        if not isinstance(value, torch.Tensor):
            if key not in extra:
                missing.append(key)
            continue
        source = key if key in stored else tied.get(key)
        if id(value) in first and id(value) in live:
            if key in stored:
                plan.problems.append(f"{key} and {first[id(value)]} are tied here, but not in the checkpoint")
            continue
        first[id(value)] = key
        if source is None:
            if key not in omitted:
                missing.append(key)
            elif _is_meta(value):
                plan.problems.append(
                    f"{key} was left out of the checkpoint because its base provides it, and has no value here: load "
                    f"the base first ({entry['base']['path']})"
                )
            elif base is not None and not base.provides(key, value):
                plan.problems.append(
                    f"{key} was left out of the checkpoint because its base provides it, and has been changed here "
                    f"since it was loaded: load the base again ({base.path})"
                )
            continue
        if id(value) in live:
            plan.fill(f"{name}/{source}", value)
        else:
            detour[key] = torch.empty_like(value)
            plan.fill_new(f"{name}/{source}", detour[key])
    unexpected = sorted(key for key in (*stored, *extra) if key not in values)
    if missing:
        plan.problems.append(f"{name}: not in the checkpoint: {_some(missing)}")
    if unexpected:
        plan.problems.append(f"{name}: in the checkpoint and not in the model: {_some(unexpected)}")
    tensors = {ref["name"]: plan.make(ref, None, None) for ref in json_tree.tensor_refs(extra)}

    def finish() -> None:
        others = {key: json_tree.decode(data, lambda ref: tensors[ref["name"]]) for key, data in extra.items()}
        if detour or others:
            model.load_state_dict({**detour, **others}, strict=False)

    plan.finish.append(finish)


def _stored_keys(plan: RestorePlan, name: str, entry: dict[str, Any]) -> set[str]:
    """The `state_dict` names of the tensors that the checkpoint holds for this model."""
    names = {key for key in plan.manifest.tensors if "@rank-" not in key} | set(plan.manifest.per_rank)
    names -= {ref["name"] for ref in json_tree.tensor_refs(entry["extra"])}
    return {key.removeprefix(f"{name}/") for key in names if key.startswith(f"{name}/")}


def _check_base(plan: RestorePlan, name: str, entry: dict[str, Any], model: nn.Module) -> None:
    """Check that frozen values that were left out come from the same base model files."""
    saved = entry["base"]
    if not entry["left_out"]:
        return
    base = base_of(model)
    if base is not None:
        path, identity = str(base.path), base.identity
    else:
        path = saved["path"]
        try:  # one rank reads all of it
            identity = identity_of(path) if runtime.is_main() else quick_identity(path)
        except UserError as error:
            plan.problems.append(f"{name}: the base of the checkpoint cannot be checked: {error}")
            return
        runtime.warn_once(
            f"base of {name}",
            f"the checkpoint leaves out {len(entry['left_out'])} frozen parameters of {name}; the model was not loaded "
            f"with load_pretrained, so fullshard assumes that they have the values of {path}",
        )
    if wrong := difference(saved, identity):
        plan.problems.append(
            f"{name}: the checkpoint was trained from the base {saved['path']}, but the model comes from {path}: the "
            f"files differ ({wrong}). Load the base of the checkpoint"
        )


def _compare_config(name: str, entry: dict[str, Any], model: nn.Module) -> None:
    """Warn of a configuration that computes something else with the stored values; a script may want that."""
    saved, own = entry.get("config") or {}, _json(model, "config") or {}
    if changed := config_differences(that_compute(saved), that_compute(own)):
        runtime.warn_once(
            f"configuration of {name}",
            f"{name} is configured differently than in the checkpoint: {'; '.join(changed[:5])}. If that is a mistake, "
            "use the config.json of the checkpoint's run",
        )


def _give_memory(model: nn.Module, stored: set[str]) -> None:
    """Allocate planned parameters that have no memory yet, if the checkpoint has values for them."""
    whole = wrapped(model)
    for parameter in whole.parameters if whole is not None else ():
        if stored & set(parameter.plan.names):
            parameter.give_memory()


def _is_meta(value: torch.Tensor) -> bool:
    return (local_of(value) if is_sharded(value) else value).is_meta


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
