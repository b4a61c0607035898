"""Virtual tokens of prompt tuning, prefix tuning and p-tuning: initialization and export.

PEFT runs them and reads their files. This module adds what models on the meta device and sharded models need: which
embedding rows initialize the virtual tokens, and the table that is saved in place of the encoder's parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

FILE_KEY = "prompt_embeddings"
"""PEFT's file key for the table."""


def prompt_kinds(model: Any) -> list[str]:
    """The PEFT types of the model's prompt-learning adapters; empty if there are none."""
    configs = [c for c in getattr(model, "peft_config", {}).values() if getattr(c, "is_prompt_learning", False)]
    return [str(getattr(config.peft_type, "value", config.peft_type)).lower() for config in configs]


def is_prompt(model: Any) -> bool:
    """Whether the model has a prompt-learning adapter."""
    return bool(prompt_kinds(model))


def encoders(model: Any) -> Mapping[str, Any]:
    """The prompt encoders by adapter name."""
    return getattr(model, "prompt_encoder", {}) if is_prompt(model) else {}


def count_virtual_tokens(model: Any) -> int:
    """The number of virtual tokens before each sequence; 0 without a prompt-learning adapter."""
    return sum(config.num_virtual_tokens for config in model.peft_config.values()) if is_prompt(model) else 0


def init_from_tokens(model: Any, tokens: Sequence[int]) -> None:
    """Initialize the virtual tokens from these tokens, repeated or truncated as in PEFT.

    If the model is on the meta device, the values are set when the embedding is loaded.
    """
    for encoder in encoders(model).values():
        needed = encoder.embedding.num_embeddings
        rows = (list(tokens) * -(-needed // len(tokens)))[:needed]
        encoder._fullshard_init_rows = rows
        table = model.word_embeddings.weight
        if not table.is_meta:
            encoder.embedding.weight.data = table.detach()[rows].to(encoder.embedding.weight.dtype).clone()


def init_rows(encoder: Any) -> list[int] | None:
    """The embedding rows that initialize the virtual tokens; None for random initialization."""
    return getattr(encoder, "_fullshard_init_rows", None)


def export_tensors(encoder: Any, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors to save for a prompt encoder: its output, computed from its whole parameters."""
    indices = torch.arange(encoder.embedding.num_embeddings, device=values["embedding.weight"].device)
    with torch.no_grad():
        output = torch.func.functional_call(encoder, dict(values), (indices.unsqueeze(0),))
    return {FILE_KEY: output[0].contiguous().clone()}
