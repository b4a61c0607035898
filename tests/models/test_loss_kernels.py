"""The loss kernel against torch's own operations in fp64, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fullshard.data.pretokenized import IGNORED
from fullshard.device import accelerator
from fullshard.models import chunked_loss, token_loss
from fullshard.models.chunked_loss import chunked_cross_entropy, whole_cross_entropy
from fullshard.models.deferred_logits import DeferredLogits, SoftCap
from fullshard.models.token_loss import TokenLoss

if accelerator.kind() == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("TRITON_INTERPRET=1 is not set, and there is no GPU", allow_module_level=True)

DEVICE = accelerator.kind()
pytestmark = [pytest.mark.gpu] if DEVICE != "cpu" else []
CAP = SoftCap(1 / 3, True, 3.0)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_loss, "BLOCK", 32)


def expected(
    raw: torch.Tensor, labels: torch.Tensor, cap: SoftCap, kind: TokenLoss, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss, correctness and entropy of each token, and the gradient of the logits: by autograd, in fp64."""
    x = raw.detach().double().requires_grad_()
    values = cap.after * torch.tanh(x * cap.before) if cap.tanh else x * cap.before
    losses = F.cross_entropy(values, labels, ignore_index=IGNORED, reduction="none", label_smoothing=kind.smoothing)
    if kind.dft:
        losses = losses * values.softmax(1).gather(1, labels.clamp(min=0).unsqueeze(1)).squeeze(1).detach()
    (losses.sum() * scale).backward()
    mask, log_probs = labels != IGNORED, values.log_softmax(1).detach()
    entropy = -(log_probs.exp() * log_probs).sum(1)
    correct = values.argmax(1) == labels
    assert x.grad is not None
    return torch.stack([losses.detach(), correct.double(), entropy * mask], 1), x.grad


CASES = {
    "plain": (SoftCap(), TokenLoss()), "soft-cap": (CAP, TokenLoss()), "scale": (SoftCap(-0.7), TokenLoss()),
    "smoothing": (SoftCap(), TokenLoss(smoothing=0.2)), "dft": (SoftCap(), TokenLoss(dft=True)),
    "soft-cap, smoothing": (CAP, TokenLoss(smoothing=0.2)), "soft-cap, dft": (CAP, TokenLoss(dft=True)),
}  # fmt: skip


@pytest.mark.parametrize("columns", [64, 97])
@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradient(name: str, columns: int) -> None:
    cap, kind = CASES[name]
    draw = torch.Generator().manual_seed(columns)
    raw = (4 * torch.randn(9, columns, generator=draw)).to(DEVICE)
    labels = torch.randint(0, columns, (9,), generator=draw).to(DEVICE)
    labels[:4] = (-raw if cap.before < 0 else raw)[:4].argmax(1)  # some that are correct
    labels[[1, 6]] = IGNORED
    right, gradient = expected(raw, labels, cap, kind, 0.3)
    found = token_loss.token_losses(raw, labels, cap, kind.smoothing, kind.dft, True, 0.3, raw)
    torch.testing.assert_close(found.double(), right, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(raw.double(), gradient, rtol=1e-5, atol=3e-7)
    assert found[:, 1].sum() >= 3


def test_narrow_logits_are_read_as_they_are_and_the_gradient_is_rounded_once() -> None:
    draw = torch.Generator().manual_seed(0)
    raw = (4 * torch.randn(6, 97, generator=draw)).to(DEVICE, torch.bfloat16)
    labels = torch.randint(0, 97, (6,), generator=draw).to(DEVICE)
    right, exact = expected(raw, labels, SoftCap(), TokenLoss(), 1e-4)
    gradient = torch.full_like(raw, float("nan"))
    before = raw.clone()
    found = token_loss.token_losses(raw, labels, SoftCap(), 0.0, False, False, 1e-4, gradient)
    assert torch.equal(raw, before), "a gradient elsewhere leaves the logits"
    torch.testing.assert_close(found[:, :2].double(), right[:, :2], rtol=2e-6, atol=2e-6)
    assert not found[:, 2].any(), "no entropy unless asked for"
    unit = 2**-8 if DEVICE != "cpu" else 2**-7  # the interpreter truncates
    assert ((gradient.double() - exact).abs() <= exact.abs() * (unit + 1e-5) + 1e-11).all()


def test_the_first_of_equal_logits_is_the_prediction() -> None:
    raw = torch.zeros(6, 97, device=DEVICE)
    labels = torch.tensor([0, 1, 40, 70, 96, 33], device=DEVICE)
    raw[2, [40, 41, 80]] = raw[3, [5, 70]] = raw[4, 96] = raw[5, [33, 34]] = 2.0
    found = token_loss.token_losses(raw, labels, SoftCap(), 0.0, False, False, 1.0, None)
    assert found[:, 1].tolist() == (raw.argmax(1) == labels).float().tolist() == [1, 0, 1, 0, 1, 1]


def test_infinite_and_undefined_logits() -> None:
    raw = torch.randn(4, 97, device=DEVICE)
    raw[0, :64] = float("-inf")  # whole blocks
    raw[1, 33] = float("nan")
    labels = torch.tensor([70, 5, 97, IGNORED], device=DEVICE)
    raw[3] = float("nan")
    right, gradient = expected(raw[:1], labels[:1], SoftCap(), TokenLoss(), 1.0)
    found = token_loss.token_losses(raw, labels, SoftCap(), 0.0, False, False, 1.0, raw)
    torch.testing.assert_close(found[0, :2].double(), right[0, :2], rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(raw[:1].double(), gradient, rtol=1e-5, atol=1e-7)
    assert found[1:3, 0].isnan().all(), "a label outside the vocabulary has no loss"
    assert not found[3].any() and not raw[3].any(), "an ignored token contributes nothing, whatever its logits"


def use_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "runs_triton", lambda device: True)
    if DEVICE == "cpu":
        monkeypatch.setattr(accelerator, "using", lambda device: contextlib.nullcontext())


def _softcap(logits: Any) -> Any:
    return torch.tanh(logits / 3.0).float() * 3.0


@pytest.mark.parametrize(
    ("steps", "share", "trains"),
    [(False, "all", False), (False, "some", True), (True, "some", False), (True, "all", True), (False, "none", False)],
)
def test_the_chunked_loss_is_that_of_torch(
    steps: bool, share: str, trains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With kernels and without: sums, and the gradients of hidden states and head."""
    draw = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 50, (2, 9), generator=draw).to(DEVICE)
    labels[0, :6] = labels[1, 2:7] = IGNORED if share == "some" else 3
    labels = torch.full_like(labels, IGNORED) if share == "none" else labels
    hidden = torch.randn(2, 9, 16, generator=draw).to(DEVICE)
    weight, bias = torch.randn(50, 16, generator=draw).to(DEVICE), torch.randn(50, generator=draw).to(DEVICE)
    called = []
    plain = token_loss.by_kernel
    monkeypatch.setattr(chunked_loss, "by_kernel", lambda *args: called.append(1) or plain(*args))

    def results() -> list[torch.Tensor]:
        head = torch.nn.Linear(16, 50).to(DEVICE).requires_grad_(trains)
        with torch.no_grad():
            head.weight.copy_(weight)
            head.bias.copy_(bias)
        x = hidden.clone().requires_grad_()
        logits = DeferredLogits.of(x, head)
        found = chunked_cross_entropy(_softcap(logits) if steps else logits, labels, 5, 0.25, entropy=True)
        (found.scaled * 3).backward()
        gradients = [x.grad, *(p.grad for p in head.parameters() if trains)]
        return [found.scaled.detach(), found.sums, *gradients]  # type: ignore[list-item]

    monkeypatch.setattr(token_loss, "_has_triton", lambda: False)
    right = results()
    assert not called
    monkeypatch.setattr(token_loss, "_has_triton", lambda: True)
    use_kernel(monkeypatch)
    for count in (None, int((labels[:, 1:] != IGNORED).sum())):
        if count is not None:
            labels.trained_tokens = (count, labels._version)  # type: ignore[attr-defined]
        for a, b in zip(results(), right, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert called


def test_the_loss_of_whole_logits_is_that_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(1)
    logits, labels = torch.randn(2, 6, 50, generator=draw).to(DEVICE), torch.randint(0, 50, (2, 6), generator=draw)
    labels[0, 2:4] = IGNORED
    labels = labels.to(DEVICE)
    found = {}
    for kernel in (False, True):
        monkeypatch.setattr(token_loss, "_has_triton", lambda kernel=kernel: kernel)
        if kernel:
            use_kernel(monkeypatch)
        x = logits.clone().requires_grad_()
        sums = whole_cross_entropy(x * 2, labels, 0.25, TokenLoss(smoothing=0.1), entropy=True)
        (sums.scaled * 3).backward()
        found[kernel] = (sums.scaled.detach(), sums.sums, x.grad)
    for a, b in zip(found[True], found[False], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
def test_a_trained_narrow_head_gets_the_gradient_of_all_chunks() -> None:
    """The sum over chunks is in fp32: against fp64 it is as exact as one product is."""
    draw = torch.Generator().manual_seed(2)
    hidden = torch.randn(2, 300, 64, generator=draw).to(DEVICE, torch.bfloat16)
    labels = torch.randint(0, 200, (2, 300), generator=draw).to(DEVICE)
    weight = torch.randn(200, 64, generator=draw).to(DEVICE, torch.bfloat16) / 8
    found = []
    for chunk, dtype in ((64, torch.bfloat16), (600, torch.bfloat16), (600, torch.float64)):
        head = torch.nn.Linear(64, 200, bias=False, device=DEVICE, dtype=dtype)
        with torch.no_grad():
            head.weight.copy_(weight)
        chunked_cross_entropy(DeferredLogits.of(hidden.to(dtype), head), labels, chunk, 1 / 598).scaled.backward()
        found.append(head.weight.grad.double())  # type: ignore[union-attr]
    chunks, whole, exact = found
    assert (chunks - exact).norm() <= 1.05 * (whole - exact).norm() < 0.01 * exact.norm()
