"""The causal language model inside a wrapped one, and the size of its vocabulary."""

from __future__ import annotations

from typing import Any

from torch import nn

from fullshard.lora.trainable_tokens import plain_layer


def get_causal_lm(model: nn.Module) -> Any:
    """The causal language model inside PEFT's wrappers."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def embedding_rows(model: nn.Module) -> int:
    """The number of tokens that the input embedding has rows for."""
    return int(plain_layer(get_causal_lm(model).get_input_embeddings()).weight.shape[0])
