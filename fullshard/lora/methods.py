"""PEFT's methods: which of them train on sharded and on quantized models, and why others do not."""

from __future__ import annotations

from typing import Any

from fullshard.config.errors import ConfigError

SERVED = (
    "LORA", "VERA", "PROMPT_TUNING", "PREFIX_TUNING", "P_TUNING", "IA3", "LOHA", "LOKR", "OFT", "BOFT", "HRA",
    "LN_TUNING", "FOURIERFT", "RANDLORA", "MISS", "BONE", "C3A", "ROAD", "WAVEFT", "DELORA", "GRALORA",
    "TRAINABLE_TOKENS",
)  # fmt: skip
"""Methods whose losses and files are tested against PEFT's on one device."""
ON_QUANTIZED = ("LORA", "VERA", "PROMPT_TUNING", "PREFIX_TUNING", "P_TUNING")
"""Methods that do not need the values of a dense weight."""
FROM_WEIGHTS = ("DELORA", "TRAINABLE_TOKENS")
"""Methods whose initial values PEFT computes from the weights, which must be in memory then."""
REFUSED = {
    "ADALORA": "it changes its ranks between steps",
    "ADAPTION_PROMPT": "it replaces the attention layers",
    "CARTRIDGE": "its prompt is made from a cache",
    "CPT": "it computes a loss of its own from columns that rows do not have",
    "MULTITASK_PROMPT_TUNING": "it needs task_ids in the rows",
    "OSF": "it replaces the weights and their gradients",
    "POLY": "it needs task_ids in the rows",
    "SHIRA": "its values are scattered over whole weights",
    "VBLORA": "its layers share one parameter",
    "XLORA": "it mixes adapters that must be trained before",
}


def method_of(peft_config: Any) -> str:
    """PEFT's name of a configuration's method."""
    kind = getattr(peft_config, "peft_type", None)
    return str(getattr(kind, "value", kind))


def check_method(peft_config: Any, quantized: str | None, in_memory: bool) -> None:
    """Refuse a method that cannot train on this model: quantized ("4-bit", "fp8") or dense, with its
    weights in memory or in files."""
    method = method_of(peft_config)
    if method not in SERVED:
        why = REFUSED.get(method, "it has not been tried on sharded models")
        raise ConfigError(f"a {method} adapter is not supported: {why}. Supported are {', '.join(SERVED)}.")
    if quantized and method not in ON_QUANTIZED:
        raise ConfigError(
            f"a {method} adapter is not supported on {quantized} weights; expected {', '.join(ON_QUANTIZED)}, or a "
            f"model without quantization."
        )
    if method in FROM_WEIGHTS and not in_memory:
        raise ConfigError(
            f"a {method} adapter is initialized from the weights, which are not read yet; give the trainer a model "
            f"(from_pretrained) instead of its folder."
        )
