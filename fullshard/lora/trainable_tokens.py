"""PEFT's trainable tokens: single rows of a frozen embedding or output head that are trained.

PEFT's layer copies the whole table in each forward pass and computes a gradient for all of it. Here the frozen layer
runs first and its output is overwritten for the trained rows, so neither a copy of the table nor its gradient is
needed. Modules, parameters and files are PEFT's.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn


class TrainedRows(NamedTuple):
    """Indices of trained rows and their values."""

    index: torch.Tensor
    values: torch.Tensor


def layer_of(module: Any) -> Any:
    """PEFT's layer around an embedding or head with trained rows; None for other modules."""
    return getattr(module, "token_adapter", None)


def plain_layer(module: Any) -> Any:
    """The embedding or head without PEFT's wrapper."""
    inner = layer_of(module)
    return module if inner is None else inner.base_layer


def active_rows(layer: Any, adapters: list[str] | None = None) -> TrainedRows | None:
    """The trained rows of the active adapters; None if there are none."""
    names = layer.active_adapters if adapters is None else adapters
    names = [] if layer.disable_adapters or layer.merged else [n for n in names if n in layer.trainable_tokens_delta]
    if not names:
        return None
    layer._check_overlapping_tokens(names)
    values = [layer.trainable_tokens_delta[name] for name in names]
    cache = layer.__dict__.setdefault("_fullshard_index", {})  # avoids a host-to-device copy in each forward
    if (key := (*names, values[0].device)) not in cache:
        indices = [index for name in names for index in layer.token_indices[name]]
        cache[key] = torch.tensor(indices, device=values[0].device)
    rows = values[0] if len(values) == 1 else torch.cat(values)
    return TrainedRows(cache[key], rows.to(layer.base_layer.weight.dtype))


def keep_tables_whole(model: nn.Module) -> None:
    """Replace the forward of all layers with trained rows by one that does not copy the table."""
    for module in model.modules():
        if (layer := layer_of(module)) is not None:
            layer.forward_adapters = functools.partial(_forward, layer)


def _forward(layer: Any, x: torch.Tensor, adapters: list[str], *args: Any, **kwargs: Any) -> torch.Tensor:
    rows = active_rows(layer, adapters)
    if rows is None:
        return type(layer).forward_adapters(layer, x, adapters, *args, **kwargs)
    result = layer.base_layer(x)
    if isinstance(layer.base_layer, nn.Linear):
        return put_over(result, x, rows)
    order = rows.index.argsort()
    index = rows.index[order]
    position = torch.searchsorted(index, x).clamp(max=len(index) - 1)
    vectors = F.embedding(order[position], rows.values)
    scale = layer._get_embed_scale()
    if scale is not None:
        vectors = vectors * scale.to(vectors.dtype)
    return torch.where((index[position] == x).unsqueeze(-1), vectors.to(result.dtype), result)


def put_over(result: torch.Tensor, x: torch.Tensor, rows: TrainedRows) -> torch.Tensor:
    """Overwrite the outputs of a linear layer for the trained rows."""
    return result.index_copy(-1, rows.index, F.linear(x, rows.values).to(result.dtype))
