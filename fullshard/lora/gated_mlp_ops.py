"""A gated MLP with adapters as two operators with their own backward; see `gated_mlp_math.py`.

One goes up to the product of the branches, the other is the down projection, which keeps nothing of that product. They
are two because a checkpointed layer does not need the down projection again: the compiler leaves it out where it
recomputes. As in `fused_ops.py`: custom operators where `torch.compile` traces, autograd functions for plain tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fullshard.lora import gated_mlp_math as arithmetic
from fullshard.lora.fused_dropout import Dropout
from fullshard.lora.fused_math import Layer, scaled_product, updated
from fullshard.lora.fused_ops import Tensors, as_rows, flat, layers_of
from fullshard.lora.gated_mlp_math import Branches, Dropouts, Saved
from fullshard.quant import base_product
from fullshard.quant.ops import without_autocast


class GatedMlp(NamedTuple):
    """The three layers, and the activation function by its name in `ACTIVATIONS`."""

    gate: Layer
    up: Layer
    down: Layer
    activation: str


def gated_mlp(x: torch.Tensor, mlp: GatedMlp, seeds: torch.Tensor | None, probability: float) -> torch.Tensor:
    """The output of the MLP. `seeds` are two: for the dropout in front of gate and up, and of down. Without them there
    is no dropout."""
    layout, base, a, b, scales = flat([mlp.gate, mlp.up])
    about = layout, scales, mlp.activation, probability
    tensors = [*base, *a, mlp.down.a, *b]
    down, down_base, _, _, down_scales = flat([mlp.down])
    if torch.compiler.is_compiling():
        middle, h, *_ = gated_branches(x, tensors, seeds, *about)
        return down_product(middle, h, down_base, mlp.down.b, down, *down_scales)
    middle, h = _Branches.apply(about, seeds, x, *tensors)
    found: torch.Tensor = _Down.apply(middle, h, mlp.down.b, down, *down_scales, *down_base)
    return found


# --- up to the product of the branches --------------------------------------------------------------------------------

ADAPTERS = 5
"""`a` of gate, up and down, `b` of gate and up: the last of the operators' tensors, behind the frozen ones."""


def _branches(tensors: Tensors, layout: str, scales: Sequence[float], activation: str) -> Branches:
    base, (a_gate, a_up, a_down, *b) = tensors[:-ADAPTERS], tensors[-ADAPTERS:]
    gate, up = layers_of(layout, base, [a_gate, a_up], b, scales)
    return Branches(gate, up, activation, a_down)


def _dropouts(seeds: torch.Tensor | None, probability: float) -> Dropouts | None:
    return None if seeds is None else Dropouts(*(Dropout(seed, probability) for seed in seeds.split(1)))


def _forward(x: torch.Tensor, tensors: Tensors, seeds: torch.Tensor | None, about: Any) -> list[torch.Tensor]:
    """The product of the branches, `h` of the down projection, and what backward needs besides `x`."""
    *layers, probability = about
    with without_autocast(x.device):
        mlp = _branches(tensors, *layers)
        middle, h_down, saved = arithmetic.forward(as_rows(x), mlp, _dropouts(seeds, probability))
    return [middle.view(*x.shape[:-1], middle.shape[-1]), h_down, *saved[1:]]


def _backward(
    d_middle: torch.Tensor, dh_down: torch.Tensor, x: torch.Tensor, kept: Tensors, tensors: Tensors,
    seeds: torch.Tensor | None, about: Any, wants_x: bool,
) -> list[torch.Tensor]:  # fmt: skip
    """The gradients of `x`, if wanted, and of the adapters."""
    *layers, probability = about
    with without_autocast(x.device):
        saved = Saved(as_rows(x), *kept)
        found = arithmetic.backward(
            as_rows(d_middle), dh_down, saved, _branches(tensors, *layers), _dropouts(seeds, probability), wants_x
        )
    return [*([] if found.x is None else [found.x.view(x.shape)]), *found.a, *found.b]


class _Branches(torch.autograd.Function):
    """The branches of plain tensors."""

    @staticmethod
    def forward(ctx, about, seeds, x, *tensors):  # type: ignore[no-untyped-def]
        middle, h_down, *kept = _forward(x, tensors, seeds, about)
        ctx.save_for_backward(seeds, x, *kept, *tensors)
        ctx.about = about
        return middle, h_down

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, d_middle: torch.Tensor, dh_down: torch.Tensor) -> tuple[Any, ...]:
        seeds, x, *rest = ctx.saved_tensors
        kept, tensors = rest[:3], rest[3:]
        wants_x = ctx.needs_input_grad[2]
        found = _backward(d_middle, dh_down, x, kept, tensors, seeds, ctx.about, wants_x)
        dx, found = (found[0], found[1:]) if wants_x else (None, found)
        return None, None, dx, *[None] * (len(tensors) - ADAPTERS), *found


@torch.library.custom_op("fullshard::gated_branches", mutates_args=())
def gated_branches(
    x: torch.Tensor, tensors: Sequence[torch.Tensor], seeds: torch.Tensor | None, layout: str, scales: Sequence[float],
    activation: str, probability: float,
) -> list[torch.Tensor]:  # fmt: skip
    """The product of the branches, `h` of the down projection, and what backward needs besides `x`."""
    return _forward(x, tensors, seeds, (layout, scales, activation, probability))


@gated_branches.register_fake
def _(x, tensors, seeds, layout, scales, activation, probability):  # type: ignore[no-untyped-def]
    mlp = _branches(tensors, layout, scales, activation)
    tokens, inner = x.numel() // x.shape[-1], base_product.shape(mlp.gate.form, mlp.gate.base)[0]
    width = max(len(mlp.gate.a), len(mlp.up.a))
    sizes = len(mlp.a_down), inner, inner, 2 * width
    return [x.new_empty(*x.shape[:-1], inner), *(x.new_empty(tokens, size) for size in sizes)]


@torch.library.custom_op("fullshard::gated_branches_backward", mutates_args=())
def gated_branches_backward(
    d_middle: torch.Tensor, dh_down: torch.Tensor, x: torch.Tensor, kept: Sequence[torch.Tensor],
    tensors: Sequence[torch.Tensor], seeds: torch.Tensor | None, layout: str, scales: Sequence[float], activation: str,
    probability: float, wants_x: bool,
) -> list[torch.Tensor]:  # fmt: skip
    """The gradients of `x`, if wanted, and of the adapters."""
    about = layout, scales, activation, probability
    found = _backward(d_middle, dh_down, x, kept, tensors, seeds, about, wants_x)
    first = int(wants_x)  # results of an operator must not share memory: those of gate and up are rows of one tensor
    return [one.clone() if first <= i < first + 2 else one for i, one in enumerate(found)]


@gated_branches_backward.register_fake
def _(d_middle, dh_down, x, kept, tensors, seeds, layout, scales, activation, probability, wants_x):  # type: ignore[no-untyped-def]
    return [t.new_empty(t.shape) for t in (*([x] if wants_x else []), *tensors[-ADAPTERS:])]


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    x, tensors, seeds, *ctx.about = inputs
    ctx.save_for_backward(seeds, x, *output[2:], *tensors)


def _branches_backward(ctx: Any, grads: Sequence[Any]) -> tuple[Any, ...]:
    seeds, x, *rest = ctx.saved_tensors
    kept, tensors = rest[:3], rest[3:]
    wants_x = ctx.needs_input_grad[0]
    found = gated_branches_backward(grads[0], grads[1], x, kept, tensors, seeds, *ctx.about, wants_x)
    dx, found = (found[0], found[1:]) if wants_x else (None, found)
    return dx, [*[None] * (len(tensors) - ADAPTERS), *found], None, None, None, None, None


gated_branches.register_autograd(_branches_backward, setup_context=_keep)


# --- the down projection ----------------------------------------------------------------------------------------------


def _down(layout: str, base: Tensors, b: torch.Tensor, scale: float) -> Layer:
    (layer,) = layers_of(layout, base, [b], [b], [scale])  # `a` has been used already
    return layer


def _down_forward(x: torch.Tensor, h: torch.Tensor, layer: Layer) -> torch.Tensor:
    with without_autocast(x.device):
        y = updated(base_product.prepare([layer.form], as_rows(x)), layer, h)
    return y.view(*x.shape[:-1], y.shape[-1])


def _down_backward(dy: torch.Tensor, h: torch.Tensor, layer: Layer) -> list[torch.Tensor]:
    """The gradients of the input by way of the frozen weight, of `h`, and of `b`."""
    with without_autocast(dy.device):
        rows = as_rows(dy)
        dx = base_product.grad_input(layer.form, layer.base, rows)
        dh, db = scaled_product(rows, layer.b, layer.scale), scaled_product(rows.t(), h, layer.scale)
    return [dx.view(*dy.shape[:-1], dx.shape[-1]), dh, db]


class _Down(torch.autograd.Function):
    """The down projection of plain tensors."""

    @staticmethod
    def forward(ctx, x, h, b, layout, scale, *base):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(h, b, *base)
        ctx.about = layout, scale
        return _down_forward(x, h, _down(layout, base, b, scale))

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        h, b, *base = ctx.saved_tensors
        layout, scale = ctx.about
        return *_down_backward(dy, h, _down(layout, base, b, scale)), None, None, *[None] * len(base)


@torch.library.custom_op("fullshard::down_product", mutates_args=())
def down_product(
    x: torch.Tensor, h: torch.Tensor, base: Sequence[torch.Tensor], b: torch.Tensor, layout: str, scale: float
) -> torch.Tensor:
    """The output of a layer whose adapter's rank-sized activations are known."""
    return _down_forward(x, h, _down(layout, base, b, scale))


@down_product.register_fake
def _(x, h, base, b, layout, scale):  # type: ignore[no-untyped-def]
    layer = _down(layout, base, b, scale)
    return x.new_empty(*x.shape[:-1], base_product.shape(layer.form, layer.base)[0])


@torch.library.custom_op("fullshard::down_product_backward", mutates_args=())
def down_product_backward(
    dy: torch.Tensor, h: torch.Tensor, base: Sequence[torch.Tensor], b: torch.Tensor, layout: str, scale: float
) -> list[torch.Tensor]:
    """The gradients of the input by way of the frozen weight, of `h`, and of `b`."""
    return _down_backward(dy, h, _down(layout, base, b, scale))


@down_product_backward.register_fake
def _(dy, h, base, b, layout, scale):  # type: ignore[no-untyped-def]
    layer = _down(layout, base, b, scale)
    inner = base_product.shape(layer.form, layer.base)[1]
    return [dy.new_empty(*dy.shape[:-1], inner), h.new_empty(h.shape), b.new_empty(b.shape)]


def _keep_down(ctx: Any, inputs: Any, output: Any) -> None:
    _, h, base, b, *ctx.about = inputs
    ctx.save_for_backward(h, b, *base)


def _down_product_backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    h, b, *base = ctx.saved_tensors
    dx, dh, db = down_product_backward(dy, h, base, b, *ctx.about)
    return dx, dh, [None] * len(base), db, None, None


down_product.register_autograd(_down_product_backward, setup_context=_keep_down)
