"""Output head and cross-entropy computed in chunks, so that the full logits are never in memory.

`ChunkedLossHead(model)` makes the head of a causal language model return `DeferredLogits`, a tensor without data.
Element-wise operations on it (soft-caps, scales, casts) are recorded, and the loss is computed from hidden states chunk
by chunk, with gradients in the same pass. Any other operation computes the real logits, so results are always correct.
This runs inside the model's forward, where a sharded head is gathered. Only transformers' cross-entropy is replaced:
what the model adds to it, such as a router's auxiliary loss, is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from fullshard.config.errors import ConfigError
from fullshard.data.pretokenized import IGNORED
from fullshard.device import accelerator
from fullshard.device.torch_private import NoTorchFunction
from fullshard.distributed.autograd_collectives import RankGroup
from fullshard.lora import trainable_tokens
from fullshard.models.causal_lm import get_causal_lm
from fullshard.models.deferred_logits import DeferredLogits, SoftCap, Step
from fullshard.models.router_loss import without_padding
from fullshard.models.token_loss import TokenLoss, by_kernel, fused, known_count, reference
from fullshard.models.vocabulary_slice import slice_of

FUSED_BYTES = 256 * 2**20
"""The largest chunk of logits for the fused kernel, unless `chunk_tokens` is set. For each chunk the head's weight is
read twice; the products of 512 tokens take longer than that, and those of 1,024 are near their best."""
FUSED_ROWS = 256
"""The smallest such chunk, in tokens, for passes of few tokens, whose other activations are small too."""
FUSED_CHUNKS = 8
"""The number of chunks from which on they are larger than that."""
REFERENCE_BYTES = 64 * 2**20
"""The size of a chunk's logits in fp32 elsewhere; there are several tensors of this size."""
GATHERED = 0.9
"""Only trained tokens get logits if they are at most this share of all tokens."""


@dataclass
class HeadStatistics:
    """Sums over the trained tokens (those in the loss mask) of a forward pass."""

    scaled: torch.Tensor
    """Summed loss × scale, with a gradient."""
    sums: torch.Tensor
    """Loss, correct predictions, and entropy, which is zero unless asked for; detached."""

    @property
    def loss(self) -> torch.Tensor:
        """The sum of the losses."""
        return self.sums[0]


class _Options(NamedTuple):
    """What a `_ChunkedLoss` computes, besides its tensors."""

    steps: tuple[Step, ...]
    chunk_tokens: int
    scale: float
    kind: TokenLoss
    entropy: bool
    group: RankGroup | None = None
    """The ranks that have a slice of the head each."""

    def rows(
        self, tokens: int, trained: int, columns: int, dtype: torch.dtype, cap: SoftCap | None, d_weight: int = 0
    ) -> int:
        """Tokens per chunk, beside so many bytes of the weight's gradient, which each chunk reads and writes. Chunks
        are as equal as multiples of 64 tokens allow."""
        if self.chunk_tokens:
            return self.chunk_tokens
        if cap is None:
            return max(1, REFERENCE_BYTES // (4 * columns))
        size = max(FUSED_BYTES, d_weight // 2)
        most = min(size // (dtype.itemsize * columns), max(FUSED_ROWS, tokens // FUSED_CHUNKS))
        most = max(64, most // 64 * 64)
        chunks = max(1, -(-trained // most))
        return max(64, -(-trained // chunks // 64) * 64)


class _ChunkedLoss(torch.autograd.Function):
    """Summed cross-entropy, with gradients computed in the same pass while a chunk's logits are in memory."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, own: torch.Tensor | None,
        index: torch.Tensor | None, labels: torch.Tensor, chosen: torch.Tensor | None, options: _Options,
        *factors: torch.Tensor,
    ) -> Any:  # fmt: skip
        # hidden [n, h], weight [v, h], labels [n]; own [k, h] replaces the rows of weight at index [k]; chosen are the
        # tokens that may be trained, if not all; factors are the trainable tensors in the steps
        want_hidden, want_weight, want_bias, want_own = ctx.needs_input_grad[:4]
        want = any(ctx.needs_input_grad)
        steps, _, scale, kind, entropy, group = options
        wide = torch.promote_types(torch.float32, weight.dtype)
        ctx.tokens, ctx.chosen = len(hidden), chosen
        if chosen is not None:
            hidden, labels = hidden[chosen], labels[chosen]
        cap = fused(steps, bool(factors), weight.dtype, weight.device) if group is None else None
        sums = torch.zeros(3, dtype=wide, device=hidden.device)
        d_hidden = torch.empty_like(hidden) if want_hidden else None
        d_weight = torch.zeros_like(weight, dtype=wide) if want_weight else None
        d_bias = torch.zeros_like(bias, dtype=wide) if want_bias and bias is not None else None
        d_own = torch.zeros_like(own, dtype=wide) if want_own and own is not None else None
        d_factors = [torch.zeros_like(factor, dtype=wide) for factor in factors]
        beside = 0 if d_weight is None else d_weight.nbytes
        rows = options.rows(ctx.tokens, len(hidden), len(weight), weight.dtype, cap, beside)
        for start in range(0, len(hidden), rows):
            piece = slice(start, start + rows)
            logits = F.linear(hidden[piece], weight, bias)
            if own is not None and index is not None:
                logits.index_copy_(1, index, F.linear(hidden[piece], own))
            if cap is not None:
                losses = by_kernel(logits, labels[piece], cap, kind, scale, entropy, logits if want else None)
            else:
                losses = reference(logits, labels[piece], steps, factors, kind, scale, entropy, want, group)
            del logits  # before the next chunk's
            sums += losses.per_token.sum(0)
            if losses.d_logits is None:
                continue
            for d_factor, part in zip(d_factors, losses.d_factors, strict=True):
                d_factor += part
            d_logits = losses.d_logits.to(weight.dtype)
            if own is not None and index is not None:
                d_own_logits = d_logits[:, index]
                d_logits = d_logits.index_fill_(1, index, 0)
                if d_own is not None:
                    d_own += d_own_logits.T @ hidden[piece]
            if d_hidden is not None:
                d_hidden[piece] = d_logits @ weight
                if own is not None:
                    d_hidden[piece] += d_own_logits @ own
            if d_weight is not None:
                _add_product(d_weight, d_logits.T, hidden[piece])
            if d_bias is not None:
                d_bias += d_logits.sum(0, dtype=wide)
            del losses, d_logits
        ctx.gradients = (d_hidden, d_weight, d_bias, d_own, *d_factors)
        ctx.dtypes = (hidden.dtype, weight.dtype, weight.dtype, weight.dtype, *(factor.dtype for factor in factors))
        ctx.mark_non_differentiable(sums)
        return sums[0] * scale, sums

    @staticmethod
    def backward(ctx: Any, d_loss: torch.Tensor, _: Any) -> Any:
        # Freed now to save memory; a second backward through the same graph is not possible.
        gradients, ctx.gradients = ctx.gradients, None
        d_hidden, *others = [_scaled(g, d_loss, dtype) for g, dtype in zip(gradients, ctx.dtypes, strict=True)]
        if d_hidden is not None and ctx.chosen is not None:
            whole = d_hidden.new_zeros(ctx.tokens, d_hidden.shape[1])
            d_hidden = whole.index_copy_(0, ctx.chosen, d_hidden)
        return (d_hidden, *others[:3], *[None] * 4, *others[3:])


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """`total += a @ b` in the dtype of `total`. On accelerators the product of narrow matrices is never rounded."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif accelerator.adds_wide_products(total.device):
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


def _scaled(gradient: torch.Tensor | None, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """`gradient * factor`, in place where the dtype is right.

    The factor gets the gradient's dims, so that torch does not cast it to a narrow dtype, for which it is often too
    small; the product is rounded once.
    """
    if gradient is None:
        return None
    out = gradient if gradient.dtype == dtype else torch.empty_like(gradient, dtype=dtype)
    return torch.mul(gradient, factor.reshape((1,) * gradient.dim()), out=out)


def chunked_cross_entropy(
    logits: DeferredLogits, labels: torch.Tensor, chunk_tokens: int = 0, scale: float = 1.0,
    kind: TokenLoss = TokenLoss(), entropy: bool = False,  # noqa: B008 - frozen
) -> HeadStatistics:  # fmt: skip
    """Summed next-token cross-entropy over positions whose label is not -100."""
    with NoTorchFunction():
        hidden, head, own, steps = logits.hidden, logits.head, logits.rows, logits.steps
    shifted = next_labels(labels)
    count, chosen = known_count(labels), None
    if count is not None and count <= GATHERED * shifted.numel():
        chosen = (shifted != IGNORED).byte().sort(descending=True, stable=True).indices[:count]
    weight, bias = head.weight, head.bias
    index, values = (own.index, own.values) if own is not None else (None, None)
    trained = [v for _, args, kwargs, _ in steps for v in (*args, *kwargs.values()) if _trains(v)]
    if not torch.is_grad_enabled():  # autograd says that a trained weight needs its gradient also then
        weight, bias, values = (None if t is None else t.detach() for t in (weight, bias, values))
        trained = []
    factors = {id(factor): factor for factor in trained}.values()
    hidden = hidden.reshape(-1, hidden.shape[-1])
    options = _Options(steps, chunk_tokens, scale, kind, entropy, slice_of(head))
    return HeadStatistics(*_ChunkedLoss.apply(hidden, weight, bias, values, index, shifted, chosen, options, *factors))


def next_labels(labels: torch.Tensor) -> torch.Tensor:
    """The label of the token after each one, in one row; the last token of a row has none."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED).reshape(-1)


def _trains(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and type(value) is not DeferredLogits and value.requires_grad


class _WholeLoss(torch.autograd.Function):
    """Summed cross-entropy from full logits [n, v] by the fused kernel, with the gradient in the same pass."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, scale: float, kind: TokenLoss, entropy: bool
    ) -> Any:
        gradient = torch.empty_like(logits) if ctx.needs_input_grad[0] else None
        losses = by_kernel(logits, labels, SoftCap(), kind, scale, entropy, gradient)
        sums, ctx.gradient = losses.per_token.sum(0), gradient
        ctx.mark_non_differentiable(sums)
        return sums[0] * scale, sums

    @staticmethod
    def backward(ctx: Any, d_loss: torch.Tensor, _: Any) -> Any:
        gradient, ctx.gradient = ctx.gradient, None
        return _scaled(gradient, d_loss, gradient.dtype), *[None] * 4


def whole_cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, scale: float = 1.0,
    kind: TokenLoss = TokenLoss(), entropy: bool = False,  # noqa: B008 - frozen
) -> HeadStatistics:  # fmt: skip
    """The same statistics from full logits."""
    if fused((), False, logits.dtype, logits.device) is not None:
        flat = logits.reshape(-1, logits.shape[-1])
        return HeadStatistics(*_WholeLoss.apply(flat, next_labels(labels), scale, kind, entropy))
    values, labels = logits[:, :-1].reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1)
    values = values.to(torch.promote_types(torch.float32, values.dtype))
    losses = F.cross_entropy(values, labels, ignore_index=IGNORED, reduction="none", label_smoothing=kind.smoothing)
    loss = (losses * (-losses.detach()).exp() if kind.dft else losses).sum()
    with torch.no_grad():
        mask = labels != IGNORED
        correct = ((values.argmax(1) == labels) & mask).sum().to(loss.dtype)
        entropies = torch.zeros_like(loss)
        if entropy:
            log_probs = values.log_softmax(1)
            entropies = -((log_probs.exp() * log_probs).sum(1) * mask).sum()
        sums = torch.stack([loss.detach(), correct, entropies])
    return HeadStatistics(loss * scale, sums)


@dataclass
class LossPass:
    """One forward pass of a model whose loss a `ChunkedLossHead` computes."""

    scale: float
    """What the model's loss × tokens is multiplied by."""
    targets: int | None
    """Tokens of the batch that contribute to the loss; None counts them, for which the host waits for the device."""
    real_tokens: torch.Tensor | None = None
    """Which tokens of the batch [rows, length] are no padding, for a router's loss; None counts all."""
    keeps_logits: bool = False
    """Whether the model returns its logits, which are then computed as a whole."""
    statistics: HeadStatistics | None = None
    """The sums of the pass, once it has run."""
    router_loss: torch.Tensor | None = None
    """The auxiliary loss of a mixture of experts, detached."""

    @property
    def sums(self) -> torch.Tensor:
        """Loss, correct predictions, entropy and router's auxiliary loss, each × the tokens of the pass."""
        assert self.statistics is not None, "the model has not run inside this pass"
        sums, aux = self.statistics.sums, self.router_loss
        aux = sums.new_zeros(()) if aux is None else aux.to(sums.dtype) * (self.targets or 0)
        return torch.cat([sums, aux.reshape(1)])


class ChunkedLossHead:
    """A causal language model whose forward, inside `loss_pass`, returns its own loss × tokens × `scale`.

    The model's loss is a mean over the tokens of the batch that contribute, plus whatever the model adds to that. So
    over any number of batches, with `scale` one over all their tokens, the sum is the mean over tokens of the model's
    own loss. Outside `loss_pass` the model behaves as before.
    """

    def __init__(
        self, model: nn.Module, chunk_tokens: int = 0, chunked: bool = True,
        kind: TokenLoss = TokenLoss(), entropy: bool = False,  # noqa: B008 - frozen
    ) -> None:  # fmt: skip
        self.model, self.chunk_tokens, self.kind, self.entropy = get_causal_lm(model), chunk_tokens, kind, entropy
        head = self.model.get_output_embeddings() if hasattr(self.model, "get_output_embeddings") else None
        plain = trainable_tokens.plain_layer(head)
        self.head = plain if chunked and type(plain) is nn.Linear else None
        self.rows = trainable_tokens.layer_of(head)
        self.why_not = "" if self.head is not None or not chunked else _why_not(head)
        self.plain_loss = getattr(self.model, "loss_function", None)
        self._pass: LossPass | None = None
        """The pass that `loss_pass` is open for."""
        self._running: LossPass | None = None
        """The same while the model's forward runs."""
        if self.head is not None and head is not None:
            head.forward = self._head_forward(head.forward)
        self.model.loss_function = self._loss
        self.model.forward = self._model_forward(self.model.forward)

    @contextmanager
    def loss_pass(
        self, scale: float = 1.0, targets: int | None = None, real_tokens: torch.Tensor | None = None,
        keep_logits: bool = False,
    ) -> Iterator[LossPass]:  # fmt: skip
        """Inside, the model's loss is computed here. One forward pass each."""
        before, self._pass = self._pass, LossPass(scale, targets, real_tokens, keep_logits)
        try:
            yield self._pass
        finally:
            self._pass = before

    def _head_forward(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def forward(hidden: torch.Tensor) -> Any:
            if self._running is None or self.head is None or self._running.keeps_logits:
                return plain(hidden)
            rows = trainable_tokens.active_rows(self.rows) if self.rows is not None else None
            return DeferredLogits.of(hidden, self.head, rows)

        return forward

    def _model_forward(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            labels, now = kwargs.get("labels"), self._pass
            if labels is None or now is None:
                return plain(*args, **kwargs)
            if now.targets is None:
                now.targets = int((labels[:, 1:] != IGNORED).sum())
            if not now.targets and "input_ids" in kwargs:
                kwargs["labels"] = labels = kwargs["input_ids"]  # the mean over no tokens is NaN, even × 0
            now.statistics = None
            real_tokens = now.real_tokens if now.targets else None
            if real_tokens is not None:  # virtual tokens of a prompt stand before the row
                real_tokens = F.pad(real_tokens, (labels.shape[1] - real_tokens.shape[1], 0), value=True)
            with self._run(now), without_padding(self.model, real_tokens):
                output = plain(*args, **kwargs)
            now.statistics = self._statistics_of(now, output, labels)
            router_loss = output.get("aux_loss")
            now.router_loss = router_loss.detach() if isinstance(router_loss, torch.Tensor) else None
            output["loss"] = now.statistics.scaled
            if not now.keeps_logits:  # only the loss uses them, so the engine need not handle them
                output["logits"] = None
            return output

        return forward

    @contextmanager
    def _run(self, now: LossPass) -> Iterator[None]:
        self._running = now
        try:
            yield
        finally:
            self._running = None

    def _statistics_of(self, now: LossPass, output: Any, labels: torch.Tensor) -> HeadStatistics:
        """The sums of the pass, with the model's own loss in them."""
        if now.statistics is None and self.kind != TokenLoss():
            raise ConfigError(
                f"{type(self.model).__name__} computes a loss of its own, for which there is no label_smoothing_factor "
                f"and no loss_type; leave them out."
            )
        own, targets = output["loss"], now.targets or 0
        statistics = now.statistics if now.statistics is not None else self._observed(output["logits"], labels)
        sums = torch.stack([own.detach().to(statistics.sums.dtype) * targets, *statistics.sums[1:]])
        return HeadStatistics(own * (targets * now.scale), sums if targets else torch.zeros_like(sums))

    def _loss(self, logits: Any, labels: torch.Tensor, vocab_size: int | None = None, **kwargs: Any) -> torch.Tensor:
        """The loss function that the model calls: the mean over the tokens that contribute."""
        now = self._running
        if now is None or not _is_cross_entropy(self.plain_loss, kwargs):
            assert self.plain_loss is not None
            return self.plain_loss(logits=logits, labels=labels, vocab_size=vocab_size, **kwargs)
        # The scale is applied where gradients are computed, so that gradients in a narrow dtype are rounded once.
        scale = now.scale if (now.targets or 0) * now.scale else 1.0
        if type(logits) is DeferredLogits:
            statistics = chunked_cross_entropy(logits, labels, self.chunk_tokens, scale, self.kind, self.entropy)
        else:
            statistics = whole_cross_entropy(logits, labels, scale, self.kind, self.entropy)
        now.statistics = now.statistics or statistics  # the first call is for the next token, if there are several
        return statistics.scaled / (scale * (labels[:, 1:] != IGNORED).sum())

    @torch.no_grad()
    def _observed(self, logits: Any, labels: torch.Tensor) -> HeadStatistics:
        """Accuracy and entropy beside a loss that the model computes by itself."""
        if type(logits) is DeferredLogits:
            return chunked_cross_entropy(logits, labels, self.chunk_tokens, entropy=self.entropy)
        return whole_cross_entropy(logits, labels, entropy=self.entropy)


def _is_cross_entropy(loss: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a model's loss function is transformers' mean over the next tokens, and is asked for no other."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    others = ("shift_labels", "num_items_in_batch", "ignore_index")
    return loss is ForCausalLMLoss and all(kwargs.get(name) is None for name in others)


def _why_not(head: Any) -> str:
    kind = "nothing" if head is None else type(head).__name__
    return f"the output head is {kind}, not a plain linear layer, so the logits are computed as a whole"
