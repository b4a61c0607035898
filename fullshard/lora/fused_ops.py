"""A LoRA group as one operator with its own backward, which keeps the input and the adapters' rank-sized activations.

`torch.compile` uses a custom operator, which is opaque to it: frozen weights get no gradient, and no copy of the input
is kept for dropout. Plain tensors use an autograd function, because custom operators defined in Python are slow to
call. The arithmetic is in `fused_math.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from fullshard.lora.fused_dropout import Dropout
from fullshard.lora.fused_math import Gradients, Layer, backward, forward
from fullshard.quant import base_product
from fullshard.quant.ops import without_autocast

Tensors = Sequence[torch.Tensor]


def lora_group(
    x: torch.Tensor, layers: Sequence[Layer], seed: torch.Tensor | None, probability: float
) -> list[torch.Tensor]:
    """The outputs of the layers. Without a seed there is no dropout."""
    if torch.compiler.is_compiling():
        layout, base, a, b, scales = flat(layers)
        return lora_group_operator(x, base, a, b, seed, layout, scales, probability)[:-1]
    adapters = [t for layer in layers for t in (layer.a, layer.b)]
    outputs: tuple[torch.Tensor, ...] = _Group.apply(layers, seed, probability, x, *adapters)
    return list(outputs)


def flat(
    layers: Sequence[Layer],
) -> tuple[str, list[torch.Tensor], list[torch.Tensor], list[torch.Tensor], list[float]]:
    """Layers as operators take them: a string, frozen tensors, `a`, `b` and scales. `layers_of` is the inverse."""
    layout = "|".join(f"{layer.form};{len(layer.base)};{int(layer.bias is not None)}" for layer in layers)
    base = [t for layer in layers for t in (*layer.base, *([] if layer.bias is None else [layer.bias]))]
    return layout, base, [layer.a for layer in layers], [layer.b for layer in layers], [layer.scale for layer in layers]


@functools.cache
def _parsed(layout: str) -> list[tuple[str, int, bool]]:
    """The form, the number of tensors and whether there is a bias, of each layer."""
    parts = (one.split(";") for one in layout.split("|"))
    return [(form, int(count), biased == "1") for form, count, biased in parts]


def layers_of(layout: str, base: Tensors, a: Tensors, b: Tensors, scales: Sequence[float]) -> list[Layer]:
    """The layers that `flat` took apart."""
    layers, left = [], list(base)
    for (form, count, biased), *adapter in zip(_parsed(layout), a, b, scales, strict=True):
        weight, left = left[:count], left[count:]
        bias, left = (left[0], left[1:]) if biased else (None, left)
        layers.append(Layer(form, weight, bias, *adapter))
    return layers


def _dropout(seed: torch.Tensor | None, probability: float) -> Dropout | None:
    return None if seed is None else Dropout(seed, probability)


def as_rows(t: torch.Tensor) -> torch.Tensor:
    """[…, size] as [tokens, size]."""
    return t.reshape(-1, t.shape[-1])


def _forward(
    x: torch.Tensor, layers: Sequence[Layer], seed: torch.Tensor | None, probability: float
) -> tuple[list[torch.Tensor], torch.Tensor]:
    with without_autocast(x.device):
        ys, h = forward(as_rows(x), layers, _dropout(seed, probability))
    lead = x.shape[:-1]
    return [y.view(*lead, y.shape[-1]) for y in ys], h


def _backward(
    x: torch.Tensor, h: torch.Tensor, dys: Sequence[torch.Tensor | None], layers: Sequence[Layer],
    seed: torch.Tensor | None, probability: float, wants_x: bool, wants_adapters: bool,
) -> Gradients:  # fmt: skip
    rows = [None if dy is None else as_rows(dy) for dy in dys]
    with without_autocast(x.device):
        grads = backward(as_rows(x), h, rows, layers, _dropout(seed, probability), wants_x, wants_adapters)
    return Gradients(None if grads.x is None else grads.x.view(x.shape), grads.a, grads.b)


# --- plain tensors --------------------------------------------------------------------------------------------------


class _Group(torch.autograd.Function):
    """`lora_group` for plain tensors. `adapters` are `a` and `b` of each layer, which get gradients."""

    @staticmethod
    def forward(ctx, layers, seed, probability, x, *adapters):  # type: ignore[no-untyped-def]
        ys, h = _forward(x, layers, seed, probability)
        ctx.save_for_backward(seed, x, h, *adapters, *[t for layer in layers for t in layer.base])
        ctx.about = probability, [(layer.form, len(layer.base), layer.scale) for layer in layers]
        ctx.set_materialize_grads(False)
        return tuple(ys)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *dys: torch.Tensor | None) -> tuple[Any, ...]:
        (seed, x, h, *tensors), (probability, kinds) = ctx.saved_tensors, ctx.about
        layers, first = [], 2 * len(kinds)
        for i, (form, count, scale) in enumerate(kinds):
            layers.append(Layer(form, tensors[first : first + count], None, tensors[2 * i], tensors[2 * i + 1], scale))
            first += count
        _, _, _, wants_x, *wants_adapters = ctx.needs_input_grad
        grads = _backward(x, h, dys, layers, seed, probability, wants_x, any(wants_adapters))
        das, dbs = _for_used(grads, dys)
        return None, None, None, grads.x, *[grad for pair in zip(das, dbs, strict=True) for grad in pair]


def _for_used(gradients: Gradients, dys: Sequence[torch.Tensor | None]) -> tuple[list[Any], list[Any]]:
    """The adapters' gradients, None where the output was not used."""
    if not gradients.a:
        return [None] * len(dys), [None] * len(dys)
    if all(dy is not None for dy in dys):
        return gradients.a, gradients.b
    das, dbs = (
        [None if dy is None else one for one, dy in zip(grads, dys, strict=True)]
        for grads in (gradients.a, gradients.b)
    )
    return das, dbs


# --- the operator ---------------------------------------------------------------------------------------------------


@torch.library.custom_op("fullshard::lora_group", mutates_args=())
def lora_group_operator(
    x: torch.Tensor, base: Sequence[torch.Tensor], a: Sequence[torch.Tensor], b: Sequence[torch.Tensor],
    seed: torch.Tensor | None, layout: str, scales: Sequence[float], probability: float,
) -> list[torch.Tensor]:  # fmt: skip
    """The outputs of the layers, and `h`."""
    ys, h = _forward(x, layers_of(layout, base, a, b, scales), seed, probability)
    return [*ys, h]


@lora_group_operator.register_fake
def _(x, base, a, b, seed, layout, scales, probability):  # type: ignore[no-untyped-def]
    layers = layers_of(layout, base, a, b, scales)
    outs = [base_product.shape(layer.form, layer.base)[0] for layer in layers]
    width = max(layer.a.shape[0] for layer in layers)
    tokens = x.numel() // x.shape[-1]
    return [*(x.new_empty(*x.shape[:-1], out) for out in outs), x.new_empty(tokens, len(layers) * width)]


@torch.library.custom_op("fullshard::lora_group_backward", mutates_args=())
def lora_group_backward(
    x: torch.Tensor, h: torch.Tensor, dys: Sequence[torch.Tensor], used: Sequence[int], base: Sequence[torch.Tensor],
    a: Sequence[torch.Tensor], b: Sequence[torch.Tensor], seed: torch.Tensor | None, layout: str,
    scales: Sequence[float], probability: float, wants_x: bool, wants_adapters: bool,
) -> list[torch.Tensor]:  # fmt: skip
    """The gradients of `x`, of all `a` and of all `b`, for those of the outputs that were used."""
    by_layer = dict(zip(used, dys, strict=True))
    every = [by_layer.get(i) for i in range(len(a))]
    layers = layers_of(layout, base, a, b, scales)
    gradients = _backward(x, h, every, layers, seed, probability, wants_x, wants_adapters)
    # Results of an operator must not share memory.
    das = [da if da.numel() == h.shape[1] * x.shape[-1] else da.clone() for da in gradients.a]
    return [*([] if gradients.x is None else [gradients.x]), *das, *gradients.b]


@lora_group_backward.register_fake
def _(x, h, dys, used, base, a, b, seed, layout, scales, probability, wants_x, wants_adapters):  # type: ignore[no-untyped-def]
    grads = [t.new_empty(t.shape) for t in (*a, *b)] if wants_adapters else []
    return [*([x.new_empty(x.shape)] if wants_x else []), *grads]


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    x, base, a, b, seed, *ctx.about = inputs
    ctx.counts = len(base), len(a)
    ctx.save_for_backward(seed, x, output[-1], *base, *a, *b)
    ctx.set_materialize_grads(False)


def _split(count: int, tensors: Tensors) -> tuple[Tensors, Tensors, Tensors]:
    """The frozen tensors, all `a` and all `b`."""
    half = count + (len(tensors) - count) // 2
    return tensors[:count], tensors[count:half], tensors[half:]


def _operator_backward(ctx: Any, grads: Sequence[torch.Tensor | None]) -> tuple[Any, ...]:
    seed, x, h, *tensors = ctx.saved_tensors
    base_count, count = ctx.counts
    base, a, b = _split(base_count, tensors)
    wants, dys = ctx.needs_input_grad, list(grads[:-1])
    used = [i for i, dy in enumerate(dys) if dy is not None]
    adapters = any(wants[2]) or any(wants[3])
    adapter_grads = lora_group_backward(
        x, h, [dy for dy in dys if dy is not None], used, base, a, b, seed, *ctx.about, wants[0], adapters
    )
    dx, adapter_grads = (adapter_grads[0], adapter_grads[1:]) if wants[0] else (None, adapter_grads)
    das, dbs = _for_used(Gradients(dx, adapter_grads[:count], adapter_grads[count:]), dys)
    return dx, [None] * base_count, das, dbs, None, None, None, None


lora_group_operator.register_autograd(_operator_backward, setup_context=_keep)
