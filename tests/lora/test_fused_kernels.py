"""Triton kernels of fused LoRA layers against the formulas in torch: on a GPU, or on the CPU in Triton's interpreter
(`TRITON_INTERPRET=1`, which `conftest.py` sets where there is no GPU)."""

from __future__ import annotations

import os

import pytest
import torch

from fullshard.lora.fused_dropout import STEPS, Dropout

ON_GPU = torch.cuda.is_available()
if not ON_GPU and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("TRITON_INTERPRET=1 is not set, and there is no GPU", allow_module_level=True)

from fullshard.lora import fused_kernels  # noqa: E402 - needs Triton

pytestmark = [pytest.mark.gpu] if ON_GPU else []
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(autouse=True)
def _torch_formulas(monkeypatch: pytest.MonkeyPatch) -> None:
    """The formulas in torch on any device, with the masks of the kernels."""
    torch.manual_seed(0)
    monkeypatch.setattr("fullshard.device.accelerator.runs_triton", lambda device: False)
    monkeypatch.setattr(
        Dropout, "kept", lambda self, shape, i: fused_kernels.dropout_mask(tuple(shape), i, self.seed, self.threshold)
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


def in_slice(dropout: Dropout, first_row: int) -> Dropout:
    """The same dropout, of a slice that begins with this row."""
    row = torch.full_like(dropout.seed, first_row)
    return Dropout(torch.stack([dropout.seed, row], 1), dropout.probability)


@pytest.mark.parametrize("cut", [64, 70])
def test_slices_of_the_sequence_have_the_masks_of_the_whole(cut: int) -> None:
    whole = Dropout(seed(), 0.25)
    x, a, dh = randn(130, 136), randn(16, 136), randn(130, 16)
    parts = [(slice(0, cut), in_slice(whole, 0)), (slice(cut, 130), in_slice(whole, cut))]

    def run(rows: slice, dropout: Dropout) -> list[torch.Tensor]:
        drawn = dropout.seed, dropout.threshold, dropout.scale
        return [
            dropout.kept(torch.Size((len(x[rows]), 136)), 1).float(), fused_kernels.apply_dropout(x[rows], *drawn),
            fused_kernels.product(x[rows], a, 8, *drawn), fused_kernels.grad_input(None, dh[rows], a, 8, *drawn),
            fused_kernels.grad_weight(dh[rows], x[rows], 8, *drawn),
        ]  # fmt: skip

    expected, (first, second) = run(slice(0, 130), whole), [run(*part) for part in parts]
    assert torch.equal(torch.cat([first[0], second[0]]), expected[0])
    for one, other, both in zip(first[1:4], second[1:4], expected[1:4], strict=True):
        torch.testing.assert_close(torch.cat([one, other]), both, **CLOSE)
    torch.testing.assert_close(first[4] + second[4], expected[4], **CLOSE)


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
    expected = dropout.grad_input(dh, a, width)
    torch.testing.assert_close(fused_kernels.grad_input(None, dh, a, width, *drawn), expected, **CLOSE)
    torch.testing.assert_close(fused_kernels.grad_input(dx.clone(), dh, a, width, *drawn), dx + expected, **CLOSE)
