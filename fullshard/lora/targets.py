"""LoRA target modules: which layers of a model get adapters."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from fullshard.config.errors import ConfigError

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
        known = sorted({name.rpartition(".")[2] for name in linear})
        raise ConfigError(
            f"lora_target_modules: the model has no module named {', '.join(absent)}; its linear layers are "
            f"{', '.join(known) or 'none'}. Use {ALL_LINEAR!r} for all linear layers except the head"
        )
    return [name for name in modules if any(_ends_with(name, w) for w in targets)]


def _ends_with(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")
