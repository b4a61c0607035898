"""The kernels of a device, for tensors on the meta device that stand for tensors there.

torch chooses attention and dropout kernels by device, and on the meta device it takes the slowest: attention with a
value for each pair of tokens. While a step is traced (`device_kernels`), the operators that the device would run take
their place. They have implementations for the meta device, which tell what is kept for backward. Flex attention, which
is compiled code, is an operator of this file there.

What kernels cost beside their results: `FLOPS`, and the memory that they allocate while they run, `WORKSPACES`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from fullshard.device import accelerator

aten = torch.ops.aten
HALF = (torch.bfloat16, torch.float16)
WIDEST_FLASH = 256
"""The widest heads of flash attention."""
ALIGNMENT = 16
"""Bytes that the rows of a grouped product's result are a multiple of."""


@contextlib.contextmanager
def device_kernels() -> Iterator[None]:
    """Inside, attention and dropout on the meta device are the operators of the device that it stands for (see
    `accelerator.meta_stands_for`)."""
    attention, dropout, grouped = F.scaled_dot_product_attention, F.dropout, F.grouped_mm
    bincount, addmm, autocast = torch.bincount, torch.addmm, torch.autocast

    def attend(query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return (sdpa if query.is_meta else attention)(query, *args, **kwargs)

    def drop(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        one_pass = accelerator.is_accelerator(x.device) or torch.compiler.is_compiling()
        fused = x.is_meta and one_pass and training and 0 < p < 1 and x.requires_grad
        return torch.native_dropout(x, p, True)[0] if fused else dropout(x, p, training, inplace)

    def multiply(a: torch.Tensor, b: torch.Tensor, *, offs: torch.Tensor | None = None, **more: Any) -> torch.Tensor:
        # In other dtypes than bf16 torch refuses grouped products on the meta device only.
        wide = a.is_meta and a.dtype is not torch.bfloat16
        out: torch.Tensor = grouped_mm_on_meta(a, b, offs) if wide else grouped(a, b, offs=offs, **more)
        return out

    def count(x: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0) -> torch.Tensor:
        return x.new_empty(minlength) if x.is_meta else bincount(x, weights, minlength)

    def add_product(total: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        # torch 2.11 takes `out_dtype` for a factor on the meta device only.
        widened = total.is_meta and "out_dtype" in kwargs
        return torch.mm(*args, **kwargs) if widened else addmm(total, *args, **kwargs)

    def cast(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return autocast(accelerator.kind() if device_type == "meta" else device_type, *args, **kwargs)

    with (
        _replaced(F, scaled_dot_product_attention=attend, dropout=drop, grouped_mm=multiply),
        _replaced(torch, bincount=count, addmm=add_product, autocast=cast),
    ):
        yield


@contextlib.contextmanager
def _replaced(module: Any, **functions: Any) -> Iterator[None]:
    before = {name: vars(module)[name] for name in functions}
    vars(module).update(functions)
    try:
        yield
    finally:
        vars(module).update(before)


def sdpa(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Scaled dot-product attention on the meta device, by the kernel that the device would run."""
    mask = attn_mask
    trained_mask = mask is not None and mask.requires_grad
    same_width = query.shape[-1] == key.shape[-1] == value.shape[-1]
    if accelerator.is_accelerator(query.device):
        flash = mask is None and query.dtype in HALF and same_width and query.shape[-1] <= WIDEST_FLASH
        if flash:
            return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
        if query.shape[1] == key.shape[1] and query.dtype != torch.float64:
            bias = None if mask is None else _additive(mask, query.dtype).expand(*query.shape[:3], key.shape[2])
            return aten._scaled_dot_product_efficient_attention(
                query, key, value, bias, _trains(query, key, value), dropout_p, is_causal, scale=scale
            )[0]  # fmt: skip
    elif not dropout_p and same_width and not trained_mask:
        bias = None if mask is None else _additive(mask, query.dtype)
        return aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, dropout_p, is_causal, attn_mask=bias, scale=scale
        )[0]  # fmt: skip
    return aten._scaled_dot_product_attention_math(
        query, key, value, mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )[0]  # fmt: skip


def _trains(*tensors: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def _additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask that is added to scores, as torch makes it of one of booleans for each call."""
    if mask.dtype != torch.bool:
        return mask
    zero, lowest = (torch.scalar_tensor(value, dtype=dtype, device=mask.device) for value in (0.0, -torch.inf))
    return torch.where(mask, zero, lowest)


# --- flex attention -------------------------------------------------------------------------------------------------


# Operators without a kernel: they have shapes, and no values on any device.
torch.library.define(
    "fullshard::flex_attention_on_meta", "(Tensor query, Tensor key, Tensor value) -> (Tensor, Tensor)"
)
torch.library.define(
    "fullshard::flex_attention_on_meta_backward",
    "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse) -> (Tensor, Tensor, Tensor)",
)
flex_attention_on_meta = torch.ops.fullshard.flex_attention_on_meta
"""The output of flex attention, and the log of the sum of exponentials."""


@torch.library.register_fake("fullshard::flex_attention_on_meta")
def _(query, key, value):  # type: ignore[no-untyped-def]
    out = torch.empty_like(query[..., :1].expand(*query.shape[:-1], value.shape[-1]))
    return out, query.new_empty(query.shape[:-1], dtype=torch.float32)


@torch.library.register_fake("fullshard::flex_attention_on_meta_backward")
def _(grad_out, query, key, value, out, lse):  # type: ignore[no-untyped-def]
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs, *output)


def _backward(ctx: Any, grad_out: torch.Tensor, _: Any) -> Any:
    return torch.ops.fullshard.flex_attention_on_meta_backward(grad_out, *ctx.saved_tensors)


torch.library.register_autograd("fullshard::flex_attention_on_meta", _backward, setup_context=_keep)


# --- grouped products ------------------------------------------------------------------------------------------------

torch.library.define("fullshard::grouped_mm_on_meta", "(Tensor a, Tensor b, Tensor? ends) -> Tensor")
grouped_mm_on_meta = torch.ops.fullshard.grouped_mm_on_meta
"""Products of groups: rows of a matrix (which end at `ends`) with a matrix each [rows, k] × [groups, k, n], or columns
with rows [m, rows] × [rows, n], which give a matrix for each group."""


@torch.library.register_fake("fullshard::grouped_mm_on_meta")
def _(a, b, ends):  # type: ignore[no-untyped-def]
    *outer, columns = [ends.shape[0], a.shape[0], b.shape[1]] if b.dim() == 2 else [*a.shape[:-1], b.shape[-1]]
    aligned = -(-columns * a.element_size() // ALIGNMENT) * ALIGNMENT // a.element_size()
    return a.new_empty(*outer, aligned)[..., :columns]


def _keep_factors(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _grouped_backward(ctx: Any, grad_out: torch.Tensor) -> Any:
    a, b, ends = ctx.saved_tensors
    grad_a = _like(a, grad_out, b.transpose(-2, -1), ends) if ctx.needs_input_grad[0] else None
    grad_b = _like(b, a.transpose(-2, -1), grad_out, ends) if ctx.needs_input_grad[1] else None
    return grad_a, grad_b, None


def _like(t: torch.Tensor, a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """A grouped product with the order of dims in memory that a tensor has."""
    if t.stride(-2) < t.stride(-1):
        return grouped_mm_on_meta(b.transpose(-2, -1), a.transpose(-2, -1), ends).transpose(-2, -1)
    return grouped_mm_on_meta(a, b, ends)


torch.library.register_autograd("fullshard::grouped_mm_on_meta", _grouped_backward, setup_context=_keep_factors)


# --- floating-point operations ----------------------------------------------------------------------------------------

BACKWARD_PRODUCTS = 2.5
"""Products of attention's backward, as a multiple of those of its forward: five instead of two."""


def _product(a: torch.Tensor, b: torch.Tensor, *_: Any) -> int:
    """`a @ b`, for single matrices, batches and groups of them."""
    return 2 * a.numel() * b.shape[-1]


def _added(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *_: Any) -> int:
    """`total + a @ b`."""
    return _product(a, b)


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool) -> int:
    """The scores, and their product with the values."""
    pairs = query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2]
    return 2 * pairs * (query.shape[3] + value.shape[3]) // (2 if causal else 1)


def _attention_forward(place: int | None) -> Callable[..., int]:
    """Attention whose argument at `place` tells whether it is causal; None if it always is."""
    return lambda *args: _attention(args[0], args[1], args[2], _is_causal(args, place))


def _attention_backward(place: int | None) -> Callable[..., int]:
    """The same behind the gradient of the output."""
    return lambda *args: int(BACKWARD_PRODUCTS * _attention(args[1], args[2], args[3], _is_causal(args, place)))


def _is_causal(args: Any, place: int | None) -> bool:
    return place is None or (place < len(args) and bool(args[place]))


FLOPS: dict[Any, Callable[..., int]] = {
    **{getattr(aten, name): _product for name in ("mm", "bmm", "_scaled_mm", "_grouped_mm") if hasattr(aten, name)},
    **{getattr(aten, name): _added for name in ("addmm", "addmm_", "baddbmm", "baddbmm_")},
    aten._scaled_dot_product_flash_attention: _attention_forward(4),
    aten._scaled_dot_product_flash_attention_backward: _attention_backward(11),
    aten._scaled_dot_product_flash_attention_for_cpu: _attention_forward(4),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward(7),
    aten._scaled_dot_product_efficient_attention: _attention_forward(6),
    aten._scaled_dot_product_efficient_attention_backward: _attention_backward(11),
    torch.ops.fullshard.grouped_mm_on_meta: _product,
    torch.ops.fullshard.flex_attention_on_meta: _attention_forward(None),
    torch.ops.fullshard.flex_attention_on_meta_backward: _attention_backward(None),
}
"""By operator, the floating-point operations of its kernel, from its positional arguments."""
PLAIN, ATTENTION, ATTENTION_BACKWARD, GROUPED = "products", "attention", "attention backward", "grouped products"
KINDS: dict[Any, str] = {
    **{operator: ATTENTION for operator in FLOPS if "attention" in str(operator)},
    **{operator: ATTENTION_BACKWARD for operator in FLOPS if str(operator).endswith("backward")},
    **{operator: GROUPED for operator in FLOPS if "grouped_mm" in str(operator)},
}
"""Operators that reach less than plain products do, by kind."""
TILE = 128
"""Rows that grouped products of accelerators compute at a time: a group that does not fill its last tile pays for all
of it."""


def padded_operations(operator: Any, args: Any) -> int:
    """The floating-point operations of an operator as the device runs them, with those of tiles that are not full."""
    flops = FLOPS[operator](*args)
    if KINDS.get(operator) != GROUPED or args[1].dim() == 2 or not accelerator.is_accelerator(args[0].device):
        return flops
    groups = accelerator.rows_of_groups(args[0].shape[-2], args[1].shape[0]) if args[0].dim() == 2 else []
    return flops * sum(-(-rows // TILE) * TILE for rows in groups) // sum(groups) if sum(groups) else flops


# --- memory that results do not show ----------------------------------------------------------------------------------


def _flash_backward_bytes(grad_out: torch.Tensor, query: torch.Tensor, key: torch.Tensor, *args: Any, **_: Any) -> int:
    """The fp32 sums of the query's gradient and one number per query; and if heads share keys, the gradients of keys
    and values for each head before they are added up."""
    rows, heads, length, width = query.shape
    length, width = -(-length // 128) * 128, -(-width // 32) * 32
    sums = rows * heads * length * (width + 1) * 4
    shared = 2 * rows * heads * key.shape[2] * query.shape[3] * query.element_size()
    return sums + (shared if key.shape[1] != heads else 0)


def _flex_backward_bytes(grad_out: torch.Tensor, *args: Any) -> int:
    """One fp32 number per query."""
    return grad_out.numel() // grad_out.shape[-1] * 4


def _product_bytes(a: torch.Tensor, b: Any, out: torch.Tensor | None = None) -> int:
    """On the CPU a result of another dtype is computed first in its own."""
    converts = out is not None and out.dtype != a.dtype and not accelerator.is_accelerator(a.device)
    return a.numel() * a.element_size() if converts else 0


WORKSPACES: dict[Any, Callable[..., int]] = {
    aten.mul: _product_bytes,
    aten._scaled_dot_product_flash_attention_backward: _flash_backward_bytes,
    torch.ops.fullshard.flex_attention_on_meta_backward: _flex_backward_bytes,
}
"""By operator, the bytes that its kernel allocates besides its results."""


def product_workspace(capability: tuple[int, int]) -> int:
    """The bytes that cuBLAS keeps for products on GPUs of this compute capability: torch allocates them once for each
    thread that multiplies, here the main thread and that of backward passes."""
    each = {9: 32 * 2**20, 10: 12 * 2**20, 12: 12 * 2**20}.get(capability[0], 8 * 2**20 + 128 * 2**10)
    return 2 * each
