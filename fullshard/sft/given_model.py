"""A model that a script gives in memory: what can be sharded is taken over, everything else is refused by name."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from fullshard.config.errors import ConfigError
from fullshard.device.torch_private import is_compiled
from fullshard.models.causal_lm import get_causal_lm
from fullshard.quant.bitsandbytes_layers import foreign_layers, take_over
from fullshard.quant.quantize import packed_weights
from fullshard.sft.checked_run import refuse_encoder

WRAPPERS = {
    "DistributedDataParallel": "model.module",
    "DataParallel": "model.module",
    "FullyShardedDataParallel": "the model before it was wrapped",
    "FSDPModule": "the model before fully_shard",
    "DeepSpeedEngine": "model.module",
}


def take_model(model: Any) -> None:
    """Prepare a model in memory for the run, in place: bitsandbytes' 4-bit layers become ours."""
    _check_kind(model)
    inner = get_causal_lm(model)
    _check_causal(inner)
    if empty := [name for name, p in model.named_parameters() if p.is_meta]:
        raise ConfigError(
            f"model: {len(empty)} parameter(s) of the {type(inner).__name__} have no values ({empty[0]} is on the meta "
            f"device); give the model's name or folder, or load its weights first."
        )
    _leave_devices(inner)
    _take_quantized(model, inner)


def _check_kind(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is {type(model).__name__}; expected a name, a folder, or a model of transformers.")
    for kind in type(model).__mro__:
        if kind.__name__ in WRAPPERS:
            raise ConfigError(
                f"model is a {type(model).__name__} ({kind.__name__}), but the trainer distributes the model itself; "
                f"give {WRAPPERS[kind.__name__]}."
            )
    if compiled := [name for name, module in model.named_modules() if is_compiled(module)]:
        raise ConfigError(
            f"model: {compiled[0] or type(model).__name__} is compiled already, but layers are compiled after they are "
            f"sharded; give the model without torch.compile, and set torch_compile."
        )
    if not hasattr(get_causal_lm(model), "config"):
        raise ConfigError(f"model is a {type(model).__name__} without a config; expected a model of transformers.")


def _check_causal(model: Any) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise ConfigError(f"model is a {name}, an encoder-decoder; expected a causal language model.")
    refuse_encoder("model", model.config.to_dict())
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    known = head is not None or name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    taken = inspect.signature(type(model).forward).parameters
    takes_labels = "labels" in taken or any(one.kind is inspect.Parameter.VAR_KEYWORD for one in taken.values())
    if not known or not takes_labels:
        raise ConfigError(
            f"model is a {name}, which has no language-model head or computes no loss; expected a causal language "
            f"model (AutoModelForCausalLM)."
        )


def _leave_devices(model: Any) -> None:
    """Forget the device map of a model on one device: the engine places the shards."""
    devices = {str(device) for device in (getattr(model, "hf_device_map", None) or {}).values()}
    if len(devices) > 1:
        raise ConfigError(
            f"model: its device_map spreads it over {', '.join(sorted(devices))}, but the trainer distributes the "
            f"model itself; load it without device_map."
        )
    if any(hasattr(module, "_hf_hook") for module in model.modules()):
        from accelerate.hooks import remove_hook_from_submodules

        remove_hook_from_submodules(model)  # they move inputs to the device of the map
    vars(model).pop("hf_device_map", None)


def _take_quantized(model: Any, inner: Any) -> None:
    if take_over(model, inner) or packed_weights(model):
        return
    asked = getattr(inner.config, "quantization_config", None)
    fields = asked if isinstance(asked, dict) else getattr(asked, "__dict__", {})
    if asked is None and not foreign_layers(model, "Linear8bitLt"):
        return
    method = fields.get("quant_method", "bitsandbytes")
    eight = " in 8 bits" if foreign_layers(model, "Linear8bitLt") else ""
    raise ConfigError(
        f"model is quantized by {getattr(method, 'value', method)}{eight}, which cannot be sharded; load it without "
        f"quantization, or in 4 bits with BitsAndBytesConfig(load_in_4bit=True)."
    )
