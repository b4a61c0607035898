"""LoRA: PEFT's layers and file format, put into a model that has no values yet.

First values are given when the weights are read (`weights/init.py`): a function of seed and parameter name. The
quantised route, when it comes, changes the base layers before this (`adapters/`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fullshard.errors import ConfigError
from fullshard.options import as_list
from fullshard.train.config import SFTConfig

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
