"""The gate of experts: what lies between their two projections, as one pass forward and one backward.

    (clamp(up) + offset) · activation(alpha · clamp(gate)) / alpha

Which of these a class computes is tried on random numbers (`find_gate`), never looked up by name.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch

from fullshard.device import accelerator
from fullshard.lora.gated_mlp_math import ACTIVATIONS

TRIED = (64, 32)
"""Rows and inner size of the trial."""
SPREAD = 8.0
"""The standard deviation of its numbers, which exceed limits."""


class Gate(NamedTuple):
    """A gate."""

    activation: str
    """A name in `ACTIVATIONS`."""
    gated: bool = True
    """Whether there are two branches; otherwise there is only an activation function."""
    interleaved: bool = False
    """Whether columns of the branches alternate; otherwise those of the gate come first."""
    alpha: float = 1.0
    limit: float = math.inf
    """Of the gate from above, and of the other branch on both sides."""
    offset: float = 0.0

    def __str__(self) -> str:
        kinds = f"{int(self.gated)}:{int(self.interleaved)}"
        return f"{self.activation}:{kinds}:{self.alpha}:{self.limit}:{self.offset}"

    @staticmethod
    @functools.cache
    def parse(text: str) -> Gate:
        """The gate of a string from `str`."""
        activation, gated, interleaved, *numbers = text.split(":")
        return Gate(activation, gated == "1", interleaved == "1", *map(float, numbers))

    def forward(self, inner: torch.Tensor) -> torch.Tensor:
        """The gate's output [rows, inner] for that of the first projection."""
        if accelerator.runs_triton(inner.device):
            from fullshard.models import experts_kernels

            return experts_kernels.gate_forward(inner, self)
        g, u = self._branches(inner)
        activated, _ = self._activated(g)
        return (activated if u is None else (u.clamp(-self.limit, self.limit) + self.offset) * activated).to(
            inner.dtype
        )

    def backward(
        self, grad_out: torch.Tensor, inner: torch.Tensor, weights: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """For the gradient of the output before rows are weighted: the gradient of `inner` and the output, both with
        `weights` [rows], and the gradients of these weights, in at least fp32."""
        if accelerator.runs_triton(inner.device):
            from fullshard.models import experts_kernels

            return experts_kernels.gate_backward(grad_out, inner, weights, self)
        g, u = self._branches(inner)
        activated, slope = self._activated(g)
        slope = slope * (g <= self.limit)
        d = grad_out.to(g.dtype)
        factor = torch.ones_like(g) if u is None else u.clamp(-self.limit, self.limit) + self.offset
        out = factor * activated
        d_weights = (d * out).sum(1)
        if weights is not None:
            column = weights.to(g.dtype)[:, None]
            d, out = d * column, out * column
        parts = [d * factor * slope] + ([] if u is None else [d * activated * (u.abs() <= self.limit)])
        d_inner = torch.stack(parts, -1).flatten(1) if self.interleaved else torch.cat(parts, 1)
        return d_inner.to(inner.dtype), out.to(inner.dtype), d_weights

    def _branches(self, inner: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Gate and other branch in a wide dtype."""
        wide = inner.to(torch.promote_types(inner.dtype, torch.float32))
        if not self.gated:
            return wide, None
        if self.interleaved:
            return wide[:, ::2], wide[:, 1::2]
        half = wide.shape[1] // 2
        return wide[:, :half], wide[:, half:]

    def _activated(self, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        activated, slope = ACTIVATIONS[self.activation](self.alpha * g.clamp(max=self.limit))
        return activated / self.alpha, slope


def find_gate(experts: Any) -> Gate | None:
    """The gate of a module with experts; None if it is of no known form."""
    numbers = {value for value in vars(experts).values() if type(value) in (int, float) and 0 < value < math.inf}
    gated, interleaved = bool(experts.has_gate), not experts.is_concatenated
    rows, size = TRIED
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad(), torch.device("cpu"):
        inner = torch.randn(rows, size * (2 if gated else 1), generator=draw, dtype=torch.float64) * SPREAD
        try:
            expected = (experts._apply_gate if gated else experts.act_fn)(inner)
        except Exception:
            return None
        for limit in (math.inf, *numbers):
            for alpha in (1.0, *numbers) if gated else (1.0,):
                for offset in (0.0, 1.0) if gated else (0.0,):
                    for activation in ACTIVATIONS:
                        gate = Gate(activation, gated, interleaved, float(alpha), float(limit), offset)
                        if torch.allclose(gate.forward(inner), expected, rtol=1e-5, atol=1e-5):
                            return gate
    return None
