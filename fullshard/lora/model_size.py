"""Model size: how many parameters train, and how many bytes are quantized or dense."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import torch
from torch import nn

from fullshard.config.byte_size import memory_size
from fullshard.lora.trainable_tokens import plain_layer
from fullshard.quant.quantize import packed_parameters, packed_weights, quantized_format

LISTED = 4
"""How many kinds of dense weights are listed besides embedding, head, norms and biases."""
_WRAPPER_OR_INDEX = re.compile(r"\.(base_layer|original_module|token_adapter|\d+)(?=\.)")


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """The number of trainable and of all parameters, over all ranks.

    Tied parameters count once; quantized weights count as the weights they store.
    """
    trainable = total = 0
    packed = packed_parameters(model)
    for parameter in model.parameters():
        if id(parameter) not in packed:
            total += parameter.numel()
            trainable += parameter.numel() if parameter.requires_grad else 0
    return trainable, total + packed_weights(model)


def summary(model: nn.Module) -> str:
    """The counts in the format of PEFT's `print_trainable_parameters`."""
    trainable, total = count_parameters(model)
    share = 100 * trainable / total if total else 0.0
    return f"trainable params: {trainable:,d} || all params: {total:,d} || trainable%: {share:.4f}"


def bytes_by_kind(model: nn.Module) -> tuple[int, Counter[str]]:
    """Bytes of quantized weights, and bytes of dense parameters by kind, over all ranks; without trained adapters."""
    packed, quantized, dense = packed_parameters(model), 0, Counter[str]()
    adapted = hasattr(model, "peft_config")
    tables = {id(weight): kind for kind, weight in _tables(model)}
    for name, p in model.named_parameters():
        count = p.numel() * p.element_size()
        if id(p) in packed:
            quantized += count
        elif not (adapted and p.requires_grad):
            dense[tables.get(id(p)) or _kind(name, p)] += count
    return quantized, dense


def _tables(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The weights of output head and embedding; a tied weight counts as the embedding."""
    tables = []
    for kind, get in (("head", "get_output_embeddings"), ("embedding", "get_input_embeddings")):
        layer: Any = getattr(model, get)() if hasattr(model, get) else None
        if (weight := getattr(plain_layer(layer), "weight", None)) is not None:
            tables.append((kind, weight))
    return tables


def _kind(name: str, p: torch.Tensor) -> str:
    if p.ndim < 2:
        return "norms and biases"
    return ".".join(_WRAPPER_OR_INDEX.sub("", name).split(".")[-3:])


def dense_line(model: nn.Module) -> str | None:
    """One line on which weights are quantized and which stay dense; None for a model without quantized weights."""
    weights = packed_weights(model)
    if not weights:
        return None
    quantized, dense = bytes_by_kind(model)
    kind = "4 bits" if quantized_format(model) == "4-bit" else quantized_format(model)
    usual = [kind for kind in ("embedding", "head", "norms and biases") if kind in dense]
    others = [kind for kind, _ in dense.most_common() if kind not in usual]
    listed = [f"{kind} {memory_size(dense[kind])}" for kind in (*usual, *others[:LISTED])]
    if rest := others[LISTED:]:
        listed.append(f"{len(rest)} other kinds {memory_size(sum(dense[kind] for kind in rest))}")
    return (
        f"{kind}: {weights:,} weights in {memory_size(quantized)}; dense: {memory_size(dense.total())}"
        f"{' (' + ', '.join(listed) + ')' if listed else ''}"
    )
