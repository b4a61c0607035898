"""What trains beside a frozen model: the settings' LoRA and 4-bit options, in the terms of `adapters/` and PEFT.

Adapters are put into a model that has no values yet, after its layers were quantised if they are. First values are
given when the weights are read (`weights/init.py`): a function of seed and parameter name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fullshard.adapters import lora
from fullshard.adapters.quantize import Quantization
from fullshard.errors import ConfigError
from fullshard.fsdp import MixedPrecision
from fullshard.options import as_list
from fullshard.train.config import SFTConfig

Say = Callable[[str], None]
PLAIN_STARTS = (True, False, "gaussian")
"""Ways to begin an adapter that do not look at the weights it adapts."""


def lora_config(config: SFTConfig) -> Any:
    """PEFT's configuration of the adapter that the settings ask for; None for full fine-tuning."""
    if not config.use_peft_lora:
        return None
    from peft import LoraConfig

    named = as_list(config.lora_target_modules)
    return LoraConfig(
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        target_modules="all-linear" if named == ["all-linear"] else named,
        bias="none",
        task_type="CAUSAL_LM",
    )


def quantization(config: SFTConfig) -> Quantization | None:
    """How the frozen model is held in 4 bits; None where it is not."""
    return lora.quantization(
        use_4bit_quantization=config.use_4bit_quantization,
        use_nested_quant=config.use_nested_quant,
        bnb_4bit_compute_dtype=config.bnb_4bit_compute_dtype,
        bnb_4bit_quant_storage_dtype=config.bnb_4bit_quant_storage_dtype,
        bnb_4bit_quant_type=config.bnb_4bit_quant_type,
    )


def settle_dtypes(config: SFTConfig, model: nn.Module, precision: str, say: Say) -> MixedPrecision:
    """Give the adapter its dtype; the dtypes of the run."""
    usual, four_bits = MixedPrecision.of(precision), quantization(config)
    storage = four_bits.scheme.storage if four_bits is not None else None
    if storage is not None and (note := lora.storage_note(storage, precision)):
        say(note)
    throughout = storage is torch.bfloat16 and precision == "bf16"
    wanted = config.adapter_dtype if config.adapter_dtype != "auto" else "bfloat16" if throughout else "float32"
    if wanted == "float32" or not hasattr(model, "peft_config"):
        return usual
    for p in model.parameters():
        if p.requires_grad:
            p.data = p.data.to(getattr(torch, wanted))
    return dataclasses.replace(usual, master_dtype=None)


def add_adapter(model: nn.Module, peft_config: Any, seed: int) -> nn.Module:
    """The model with the adapter put into it, as a `PeftModel`; only the adapter trains."""
    from peft import get_peft_model

    empty = any(p.is_meta for p in model.parameters())
    start, dora = getattr(peft_config, "init_lora_weights", True), getattr(peft_config, "use_dora", False)
    if empty and (start not in PLAIN_STARTS or dora):
        raise ConfigError(
            f"an adapter that starts from the model's own weights (init_lora_weights={start!r}, use_dora={dora}) "
            f"needs them "
            f"whole: load the model yourself, add the adapter with peft and hand the PeftModel over."
        )
    torch.manual_seed(seed)
    try:
        return get_peft_model(model, peft_config)
    except ValueError as error:
        if "target" not in str(error).lower():
            raise
        kinds = sorted({name.rsplit(".", 1)[-1] for name, m in model.named_modules() if isinstance(m, nn.Linear)})
        raise ConfigError(
            f"lora_target_modules: {error}. Linear layers of {type(model).__name__}: {', '.join(kinds)}."
        ) from None
