"""Triton kernels of fused LoRA layers against the formulas in torch: on a GPU, or on the CPU in Triton's interpreter
(`TRITON_INTERPRET=1`, where Triton is installed)."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from fullshard.lora import fused_mlp
from fullshard.lora.fused_dropout import STEPS, Dropout
from fullshard.lora.fused_math import Layer

pytest.importorskip("triton")
ON_GPU = torch.cuda.is_available()
if not ON_GPU and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("there is no GPU, and TRITON_INTERPRET is not set", allow_module_level=True)

from fullshard.lora import fused_kernels, fused_mlp_kernels  # noqa: E402 - needs Triton

pytestmark = [pytest.mark.gpu] if ON_GPU else []
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(autouse=True)
def _torch_formulas(monkeypatch: pytest.MonkeyPatch) -> None:
    """The formulas in torch on any device, with the masks of the kernels."""
    torch.manual_seed(0)
    monkeypatch.setattr("fullshard.accelerator.is_accelerator", lambda device: False)
    monkeypatch.setattr(
        Dropout, "kept", lambda self, shape, i: fused_kernels.kept(tuple(shape), i, self.seed, self.threshold)
    )


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE)


def seed() -> torch.Tensor:
    return torch.randint(2**62, (1,), device=DEVICE)


def test_masks_are_independent_and_have_the_right_mean() -> None:
    dropout = Dropout(seed(), 0.25)
    shape = (130, 520)  # more than one tile, in both dims
    masks = [dropout.kept(torch.Size(shape), i).double() for i in range(3)]
    masks.append(Dropout(dropout.seed + 1, 0.25).kept(torch.Size(shape), 0).double())
    assert dropout.threshold == STEPS // 4
    for i, one in enumerate(masks):
        assert float(one.mean()) == pytest.approx(0.75, abs=0.01)
        for other in masks[:i]:
            assert float((one * other).mean()) == pytest.approx(0.75**2, abs=0.01)
        for shifted in (one.roll(1, 0), one.roll(1, 1), one.roll(8, 1), one.roll(64, 0), one.roll(128, 1)):
            assert float((one * shifted).mean()) == pytest.approx(0.75**2, abs=0.012)
    assert torch.equal(dropout.kept(torch.Size((7, 16)), 1).double(), masks[1][:7, :16])


@pytest.mark.parametrize(
    ("tokens", "size", "adapters", "width"), [(70, 200, 3, 8), (33, 136, 1, 20), (64, 128, 2, 40), (20, 64, 2, 80)]
)
def test_products_behind_dropout(tokens: int, size: int, adapters: int, width: int) -> None:
    dropout = Dropout(seed(), 0.1)
    x, a, dh = randn(tokens, size), randn(adapters * width, size), randn(tokens, adapters * width)
    drawn = dropout.seed, dropout.threshold, dropout.scale
    torch.testing.assert_close(fused_kernels.product(x, a, width, *drawn), dropout.product(x, a, width), **CLOSE)
    torch.testing.assert_close(
        fused_kernels.grad_weight(dh, x, width, *drawn), dropout.grad_weight(dh, x, width), **CLOSE
    )
    dx = randn(tokens, size)
    expected = dropout.add_grad_input(dx.clone(), dh, a, width)
    torch.testing.assert_close(fused_kernels.add_grad_input(dx, dh, a, width, *drawn), expected, **CLOSE)


@pytest.mark.parametrize("activation", fused_mlp.ACTIVATIONS)
@pytest.mark.parametrize("probability", [0.0, 0.25])
def test_gated_mlp(activation: str, probability: float, monkeypatch: pytest.MonkeyPatch) -> None:
    def layer(size: int, out: int, rank: int, scale: float) -> Layer:
        return Layer("dense", [randn(out, size) / 6], None, randn(rank, size) / 6, randn(out, rank) / 2, scale)

    layers = [layer(40, 200, 8, 2.0), layer(40, 200, 5, 1.5), layer(200, 40, 6, 0.7)]
    x, dy = randn(70, 40), randn(70, 40)
    dropout = Dropout(seed(), probability) if probability else None

    def both() -> list[Any]:
        y, saved = fused_mlp.forward(x, layers, activation, dropout)
        found = fused_mlp.backward(x, saved, dy, layers, activation, dropout, True)
        return [y, saved.h_down, found.x, *found.a, *found.b]

    expected = both()
    monkeypatch.setattr(fused_mlp, "_inner", fused_mlp_kernels.inner)
    monkeypatch.setattr(
        fused_mlp, "_inner_backward", lambda m, s, d, h: fused_mlp_kernels.inner_backward(m, s.gate, s.up, d, h)
    )
    for one, other in zip(both(), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
