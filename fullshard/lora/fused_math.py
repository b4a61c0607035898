"""The arithmetic of a LoRA group: linear layers with adapters that get the same input.

    y_i = x @ W_iᵀ + bias_i + scale_i · h_i @ B_iᵀ,    h_i = dropout_i(x) @ A_iᵀ

Forward reads `x` once for all adapters and adds the product of each frozen weight in place to the update. Backward
needs `x` and `h`; the gradient of `x` is summed in place in the same order, and frozen weights get none. `h` has the
columns of all adapters side by side, as many for each as the largest rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from fullshard.lora.fused_dropout import Dropout
from fullshard.quant import base_product


class Layer(NamedTuple):
    """A linear layer of a group."""

    form: str
    """How the frozen weight is stored; see `quant/base_product.py`."""
    base: Sequence[torch.Tensor]
    bias: torch.Tensor | None
    a: torch.Tensor
    """[rank, in]"""
    b: torch.Tensor
    """[out, rank]"""
    scale: float


class Gradients(NamedTuple):
    """The gradients of a group; None where not asked for."""

    x: torch.Tensor | None
    a: list[torch.Tensor]
    b: list[torch.Tensor]


def forward(
    x: torch.Tensor, layers: Sequence[Layer], dropout: Dropout | None
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The outputs [tokens, out] of all layers, and `h`, for `x` [tokens, in]."""
    a, width = stack_a(layers)
    h = x @ a.t() if dropout is None else dropout.product(x, a, width)  # [tokens, layers·width]
    ready = base_product.prepare([layer.form for layer in layers], x)
    return [layer_output(ready, layer, part) for layer, part in zip(layers, _columns(h, width, layers), strict=True)], h


def layer_output(x: base_product.Prepared, layer: Layer, h: torch.Tensor) -> torch.Tensor:
    """The output of a layer. The adapter's update comes first and the product of the frozen weight is added in place:
    the large product then reads the output while it computes, which is faster than a pass of its own for the update."""
    b = layer.b.t()
    if not base_product.adds_in_place(layer.form):
        return base_product.product(layer.form, layer.base, x, bias=layer.bias).addmm_(h, b, alpha=layer.scale)
    if layer.bias is None:
        y = scaled_product(h, b, layer.scale)
    else:
        y = torch.addmm(layer.bias, h, b, alpha=layer.scale)
    return base_product.product(layer.form, layer.base, x, out=y, accumulate=True)


def backward(
    x: torch.Tensor,
    h: torch.Tensor,
    dys: Sequence[torch.Tensor | None],
    layers: Sequence[Layer],
    dropout: Dropout | None,
    wants_x: bool,
    wants_adapters: bool,
) -> Gradients:
    """The gradients for those of the outputs, which are None where an output was not used."""
    a, width = stack_a(layers)
    used = [(i, layer, dy) for i, (layer, dy) in enumerate(zip(layers, dys, strict=True)) if dy is not None]
    filled = len(used) == len(layers) and all(len(layer.a) == width for layer in layers)
    dh = torch.empty_like(h) if filled else torch.zeros_like(h)
    parts = _columns(dh, width, layers)
    for i, layer, dy in used:
        torch.addmm(parts[i], dy, layer.b, beta=0, alpha=layer.scale, out=parts[i])
    dx = None
    if wants_x:
        products = [base_product.Gradient(layer.form, layer.base, dy) for _, layer, dy in used]
        dx = grad_x(products, dh, a, width, dropout)
    if not wants_adapters:
        return Gradients(dx, [], [])
    da = dh.t() @ x if dropout is None else dropout.grad_weight(dh, x, width)
    das = [one[: len(layer.a)] for one, layer in zip(da.split(width), layers, strict=True)] if len(layers) > 1 else [da]
    dbs = [
        torch.zeros_like(layer.b) if dy is None else scaled_product(dy.t(), part, layer.scale)
        for layer, dy, part in zip(layers, dys, _columns(h, width, layers), strict=True)
    ]
    return Gradients(dx, das, dbs)


def grad_x(
    products: Sequence[base_product.Gradient], dh: torch.Tensor, a: torch.Tensor, width: int, dropout: Dropout | None
) -> torch.Tensor:
    """The gradient of the input: the part of the adapters, to which the products are added as in `layer_output`."""
    if not all(base_product.adds_in_place(one.form) for one in products):
        dx = base_product.grad_input_sum(products, adapters=(dh, a) if dropout is None else None)
        return dx if dropout is None else dropout.grad_input(dh, a, width, dx)
    dx = dh @ a if dropout is None else dropout.grad_input(dh, a, width)
    return base_product.grad_input_sum(products, dx)


def scaled_product(one: torch.Tensor, other: torch.Tensor, scale: float) -> torch.Tensor:
    """`scale · one @ other`."""
    out = one.new_empty(one.shape[0], other.shape[1])
    return torch.addmm(out, one, other, beta=0, alpha=scale, out=out)


def stack_a(layers: Sequence[Layer]) -> tuple[torch.Tensor, int]:
    """The matrices A below each other, padded to the same number of rows, and that number."""
    width = max(layer.a.shape[0] for layer in layers)
    if len(layers) == 1:
        return layers[0].a, width
    rows = [layer.a if len(layer.a) == width else F.pad(layer.a, (0, 0, 0, width - len(layer.a))) for layer in layers]
    return torch.cat(rows), width


def _columns(h: torch.Tensor, width: int, layers: Sequence[Layer]) -> Sequence[torch.Tensor]:
    """The columns of each adapter."""
    if len(layers) == 1:
        return (h,)
    parts = h.split(width, 1)
    return [
        part if len(layer.a) == width else part[:, : len(layer.a)] for part, layer in zip(parts, layers, strict=True)
    ]
