"""Linear operator on 4-bit weights. Forward and backward each dequantize the weight, multiply and free it.

`torch.compile` and sharded inputs use custom operators. They are opaque to the compiler, which would otherwise share
the dequantized weight between forward and backward and keep it in memory. They also have a sharding rule for inputs
that are split along the batch. Plain tensors use an autograd function, because custom operators defined in Python are
slow to call.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from fullshard.quant.workspace import dequantized
from fullshard.spmd.rule_table import RULES
from fullshard.spmd.rules_elementwise import Independent
from fullshard.spmd.tensor import is_sharded

Packed = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""The parts of a weight: packed values, scales, second-level scales."""


def linear(x: torch.Tensor, parts: Packed, out_features: int, blocksize: int, quant_type: str) -> torch.Tensor:
    """`x @ weight.T` in the dtype of `x`."""
    if torch.compiler.is_compiling() or is_sharded(x):
        return linear_4bit(x, *parts, out_features, blocksize, quant_type)
    out: torch.Tensor = _Linear.apply(x, *parts, out_features, blocksize, quant_type)
    return out


def autocasts(device: torch.device) -> bool:
    """Whether autocast chooses the dtype of products on a device. torch has none for the meta device."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype of a linear layer's product: autocast's, or that of the input."""
    return torch.get_autocast_dtype(x.device.type) if autocasts(x.device) else x.dtype


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Disable autocast: the layer has chosen the dtype of the product."""
    if autocasts(device):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


def _product(x: torch.Tensor, parts: Packed, out_features: int, blocksize: int, quant_type: str) -> torch.Tensor:
    shape = (out_features, x.shape[-1])
    with without_autocast(x.device), dequantized(*parts, shape, blocksize, quant_type, x.dtype) as weight:
        return torch.nn.functional.linear(x, weight)


def _grad_input(
    grad_out: torch.Tensor, parts: Packed, in_features: int, blocksize: int, quant_type: str
) -> torch.Tensor:
    shape = (grad_out.shape[-1], in_features)
    with without_autocast(grad_out.device), dequantized(*parts, shape, blocksize, quant_type, grad_out.dtype) as weight:
        return torch.matmul(grad_out, weight)


class _Linear(torch.autograd.Function):
    """`linear` for plain tensors."""

    @staticmethod
    def forward(ctx, x, packed, absmax, nested, out_features, blocksize, quant_type):  # type: ignore[no-untyped-def]
        _keep(ctx, (x, packed, absmax, nested, out_features, blocksize, quant_type), None)
        return _product(x, (packed, absmax, nested), out_features, blocksize, quant_type)

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[Any, ...]:
        dx = _grad_input(grad_out, ctx.saved_tensors, ctx.in_features, ctx.blocksize, ctx.quant_type)
        return dx, None, None, None, None, None, None


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    x, packed, absmax, nested, _, ctx.blocksize, ctx.quant_type = inputs
    ctx.in_features = x.shape[-1]
    ctx.save_for_backward(packed, absmax, nested)


@torch.library.custom_op("fullshard::linear_4bit", mutates_args=())
def linear_4bit(
    x: torch.Tensor, packed: torch.Tensor, absmax: torch.Tensor, nested: torch.Tensor | None, out_features: int,
    blocksize: int, quant_type: str,
) -> torch.Tensor:  # fmt: skip
    """The operator behind `linear`."""
    return _product(x, (packed, absmax, nested), out_features, blocksize, quant_type)


@torch.library.custom_op("fullshard::linear_4bit_gradient", mutates_args=())
def linear_4bit_gradient(
    gradient: torch.Tensor, packed: torch.Tensor, absmax: torch.Tensor, nested: torch.Tensor | None, in_features: int,
    blocksize: int, quant_type: str,
) -> torch.Tensor:  # fmt: skip
    """The gradient with respect to `x`."""
    return _grad_input(gradient, (packed, absmax, nested), in_features, blocksize, quant_type)


@linear_4bit.register_fake
def _(x, packed, absmax, nested, out_features, blocksize, quant_type):  # type: ignore[no-untyped-def]
    return x.new_empty(*x.shape[:-1], out_features)


@linear_4bit_gradient.register_fake
def _(gradient, packed, absmax, nested, in_features, blocksize, quant_type):  # type: ignore[no-untyped-def]
    return gradient.new_empty(*gradient.shape[:-1], in_features)


def _operator_backward(ctx: Any, grad_out: torch.Tensor) -> tuple[Any, ...]:
    packed, absmax, nested = ctx.saved_tensors
    dx = linear_4bit_gradient(grad_out, packed, absmax, nested, ctx.in_features, ctx.blocksize, ctx.quant_type)
    return dx, None, None, None, None, None, None


linear_4bit.register_autograd(_operator_backward, setup_context=_keep)

RULES[torch.ops.fullshard.linear_4bit.default] = Independent("x: b* -> b*", "b")
RULES[torch.ops.fullshard.linear_4bit_gradient.default] = Independent("gradient: b* -> b*", "b")
