"""The kernels between the grouped products of experts, in Triton's interpreter; the oracle is plain torch."""

from __future__ import annotations

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    pytest.skip("TRITON_INTERPRET=1 is not set, and there is no GPU", allow_module_level=True)

from fullshard.lora import fused_kernels
from fullshard.lora.fused_dropout import Dropout
from fullshard.models import experts_kernels, experts_math
from fullshard.models.experts_gate import Gate
from fullshard.models.experts_math import Routing
from fullshard.quant import triton_kernels
from fullshard.quant.grouped_product import grouped_mm, grouped_outer

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
ENDS = {
    "any": [3, 3, 70, 100],
    "none in the first and last": [0, 90, 100, 100],
    "one": [0, 0, 100, 100],
    "less": [1, 2, 3, 4],
}
ROWS, SIZE = 110, 150
GATES = [
    Gate("silu"), Gate("silu", interleaved=True, alpha=1.702, limit=2.0, offset=1.0), Gate("gelu_tanh"),
    Gate("silu", limit=1.5), Gate("relu2", gated=False), Gate("gelu"),
]  # fmt: skip


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE)


@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("rank", [0, 8, 24])
@pytest.mark.parametrize("biased", [False, True])
def test_updates_reach_the_rows_of_each_group(ends: list[int], rank: int, biased: bool) -> None:
    torch.manual_seed(0)
    end = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
    before, bias = draw(ROWS, SIZE), draw(4, SIZE) if biased else None
    h = draw(ROWS, rank) if rank else None
    for stored in (draw(4, rank, SIZE), draw(4, SIZE, rank).transpose(1, 2)):
        out, expected = before.clone(), before.clone()
        experts_kernels.add_update(out, end, h, stored if rank else None, bias, None)
        experts_math.add_update(expected, end, h, stored if rank else None, bias)
        torch.testing.assert_close(out[: ends[-1]], expected[: ends[-1]], rtol=1e-5, atol=1e-5)
        assert torch.equal(out[ends[-1] :], before[ends[-1] :])


def test_dropout_of_an_update_is_the_mask_of_the_input() -> None:
    torch.manual_seed(0)
    end = torch.tensor(ENDS["any"], dtype=torch.int32, device=DEVICE)
    dropout = Dropout(torch.tensor([2**40 + 3], device=DEVICE), 0.3)
    mask = fused_kernels.dropout_mask((ROWS, SIZE), 0, dropout.seed, dropout.threshold)
    h, matrices, out, plain = draw(ROWS, 8), draw(4, 8, SIZE), draw(ROWS, SIZE), torch.zeros(ROWS, SIZE, device=DEVICE)
    expected = out.clone()
    experts_kernels.add_update(plain, end, h, matrices, None, None)
    experts_kernels.add_update(out, end, h, matrices, None, dropout)
    torch.testing.assert_close(out, expected + plain * mask * dropout.scale, rtol=1e-5, atol=1e-5)
    x = draw(ROWS, SIZE)
    dropped = fused_kernels.apply_dropout(x, dropout.seed, dropout.threshold, dropout.scale)
    torch.testing.assert_close(dropped, x * mask * dropout.scale)


@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("rank", [8, 24])
@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("drops", [False, True])
def test_narrow_products(ends: list[int], rank: int, gathers: bool, drops: bool) -> None:
    torch.manual_seed(0)
    end, there = torch.tensor(ends, dtype=torch.int32, device=DEVICE), slice(ends[-1])
    x, index = draw(40 if gathers else ROWS, SIZE), torch.randint(0, 40, (ROWS,), device=DEVICE)
    place, rows = (index, x[index]) if gathers else (None, x)
    dropout = Dropout(torch.tensor([2**40 + 3], device=DEVICE), 0.3) if drops else None
    scaled = rows
    if dropout is not None:
        scaled = fused_kernels.apply_dropout(rows, dropout.seed, dropout.threshold, dropout.scale)
    for matrices in (draw(4, SIZE, rank), draw(4, rank, SIZE).transpose(1, 2)):
        copied, h = experts_kernels.narrow_product(x, place, matrices, end, dropout)
        assert torch.equal(copied[there], rows[there])
        torch.testing.assert_close(h[there], grouped_mm(scaled, matrices, end)[there], rtol=1e-4, atol=1e-4)
    outer = experts_kernels.narrow_outer(h, x, place, end, dropout)
    torch.testing.assert_close(outer, grouped_outer(h, scaled, end), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("shape", [(4, 3, 5), (4, 70, 90)])
def test_only_groups_without_rows_become_zero(ends: list[int], shape: tuple[int, ...]) -> None:
    end, out = torch.tensor(ends, dtype=torch.int32, device=DEVICE), draw(*shape)
    empty = end.diff(prepend=end.new_zeros(1)) == 0
    expected = out.masked_fill(empty[:, None, None], 0)
    triton_kernels.zero_empty_groups(out, end)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("gate", GATES, ids=str)
def test_the_gate(gate: Gate, weighted: bool) -> None:
    torch.manual_seed(0)
    inner = (draw(37, 300 if gate.gated else 150) * 2).requires_grad_()
    weights = torch.rand(37, device=DEVICE, requires_grad=True) if weighted else None
    expected = gate.forward(inner) if DEVICE == "cpu" else gate.forward(inner.cpu()).to(DEVICE)
    torch.testing.assert_close(experts_kernels.gate_forward(inner.detach(), gate), expected, rtol=1e-5, atol=1e-5)
    grad_out = draw(37, 150)
    total = expected if weights is None else expected * weights[:, None]
    total.backward(grad_out)
    column = None if weights is None else weights.detach()
    found = experts_kernels.gate_backward(grad_out, inner.detach(), column, gate)
    torch.testing.assert_close(found[0], inner.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[1], total.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[2], (grad_out * expected).sum(1).detach(), rtol=1e-4, atol=1e-4)
    for own, plain in zip(found, gate.backward(grad_out, inner.detach(), column), strict=True):
        torch.testing.assert_close(own, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("weighted", [False, True])
def test_the_sum_over_experts_leaves_out_those_of_other_ranks(weighted: bool) -> None:
    torch.manual_seed(0)
    routing = Routing.of(torch.randint(0, 6, (33, 3), device=DEVICE), 4)
    rows, weights = draw(99, SIZE), torch.rand(33, 3, device=DEVICE) if weighted else None
    rows[int(routing.ends[-1]) :] = torch.nan
    found = experts_kernels.combine(rows, weights, routing.position, routing.ends)
    torch.testing.assert_close(found, experts_math.combine(rows, weights, routing), rtol=1e-5, atol=1e-5)
    assert found.isfinite().all()
