"""The linear operator on a frozen weight, whatever its storage (`base_product.py`).

`torch.compile` and sharded inputs use custom operators, which are opaque to the compiler and have a sharding rule for
inputs that are split along the batch. Plain tensors use an autograd function, because custom operators defined in
Python are slow to call. bitsandbytes' 4-bit layers have operators of their own (`ops.py`).
"""

from __future__ import annotations

from typing import Any

import torch

from fullshard.quant import base_product
from fullshard.quant.ops import without_autocast
from fullshard.spmd.rule_table import RULES
from fullshard.spmd.rules_elementwise import Independent
from fullshard.spmd.tensor import is_sharded


def frozen_linear(x: torch.Tensor, form: str, tensors: list[torch.Tensor]) -> torch.Tensor:
    """`x @ weight.T` in the dtype of `x`."""
    if torch.compiler.is_compiling() or is_sharded(x):
        return linear_frozen(x, tensors, form)
    out: torch.Tensor = _Linear.apply(x, form, *tensors)
    return out


def _product(form: str, tensors: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    with without_autocast(x.device):
        out = base_product.product(form, tensors, x.reshape(-1, x.shape[-1]))
    return out.view(*x.shape[:-1], out.shape[-1])


def _grad_input(form: str, tensors: list[torch.Tensor], dy: torch.Tensor) -> torch.Tensor:
    with without_autocast(dy.device):
        dx = base_product.grad_input(form, tensors, dy.reshape(-1, dy.shape[-1]))
    return dx.view(*dy.shape[:-1], dx.shape[-1])


class _Linear(torch.autograd.Function):
    """`x @ weight.T` for plain tensors."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, form: str, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        ctx.form = form
        return _product(form, list(tensors), x)

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[Any, ...]:
        tensors = list(ctx.saved_tensors)
        return _grad_input(ctx.form, tensors, grad_out), *[None] * (1 + len(tensors))


@torch.library.custom_op("fullshard::linear_frozen", mutates_args=())
def linear_frozen(x: torch.Tensor, tensors: list[torch.Tensor], form: str) -> torch.Tensor:
    """The operator behind `frozen_linear`."""
    return _product(form, tensors, x)


@torch.library.custom_op("fullshard::linear_frozen_gradient", mutates_args=())
def linear_frozen_gradient(gradient: torch.Tensor, tensors: list[torch.Tensor], form: str) -> torch.Tensor:
    """The gradient with respect to `x`."""
    return _grad_input(form, tensors, gradient)


@linear_frozen.register_fake
def _(x, tensors, form):  # type: ignore[no-untyped-def]
    return x.new_empty(*x.shape[:-1], base_product.shape(form, tensors)[0])


@linear_frozen_gradient.register_fake
def _(gradient, tensors, form):  # type: ignore[no-untyped-def]
    return gradient.new_empty(*gradient.shape[:-1], base_product.shape(form, tensors)[1])


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    _, tensors, ctx.form = inputs
    ctx.save_for_backward(*tensors)


def _operator_backward(ctx: Any, grad_out: torch.Tensor) -> tuple[Any, ...]:
    tensors = list(ctx.saved_tensors)
    return linear_frozen_gradient(grad_out, tensors, ctx.form), [None] * len(tensors), None


linear_frozen.register_autograd(_operator_backward, setup_context=_keep)

RULES[torch.ops.fullshard.linear_frozen.default] = Independent("x: b* -> b*", "b")
RULES[torch.ops.fullshard.linear_frozen_gradient.default] = Independent("gradient: b* -> b*", "b")
