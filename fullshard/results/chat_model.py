"""Loads a result for chat: model, adapter, 4-bit weights and tokenizer, on one device.

The model is loaded as for training (`load_pretrained`), so that answers are those of the model that was trained.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoTokenizer

from fullshard import runtime
from fullshard.checkpoint.adapter_from_checkpoint import write_adapter
from fullshard.errors import ConfigError, first_line
from fullshard.models.generate import StopCriteria, stop_criteria
from fullshard.models.inner_model import causal, embedding_rows
from fullshard.quant.config import dense_dtype, quantization_from_options
from fullshard.results.find_result import Result
from fullshard.temporary_folders import temporary_folder
from fullshard.weights.load import load_pretrained

FOUR_BITS = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
"""How to quantize a model that was not trained in 4 bits. Matrix products use the dtype of the other weights."""


@dataclass
class ChatModel:
    """A model with its tokenizer and stop criteria."""

    model: Any
    tokenizer: Any
    stop: StopCriteria

    @property
    def positions(self) -> int | None:
        """The longest context, if the configuration has one."""
        found = getattr(causal(self.model).config.get_text_config(), "max_position_embeddings", None)
        return found if isinstance(found, int) else None

    @property
    def rows(self) -> int:
        """The number of rows of the embedding."""
        return embedding_rows(self.model)


def load_chat_model(
    result: Result, dtype: str = "auto", device: str | None = None, four_bits: bool | None = None
) -> ChatModel:
    """Load a result. `four_bits`: quantize linear layers to 4 bits; None does as the run did."""
    if result.checkpoint and result.kind == "model":
        raise ConfigError(
            f"{result.folder} is a training checkpoint of a full model, which chat cannot load. Export it first: "
            f"fullshard export {result.folder} OUT; then fullshard chat OUT."
        )
    runtime.use_spmd(device=device)
    try:
        tokenizer = AutoTokenizer.from_pretrained(result.tokenizer)
    except Exception as error:  # damaged files raise errors of many kinds
        raise ConfigError(f"the tokenizer in {result.tokenizer} cannot be read: {first_line(error)}") from None
    quantization, dense_dtype = _quantization(result, four_bits)
    options = {
        "dtype": dense_dtype if dense_dtype is not None and dtype == "auto" else dtype,
        "quantization_config": quantization,
        "progress": sys.stderr.isatty(),
        "text_only": True,
    }
    with temporary_folder() as temporary:
        adapter = result.folder
        if result.kind == "adapter" and result.checkpoint:
            write_adapter(result.folder, temporary)
            adapter = str(temporary)
        if result.kind == "adapter":
            model = load_pretrained(str(result.base), adapter=adapter, **options)
        else:
            model = load_pretrained(result.folder, **options)
    return ChatModel(model.eval(), tokenizer, stop_criteria(model, tokenizer))


def _quantization(result: Result, four_bits: bool | None) -> tuple[Any, torch.dtype | None]:
    """The quantization config, and the dtype of the weights that stay dense if the run's settings determine it."""
    if not (result.trained_in_4_bits if four_bits is None else four_bits) or result.stored_in_4_bits:
        return None, None  # 4-bit weights in files are read as they are
    return trained_quantization(result.settings) if result.trained_in_4_bits else (FOUR_BITS, None)


def trained_quantization(settings: dict[str, Any]) -> tuple[Any, torch.dtype | None]:
    """The quantization config that a run used for its base model, and the dtype of the weights before quantization
    (None: that of the files), from its settings."""
    names = (
        "use_4bit_quantization", "use_nested_quant", "bnb_4bit_compute_dtype", "bnb_4bit_quant_storage_dtype",
        "bnb_4bit_quant_type",
    )  # fmt: skip
    config = quantization_from_options(**{name: settings[name] for name in names if name in settings})
    dtype = settings.get("torch_dtype", "auto")
    if config is None or dtype != "auto":
        return config, getattr(torch, dtype, None)
    return config, dense_dtype(config.scheme.storage)
