"""Dropout in front of adapters, drawn inside the products that need it: no mask and no masked copy is kept.

A mask is a function of (seed, adapter, row, column), so that backward and recomputation draw the same one. The seed is
a tensor, drawn from torch's generator where the layers are called: it depends on the run's seed, step and rank, and on
the layer; checkpointing restores the generator before it recomputes. Each adapter of a group has a mask of its own.
Layers that run in slices of the sequence (`activations/slices.py`) draw the same masks: a slice knows its first row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from fullshard.activations.slice_random import seeds_of_slice
from fullshard.device import accelerator

STEPS = 2**16
"""Probabilities are multiples of 1/STEPS."""
BLOCK = 256
"""Rows of a mask that CPUs draw from one generator."""


OF_SLICE = "_fullshard_dropout_slice"
"""Attribute of a LoRA layer whose input is a slice, with a mask of its own: the number of that slice."""


def draw_seed(device: torch.device, count: int = 1) -> torch.Tensor:
    """New seeds [count]; in a slice of the sequence [count, 2], each with the slice's first row. The compiler knows
    this operator as a random one and does not repeat it in backward."""
    if torch.compiler.is_compiling():
        return torch.randint(2**62, (count,), device=device)
    return seeds_of_slice(lambda: torch.randint(2**62, (count,), device=device))


def seed_of_slice(seed: torch.Tensor, layer: Any) -> torch.Tensor:
    """The seed for a layer's input: ranks that have slices of the same rows draw the same seeds."""
    return seed + getattr(layer, OF_SLICE, 0) * 0x1F123BB5159A55E5 % 2**62


class Dropout(NamedTuple):
    """The dropout of a group's adapters."""

    seed: torch.Tensor
    """int64 [1], or [1, 2] with the number of the first row"""
    probability: float

    @property
    def threshold(self) -> int:
        """Elements whose 16 random bits are below are dropped."""
        return round(self.probability * STEPS)

    @property
    def scale(self) -> float:
        """What the kept elements are multiplied by."""
        return STEPS / (STEPS - self.threshold)

    def product(self, x: torch.Tensor, a: torch.Tensor, width: int) -> torch.Tensor:
        """`dropout_i(x) @ A_iᵀ` for all adapters i; `a` has `width` rows for each."""
        if accelerator.runs_triton(x.device):
            from fullshard.lora import fused_kernels

            return fused_kernels.product(x, a, width, self.seed, self.threshold, self.scale)
        return torch.cat([self._dropped(x, i) @ rows.t() for i, rows in enumerate(a.split(width))], dim=1)

    def grad_weight(self, dh: torch.Tensor, x: torch.Tensor, width: int) -> torch.Tensor:
        """`dh_iᵀ @ dropout_i(x)` for all adapters."""
        if accelerator.runs_triton(x.device):
            from fullshard.lora import fused_kernels

            return fused_kernels.grad_weight(dh, x, width, self.seed, self.threshold, self.scale)
        return torch.cat([part.t() @ self._dropped(x, i) for i, part in enumerate(dh.split(width, dim=1))])

    def grad_input(self, dh: torch.Tensor, a: torch.Tensor, width: int, dx: torch.Tensor | None = None) -> torch.Tensor:
        """The sum of `dropout_i(dh_i @ A_i)` over all adapters. If `dx` is given, it is added there, in place."""
        if accelerator.runs_triton(dh.device):
            from fullshard.lora import fused_kernels

            return fused_kernels.grad_input(dx, dh, a, width, self.seed, self.threshold, self.scale)
        out = dh.new_zeros(len(dh), a.shape[1]) if dx is None else dx
        for i, (part, rows) in enumerate(zip(dh.split(width, dim=1), a.split(width), strict=True)):
            out += self._dropped(part @ rows, i)
        return out

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """A masked copy of `x` [rows, size], with the mask of the first adapter."""
        if accelerator.runs_triton(x.device):
            from fullshard.lora import fused_kernels

            return fused_kernels.apply_dropout(x, self.seed, self.threshold, self.scale)
        return torch.empty_like(x) if x.is_meta else self._dropped(x, 0)

    def _dropped(self, x: torch.Tensor, adapter: int) -> torch.Tensor:
        return x * (self.kept(x.shape, adapter) * self.scale).to(x.dtype)

    def kept(self, shape: torch.Size, adapter: int) -> torch.Tensor:
        """The mask of an adapter on CPUs."""
        seed, first = (*self.seed.flatten().tolist(), 0)[:2]
        before, generator = first % BLOCK, torch.Generator()
        bits = torch.empty(before + shape[0], *shape[1:], dtype=torch.int32)
        for block, rows in enumerate(bits.split(BLOCK), first // BLOCK):
            generator.manual_seed((seed + adapter * 0x9E3779B97F4A7C15 + block * 0xD1342543DE82EF95) % 2**63)
            rows.random_(STEPS, generator=generator)
        return bits[before:] >= self.threshold
