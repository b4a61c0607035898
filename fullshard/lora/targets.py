"""What a training job needs around PEFT: which layers get adapters, what trains, and how many parameters that is.

The adapters themselves, their configuration and their files are PEFT's.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fullshard.errors import ConfigError, QuantizationError
from fullshard.fsdp.strategy import dtype_name
from fullshard.lora.virtual_tokens import is_prompt
from fullshard.quant.quantize_model import Quantization, packed_parameters, packed_weights

ALL_LINEAR = "all-linear"
DEFAULT_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "down_proj", "up_proj", "gate_proj")


def target_modules(value: str | Sequence[str] | None = None) -> str | list[str]:
    """`lora_target_modules` as PEFT takes it: "all-linear", or a list from a list or from text with commas."""
    if value is None:
        return list(DEFAULT_TARGETS)
    if isinstance(value, str) and value.strip().lower() == ALL_LINEAR:
        return ALL_LINEAR
    names = value.split(",") if isinstance(value, str) else list(value)
    names = [name.strip() for name in names]
    if not names or not all(names):
        raise ConfigError(f"lora_target_modules={value!r}: expected {ALL_LINEAR!r} or names such as 'q_proj,v_proj'")
    return names


def find_targets(model: nn.Module, value: str | Sequence[str] | None = None) -> list[str]:
    """The names of the model's layers that get adapters; a target that names none of them is an error."""
    wanted = target_modules(value)
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if wanted == ALL_LINEAR:
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        return [name for name in linear if head is None or model.get_submodule(name) is not head]
    modules = [name for name, _ in model.named_modules() if name]
    absent = [w for w in wanted if not any(_ends_with(name, w) for name in modules)]
    if absent:
        known = sorted({name.rpartition(".")[2] for name in linear})
        raise ConfigError(
            f"lora_target_modules: the model has no module named {', '.join(absent)}; its linear layers are "
            f"{', '.join(known) or 'none'}. Write {ALL_LINEAR!r} for all but the head"
        )
    return [name for name in modules if any(_ends_with(name, w) for w in wanted)]


def _ends_with(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def lay_out(model: nn.Module, peft_config: Any) -> Any:
    """PEFT's `get_peft_model` for a model without values.

    Adapters that begin with what is in the weights are only put in place; they get their values when the weights are
    read, by the `init_lora_weights` of the adapter's configuration (`weights/adapter_init.py`).
    """
    from peft import get_peft_model

    start = getattr(peft_config, "init_lora_weights", None)
    if start is None:
        with torch.device("cpu"):  # shared projections and numbers of tokens are values, wherever the model lies
            return get_peft_model(model, peft_config)
    if not isinstance(start, str) or start.lower() == "gaussian":
        return get_peft_model(model, peft_config)
    if start == "loftq" and (peft_config.loftq_config or {}).get("loftq_iter", 1) != 1:
        raise ConfigError("loftq_config: more than one loftq_iter changes the weights themselves; expected 1")
    peft_config = copy.copy(peft_config)
    peft_config.init_lora_weights = True
    made = get_peft_model(model, peft_config)
    peft_config.init_lora_weights = start
    return made


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """How many parameters train, and how many there are, in the whole model.

    Sharded parameters count with all their shards, tied ones once, 4-bit weights by the weights they stand for.
    """
    trainable = total = 0
    packed = packed_parameters(model)
    for parameter in model.parameters():
        if id(parameter) not in packed:
            total += parameter.numel()
            trainable += parameter.numel() if parameter.requires_grad else 0
    return trainable, total + packed_weights(model)


def summary(model: nn.Module) -> str:
    """The counts in PEFT's words."""
    trainable, total = count_parameters(model)
    share = 100 * trainable / total if total else 0.0
    return f"trainable params: {trainable:,d} || all params: {total:,d} || trainable%: {share:.4f}"


def quantization(
    *,
    use_4bit_quantization: bool = False,
    use_8bit_quantization: bool = False,
    use_nested_quant: bool = False,
    bnb_4bit_compute_dtype: str = "auto",
    bnb_4bit_quant_storage_dtype: str = "uint8",
    bnb_4bit_quant_type: str = "nf4",
) -> Quantization | None:
    """What the training script's options ask for; None for a model that is not quantised."""
    if use_nested_quant and not (use_4bit_quantization or use_8bit_quantization):
        raise ConfigError("use_nested_quant quantises the scales of 4-bit weights; it needs use_4bit_quantization")
    if not (use_4bit_quantization or use_8bit_quantization):
        return None
    return Quantization.of(
        {
            "load_in_4bit": use_4bit_quantization,
            "load_in_8bit": use_8bit_quantization,
            "bnb_4bit_use_double_quant": use_nested_quant,
            "bnb_4bit_compute_dtype": None if bnb_4bit_compute_dtype == "auto" else bnb_4bit_compute_dtype,
            "bnb_4bit_quant_storage": bnb_4bit_quant_storage_dtype,
            "bnb_4bit_quant_type": bnb_4bit_quant_type,
        }
    )


def dtype_beside(storage: torch.dtype) -> torch.dtype | None:
    """The dtype of what stays dense beside 4-bit weights, which the storage dtype stands for.

    bfloat16 means training in bfloat16 throughout, float32 wide parameters with narrow products (autocast). None for
    uint8, which says nothing about it: as in the files.
    """
    return storage if storage.is_floating_point else None


def storage_note(storage: torch.dtype, mixed_precision: str | None) -> str | None:
    """What to tell a user whose storage dtype does not go with the precision of the run."""
    if mixed_precision in ("fp16", "float16") and storage is not torch.float32:
        return (
            f"fp16 training with bnb_4bit_quant_storage_dtype {dtype_name(storage)}: float32 keeps what trains in "
            f"fp32, which fp16 needs to be stable"
        )
    return None


def check_trains(model: nn.Module) -> None:
    """Refuse what cannot train: a quantised model without adapters, or a model in which nothing trains."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    adapted = is_prompt(model) or any(isinstance(m, BaseTunerLayer) for m in model.modules())
    if packed_weights(model) and not adapted:
        raise QuantizationError(
            "full fine-tuning of a 4-bit model: its weights are frozen, and only norms and embeddings would train. Add "
            "adapters (use_peft_lora, or get_peft_model), or load the model without quantisation"
        )
    if not any(p.requires_grad for p in model.parameters()):
        raise ConfigError("no parameter of the model trains (requires_grad is False everywhere)")
