"""The optimizers that `optim` can name: transformers' names and Muon, with their arguments, state and requirements.

Nothing here imports torch. `sft/optimizer.py` makes them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fullshard.config.errors import ConfigError
from fullshard.config.options import as_bool, nearest


@dataclass(frozen=True)
class Kind:
    """An optimizer that `optim` can name."""

    states: int
    """Values of state per element of a parameter."""
    bits: int = 0
    """Bits of each value; 0 for those of the parameter's own dtype."""
    package: str = ""
    """The package that it needs."""
    arguments: Mapping[str, type] = field(default_factory=dict)
    """What it takes in `optim_args`."""


def _bnb(states: int, bits: int, **arguments: type) -> Kind:
    return Kind(states, bits, "bitsandbytes", arguments)


SERVED: dict[str, Kind] = {
    "adamw_torch": Kind(2),
    "adamw_torch_fused": Kind(2),
    "sgd": Kind(0, arguments={"momentum": float, "dampening": float, "nesterov": bool}),
    "adagrad": Kind(1, arguments={"lr_decay": float, "eps": float}),
    "rmsprop": Kind(1, arguments={"alpha": float, "eps": float, "momentum": float, "centered": bool}),
    "adafactor": Kind(0),
    "muon": Kind(1, arguments={"lr": float, "momentum": float, "nesterov": bool, "ns_steps": int, "adjust_lr_fn": str}),
    "lion_32bit": Kind(1, 32),
    "lion_8bit": _bnb(1, 8),
    "paged_lion_32bit": _bnb(1, 32),
    "paged_lion_8bit": _bnb(1, 8),
    "adamw_bnb_8bit": _bnb(2, 8),
    "adamw_8bit": _bnb(2, 8),
    "paged_adamw_32bit": _bnb(2, 32),
    "paged_adamw_8bit": _bnb(2, 8),
    "rmsprop_bnb": _bnb(1, 32, alpha=float, eps=float),
    "rmsprop_bnb_8bit": _bnb(1, 8, alpha=float, eps=float),
    "rmsprop_bnb_32bit": _bnb(1, 32, alpha=float, eps=float),
}

_WHOLE = "it projects whole gradients to a low rank, and gradients are sharded here; use adamw_8bit or LoRA"
_STACKED = "its state stacks two averages, which is not sharded; use adamw_8bit or adamw_torch"
_SCHEDULE = "it trains other weights than it evaluates; use adamw_torch with lr_scheduler_type constant_with_warmup"
_IN_BACKWARD = "it updates parameters during backward, before gradients are summed over the ranks; use adafactor"
REFUSED: dict[str, str] = {
    "adamw_torch_xla": "torch_xla is not used here; use adamw_torch_fused",
    "adamw_torch_npu_fused": "NPUs are not supported; use adamw_torch_fused",
    "adamw_anyprecision": "torchdistx is no longer maintained; use adamw_torch, or adamw_8bit for less memory",
    "adamw_torch_4bit": "torchao's optimizers are not supported; use adamw_8bit",
    "adamw_torch_8bit": "torchao's optimizers are not supported; use adamw_8bit, which bitsandbytes provides",
    **dict.fromkeys(("ademamix", "ademamix_8bit", "paged_ademamix_32bit", "paged_ademamix_8bit"), _STACKED),
    **dict.fromkeys(
        ("galore_adamw", "galore_adamw_8bit", "galore_adafactor", "galore_adamw_layerwise",
         "galore_adamw_8bit_layerwise", "galore_adafactor_layerwise", "apollo_adamw", "apollo_adamw_layerwise"), _WHOLE,
    ),
    **dict.fromkeys(("lomo", "adalomo"), _IN_BACKWARD),
    "grokadamw": "it has not been tried on sharded parameters; use adamw_torch",
    **dict.fromkeys(("schedule_free_radam", "schedule_free_adamw", "schedule_free_sgd"), _SCHEDULE),
    "stable_adamw": "it has not been tried on sharded parameters; use adamw_torch with max_grad_norm",
}  # fmt: skip
"""Names of transformers that are not served: why, and what to use instead."""
LEARNING_RATES = ("original", "match_rms_adamw")


def check_arguments(optim: str, options: Mapping[str, Any], target_modules: Any) -> dict[str, Any]:
    """Refuse an unknown or unserved optimizer; returns the arguments in `optim_args`, converted."""
    if optim in REFUSED:
        raise ConfigError(f"optim {optim} is not supported: {REFUSED[optim]}.")
    if optim not in SERVED:
        raise ConfigError(f"optim is {optim!r}{nearest(optim, SERVED) or ';'} expected one of {', '.join(SERVED)}.")
    if target_modules is not None:
        raise ConfigError(
            f"optim_target_modules selects layers for GaLore and APOLLO, which are not supported; {optim} updates all "
            f"trainable parameters. Leave it out; freeze parts of the model with freeze."
        )
    kind = SERVED[optim]
    if kind.package and importlib.util.find_spec(kind.package) is None:
        instead = "lion_32bit" if "lion" in optim else "adamw_torch_fused"
        raise ConfigError(
            f"optim {optim} needs {kind.package}, which is not installed: pip install {kind.package}, or use {instead}."
        )
    return {name: _converted(optim, kind, name, value) for name, value in options.items()}


def _converted(optim: str, kind: Kind, name: str, value: Any) -> Any:
    if name not in kind.arguments:
        takes = f"it takes {', '.join(kind.arguments)}" if kind.arguments else "it takes none"
        raise ConfigError(
            f"optim_args: {optim} has no argument {name!r}{nearest(name, kind.arguments) or ';'} {takes}."
        )
    expected_type = kind.arguments[name]
    try:
        converted = as_bool(value) if expected_type is bool else expected_type(value)
    except (TypeError, ValueError):
        expected = {bool: "true or false", int: "a whole number", float: "a number"}[expected_type]
        raise ConfigError(f"optim_args: {name} is {value!r}; expected {expected}.") from None
    if name == "adjust_lr_fn" and converted not in LEARNING_RATES:
        raise ConfigError(f"optim_args: adjust_lr_fn is {value!r}; expected {' or '.join(LEARNING_RATES)}.")
    return converted
