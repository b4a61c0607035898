"""PEFT models on the meta device, and the check that a model has something to train.

Adapter layers, their configuration and their files are PEFT's.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from fullshard.config.errors import ConfigError, QuantizationError
from fullshard.device.torch_private import parameters_of
from fullshard.lora.methods import method_of
from fullshard.lora.virtual_tokens import is_prompt
from fullshard.quant.quantize import quantized_format

INITIALIZED_BY_NAME = ("VERA", "LN_TUNING", "PROMPT_TUNING", "PREFIX_TUNING", "P_TUNING")
"""Methods that `weights/init.py` initializes, or whose values are in the model's files; PEFT initializes the others."""


def get_peft_model_on_meta(model: nn.Module, peft_config: Any) -> Any:
    """PEFT's `get_peft_model` for a model on the meta device.

    Adapters whose initial values are computed from the weights (PiSSA, OLoRA, LoftQ, …) get only their layers here;
    their values are computed when the weights are loaded (`weights/adapter_init.py`).
    """
    method = getattr(peft_config, "init_lora_weights", None)
    if method is None:
        known = method_of(peft_config) in INITIALIZED_BY_NAME
        # PEFT needs real values in shared projections and token indices.
        with torch.device("cpu"), contextlib.nullcontext() if known else _stand_ins(model):
            return with_layers(model, peft_config)
    if not isinstance(method, str) or method.lower() == "gaussian":
        return with_layers(model, peft_config)
    if method == "loftq" and (peft_config.loftq_config or {}).get("loftq_iter", 1) != 1:
        raise ConfigError("loftq_config: loftq_iter above 1 also changes the base weights; expected 1")
    peft_config = copy.copy(peft_config)
    peft_config.init_lora_weights = True
    peft_model = with_layers(model, peft_config)
    peft_config.init_lora_weights = method
    return peft_model


def with_layers(model: nn.Module, peft_config: Any) -> Any:
    """PEFT's `get_peft_model`, in which a LoRA adapter on the weight of a linear layer (`target_parameters`) is a LoRA
    layer. PEFT would add it to the weight in each forward pass, which a quantized weight does not allow. Its files are
    the same."""
    from peft import get_peft_model

    named = sorted(getattr(peft_config, "target_parameters", None) or ())
    if not named or peft_config.lora_dropout:
        return get_peft_model(model, peft_config)
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    of_layers = {target: [n for n in layers if f".{n}.weight".endswith(f".{target}")] for target in named}
    peft_config = copy.copy(peft_config)
    peft_config.target_parameters = [target for target in named if not of_layers[target]] or None
    peft_model: Any = get_peft_model(model, peft_config)
    for name in sorted({name for names in of_layers.values() for name in names}):
        path, _, own = name.rpartition(".")
        parent, layer = model.get_submodule(path), model.get_submodule(name)
        peft_model.base_model._create_and_replace(
            peft_config, peft_model.active_adapter, layer, own, parent, current_key=name
        )
    peft_config.target_parameters = named
    return peft_model


@contextlib.contextmanager
def _stand_ins(model: nn.Module) -> Iterator[None]:
    """Inside, parameters on the meta device are replaced by tensors on the CPU that need no memory, so that PEFT keeps
    an adapter's initial values there too. They are NaN: copies of them are put on the meta device afterwards."""
    stand_ins: dict[int, nn.Parameter] = {}
    originals: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, p in parameters_of(module).items():
            if p is not None and p.is_meta:
                if id(p) not in stand_ins:
                    value = torch.full((), torch.nan, dtype=p.dtype, device="cpu").expand(p.shape)
                    stand_ins[id(p)] = nn.Parameter(value, requires_grad=p.requires_grad)
                    originals[id(stand_ins[id(p)])] = p
                parameters_of(module)[name] = stand_ins[id(p)]
    modules = list(model.modules())
    yield
    for module in {*modules, *model.modules()}:
        for name, p in parameters_of(module).items():
            if p is None or not p.is_floating_point():
                continue
            if id(p) in originals:
                parameters_of(module)[name] = originals[id(p)].requires_grad_(p.requires_grad)
            elif p.isnan().any():
                parameters_of(module)[name] = nn.Parameter(p.detach().to("meta"), requires_grad=p.requires_grad)


def check_trains(model: nn.Module) -> None:
    """Raise an error if nothing trains, or if a quantized model has no adapters."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    adapted = is_prompt(model) or any(isinstance(m, BaseTunerLayer) for m in model.modules())
    if (kind := quantized_format(model)) is not None and not adapted:
        raise QuantizationError(
            f"full fine-tuning is not possible: the model's {kind} weights are frozen, and only norms and embeddings "
            f"would train. Add adapters (use_peft_lora, or get_peft_model), or load the model without quantization"
        )
    if not any(p.requires_grad for p in model.parameters()):
        raise ConfigError("the model has no trainable parameters (requires_grad is False everywhere)")
