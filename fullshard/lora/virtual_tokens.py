"""Prompt, prefix and p-tuning around PEFT: trained tokens in front of each row, and what they are in files.

PEFT computes with them and reads their files. Here is what a model without values, or in shards, needs besides: which
rows of the embedding they begin as, and the one table that files hold in place of what was trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

FILE_KEY = "prompt_embeddings"
"""PEFT's name of the table in files."""


def prompt_kinds(model: Any) -> list[str]:
    """What kind of prompt the model's adapters are, in PEFT's words; empty for others."""
    configs = [c for c in getattr(model, "peft_config", {}).values() if getattr(c, "is_prompt_learning", False)]
    return [str(getattr(config.peft_type, "value", config.peft_type)).lower() for config in configs]


def is_prompt(model: Any) -> bool:
    """Whether the model's adapter is a prompt."""
    return bool(prompt_kinds(model))


def encoders(model: Any) -> Mapping[str, Any]:
    """The modules that make prompts, by the adapter's name."""
    return getattr(model, "prompt_encoder", {}) if is_prompt(model) else {}


def count(model: Any) -> int:
    """How many virtual tokens stand before each row; 0 without a prompt."""
    return sum(config.num_virtual_tokens for config in model.peft_config.values()) if is_prompt(model) else 0


def begin_with(model: Any, tokens: Sequence[int]) -> None:
    """Let the virtual tokens begin as these ones, repeated or cut as PEFT does. Without values yet, they get them when
    the embedding is read."""
    for encoder in encoders(model).values():
        needed = encoder.embedding.num_embeddings
        rows = (list(tokens) * -(-needed // len(tokens)))[:needed]
        encoder._fullshard_begins_as = rows
        table = model.word_embeddings.weight
        if not table.is_meta:
            encoder.embedding.weight.data = table.detach()[rows].to(encoder.embedding.weight.dtype).clone()


def begins_as(encoder: Any) -> list[int] | None:
    """The rows of the embedding that virtual tokens begin as; None if they are drawn."""
    return getattr(encoder, "_fullshard_begins_as", None)


def as_file(encoder: Any, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What files hold of a prompt: the output of its encoder, from the encoder's whole parameters."""
    numbers = torch.arange(encoder.embedding.num_embeddings, device=values["embedding.weight"].device)
    with torch.no_grad():
        made = torch.func.functional_call(encoder, dict(values), (numbers.unsqueeze(0),))
    return {FILE_KEY: made[0].contiguous().clone()}
