"""The trainable parameters of a run: adapters, new tokens and frozen parts, from the settings to PEFT's terms.

An adapter is added to a model that has no weights yet, after its layers are quantized. Its initial values are set when
the weights are read (`weights/init.py`), as a function of seed and parameter name.
"""

from __future__ import annotations

import copy
import dataclasses
import fnmatch
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullshard.config.errors import ConfigError, one_line
from fullshard.config.options import as_list, counting_number, nearest
from fullshard.device import accelerator
from fullshard.distributed.ranks import agree, run_on_all_ranks
from fullshard.fsdp import MixedPrecision
from fullshard.lora.adapter_config import taken_from_weights
from fullshard.lora.fused import fuse_lora
from fullshard.lora.gated_mlp import fuse_mlps
from fullshard.lora.language_model import left_out, left_out_tensors, outside_pattern
from fullshard.lora.peft_model import (
    check_method,
    check_trains,
    get_peft_model_on_meta,
    method_of,
    set_dropout,
    with_layers,
)
from fullshard.lora.targets import ALL_LINEAR, adapts_parameters, mixture_targets
from fullshard.lora.trainable_tokens import plain_layer
from fullshard.lora.virtual_tokens import init_from_tokens, prompt_kinds
from fullshard.models.causal_lm import get_causal_lm
from fullshard.models.experts import experts_modules
from fullshard.models.layer_groups import gated_mlps, shared_inputs
from fullshard.quant.config import Quantization, quantization_from_options, storage_note
from fullshard.quant.expert_adapters import runs_own_experts
from fullshard.quant.quantize import quantized_format
from fullshard.sft.adapter_options import check_prompt
from fullshard.sft.sft_config import SFTConfig

Say = Callable[[str], None]
"""Prints a line for the user, on the first rank."""
DROPOUT = 0.1
"""The dropout of adapters where `lora_dropout` is unset."""

# --- PEFT's configuration -------------------------------------------------------------------------------------------


def requested_adapter_config(config: SFTConfig, script_config: Any) -> Any:
    """PEFT's configuration of a new adapter on any model: the script's, else from the settings; None without one."""
    if script_config is not None or config.adapter_kind is None or config.adapter_name_or_path is not None:
        return script_config
    return {"lora": _lora, "vera": _vera}.get(config.adapter_kind, _prompt)(config)


def _lora(config: SFTConfig) -> Any:
    from peft import LoraConfig

    lora: Any = LoraConfig(
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        lora_dropout=_dropout(config),
        use_rslora=config.use_rslora,
        use_dora=config.use_dora,
        bias="none",
        **_layers(config),
    )
    # Set after construction: PEFT's constructor would require libraries that only its own initialization uses.
    lora.init_lora_weights = config.first_values
    return lora


def _dropout(config: SFTConfig) -> float:
    return DROPOUT if config.lora_dropout is None else config.lora_dropout


def _vera(config: SFTConfig) -> Any:
    from peft import VeraConfig

    return VeraConfig(
        r=config.lora_r,
        vera_dropout=_dropout(config),
        d_initial=config.vera_d_initial,
        projection_prng_key=config.projection_prng_key,
        save_projection=config.save_projection,
        **_layers(config),
    )


def _prompt(config: SFTConfig) -> Any:
    from peft import PrefixTuningConfig, PromptEncoderConfig, PromptTuningConfig

    about: dict[str, Any] = {"num_virtual_tokens": config.num_virtual_tokens, "task_type": "CAUSAL_LM"}
    if config.peft_type == "prompt_tuning":
        return PromptTuningConfig(**about)
    about["encoder_hidden_size"] = config.encoder_hidden_size
    if config.peft_type == "p_tuning":
        return PromptEncoderConfig(**about)
    return PrefixTuningConfig(prefix_projection=config.prefix_projection, **about)


def _layers(config: SFTConfig) -> dict[str, Any]:
    """The layers that get adapters, and those that train whole."""
    named, whole = as_list(config.lora_target_modules), as_list(config.modules_to_save or "")
    return {
        "target_modules": "all-linear" if named == ["all-linear"] else named,
        "modules_to_save": whole or None,
        "task_type": "CAUSAL_LM",
    }


def new_adapter_config(config: SFTConfig, script_config: Any, model: Any, say: Say) -> Any:
    """PEFT's configuration of the adapter to add to this model: the script's, else from the settings; None without one.
    All ranks must call it."""
    requested = requested_adapter_config(config, script_config)
    if requested is None:
        return None
    fit = functools.partial(fit_adapter_config, config, requested, model, say, from_settings=script_config is None)
    return run_on_all_ranks(fit, "adapter")


def fit_adapter_config(config: SFTConfig, peft_config: Any, model: Any, say: Say, *, from_settings: bool) -> Any:
    """PEFT's configuration of a new adapter on this model: nothing outside its language model gets one.

    In a configuration `from_settings`, all-linear has the experts too, and defaults that do not fit are left out.
    """
    peft_config, inner = copy.copy(peft_config), get_causal_lm(model)
    for name in getattr(peft_config, "modules_to_save", None) or ():
        if unused := [part for part in left_out(inner) if f".{part}.".endswith(f".{name}.")]:
            raise ConfigError(f"modules_to_save names {name}, but text does not use {unused[0]}; leave it out.")
    if getattr(peft_config, "exclude_modules", "") is None:
        peft_config.exclude_modules = outside_pattern(inner)
    if not from_settings:
        return peft_config
    is_lora = method_of(peft_config) == "LORA"
    if getattr(peft_config, "target_modules", None) != ALL_LINEAR:
        return peft_config
    targets = mixture_targets(inner, config.lora_experts)
    if targets is None:
        if not config.lora_experts:
            say(f"lora_experts: {type(inner).__name__} has no experts, so it has no effect.")
        return peft_config
    peft_config.target_modules = targets.modules
    if is_lora:
        peft_config.target_parameters = targets.parameters
    if config.lora_experts and not (is_lora and targets.has_experts):
        say(f"all-linear: the experts of {type(inner).__name__} get no adapters, because peft cannot add them.")
    return peft_config


def expert_dropout(config: SFTConfig, peft_config: Any, model: Any, say: Say) -> float:
    """The dropout that PEFT's configuration cannot have because experts get adapters: it is set to 0 there, and
    returned if the run has it nevertheless. Where PEFT's own forward runs, only a value that the user has set stays."""
    rate, inner = getattr(peft_config, "lora_dropout", 0.0) or 0.0, get_causal_lm(model)
    if not rate or method_of(peft_config) != "LORA" or not adapts_parameters(peft_config, inner):
        return 0.0
    if any(runs_own_experts(module) for _, module in experts_modules(inner)):
        peft_config.lora_dropout = 0.0
        return rate
    if config.lora_dropout is None and config.adapter_kind == "lora":  # not a script's own configuration
        peft_config.lora_dropout = 0.0
        say(f"lora_dropout: the default of {rate} is left out, because peft has none for adapters on experts.")
    return 0.0


def resumed_config(config: SFTConfig, folder: Path, say: Say) -> Any:
    """PEFT's configuration of the adapter to resume, from its folder. Settings that it overrides are reported."""
    from peft import PeftConfig

    try:
        peft_config: Any = PeftConfig.from_pretrained(str(folder))
    except Exception as error:  # damaged files raise errors of many kinds
        raise ConfigError(
            f"adapter_name_or_path: {folder} holds no adapter that peft can read: {one_line(error)}."
        ) from None
    if peft_config.is_prompt_learning:
        kind = getattr(peft_config.peft_type, "value", peft_config.peft_type)
        raise ConfigError(f"adapter_name_or_path: {folder} holds a {kind} adapter; expected one like LoRA.")
    peft_config.inference_mode = False
    for name in ("r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora"):
        option = "lora_r" if name == "r" else name
        value, own = getattr(config, option), getattr(peft_config, name, None)
        if value not in (own, SFTConfig.__dataclass_fields__[option].default):
            say(f"{option} {value} is not used: the resumed adapter has {own}.")
    for option in (
        "peft_type", "init_lora_weights", "modules_to_save", "trainable_token_indices", "lora_target_modules",
        "lora_experts",
    ):  # fmt: skip
        if (value := getattr(config, option)) != SFTConfig.__dataclass_fields__[option].default:
            say(f"{option} {value} is not used: the resumed adapter has its own.")
    return peft_config


def train_tokens(peft_config: Any, model: Any, tokens: list[int]) -> Any:
    """The configuration with these tokens' rows of the embedding and the output head trained beside the adapter."""
    if not tokens:
        return peft_config
    if not hasattr(peft_config, "trainable_token_indices"):
        raise ConfigError(
            f"the template's new tokens cannot be trained with a {type(peft_config).__name__}; use a LoraConfig, or a "
            f"tokenizer that has them already."
        )
    peft_config = copy.deepcopy(peft_config)
    requested = peft_config.trainable_token_indices or {}
    tables = _tables(model)
    trained = dict(requested) if isinstance(requested, dict) else {next(iter(tables)): list(requested)}
    for name, layer in tables.items():
        if _named(name, getattr(peft_config, "modules_to_save", None) or ()):
            continue  # all of it trains
        if _named(name, getattr(peft_config, "target_modules", None) or ()):
            raise ConfigError(
                f"lora_target_modules names {name}, which needs rows for new tokens: those would not be saved with the "
                f"adapter. Leave it out (new rows train on their own), or name it in modules_to_save."
            )
        if getattr(layer, "bias", None) is not None or not isinstance(layer, nn.Embedding | nn.Linear):
            raise ConfigError(
                f"{name} is a {type(layer).__name__}{' with a bias' if hasattr(layer, 'bias') else ''}, of which peft "
                f"cannot train single rows, as the template's new tokens need; use the model's own template."
            )
        key = next((known for known in trained if _named(name, [known])), name)
        trained[key] = sorted({*trained.get(key, ()), *tokens})
    peft_config.trainable_token_indices = trained or None
    return peft_config


def trainable_token_ids(config: SFTConfig, tokenizer: Any, rows: int) -> list[int]:
    """The ids of the tokens in `trainable_token_indices`, which are ids or text."""
    tokens, token_ids = [], tokenizer.get_vocab()
    for word in as_list(config.trainable_token_indices or ""):
        number = counting_number(word)
        index = number if number is not None else token_ids.get(word)
        if index is None or index >= rows:
            what = f"has no token {word!r}{nearest(word, token_ids)}" if index is None else f"has no token {index}"
            raise ConfigError(
                f"trainable_token_indices: the tokenizer {what} (the model has {rows} token rows). Expected tokens of "
                f"the tokenizer's vocabulary, or their ids."
            )
        tokens.append(index)
    return tokens


def untrained_tokens(peft_config: Any, model: Any, tokens: list[int]) -> list[int]:
    """The tokens among these that an adapter to resume does not train."""
    if not tokens:
        return []
    requested = getattr(peft_config, "trainable_token_indices", None) or {}
    indices = {
        index for group in (requested.values() if isinstance(requested, dict) else [requested]) for index in group
    }
    whole = getattr(peft_config, "modules_to_save", None) or ()
    if all(_named(name, whole) for name in _tables(model)):
        return []
    return [token for token in tokens if token not in indices]


def _tables(model: Any) -> dict[str, nn.Module]:
    """The embedding, and the output head where it is another weight, by name."""
    ends = [end for end in (model.get_input_embeddings(), model.get_output_embeddings()) if end is not None]
    if len(ends) == 2 and plain_layer(ends[0]).weight is plain_layer(ends[1]).weight:
        ends.pop()
    names = {id(module): name for name, module in model.named_modules()}
    return {names[id(end)]: end for end in ends}


def _named(name: str, targets: Any) -> bool:
    """Whether PEFT matches this module by these names, or by this pattern."""
    if isinstance(targets, str):
        return targets != ALL_LINEAR and re.fullmatch(targets, name) is not None
    return any(name == target or name.endswith(f".{target}") for target in targets)


# --- 4 bits and dtypes ----------------------------------------------------------------------------------------------


def quantization(config: SFTConfig) -> Quantization | None:
    """How the frozen model is quantized to 4 bits; None if it is not."""
    return quantization_from_options(
        use_4bit_quantization=config.use_4bit_quantization,
        use_nested_quant=config.use_nested_quant,
        bnb_4bit_compute_dtype=config.bnb_4bit_compute_dtype,
        bnb_4bit_quant_storage_dtype=config.bnb_4bit_quant_storage_dtype,
        bnb_4bit_quant_type=config.bnb_4bit_quant_type,
    )


def set_adapter_dtype(config: SFTConfig, model: nn.Module, precision: str, say: Say) -> MixedPrecision:
    """Cast the adapter to its dtype; returns the mixed-precision policy of the run."""
    usual, four_bits = MixedPrecision.of(precision), quantization(config)
    storage = four_bits.scheme.storage if four_bits is not None else None
    if storage is not None and (note := storage_note(storage, precision)):
        say(note)
    throughout = storage is torch.bfloat16 and precision == "bf16"
    wanted = config.adapter_dtype if config.adapter_dtype != "auto" else "bfloat16" if throughout else "float32"
    if wanted == "float32" or not hasattr(model, "peft_config"):
        return usual
    for p in model.parameters():
        if p.requires_grad:
            p.data = p.data.to(getattr(torch, wanted))
    return dataclasses.replace(usual, master_dtype=None)


def set_projection_dtype(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Cast VeRA's shared projections to the dtype that the run computes in: they are buffers, which neither the engine
    nor PEFT's layer casts."""
    from peft.tuners.vera.model import VeraModel

    for tuner in model.modules():
        for projections in (tuner.vera_A, tuner.vera_B) if isinstance(tuner, VeraModel) and dtype is not None else ():
            for adapter in projections:
                projections[adapter] = projections[adapter].to(dtype)


def fuse_adapter(config: SFTConfig, model: nn.Module, device: torch.device, say: Say) -> None:
    """Let the LoRA layers that share an input run as one, if the settings or the device say so."""
    wanted = accelerator.runs_triton(device) if config.fused_lora is None else config.fused_lora
    if wanted and any(method_of(one) == "LORA" for one in getattr(model, "peft_config", {}).values()):
        if note := fuse_lora(model, shared_inputs(model)).note():
            say(note)
        fuse_mlps(model, gated_mlps(model))


# --- the trainable parameters of a model ----------------------------------------------------------------------------


def make_trainable(
    config: SFTConfig, recomputes: bool, model: nn.Module, tokenizer: Any, peft_config: Any, adapter_dir: Path | None,
    trains: bool, say: Say,
) -> nn.Module:  # fmt: skip
    """The model with its adapter, if there is one, and with frozen parts. All ranks must call it.

    `recomputes` is whether the engine checkpoints activations; `trains` is false for an evaluation only.
    """
    in_memory = not any(p.is_meta for p in model.parameters())
    for one in getattr(model, "peft_config", {"new": peft_config} if peft_config is not None else {}).values():
        check_method(one, quantized_format(model), in_memory)
    if peft_config is not None:
        dropout = expert_dropout(config, peft_config, model, say) if adapter_dir is None else 0.0
        model = add_adapter(model, peft_config, config.seed, adapter_dir)
        if dropout:
            set_dropout(model, dropout)
        if config.prompt_tuning_init_text:
            init_from_tokens(model, tokenizer(config.prompt_tuning_init_text)["input_ids"])
    for kind in prompt_kinds(model):
        check_prompt(kind, config.packing, bool(config.gradient_checkpointing) or recomputes)
    if config.freeze and trains:
        agree(functools.partial(freeze_parameters, model, config.freeze, say), "freezing")
    check_trains(model)
    return model


def starts_from_weights(model: nn.Module) -> bool:
    """Whether an adapter of the model is initialized from the base weights (PiSSA, OLoRA)."""
    configs: Any = getattr(model, "peft_config", {})
    return any(taken_from_weights(getattr(one, "init_lora_weights", None)) for one in configs.values())


def add_adapter(model: nn.Module, peft_config: Any, seed: int, adapter_dir: Path | None = None) -> nn.Module:
    """The model with the adapter, as a `PeftModel`; only the adapter trains.

    The adapter to resume, in `adapter_dir`, is loaded here if the model has its weights, else together with them.
    """
    from peft import PeftModel

    empty = any(p.is_meta for p in model.parameters())
    if adapter_dir is not None and not empty:
        return PeftModel.from_pretrained(model, str(adapter_dir), is_trainable=True)
    if not empty and getattr(peft_config, "init_lora_weights", True) == "loftq":
        raise ConfigError(
            "init_lora_weights='loftq' needs the weights before quantization, which are read from files; give the "
            "model's folder instead of a model."
        )
    torch.manual_seed(seed)
    try:
        return (get_peft_model_on_meta if empty else with_layers)(model, peft_config)
    except RuntimeError as error:
        if not re.search("alloc|overflow", str(error)):
            raise
        raise ConfigError(
            f"the adapter has more parameters than host memory holds ({one_line(error, 120)}); check the sizes in "
            f"config.json and the rank of the adapter."
        ) from None
    except ValueError as error:
        if unfit := re.search(r"ParamWrapper does not work with (\w+)", str(error)):
            option, neutral = unfit[1], 0 if unfit[1] == "lora_dropout" else False
            raise ConfigError(
                f"{option}={getattr(peft_config, option)}: peft has no such adapters on parameters, which fused "
                f"experts are; set {option} to {neutral}, or name layers that are no experts in lora_target_modules."
            ) from None
        if "target" not in str(error).lower():
            raise
        kinds = sorted({name.rsplit(".", 1)[-1] for name, m in model.named_modules() if isinstance(m, nn.Linear)})
        raise ConfigError(
            f"lora_target_modules: {str(error).rstrip('.')}. Linear layers of {type(model).__name__}: "
            f"{', '.join(kinds)}; all-linear takes all but the head."
        ) from None


def freeze_parameters(model: nn.Module, patterns: str, say: Say) -> None:
    """Freeze the parameters that the patterns match. A pattern that matches no trainable parameter is an error."""
    named = dict(model.named_parameters(remove_duplicate=False))
    away = left_out_tensors(model)
    trains = {name for name, p in named.items() if p.requires_grad}
    frozen: set[str] = set()
    for pattern in as_list(patterns):
        matched = {name for name in named if matches_pattern(name, pattern)}
        if not matched and any(matches_pattern(name, pattern) for name in away):
            continue  # frozen already
        if not matched & trains:
            parts = {".".join(name.split(".")[i:j]) for name in trains for i in range(name.count(".") + 1)
                     for j in range(i + 1, name.count(".") + 2)}  # fmt: skip
            why = "matches only frozen parameters" if matched else f"matches no parameter{nearest(pattern, parts)}"
            raise ConfigError(f"freeze: {pattern!r} {why}. Trainable parameters: {_some(sorted(trains))}.")
        frozen |= matched & trains
    for name in frozen:
        named[name].requires_grad_(False)
    count = sum(p.numel() for p in {id(named[name]): named[name] for name in frozen}.values())
    say(f"freeze: {len(frozen)} parameters ({count:,} values) are frozen.")


def matches_pattern(name: str, pattern: str) -> bool:
    """Whether a pattern matches a parameter's name, or whole parts of it between dots."""
    return any(fnmatch.fnmatchcase(name, p) for p in (pattern, f"{pattern}.*", f"*.{pattern}", f"*.{pattern}.*"))


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "") if names else "none"
