"""PEFT models on the meta device, and the check that a model has something to train.

Adapter layers, their configuration and their files are PEFT's.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from fullshard.errors import ConfigError, QuantizationError
from fullshard.lora.virtual_tokens import is_prompt
from fullshard.quant.quantize import packed_weights


def get_peft_model_on_meta(model: nn.Module, peft_config: Any) -> Any:
    """PEFT's `get_peft_model` for a model on the meta device.

    Adapters whose initial values are computed from the weights (PiSSA, OLoRA, LoftQ, …) get only their layers here;
    their values are computed when the weights are loaded (`weights/adapter_init.py`).
    """
    from peft import get_peft_model

    method = getattr(peft_config, "init_lora_weights", None)
    if method is None:
        with torch.device("cpu"):  # PEFT needs real values in shared projections and token indices
            return get_peft_model(model, peft_config)
    if not isinstance(method, str) or method.lower() == "gaussian":
        return get_peft_model(model, peft_config)
    if method == "loftq" and (peft_config.loftq_config or {}).get("loftq_iter", 1) != 1:
        raise ConfigError("loftq_config: loftq_iter above 1 also changes the base weights; expected 1")
    peft_config = copy.copy(peft_config)
    peft_config.init_lora_weights = True
    made = get_peft_model(model, peft_config)
    peft_config.init_lora_weights = method
    return made


def check_trains(model: nn.Module) -> None:
    """Raise an error if nothing trains, or if a quantized model has no adapters."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    adapted = is_prompt(model) or any(isinstance(m, BaseTunerLayer) for m in model.modules())
    if packed_weights(model) and not adapted:
        raise QuantizationError(
            "full fine-tuning of a 4-bit model is not possible: its weights are frozen, and only norms and embeddings "
            "would train. Add adapters (use_peft_lora, or get_peft_model), or load the model without quantization"
        )
    if not any(p.requires_grad for p in model.parameters()):
        raise ConfigError("the model has no trainable parameters (requires_grad is False everywhere)")
