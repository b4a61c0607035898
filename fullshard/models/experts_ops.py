"""The experts of a layer as one operator with its own backward, in two forms as for groups of LoRA layers.

`torch.compile` uses a custom operator, which is opaque to it and the same for all layers of a kind. Plain tensors use
an autograd function, because custom operators defined in Python are slow to call. The arithmetic is in
`experts_math.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fullshard.lora.fused_dropout import Dropout
from fullshard.models.experts_gate import Gate
from fullshard.models.experts_math import (
    Factors,
    Gradients,
    Projection,
    ProjectionGrads,
    Routing,
    Saved,
    Wanted,
    backward,
    forward,
)
from fullshard.quant.grouped_product import Stack
from fullshard.quant.ops import without_autocast

Tensors = Sequence[torch.Tensor]


def run_experts(
    x: torch.Tensor, weights: torch.Tensor | None, routing: Routing, up: Projection, down: Projection, gate: str
) -> torch.Tensor:
    """The output of experts for `x` [tokens, in] with routing weights [tokens, choices]; without weights, the output
    of each sorted row. The gate comes as a string."""
    layout = f"{gate}|{_layout_of(up)}|{_layout_of(down)}"
    tensors = [*_tensors_of(up), *_tensors_of(down)]
    if torch.compiler.is_compiling():
        out: torch.Tensor = experts_operator(x, weights, *routing, tensors, layout)[0]
        return out
    out = _Experts.apply(layout, x, weights, *routing, *tensors)
    return out


# --- projections as strings and tensors, which operators take -------------------------------------------------------


def _layout_of(projection: Projection) -> str:
    dropouts = [0.0 if one.dropout is None else one.dropout.probability for one in projection.adapters]
    kinds = f"{int(projection.transposed)};{int(projection.bias is not None)}"
    stack = projection.stack
    return f"{stack.form};{len(stack.tensors)};{kinds};{','.join([str(p) for p in dropouts])}"


def _tensors_of(projection: Projection) -> list[torch.Tensor]:
    """The stack, the bias, and of each adapter a, b and the seed."""
    tensors = [*projection.stack.tensors, *([] if projection.bias is None else [projection.bias])]
    for one in projection.adapters:
        tensors += [one.a, one.b, *([] if one.dropout is None else [one.dropout.seed])]
    return tensors


class _Layout(NamedTuple):
    """What a string from `_layout_of` says."""

    form: str
    tensors: int
    transposed: bool
    biased: bool
    dropouts: tuple[float, ...]

    def take(self, tensors: list[torch.Tensor]) -> Projection:
        """The projection of the first tensors, which are removed."""
        own = [tensors.pop(0) for _ in range(self.tensors)]
        bias = tensors.pop(0) if self.biased else None
        adapters = []
        for p in self.dropouts:
            a, b = tensors.pop(0), tensors.pop(0)
            adapters.append(Factors(a, b, Dropout(tensors.pop(0), p) if p else None))
        return Projection(Stack(self.form, own), self.transposed, bias, adapters)

    def wanted(self, wants: list[bool]) -> Wanted:
        """Which gradients are wanted, for the first of the flags, which are removed."""
        stack = [wants.pop(0) for _ in range(self.tensors)]
        bias = wants.pop(0) if self.biased else False
        adapters = False
        for p in self.dropouts:
            of_a, of_b = wants.pop(0), wants.pop(0)
            adapters |= of_a or of_b
            if p:
                wants.pop(0)
        return Wanted(stack[0], bias, adapters)

    def flat(self, grads: ProjectionGrads) -> list[torch.Tensor | None]:
        """A gradient for each tensor."""
        flat = [grads.stack, *[None] * (self.tensors - 1), *([grads.bias] if self.biased else [])]
        for p, pair in zip(self.dropouts, grads.adapters, strict=True):
            flat += [*(pair or (None, None)), *([None] if p else [])]
        return flat


@functools.cache
def _parsed(layout: str) -> tuple[Gate, _Layout, _Layout]:
    gate, *projections = layout.split("|")
    parts = (one.split(";") for one in projections)
    up, down = (
        _Layout(form, int(count), swapped == "1", biased == "1", tuple(float(p) for p in rates.split(",") if p))
        for form, count, swapped, biased, rates in parts
    )
    return Gate.parse(gate), up, down


def _forward(
    x: torch.Tensor, weights: torch.Tensor | None, routing: Routing, tensors: Tensors, layout: str
) -> tuple[torch.Tensor, Saved]:
    gate, up, down = _parsed(layout)
    left = list(tensors)
    with without_autocast(x.device):
        return forward(x, weights, routing, up.take(left), down.take(left), gate)


def _backward(
    grad_out: torch.Tensor, x: torch.Tensor, weights: torch.Tensor | None, routing: Routing, tensors: Tensors,
    saved: Saved, wants: Sequence[bool], layout: str,
) -> tuple[Gradients, list[torch.Tensor | None]]:  # fmt: skip
    """The gradients, and those of the tensors; `wants` is for `x` and the tensors."""
    gate, up, down = _parsed(layout)
    left, (wants_x, *flags) = list(tensors), wants
    with without_autocast(x.device):
        grads = backward(
            grad_out.contiguous(), x, weights, routing, up.take(left), down.take(left), gate, saved, wants_x,
            up.wanted(flags), down.wanted(flags),
        )  # fmt: skip
    return grads, [*up.flat(grads.up), *down.flat(grads.down)]


def _saved(layout: str, tensors: Tensors) -> Saved:
    """What forward kept, from its flat form."""
    count = len(_parsed(layout)[1].dropouts)
    return Saved(tensors[0], list(tensors[1 : 1 + count]), list(tensors[1 + count :]))


# --- plain tensors --------------------------------------------------------------------------------------------------


class _Experts(torch.autograd.Function):
    """`run_experts` for plain tensors."""

    @staticmethod
    def forward(ctx, layout, x, weights, order, position, ends, *tensors):  # type: ignore[no-untyped-def]
        routing = Routing(order, position, ends)
        out, saved = _forward(x, weights, routing, tensors, layout)
        ctx.save_for_backward(x, weights, *routing, *tensors, saved.inner, *saved.up, *saved.down)
        ctx.layout, ctx.count = layout, len(tensors)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[Any, ...]:
        x, weights, order, position, ends, *rest = ctx.saved_tensors
        tensors, saved = rest[: ctx.count], _saved(ctx.layout, rest[ctx.count :])
        wants = [ctx.needs_input_grad[1], *ctx.needs_input_grad[6:]]
        grads, flat = _backward(grad_out, x, weights, Routing(order, position, ends), tensors, saved, wants, ctx.layout)
        return None, grads.x, grads.weights, None, None, None, *flat


# --- the operator ---------------------------------------------------------------------------------------------------


@torch.library.custom_op("fullshard::experts", mutates_args=())
def experts_operator(
    x: torch.Tensor, weights: torch.Tensor | None, order: torch.Tensor, position: torch.Tensor, ends: torch.Tensor,
    tensors: Sequence[torch.Tensor], layout: str,
) -> list[torch.Tensor]:  # fmt: skip
    """The output, and what backward needs."""
    out, saved = _forward(x, weights, Routing(order, position, ends), tensors, layout)
    return [out, saved.inner, *saved.up, *saved.down]


@experts_operator.register_fake
def _(x, weights, order, position, ends, tensors, layout):  # type: ignore[no-untyped-def]
    left, rows = list(tensors), order.shape[0]
    up, down = (one.take(left) for one in _parsed(layout)[1:])
    sizes = [one.stack.shape[2 if one.transposed else 1] for one in (up, down)]
    out = x.new_empty(rows if weights is None else x.shape[0], sizes[1])
    return [
        out,
        x.new_empty(rows, sizes[0]),
        *[x.new_empty(rows, o.a.shape[1]) for p in (up, down) for o in p.adapters],
    ]


@torch.library.custom_op("fullshard::experts_backward", mutates_args=())
def experts_backward(
    grad_out: torch.Tensor, x: torch.Tensor, weights: torch.Tensor | None, order: torch.Tensor, position: torch.Tensor,
    ends: torch.Tensor, tensors: Sequence[torch.Tensor], saved: Sequence[torch.Tensor], wants: Sequence[bool],
    layout: str,
) -> list[torch.Tensor]:  # fmt: skip
    """The wanted gradients, in order: of x, of the weights if there are any, of the tensors."""
    routing = Routing(order, position, ends)
    grads, flat = _backward(grad_out, x, weights, routing, tensors, _saved(layout, saved), wants, layout)
    results: list[Any] = [grads.x, grads.weights, *flat]
    return [grad.contiguous() for grad, is_wanted in zip(results, _returned(weights, wants), strict=True) if is_wanted]


def _returned(weights: torch.Tensor | None, wants: Sequence[bool]) -> list[bool]:
    return [wants[0], weights is not None, *wants[1:]]


@experts_backward.register_fake
def _(grad_out, x, weights, order, position, ends, tensors, saved, wants, layout):  # type: ignore[no-untyped-def]
    flags = _returned(weights, wants)
    return [t.new_empty(t.shape) for t, wanted in zip((x, weights, *tensors), flags, strict=True) if wanted]


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    x, weights, order, position, ends, tensors, ctx.layout = inputs
    ctx.count = len(tensors)
    ctx.save_for_backward(x, weights, order, position, ends, *tensors, *output[1:])


def _operator_backward(ctx: Any, grads: Sequence[torch.Tensor | None]) -> tuple[Any, ...]:
    x, weights, order, position, ends, *rest = ctx.saved_tensors
    tensors, saved = rest[: ctx.count], rest[ctx.count :]
    wants = [ctx.needs_input_grad[0], *ctx.needs_input_grad[5]]
    results = experts_backward(grads[0], x, weights, order, position, ends, tensors, saved, wants, ctx.layout)
    left = iter(results)
    flat = [next(left) if is_wanted else None for is_wanted in _returned(weights, wants)]
    return flat[0], flat[1], None, None, None, flat[2:], None


experts_operator.register_autograd(_operator_backward, setup_context=_keep)
