"""The arithmetic of a layer's experts, with adapters: `Σ weight · down(gate(up(x)))` over the experts of each token.

Pairs of a token and one of its experts are sorted by expert, so each projection is one grouped product
(`quant/grouped_product.py`), whatever the storage of its weights, and each adapter two thin ones beside it. Routing
weights are applied where the experts of a token are added up, in the order in which the router chose them.

Backward needs the inputs, the routing, the output of the first projection and the adapters' rank-sized activations;
what the gate gives and the sorted rows are computed again. The gradient of a routing weight is the product of the
token's gradient with the expert's output, which equals that of the gate's gradient with the gate's output: the
expert's output is not needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from fullshard.device import accelerator
from fullshard.lora.fused_dropout import Dropout
from fullshard.models.experts_gate import Gate
from fullshard.quant.grouped_product import Stack, group_dot, group_sums, grouped_mm, grouped_outer, product

NARROW = 64
"""The largest rank of adapters whose products are limited by how fast their rows are read."""


class Routing(NamedTuple):
    """Pairs of a token and an expert, sorted by expert. Shapes depend on the numbers of tokens and choices only."""

    order: torch.Tensor
    """The pair of each sorted row, by its number (token · choices + choice)."""
    position: torch.Tensor
    """The sorted row of each pair [tokens, choices]. There may be none for a pair whose expert is not here."""
    ends: torch.Tensor
    """Where the rows of each expert end [experts], int32. Rows behind the last belong to experts of other ranks."""

    @classmethod
    def of(cls, chosen: torch.Tensor, experts: int) -> Routing:
        """The routing for the chosen experts [tokens, choices]. Numbers from `experts` on are not here."""
        ids, order = chosen.reshape(-1).to(torch.int16 if experts < 2**15 else torch.int32).sort(stable=True)
        position = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        every = torch.arange(experts, dtype=ids.dtype, device=ids.device)
        return cls(order, position.view(chosen.shape), torch.searchsorted(ids, every, right=True, out_int32=True))

    @property
    def tokens(self) -> torch.Tensor:
        """The token of each sorted row."""
        return self.order // self.position.shape[1]

    def cut(self, rows: int) -> Routing:
        """The same without rows of experts that are not here, whose number the host knows."""
        return self._replace(order=self.order[:rows])

    def by_pair(self, rows: torch.Tensor) -> torch.Tensor:
        """The row of each pair [tokens, choices, …]; any row for those whose expert is not here."""
        index = self.position.reshape(-1).clamp(max=max(len(rows) - 1, 0))
        return rows.index_select(0, index).view(*self.position.shape, *rows.shape[1:])

    def absent(self) -> torch.Tensor:
        """Which pairs have an expert that is not here [tokens, choices]."""
        return self.position >= self.ends[-1]


class Factors(NamedTuple):
    """An adapter of a projection."""

    a: torch.Tensor
    """[experts, rank, in]"""
    b: torch.Tensor
    """[experts, out, rank], scaled"""
    dropout: Dropout | None


class Projection(NamedTuple):
    """A linear layer for each expert."""

    stack: Stack
    transposed: bool
    """Whether the matrices are stored as [in, out]."""
    bias: torch.Tensor | None
    """[experts, out]"""
    adapters: Sequence[Factors]


class Wanted(NamedTuple):
    """Which gradients of a projection are wanted."""

    stack: bool
    bias: bool
    adapters: bool


class ProjectionGrads(NamedTuple):
    """The gradients of a projection's parameters; None where not wanted."""

    stack: torch.Tensor | None
    bias: torch.Tensor | None
    adapters: list[tuple[torch.Tensor, torch.Tensor] | None]
    """Of `a` and `b`."""


class Saved(NamedTuple):
    """What forward keeps for backward."""

    inner: torch.Tensor
    """The output of the first projection [rows, 2·inner], before the gate."""
    up: list[torch.Tensor]
    """The rank-sized activations of its adapters [rows, rank]."""
    down: list[torch.Tensor]
    """Those of the second projection."""


class Gradients(NamedTuple):
    x: torch.Tensor | None
    weights: torch.Tensor | None
    up: ProjectionGrads
    down: ProjectionGrads


# --- forward ----------------------------------------------------------------------------------------------------------


def forward(
    x: torch.Tensor, weights: torch.Tensor | None, routing: Routing, up: Projection, down: Projection, gate: Gate
) -> tuple[torch.Tensor, Saved]:
    """The output for `x` [tokens, in] with routing weights [tokens, choices]; without weights, that of each sorted
    row, zero for rows without an expert."""
    inner, up_saved = project(x, up, routing.ends, routing.tokens)
    rows, down_saved = project(gate.forward(inner), down, routing.ends)
    saved = Saved(inner, up_saved, down_saved)
    if weights is None:
        return rows.masked_fill_(_behind(rows, routing.ends), 0), saved
    return combine(rows, weights, routing), saved


def project(
    x: torch.Tensor, projection: Projection, ends: torch.Tensor, index: torch.Tensor | None = None
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The output of a projection for sorted rows, and the rank-sized activations of its adapters. The rows are those
    of `x` at `index`, if it is given."""
    factors = [(one.a.transpose(1, 2), one.dropout) for one in projection.adapters]
    rows, saved = narrow_products(x, factors, ends, index)
    out = product(rows, projection.stack, ends, projection.transposed)
    bias = projection.bias
    for h, one in zip(saved, projection.adapters, strict=True):
        add_update(out, ends, h, one.b.transpose(1, 2), bias)
        bias = None
    if bias is not None:
        add_update(out, ends, None, None, bias)
    return out, saved


def combine(rows: torch.Tensor, weights: torch.Tensor | None, routing: Routing) -> torch.Tensor:
    """The sum over the experts of each token, weighted if there are weights: [rows, size] to [tokens, size]."""
    if accelerator.runs_triton(rows.device):
        from fullshard.models import experts_kernels

        return experts_kernels.combine(rows, weights, routing.position, routing.ends)
    picked = routing.by_pair(rows).masked_fill(routing.absent()[..., None], 0).to(_wide(rows.dtype))
    if weights is not None:
        picked = picked * weights[..., None]
    return picked.sum(1).to(rows.dtype)


def add_update(
    out: torch.Tensor, ends: torch.Tensor, h: torch.Tensor | None, matrices: torch.Tensor | None,
    bias: torch.Tensor | None = None, dropout: Dropout | None = None,
) -> None:  # fmt: skip
    """Add `h @ matrix + bias` of each group to its rows, in place: [rows, rank] and [groups, rank, size]. Dropout is
    applied to the product."""
    if accelerator.runs_triton(out.device):
        from fullshard.models import experts_kernels

        experts_kernels.add_update(out, ends, h, matrices, bias, dropout)
        return
    if h is not None and matrices is not None:
        out += _dropped(grouped_mm(h, matrices, ends), dropout)
    if bias is not None:
        group = torch.searchsorted(ends, torch.arange(len(out), device=out.device, dtype=ends.dtype), right=True)
        out += bias.index_select(0, group.clamp_(max=len(ends) - 1))


def narrow_products(
    x: torch.Tensor, factors: Sequence[tuple[torch.Tensor, Dropout | None]], ends: torch.Tensor,
    index: torch.Tensor | None,
) -> tuple[torch.Tensor, list[torch.Tensor]]:  # fmt: skip
    """The rows of `x` at `index` (all of them without), and their products with each adapter's factor
    [groups, in, rank]; dropout is applied to a product's input."""
    products = []
    for matrices, dropout in factors:
        if runs_narrow(x, matrices.shape[2]):
            from fullshard.models import experts_kernels

            x, h = experts_kernels.narrow_product(x, index, matrices, ends, dropout)
        else:
            x = x if index is None else x.index_select(0, index)
            h = grouped_mm(_dropped(x, dropout), matrices, ends)
        products.append(h)
        index = None
    return (x if index is None else x.index_select(0, index)), products


def narrow_outer(
    h: torch.Tensor, x: torch.Tensor, ends: torch.Tensor, index: torch.Tensor | None = None,
    dropout: Dropout | None = None,
) -> torch.Tensor:  # fmt: skip
    """`hᵀ @ x` of each group's rows: [rows, rank] and [rows, size] to [groups, rank, size]. The rows are those of `x`
    at `index`, if it is given; dropout is applied to them."""
    if runs_narrow(x, h.shape[1]):
        from fullshard.models import experts_kernels

        return experts_kernels.narrow_outer(h, x, index, ends, dropout)
    rows = x if index is None else x.index_select(0, index)
    return grouped_outer(h, _dropped(rows, dropout), ends)


def runs_narrow(x: torch.Tensor, rank: int) -> bool:
    """Whether products of this rank run kernels of their own: those of more are products like others."""
    return rank <= NARROW and accelerator.runs_triton(x.device)


def _dropped(x: torch.Tensor, dropout: Dropout | None) -> torch.Tensor:
    return x if dropout is None else dropout.apply(x)


def _behind(rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Which rows belong to no group [rows, 1]."""
    return (torch.arange(len(rows), device=rows.device, dtype=ends.dtype) >= ends[-1])[:, None]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


# --- backward ---------------------------------------------------------------------------------------------------------


def backward(
    grad_out: torch.Tensor, x: torch.Tensor, weights: torch.Tensor | None, routing: Routing, up: Projection,
    down: Projection, gate: Gate, saved: Saved, wants_x: bool, wants_up: Wanted, wants_down: Wanted,
) -> Gradients:  # fmt: skip
    """The gradients for that of the output of `forward`."""
    ends, tokens = routing.ends, routing.tokens
    by_row = None if weights is None else weights.reshape(-1).index_select(0, routing.order)
    of_sum = None if weights is None else tokens
    dy, d_middle, d_down = _grad_input(grad_out, down, ends, index=of_sum)  # of the sum without weights
    d_inner, middle, d_weights = gate.backward(d_middle, saved.inner, by_row)
    del d_middle
    if by_row is not None and down.bias is not None:
        d_weights = d_weights + group_dot(dy, down.bias, ends)
    down_grads = _grad_parameters(middle, dy, down, saved.down, d_down, ends, by_row, wants_down)
    del dy, middle, d_down
    d_inner, d_rows, d_up = _grad_input(d_inner, up, ends, wants_x)
    up_grads = _grad_parameters(x, d_inner, up, saved.up, d_up, ends, None, wants_up, tokens)
    dx = combine(d_rows, None, routing) if wants_x else None
    if weights is not None:
        d_weights = routing.by_pair(d_weights).masked_fill(routing.absent(), 0).to(weights.dtype)
    return Gradients(dx, None if weights is None else d_weights, up_grads, down_grads)


def _grad_input(
    dy: torch.Tensor, projection: Projection, ends: torch.Tensor, wanted: bool = True,
    index: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:  # fmt: skip
    """The rows of `dy` at `index` (all of them without), and the gradients of a projection's input and of its adapters'
    rank-sized activations. `dy` stands for an input's gradient that is not wanted."""
    dy, grads = narrow_products(dy, [(one.b, None) for one in projection.adapters], ends, index)
    if not wanted:
        return dy, dy, grads
    dx = product(dy, projection.stack, ends, not projection.transposed)
    for dh, one in zip(grads, projection.adapters, strict=True):
        add_update(dx, ends, dh, one.a, dropout=one.dropout)
    return dy, dx, grads


def _grad_parameters(
    x: torch.Tensor, dy: torch.Tensor, projection: Projection, saved: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor], ends: torch.Tensor, weights: torch.Tensor | None, wanted: Wanted,
    index: torch.Tensor | None = None,
) -> ProjectionGrads:  # fmt: skip
    """The gradients of a projection's parameters; its input is `x`, or its rows at `index`. If rows have weights, `x`
    has them already."""
    stack = bias = None
    if wanted.stack:
        if index is not None:
            x, index = x.index_select(0, index), None
        stack = grouped_outer(x, dy, ends) if projection.transposed else grouped_outer(dy, x, ends)
    if wanted.bias:
        bias = group_sums(dy, ends, weights)
    adapters: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * len(saved)
    if wanted.adapters:
        for i, (h, dh, one) in enumerate(zip(saved, grads, projection.adapters, strict=True)):
            weighted = h if weights is None else h * weights[:, None].to(h.dtype)
            of_b = narrow_outer(weighted, dy, ends).transpose(1, 2)
            adapters[i] = narrow_outer(dh, x, ends, index, one.dropout), of_b
    return ProjectionGrads(stack, bias, adapters)
