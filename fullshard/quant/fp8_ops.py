"""Linear operator on fp8 weights, for single layers: forward and backward both multiply in fp8.

`torch.compile` and sharded inputs use custom operators, plain tensors an autograd function, as in `ops.py`.
"""

from __future__ import annotations

from typing import Any

import torch

from fullshard.quant import fp8
from fullshard.quant.ops import without_autocast
from fullshard.spmd.rule_table import RULES
from fullshard.spmd.rules_elementwise import Independent
from fullshard.spmd.tensor import is_sharded


def fp8_product(x: torch.Tensor, weight: fp8.Weight) -> torch.Tensor:
    """`x @ weight.T` in the dtype of `x`."""
    if torch.compiler.is_compiling() or is_sharded(x):
        return linear_fp8(x, *weight)
    found: torch.Tensor = _Linear.apply(x, *weight)
    return found


def _product(x: torch.Tensor, weight: fp8.Weight) -> torch.Tensor:
    found = fp8.product(weight, fp8.prepare(x.reshape(-1, x.shape[-1])))
    return found.view(*x.shape[:-1], found.shape[-1])


def _grad_input(grad_out: torch.Tensor, weight: fp8.Weight) -> torch.Tensor:
    found = fp8.grad_input([weight], [grad_out.reshape(-1, grad_out.shape[-1])])
    return found.view(*grad_out.shape[:-1], found.shape[-1])


class _Linear(torch.autograd.Function):
    """`linear` for plain tensors."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(packed, scales)
        with without_autocast(x.device):
            return _product(x, fp8.Weight(packed, scales))

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[Any, ...]:
        with without_autocast(grad_out.device):
            return _grad_input(grad_out, fp8.Weight(*ctx.saved_tensors)), None, None


@torch.library.custom_op("fullshard::linear_fp8", mutates_args=())
def linear_fp8(x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The operator behind `linear`."""
    return _product(x, fp8.Weight(packed, scales))


@torch.library.custom_op("fullshard::linear_fp8_gradient", mutates_args=())
def linear_fp8_gradient(gradient: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The gradient with respect to `x`."""
    return _grad_input(gradient, fp8.Weight(packed, scales))


@linear_fp8.register_fake
def _(x, packed, scales):  # type: ignore[no-untyped-def]
    return x.new_empty(*x.shape[:-1], packed.shape[0])


@linear_fp8_gradient.register_fake
def _(gradient, packed, scales):  # type: ignore[no-untyped-def]
    return gradient.new_empty(*gradient.shape[:-1], packed.shape[1])


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[1:])


def _operator_backward(ctx: Any, grad_out: torch.Tensor) -> tuple[Any, ...]:
    return linear_fp8_gradient(grad_out, *ctx.saved_tensors), None, None


linear_fp8.register_autograd(_operator_backward, setup_context=_keep)

RULES[torch.ops.fullshard.linear_fp8.default] = Independent("x: b* -> b*", "b")
RULES[torch.ops.fullshard.linear_fp8_gradient.default] = Independent("gradient: b* -> b*", "b")
