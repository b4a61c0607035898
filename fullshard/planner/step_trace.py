"""What one training step allocates, computes and moves, piece by piece: plain values.

`tracer.py` makes them by tracing a model on the meta device; whoever prices a run reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fullshard.models import kernels_on_meta  # noqa: F401

# Registers its operators.


aten = torch.ops.aten
BACKWARD = 2.5
"""Products of attention's backward, as a multiple of those of its forward: five instead of two."""


def product(a: torch.Tensor, b: torch.Tensor, *_: Any) -> int:
    """`a @ b`, for single matrices, batches and groups of them."""
    return 2 * a.numel() * b.shape[-1]


def added(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *_: Any) -> int:
    """`total + a @ b`."""
    return product(a, b)


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool) -> int:
    """The scores, and their product with the values."""
    pairs = query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2]
    return 2 * pairs * (query.shape[3] + value.shape[3]) // (2 if causal else 1)


def _forward(place: int | None) -> Callable[..., int]:
    """Attention whose argument at `place` tells whether it is causal; None if it always is."""
    return lambda *args: attention(args[0], args[1], args[2], _is_causal(args, place))


def _backward(place: int | None) -> Callable[..., int]:
    """The same behind the gradient of the output."""
    return lambda *args: int(BACKWARD * attention(args[1], args[2], args[3], _is_causal(args, place)))


def _is_causal(args: Any, place: int | None) -> bool:
    return place is None or (place < len(args) and bool(args[place]))


FLOPS: dict[Any, Callable[..., int]] = {
    **{getattr(aten, name): product for name in ("mm", "bmm", "_scaled_mm", "_grouped_mm") if hasattr(aten, name)},
    **{getattr(aten, name): added for name in ("addmm", "addmm_", "baddbmm", "baddbmm_")},
    aten._scaled_dot_product_flash_attention: _forward(4),
    aten._scaled_dot_product_flash_attention_backward: _backward(11),
    aten._scaled_dot_product_flash_attention_for_cpu: _forward(4),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _backward(7),
    aten._scaled_dot_product_efficient_attention: _forward(6),
    aten._scaled_dot_product_efficient_attention_backward: _backward(11),
    torch.ops.fullshard.flex_attention_on_meta: _forward(None),
    torch.ops.fullshard.flex_attention_on_meta_backward: _backward(None),
}
"""By operator, a function of its positional arguments."""


@dataclass(frozen=True)
class Segment:
    """A part of a step: one layer's forward or backward, or what the model does around its layers.

    Bytes are those of tensors that the step allocates. Parameters and buffers are not counted.
    """

    unit: str
    """The layer that runs; empty for the model's own operations around its layers."""
    moment: str
    """"forward", "loss" or "backward"."""
    peak: int
    """The most bytes allocated during it, above those at its start."""
    kept: int
    """Bytes at its end above those at its start; negative where it frees memory."""
    gradients: int
    """Of `kept`: gradients of parameters, whole and in the dtype that autograd gives them."""
    flops: int
    """Floating-point operations of matrix products and attention."""
    read_write: int
    """Bytes that its operators read and write."""


@dataclass(frozen=True)
class StepTrace:
    """The segments of one micro-batch in order: the model's own forward and its layers', loss, and backward."""

    segments: tuple[Segment, ...]
    workspace: int = 0
    """Bytes that are allocated in the first step and kept: the buffer for dequantized weights, and cuBLAS's."""
    notes: tuple[str, ...] = ()
    """What was assumed because it cannot be traced."""
    inputs: Mapping[str, int] = field(default_factory=dict)
    """Bytes of each layer's input."""

    def with_inputs_on_host(self) -> StepTrace:
        """The same step if each layer's input waits on the host: it leaves with the layer's forward and is back before
        the layer's backward. (The input that the next backward needs is copied back meanwhile, and not counted.)"""
        found = []
        for segment in self.segments:
            moved = self.inputs.get(segment.unit, 0)
            if segment.moment == "forward" and moved:
                segment = replace(segment, kept=segment.kept - moved)
            elif segment.moment == "backward" and moved:
                segment = replace(segment, kept=segment.kept + moved, peak=segment.peak + moved)
            found.append(segment)
        return replace(self, segments=tuple(found))
