"""PEFT models on the meta device: which methods train on sharded and on quantized models, and what must train.

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
from fullshard.lora.virtual_tokens import is_prompt
from fullshard.quant.expert_adapters import applies_factors
from fullshard.quant.quantize import quantized_format

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


INITIALIZED_BY_NAME = ("VERA", "LN_TUNING", "PROMPT_TUNING", "PREFIX_TUNING", "P_TUNING")
"""Methods that `weights/init.py` initializes, or whose values are in the model's files; PEFT initializes the others."""


def get_peft_model_on_meta(model: nn.Module, peft_config: Any) -> Any:
    """PEFT's `get_peft_model` for a model on the meta device.

    Adapters whose initial values are computed from the weights (PiSSA, OLoRA, LoftQ, …) get only their layers here;
    their values are computed when the weights are loaded (`weights/adapter_init.py`).
    """
    method = getattr(peft_config, "init_lora_weights", None)
    if method is None:
        by_name = method_of(peft_config) in INITIALIZED_BY_NAME
        # PEFT needs real values in shared projections and token indices.
        with torch.device("cpu"), contextlib.nullcontext() if by_name else _stand_ins(model):
            return with_layers(model, peft_config)
    if not isinstance(method, str) or method.lower() == "gaussian":
        return with_layers(model, peft_config, low_cpu_mem_usage=True)
    if method == "loftq" and (peft_config.loftq_config or {}).get("loftq_iter", 1) != 1:
        raise ConfigError("loftq_config: loftq_iter above 1 also changes the base weights; expected 1")
    peft_config = copy.copy(peft_config)
    peft_config.init_lora_weights = True
    peft_model = with_layers(model, peft_config, low_cpu_mem_usage=True)
    peft_config.init_lora_weights = method
    return peft_model


def with_layers(model: nn.Module, peft_config: Any, **options: Any) -> Any:
    """PEFT's `get_peft_model` with its options, in which a LoRA adapter on the weight of a linear layer
    (`target_parameters`) is a LoRA layer. PEFT would add it to the weight in each forward pass, which a quantized
    weight does not allow. Its files are the same."""
    from peft import get_peft_model

    named = sorted(getattr(peft_config, "target_parameters", None) or ())
    if not named or peft_config.lora_dropout:
        return get_peft_model(model, peft_config, **options)
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    of_layers = {target: [n for n in layers if f".{n}.weight".endswith(f".{target}")] for target in named}
    peft_config = copy.copy(peft_config)
    peft_config.target_parameters = [target for target in named if not of_layers[target]] or None
    peft_model: Any = get_peft_model(model, peft_config, **options)
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
            f"would train. Add adapters (use_peft_lora, or get_peft_model), or load the model without quantization "
            f"(dequantize, if it is shipped so)"
        )
    if not any(p.requires_grad for p in model.parameters()):
        raise ConfigError("the model has no trainable parameters (requires_grad is False everywhere)")


def set_dropout(model: nn.Module, rate: float) -> None:
    """Set the dropout of all LoRA layers, and of adapters on experts that have it. PEFT's configuration has none for
    these, so its files record 0."""
    from peft.tuners.lora import LoraLayer

    for layer in model.modules():
        if not isinstance(layer, LoraLayer) or isinstance(layer.get_base_layer(), nn.Embedding):
            continue
        if hasattr(layer, "parameter_name") and not applies_factors(layer.get_base_layer()):
            continue
        for adapter in layer.lora_dropout:
            layer.lora_dropout[adapter] = nn.Dropout(rate)
