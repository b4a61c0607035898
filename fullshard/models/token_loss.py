"""The losses of a chunk of tokens from their logits, and the gradient of the logits in the same pass.

On accelerators one kernel does it (`loss_kernels.py`), unless the model does something to its logits that the kernel
does not know. Elsewhere torch does it (`reference`), in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fullshard.data.pretokenized import IGNORED
from fullshard.device import accelerator, triton_jit
from fullshard.device.torch_private import version_of
from fullshard.device.triton_jit import Kernel, exp, tl, triton
from fullshard.distributed.autograd_collectives import RankGroup
from fullshard.models.deferred_logits import SoftCap, Step, apply_steps, soft_cap
from fullshard.models.vocabulary_slice import SliceStatistics

BLOCK = 4096
"""Logits that a program holds at a time."""
WARPS = 4
STAGES = 1
"""Blocks that are read ahead."""


def token_losses(
    logits: torch.Tensor, labels: torch.Tensor, soft_cap: SoftCap, smoothing: float, dft: bool, entropy: bool,
    scale: float, gradient: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Each token's loss, correctness and entropy [n, 3], zero for ignored labels; the entropy only if asked for.

    `logits` [n, v] are those before the soft-cap. `gradient` [n, v], which may be `logits` itself, gets their gradient
    × `scale`.
    """
    n, columns = logits.shape
    assert logits.stride(1) == 1 and (gradient is None or gradient.stride() == logits.stride())
    results = torch.zeros(n, 3, dtype=torch.float32, device=logits.device)
    block = min(BLOCK, triton.next_power_of_2(columns))
    if n:
        with accelerator.using(logits.device):
            _token_losses[(n,)](
                logits, logits if gradient is None else gradient, labels.contiguous(), results, logits.stride(0),
                soft_cap.before, soft_cap.after, smoothing, scale,
                COLUMNS=columns, IGNORED=IGNORED, TANH=soft_cap.tanh, SCALED=soft_cap != SoftCap(),
                SMOOTHING=smoothing > 0, DFT=dft, ENTROPY=entropy, GRADIENT=gradient is not None, BLOCK=block,
                STAGES=STAGES, num_warps=WARPS,
            )  # fmt: skip
    return results


@triton.jit
def _capped(raw, before, after, TANH: tl.constexpr, SCALED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The logits after the soft-cap, in fp32."""
    x = raw.to(tl.float32)
    if TANH:
        x = after * (1.0 - 2.0 / (exp(2.0 * before * x) + 1.0))
    elif SCALED:
        x = before * x
    return x


@Kernel
def _token_losses(  # type: ignore[no-untyped-def]
    logits, gradient, labels, results, stride, before, after, smoothing, scale,
    COLUMNS: tl.constexpr, IGNORED: tl.constexpr, TANH: tl.constexpr, SCALED: tl.constexpr, SMOOTHING: tl.constexpr,
    DFT: tl.constexpr, ENTROPY: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    logits += row.to(tl.int64) * stride
    gradient += row.to(tl.int64) * stride
    results += row * 3
    label = tl.load(labels + row).to(tl.int32)  # as the other column numbers are
    lanes = tl.arange(0, BLOCK)
    if label == IGNORED:
        if GRADIENT:
            for start in range(0, COLUMNS, BLOCK):
                at = start + lanes
                tl.store(gradient + at, tl.zeros([BLOCK], gradient.dtype.element_ty), mask=at < COLUMNS)
        return
    lowest = float("-inf")
    in_range = (label >= 0) & (label < COLUMNS)  # the loss of another label is NaN
    target = _capped(tl.load(logits + label, mask=in_range, other=float("nan")), before, after, TANH, SCALED)

    # The log of the sum of exponentials, relative to the largest logit so far.
    largest = tl.full([], lowest, tl.float32)
    earlier = tl.full([], lowest, tl.float32)  # the largest logit in blocks before the label's
    total = tl.full([], 0.0, tl.float32)
    weighted = tl.full([], 0.0, tl.float32)  # the sum of exponentials × logits
    plain = tl.full([], 0.0, tl.float32)  # the sum of logits
    for start in tl.range(0, COLUMNS, BLOCK, num_stages=STAGES):
        at = start + lanes
        inside = at < COLUMNS
        x = _capped(tl.load(logits + at, mask=inside, other=0), before, after, TANH, SCALED)
        x = tl.where(inside, x, lowest)
        top = tl.max(x, 0)
        new = tl.maximum(largest, top)
        base = tl.where(new == lowest, 0.0, new)  # -inf - -inf is NaN
        e = exp(x - base)
        rescale = exp(largest - base)
        total = total * rescale + tl.sum(e, 0)
        if ENTROPY:
            weighted = weighted * rescale + tl.sum(tl.where(e == 0.0, 0.0, e * x), 0)
        if SMOOTHING:
            plain += tl.sum(tl.where(inside, x, 0.0), 0)
        earlier = tl.where(start + BLOCK <= label, tl.maximum(earlier, top), earlier)
        largest = new
    lse = largest + tl.log(total)

    # Correct if the label's logit is the largest, and the first of those that are.
    column = tl.where(in_range, label, 0)
    near = column // BLOCK * BLOCK + lanes
    ahead = near < column
    others = _capped(tl.load(logits + near, mask=ahead, other=0), before, after, TANH, SCALED)
    earlier = tl.maximum(earlier, tl.max(tl.where(ahead, others, lowest), 0))
    correct = (target >= largest) & (earlier < target)

    loss = lse - target
    if SMOOTHING:
        loss += smoothing * (target - plain / COLUMNS)
    weight = tl.full([], 1.0, tl.float32)
    if DFT:
        weight = exp(target - lse)
        loss *= weight
    tl.store(results, loss)
    tl.store(results + 1, correct.to(tl.float32))
    if ENTROPY:
        tl.store(results + 2, lse - weighted / total)
    if GRADIENT:
        tl.debug_barrier()  # every warp has read the label's logit before it is overwritten
        weight *= scale
        for start in tl.range(0, COLUMNS, BLOCK, num_stages=STAGES):
            at = start + lanes
            inside = at < COLUMNS
            x = _capped(tl.load(logits + at, mask=inside, other=0), before, after, TANH, SCALED)
            g = exp(x - lse) - tl.where(at == label, 1.0 - smoothing, 0.0)
            if SMOOTHING:
                g -= smoothing / COLUMNS
            if TANH:
                bent = x / after
                g *= before * after * (1.0 - bent * bent)
            elif SCALED:
                g *= before
            tl.store(gradient + at, (g * weight).to(gradient.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class TokenLoss:
    """The loss of one token: cross-entropy, with label smoothing, or weighted with the token's probability."""

    smoothing: float = 0.0
    """The fraction of the loss that is the mean cross-entropy with all tokens of the vocabulary."""
    dft: bool = False
    """Dynamic Fine-Tuning: the cross-entropy × the probability of the token, which is taken as a constant."""


class TokenLosses(NamedTuple):
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
) -> TokenLosses:  # fmt: skip
    """The losses by the kernel, which writes to `gradient`, if given; this may be the logits' own memory."""
    # merged

    each = token_losses(logits, labels, cap, kind.smoothing, kind.dft, entropy, scale, gradient)
    return TokenLosses(each, gradient)


def reference(
    raw: torch.Tensor, labels: torch.Tensor, steps: tuple[Step, ...], factors: Sequence[torch.Tensor], kind: TokenLoss,
    scale: float, entropy: bool, want: bool, group: RankGroup | None = None,
) -> TokenLosses:  # fmt: skip
    """The losses by torch, for any element-wise steps; `factors` are the trainable tensors in them. The ranks of a
    `group` have a slice of the logits each."""
    wide = torch.promote_types(torch.float32, raw.dtype)
    mask = labels != IGNORED
    targets = labels.masked_fill(~mask, 0).unsqueeze(1)
    with torch.enable_grad():
        raw.requires_grad_(want and bool(steps))
        logits = apply_steps(steps, raw)
    values = logits.detach().to(wide)
    tokens = SliceStatistics(values, targets, group)
    lse, target_logits = tokens.lse, tokens.target_logits
    loss, weight, entropies = lse - target_logits, torch.ones_like(lse), torch.zeros_like(lse)
    if kind.smoothing:
        loss = torch.lerp(loss, lse - tokens.mean(values), kind.smoothing)
    if kind.dft:
        weight = (target_logits - lse).exp()
        loss = loss * weight
    if entropy:
        entropies = tokens.entropies(values)
    per_token = torch.cat([loss, tokens.correct, entropies], 1).masked_fill_(~mask.unsqueeze(1), 0)
    if not want:
        return TokenLosses(per_token, None)
    # d loss / d logits = (softmax - one-hot) × scale, zero outside the loss mask. The scale is applied here, in the
    # wide dtype, so that narrow gradients are rounded once.
    probs = (values - lse).exp_()
    probs.scatter_add_(1, tokens.places, (kind.smoothing - 1) * tokens.own.to(wide))
    if kind.smoothing:
        probs.sub_(kind.smoothing / tokens.vocabulary)
    d_logits = probs.mul_(weight * scale).masked_fill_(~mask.unsqueeze(1), 0).to(logits.dtype)
    if not steps:
        return TokenLosses(per_token, d_logits)
    d_raw, *d_factors = torch.autograd.grad(logits, (raw, *factors), d_logits)
    return TokenLosses(per_token, d_raw, [tokens.total(d_factor) for d_factor in d_factors])


def known_count(labels: Any) -> int | None:
    """The number of labels behind the first of each row that contribute to the loss, if the host has counted them."""
    count, version = getattr(labels, "trained_tokens", (None, -1))
    return count if count is not None and version == version_of(labels) else None
