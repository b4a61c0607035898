"""LoRA target modules: which layers of a model get adapters.

`all-linear` on a mixture of experts means all linear layers and all experts, and never a router. transformers stores
the experts of a layer as stacked parameters, which PEFT adapts by name (`target_parameters`), and some routers as
linear layers. PEFT's own `all-linear` knows neither; it also takes linear layers with the names that experts had in
transformers 4 for those experts, so these layers are named by their weights.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import nn
from transformers.pytorch_utils import Conv1D

from fullshard.config.errors import ConfigError
from fullshard.lora.language_model import left_out_tensors
from fullshard.quant.packed_experts import PackedExperts
from fullshard.quant.quantizable import fused_experts

ALL_LINEAR = "all-linear"
DEFAULT_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "down_proj", "up_proj", "gate_proj")


def target_modules(value: str | Sequence[str] | None = None) -> str | list[str]:
    """Convert `lora_target_modules` to PEFT's form: "all-linear", or a list from a list or comma-separated names."""
    if value is None:
        return list(DEFAULT_TARGETS)
    if isinstance(value, str) and value.strip().lower() == ALL_LINEAR:
        return ALL_LINEAR
    names = value.split(",") if isinstance(value, str) else list(value)
    names = [name.strip() for name in names]
    if not names or not all(names):
        raise ConfigError(f"lora_target_modules={value!r}: expected {ALL_LINEAR!r} or names such as 'q_proj,v_proj'")
    return names


def find_targets(model: nn.Module, value: str | Sequence[str] | None = None) -> list[str]:
    """The names of the layers that get adapters. A target that matches no module is an error."""
    targets = target_modules(value)
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if targets == ALL_LINEAR:
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        return [name for name in linear if head is None or model.get_submodule(name) is not head]
    modules = [name for name, _ in model.named_modules() if name]
    absent = [w for w in targets if not any(_ends_with(name, w) for name in modules)]
    if absent:
        last_names = sorted({name.rpartition(".")[2] for name in linear})
        raise ConfigError(
            f"lora_target_modules: the model has no module named {', '.join(absent)}; its linear layers are "
            f"{', '.join(last_names) or 'none'}. Use {ALL_LINEAR!r} for all linear layers except the head"
        )
    return [name for name in modules if any(_ends_with(name, w) for w in targets)]


def _ends_with(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


EXPERTS = {"experts", "shared_experts"}
ROUTERS = {"gate", "router"}
_BEHIND_THE_LAYER = re.compile(r"(?:.*\.)?\d+\.(.+)")


class AdapterTargets(NamedTuple):
    """What gets adapters, as PEFT's `LoraConfig` names it."""

    modules: list[str]
    parameters: list[str]
    has_experts: bool
    """Whether experts are among them. PEFT cannot adapt weights that are read past the module that holds them."""


def mixture_targets(model: nn.Module, experts: bool = True) -> AdapterTargets | None:
    """All linear layers of a mixture, and its experts unless they are left out, without head and routers; None for a
    model without experts."""
    weights = list(_expert_weights(model))
    blocks = {name.rpartition(".")[0] for name, _ in model.named_modules() if name.rpartition(".")[2] == "experts"}
    blocks |= {name.rpartition(".")[0].rpartition(".")[0] for name in weights}
    if not blocks:
        return None
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    linear = [
        name for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not head
        and not _in_router(name, blocks) and not _refused_by_peft(model, name)
        and (experts or "experts" not in name.split("."))
    ]  # fmt: skip
    weights = weights if experts else []
    moved = moved_by_peft(model, linear)
    modules = [name for name in linear if name not in moved]
    parameters = [*weights, *(f"{name}.weight" for name in linear if name in moved)]
    others = [name for name, _ in model.named_modules() if name not in modules]
    return AdapterTargets(
        _short(modules, others),
        _short(parameters, [name for name in _parameter_names(model) if name not in parameters]),
        bool(weights) or any("experts" in name.split(".") for name in linear),
    )


def _expert_weights(model: nn.Module) -> Iterator[str]:
    """The stacked weights of experts, by name."""
    for name, module in model.named_modules():
        if isinstance(module, PackedExperts):
            expert_weights = set(module.fused)
        elif EXPERTS & {*name.split(".")} and not isinstance(module, nn.Linear):
            expert_weights = {own for own, p in module.named_parameters(recurse=False) if p.ndim == 3}
        else:
            expert_weights = {own for own, _ in fused_experts(module)}
        yield from (f"{name}.{own}" for own in sorted(expert_weights))


def _in_router(name: str, blocks: Iterable[str]) -> bool:
    """Whether a layer belongs to the router of one of these blocks, which contain experts."""
    parts = name.split(".")
    return any(part in ROUTERS and ".".join(parts[:i]) in blocks for i, part in enumerate(parts))


def _refused_by_peft(model: nn.Module, name: str) -> bool:
    """Whether PEFT has no adapters for this layer, because the layer's weight is used without calling it (Mamba)."""
    from peft import LoraConfig
    from peft.tuners import tuners_utils

    check = getattr(tuners_utils, "_check_lora_target_modules_mamba", lambda *_: None)
    try:
        check(LoraConfig(), model, name.rpartition(".")[2])
    except ValueError:
        return True
    return False


def _parameter_names(model: nn.Module) -> Iterator[str]:
    yield from (name for name, _ in model.named_parameters())
    yield from left_out_tensors(model)


def _short(names: list[str], others: list[str]) -> list[str]:
    """The names without the number of their layer, where PEFT would not match any of the others by that."""
    ends = {f".{name[i:]}" for name in others for i in (0, *(m.end() for m in re.finditer(r"\.", name)))}
    short = {name: found[1] if (found := _BEHIND_THE_LAYER.fullmatch(name)) else name for name in names}
    return sorted({name if f".{end}" in ends else end for name, end in short.items()})


def moved_by_peft(model: nn.Module, names: Iterable[str]) -> set[str]:
    """The layers that PEFT would take for experts of transformers 4 and adapt those instead."""
    from peft import LoraConfig

    names = list(names)
    by_end = {name.rpartition(".")[2] for name in names}
    kept = {end for end in by_end if convert_config(LoraConfig(target_modules=[end]), model).target_modules == {end}}
    return {name for name in names if name.rpartition(".")[2] not in kept}


def convert_config(peft_config: Any, model: Any) -> Any:
    """A configuration as PEFT changes it for the model classes of transformers 5; without targets if it refuses."""
    try:
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    except ImportError:  # older than the conversion
        return peft_config
    resolved = copy.deepcopy(peft_config)
    try:
        convert_peft_config_for_transformers(resolved, model=model, conversions=None)
    except ValueError:
        resolved.target_modules = set()
    return resolved


def adapts_parameters(peft_config: Any, model: nn.Module) -> bool:
    """Whether PEFT puts adapters on parameters rather than on linear layers, which rules out dropout and DoRA."""
    return bool(getattr(convert_config(peft_config, model), "target_parameters", None))
