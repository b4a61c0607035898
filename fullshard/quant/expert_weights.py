"""`FusedWeight`: 4-bit weights of all experts in the shape of the dense tensor, and the products with them.

A module's forward takes one expert of it (`weight[i]`) and multiplies, or hands it whole to a grouped product with the
tokens sorted by expert. Both unpack one expert, multiply and forget it, in forward and again in backward. Any other use
unpacks what it needs; writing to it is refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fullshard.quant import sharded_groups
from fullshard.quant.linear import ReadOnlyWeight, refusal
from fullshard.quant.ops import exactly
from fullshard.spmd.tensor import is_sharded
from fullshard.torch_private import (
    NoTorchFunction,
    make_wrapper_subclass,
    parameters_of,
    schema_of,
    tree_leaves,
    tree_map,
)

if TYPE_CHECKING:
    from fullshard.quant.experts import NF4Experts

FACTS = {
    *(getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "layout", "ndim", "requires_grad",
                                                       "is_meta", "is_leaf", "grad_fn", "grad")),
    torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.is_floating_point, torch.Tensor.detach,
    torch.Tensor.__len__,
}  # fmt: skip
"""What asks for no values."""


class Factors(NamedTuple):
    """A LoRA on a fused weight: scale × left @ right for each expert."""

    left: torch.Tensor
    """[experts, rows, r]"""
    right: torch.Tensor
    """[experts, r, columns]"""
    scale: float


class FusedWeight(ReadOnlyWeight):
    """A fused weight [experts, rows, columns], or with `index` one expert of it; `swapped` exchanges rows and
    columns."""

    experts: NF4Experts
    key: str
    index: int | None
    swapped: bool
    _is_hf_initialized = True  # transformers' initialisers pass over it

    @staticmethod
    def __new__(cls, experts: NF4Experts, name: str, index: int | None = None, swapped: bool = False) -> FusedWeight:
        count, rows, columns = experts.fused[name]
        matrix = (columns, rows) if swapped else (rows, columns)
        made: Any = make_wrapper_subclass(
            cls, matrix if index is not None else (count, *matrix), requires_grad=False,
            dtype=experts.running_dtype or experts.compute_dtype or experts.dtype,
            device=parameters_of(experts)[name].device,
        )  # fmt: skip
        made.experts, made.key, made.index, made.swapped = experts, name, index, swapped
        return made

    def __init__(self, experts: NF4Experts, name: str, index: int | None = None, swapped: bool = False) -> None:
        super().__init__()

    def __repr__(self) -> str:
        return f"FusedWeight({self.key}, {tuple(self.shape)})"

    def other(self, index: int | None, swapped: bool) -> FusedWeight:
        return FusedWeight(self.experts, self.key, index, swapped)

    def dense(self) -> torch.Tensor:
        """The values, as they are without adapters."""
        stack = self.experts.fused[self.key]
        if self.index is None:
            found = self.experts.dequantize(self.key, self.dtype)
        else:
            parts = sharded_groups.matrix_of(
                self.experts.whole_parts(self.key), self.index, stack[1:], self.experts.scheme
            )
            found = sharded_groups.dense(parts, stack[1:], self.experts.scheme, self.dtype)
        return found.transpose(-2, -1) if self.swapped else found

    def adapted(self) -> torch.Tensor:
        """The values with the adapters that are in force added."""
        found = self.dense()
        for left, right, scale in self.experts.adapters.get(self.key, ()):
            delta = (left if self.index is None else left[self.index]) @ (
                right if self.index is None else right[self.index]
            )
            found = found + scale * (delta.transpose(-2, -1) if self.swapped else delta).to(found.dtype)
        return found

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = _known(func, args, kwargs)
        if found is not NotImplemented:
            return found
        with NoTorchFunction():
            if func not in FACTS and any(
                isinstance(t, cls) and t.experts.adapters.get(t.key) for t in tree_leaves((args, kwargs))
            ):
                args, kwargs = tree_map(lambda t: t.adapted() if isinstance(t, cls) else t, (args, kwargs))
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return args[0].other(args[0].index, args[0].swapped)
        named = zip(schema_of(func).arguments, args, strict=False)
        if any(a.alias_info is not None and a.alias_info.is_write and isinstance(v, cls) for a, v in named):
            raise refusal()
        dense = tree_map(lambda t: t.dense() if isinstance(t, cls) else t, (args, kwargs))
        return func(*dense[0], **dense[1])


# --- what is known about them -----------------------------------------------------------------------------------------


def _known(func: Any, args: Any, kwargs: Any) -> Any:
    """What a function gives that is done without unpacking the whole; NotImplemented for others."""
    name = getattr(func, "__name__", "")
    first = args[0] if args else None
    if isinstance(first, FusedWeight):
        if name == "__getitem__" and first.index is None and (index := _one(args[1], len(first))) is not None:
            return first.other(index, first.swapped)
        exchanged = name in ("transpose", "swapaxes", "swapdims") and _last_two(args[1:], first.dim())
        if (exchanged and not kwargs) or func == torch.Tensor.mT.__get__:
            return first.other(first.index, not first.swapped)
        return NotImplemented
    if not isinstance(first, torch.Tensor) or is_sharded(first) or len(args) < 2:
        return NotImplemented
    weight = args[1]
    if not isinstance(weight, FusedWeight):
        return NotImplemented
    if name == "linear" and weight.index is not None:
        bias = args[2] if len(args) > 2 else kwargs.get("bias")
        out = product(first, weight.other(weight.index, not weight.swapped))
        return out if bias is None else out + bias
    if name in ("matmul", "mm", "__matmul__") and weight.index is not None and not kwargs:
        return product(first, weight)
    if name == "bmm" and weight.index is None and not kwargs:  # every expert gets as many rows
        count, each, _ = first.shape
        out = product(first.flatten(0, 1), weight, [each * (i + 1) for i in range(count)])
        return out.view(count, each, -1)
    if name in ("grouped_mm", "_grouped_mm", "grouped_mm_fallback") and weight.index is None and first.ndim == 2:
        offsets = kwargs.get("offs", args[2] if len(args) > 2 else None)
        return NotImplemented if offsets is None else product(first, weight, _ends(offsets))
    return NotImplemented


def _one(index: Any, count: int) -> int | None:
    """The number of the expert that an index takes; None if it takes several, or none that there is."""
    if isinstance(index, torch.Tensor) and index.ndim == 0 and index.dtype in (torch.int64, torch.int32):
        index = int(index)
    if not isinstance(index, int) or isinstance(index, bool) or not -count <= index < count:
        return None
    return index % count


def _last_two(dims: Sequence[int], ndim: int) -> bool:
    return len(dims) == 2 and {dim % ndim for dim in dims} == {ndim - 2, ndim - 1}


def _ends(offsets: torch.Tensor) -> list[int]:
    """Where each expert's tokens end. A layer's products share the offsets, so the host waits for them once."""
    known = getattr(offsets, "_fullshard_ends", None)
    if known is None:
        known = offsets._fullshard_ends = offsets.tolist()
    return known


# --- products ---------------------------------------------------------------------------------------------------------

Segments = list[tuple[int, int, int]]
"""Which expert, and which rows of the input are its: from, to."""


def product(x: torch.Tensor, weight: FusedWeight, ends: Sequence[int] | None = None) -> torch.Tensor:
    """`x @ weight`: of one expert, or, with `ends`, of each with its own rows of `x`; adapters included."""
    rows = x.reshape(-1, x.shape[-1])
    if weight.index is not None:
        segments: Segments = [(weight.index, 0, len(rows))]
    else:
        starts = [0, *(ends or ())]
        segments = [(i, a, b) for i, (a, b) in enumerate(itertools.pairwise(starts)) if a < b]
    parts = weight.experts.parts(weight.key)
    held = (parts["packed"], parts["absmax"], parts.get("nested"))
    stack, scheme = weight.experts.fused[weight.key], weight.experts.scheme
    out: torch.Tensor = _Product.apply(rows, *held, segments, stack[1:], weight.swapped, scheme)
    for left, right, scale in weight.experts.adapters.get(weight.key, ()):
        if weight.swapped:
            left, right = right.transpose(1, 2), left.transpose(1, 2)
        out = out + scale * _segmented(_segmented(rows, left, segments), right, segments)
    return out.view(*x.shape[:-1], out.shape[-1])


def _segmented(x: torch.Tensor, matrices: torch.Tensor, segments: Segments) -> torch.Tensor:
    """Each expert's rows of `x` times its matrix; zeros where there is none."""
    by_expert = matrices.to(x.dtype).unbind(0)
    with exactly(x.device):
        found = [x[a:b] @ by_expert[i] for i, a, b in segments]
    done = sum(len(part) for part in found)
    if done < len(x):
        found.append(x.new_zeros(len(x) - done, matrices.shape[-1]))
    return torch.cat(found)


class _Product(torch.autograd.Function):
    """The product with packed weights, expert by expert."""

    @staticmethod
    def forward(ctx, x, packed, absmax, nested, segments, shape, swapped, scheme):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(packed, absmax, nested)
        ctx.about = segments, shape, swapped, scheme
        return _multiply(x, (packed, absmax, nested), segments, shape, swapped, scheme)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        segments, shape, swapped, scheme = ctx.about
        found = _multiply(gradient, ctx.saved_tensors, segments, shape, not swapped, scheme)
        return found, None, None, None, None, None, None, None


def _multiply(
    x: torch.Tensor, held: Any, segments: Segments, shape: tuple[int, ...], swapped: bool, scheme: sharded_groups.Scheme
) -> torch.Tensor:
    parts = {name: part for name, part in zip(("packed", "absmax", "nested"), held, strict=True) if part is not None}
    out = x.new_zeros(len(x), shape[0] if swapped else shape[1])
    with exactly(x.device):
        for i, a, b in segments:
            matrix = sharded_groups.dense(sharded_groups.matrix_of(parts, i, shape, scheme), shape, scheme, x.dtype)
            torch.mm(x[a:b], matrix.T if swapped else matrix, out=out[a:b])
    return out
