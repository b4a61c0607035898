"""The losses of a chunk of tokens from their logits, and the gradient of the logits in the same pass.

On accelerators one kernel does it (`loss_kernels.py`), unless the model does something to its logits that the kernel
does not know. Elsewhere torch does it (`reference`), in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fullshard import accelerator, triton_jit
from fullshard.data.pretokenized import IGNORED
from fullshard.models.deferred_logits import SoftCap, Step, apply_steps, soft_cap
from fullshard.torch_private import version_of


@dataclass(frozen=True)
class TokenLoss:
    """The loss of one token: cross-entropy, with label smoothing, or weighted with the token's probability."""

    smoothing: float = 0.0
    """The fraction of the loss that is the mean cross-entropy with all tokens of the vocabulary."""
    dft: bool = False
    """Dynamic Fine-Tuning: the cross-entropy × the probability of the token, which is taken as a constant."""


class Found(NamedTuple):
    """The losses of a chunk, and gradients × scale."""

    per_token: torch.Tensor
    """Loss, correct prediction and entropy of each token [n, 3]; zero where the label is ignored."""
    d_logits: torch.Tensor | None
    d_factors: Sequence[torch.Tensor] = ()


def fused(steps: tuple[Step, ...], trains_factors: bool, dtype: torch.dtype, device: torch.device) -> SoftCap | None:
    """What the kernel has to do to the logits before the loss; None if it cannot compute this loss."""
    narrow = dtype in (torch.bfloat16, torch.float16, torch.float32)
    launches = device.type == "meta" or _has_triton()
    if trains_factors or not narrow or not accelerator.runs_triton(device) or not launches:
        return None
    return soft_cap(steps, dtype, device)


def _has_triton() -> bool:
    return triton_jit.INSTALLED


def by_kernel(
    logits: torch.Tensor, labels: torch.Tensor, cap: SoftCap, kind: TokenLoss, scale: float, entropy: bool,
    gradient: torch.Tensor | None,
) -> Found:  # fmt: skip
    """The losses by the kernel, which writes to `gradient`, if given; this may be the logits' own memory."""
    from fullshard.models import loss_kernels

    each = loss_kernels.token_losses(logits, labels, cap, kind.smoothing, kind.dft, entropy, scale, gradient)
    return Found(each, gradient)


def reference(
    raw: torch.Tensor, labels: torch.Tensor, steps: tuple[Step, ...], factors: Sequence[torch.Tensor], kind: TokenLoss,
    scale: float, entropy: bool, want: bool,
) -> Found:  # fmt: skip
    """The losses by torch, for any element-wise steps; `factors` are the trainable tensors in them."""
    wide = torch.promote_types(torch.float32, raw.dtype)
    mask = labels != IGNORED
    targets = labels.masked_fill(~mask, 0).unsqueeze(1)
    with torch.enable_grad():
        raw.requires_grad_(want and bool(steps))
        logits = apply_steps(steps, raw)
    values = logits.detach().to(wide)
    lse = _logsumexp(values)
    target_logits = values.gather(1, targets)
    correct = (values.argmax(1, keepdim=True) == targets).to(lse.dtype)
    loss, weight, entropies = lse - target_logits, torch.ones_like(lse), torch.zeros_like(lse)
    if kind.smoothing:
        loss = torch.lerp(loss, lse - values.mean(1, keepdim=True), kind.smoothing)
    if kind.dft:
        weight = (target_logits - lse).exp()
        loss = loss * weight
    if entropy:
        entropies = lse - ((values - lse).exp_() * values).sum(1, keepdim=True)
    per_token = torch.cat([loss, correct, entropies], 1).masked_fill_(~mask.unsqueeze(1), 0)
    if not want:
        return Found(per_token, None)
    # d loss / d logits = (softmax - one-hot) × scale, zero outside the loss mask. The scale is applied here, in the
    # wide dtype, so that narrow gradients are rounded once.
    probs = (values - lse).exp_()
    probs.scatter_add_(1, targets, torch.full_like(target_logits, kind.smoothing - 1))
    if kind.smoothing:
        probs.sub_(kind.smoothing / probs.shape[1])
    d_logits = probs.mul_(weight * scale).masked_fill_(~mask.unsqueeze(1), 0).to(logits.dtype)
    if not steps:
        return Found(per_token, d_logits)
    d_raw, *d_factors = torch.autograd.grad(logits, (raw, *factors), d_logits)
    return Found(per_token, d_raw, d_factors)


def _logsumexp(values: torch.Tensor) -> torch.Tensor:
    """torch's, which allocates as much without a trace of it on the meta device."""
    most = values.amax(1, keepdim=True)
    most = most.masked_fill_(most.isinf(), 0)
    return (values - most).exp_().sum(1, keepdim=True).log_().add_(most)


def known_count(labels: Any) -> int | None:
    """The number of labels behind the first of each row that contribute to the loss, if the host has counted them."""
    count, version = getattr(labels, "trained_tokens", (None, -1))
    return count if count is not None and version == version_of(labels) else None
