"""What a quantised model holds in 4 bits, what of it stays dense, and how many bytes either is."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import torch
from torch import nn

from fullshard.byte_size import memory_size
from fullshard.lora.trainable_tokens import plain_layer
from fullshard.quant.quantize_model import packed_parameters, packed_weights

SHOWN = 4
"""Kinds of dense weights that are named besides the usual ones."""
_IN_BETWEEN = re.compile(r"\.(base_layer|original_module|token_adapter|\d+)(?=\.)")


def bytes_by_kind(model: nn.Module) -> tuple[int, Counter[str]]:
    """Bytes of the whole model in 4 bits, and those of dense parameters by kind; without what an adapter trains."""
    packed, four_bits, dense = packed_parameters(model), 0, Counter[str]()
    adapted = hasattr(model, "peft_config")
    tables = {id(weight): kind for kind, weight in _tables(model)}
    for name, p in model.named_parameters():
        count = p.numel() * p.element_size()
        if id(p) in packed:
            four_bits += count
        elif not (adapted and p.requires_grad):
            dense[tables.get(id(p)) or _kind(name, p)] += count
    return four_bits, dense


def _tables(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The output head and the embedding; one that is both is the embedding."""
    found = []
    for kind, get in (("head", "get_output_embeddings"), ("embedding", "get_input_embeddings")):
        layer: Any = getattr(model, get)() if hasattr(model, get) else None
        if (weight := getattr(plain_layer(layer), "weight", None)) is not None:
            found.append((kind, weight))
    return found


def _kind(name: str, p: torch.Tensor) -> str:
    if p.ndim < 2:
        return "norms and biases"
    return ".".join(_IN_BETWEEN.sub("", name).split(".")[-3:])


def dense_line(model: nn.Module) -> str | None:
    """What is in 4 bits and what stays dense, in one line; None of a model without 4-bit weights."""
    weights = packed_weights(model)
    if not weights:
        return None
    four_bits, dense = bytes_by_kind(model)
    usual = [kind for kind in ("embedding", "head", "norms and biases") if kind in dense]
    others = [kind for kind, _ in dense.most_common() if kind not in usual]
    told = [f"{kind} {memory_size(dense[kind])}" for kind in (*usual, *others[:SHOWN])]
    if rest := others[SHOWN:]:
        told.append(f"{len(rest)} other kinds {memory_size(sum(dense[kind] for kind in rest))}")
    return (
        f"4 bits: {weights:,} weights in {memory_size(four_bits)}; dense: {memory_size(dense.total())}"
        f"{' (' + ', '.join(told) + ')' if told else ''}"
    )
