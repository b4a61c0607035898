"""`FusedWeight`: the quantized weights of all experts, seen as one dense tensor, and products with them.

A module's forward either indexes one expert (`weight[i]`) and multiplies, or passes the whole weight to a grouped
matmul with tokens sorted by expert. Both dequantize one expert at a time, in forward and again in backward. Any other
use dequantizes what it needs; writing raises an error.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from fullshard.device import accelerator
from fullshard.device.torch_private import (
    NoTorchFunction,
    make_wrapper_subclass,
    parameters_of,
    schema_of,
    tree_leaves,
    tree_map,
)
from fullshard.quant.expert_adapters import Adapters
from fullshard.quant.grouped_product import Stack
from fullshard.quant.ops import without_autocast
from fullshard.quant.quantized_linear import ReadOnlyWeight, read_only_error
from fullshard.spmd.tensor import is_sharded

METADATA = {
    *(getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "layout", "ndim", "requires_grad",
                                                       "is_meta", "is_leaf", "grad_fn", "grad")),
    torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.is_floating_point, torch.Tensor.detach,
    torch.Tensor.__len__,
}  # fmt: skip
"""Functions that need no values."""


class QuantizedExperts(Protocol):
    """The module that owns a `FusedWeight`; `PackedExperts` implements it."""

    fused: dict[str, tuple[int, int, int]]
    adapters: Adapters

    @property
    def product_dtype(self) -> torch.dtype:
        """The dtype that products are computed in."""

    def expert_stack(self, name: str) -> Stack:
        """A weight for grouped products."""

    def whole_stack(self, name: str) -> Stack:
        """The same, of plain tensors."""

    def is_swapped(self, name: str) -> bool:
        """Whether the matrices of a weight are stored transposed."""

    def dequantize(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The dense values of a quantized weight."""


class FusedWeight(ReadOnlyWeight):
    """A fused weight [experts, rows, columns], or one expert of it if `index` is given. `swapped` transposes rows and
    columns."""

    experts: QuantizedExperts
    key: str
    index: int | None
    swapped: bool
    _is_hf_initialized = True  # transformers' initializers skip it

    @staticmethod
    def __new__(
        cls, experts: QuantizedExperts, name: str, index: int | None = None, swapped: bool = False
    ) -> FusedWeight:
        count, rows, columns = experts.fused[name]
        matrix = (columns, rows) if swapped else (rows, columns)
        weight: Any = make_wrapper_subclass(
            cls, matrix if index is not None else (count, *matrix), requires_grad=False,
            dtype=experts.product_dtype, device=parameters_of(experts)[name].device,
        )  # fmt: skip
        weight.experts, weight.key, weight.index, weight.swapped = experts, name, index, swapped
        return weight

    def __init__(self, experts: QuantizedExperts, name: str, index: int | None = None, swapped: bool = False) -> None:
        super().__init__()

    def __repr__(self) -> str:
        return f"FusedWeight({self.key}, {tuple(self.shape)})"

    def variant(self, index: int | None, swapped: bool) -> FusedWeight:
        """The same weight with another index and order of dims."""
        return FusedWeight(self.experts, self.key, index, swapped)

    def dense(self) -> torch.Tensor:
        """The dequantized values without adapters."""
        if self.index is None:
            values = self.experts.dequantize(self.key, self.dtype)
            return values.transpose(-2, -1) if self.swapped else values
        with self.experts.whole_stack(self.key).dense_matrix(self.index, self.dtype) as matrix:
            values = matrix.clone()
        return values.transpose(-2, -1) if self.stack_swapped else values

    @property
    def stack_swapped(self) -> bool:
        """Whether rows and columns are those of the stored matrices, exchanged."""
        return self.swapped != self.experts.is_swapped(self.key)

    def adapted(self) -> torch.Tensor:
        """The dequantized values with active adapters added."""
        values = self.dense()
        for left, right, scale, _ in self.experts.adapters.get(self.key, ()):
            delta = (left if self.index is None else left[self.index]) @ (
                right if self.index is None else right[self.index]
            )
            values = values + scale * (delta.transpose(-2, -1) if self.swapped else delta).to(values.dtype)
        return values

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = _without_dense(func, args, kwargs)
        if result is not NotImplemented:
            return result
        with NoTorchFunction():
            if func not in METADATA and any(
                isinstance(t, cls) and t.experts.adapters.get(t.key) for t in tree_leaves((args, kwargs))
            ):
                args, kwargs = tree_map(lambda t: t.adapted() if isinstance(t, cls) else t, (args, kwargs))
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return args[0].variant(args[0].index, args[0].swapped)
        named = zip(schema_of(func).arguments, args, strict=False)
        if any(a.alias_info is not None and a.alias_info.is_write and isinstance(v, cls) for a, v in named):
            raise read_only_error()
        dense = tree_map(lambda t: t.dense() if isinstance(t, cls) else t, (args, kwargs))
        return func(*dense[0], **dense[1])


# --- functions that need no dense copy of the whole weight ------------------------------------------------------------


def _without_dense(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of a function that can run one expert at a time; NotImplemented for other functions."""
    name = getattr(func, "__name__", "")
    first = args[0] if args else None
    if isinstance(first, FusedWeight):
        if name == "__getitem__" and first.index is None and (index := _expert_index(args[1], len(first))) is not None:
            return first.variant(index, first.swapped)
        transposes = name in ("transpose", "swapaxes", "swapdims") and _last_two(args[1:], first.dim())
        if (transposes and not kwargs) or func == torch.Tensor.mT.__get__:
            return first.variant(first.index, not first.swapped)
        return NotImplemented
    if not isinstance(first, torch.Tensor) or is_sharded(first) or len(args) < 2:
        return NotImplemented
    weight = args[1]
    if not isinstance(weight, FusedWeight):
        return NotImplemented
    if name == "linear" and weight.index is not None:
        bias = args[2] if len(args) > 2 else kwargs.get("bias")
        out = product(first, weight.variant(weight.index, not weight.swapped))
        return out if bias is None else out + bias
    if name in ("matmul", "mm", "__matmul__") and weight.index is not None and not kwargs:
        return product(first, weight)
    if name == "bmm" and weight.index is None and not kwargs:  # every expert has the same number of rows
        count, each, _ = first.shape
        out = product(first.flatten(0, 1), weight, [each * (i + 1) for i in range(count)])
        return out.view(count, each, -1)
    if name in ("grouped_mm", "_grouped_mm", "grouped_mm_fallback") and weight.index is None and first.ndim == 2:
        offsets = kwargs.get("offs", args[2] if len(args) > 2 else None)
        return NotImplemented if offsets is None else product(first, weight, _ends(offsets, len(first)))
    return NotImplemented


def _expert_index(index: Any, count: int) -> int | None:
    """The expert that an index selects; None if it selects several or is out of range."""
    if isinstance(index, torch.Tensor) and index.ndim == 0 and index.dtype in (torch.int64, torch.int32):
        index = int(index)
    if not isinstance(index, int) or isinstance(index, bool) or not -count <= index < count:
        return None
    return index % count


def _last_two(dims: Sequence[int], ndim: int) -> bool:
    return len(dims) == 2 and {dim % ndim for dim in dims} == {ndim - 2, ndim - 1}


def _ends(offsets: torch.Tensor, rows: int) -> list[int]:
    """Where each expert's tokens end. Cached on the offsets, so the host waits for the device once per layer."""
    if offsets.is_meta:
        return list(itertools.accumulate(accelerator.rows_of_groups(rows, len(offsets))))
    known = getattr(offsets, "_fullshard_ends", None)
    if known is None:
        known = offsets._fullshard_ends = offsets.tolist()
    return known


# --- products ---------------------------------------------------------------------------------------------------------

Segments = list[tuple[int, int, int]]
"""(expert, start, stop): the rows of the input that belong to each expert."""


def product(x: torch.Tensor, weight: FusedWeight, ends: Sequence[int] | None = None) -> torch.Tensor:
    """`x @ weight` with adapters: for one expert, or with `ends` for each expert and its rows of `x`."""
    rows = x.reshape(-1, x.shape[-1])
    if weight.index is not None:
        segments: Segments = [(weight.index, 0, len(rows))]
    else:
        starts = [0, *(ends or ())]
        segments = [(i, a, b) for i, (a, b) in enumerate(itertools.pairwise(starts)) if a < b]
    form, tensors = weight.experts.expert_stack(weight.key)
    out: torch.Tensor = _Product.apply(rows, segments, weight.stack_swapped, form, *tensors)
    for left, right, scale, _ in weight.experts.adapters.get(weight.key, ()):
        if weight.swapped:
            left, right = right.transpose(1, 2), left.transpose(1, 2)
        out = out + scale * _segmented(_segmented(rows, left, segments), right, segments)
    return out.view(*x.shape[:-1], out.shape[-1])


def _segmented(x: torch.Tensor, matrices: torch.Tensor, segments: Segments) -> torch.Tensor:
    """Each expert's rows of `x` times its matrix; zeros for rows of no expert."""
    by_expert = matrices.to(x.dtype).unbind(0)
    with without_autocast(x.device):
        products = [x[a:b] @ by_expert[i] for i, a, b in segments]
    done = sum(len(part) for part in products)
    if done < len(x):
        products.append(x.new_zeros(len(x) - done, matrices.shape[-1]))
    return torch.cat(products)


class _Product(torch.autograd.Function):
    """The product with packed weights, one expert at a time."""

    @staticmethod
    def forward(ctx, x, segments, swapped, form, *tensors):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(*tensors)
        ctx.layout = segments, swapped, form
        return _multiply(x, Stack(form, tensors), segments, swapped)

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[Any, ...]:
        segments, swapped, form = ctx.layout
        stack = Stack(form, ctx.saved_tensors)
        return _multiply(grad_out, stack, segments, not swapped), *[None] * (3 + len(stack.tensors))


def _multiply(x: torch.Tensor, stack: Stack, segments: Segments, swapped: bool) -> torch.Tensor:
    _, rows, columns = stack.shape
    out = x.new_zeros(len(x), rows if swapped else columns)
    with without_autocast(x.device):
        for i, a, b in segments:
            with stack.dense_matrix(i, x.dtype) as matrix:
                torch.mm(x[a:b], matrix.T if swapped else matrix, out=out[a:b])
    return out
