"""Rows as tokens: what a batch of rows becomes under a tokenizer, a template and the settings, and what is learnt.

A pure function of its arguments, so that it can run in any process, in any order. What rows mean is said by
`row_formats.py`, how conversations are written out by `render_chat.py`; where the tokens go, by `token_table.py` and
`stream.py`.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from fullshard.data.pretokenized import IGNORED
from fullshard.data.raw_row import RawRow
from fullshard.data.render_chat import ChatMessage, Conversation, Span
from fullshard.data.row_formats import DEFAULT_READING, UNUSED, Document, Reading, count_bad, parse_rows
from fullshard.data.template_fields import adapt_messages, variables
from fullshard.errors import DataError

BATCH = 512
"""Rows tokenised in one call; fast tokenizers spread a call over the cores."""


@dataclass(frozen=True)
class TextSettings:
    """Everything besides data and tokenizer that decides what the tokens are."""

    max_length: int = 1024
    packing: bool = False
    add_special_tokens: bool = False
    append_concat_token: bool | None = None
    """End documents with the end-of-text token. None: those of text, since a template ends conversations itself."""
    assistant_only_loss: bool = False
    completion_only_loss: bool | None = None
    """Of rows with a prompt only the completion is learnt. None: yes; True: and every row must have one."""
    last_turn_only_loss: bool = False
    """In conversations only the assistant's last turn is learnt."""
    template: str | None = None
    overflow: str = "truncate"
    """What becomes of documents longer than `max_length`: truncate, split, drop."""
    reading: Reading = DEFAULT_READING
    """What the rows' columns mean."""
    data_sets: tuple[tuple[Reading, str | None], ...] = ()
    """(reading, template) of each data set, where they have settings of their own; rows know their set's number."""

    def reading_of(self, data_set: int | None) -> Reading:
        return self.reading if data_set is None else self.data_sets[data_set][0]

    def template_of(self, data_set: int | None) -> str | None:
        return self.template if data_set is None else self.data_sets[data_set][1]


TokensAndMask = tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]
"""Tokens, and 1 for those that are learnt."""
TextAndSpans = tuple[str, list[Span] | None]
"""A text, and the parts of it that are learnt; None is all of it."""
TRIMMED, NOT_TRIMMED = b'"trim_offsets":true', b'"trim_offsets":false'
"""How a tokenizer's post-processor writes down whether offsets leave blanks out."""


def encode_rows(
    batch: Sequence[RawRow], tokenizer: Any, settings: TextSettings, counts: dict[str, Any]
) -> Iterator[TokensAndMask]:
    """Each row's tokens and loss mask, none longer than `max_length`; what is left out is counted in `counts`."""
    understood: list[Document] = []
    for data_set, rows in groupby(batch, key=lambda raw: raw.data_set):
        understood += parse_rows(list(rows), settings.reading_of(data_set), counts)
    for ids, mask in _tokenize(understood, tokenizer, settings, counts):
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


def _tokenize(
    batch: list[Document], tokenizer: Any, settings: TextSettings, counts: dict[str, Any]
) -> Iterator[TokensAndMask]:
    kept: list[Document] = []
    written: list[TextAndSpans] = []
    for document in batch:
        try:
            written.append(render_document(document, tokenizer, settings))
            kept.append(document)
        except DataError as error:
            if settings.reading_of(document.data_set).on_bad_row != "skip":
                raise
            count_bad(counts, str(error))
            continue
        template = settings.template_of(document.data_set)
        for name in (document.template_kwargs or {}).keys() - variables(template or ""):
            key = f"{UNUSED}chat_template_kwargs.{name}"
            counts[key] = counts.get(key, 0) + 1
    if not kept:
        return
    masked = any(spans is not None for _, spans in written)
    if masked and not getattr(tokenizer, "is_fast", False):
        raise DataError(
            f"to learn only a part of a text its tokens must say which characters they stand for, which "
            f"{type(tokenizer).__name__} does not do; use a fast tokenizer (tokenizer.json), or learn everything "
            f"(assistant_only_loss and completion_only_loss false)."
        )
    with _whole_offsets(tokenizer) if masked else contextlib.nullcontext():
        encoded = tokenizer(
            [text for text, _ in written],
            add_special_tokens=settings.add_special_tokens,
            return_offsets_mapping=masked,
            return_attention_mask=False,
            verbose=False,
        )
    for i, (document, (text, spans)) in enumerate(zip(kept, written, strict=True)):
        if document.input_ids is not None:
            yield _as_given(document, settings)
            continue
        numbers = list(encoded["input_ids"][i])
        mask = np.ones(len(numbers), np.uint8) if spans is None else _inside(encoded["offset_mapping"][i], spans)
        if document.messages is not None and numbers[:2] == [tokenizer.bos_token_id] * 2:
            numbers, mask = numbers[1:], mask[1:]  # the template wrote it already
        if numbers and numbers[-1] != tokenizer.eos_token_id and _ends_with_token(document, tokenizer, settings):
            numbers.append(tokenizer.eos_token_id)
            last = spans is None or bool(spans and spans[-1][1] >= len(text.rstrip()))
            mask = np.append(mask, np.uint8(last))
        yield np.asarray(numbers, dtype=np.int32), mask


def _as_given(document: Document, settings: TextSettings) -> TokensAndMask:
    """Tokens that were made elsewhere: nothing is added to them."""
    ids, labels, completion = np.asarray(document.input_ids, dtype=np.int32), document.labels, document.completion_mask
    mask = np.ones(len(ids), np.uint8) if labels is None else (np.asarray(labels) != IGNORED).astype(np.uint8)
    if completion is not None and settings.completion_only_loss is not False:
        mask &= np.asarray(completion, dtype=np.uint8)
    return ids, mask


def _ends_with_token(document: Document, tokenizer: Any, settings: TextSettings) -> bool:
    """Whether a document is to end with the end-of-text token."""
    if settings.append_concat_token and tokenizer.eos_token_id is None:
        raise DataError("append_concat_token is on, but the tokenizer has no end-of-text token (eos_token).")
    if settings.append_concat_token is None:
        return document.messages is None and tokenizer.eos_token_id is not None
    return settings.append_concat_token


def render_document(document: Document, tokenizer: Any, settings: TextSettings) -> TextAndSpans:
    """A document's text, and the spans of it that are learnt; None where that is everything."""
    if document.input_ids is not None:
        return "", None
    whole = settings.completion_only_loss is False
    prompted = document.prompt is not None or document.completion_start is not None
    if settings.completion_only_loss and not prompted:
        raise DataError(
            f"{document.where}: completion_only_loss is on, but the row has no prompt; expected `prompt` and "
            f"`completion`. Leave completion_only_loss out to learn such rows whole."
        )
    if document.messages is not None:
        return _write_conversation(document, tokenizer, settings)
    text, prompt = document.text or "", document.prompt
    if prompt is None:
        return text, None
    return prompt + text, None if whole else [(len(prompt), len(prompt) + len(text))]


def _write_conversation(document: Document, tokenizer: Any, settings: TextSettings) -> TextAndSpans:
    template = settings.template_of(document.data_set)
    messages: Sequence[ChatMessage] = document.messages or ()
    if template is not None:
        messages = adapt_messages(messages, document.tools, template, tokenizer, document.where)
    given = document.template_kwargs or {}
    talk = Conversation(tokenizer, template, messages, document.where, document.tools, given)
    first = 0 if settings.completion_only_loss is False else document.completion_start or 0
    weights = document.weights or (None,) * len(messages)
    off = [i for i, weight in enumerate(weights) if weight == 0]
    if settings.assistant_only_loss or settings.last_turn_only_loss:
        asked = [i for i, weight in enumerate(weights) if weight == 1 and not settings.last_turn_only_loss]
        turns = talk.assistant_turns[-1:] if settings.last_turn_only_loss else talk.assistant_turns
        return talk.turns([i for i in sorted({*turns, *asked}) if i >= first and i not in off])
    if not first and not off:
        return talk.text(), None
    text, span = talk.completion(first)
    return text, subtract_spans([span], talk.turns(off)[1] if off else [])


def subtract_spans(spans: list[Span], holes: Sequence[Span]) -> list[Span]:
    """Spans without the parts that lie in holes."""
    for begin, end in holes:
        cut = [part for a, b in spans for part in ((a, min(b, begin)), (max(a, end), b))]
        spans = [(a, b) for a, b in cut if a < b]
    return spans


def _inside(offsets: list[tuple[int, int]], spans: list[Span]) -> npt.NDArray[np.uint8]:
    """1 for tokens that begin inside a span. One that straddles its start belongs to the prompt."""
    begins = np.asarray([a for a, _ in offsets], dtype=np.int64)
    filled = np.asarray([b > a for a, b in offsets], dtype=bool)
    mask = np.zeros(len(offsets), dtype=bool)
    for start, end in spans:
        mask |= filled & (begins >= start) & (begins < end)
    return mask.astype(np.uint8)


@contextlib.contextmanager
def _whole_offsets(tokenizer: Any) -> Iterator[None]:
    """Offsets that cover the blanks in a token as well: some tokenizers leave those out, and so say too little."""
    backend = tokenizer.backend_tokenizer
    old = backend.post_processor
    state = old.__getstate__() if old is not None else b""
    if TRIMMED not in state:
        yield
        return
    new = copy.copy(old)
    new.__setstate__(state.replace(TRIMMED, NOT_TRIMMED))
    backend.post_processor = new
    try:
        yield
    finally:
        backend.post_processor = old
