"""Floating-point operations of operators: matrix products and attention. Everything else is limited by memory.

Attention is counted over the pairs of tokens that kernels compute: half of them if it is causal. Documents that are
packed into a row, and attention windows, make it less.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# Registers its operators.
from fullshard.models import kernels_on_meta  # noqa: F401

aten = torch.ops.aten
BACKWARD = 2.5
"""Products of attention's backward, as a multiple of those of its forward: five instead of two."""


def product(a: torch.Tensor, b: torch.Tensor, *_: Any) -> int:
    """`a @ b`, for single matrices, batches and groups of them."""
    return 2 * a.numel() * b.shape[-1]


def added(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *_: Any) -> int:
    """`total + a @ b`."""
    return product(a, b)


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool) -> int:
    """The scores, and their product with the values."""
    pairs = query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2]
    return 2 * pairs * (query.shape[3] + value.shape[3]) // (2 if causal else 1)


def _forward(place: int | None) -> Callable[..., int]:
    """Attention whose argument at `place` tells whether it is causal; None if it always is."""
    return lambda *args: attention(args[0], args[1], args[2], _is_causal(args, place))


def _backward(place: int | None) -> Callable[..., int]:
    """The same behind the gradient of the output."""
    return lambda *args: int(BACKWARD * attention(args[1], args[2], args[3], _is_causal(args, place)))


def _is_causal(args: Any, place: int | None) -> bool:
    return place is None or (place < len(args) and bool(args[place]))


FLOPS: dict[Any, Callable[..., int]] = {
    **{getattr(aten, name): product for name in ("mm", "bmm", "_scaled_mm", "_grouped_mm") if hasattr(aten, name)},
    **{getattr(aten, name): added for name in ("addmm", "addmm_", "baddbmm", "baddbmm_")},
    aten._scaled_dot_product_flash_attention: _forward(4),
    aten._scaled_dot_product_flash_attention_backward: _backward(11),
    aten._scaled_dot_product_flash_attention_for_cpu: _forward(4),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _backward(7),
    aten._scaled_dot_product_efficient_attention: _forward(6),
    aten._scaled_dot_product_efficient_attention_backward: _backward(11),
    torch.ops.fullshard.flex_attention_on_meta: _forward(None),
    torch.ops.fullshard.flex_attention_on_meta_backward: _backward(None),
}
"""By operator, a function of its positional arguments."""
