"""Kernels address tensors of more than 2³¹ elements: offsets that grow with tokens × width are 64 bits wide.

Triton's interpreter shows the offsets of each pointer with their type. A tensor of 524,288 × 4,096 elements is too
large for it, so the types are checked on a small one: 32-bit offsets must stay far below its number of elements.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a machine without a GPU: TRITON_INTERPRET=1 is not set", allow_module_level=True)

from triton.runtime.interpreter import InterpreterBuilder

from fullshard.device.triton_jit import Kernel, tl
from fullshard.lora import fused_kernels, gated_mlp_kernels
from fullshard.models import experts_kernels, token_loss
from fullshard.models.deferred_logits import SoftCap
from fullshard.models.experts_gate import Gate
from fullshard.models.experts_math import Routing
from fullshard.quant import fp8_kernels

TOKENS, SIZE, RANK = 520, 128, 8
NARROW = 2 * TOKENS * RANK
"""More elements than adapters and rank-sized activations have; a tensor [tokens, size] has eight times as many."""


@pytest.fixture
def offsets(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """The largest offset by its number of bits."""
    largest = {32: 0, 64: 0}
    plain = InterpreterBuilder.create_addptr

    def create_addptr(self: Any, ptr: Any, offset: Any) -> Any:
        bits = np.asarray(offset.data).dtype.itemsize * 8
        largest[max(32, bits)] = max(largest[max(32, bits)], int(np.abs(np.asarray(offset.data)).max(initial=0)))
        return plain(self, ptr, offset)

    monkeypatch.setattr(InterpreterBuilder, "create_addptr", create_addptr)
    return largest


def seed(in_slice: bool) -> torch.Tensor:
    return torch.tensor([[2**40 + 3, 640]] if in_slice else [2**40 + 3])


def adapters() -> None:
    x, dh, a = torch.randn(TOKENS, SIZE), torch.randn(TOKENS, RANK), torch.randn(RANK, SIZE)
    for drawn in ((seed(False), 999, 1.1), (seed(True), 999, 1.1)):
        fused_kernels.product(x, a, RANK, *drawn)
        fused_kernels.grad_weight(dh, x, RANK, *drawn)
        fused_kernels.grad_input(x.clone(), dh, a, RANK, *drawn)
        fused_kernels.apply_dropout(x, *drawn)


def gated_mlp() -> None:
    gate, h, b, a = (
        torch.randn(TOKENS, SIZE),
        torch.randn(TOKENS, 2 * RANK),
        torch.randn(SIZE, RANK),
        torch.randn(RANK, SIZE),
    )
    drawn = seed(True), 999, 1.1
    gated_mlp_kernels.forward(gate, gate, h, b, b, (1.0, 1.0), a, "silu", *drawn)
    gated_mlp_kernels.backward(gate, gate, gate, h, b, b, (1.0, 1.0), h[:, :RANK], a, "silu", *drawn)


def experts() -> None:
    x, ends = torch.randn(TOKENS, SIZE), torch.tensor([0, 260, TOKENS], dtype=torch.int32)
    index, matrices = torch.randperm(TOKENS), torch.randn(3, SIZE, RANK)
    _, h = experts_kernels.narrow_product(x, index, matrices, ends, None)
    experts_kernels.narrow_outer(h, x, index, ends, None)
    experts_kernels.add_update(x, ends, h, matrices.transpose(1, 2).contiguous(), None, None)
    inner, gate = torch.randn(TOKENS, 2 * SIZE), Gate("silu")
    experts_kernels.gate_forward(inner, gate)
    experts_kernels.gate_backward(x, inner, None, gate)
    routing = Routing.of(torch.randint(0, 3, (TOKENS, 1)), 3)
    experts_kernels.combine(x, None, routing.position, routing.ends)


def losses() -> None:
    logits, labels = torch.randn(TOKENS, SIZE), torch.randint(0, SIZE, (TOKENS,))
    token_loss.by_kernel(logits, labels, SoftCap(), token_loss.TokenLoss(), 1.0, True, logits.clone())


def fp8_rows() -> None:
    x = torch.randn(TOKENS, SIZE)
    fp8_kernels.quantize_rows([x], None, torch.empty(TOKENS, SIZE, dtype=torch.float8_e4m3fn), torch.empty(TOKENS, 1))


@pytest.mark.parametrize("run", [adapters, gated_mlp, experts, losses, fp8_rows])
def test_offsets_of_tensors_as_long_as_the_sequence_are_wide(run: Callable[[], None], offsets: dict[int, int]) -> None:
    torch.manual_seed(0)
    run()
    assert offsets[64] >= (TOKENS - 1) * SIZE  # the last row was there
    assert offsets[32] <= NARROW


def test_the_check_sees_narrow_offsets(offsets: dict[int, int]) -> None:
    _narrow[(1,)](torch.zeros(TOKENS, SIZE), SIZE)
    assert offsets[32] == (TOKENS - 1) * SIZE


@Kernel
def _narrow(x, size: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(x + (519 + tl.arange(0, 1)) * size, tl.zeros((1,), tl.float32))
