"""The attention of a run that leaves it open: the fastest kernel that is right for each batch.

Registered in transformers under names of its own. Rows of one document run torch's SDPA without a mask, cuDNN's kernel
first, then flash. Packed rows, attention windows, soft-capped scores and sinks run flex attention with a mask that is
made once per batch (`attention_masks.py`). The rest (a cache, padding at the start) is transformers' own SDPA.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from fullshard.config.errors import first_line
from fullshard.device import accelerator
from fullshard.device.torch_private import compiler_errors
from fullshard.distributed.rank_logging import get_logger
from fullshard.models.attention_masks import dense_mask, dense_of, mask_of_model
from fullshard.models.causal_lm import get_causal_lm
from fullshard.models.kernels_on_meta import flex_attention_on_meta

NAME, NAME_FOR_SCORES = "fullshard", "fullshard_scores"
"""The names in transformers; the second for models that change scores (soft-caps, sinks), which SDPA cannot."""
KERNELS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""SDPA's kernels, fastest first; one that refuses a batch leaves it to the next."""
KERNELS_FOR_ANY_SIZE = KERNELS[1:]
"""cuDNN plans each new size of a batch, which takes longer than the kernel saves if sizes keep changing."""
WIDEST_GROUPED = 256
"""The widest heads for which these kernels share key and value heads between query heads."""

logger = get_logger(__name__)


def use_own_attention(model: Any) -> bool:
    """Let a model run this attention, if its class takes its attention from transformers' interface."""
    inner = get_causal_lm(model)
    if not is_usable(type(inner)):
        return False
    register()
    inner.set_attn_implementation(NAME_FOR_SCORES if changes_scores(inner) else NAME)
    return is_own(inner.config)


def changes_scores(model: Any) -> bool:
    """Whether attention does something to scores that SDPA cannot. (transformers 5.17 runs SDPA without Gemma 2's
    soft-caps.)"""
    capped = getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None
    return capped or not model._supports_sdpa


def is_usable(kind: type) -> bool:
    """Whether models of this class can run it."""
    can_set = getattr(kind, "_can_set_attn_implementation", None)
    supports = getattr(kind, "_supports_sdpa", False) or getattr(kind, "_supports_flex_attn", False)
    return can_set is not None and bool(can_set()) and supports


def is_own(config: Any) -> bool:
    """Whether a model with this configuration runs it."""
    return getattr(config.get_text_config(), "_attn_implementation", None) in (NAME, NAME_FOR_SCORES)


@functools.cache
def register() -> None:
    """Make the names known to transformers."""
    for name in (NAME, NAME_FOR_SCORES):
        AttentionInterface.register(name, attention)
        AttentionMaskInterface.register(name, functools.partial(mask_of_model, always=name == NAME_FOR_SCORES))


def attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any,
    dropout: float = 0.0, scaling: float | None = None, is_causal: bool | None = None, softcap: float | None = None,
    s_aux: torch.Tensor | None = None, position_bias: torch.Tensor | None = None, **kwargs: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Attention in transformers' form: [rows, heads, length, width] in, [rows, length, heads, width] out."""
    mask, sinks = attention_mask, s_aux
    if isinstance(mask, BlockMask):
        if dropout == 0 and position_bias is None and runs_flex(query):
            out = _flex(query, key, value, mask, scaling, softcap, sinks)
            if out is not None:
                return out.transpose(1, 2).contiguous(), None
        mask = dense_of(mask)
    is_causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    plain = mask is None and is_causal and position_bias is None and query.shape[2] == key.shape[2]
    if softcap is not None or sinks is not None:
        if plain:
            mask = dense_mask(torch.zeros(1, query.shape[2], dtype=torch.int32, device=query.device))
        return softmax_attention(query, key, value, mask, dropout, scaling, softcap, sinks).transpose(1, 2), None
    if plain:
        return causal_attention(query, key, value, dropout, scaling).transpose(1, 2).contiguous(), None
    return sdpa_attention_forward(
        module, query, key, value, mask, dropout=dropout, scaling=scaling, is_causal=is_causal,
        position_bias=position_bias, **kwargs,
    )  # fmt: skip


def causal_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float, scaling: float | None
) -> torch.Tensor:
    """Causal attention over whole rows."""
    groups = query.shape[1] // key.shape[1]
    shares = query.dtype in (torch.bfloat16, torch.float16) and key.shape[-1] == value.shape[-1] <= WIDEST_GROUPED
    if groups > 1 and not shares:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    with sdpa_kernel(KERNELS if _batch.has_usual_size else KERNELS_FOR_ANY_SIZE, set_priority=True):
        return F.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True, scale=scaling, enable_gqa=groups > 1 and shares
        )


def softmax_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, dropout: float,
    scaling: float | None, softcap: float | None, sinks: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Attention with soft-capped scores and sinks in plain operations, where flex attention does not run."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        column = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], -1)
    probs = scores.float().softmax(-1).to(query.dtype)[..., : key.shape[2]]
    return F.dropout(probs, dropout) @ value


class _Batch:
    has_usual_size = True


_batch = _Batch()


@contextlib.contextmanager
def batch_size(is_usual: bool) -> Iterator[None]:
    """Inside, the batch has the size that most have, or not."""
    before, _batch.has_usual_size = _batch.has_usual_size, is_usual
    try:
        yield
    finally:
        _batch.has_usual_size = before


# --- flex attention -------------------------------------------------------------------------------------------------


def runs_flex(query: torch.Tensor) -> bool:
    """Whether flex attention runs: on GPUs, unless it could not be compiled. Its CPU form has no gradients."""
    return accelerator.runs_inductor(query.device) and not _unused


_unused: list[str] = []
"""Why flex attention is not used."""


@contextlib.contextmanager
def without_flex() -> Iterator[None]:
    """Inside, dense masks take the place of flex attention, for models too small to compile anything for."""
    _unused.append("a trial")
    try:
        yield
    finally:
        _unused.remove("a trial")


def _flex(*args: Any) -> torch.Tensor | None:
    """Compiled flex attention, as part of a layer that is being compiled or by itself; None if that fails."""
    if args[0].is_meta:
        return on_meta(*args)
    if torch.compiler.is_compiling():
        return masked_attention(*args)
    try:
        return _compiled()(*args)
    except compiler_errors() as error:
        _unused.append(first_line(error))
        logger.warning("flex attention could not be compiled (%s); packed rows get dense masks.", _unused[0])
        return None


def masked_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: BlockMask, scaling: float | None = None,
    softcap: float | None = None, sinks: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Attention inside the blocks of a mask."""

    def capped(score: torch.Tensor, row: Any, head: Any, at: Any, to: Any) -> torch.Tensor:
        return softcap * torch.tanh(score / softcap)

    out: Any = flex_attention(
        query, key, value, score_mod=None if softcap is None else capped, block_mask=mask, scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1], return_aux=None if sinks is None else AuxRequest(lse=True),
    )  # fmt: skip
    if sinks is None:
        return out
    # A sink takes its share of the softmax: exp(lse) / (exp(lse) + exp(sink)) of the weight remains.
    attended, aux = out
    return attended * torch.sigmoid(aux.lse - sinks.float()[:, None])[..., None].to(attended.dtype)


def on_meta(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: BlockMask, scaling: float | None,
    softcap: float | None, sinks: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """`masked_attention` on the meta device: shapes, and what is kept for backward."""
    out, lse = flex_attention_on_meta(query, key, value)
    return out if sinks is None else out * torch.sigmoid(lse - sinks.float()[:, None])[..., None].to(out.dtype)


@functools.cache
def _compiled() -> Callable[..., torch.Tensor]:
    return torch.compile(masked_attention)
