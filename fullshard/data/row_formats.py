"""Parses rows of training data: a `RowFormat` turns a row with certain columns into a `Document`.

A row's columns determine its format, in the fixed order of `ROW_FORMATS`; a new format is one entry there. A row that
cannot be parsed stops the run or is counted, according to `Reading.on_bad_row`. `messages.py` parses messages,
`pretokenized.py` tokens. This module needs neither a tokenizer nor torch.
"""

from __future__ import annotations

import functools
import string
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fullshard.config.errors import ConfigError, DataError
from fullshard.data import pretokenized
from fullshard.data.messages import (
    ROLES,
    list_of,
    message_of,
    messages_from_json,
    messages_of,
    template_kwargs_of,
    text_of,
    tools_of,
)
from fullshard.data.raw_row import BadRow, RawRow, names, parse_json, short


@dataclass(frozen=True)
class Document:
    """A parsed row of training data: text, a conversation, or tokens."""

    where: str
    """Its location, for error messages: `train.jsonl, line 7`."""
    text: str | None = None
    prompt: str | None = None
    """Precedes `text`. It does not contribute to the loss unless completion_only_loss is false."""
    messages: tuple[Mapping[str, Any], ...] | None = None
    completion_start: int | None = None
    """The index of the first of `messages` that belongs to the completion. Those before it do not contribute to the
    loss unless completion_only_loss is false."""
    weights: tuple[int | None, ...] | None = None
    """For each of `messages`: 0 (no loss), 1 (loss) or None (according to the settings)."""
    tools: tuple[Mapping[str, Any], ...] | None = None
    """The tools of the conversation, for the chat template."""
    template_kwargs: Mapping[str, Any] | None = None
    """Additional variables for the chat template."""
    input_ids: tuple[int, ...] | None = None
    labels: tuple[int, ...] | None = None
    """For `input_ids`: -100 for tokens without loss. None: all tokens contribute to the loss."""
    completion_mask: tuple[int, ...] | None = None
    """For `input_ids`: 0 for tokens without loss, if completion_only_loss is true."""
    seq_lengths: tuple[int, ...] | None = None
    """For `input_ids`: the lengths of the documents in the row, if it holds several."""
    unused: tuple[str, ...] | None = None
    """Columns of the row that other trainers use and that are not used here."""
    data_set: int | None = None
    """The index of its dataset, if datasets have their own settings."""


@dataclass(frozen=True)
class Reading:
    """The user's settings for parsing rows."""

    text_field: str = "text"
    """The column that holds text."""
    columns: tuple[tuple[str, str], ...] = ()
    """(expected name, column in the data) for columns that have other names in the data."""
    on_bad_row: str = "stop"
    """stop: the first row that cannot be parsed is an error. skip: such rows are left out and counted."""
    prompt_format: str | None = None
    """A format string that makes the prompt from a row's columns, with {column} placeholders."""
    prepared: bool = False
    """Rows must be pre-tokenized, with the labels that they are trained on."""


DEFAULT_READING = Reading()


def reading_of(
    text_field: str, columns: str | None, on_bad_row: str, prompt_format: str | None = None, prepared: bool = False
) -> Reading:
    """The settings for parsing rows, from the command-line options; `columns` is "name=column,…"."""
    names = [*(name for row_format in ROW_FORMATS for name in (*row_format.columns, *row_format.optional)), text_field]
    names += _named(prompt_format) if prompt_format is not None else []
    pairs = []
    for part in (columns or "").split(","):
        if not part.strip():
            continue
        name, equals, column = (word.strip() for word in part.partition("="))
        if not (name and equals and column):
            raise ConfigError(f"dataset_columns has {part.strip()!r}; expected name=column, such as prompt=question.")
        if name not in names:
            raise ConfigError(
                f"dataset_columns names {name!r}; expected name=column, with the name one of "
                f"{', '.join(dict.fromkeys(names))}."
            )
        pairs.append((name, column))
    twice = {name for name, _ in pairs if [n for n, _ in pairs].count(name) > 1}
    if twice:
        raise ConfigError(f"dataset_columns names {', '.join(sorted(twice))} twice.")
    return Reading(text_field, tuple(pairs), on_bad_row, prompt_format, prepared)


def _named(prompt_format: str) -> list[str]:
    """The columns in a prompt format."""
    try:
        fields = [name for _, name, _, _ in string.Formatter().parse(prompt_format) if name is not None]
    except ValueError as error:
        raise ConfigError(f"prompt_format is {prompt_format!r}: {error}. Write {{{{ and }}}} for braces.") from None
    if not fields or not all(name.isidentifier() for name in fields):
        raise ConfigError(f"prompt_format is {prompt_format!r}; expected text with {{column}} in it.")
    return fields


# --- rows -----------------------------------------------------------------------------------------------------------

NAMED = 5
"""How many bad rows are reported; all are counted."""
UNUSED = "unused "
"""Prefix of the counters of rows with unused columns."""
BAD = "bad: "
"""Prefix of the counters of bad rows, by the kind of reason."""
BadRows = list[tuple[str, str]]
"""Bad rows that are reported: (kind of reason, message)."""


def parse_rows(batch: Sequence[RawRow], reading: Reading, counts: dict[str, Any]) -> list[Document]:
    """Parse the rows of a batch. Rows that are skipped are counted in `counts` by `count_bad`."""
    documents = []
    for raw in batch:
        try:
            documents.append(_parse_row(raw, reading))
            for name in documents[-1].unused or ():
                count(counts, f"{UNUSED}{name}")
        except BadRow as bad:
            if reading.on_bad_row != "skip":
                raise _error(raw, bad) from None
            count_bad(counts, bad.kind, f"{raw.where}: {bad.why}")
    return documents


def parse_row(raw: RawRow, reading: Reading = DEFAULT_READING) -> Document:
    """Parse a row; raises a `DataError` that shows the row if it cannot be parsed."""
    try:
        return _parse_row(raw, reading)
    except BadRow as bad:
        raise _error(raw, bad) from None


def count(counts: dict[str, Any], name: str, number: int = 1) -> None:
    """Add to a counter."""
    counts[name] = counts.get(name, 0) + int(number)


def count_bad(counts: dict[str, Any], kind: str, message: str) -> None:
    """Count a row that is left out: "bad" counts all of them, "bad_rows" holds a few of them."""
    count(counts, "bad")
    count(counts, f"{BAD}{kind}")
    counts["bad_rows"] = few_bad_rows(counts.get("bad_rows", []), [(kind, message)])


def few_bad_rows(named: BadRows, more: BadRows) -> BadRows:
    """The bad rows to report: the first ones, and as many kinds of reasons as possible."""
    named = list(named)
    for kind, message in more:
        kinds = [kind for kind, _ in named]
        if len(named) == NAMED and kind not in kinds:
            again = [i for i, earlier in enumerate(kinds) if earlier in kinds[:i]]
            named = [row for i, row in enumerate(named) if i != max(again, default=-1)]
        if len(named) < NAMED:
            named.append((kind, message))
    return named


def bad_kinds(facts: Mapping[str, Any]) -> str:
    """How many rows were left out for which kind of reason, in words."""
    kinds = {name.removeprefix(BAD): count for name, count in facts.items() if name.startswith(BAD)}
    return ", ".join(f"{count:,} {kind}" for kind, count in sorted(kinds.items(), key=lambda one: -one[1]))


def _error(raw: RawRow, bad: BadRow) -> DataError:
    row = bad.row if bad.row is not None else raw.value
    shown = "" if isinstance(row, BadRow) else f" The row: {short(row, 160)}"
    return DataError(f"{raw.where}: {bad.why}{shown} (on_bad_row skip leaves such rows out)")


def _parse_row(raw: RawRow, reading: Reading) -> Document:
    row = raw.value
    if isinstance(row, BadRow):
        raise row
    if isinstance(row, bytes):
        row = parse_json(row)
    if not isinstance(row, Mapping):
        raise BadRow(f"{short(row)} is not an object with columns.", row, "no columns")
    whole = _renamed(row, reading.columns)
    row = {name: value for name, value in whole.items() if not _is_null(value)}
    formats = _formats(reading.text_field, reading.prompt_format)
    row_format = next((s for s in formats if all(column in row for column in s.columns)), None)
    try:
        read = (*row_format.columns, *row_format.optional) if row_format is not None else ()
        if reading.prepared:
            pretokenized.check_prepared(row)
        check_purpose(row, read)
        if row_format is not None:
            unused = unused_columns(row, read)
            return Document(raw.where, **row_format.read(row), unused=unused, data_set=raw.data_set)
    except BadRow as bad:
        raise BadRow(bad.why, whole, bad.kind) from None
    columns = {column for row_format in formats for column in row_format.columns}
    if null := [name for name in whole if name in columns and name not in row]:
        raise BadRow(f"`{null[0]}` is null; expected a value.", whole, f"no {null[0]}")
    alone = (
        " Rows with only a prompt are for trainers that generate completions (GRPO, PPO)." if "prompt" in row else ""
    )
    raise BadRow(
        f"columns {names(whole)}; expected "
        f"{', '.join(' and '.join(f'`{c}`' for c in row_format.columns) for row_format in formats)}. If the columns "
        f"have other names, set dataset_columns (such as prompt=question,completion=answer) or "
        f"dataset_text_field.{alone}",
        whole,
        "other columns",
    )


def _renamed(row: Mapping[str, Any], columns: tuple[tuple[str, str], ...]) -> Mapping[str, Any]:
    if not columns:
        return row
    absent = [f"{name}={column}" for name, column in columns if column not in row]
    if absent:
        why = f"dataset_columns is {', '.join(absent)}, but the columns are {names(row)}."
        raise BadRow(why, row, "other columns")
    old = {column for _, column in columns}
    return {**{k: v for k, v in row.items() if k not in old}, **{name: row[column] for name, column in columns}}


def _is_null(value: Any) -> bool:
    """Whether a value counts as missing. Tables use NaN for missing values."""
    return value is None or (isinstance(value, float) and value != value)


# --- formats --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RowFormat:
    """A row format: its columns, and the function that makes a `Document`'s fields from a row."""

    columns: tuple[str, ...]
    """The required columns; none may be null."""
    read: Callable[[Mapping[str, Any]], dict[str, Any]]
    optional: tuple[str, ...] = ()
    """Optional columns. `check_purpose` and `unused_columns` handle all others."""


def _conversation(row: Mapping[str, Any], turns: list[dict[str, Any]]) -> dict[str, Any]:
    """The fields of a conversation: its messages, after the `system` column if there is one, tools and template
    variables."""
    check_tools(row)
    if row.get("system", "") != "":
        if turns[0]["role"] in ("system", "developer"):
            raise BadRow("the row has both a `system` column and a system message; expected one of them.")
        turns = [{"role": "system", "content": text_of(row["system"], "`system`")}, *turns]
    fields: dict[str, Any] = {"messages": tuple({k: v for k, v in t.items() if k != "weight"} for t in turns)}
    if any("weight" in turn for turn in turns):
        fields["weights"] = tuple(turn.get("weight") for turn in turns)
    return {
        **fields,
        "tools": tools_of(row.get("tools")),
        "template_kwargs": template_kwargs_of(row.get("chat_template_kwargs")),
    }


def _read_completion(row: Mapping[str, Any]) -> dict[str, Any]:
    prompt, completion = messages_from_json(row["prompt"], row["completion"])
    if isinstance(prompt, str) and isinstance(completion, str):
        if not completion:
            raise BadRow("`completion` is empty; expected text.", kind="empty completion")
        return {"prompt": text_of(prompt, "`prompt`"), "text": text_of(completion, "`completion`")}
    if isinstance(prompt, str) or isinstance(completion, str):
        raise BadRow("only one of `prompt` and `completion` is text; expected two texts or two lists of messages.")
    before, after = messages_of(prompt, "prompt"), messages_of(completion, "completion")
    fields = _conversation(row, before + after)
    return {**fields, "completion_start": len(fields["messages"]) - len(after)}


def _read_instruction(row: Mapping[str, Any]) -> dict[str, Any]:
    turns = []
    if row.get("history", "") not in ("", []):
        for i, pair in enumerate(list_of(row["history"], "history", "[question, answer] pairs")):
            if not isinstance(pair, list | tuple) or len(pair) != 2:
                raise BadRow(f"history[{i}] is {short(pair)}; expected [question, answer].")
            turns += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    parts = [text_of(row[name], f"`{name}`") for name in ("instruction", "input") if name in row]
    question = "\n\n".join(text for text in parts if text.strip())
    answer = text_of(row["output"], "`output`")
    for name, text in (("instruction", question), ("output", answer)):
        if not text.strip():
            raise BadRow(f"`{name}` is empty; expected text.", kind=f"empty {name}")
    turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return _conversation(row, [message_of(turn, f"turn {i}") for i, turn in enumerate(turns)])


def _prompt_format(prompt_format: str) -> RowFormat:
    """The format of rows whose prompt is made with `prompt_format`; the completion is `completion` or `output`."""
    named = _named(prompt_format)

    def read(row: Mapping[str, Any]) -> dict[str, Any]:
        absent = [name for name in named if name not in row]
        answer = next((name for name in ("completion", "output") if name in row and name not in named), None)
        if answer is None or len(absent) == len(named):
            raise BadRow(
                f"columns {names(row)}; prompt_format needs {', '.join(named)}, and the completion must be in "
                f"`completion` or `output` (set dataset_columns if the columns have other names).",
                kind="other columns",
            )
        completion = text_of(row[answer], f"`{answer}`")
        if not completion:
            raise BadRow(f"`{answer}` is empty; expected text.")
        values = {name: text_of(row.get(name, ""), f"`{name}`") for name in named}
        return {"prompt": prompt_format.format_map(values), "text": completion}

    return RowFormat((), read, ("completion", "output", *named))


FOR_TEMPLATES = ("system", "tools", "chat_template_kwargs")
"""Optional columns of every conversation."""

ROW_FORMATS = (
    RowFormat(("input_ids",), pretokenized.read_tokens, pretokenized.COLUMNS),
    *(
        RowFormat((name,), lambda row, name=name: _conversation(row, messages_of(row[name], name)), FOR_TEMPLATES)  # type: ignore[misc]
        for name in ("messages", "conversations")
    ),
    RowFormat(("prompt", "completion"), _read_completion, FOR_TEMPLATES),
    RowFormat(("instruction", "output"), _read_instruction, ("input", "history", *FOR_TEMPLATES)),
)
"""The row formats, in the order in which they are tried; the text column comes last. If `dataset_text_field` is set to
another name than "text", that column comes before `prompt` and `instruction`.

- `input_ids`, optionally `labels` or masks: pre-tokenized. A label is -100 (no loss) or the token itself.
- `messages`: a conversation, as a list of {role, content}. Content is text, or a list of parts of type text, which are
  joined. Other keys are kept for the chat template; nulls are dropped.
- `conversations`: the same in ShareGPT's format, {from, value}. Both columns accept both formats.
- `prompt` and `completion`: if both are text, the text is prompt + completion with nothing in between. If both are
  lists of messages, they form one conversation. Only the completion contributes to the loss, unless
  completion_only_loss is false.
- `instruction` and `output`, optionally `input` and `history`: Alpaca's format, read as a conversation. The user
  message is the instruction, an empty line and the input (or one of them, if the other is empty), the assistant message
  is the output; pairs of `history` come before.
- the text column: plain text.

A `system` column is prepended to any conversation; `tools` and `chat_template_kwargs` are passed to the chat template.
A list may also be JSON text, as in CSV files. An empty user or assistant message makes a row bad, and so does an empty
completion; an empty text is counted as empty. Null and NaN count as missing. Columns that other trainers read and that
are not read here are rejected or reported; all other columns are ignored."""


@functools.lru_cache(maxsize=64)
def _formats(text_field: str, prompt_format: str | None) -> tuple[RowFormat, ...]:
    if prompt_format is not None:
        return (_prompt_format(prompt_format),)
    text = RowFormat((text_field,), lambda row: {"text": text_of(row[text_field], "the text")})
    before = len(ROW_FORMATS) if text_field == "text" else 3
    return (*ROW_FORMATS[:before], text, *ROW_FORMATS[before:])


# --- columns of other trainers: some make a row an error, others are reported as unused -------------------------------

MEDIA = ("image", "images", "video", "videos", "audio", "audios")
QUALITY_LABELS = ("label", "kto_tag")
"""Columns that tell whether a completion is good, in unpaired preference data (KTO)."""
REPORTED = (
    "text", "messages", "conversations", "prompt", "completion",
    "chosen", "rejected", "tools", "functions", "system", "weight", "label", "labels",
    "kto_tag", "attention_mask", "position_ids", "seq_lengths", "assistant_masks", "completion_mask",
    "chat_template_kwargs", "loss_mask", "loss_weights", "token_type_ids", "documents",
)  # fmt: skip
"""Columns that other trainers read. One that is not read here is reported once."""
PREFERENCES = (
    "preferences (`chosen` and `rejected`), the data format of DPO and reward models. SFT can train on the chosen side "
    "alone: set dataset_columns to messages=chosen if it is a whole conversation, to completion=chosen if there is a "
    "`prompt`, or set dataset_text_field to chosen if it is a whole text. Preference trainers, such as TRL's "
    "DPOTrainer, use these rows unchanged"
)


def check_purpose(row: Mapping[str, Any], read: Collection[str]) -> None:
    """Raise `BadRow` for rows made for another kind of training. `read` are the columns that are read; `row` has no
    nulls."""
    if media := [name for name in MEDIA if name in row and name not in read and not _is_empty(row[name])]:
        raise BadRow(
            f"`{media[0]}`: the data is vision-related, or has sound; only text is supported, with a vision-language "
            f"model too. Remove the column to train on the text alone.",
            kind="images, video or audio",
        )
    paired = "chosen" in row and "rejected" in row and "chosen" not in read
    if paired and not (read and _is_answered(row)):
        raise BadRow(f"the row holds {PREFERENCES}.", kind="preferences")
    for name in QUALITY_LABELS if "completion" in row or "messages" in row or "conversations" in row else ():
        if isinstance(row.get(name), bool) or str(row.get(name)).lower() in ("true", "false"):
            raise BadRow(
                f"`{name}` is {short(row[name])}: an unpaired preference (KTO), in which a completion may be a bad "
                f"example. SFT would train on all of them: keep only the good rows, and remove this column.",
                kind="preferences",
            )


def _is_answered(row: Mapping[str, Any]) -> bool:
    """Whether the row has a complete conversation or completion in addition to the preferences."""
    turns = row.get("messages", row.get("conversations"))
    if isinstance(turns, list | tuple) and turns and isinstance(turns[-1], Mapping):
        return ROLES.get(str(turns[-1].get("role", turns[-1].get("from"))).lower()) == "assistant"
    return turns is not None or "completion" in row or "input_ids" in row


def check_tools(row: Mapping[str, Any]) -> None:
    """Raise `BadRow` for columns without which a conversation is incomplete."""
    if "functions" in row and "tools" not in row:
        raise BadRow("`functions` is the old name of `tools`; set dataset_columns tools=functions.")


def _is_empty(value: Any) -> bool:
    return isinstance(value, str | list | tuple | dict) and not value


def unused_columns(row: Mapping[str, Any], read: Collection[str]) -> tuple[str, ...] | None:
    """Columns that other trainers use and that are not read for this row; None if there are none."""
    columns = [name for name in REPORTED if name in row and name not in read and not _is_empty(row[name])]
    columns += [name for name in row if isinstance(name, str) and name.startswith("train_on_")]
    return tuple(columns) or None
