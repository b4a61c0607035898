"""Rows to tokens and loss masks, given a tokenizer, a chat template and the settings.

`encode_rows` is a pure function of its arguments, so it can run in any process and in any order. `row_formats.py`
parses rows, `render_chat.py` renders conversations, `token_table.py` and `stream.py` store the tokens.
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
"""Rows tokenized in one call; fast tokenizers use all cores for a call."""


@dataclass(frozen=True)
class TextSettings:
    """Everything besides the data and the tokenizer that determines tokens and loss masks."""

    max_length: int = 1024
    packing: bool = False
    add_special_tokens: bool = False
    append_concat_token: bool | None = None
    """End documents with the EOS token. None: only text documents, since chat templates end conversations
    themselves."""
    assistant_only_loss: bool = False
    completion_only_loss: bool | None = None
    """In rows with a prompt, only the completion contributes to the loss. True: every row must have a prompt."""
    last_turn_only_loss: bool = False
    """In conversations, only the assistant's last turn contributes to the loss."""
    template: str | None = None
    overflow: str = "truncate"
    """What to do with documents longer than `max_length`: truncate, split or drop."""
    reading: Reading = DEFAULT_READING
    """How rows are parsed."""
    data_sets: tuple[tuple[Reading, str | None], ...] = ()
    """(reading, template) of each dataset that has its own settings; `RawRow.data_set` is the index."""

    def reading_of(self, data_set: int | None) -> Reading:
        return self.reading if data_set is None else self.data_sets[data_set][0]

    def template_of(self, data_set: int | None) -> str | None:
        return self.template if data_set is None else self.data_sets[data_set][1]


TokensAndMask = tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]
"""Tokens, and the loss mask: 1 for tokens that contribute to the loss."""
TextAndSpans = tuple[str, list[Span] | None]
"""A text, and the spans of it that contribute to the loss; None means all of it."""
TRIMMED, NOT_TRIMMED = b'"trim_offsets":true', b'"trim_offsets":false'
"""The setting in a serialized post-processor that decides whether token offsets exclude whitespace."""


def encode_rows(
    batch: Sequence[RawRow], tokenizer: Any, settings: TextSettings, counts: dict[str, Any]
) -> Iterator[TokensAndMask]:
    """The tokens and loss mask of each document, at most `max_length` long. `counts` counts what is left out."""
    parsed: list[Document] = []
    for data_set, rows in groupby(batch, key=lambda raw: raw.data_set):
        parsed += parse_rows(list(rows), settings.reading_of(data_set), counts)
    for ids, mask in _tokenize(parsed, tokenizer, settings, counts):
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
    rendered: list[TextAndSpans] = []
    for document in batch:
        try:
            rendered.append(render_document(document, tokenizer, settings))
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
    masked = any(spans is not None for _, spans in rendered)
    if masked and not getattr(tokenizer, "is_fast", False):
        raise DataError(
            f"a loss mask needs token offsets, which {type(tokenizer).__name__} does not provide; use a fast tokenizer "
            f"(tokenizer.json), or train on all tokens (assistant_only_loss and completion_only_loss false)."
        )
    with _untrimmed_offsets(tokenizer) if masked else contextlib.nullcontext():
        encoded = tokenizer(
            [text for text, _ in rendered],
            add_special_tokens=settings.add_special_tokens,
            return_offsets_mapping=masked,
            return_attention_mask=False,
            verbose=False,
        )
    for i, (document, (text, spans)) in enumerate(zip(kept, rendered, strict=True)):
        if document.input_ids is not None:
            yield _encode_pretokenized(document, settings)
            continue
        numbers = list(encoded["input_ids"][i])
        mask = np.ones(len(numbers), np.uint8) if spans is None else _mask_of_spans(encoded["offset_mapping"][i], spans)
        if document.messages is not None and numbers[:2] == [tokenizer.bos_token_id] * 2:
            numbers, mask = numbers[1:], mask[1:]  # the chat template wrote the BOS token already
        if numbers and numbers[-1] != tokenizer.eos_token_id and _appends_eos(document, tokenizer, settings):
            numbers.append(tokenizer.eos_token_id)
            last = spans is None or bool(spans and spans[-1][1] >= len(text.rstrip()))
            mask = np.append(mask, np.uint8(last))
        yield np.asarray(numbers, dtype=np.int32), mask


def _encode_pretokenized(document: Document, settings: TextSettings) -> TokensAndMask:
    """A pre-tokenized document: nothing is added to it."""
    ids, labels, completion = np.asarray(document.input_ids, dtype=np.int32), document.labels, document.completion_mask
    mask = np.ones(len(ids), np.uint8) if labels is None else (np.asarray(labels) != IGNORED).astype(np.uint8)
    if completion is not None and settings.completion_only_loss is not False:
        mask &= np.asarray(completion, dtype=np.uint8)
    return ids, mask


def _appends_eos(document: Document, tokenizer: Any, settings: TextSettings) -> bool:
    """Whether to end a document with the EOS token."""
    if settings.append_concat_token and tokenizer.eos_token_id is None:
        raise DataError("append_concat_token is on, but the tokenizer has no EOS token (eos_token).")
    if settings.append_concat_token is None:
        return document.messages is None and tokenizer.eos_token_id is not None
    return settings.append_concat_token


def render_document(document: Document, tokenizer: Any, settings: TextSettings) -> TextAndSpans:
    """Render a document to text, with the spans that contribute to the loss; None for the spans means all of it."""
    if document.input_ids is not None:
        return "", None
    whole = settings.completion_only_loss is False
    prompted = document.prompt is not None or document.completion_start is not None
    if settings.completion_only_loss and not prompted:
        raise DataError(
            f"{document.where}: completion_only_loss is on, but the row has no prompt; expected `prompt` and "
            f"`completion`. Leave completion_only_loss out to train on all tokens of such rows."
        )
    if document.messages is not None:
        return _render_conversation(document, tokenizer, settings)
    text, prompt = document.text or "", document.prompt
    if prompt is None:
        return text, None
    return prompt + text, None if whole else [(len(prompt), len(prompt) + len(text))]


def _render_conversation(document: Document, tokenizer: Any, settings: TextSettings) -> TextAndSpans:
    template = settings.template_of(document.data_set)
    messages: Sequence[ChatMessage] = document.messages or ()
    if template is not None:
        messages = adapt_messages(messages, document.tools, template, tokenizer, document.where)
    template_kwargs = document.template_kwargs or {}
    conversation = Conversation(tokenizer, template, messages, document.where, document.tools, template_kwargs)
    first = 0 if settings.completion_only_loss is False else document.completion_start or 0
    weights = document.weights or (None,) * len(messages)
    excluded = [i for i, weight in enumerate(weights) if weight == 0]
    if settings.assistant_only_loss or settings.last_turn_only_loss:
        weighted = [i for i, weight in enumerate(weights) if weight == 1 and not settings.last_turn_only_loss]
        turns = conversation.assistant_turns[-1:] if settings.last_turn_only_loss else conversation.assistant_turns
        return conversation.turns([i for i in sorted({*turns, *weighted}) if i >= first and i not in excluded])
    if not first and not excluded:
        return conversation.text(), None
    text, span = conversation.completion(first)
    return text, subtract_spans([span], conversation.turns(excluded)[1] if excluded else [])


def subtract_spans(spans: list[Span], holes: Sequence[Span]) -> list[Span]:
    """Spans without the parts that are inside `holes`."""
    for begin, end in holes:
        cut = [part for a, b in spans for part in ((a, min(b, begin)), (max(a, end), b))]
        spans = [(a, b) for a, b in cut if a < b]
    return spans


def _mask_of_spans(offsets: list[tuple[int, int]], spans: list[Span]) -> npt.NDArray[np.uint8]:
    """The loss mask: 1 for tokens that begin inside a span. A token that begins before a span belongs to the prompt."""
    begins = np.asarray([a for a, _ in offsets], dtype=np.int64)
    filled = np.asarray([b > a for a, b in offsets], dtype=bool)
    mask = np.zeros(len(offsets), dtype=bool)
    for start, end in spans:
        mask |= filled & (begins >= start) & (begins < end)
    return mask.astype(np.uint8)


@contextlib.contextmanager
def _untrimmed_offsets(tokenizer: Any) -> Iterator[None]:
    """Make token offsets include whitespace, which some tokenizers exclude."""
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
