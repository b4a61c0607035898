"""The model and tokenizer of a run before they have values: read from their configuration, checked against the data.

Weights are read later, when the plan is known (`assemble.py`).
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
from pathlib import Path
from typing import Any

from torch import nn

from fullshard import runtime
from fullshard.adapters import lora
from fullshard.adapters.quantize import Quantization, quantize_model
from fullshard.data.tokens import TokenTable
from fullshard.errors import ConfigError
from fullshard.train import adapter
from fullshard.train.adapter import Say
from fullshard.train.config import SFTConfig
from fullshard.train.loss import causal
from fullshard.weights import load as loading
from fullshard.weights.locate import open_source


def read_tokenizer(config: SFTConfig, place: Path | str | None) -> Any:
    from transformers import AutoTokenizer

    source = config.tokenizer_name_or_path or place
    if source is None:
        raise ConfigError("there is no tokenizer: give processing_class= (or tokenizer=), or tokenizer_name_or_path.")
    try:
        return AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise ConfigError(f"no tokenizer could be read from {str(source)!r}: {_first_line(error)}") from None


def empty_model(config: SFTConfig, folder: Path, say: Say) -> nn.Module:
    """The causal language model in `folder`, on the meta device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        shape = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ConfigError(f"no model configuration could be read from {folder}: {_first_line(error)}") from None
    packed = getattr(shape, "quantization_config", None)
    if packed is not None and config.use_4bit_quantization:
        say(f"{folder} is stored in 4 bits already and is read as it is; the 4-bit options are not used.")
    four_bits = Quantization.of(packed) if packed is not None else adapter.quantization(config)
    shape._attn_implementation = attention(config, say)
    try:
        with contextlib.closing(open_source(folder)) as source:
            dtype = loading.choose_dtype(config.torch_dtype, shape, source)
            if four_bits is not None and config.torch_dtype == "auto":
                dtype = lora.dtype_beside(four_bits.scheme.storage) or dtype
            model = loading.on_meta(AutoModelForCausalLM, shape, dtype, folder, False)
            loading.untie_what_differs(model, source, None)
            if four_bits is not None:
                quantize_model(model, four_bits, {name: entry.shape for name, entry in source.entries.items()})
            return model
    except ValueError as error:
        if "Unrecognized configuration class" in str(error):
            raise ConfigError(f"{folder} holds a {shape.model_type} model; expected a causal language model.") from None
        raise


def attention(config: SFTConfig, say: Say) -> str | None:
    """The attention implementation asked for; None leaves it to transformers."""
    if config.attn_implementation:
        return config.attn_implementation
    if not config.use_flash_attn:
        return None
    if runtime.device().type != "cuda":
        say("use_flash_attn: there is no GPU here; torch's own attention is used.")
    elif importlib.util.find_spec("flash_attn") is None:
        say("use_flash_attn: flash-attn is not installed; torch's own attention is used.")
    else:
        return "flash_attention_2"
    return None


def embedding_rows(model: Any) -> int:
    return int(causal(model).get_input_embeddings().weight.shape[0])


def uses_flash(model: Any) -> bool:
    return "flash" in str(getattr(model.config, "_attn_implementation", None))


def check_rows(model: Any, table: TokenTable, packing: bool) -> None:
    """Refuse rows that the model cannot take."""
    inner = causal(model)
    longest = int((table.document_starts[1:] - table.document_starts[:-1]).max())
    positions = getattr(inner.config, "max_position_embeddings", None)
    if isinstance(positions, int) and longest > positions:
        raise ConfigError(
            f"the data has documents of {longest} tokens, {type(inner).__name__} has {positions} positions; set "
            f"max_seq_len to "
            f"{positions} or less."
        )
    top = int(table.tokens.max())
    if top >= embedding_rows(model):
        raise ConfigError(
            f"the data has token {top}, the model's embedding {embedding_rows(model)} rows: another model's tokens."
        )
    takes = inspect.signature(type(inner).forward).parameters
    if packing and ("position_ids" not in takes or getattr(inner.config, "alibi", False)):
        raise ConfigError(
            f"packing: {type(inner).__name__} does not take positions, so documents would see each other."
        )


def local_folder(model: Any) -> str | None:
    """Where a model's base lies, for cards and adapters."""
    name = getattr(model.config, "_name_or_path", None)
    return str(Path(name)) if name and Path(name).exists() else name or None


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
