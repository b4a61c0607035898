"""Builds a small model of the same class and behavior as a large one, with random weights, for tests.

`small_models(model)` shrinks a copy of the configuration, field by field, based on field names. Sub-configurations are
shrunk the same way, each by its own numbers.

- Numbers of heads and groups are divided by their largest possible common divisor, so that ratios (grouped-query
  attention) are kept.
- Hidden and intermediate sizes become about 64, or are divided by the same number if they depend on the heads. Head
  dimensions, ranks and kernel sizes are kept.
- One layer of each kind is kept, and lists with an entry per layer are cut the same way. If the kinds depend on other
  fields, the first layers are kept, up to the last new kind.
- Attention windows and chunks become 4 tokens long, so that short test documents exceed them.
- There are 4 experts, with 2 per token, and a vocabulary of 128 tokens, with special tokens among the first 8.

Everything else (rope and its scaling, soft-caps, biases, norms, activation functions) is kept.
"""

from __future__ import annotations

import contextlib
import copy
import math
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from fullshard.device import accelerator

VOCABULARY, SPECIAL, WINDOW, EXPERTS, PER_TOKEN = 128, 8, 4, 4, 2
ALIGNED, NARROW, LARGEST = 8, 64, 2**26
HEADS = re.compile(r"(^|_)(heads|groups|n_head|head_count)$")
WIDTHS = re.compile(
    r"(^|_)(hidden_size|hidden_dim|intermediate_size|intermediate_dim|intermediate_sizes|n_embd|n_embed|d_model|d_ff"
    r"|d_inner|n_inner|inner_dim|ffn_dim|ffn_hidden_size|ff_dim|embedding_size|embed_dim|emb_dim|embedding_dim|dim"
    r"|lru_width|conv_dim|embed_proj_dim|d_ssm|hidden_size_per_layer_input|d_embed|dim_ff)$"
)
INNER = re.compile(r"intermediate|inner|ffn|ff_|_ff")
KEPT_WIDTHS = re.compile(r"head_dim|rotary_dim|rope_dim|conv_kernel|state_dim|lora_dim|index_.*dim")
LAYERS = re.compile(r"(^|_)(num_hidden_layers|n_layers?|num_layers|layers|depth|num_blocks)$")
WINDOWS = re.compile(r"window(_size)?$|^attention_chunk_size$|^local_attention$|^sliding_window")
ALL_EXPERTS = re.compile(r"^(n_routed_experts|(moe_)?num_(local_)?experts|num_routed_experts|n_experts|expert_num)$")
USED_EXPERTS = re.compile(r"experts_per_tok(en)?$|^moe_top_?k$|^moe_k$|^num_selected_experts$|^num_experts_per_token$")


def small_models(model: Any, device: torch.device, heads: int = 1) -> Iterator[Any]:
    """Models of the same class on `device`, each larger than the last, for classes that cannot be very small.

    Numbers of heads stay multiples of `heads`, where the model's are.

    Weights are random, in fp32 (bf16 if the attention does not support fp32). The caller's random state is not changed.
    If no size can be built, the first error of the class is raised.
    """
    failure: Exception | None = None
    for growth in (0, 1, 2, 4):
        for one_of_each in (True, False):
            try:
                config = _small_config(model, growth, one_of_each, heads)
                with torch.device("meta"):
                    plan = type(model)(copy.deepcopy(config))
                if one_of_each and not _kinds(plan) >= _kinds(model):
                    continue
                if (size := sum(p.numel() for p in plan.parameters())) > LARGEST:
                    raise ValueError(f"its smallest version has {size:,} parameters")
                small = _with_values(type(model), config, device)
            except Exception as error:
                failure = failure or error
                continue
            yield small
    if failure is not None:
        raise failure


def _small_config(model: Any, growth: int, one_of_each: bool, multiple: int) -> Any:
    config = copy.deepcopy(model.config)
    for name in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(config, name):
            delattr(config, name)
    _shrink(config, model, growth, one_of_each, multiple)
    return config


def _with_values(model_class: Any, config: Any, device: torch.device) -> Any:
    dtype = torch.bfloat16 if "flash" in str(config._attn_implementation) else torch.float32
    config.dtype = dtype
    with forked_random(device), torch.device(device), _default_dtype(dtype):
        torch.manual_seed(0)
        model = model_class(config).to(dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:  # activations of about 1, so that the effect of one token on another is visible
                    parameter.normal_(0, 1 / math.sqrt(parameter[0].numel()))
                else:
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.eval()


@contextlib.contextmanager
def forked_random(device: torch.device) -> Iterator[None]:
    """Inside, random numbers are drawn without changing the state outside."""
    mine = {"devices": [device], "device_type": device.type} if accelerator.is_accelerator(device) else {"devices": []}
    with torch.random.fork_rng(**mine):
        yield


def bare_model(model: Any) -> Any:
    """The model without quantization and adapters, on the meta device if it has any."""
    if not any(type(m).__module__.startswith(("peft.", "fullshard.")) for m in model.modules()):
        return model
    with torch.device("meta"):
        return type(model)(model.config)


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers: it repeats its warnings about a configuration for the real model."""
    from transformers import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# --- fields ---------------------------------------------------------------------------------------------------------


def _shrink(config: Any, model: Any, growth: int, one_of_each: bool, multiple: int) -> None:
    fields = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    named = getattr(config, "num_hidden_layers", None)
    layers = named if isinstance(named, int) else 0
    kept = _kept_layers(fields, model, layers, one_of_each) if layers else []
    heads = _divisor(fields, multiple) // max(1, growth) or 1
    widths = heads if growth else _narrowest(fields)
    for name, value in fields.items():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            _shrink(value, model, growth, one_of_each, multiple)
            continue
        if kept and is_per_layer(value, layers):
            changed: Any = type(value)(value[i] for i in kept)
        elif kept and _number(value) and LAYERS.search(name):
            changed = len(kept) if value == layers else _part_of(value, len(kept), layers)
        else:
            changed = value
        if isinstance(changed, list | tuple) and all(map(_number, changed)):
            changed = type(changed)(_changed(name, one, heads, widths) for one in changed)
        elif _number(changed):
            changed = _changed(name, changed, heads, widths)
        if changed is not value:
            setattr(config, name, changed)


def _part_of(count: int, kept: int, layers: int) -> int:
    """A count of layers, scaled to the number of layers that are kept."""
    return min(count, max(1, count * kept // layers)) if count > 0 else count


def _changed(name: str, value: int, heads: int, widths: int) -> int:
    if re.search(r"(^|_)vocab_size", name):
        return VOCABULARY
    if re.search(r"_(token_)?(id|index|ids)$", name):
        return value % SPECIAL if value >= SPECIAL else value
    if WINDOWS.search(name):
        return min(value, WINDOW)
    if ALL_EXPERTS.search(name):
        return min(value, EXPERTS)
    if USED_EXPERTS.search(name) or name == "n_group":
        return min(value, PER_TOKEN)
    if name == "topk_group":
        return 1
    if HEADS.search(name):
        return max(1, value // heads)
    if _is_width(name):
        small = value // widths
        return small if not INNER.search(name) else max(ALIGNED, small // ALIGNED * ALIGNED)
    return value


def _divisor(fields: dict[str, Any], multiple: int = 1) -> int:
    """The largest number that divides all head counts, leaves multiples of `multiple` where they are, and widths that
    matrix kernels support."""
    heads = [v for k, v in fields.items() if HEADS.search(k) and _number(v) and v > 1]
    widths = _outer_widths(fields)
    common = math.gcd(*heads) if heads else _narrowest(fields)
    common //= math.gcd(common, multiple)
    fitting = [d for d in range(common, 0, -1) if common % d == 0 and all(v % (ALIGNED * d) == 0 for v in widths)]
    return fitting[0] if fitting else common


def _narrowest(fields: dict[str, Any]) -> int:
    """The divisor that leaves widths of about `NARROW`. It works for models with an explicit head dimension."""
    return max(1, math.gcd(*_outer_widths(fields)) // NARROW)


def _outer_widths(fields: dict[str, Any]) -> list[int]:
    return [v for k, v in fields.items() if _is_width(k) and not INNER.search(k) and _number(v) and v > 1]


def _is_width(name: str) -> bool:
    return bool(WIDTHS.search(name)) and not KEPT_WIDTHS.search(name)


def _number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


# --- layers ---------------------------------------------------------------------------------------------------------


def _kept_layers(fields: dict[str, Any], model: Any, layers: int, one_of_each: bool) -> list[int]:
    """Layers of every kind. Layers of a kind have the same structure, flags, and entries in per-layer lists."""
    lists = [v for v in fields.values() if is_per_layer(v, layers)]
    stacks = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == layers]
    kinds: list[Any] = [
        (*(repr(one[i]) for one in lists), *(_kind(stack[i]) for stack in stacks)) for i in range(layers)
    ]
    first = sorted({kinds.index(kind) for kind in kinds})
    return first if one_of_each else list(range(first[-1] + 1))


def is_per_layer(value: Any, layers: int) -> bool:
    """Whether this is a list with an entry for each layer, and not a list of layer indices."""
    if not isinstance(value, list | tuple) or len(value) != layers:
        return False
    return layers == 1 or list(value) != list(range(layers))


def _kinds(model: nn.Module) -> set[tuple[Any, ...]]:
    return {_kind(layer) for stack in model.modules() if isinstance(stack, nn.ModuleList) for layer in stack}


def _kind(layer: nn.Module) -> tuple[Any, ...]:
    """The structure and flags of a layer, without sizes and values."""
    return tuple(
        (name, type(module).__name__, *((k, v) for k, v in sorted(vars(module).items()) if _is_flag(k, v)))
        for name, module in layer.named_modules()
        if not re.search(r"experts\.\d", name)
    )


def _is_flag(name: str, value: Any) -> bool:
    if name.startswith("_") or name in ("training", "layer_name"):
        return False
    return isinstance(value, bool | str) or value is None
