"""The arithmetic of a gated MLP with adapters: `down(activation(gate(x)) * up(x))`.

The products with frozen weights stay products of their own; all that lies between them is one pass (Triton on GPUs,
`gated_mlp_kernels.py`). Backward needs `x`, the products with the gate and up weights, and the rank-sized activations:
everything else is computed again on the way.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from fullshard.device import accelerator
from fullshard.lora import fused_math
from fullshard.lora.fused_dropout import Dropout
from fullshard.lora.fused_math import Layer
from fullshard.quant import base_product


class Branches(NamedTuple):
    """The layers up to the product of the branches: gate, up, the activation function by its name in `ACTIVATIONS`, and
    `a` of the down projection's adapter [rank, inner]."""

    gate: Layer
    up: Layer
    activation: str
    a_down: torch.Tensor


class Saved(NamedTuple):
    """What backward needs besides the layers."""

    x: torch.Tensor
    """[tokens, in]"""
    gate: torch.Tensor
    """The product with the frozen gate weight [tokens, inner], without the adapter's update; `up` likewise."""
    up: torch.Tensor
    h: torch.Tensor
    """The rank-sized activations of gate and up [tokens, 2·width]."""


class Dropouts(NamedTuple):
    """The dropout in front of gate and up, and that in front of down."""

    inputs: Dropout
    middle: Dropout


class Gradients(NamedTuple):
    """The gradients of the input and of the adapters."""

    x: torch.Tensor | None
    a: list[torch.Tensor]
    """Of gate, up, down."""
    b: list[torch.Tensor]
    """Of gate, up."""


def forward(x: torch.Tensor, mlp: Branches, dropouts: Dropouts | None) -> tuple[torch.Tensor, torch.Tensor, Saved]:
    """For `x` [tokens, in]: the product of the branches [tokens, inner], `h` of the down projection's adapter, and what
    backward needs."""
    a, width = fused_math.stacked([mlp.gate, mlp.up])
    h = x @ a.t() if dropouts is None else dropouts.inputs.product(x, a, width)
    ready = base_product.prepare([mlp.gate.form, mlp.up.form], x)
    gate, up = (base_product.product(one.form, one.base, ready, bias=one.bias) for one in (mlp.gate, mlp.up))
    middle, h_down = _between(gate, up, h, mlp, dropouts)
    return middle, h_down, Saved(x, gate, up, h)


def backward(
    d_middle: torch.Tensor, dh_down: torch.Tensor, saved: Saved, mlp: Branches, dropouts: Dropouts | None, wants_x: bool
) -> Gradients:
    """The gradients for those of the product, by way of the frozen down weight, and of `h` of the down projection."""
    x, gate, up, h = saved
    a, width = fused_math.stacked([mlp.gate, mlp.up])
    inputs = None if dropouts is None else dropouts.inputs
    d_gate, d_up, dh, middle = _between_backward(d_middle, gate, up, h, dh_down, mlp, dropouts)
    da_down = (
        dh_down.t() @ middle if dropouts is None else dropouts.middle.grad_weight(dh_down, middle, len(mlp.a_down))
    )
    del middle
    dx = None
    if wants_x:
        branches = (mlp.gate.form, mlp.gate.base, d_gate), (mlp.up.form, mlp.up.base, d_up)
        dx = fused_math.grad_x([base_product.Gradient(*one) for one in branches], dh, a, width, inputs)
    da = dh.t() @ x if inputs is None else inputs.grad_weight(dh, x, width)
    ranks = len(mlp.gate.a), len(mlp.up.a)
    dbs = [
        fused_math.scaled_product(d.t(), part[:, :rank], layer.scale)
        for d, part, rank, layer in zip((d_gate, d_up), h.split(width, 1), ranks, (mlp.gate, mlp.up), strict=True)
    ]
    return Gradients(dx, [da[: ranks[0]], da[width : width + ranks[1]], da_down], dbs)


def _between(
    gate: torch.Tensor, up: torch.Tensor, h: torch.Tensor, mlp: Branches, dropouts: Dropouts | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The product of the branches, and `h` of the down projection."""
    middle_dropout = None if dropouts is None else dropouts.middle
    if accelerator.runs_triton(gate.device):
        from fullshard.lora import gated_mlp_kernels

        return gated_mlp_kernels.forward(
            gate, up, h, mlp.gate.b.contiguous(), mlp.up.b.contiguous(), (mlp.gate.scale, mlp.up.scale),
            mlp.a_down.contiguous(), mlp.activation, *_drawn(middle_dropout),
        )  # fmt: skip
    activated, _ = ACTIVATIONS[mlp.activation](_branch(gate, h, mlp.gate, 0))
    middle = (activated * _branch(up, h, mlp.up, 1)).to(gate.dtype)
    a = mlp.a_down
    return middle, middle @ a.t() if middle_dropout is None else middle_dropout.product(middle, a, len(a))


def _between_backward(
    d_middle: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, h: torch.Tensor, dh_down: torch.Tensor,
    mlp: Branches, dropouts: Dropouts | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The gradients of gate and up and of their `h`, and the product of the branches."""
    middle_dropout = None if dropouts is None else dropouts.middle
    if accelerator.runs_triton(gate.device):
        from fullshard.lora import gated_mlp_kernels

        return gated_mlp_kernels.backward(
            d_middle, gate, up, h, mlp.gate.b.contiguous(), mlp.up.b.contiguous(), (mlp.gate.scale, mlp.up.scale),
            dh_down, mlp.a_down.contiguous(), mlp.activation, *_drawn(middle_dropout),
        )  # fmt: skip
    a, width = mlp.a_down, h.shape[1] // 2
    if middle_dropout is None:
        d_middle = d_middle.addmm(dh_down, a)
    else:
        d_middle = d_middle + middle_dropout.grad_input(dh_down, a, len(a))
    u = _branch(up, h, mlp.up, 1)
    activated, slope = ACTIVATIONS[mlp.activation](_branch(gate, h, mlp.gate, 0))
    d_gate, d_up = (d_middle * u * slope).to(gate.dtype), (d_middle * activated).to(gate.dtype)
    dh = torch.zeros_like(h)
    for i, (d, layer) in enumerate(((d_gate, mlp.gate), (d_up, mlp.up))):
        dh[:, i * width : i * width + len(layer.a)] = fused_math.scaled_product(d, layer.b, layer.scale)
    return d_gate, d_up, dh, (activated * u).to(gate.dtype)


def _drawn(dropout: Dropout | None) -> tuple[torch.Tensor | None, int, float]:
    return (None, 0, 1.0) if dropout is None else (dropout.seed, dropout.threshold, dropout.scale)


def _branch(product: torch.Tensor, h: torch.Tensor, layer: Layer, index: int) -> torch.Tensor:
    """The output of gate or up with the adapter's update, in a wide dtype."""
    wide, width = torch.promote_types(product.dtype, torch.float32), h.shape[1] // 2
    part = h[:, index * width : index * width + len(layer.a)].to(wide)
    return product.to(wide) + layer.scale * (part @ layer.b.t().to(wide))


def _silu(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    s = torch.sigmoid(x)
    return x * s, s * (1 + x * (1 - s))


def _gelu_tanh(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return F.gelu(x, approximate="tanh"), torch.ops.aten.gelu_backward(torch.ones_like(x), x, approximate="tanh")


def _gelu(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return F.gelu(x), torch.ops.aten.gelu_backward(torch.ones_like(x), x)


def _relu(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.relu(x), (x > 0).to(x.dtype)


def _relu2(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    positive = torch.relu(x)
    return positive * positive, 2 * positive


ACTIVATIONS = {"silu": _silu, "gelu_tanh": _gelu_tanh, "gelu": _gelu, "relu": _relu, "relu2": _relu2}
"""Activation functions by name: the value and the derivative."""
