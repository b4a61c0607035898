"""A model in a checkpoint: its tensors by name, where they came from, and what of them need not be written.

Tied tensors are written once and stay tied. Frozen parameters that the base files give again are left out. A model is
filled in place, piece by piece, so that resuming needs no more memory than training.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import nn

from fullshard import runtime
from fullshard.checkpoint import json_tree
from fullshard.checkpoint.objects import Description, Loading
from fullshard.errors import UserError
from fullshard.spmd.tensor import is_sharded
from fullshard.torch_private import local_of
from fullshard.weights.source_files import base_of, fingerprint_of


def left_out(model: nn.Module) -> set[str]:
    """Frozen parameters that the model's base files give again, as far as this rank can tell."""
    base = base_of(model)
    if base is None:
        return set()
    values = model.state_dict(keep_vars=True)
    return {
        key
        for key, value in values.items()
        if isinstance(value, nn.Parameter) and not value.requires_grad and base.provides(key, value)
    }


def describe_model(description: Description, name: str, model: nn.Module, omitted: set[str]) -> None:
    """Write down a model without the parameters in `omitted`."""
    entry: dict[str, Any] = {"kind": "model", "class": type(model).__qualname__, "tied": {}, "extra": {}}
    seen: dict[int, str] = {}
    for key, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor):
            entry["extra"][key] = json_tree.encode(value, description.put, f"{name}/{key}")
        elif key in omitted:
            continue
        elif id(value) in seen:
            entry["tied"][key] = seen[id(value)]
        else:
            seen[id(value)] = key
            description.put(f"{name}/{key}", value)
    base = base_of(model)
    entry["base"] = {"path": str(base.path), "fingerprint": base.fingerprint} if base is not None else None
    entry["left_out"] = sorted(omitted)
    if isinstance(adapters := getattr(model, "peft_config", None), dict):
        entry["adapters"] = sorted(map(str, adapters))
    if runtime.is_main():
        entry.update(_about(model))
    description.entries[name] = entry


def _about(model: nn.Module) -> dict[str, Any]:
    """What helps to make sense of the tensors (`states.ABOUT`); the first rank's word is taken for it."""
    about = {"config": _config(model), "generation_config": _json(model, "generation_config")}
    if isinstance(adapters := getattr(model, "peft_config", None), dict):
        about["adapter_configs"] = {str(name): _plain(config.to_dict()) for name, config in adapters.items()}
    if hasattr(model, "_fullshard_engine"):
        plan: Any = model.plan
        about["plan"] = json.loads(plan.to_json())
        about["mesh"] = {str(axis): size for axis, size in model.mesh.shape().items()}
    return {key: value for key, value in about.items() if value is not None}


def _config(model: nn.Module) -> dict[str, Any] | None:
    """What transformers would write into config.json."""
    config = _json(model, "config")
    if config is not None and not config.get("architectures"):
        config["architectures"] = [type(model).__name__]
    return config


def _json(model: nn.Module, attribute: str) -> dict[str, Any] | None:
    found = getattr(model, attribute, None)
    return json.loads(found.to_json_string()) if found is not None and hasattr(found, "to_json_string") else None


def _plain(config: dict[str, Any]) -> dict[str, Any]:
    """As PEFT writes it into adapter_config.json."""
    return json.loads(json.dumps(config, default=lambda value: sorted(value) if isinstance(value, set) else str(value)))


# --- loading --------------------------------------------------------------------------------------------------------


def prepare_model(loading: Loading, name: str, entry: dict[str, Any], model: nn.Module) -> None:
    """Have a model's values read into it."""
    _check_base(loading, name, entry, model)
    stored, base = _stored_keys(loading, name, entry), base_of(model)
    omitted, tied, extra = set(entry["left_out"]), entry["tied"], dict(entry["extra"])
    _give_memory(model, stored)
    values = model.state_dict(keep_vars=True)
    live = {id(t) for t in (*model.parameters(), *model.buffers())}
    first: dict[int, str] = {}
    detour: dict[str, Any] = {}  # values that the module makes or takes in its own way
    missing = []
    for key, value in values.items():
        if not isinstance(value, torch.Tensor):
            if key not in extra:
                missing.append(key)
            continue
        source = key if key in stored else tied.get(key)
        if id(value) in first and id(value) in live:
            if key in stored:
                loading.problems.append(f"{key} and {first[id(value)]} are tied here and two tensors in the checkpoint")
            continue
        first[id(value)] = key
        if source is None:
            if key not in omitted:
                missing.append(key)
            elif _is_meta(value):
                loading.problems.append(
                    f"{key} was left out of the checkpoint because its base provides it, and has no value here: load "
                    f"the base first ({entry['base']['path']})"
                )
            elif base is not None and not base.provides(key, value):
                loading.problems.append(
                    f"{key} was left out of the checkpoint because its base provides it, and has been changed here "
                    f"since it was loaded: load the base again ({base.path})"
                )
            continue
        if id(value) not in live:
            value = detour[key] = torch.empty_like(value)
        loading.fill(f"{name}/{source}", value)
    unexpected = sorted(key for key in (*stored, *extra) if key not in values)
    if missing:
        loading.problems.append(f"{name}: not in the checkpoint: {_some(missing)}")
    if unexpected:
        loading.problems.append(f"{name}: in the checkpoint and not in the model: {_some(unexpected)}")
    made = {noted["name"]: loading.make(noted, None, None) for noted in json_tree.tensors_in(extra)}

    def finish() -> None:
        others = {key: json_tree.decode(data, lambda noted: made[noted["name"]]) for key, data in extra.items()}
        if detour or others:
            model.load_state_dict({**detour, **others}, strict=False)

    loading.finish.append(finish)


def _stored_keys(loading: Loading, name: str, entry: dict[str, Any]) -> set[str]:
    """The model's own names of the tensors that the checkpoint holds for it."""
    names = {key for key in loading.manifest.tensors if "@rank-" not in key} | set(loading.manifest.per_rank)
    names -= {noted["name"] for noted in json_tree.tensors_in(entry["extra"])}
    return {key.removeprefix(f"{name}/") for key in names if key.startswith(f"{name}/")}


def _check_base(loading: Loading, name: str, entry: dict[str, Any], model: nn.Module) -> None:
    """Frozen values that were left out must be those of the base they were left out for."""
    saved = entry["base"]
    if not entry["left_out"]:
        return
    base = base_of(model)
    if base is not None:
        path, found = str(base.path), base.fingerprint
    else:
        path = saved["path"]
        try:
            found = fingerprint_of(path)
        except UserError as error:
            loading.problems.append(f"{name}: the base of the checkpoint cannot be checked: {error}")
            return
        runtime.warn_once(
            f"base of {name}",
            f"the checkpoint leaves out {len(entry['left_out'])} frozen parameters of {name}; the model was not loaded "
            f"with load_pretrained, so it is taken on trust that they are those of {path}",
        )
    if found != saved["fingerprint"]:
        loading.problems.append(
            f"{name}: the checkpoint was made on top of {saved['path']} (fingerprint {saved['fingerprint']}), and the "
            f"model comes from {path} (fingerprint {found}): the files differ. Load the base it was made on"
        )


def _give_memory(model: nn.Module, stored: set[str]) -> None:
    """Planned parameters without memory get theirs if the checkpoint has values for them."""
    engine = getattr(model, "_fullshard_engine", None)
    for unit in engine.units if engine is not None else ():
        for parameter in unit.parameters:
            if stored & set(parameter.plan.names):
                parameter.give_memory()


def _is_meta(value: torch.Tensor) -> bool:
    return (local_of(value) if is_sharded(value) else value).is_meta


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
