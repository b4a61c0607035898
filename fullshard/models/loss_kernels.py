"""The loss of a chunk of tokens and its gradient in one Triton kernel, straight from the logits in their own dtype.

One program handles one token. It reads the logits once for loss, accuracy and, if asked for, entropy, and a second time
to write the gradient, which may replace the logits. All sums are in fp32. `token_loss.reference` computes the same with
torch.
"""

from __future__ import annotations

import torch

from fullshard import accelerator
from fullshard.data.pretokenized import IGNORED
from fullshard.models.deferred_logits import SoftCap
from fullshard.triton_jit import Kernel, exp, tl, triton

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
    found = torch.zeros(n, 3, dtype=torch.float32, device=logits.device)
    block = min(BLOCK, triton.next_power_of_2(columns))
    if n:
        with accelerator.using(logits.device):
            _token_losses[(n,)](
                logits, logits if gradient is None else gradient, labels.contiguous(), found, logits.stride(0),
                soft_cap.before, soft_cap.after, smoothing, scale,
                COLUMNS=columns, IGNORED=IGNORED, TANH=soft_cap.tanh, SCALED=soft_cap != SoftCap(),
                SMOOTHING=smoothing > 0, DFT=dft, ENTROPY=entropy, GRADIENT=gradient is not None, BLOCK=block,
                STAGES=STAGES, num_warps=WARPS,
            )  # fmt: skip
    return found


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
    logits, gradient, labels, found, stride, before, after, smoothing, scale,
    COLUMNS: tl.constexpr, IGNORED: tl.constexpr, TANH: tl.constexpr, SCALED: tl.constexpr, SMOOTHING: tl.constexpr,
    DFT: tl.constexpr, ENTROPY: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    logits += row.to(tl.int64) * stride
    gradient += row.to(tl.int64) * stride
    found += row * 3
    label = tl.load(labels + row).to(tl.int32)  # as the other column numbers are
    lanes = tl.arange(0, BLOCK)
    if label == IGNORED:
        if GRADIENT:
            for start in range(0, COLUMNS, BLOCK):
                at = start + lanes
                tl.store(gradient + at, tl.zeros([BLOCK], gradient.dtype.element_ty), mask=at < COLUMNS)
        return
    lowest = float("-inf")
    known = (label >= 0) & (label < COLUMNS)  # the loss of another label is NaN
    target = _capped(tl.load(logits + label, mask=known, other=float("nan")), before, after, TANH, SCALED)

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
    near = label // BLOCK * BLOCK + lanes
    ahead = near < label
    others = _capped(tl.load(logits + near, mask=ahead & known, other=0), before, after, TANH, SCALED)
    earlier = tl.maximum(earlier, tl.max(tl.where(ahead, others, lowest), 0))
    correct = (target >= largest) & (earlier < target)

    loss = lse - target
    if SMOOTHING:
        loss += smoothing * (target - plain / COLUMNS)
    weight = tl.full([], 1.0, tl.float32)
    if DFT:
        weight = exp(target - lse)
        loss *= weight
    tl.store(found, loss)
    tl.store(found + 1, correct.to(tl.float32))
    if ENTROPY:
        tl.store(found + 2, lse - weighted / total)
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
