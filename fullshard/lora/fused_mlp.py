"""The arithmetic of a gated MLP with LoRA on its three layers: `down(f(gate(x)) · up(x))`.

The wide activations are read and written once: the pass that computes `f(gate) · up` adds the updates of gate and up on
its way in and gives the input of down's adapter on its way out; the pass back does the same with their gradients. Kept
for backward are `x` and the products of the frozen gate and up weights; what lies between is recomputed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from fullshard import accelerator
from fullshard.lora.fused_dropout import Dropout
from fullshard.lora.fused_math import Gradients, InnerGradients, Layer, Middle, grad_b, stacked
from fullshard.quant import base_product

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": lambda t: F.gelu(t, approximate="tanh"),
    "gelu": F.gelu,
}
_GRADIENTS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    # Autograd does not record inside an operator.
    "silu": torch.ops.aten.silu_backward,
    "gelu_tanh": functools.partial(torch.ops.aten.gelu_backward, approximate="tanh"),
    "gelu": torch.ops.aten.gelu_backward,
}
LARGEST_RANK = 128
"""Above it the kernels would not have enough registers."""


class Saved(NamedTuple):
    """What forward keeps for backward beside its inputs."""

    gate: torch.Tensor
    """[tokens, intermediate]: the product of the frozen weight."""
    up: torch.Tensor
    h: torch.Tensor
    h_down: torch.Tensor
    """[tokens, rank]"""


def forward(
    x: torch.Tensor, layers: Sequence[Layer], activation: str, dropout: Dropout | None
) -> tuple[torch.Tensor, Saved]:
    """The output [tokens, out] for `x` [tokens, in]."""
    gate, up, down = layers
    a, width = stacked((gate, up))
    h = x @ a.t() if dropout is None else dropout.product(x, a, width)
    products = [base_product.product(layer.form, layer.base, x, bias=layer.bias) for layer in (gate, up)]
    middle = Middle(gate, up, down, h, width, activation, _third(dropout))
    inner, h_down = _inner(middle, *products)
    y = base_product.product(down.form, down.base, inner, bias=down.bias)
    y.addmm_(h_down, down.b.t(), alpha=down.scale)
    return y, Saved(*products, h, h_down)


def backward(
    x: torch.Tensor, saved: Saved, dy: torch.Tensor, layers: Sequence[Layer], activation: str,
    dropout: Dropout | None, wants_x: bool,
) -> Gradients:  # fmt: skip
    """The gradients of the input and of all adapters."""
    gate, up, down = layers
    a, width = stacked((gate, up))
    dh_down = torch.mm(dy, down.b).mul_(down.scale)
    db_down = grad_b(dy, saved.h_down, down.scale)
    dinner = base_product.grad_input(down.form, down.base, dy)
    middle = Middle(gate, up, down, saved.h, width, activation, _third(dropout))
    found = _inner_backward(middle, saved, dinner, dh_down)
    dx = None
    if wants_x:
        dx = base_product.grad_input(gate.form, gate.base, found.gate)
        dx = base_product.grad_input(up.form, up.base, found.up, out=dx, accumulate=True)
        dx = dx.addmm_(found.h, a) if dropout is None else dropout.add_grad_input(dx, found.h, a, width)
    da = found.h.t() @ x if dropout is None else dropout.grad_weight(found.h, x, width)
    das = [da[i * width : i * width + layer.a.shape[0]] for i, layer in enumerate((gate, up))]
    return Gradients(dx, [*das, found.a_down], [found.b_gate, found.b_up, db_down])


def _third(dropout: Dropout | None) -> Dropout | None:
    """The dropout of down's adapter, the third."""
    return None if dropout is None else dropout._replace(first=2)


def _inner(middle: Middle, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The input of down, and that of its B."""
    if accelerator.is_accelerator(gate.device):
        from fullshard.lora import fused_mlp_kernels

        return fused_mlp_kernels.inner(middle, gate, up)
    g, u = middle.branches(gate, up)
    inner, a = ACTIVATIONS[middle.activation](g) * u, middle.down.a
    return inner, inner @ a.t() if middle.dropout is None else middle.dropout.product(inner, a, len(a))


def _inner_backward(middle: Middle, saved: Saved, dinner: torch.Tensor, dh_down: torch.Tensor) -> InnerGradients:
    """The pass back; `dinner` [tokens, intermediate] is the gradient through down's frozen weight, and is changed."""
    if accelerator.is_accelerator(dinner.device):
        from fullshard.lora import fused_mlp_kernels

        return fused_mlp_kernels.inner_backward(middle, saved.gate, saved.up, dinner, dh_down)
    gate, up, a, dropout = middle.gate, middle.up, middle.down.a, middle.dropout
    g, u = middle.branches(saved.gate, saved.up)
    if dropout is None:
        dinner.addmm_(dh_down, a)
    else:
        dropout.add_grad_input(dinner, dh_down, a, len(a))
    value, dg = ACTIVATIONS[middle.activation](g), _GRADIENTS[middle.activation](dinner * u, g)
    du, inner = dinner * value, value * u
    da = dh_down.t() @ inner if dropout is None else dropout.grad_weight(dh_down, inner, len(a))
    dh, dbs = torch.zeros_like(middle.h), []
    for i, (layer, grad) in enumerate(((gate, dg), (up, du))):
        columns = slice(i * middle.width, i * middle.width + layer.a.shape[0])
        dh[:, columns] = (grad @ layer.b) * layer.scale
        dbs.append(grad_b(grad, middle.h[:, columns], layer.scale))
    return InnerGradients(dg, du, dh, dbs[0], dbs[1], da)
