"""Gated MLPs of a PEFT model that run as one operator: `down(activation(gate(x)) * up(x))` with adapters on all three.

`fuse_mlps` replaces the forward of single modules; it comes after `fuse_lora` and, like it, looks again in each call
whether the layers are plain LoRA on frozen weights. If one is not, the module's own forward runs.
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from fullshard.device.torch_private import has_hooks
from fullshard.lora import gated_mlp_math as arithmetic
from fullshard.lora.fused_dropout import Dropout, draw_seed, seed_of_slice
from fullshard.lora.fused_math import Layer, layer_output, scaled_product
from fullshard.lora.fused_ops import Tensors, as_rows, flat, layers_of
from fullshard.lora.gated_mlp_math import Branches, Dropouts, Saved
from fullshard.quant import base_product
from fullshard.quant.ops import autocasts, compute_dtype, without_autocast
from fullshard.spmd.tensor import is_sharded


class GatedMlp(NamedTuple):
    """The three layers, and the activation function by its name in `ACTIVATIONS`."""

    gate: Layer
    up: Layer
    down: Layer
    activation: str


def gated_mlp(x: torch.Tensor, mlp: GatedMlp, seeds: torch.Tensor | None, probability: float) -> torch.Tensor:
    """The output of the MLP. `seeds` are two: for the dropout in front of gate and up, and of down. Without them there
    is no dropout."""
    layout, base, a, b, scales = flat([mlp.gate, mlp.up])
    about = layout, scales, mlp.activation, probability
    tensors = [*base, *a, mlp.down.a, *b]
    down, down_base, _, _, down_scales = flat([mlp.down])
    if torch.compiler.is_compiling():
        middle, h, *_ = gated_branches(x, tensors, seeds, *about)
        return down_product(middle, h, down_base, mlp.down.b, down, *down_scales)
    middle, h = _Branches.apply(about, seeds, x, *tensors)
    out: torch.Tensor = _Down.apply(middle, h, mlp.down.b, down, *down_scales, *down_base)
    return out


# --- up to the product of the branches --------------------------------------------------------------------------------

ADAPTERS = 5
"""`a` of gate, up and down, `b` of gate and up: the last of the operators' tensors, behind the frozen ones."""


def _branches(tensors: Tensors, layout: str, scales: Sequence[float], activation: str) -> Branches:
    base, (a_gate, a_up, a_down, *b) = tensors[:-ADAPTERS], tensors[-ADAPTERS:]
    gate, up = layers_of(layout, base, [a_gate, a_up], b, scales)
    return Branches(gate, up, activation, a_down)


def _dropouts(seeds: torch.Tensor | None, probability: float) -> Dropouts | None:
    return None if seeds is None else Dropouts(*(Dropout(seed, probability) for seed in seeds.split(1)))


def _forward(x: torch.Tensor, tensors: Tensors, seeds: torch.Tensor | None, about: Any) -> list[torch.Tensor]:
    """The product of the branches, `h` of the down projection, and what backward needs besides `x`."""
    *layers, probability = about
    with without_autocast(x.device):
        mlp = _branches(tensors, *layers)
        middle, h_down, saved = arithmetic.forward(as_rows(x), mlp, _dropouts(seeds, probability))
    return [middle.view(*x.shape[:-1], middle.shape[-1]), h_down, *saved[1:]]


def _backward(
    d_middle: torch.Tensor, dh_down: torch.Tensor, x: torch.Tensor, kept: Tensors, tensors: Tensors,
    seeds: torch.Tensor | None, about: Any, wants_x: bool,
) -> list[torch.Tensor]:  # fmt: skip
    """The gradients of `x`, if wanted, and of the adapters."""
    *layers, probability = about
    with without_autocast(x.device):
        saved = Saved(as_rows(x), *kept)
        gradients = arithmetic.backward(
            as_rows(d_middle), dh_down, saved, _branches(tensors, *layers), _dropouts(seeds, probability), wants_x
        )
    return [*([] if gradients.x is None else [gradients.x.view(x.shape)]), *gradients.a, *gradients.b]


class _Branches(torch.autograd.Function):
    """The branches of plain tensors."""

    @staticmethod
    def forward(ctx, about, seeds, x, *tensors):  # type: ignore[no-untyped-def]
        middle, h_down, *kept = _forward(x, tensors, seeds, about)
        ctx.save_for_backward(seeds, x, *kept, *tensors)
        ctx.about = about
        return middle, h_down

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_middle: torch.Tensor, dh_down: torch.Tensor) -> tuple[Any, ...]:
        seeds, x, *rest = ctx.saved_tensors
        kept, tensors = rest[:3], rest[3:]
        wants_x = ctx.needs_input_grad[2]
        grads = _backward(d_middle, dh_down, x, kept, tensors, seeds, ctx.about, wants_x)
        dx, grads = (grads[0], grads[1:]) if wants_x else (None, grads)
        return None, None, dx, *[None] * (len(tensors) - ADAPTERS), *grads


@torch.library.custom_op("fullshard::gated_branches", mutates_args=())
def gated_branches(
    x: torch.Tensor, tensors: Sequence[torch.Tensor], seeds: torch.Tensor | None, layout: str, scales: Sequence[float],
    activation: str, probability: float,
) -> list[torch.Tensor]:  # fmt: skip
    """The product of the branches, `h` of the down projection, and what backward needs besides `x`."""
    return _forward(x, tensors, seeds, (layout, scales, activation, probability))


@gated_branches.register_fake
def _(x, tensors, seeds, layout, scales, activation, probability):  # type: ignore[no-untyped-def]
    mlp = _branches(tensors, layout, scales, activation)
    tokens, inner = x.numel() // x.shape[-1], base_product.shape(mlp.gate.form, mlp.gate.base)[0]
    width = max(len(mlp.gate.a), len(mlp.up.a))
    sizes = len(mlp.a_down), inner, inner, 2 * width
    return [x.new_empty(*x.shape[:-1], inner), *(x.new_empty(tokens, size) for size in sizes)]


@torch.library.custom_op("fullshard::gated_branches_backward", mutates_args=())
def gated_branches_backward(
    d_middle: torch.Tensor, dh_down: torch.Tensor, x: torch.Tensor, kept: Sequence[torch.Tensor],
    tensors: Sequence[torch.Tensor], seeds: torch.Tensor | None, layout: str, scales: Sequence[float], activation: str,
    probability: float, wants_x: bool,
) -> list[torch.Tensor]:  # fmt: skip
    """The gradients of `x`, if wanted, and of the adapters."""
    about = layout, scales, activation, probability
    grads = _backward(d_middle, dh_down, x, kept, tensors, seeds, about, wants_x)
    first = int(wants_x)  # results of an operator must not share memory: those of gate and up are rows of one tensor
    return [one.clone() if first <= i < first + 2 else one for i, one in enumerate(grads)]


@gated_branches_backward.register_fake
def _(d_middle, dh_down, x, kept, tensors, seeds, layout, scales, activation, probability, wants_x):  # type: ignore[no-untyped-def]
    return [t.new_empty(t.shape) for t in (*([x] if wants_x else []), *tensors[-ADAPTERS:])]


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    x, tensors, seeds, *ctx.about = inputs
    ctx.save_for_backward(seeds, x, *output[2:], *tensors)


def _branches_backward(ctx: Any, grads: Sequence[Any]) -> tuple[Any, ...]:
    seeds, x, *rest = ctx.saved_tensors
    kept, tensors = rest[:3], rest[3:]
    wants_x = ctx.needs_input_grad[0]
    adapter_grads = gated_branches_backward(grads[0], grads[1], x, kept, tensors, seeds, *ctx.about, wants_x)
    dx, adapter_grads = (adapter_grads[0], adapter_grads[1:]) if wants_x else (None, adapter_grads)
    return dx, [*[None] * (len(tensors) - ADAPTERS), *adapter_grads], None, None, None, None, None


gated_branches.register_autograd(_branches_backward, setup_context=_keep)


# --- the down projection ----------------------------------------------------------------------------------------------


def _down(layout: str, base: Tensors, b: torch.Tensor, scale: float) -> Layer:
    (layer,) = layers_of(layout, base, [b], [b], [scale])  # `a` has been used already
    return layer


def _down_forward(x: torch.Tensor, h: torch.Tensor, layer: Layer) -> torch.Tensor:
    with without_autocast(x.device):
        y = layer_output(base_product.prepare([layer.form], as_rows(x)), layer, h)
    return y.view(*x.shape[:-1], y.shape[-1])


def _down_backward(dy: torch.Tensor, h: torch.Tensor, layer: Layer) -> list[torch.Tensor]:
    """The gradients of the input by way of the frozen weight, of `h`, and of `b`."""
    with without_autocast(dy.device):
        rows = as_rows(dy)
        dx = base_product.grad_input(layer.form, layer.base, rows)
        dh, db = scaled_product(rows, layer.b, layer.scale), scaled_product(rows.t(), h, layer.scale)
    return [dx.view(*dy.shape[:-1], dx.shape[-1]), dh, db]


class _Down(torch.autograd.Function):
    """The down projection of plain tensors."""

    @staticmethod
    def forward(ctx, x, h, b, layout, scale, *base):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(h, b, *base)
        ctx.about = layout, scale
        return _down_forward(x, h, _down(layout, base, b, scale))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        h, b, *base = ctx.saved_tensors
        layout, scale = ctx.about
        return *_down_backward(dy, h, _down(layout, base, b, scale)), None, None, *[None] * len(base)


@torch.library.custom_op("fullshard::down_product", mutates_args=())
def down_product(
    x: torch.Tensor, h: torch.Tensor, base: Sequence[torch.Tensor], b: torch.Tensor, layout: str, scale: float
) -> torch.Tensor:
    """The output of a layer whose adapter's rank-sized activations are known."""
    return _down_forward(x, h, _down(layout, base, b, scale))


@down_product.register_fake
def _(x, h, base, b, layout, scale):  # type: ignore[no-untyped-def]
    layer = _down(layout, base, b, scale)
    return x.new_empty(*x.shape[:-1], base_product.shape(layer.form, layer.base)[0])


@torch.library.custom_op("fullshard::down_product_backward", mutates_args=())
def down_product_backward(
    dy: torch.Tensor, h: torch.Tensor, base: Sequence[torch.Tensor], b: torch.Tensor, layout: str, scale: float
) -> list[torch.Tensor]:
    """The gradients of the input by way of the frozen weight, of `h`, and of `b`."""
    return _down_backward(dy, h, _down(layout, base, b, scale))


@down_product_backward.register_fake
def _(dy, h, base, b, layout, scale):  # type: ignore[no-untyped-def]
    layer = _down(layout, base, b, scale)
    inner = base_product.shape(layer.form, layer.base)[1]
    return [dy.new_empty(*dy.shape[:-1], inner), h.new_empty(h.shape), b.new_empty(b.shape)]


def _keep_down(ctx: Any, inputs: Any, output: Any) -> None:
    _, h, base, b, *ctx.about = inputs
    ctx.save_for_backward(h, b, *base)


def _down_product_backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    h, b, *base = ctx.saved_tensors
    dx, dh, db = down_product_backward(dy, h, base, b, *ctx.about)
    return dx, dh, [None] * len(base), db, None, None


down_product.register_autograd(_down_product_backward, setup_context=_keep_down)

LARGEST_RANK = 64
"""Of adapters: the kernels keep a row's rank-sized sums in registers."""


class GatedParts(NamedTuple):
    """The names of the layers of a gated MLP, and of its activation function; see `models/layer_groups.py`."""

    gate: str
    up: str
    down: str
    activation: str


def fuse_mlps(model: nn.Module, known: Mapping[type, GatedParts]) -> int:
    """Let gated MLPs whose three layers are in LoRA groups run as one operator; `known` has the parts by class of
    module. Returns how many do."""
    count = 0
    for module in model.modules():
        parts = known.get(type(module))
        if parts is None or "forward" in module.__dict__:
            continue
        layers = [getattr(module, name, None) for name in parts[:3]]
        if all("_fullshard_lora" in getattr(layer, "__dict__", ()) for layer in layers) and _fits(layers):
            module._fullshard_mlp = parts
            module.forward = types.MethodType(_run_joint, module)
            count += 1
    return count


def _fits(layers: list[Any]) -> bool:
    groups = [layer._fullshard_lora[0] for layer in layers]
    ranks = [layer.r[group.adapter] for layer, group in zip(layers, groups, strict=True)]
    return max(ranks) <= LARGEST_RANK and len({group.adapter for group in groups}) == 1


def _run_joint(module: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The forward of a gated MLP."""
    if not args and not kwargs and not is_sharded(x):
        out = _fused(module, x)
        if out is not None:
            return out
    plain: torch.Tensor = type(module).forward(module, x, *args, **kwargs)
    return plain


def _fused(module: Any, x: torch.Tensor) -> torch.Tensor | None:
    """The output; None if the module's own forward must run."""
    names = module._fullshard_mlp
    if any(has_hooks(child) for child in module.children()):
        return None
    dtype, casts = compute_dtype(x), autocasts(x.device)
    parts, rates = [], []
    for name in names[:3]:
        layer = getattr(module, name)
        group, index = layer._fullshard_lora
        part = group.part(index, dtype, casts)
        if part is None:
            return None
        parts.append(part)
        rates.append(group.rate(index))
    if rates[0] != rates[1] or rates[1] != rates[2]:
        return None
    seeds = draw_seed(x.device, 2) if rates[0] else None
    if seeds is not None:
        seeds = torch.cat([seeds[:1], seed_of_slice(seeds[1:], getattr(module, names.down))])
    gate, up, down = parts
    return gated_mlp(x.to(dtype), GatedMlp(gate, up, down, names.activation), seeds, rates[0])
