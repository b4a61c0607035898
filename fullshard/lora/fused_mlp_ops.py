"""A gated MLP with LoRA as one operator with its own backward. The arithmetic is in `fused_mlp.py`.

As in `fused_ops.py`, `torch.compile` uses a custom operator and plain tensors an autograd function.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fullshard.lora import fused_mlp
from fullshard.lora.fused_math import Gradients, Layer
from fullshard.lora.fused_mlp import Saved
from fullshard.lora.fused_ops import dropout_of, put_together, rows_of, split, taken_apart, without_sharing
from fullshard.quant import base_product
from fullshard.quant.ops import without_autocast


def gated_mlp(
    x: torch.Tensor, layers: Sequence[Layer], activation: str, seed: torch.Tensor | None, probability: float
) -> torch.Tensor:
    """`down(f(gate(x)) · up(x))` for the layers gate, up and down. Without a seed there is no dropout."""
    layout, base, a, b, scales = taken_apart(layers)
    if torch.compiler.is_compiling():
        return gated_mlp_operator(x, base, a, b, seed, layout, scales, probability, activation)[0]
    about = layout, scales, probability, activation
    found: torch.Tensor = _Mlp.apply(about, len(base), seed, x, *base, *a, *b)
    return found


def _forward(
    x: torch.Tensor, layers: Sequence[Layer], seed: torch.Tensor | None, probability: float, activation: str
) -> tuple[torch.Tensor, Saved]:
    with without_autocast(x.device):
        y, saved = fused_mlp.forward(rows_of(x), layers, activation, dropout_of(seed, probability))
    return y.view(*x.shape[:-1], y.shape[-1]), saved


def _backward(
    x: torch.Tensor, saved: Saved, dy: torch.Tensor, layers: Sequence[Layer], seed: torch.Tensor | None,
    probability: float, activation: str, wants_x: bool,
) -> Gradients:  # fmt: skip
    dropout, rows = dropout_of(seed, probability), rows_of(dy)
    with without_autocast(x.device):
        found = fused_mlp.backward(rows_of(x), saved, rows, layers, activation, dropout, wants_x)
    return found._replace(x=None if found.x is None else found.x.view(x.shape))


class _Mlp(torch.autograd.Function):
    """`gated_mlp` for plain tensors."""

    @staticmethod
    def forward(ctx, about, count, seed, x, *tensors):  # type: ignore[no-untyped-def]
        layout, scales, probability, activation = about
        y, saved = _forward(x, put_together(layout, *split(count, tensors), scales), seed, probability, activation)
        ctx.save_for_backward(seed, x, *saved, *tensors)
        ctx.about = about, count
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        (layout, scales, probability, activation), count = ctx.about
        seed, x, *others = ctx.saved_tensors
        kept = len(Saved._fields)
        layers = put_together(layout, *split(count, others[kept:]), scales)
        found = _backward(x, Saved(*others[:kept]), dy, layers, seed, probability, activation, ctx.needs_input_grad[3])
        return None, None, None, found.x, *[None] * count, *found.a, *found.b


@torch.library.custom_op("fullshard::gated_lora_mlp", mutates_args=())
def gated_mlp_operator(
    x: torch.Tensor, base: Sequence[torch.Tensor], a: Sequence[torch.Tensor], b: Sequence[torch.Tensor],
    seed: torch.Tensor | None, layout: str, scales: Sequence[float], probability: float, activation: str,
) -> list[torch.Tensor]:  # fmt: skip
    """The output, and what backward needs."""
    y, saved = _forward(x, put_together(layout, base, a, b, scales), seed, probability, activation)
    return [y, *saved]


@gated_mlp_operator.register_fake
def _(x, base, a, b, seed, layout, scales, probability, activation):  # type: ignore[no-untyped-def]
    gate, up, down = put_together(layout, base, a, b, scales)
    wide, out = (base_product.shape(layer.form, layer.base)[0] for layer in (gate, down))
    tokens, width = x.numel() // x.shape[-1], max(len(gate.a), len(up.a))
    saved = [x.new_empty(tokens, size) for size in (wide, wide, 2 * width, len(down.a))]
    return [x.new_empty(*x.shape[:-1], out), *saved]


@torch.library.custom_op("fullshard::gated_lora_mlp_backward", mutates_args=())
def gated_mlp_backward(
    x: torch.Tensor, saved: Sequence[torch.Tensor], dy: torch.Tensor, base: Sequence[torch.Tensor],
    a: Sequence[torch.Tensor], b: Sequence[torch.Tensor], seed: torch.Tensor | None, layout: str,
    scales: Sequence[float], probability: float, activation: str, wants_x: bool,
) -> list[torch.Tensor]:  # fmt: skip
    """The gradients of `x`, if wanted, of all `a` and of all `b`."""
    layers = put_together(layout, base, a, b, scales)
    found = _backward(x, Saved(*saved), dy, layers, seed, probability, activation, wants_x)
    return [*([] if found.x is None else [found.x]), *without_sharing(found.a), *found.b]


@gated_mlp_backward.register_fake
def _(x, saved, dy, base, a, b, seed, layout, scales, probability, activation, wants_x):  # type: ignore[no-untyped-def]
    return [*([x.new_empty(x.shape)] if wants_x else []), *(t.new_empty(t.shape) for t in (*a, *b))]


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    x, base, a, b, seed, *ctx.about = inputs
    ctx.count = len(base)
    ctx.save_for_backward(seed, x, *output[1:], *base, *a, *b)
    ctx.set_materialize_grads(False)


def _operator_backward(ctx: Any, grads: Sequence[torch.Tensor | None]) -> tuple[Any, ...]:
    seed, x, *others = ctx.saved_tensors
    kept, wants = len(Saved._fields), ctx.needs_input_grad[0]
    base, a, b = split(ctx.count, others[kept:])
    if grads[0] is None:
        return None, [None] * len(base), [None] * len(a), [None] * len(b), *[None] * 5
    found = gated_mlp_backward(x, others[:kept], grads[0], base, a, b, seed, *ctx.about, wants)
    dx, found = (found[0], found[1:]) if wants else (None, found)
    return dx, [None] * len(base), found[: len(a)], found[len(a) :], *[None] * 5


gated_mlp_operator.register_autograd(_operator_backward, setup_context=_keep)
