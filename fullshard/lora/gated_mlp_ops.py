"""A gated MLP with adapters as one operator with its own backward; see `gated_mlp_math.py`.

As in `fused_ops.py`: a custom operator where `torch.compile` traces, an autograd function for plain tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fullshard.lora import gated_mlp_math as arithmetic
from fullshard.lora.fused_dropout import Dropout
from fullshard.lora.fused_ops import Tensors, as_rows, flat, layers_of
from fullshard.lora.gated_mlp_math import Dropouts, GatedMlp, Saved
from fullshard.quant import base_product
from fullshard.quant.ops import without_autocast


def gated_mlp(x: torch.Tensor, mlp: GatedMlp, seeds: torch.Tensor | None, probability: float) -> torch.Tensor:
    """The output of the MLP. `seeds` are two: for the dropout in front of gate and up, and of down. Without them there
    is no dropout."""
    layout, base, a, b, scales = flat([mlp.gate, mlp.up, mlp.down])
    if torch.compiler.is_compiling():
        return gated_mlp_operator(x, base, a, b, seeds, layout, scales, mlp.activation, probability)[0]
    about = layout, scales, mlp.activation, probability
    found: torch.Tensor = _GatedMlp.apply(about, len(base), seeds, x, *base, *a, *b)
    return found


def _dropouts(seeds: torch.Tensor | None, probability: float) -> Dropouts | None:
    return None if seeds is None else Dropouts(*(Dropout(seed, probability) for seed in seeds.split(1)))


def _mlp(tensors: Sequence[Tensors], layout: str, scales: Sequence[float], activation: str) -> GatedMlp:
    base, a, b = tensors
    gate, up, down = layers_of(layout, base, a, b, scales)
    return GatedMlp(gate, up, down, activation)


def _run(x: torch.Tensor, tensors: Sequence[Tensors], seeds: torch.Tensor | None, about: Any) -> tuple[Any, Saved]:
    layout, scales, activation, probability = about
    with without_autocast(x.device):
        mlp = _mlp(tensors, layout, scales, activation)
        y, saved = arithmetic.forward(as_rows(x), mlp, _dropouts(seeds, probability))
    return y.view(*x.shape[:-1], y.shape[-1]), saved


def _run_backward(
    dy: torch.Tensor, x: torch.Tensor, kept: Tensors, tensors: Sequence[Tensors], seeds: torch.Tensor | None,
    about: Any, wants_x: bool,
) -> list[torch.Tensor]:  # fmt: skip
    """The gradients of `x`, if wanted, of all `a` and of all `b`."""
    layout, scales, activation, probability = about
    with without_autocast(x.device):
        mlp = _mlp(tensors, layout, scales, activation)
        saved = Saved(as_rows(x), *kept)
        found = arithmetic.backward(as_rows(dy), saved, mlp, _dropouts(seeds, probability), wants_x)
    return [*([] if found.x is None else [found.x.view(x.shape)]), *found.a, *found.b]


class _GatedMlp(torch.autograd.Function):
    """`gated_mlp` for plain tensors."""

    @staticmethod
    def forward(ctx, about, count, seeds, x, *tensors):  # type: ignore[no-untyped-def]
        y, saved = _run(x, _split(count, tensors), seeds, about)
        ctx.save_for_backward(seeds, x, *saved[1:], *tensors)
        ctx.about, ctx.count = about, count
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        seeds, x, *rest = ctx.saved_tensors
        kept, tensors = rest[:4], rest[4:]
        wants_x = ctx.needs_input_grad[3]
        found = _run_backward(dy, x, kept, _split(ctx.count, tensors), seeds, ctx.about, wants_x)
        dx, found = (found[0], found[1:]) if wants_x else (None, found)
        return None, None, None, dx, *[None] * ctx.count, *found


def _split(count: int, tensors: Tensors) -> tuple[Tensors, Tensors, Tensors]:
    return tensors[:count], tensors[count:-3], tensors[-3:]


@torch.library.custom_op("fullshard::gated_mlp", mutates_args=())
def gated_mlp_operator(
    x: torch.Tensor, base: Sequence[torch.Tensor], a: Sequence[torch.Tensor], b: Sequence[torch.Tensor],
    seeds: torch.Tensor | None, layout: str, scales: Sequence[float], activation: str, probability: float,
) -> list[torch.Tensor]:  # fmt: skip
    """The output, and what backward needs besides `x`."""
    y, saved = _run(x, (base, a, b), seeds, (layout, scales, activation, probability))
    return [y, *saved[1:]]


@gated_mlp_operator.register_fake
def _(x, base, a, b, seeds, layout, scales, activation, probability):  # type: ignore[no-untyped-def]
    gate, up, down = layers_of(layout, base, a, b, scales)
    tokens = x.numel() // x.shape[-1]
    inner, out = (base_product.shape(layer.form, layer.base)[0] for layer in (gate, down))
    width = max(len(gate.a), len(up.a))
    sizes = inner, inner, 2 * width, len(down.a)
    return [x.new_empty(*x.shape[:-1], out), *(x.new_empty(tokens, size) for size in sizes)]


@torch.library.custom_op("fullshard::gated_mlp_backward", mutates_args=())
def gated_mlp_backward(
    dy: torch.Tensor, x: torch.Tensor, kept: Sequence[torch.Tensor], base: Sequence[torch.Tensor],
    a: Sequence[torch.Tensor], b: Sequence[torch.Tensor], seeds: torch.Tensor | None, layout: str,
    scales: Sequence[float], activation: str, probability: float, wants_x: bool,
) -> list[torch.Tensor]:  # fmt: skip
    """The gradients of `x`, if wanted, of all `a` and of all `b`."""
    about = layout, scales, activation, probability
    found = _run_backward(dy, x, kept, (base, a, b), seeds, about, wants_x)
    first = int(wants_x)  # results of an operator must not share memory: those of gate and up are rows of one tensor
    return [one.clone() if first <= i < first + 2 else one for i, one in enumerate(found)]


@gated_mlp_backward.register_fake
def _(dy, x, kept, base, a, b, seeds, layout, scales, activation, probability, wants_x):  # type: ignore[no-untyped-def]
    return [t.new_empty(t.shape) for t in (*([x] if wants_x else []), *a, *b)]


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    x, base, a, b, seeds, *ctx.about = inputs
    ctx.count = len(base)
    ctx.save_for_backward(seeds, x, *output[1:], *base, *a, *b)
    ctx.set_materialize_grads(False)


def _operator_backward(ctx: Any, grads: Sequence[torch.Tensor | None]) -> tuple[Any, ...]:
    seeds, x, *rest = ctx.saved_tensors
    kept, (base, a, b) = rest[:4], _split(ctx.count, rest[4:])
    wants_x = ctx.needs_input_grad[0]
    found = gated_mlp_backward(grads[0], x, kept, base, a, b, seeds, *ctx.about, wants_x)
    dx, found = (found[0], found[1:]) if wants_x else (None, found)
    return dx, [None] * ctx.count, found[:3], found[3:], None, None, None, None, None


gated_mlp_operator.register_autograd(_operator_backward, setup_context=_keep)
