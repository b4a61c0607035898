"""Matrices in fp8: `float8_e4m3fn` values with one fp32 scale per row, and products of them.

A weight [out, in] has one scale per output row. For `x @ Wᵀ` the input is quantized row by row too, and both scales
are factors of the result. For `dy @ W` the weight's rows are summed over, so their scales cannot be factors of the
result: they are multiplied into `dy` before that is quantized, which is exact, and the weight's bytes are used as they
are. Several gradients for the same input are quantized side by side, with one scale per row, and give one product.

This is the reference implementation and the one used on CPUs. GPUs with fp8 products use the kernels of
`fp8_kernels.py` and `torch._scaled_mm`; older GPUs dequantize the weight.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from fullshard.device import accelerator
from fullshard.device.torch_private import scaled_mm

DTYPE = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest value of `DTYPE`."""
SMALLEST = 1e-30
"""Lower bound for the largest value of a row: a row of zeros must not divide by zero."""
MULTIPLE = 16
"""Both sizes of a weight must be multiples of this for fp8 products."""
LINE = 128
"""Bytes that rows of a product's operands begin at multiples of; other rows take a sixth longer."""


class Rows(NamedTuple):
    """A matrix quantized row by row."""

    values: torch.Tensor
    """[rows, columns] `DTYPE`."""
    scales: torch.Tensor
    """[rows, 1] fp32."""


class Weight(NamedTuple):
    """A weight [out, in] as it is stored: bytes."""

    packed: torch.Tensor
    """[out, in] uint8: `DTYPE` values."""
    scale_bytes: torch.Tensor
    """[out, 4] uint8: one fp32 scale per row."""

    @property
    def values(self) -> torch.Tensor:
        """The packed bytes as fp8 values."""
        return self.packed.view(DTYPE)

    @property
    def scales(self) -> torch.Tensor:
        """[out, 1] fp32."""
        return self.scale_bytes.view(torch.float32)


def fits(in_features: int, out_features: int) -> bool:
    """Whether a weight of these sizes can be multiplied in fp8, in both directions."""
    return in_features % MULTIPLE == 0 and out_features % MULTIPLE == 0


def hardware_note(device: torch.device) -> str | None:
    """What a device without fp8 products does instead; None for one that has them."""
    if accelerator.computes_fp8(device):
        return None
    if accelerator.is_accelerator(device):
        return "this GPU has no fp8 products; weights are dequantized for each product, which saves memory but no time."
    return "fp8 products are emulated on the CPU, which is slow."


def quantize_rows(
    inputs: Sequence[torch.Tensor], factors: Sequence[torch.Tensor] | None = None, multiple: int = 1
) -> Rows:
    """Quantize matrices [rows, …] side by side, with one scale per row, and zeros up to a multiple of columns. Columns
    are multiplied by `factors` first."""
    first = inputs[0]
    rows, device = first.shape[0], first.device
    if not accelerator.computes_fp8(device):
        wide = [x.float() if factors is None else x.float() * factors[i].view(1, -1) for i, x in enumerate(inputs)]
        joined = wide[0] if len(wide) == 1 else torch.cat(wide, dim=1)
        joined = torch.nn.functional.pad(joined, (0, -joined.shape[1] % multiple))
        largest = joined.abs().amax(dim=1, keepdim=True).clamp(min=SMALLEST)
        inverse = torch.full_like(largest, LARGEST) / largest  # a number divided by a tensor would round twice
        return Rows((joined * inverse).to(DTYPE), largest / LARGEST)
    from fullshard.quant import fp8_kernels

    values = _empty(rows, _up(sum(x.shape[1] for x in inputs), multiple), device).view(DTYPE)
    scales = torch.empty((rows, 1), dtype=torch.float32, device=device)
    whole = [x if x.stride(-1) == 1 else x.contiguous() for x in inputs]
    if len(whole) > fp8_kernels.MOST:
        whole, factors = [torch.cat(whole, dim=1)], None if factors is None else [torch.cat(list(factors))]
    fp8_kernels.quantize_rows(whole, factors, values, scales)
    return Rows(values, scales)


def pack(matrix: torch.Tensor) -> Weight:
    """Quantize a dense weight [out, in]."""
    values, scales = quantize_rows([matrix])
    return Weight(values.view(torch.uint8).contiguous(), scales.view(torch.uint8))


def dequantize(weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    """The dense weight."""
    return (weight.values.float() * weight.scales).to(dtype)


# --- products ---------------------------------------------------------------------------------------------------------


class Input(NamedTuple):
    """The input of several products, prepared once."""

    x: torch.Tensor
    """[tokens, in]"""
    rows: Rows | None
    """None where weights are dequantized."""


def prepare(x: torch.Tensor) -> Input:
    """Quantize an input [tokens, in], for any number of products."""
    return Input(x, None if _dequantizes(x.device) else quantize_rows([x]))


def product(weight: Weight, x: Input, out: torch.Tensor | None = None) -> torch.Tensor:
    """`x @ Wᵀ` in the dtype of `x`."""
    if x.rows is None:
        return _into(out, x.x @ dequantize(weight, x.x.dtype).t())
    return _multiply(x.rows, weight.values.t(), weight.scales.view(1, -1), x.x.dtype, out)


def grad_input(
    weights: Sequence[Weight],
    grads: Sequence[torch.Tensor],
    out: torch.Tensor | None = None,
    accumulate: bool = False,
    adapters: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """The sum of `dy @ W` over weights with the same input, in the dtype of `dy`, and of `dh @ A` for the adapters'
    (dh, A): A [rank, in] is one more weight of the product, which takes no pass of its own then."""
    device, dtype = grads[0].device, grads[0].dtype
    if _dequantizes(device):
        dx = sum(dy @ dequantize(w, dtype) for w, dy in zip(weights, grads, strict=True))
        assert isinstance(dx, torch.Tensor)
        return _into(out, dx if adapters is None else dx.addmm_(*adapters), accumulate)
    if adapters is not None:
        dh, a = adapters
        weights, grads = [*weights, pack(a)], [*grads, dh]
    rows = quantize_rows(grads, [w.scales.view(-1) for w in weights], MULTIPLE)
    ones = _ones(weights[0].packed.shape[1], device)
    dx = _multiply(rows, _transposed(weights).t(), ones, dtype, None if accumulate else out)
    return _into(out, dx, accumulate) if accumulate else dx


def _empty(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """Bytes [rows, columns], each row at the begin of a line of memory."""
    return torch.empty((rows, _up(columns, LINE)), dtype=torch.uint8, device=device)[:, :columns]


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


@functools.cache
def _ones(count: int, device: torch.device) -> torch.Tensor:
    """The scales of a matrix whose values are used as they are, [1, count] fp32."""
    with torch.inference_mode(False):
        return torch.ones((1, count), dtype=torch.float32, device=device)


def _dequantizes(device: torch.device) -> bool:
    """Whether products use dequantized weights: on GPUs without fp8 products."""
    return accelerator.is_accelerator(device) and not accelerator.computes_fp8(device)


def _into(out: torch.Tensor | None, result: torch.Tensor, accumulate: bool = False) -> torch.Tensor:
    if out is None:
        return result
    return out.add_(result) if accumulate else out.copy_(result)


def _transposed(weights: Sequence[Weight]) -> torch.Tensor:
    """The values of several weights [out, in] as one matrix [in, sum of out], with zeros up to a `MULTIPLE`."""
    first, rows = weights[0].packed, sum(len(w.packed) for w in weights)
    if not accelerator.computes_fp8(first.device):
        joined = torch.cat([w.packed for w in weights])
        return torch.nn.functional.pad(joined, (0, 0, 0, -rows % MULTIPLE)).t().contiguous().view(DTYPE)
    from fullshard.quant import fp8_kernels

    transposed = _empty(first.shape[1], _up(rows, MULTIPLE), first.device)
    start = 0
    for w in weights:
        end = start + len(w.packed)
        fp8_kernels.transpose(w.packed, transposed[:, start : transposed.shape[1] if end == rows else end])
        start = end
    return transposed.view(DTYPE)


def _multiply(
    left: Rows, right: torch.Tensor, right_scales: torch.Tensor, dtype: torch.dtype, out: torch.Tensor | None
) -> torch.Tensor:
    """`left @ right`, with `right` [k, n] column-major and `right_scales` [1, n]."""
    if not accelerator.computes_fp8(left.values.device):
        # fp8 values are exact in any wider dtype, and so are the sums up to the rounding of fp32.
        sums = left.values.float() @ right.float()
        return _into(out, (sums * left.scales * right_scales).to(dtype))
    into = out if out is not None and out.dtype is torch.bfloat16 and out.is_contiguous() else None
    options = {"out_dtype": torch.bfloat16, "use_fast_accum": True, **({} if into is None else {"out": into})}
    sums = scaled_mm(left.values, right, scale_a=left.scales, scale_b=right_scales, **options)
    return sums.to(dtype) if out is None else out if into is not None else _into(out, sums)
