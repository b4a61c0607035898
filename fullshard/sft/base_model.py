"""The base model of a run: made on the meta device from the configuration in its folder, or taken over from a script.

Sizes, dtype, attention and quantized layers are decided here; weights are read when the sharding plan is known
(`assemble.py`).
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from fullshard.config.errors import ConfigError, UserError, one_line
from fullshard.device import accelerator
from fullshard.device.torch_private import is_compiled
from fullshard.distributed.ranks import agree, run_on_all_ranks
from fullshard.lora.language_model import freeze_other_parts, train_language_model
from fullshard.models.attention import NAME, use_own_attention
from fullshard.models.causal_lm import get_causal_lm
from fullshard.models.rope_scaling import scale_rope
from fullshard.models.tiny_model import LAYERS, WIDTHS
from fullshard.quant.bitsandbytes_layers import foreign_layers, take_over
from fullshard.quant.config import Quantization, dense_dtype
from fullshard.quant.quantize import packed_weights, quantize_model
from fullshard.quant.shipped import METHODS, Shipped, is_shipped, quant_method
from fullshard.sft import adapter
from fullshard.sft.adapter import Say
from fullshard.sft.checked_run import CheckedRun, base_of_adapter, refuse_encoder
from fullshard.sft.sft_config import SFTConfig
from fullshard.weights import load as loading
from fullshard.weights.adapter_base import check_base, lasting_name
from fullshard.weights.adapter_files import embedding_rows as adapter_rows
from fullshard.weights.adapter_files import other_rows
from fullshard.weights.config_limits import check_config
from fullshard.weights.dtypes import choose_dtype
from fullshard.weights.locate import has_weights, open_source, resolve

WRAPPERS = {
    "DistributedDataParallel": "model.module",
    "DataParallel": "model.module",
    "FullyShardedDataParallel": "the model before it was wrapped",
    "FSDPModule": "the model before fully_shard",
    "DeepSpeedEngine": "model.module",
}
"""Classes of models that are distributed already, and what a script has to pass instead."""
ATTENTION_OF_TORCH = ("eager", "sdpa", "flex_attention", NAME)
"""Attention implementations that need no other package."""


# --- where it is ----------------------------------------------------------------------------------------------------


class ModelFolders(NamedTuple):
    """The local folders that a run starts from."""

    base: Path | None
    """The model's; None for a model in memory."""
    adapter: Path | None
    """That of the adapter to resume."""
    origin: Path | str | None
    """The model's folder, or the name that a model in memory was loaded from."""


def locate_model(run: CheckedRun) -> ModelFolders:
    """Find the folders of model and adapter; names on the hub are downloaded. All ranks must call it."""
    adapter_folder = resolve(run.adapter) if run.adapter is not None else None
    model = run.model if run.model is not None or adapter_folder is None else base_of_adapter(adapter_folder)
    revision = {"revision": run.config.revision} if run.config.revision else {}
    base = resolve(model, **revision) if isinstance(model, str | Path) else None
    if base is not None:
        agree(lambda: check_config(base), "model configuration")
    origin = base or getattr(getattr(model, "config", None), "_name_or_path", None) or None
    if adapter_folder is not None and origin is not None:
        agree(lambda: check_base(adapter_folder, origin), "base of the adapter")
    return ModelFolders(base, adapter_folder, origin)


def has_own_tables(model: Any, folders: ModelFolders) -> bool:
    """Whether embedding and output head belong to the adapter, because those of its base differ. All ranks must call
    it."""

    def differ() -> bool:
        if folders.adapter is not None:
            return bool(adapter_rows(folders.adapter))
        if folders.base is not None:
            return False
        inner = get_causal_lm(model)
        return other_rows(getattr(inner.config, "_name_or_path", None), inner.config)

    return any(agree(differ, "embeddings of the adapter"))


def load_base_model(run: CheckedRun, folders: ModelFolders, device: torch.device, say: Say) -> Any:
    """The model that the run starts from: made from its folder without weights, or the one in memory. All ranks must
    call it."""
    if (base := folders.base) is not None:
        return run_on_all_ranks(lambda: read_model(run.config, base, device, say), "model without weights")
    agree(lambda: take_over_model(run.model), "model in memory")
    return run.model


def local_folder(model: Any) -> str | None:
    """The folder or name that a model was loaded from, for model cards and adapters."""
    name = getattr(model.config, "_name_or_path", None)
    return str(Path(name)) if name and Path(name).exists() else name or None


# --- from a folder --------------------------------------------------------------------------------------------------


def read_model(
    config: SFTConfig, place: Path, device: torch.device, say: Say, *, present: bool = True,
    condense: Callable[[Any], None] | None = None, all_parts: bool = False,
) -> nn.Module:  # fmt: skip
    """The causal language model in a folder, on the meta device: its weights are not read yet.

    For a plan (`present=False`) the device need not be in this machine, the folder needs no weights and may be a bare
    config.json, and `condense` may take layers away before the others are quantized. With `all_parts`, those that text
    does not use stay, as in a model in memory.
    """
    shape = read_model_config(config, place, say)
    packed: Any = getattr(shape, "quantization_config", None)
    shipped = Shipped.of(packed) if is_shipped(packed) else None
    if packed is not None and config.use_4bit_quantization:
        kind = shipped.names if shipped is not None else "4 bits"
        say(f"{place} is stored in {kind} already and is read as it is; the 4-bit options are not used.")
    if config.dequantize and shipped is None:
        kind = "in bitsandbytes' 4 bits" if packed is not None else "dense"
        raise ConfigError(
            f"dequantize unpacks models that are shipped in {', '.join(METHODS)}, but {place} is stored {kind}; leave "
            f"the option out{', or give the model before quantization' if packed is not None else ''}."
        )
    if shipped is not None and config.init_lora_weights.lower() == "loftq":
        raise ConfigError(
            f"init_lora_weights is loftq, which corrects the errors of quantizing, but {place} is stored in "
            f"{shipped.names} and not quantized again; leave it out."
        )
    if packed is not None and config.base_dtype is not None:
        raise ConfigError(
            f"base_dtype is {config.base_dtype}, but {place} is quantized already (quantization_config in its "
            f"config.json); give the folder of the model before quantization, or leave base_dtype out."
        )
    four_bits = None
    if shipped is None:
        four_bits = Quantization.of(packed) if packed is not None else adapter.quantization(config)
    shape._attn_implementation = attention_implementation(config, device, say, present=present)
    with contextlib.ExitStack() as stack:
        source = None
        if present or (_depends_on_files(config, shape) and has_weights(place)):
            source = stack.enter_context(contextlib.closing(open_source(place)))
        try:
            dtype = choose_dtype(config.torch_dtype, shape, source)
            if four_bits is not None and config.torch_dtype == "auto":
                dtype = dense_dtype(four_bits.scheme.storage) or dtype
            model = loading.on_meta(loading.text_class(shape), shape, dtype, place, config.trust_remote_code)
        except UserError:
            raise
        except Exception as error:  # transformers checks few sizes, and not in one way
            if "Unrecognized configuration class" in str(error):
                raise ConfigError(
                    f"{place} holds a {shape.model_type} model; expected a causal language model."
                ) from None
            raise ConfigError(
                f"{place}: no {shape.model_type} model can be built with the sizes in its config.json: "
                f"{one_line(error)}"
            ) from error
        check_model_sizes(place if place.is_file() else place / "config.json", config.config_changes)
        if line := (freeze_other_parts if all_parts else train_language_model)(model):
            say(line)
        if source is not None:
            loading.untie_what_differs(model, source, None)
        if condense is not None:
            condense(model)
        if (chosen := config.base_dtype or four_bits or shipped) is not None:
            quantize_model(model, chosen, source.entries if source is not None else {}, config.dequantize)
        if config.dequantize and shipped is not None:
            say(f"{place} is stored in {shipped.names}; its weights are unpacked while they are loaded.")
        return model


def _depends_on_files(config: SFTConfig, shape: Any) -> bool:
    """Whether a plan depends on the weight files: on a dtype that only they state, on weights that are quantized there,
    or on tied weights, which may have different values there."""
    stated = config.torch_dtype not in (None, "auto") or getattr(shape, "dtype", None) is not None
    tied = getattr(shape.get_text_config(), "tie_word_embeddings", True)
    return not stated or tied or getattr(shape, "quantization_config", None) is not None


def read_model_config(config: SFTConfig, place: Path, say: Say) -> Any:
    """The model's configuration, with the changes that the settings make."""
    import transformers
    from transformers import AutoConfig

    check_config(place, config.config_changes)
    try:
        shape, unknown = AutoConfig.from_pretrained(
            place, return_unused_kwargs=True, trust_remote_code=config.trust_remote_code, **config.config_changes
        )
    except Exception as error:  # damaged files raise errors of many kinds
        if named := re.search(r"model type `([^`]*)` but Transformers does not recognize", str(error)):
            raise ConfigError(
                f"{place}: transformers {transformers.__version__} knows no model of type {named[1]!r}; expected one "
                f"of its model types, or trust_remote_code for a model with its own code."
            ) from None
        raise ConfigError(f"no model configuration could be read from {place}: {one_line(error)}") from None
    refuse_encoder(str(place), shape.to_dict())
    unknown.pop("trust_remote_code", None)
    if unknown:
        raise ConfigError(
            f"model_init_kwargs has {', '.join(sorted(unknown))}, which is neither a setting of a {shape.model_type} "
            f"model nor supported otherwise; expected dtype, attn_implementation, quantization_config, "
            f"trust_remote_code, revision or settings in its config.json."
        )
    shape.name_or_path = lasting_name(place)
    if config.rope_scaling is not None:
        assert config.max_length is not None
        scale_rope(shape, config.rope_scaling, config.max_length, say)
    return shape


def check_model_sizes(file: Path, changes: Mapping[str, Any]) -> None:
    """Refuse a config.json without sizes: transformers would take those of some default model."""
    try:
        stated = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return  # transformers says what is wrong with it
    if not isinstance(stated, dict) or "model_type" not in stated or "auto_map" in stated:
        return
    parts = [stated, dict(changes), *(part for part in stated.values() if isinstance(part, dict))]
    numbers = {key for part in parts for key, value in part.items() if isinstance(value, int | list)}
    for what, pattern in (("width", WIDTHS), ("number of layers", LAYERS)):
        if not any(pattern.search(key) for key in numbers):
            raise ConfigError(
                f"{file} says model_type {stated['model_type']!r}, but not the model's {what} (such as hidden_size and "
                f"num_hidden_layers); give a complete config.json."
            )


def attention_implementation(config: SFTConfig, device: torch.device, say: Say, *, present: bool = True) -> str | None:
    """The attention implementation that the settings ask for; None leaves the choice open.

    On a machine without the device (`present=False`), kernels of other packages need not be installed.
    """
    if named := config.attn_implementation:
        if not present and named not in ATTENTION_OF_TORCH:
            say(f"attn_implementation {named}: planned as torch's own attention, which keeps the same tensors.")
            return None
        return None if named == NAME else named
    if not config.use_flash_attn:
        return None
    if not accelerator.is_accelerator(device):
        say("use_flash_attn: there is no GPU here; torch's own attention is used.")
    elif not present:
        say("use_flash_attn: planned as torch's own attention, which keeps the same tensors.")
    elif importlib.util.find_spec("flash_attn") is None:
        say("use_flash_attn: flash-attn is not installed; torch's own attention is used.")
    else:
        return "flash_attention_2"
    return None


def choose_attention(config: SFTConfig, model: Any, device: torch.device, in_memory: bool) -> None:
    """Let a model run our own attention: if the settings ask for it, and on GPUs if they leave it open. One that is
    `in_memory` may have been made with an implementation of the script's choice: only transformers' default for its
    class is replaced."""
    if config.attn_implementation == NAME:
        if not use_own_attention(model):
            raise ConfigError(
                f"attn_implementation is {NAME}, but {type(get_causal_lm(model)).__name__} has an attention of its "
                f"own; leave the setting out."
            )
        return
    inner = get_causal_lm(model)
    open_to_choice = not config.attn_implementation and not uses_flash(inner)
    default = "sdpa" if getattr(inner, "_supports_sdpa", False) else "eager"
    if in_memory and getattr(inner.config, "_attn_implementation", None) != default:
        open_to_choice = False
    if open_to_choice and accelerator.runs_inductor(device):
        use_own_attention(model)


def uses_flash(model: Any) -> bool:
    """Whether the model runs FlashAttention."""
    return "flash" in str(getattr(model.config, "_attn_implementation", None))


# --- in memory ------------------------------------------------------------------------------------------------------


def take_over_model(model: Any) -> None:
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
    is_causal_lm = head is not None or name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    taken = inspect.signature(type(model).forward).parameters
    takes_labels = "labels" in taken or any(one.kind is inspect.Parameter.VAR_KEYWORD for one in taken.values())
    if not is_causal_lm or not takes_labels:
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
    quantization = getattr(inner.config, "quantization_config", None)
    fields = quantization if isinstance(quantization, dict) else getattr(quantization, "__dict__", {})
    if quantization is None and not foreign_layers(model, "Linear8bitLt"):
        return
    method = fields.get("quant_method", "bitsandbytes")
    eight = " in 8 bits" if foreign_layers(model, "Linear8bitLt") else ""
    if is_shipped(fields):
        raise ConfigError(
            f"model is quantized by {quant_method(fields)} and in memory already, which cannot be sharded; give its "
            f"folder or name, or load it with dequantize=True in its quantization_config."
        )
    raise ConfigError(
        f"model is quantized by {getattr(method, 'value', method)}{eight}, which cannot be sharded; load it without "
        f"quantization, or in 4 bits with BitsAndBytesConfig(load_in_4bit=True)."
    )
