"""Rows as tokens: what a batch of rows becomes under a tokenizer, a template and the settings, and what is learnt.

A pure function of its arguments, so that it can run in any process, in any order. What rows mean is said by
`formats.py`, how conversations are written out by `chat.py`; where the tokens go, by `tokens.py` and `stream.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fullshard.data import chat
from fullshard.data.formats import Document, Raw, understand
from fullshard.errors import DataError

BATCH = 512
"""Rows tokenised in one call; fast tokenizers spread a call over the cores."""


@dataclass(frozen=True)
class TextSettings:
    """Everything besides data and tokenizer that decides what the tokens are."""

    max_length: int = 1024
    packing: bool = False
    add_special_tokens: bool = False
    append_concat_token: bool = False
    assistant_only_loss: bool = False
    text_field: str = "text"
    template: str | None = None
    overflow: str = "truncate"
    """What becomes of documents longer than `max_length`: truncate, split, drop."""


Piece = tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]
"""Tokens, and 1 for those that are learnt."""


def pieces(batch: Sequence[Raw], tokenizer: Any, settings: TextSettings, counts: dict[str, Any]) -> Iterator[Piece]:
    """Each row's tokens and loss mask, none longer than `max_length`; what is left out is counted in `counts`."""
    documents = [understand(row, settings.text_field) for row in batch]
    for ids, mask in _tokenize(documents, tokenizer, settings):
        if not len(ids):
            counts["empty"] += 1
            continue
        long = len(ids) > settings.max_length
        counts["long"] += long
        if long and settings.overflow == "drop":
            counts["cut"] += len(ids)
            continue
        end = len(ids) if settings.overflow == "split" else min(len(ids), settings.max_length)
        counts["cut"] += len(ids) - end
        for start in range(0, end, settings.max_length):
            piece = slice(start, min(end, start + settings.max_length))
            yield ids[piece], mask[piece]


def _tokenize(batch: list[Document], tokenizer: Any, settings: TextSettings) -> Iterator[Piece]:
    texts: list[str] = []
    spans: list[list[tuple[int, int]] | None] = []
    for document in batch:
        if document.messages is not None:
            text, found = chat.conversation(tokenizer, settings.template, document.messages, document.where)
            texts.append(text)
            spans.append(found if settings.assistant_only_loss else None)
        else:
            texts.append(document.text or "")
            spans.append(None)
    with_offsets = any(s is not None for s in spans)
    if with_offsets and not getattr(tokenizer, "is_fast", False):
        raise DataError(
            f"assistant_only_loss needs the characters each token stands for, which {type(tokenizer).__name__} does "
            f"not "
            f"give; use a fast tokenizer (tokenizer.json)."
        )
    encoded = tokenizer(
        texts,
        add_special_tokens=settings.add_special_tokens,
        return_offsets_mapping=with_offsets,
        return_attention_mask=False,
        verbose=False,
    )
    for i, document in enumerate(batch):
        if document.input_ids is not None:
            labels = document.labels
            ids = np.asarray(document.input_ids, dtype=np.int32)
            yield ids, np.ones(len(ids), np.uint8) if labels is None else (np.asarray(labels) != -100).astype(np.uint8)
            continue
        numbers = list(encoded["input_ids"][i])
        span = spans[i]
        mask = np.ones(len(numbers), np.uint8) if span is None else _inside(encoded["offset_mapping"][i], span)
        if settings.append_concat_token and numbers and numbers[-1] != tokenizer.eos_token_id:
            numbers.append(tokenizer.eos_token_id)
            mask = np.append(mask, np.uint8(1))
        yield np.asarray(numbers, dtype=np.int32), mask


def _inside(offsets: list[tuple[int, int]], spans: list[tuple[int, int]]) -> npt.NDArray[np.uint8]:
    """1 for tokens that begin inside a span. One that straddles its start belongs to the prompt."""
    begins = np.asarray([a for a, _ in offsets], dtype=np.int64)
    filled = np.asarray([b > a for a, b in offsets], dtype=bool)
    mask = np.zeros(len(offsets), dtype=bool)
    for start, end in spans:
        mask |= filled & (begins >= start) & (begins < end)
    return mask.astype(np.uint8)
