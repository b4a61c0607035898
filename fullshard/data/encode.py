"""Rows to tokens and loss masks, given a tokenizer, a chat template and the settings.

`encode_rows` is a pure function of its arguments, so it can run in any process and in any order. `row_formats.py`
parses rows, `render_chat.py` renders conversations, `token_table.py` and `stream.py` store the tokens.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fullshard.config.errors import DataError, one_line
from fullshard.data.pretokenized import IGNORED
from fullshard.data.raw_row import RawRow
from fullshard.data.render_chat import ChatMessage, Conversation, Span
from fullshard.data.row_formats import DEFAULT_READING, UNUSED, Document, Reading, count, count_bad, parse_rows
from fullshard.data.template_fields import adapt_messages, variables

BATCH = 512
"""Rows tokenized in one call; fast tokenizers use all cores for a call."""


@dataclass(frozen=True)
class TextSettings:
    """Everything besides the data and the tokenizer that determines tokens and loss masks."""

    max_length: int | None = 1024
    """The maximum number of tokens in a row; None: no maximum."""
    packing: bool = False
    wrapped: bool = False
    """With packing: concatenate all documents and cut them into rows of `max_length`, whatever their boundaries."""
    keep_rows: bool = False
    """Without packing: the documents of a row that is packed already stay in one row."""
    add_special_tokens: bool | None = None
    """Let the tokenizer add special tokens. None: only to text documents, since chat templates write them."""
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
    truncation_mode: str = "keep_start"
    """What is kept of truncated documents: keep_start or keep_end."""
    reading: Reading = DEFAULT_READING
    """How rows are parsed."""
    data_sets: tuple[tuple[Reading, str | None], ...] = ()
    """(reading, template) of each dataset that has its own settings; `RawRow.data_set` is the index."""

    @property
    def document_limit(self) -> int | None:
        """The maximum number of tokens in a document, if there is one."""
        return None if self.packing and self.wrapped else self.max_length

    def reading_of(self, data_set: int | None) -> Reading:
        """How rows of a data set are read; None stands for the only data set."""
        return self.reading if data_set is None else self.data_sets[data_set][0]

    def template_of(self, data_set: int | None) -> str | None:
        """The chat template of a data set; None stands for the only data set."""
        return self.template if data_set is None else self.data_sets[data_set][1]


class Encoded(NamedTuple):
    """A tokenized document."""

    tokens: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    """1 for tokens that contribute to the loss."""
    continues: bool = False
    """Whether it continues the row of the document before it: the data is packed already."""


TextAndSpans = tuple[str, list[Span] | None]
"""A text, and the spans of it that contribute to the loss; None means all of it."""
TRIMMED, NOT_TRIMMED = b'"trim_offsets":true', b'"trim_offsets":false'
"""The setting in a serialized post-processor that decides whether token offsets exclude whitespace."""


def encode_rows(
    batch: Sequence[RawRow], tokenizer: Any, settings: TextSettings, counts: dict[str, Any]
) -> Iterator[Encoded]:
    """Each document, at most `document_limit` tokens long. `counts` counts what is left out."""
    parsed: list[Document] = []
    for data_set, rows in groupby(batch, key=lambda raw: raw.data_set):
        parsed += parse_rows(list(rows), settings.reading_of(data_set), counts)
    for document in _tokenize(parsed, tokenizer, settings, counts):
        if not len(document.tokens):
            count(counts, "empty")
        for piece in _cut(document, settings, counts):
            if piece.loss_mask.any() or settings.keep_rows:
                yield piece
            else:
                count(counts, "masked")


def _cut(document: Encoded, settings: TextSettings, counts: dict[str, Any]) -> Iterator[Encoded]:
    """The pieces of a document that are used: all of it, unless it is too long."""
    tokens, mask, continues = document
    size, limit = len(tokens), settings.document_limit
    if limit is None or size <= limit:
        if size:
            yield document
        return
    count(counts, "long")
    if settings.overflow == "split":
        for start in range(0, size, limit):
            yield Encoded(tokens[start : start + limit], mask[start : start + limit], continues and not start)
        return
    count(counts, "cut", size if settings.overflow == "drop" else size - limit)
    if settings.overflow == "truncate":
        part = slice(limit) if settings.truncation_mode == "keep_start" else slice(size - limit, None)
        yield Encoded(tokens[part], mask[part], continues)


def _tokenize(
    batch: list[Document], tokenizer: Any, settings: TextSettings, counts: dict[str, Any]
) -> Iterator[Encoded]:
    documents: list[Document] = []
    rendered: list[TextAndSpans] = []
    for document in batch:
        count(counts, "texts", document.text is not None)
        try:
            rendered.append(render_document(document, tokenizer, settings))
            documents.append(document)
        except DataError as error:
            if settings.reading_of(document.data_set).on_bad_row != "skip":
                raise
            count_bad(counts, "refused by the chat template or a setting", str(error))
            continue
        template = settings.template_of(document.data_set)
        for name in (document.template_kwargs or {}).keys() - variables(template or ""):
            count(counts, f"{UNUSED}chat_template_kwargs.{name}")
    if not documents:
        return
    masked = any(spans is not None for _, spans in rendered)
    if masked and not getattr(tokenizer, "is_fast", False):
        raise DataError(
            f"a loss mask needs token offsets, which {type(tokenizer).__name__} does not provide; use a fast tokenizer "
            f"(tokenizer.json), or train on all tokens (assistant_only_loss and completion_only_loss false)."
        )
    with _untrimmed_offsets(tokenizer) if masked else contextlib.nullcontext():
        encoded = _call_tokenizer(tokenizer, documents, [text for text, _ in rendered], settings, masked)
    for document, (text, spans), (numbers, offsets) in zip(documents, rendered, encoded, strict=True):
        if document.input_ids is not None:
            yield from _encode_pretokenized(document, settings, counts)
            continue
        if not text:
            yield Encoded(np.empty(0, np.int32), np.empty(0, np.uint8))
            continue
        mask = np.ones(len(numbers), np.uint8) if spans is None else _mask_of_spans(offsets, spans)
        if document.messages is not None and numbers[:2] == [tokenizer.bos_token_id] * 2:
            numbers, mask = numbers[1:], mask[1:]  # the chat template wrote the BOS token already
        last = spans is None or bool(spans and spans[-1][1] >= len(text.rstrip()))
        if numbers and numbers[-1] != tokenizer.eos_token_id and _appends_eos(document, tokenizer, settings):
            numbers.append(tokenizer.eos_token_id)
            mask = np.append(mask, np.uint8(last))
        elif spans and offsets and offsets[-1][0] == offsets[-1][1]:  # a token that the tokenizer has added at the end
            mask[-1] = last
        yield Encoded(np.asarray(numbers, dtype=np.int32), mask)


Offsets = list[tuple[int, int]]


def _call_tokenizer(
    tokenizer: Any, documents: Sequence[Document], texts: Sequence[str], settings: TextSettings, offsets: bool
) -> list[tuple[list[int], Offsets | None]]:
    """The tokens and, if asked for, the token offsets of each text."""
    results: list[tuple[list[int], Offsets | None]] = [([], None)] * len(texts)
    setting = settings.add_special_tokens
    special = [document.messages is None if setting is None else setting for document in documents]
    for adds in set(special):
        mine = [i for i, one in enumerate(special) if one == adds]
        call = functools.partial(
            tokenizer, add_special_tokens=adds, return_offsets_mapping=offsets, return_attention_mask=False,
            verbose=False,
        )  # fmt: skip
        try:
            encoded = call([texts[i] for i in mine])
        except BaseException as error:
            if not _is_of_the_tokenizer(error):
                raise
            raise _refused(call, [(documents[i].where, texts[i]) for i in mine], error) from None
        for place, i in enumerate(mine):
            results[i] = list(encoded["input_ids"][place]), encoded["offset_mapping"][place] if offsets else None
    return results


def _is_of_the_tokenizer(error: BaseException) -> bool:
    """Whether a tokenizer raised this error. Its Rust code may panic, with an error that is no `Exception`."""
    return isinstance(error, Exception) or type(error).__module__ == "pyo3_runtime"


def _refused(call: Callable[[str], Any], texts: Sequence[tuple[str, str]], error: BaseException) -> DataError:
    """The error for the first of these texts, each with its row, that the tokenizer cannot encode."""
    for where, text in texts:
        try:
            call(text)
        except BaseException as own:
            if not _is_of_the_tokenizer(own):
                raise
            return DataError(
                f"{where}: the tokenizer cannot encode the text: {one_line(own)}. Remove the row, "
                "or use another tokenizer."
            )
    return DataError(
        f"{texts[0][0]} and the rows after it: the tokenizer cannot encode them: {one_line(error)}. "
        "Use another tokenizer."
    )


def _encode_pretokenized(document: Document, settings: TextSettings, counts: dict[str, Any]) -> Iterator[Encoded]:
    """The documents of a pre-tokenized row: nothing is added to them."""
    ids, labels = np.asarray(document.input_ids, dtype=np.int32), document.labels
    mask = np.ones(len(ids), np.uint8) if labels is None else (np.asarray(labels) != IGNORED).astype(np.uint8)
    if document.completion_mask is not None:
        if settings.completion_only_loss:
            mask &= np.asarray(document.completion_mask, dtype=np.uint8)
        elif settings.completion_only_loss is None:
            count(counts, f"{UNUSED}completion_mask")
    start, sizes = 0, document.seq_lengths or (len(ids),)
    count(counts, "packed", len(sizes) > 1)
    for size in sizes:
        yield Encoded(ids[start : start + size], mask[start : start + size], start > 0)
        start += size


def _appends_eos(document: Document, tokenizer: Any, settings: TextSettings) -> bool:
    """Whether to end a document with the EOS token."""
    if settings.append_concat_token and tokenizer.eos_token_id is None:
        raise DataError("append_concat_token is on, but the tokenizer has no EOS token (eos_token).")
    if settings.append_concat_token is None:
        return document.messages is None and tokenizer.eos_token_id is not None
    return settings.append_concat_token


def render_document(document: Document, tokenizer: Any, settings: TextSettings) -> TextAndSpans:
    """Render a document to text, with the spans that contribute to the loss; None for the spans means all of it."""
    masks = (document.labels, document.completion_mask)
    if document.input_ids is not None and (not settings.completion_only_loss or masks != (None, None)):
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


def _mask_of_spans(offsets: Any, spans: list[Span]) -> npt.NDArray[np.uint8]:
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
