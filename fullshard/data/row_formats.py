"""What a row of training data means: a `Shape` turns a kind of row into a `Document`.

A row is known by its columns, in the fixed order of `SHAPES`; a new kind is one small entry there. What cannot be
understood stops the run or is counted, as `Reading.on_bad_row` says. Messages are read by `messages.py`, tokens made
elsewhere by `pretokenized.py`. Where rows come from is said by `file_formats.py` and `sources.py`; nothing here knows
tokenizers, and torch is not imported.
"""

from __future__ import annotations

import functools
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fullshard.data import foreign_columns, pretokenized
from fullshard.data.messages import (
    list_of,
    message_of,
    messages_from_json,
    messages_of,
    template_kwargs_of,
    text_of,
    tools_of,
)
from fullshard.data.raw_row import BadRow, RawRow, names, parse_json, short
from fullshard.errors import ConfigError, DataError


@dataclass(frozen=True)
class Document:
    """One row of training data, understood: running text, a conversation, or tokens made elsewhere."""

    where: str
    """Where it stands, for messages: `train.jsonl, line 7`."""
    text: str | None = None
    prompt: str | None = None
    """What stands before `text` and is not learnt when completion_only_loss is on; the whole is prompt + text."""
    messages: tuple[Mapping[str, Any], ...] | None = None
    completion_start: int | None = None
    """Of `messages`, the first that belongs to the completion: what comes before is not learnt when
    completion_only_loss is on."""
    weights: tuple[int | None, ...] | None = None
    """For each of `messages` 0 (not learnt), 1 (learnt) or None (as the settings say)."""
    tools: tuple[Mapping[str, Any], ...] | None = None
    """The functions that the assistant of `messages` may call, for the template."""
    template_kwargs: Mapping[str, Any] | None = None
    """What else the row tells the template."""
    input_ids: tuple[int, ...] | None = None
    labels: tuple[int, ...] | None = None
    """For `input_ids`: -100 where nothing is learnt; None learns everything."""
    completion_mask: tuple[int, ...] | None = None
    """For `input_ids`: 0 where nothing is learnt unless completion_only_loss is false."""
    unused: tuple[str, ...] | None = None
    """Columns of the row that mean something to other trainers and are not used here."""
    data_set: int | None = None
    """The number of the data set that it comes from, where data sets have settings of their own."""


@dataclass(frozen=True)
class Reading:
    """How the user says rows are to be read."""

    text_field: str = "text"
    """The column with running text."""
    columns: tuple[tuple[str, str], ...] = ()
    """(name here, column in the data) for columns that have other names in the data."""
    on_bad_row: str = "stop"
    """stop: the first row that cannot be understood is an error. skip: it is left out and counted."""
    prompt_format: str | None = None
    """How a prompt is written from a row's columns, as text with {column} in it."""


DEFAULT_READING = Reading()


def reading_of(text_field: str, columns: str | None, on_bad_row: str, prompt_format: str | None = None) -> Reading:
    """How rows are read, from the options' text; `columns` is "name=column,…"."""
    known = [*(name for shape in SHAPES for name in (*shape.columns, *shape.optional)), text_field]
    known += _named(prompt_format) if prompt_format is not None else []
    pairs = []
    for part in (columns or "").split(","):
        if not part.strip():
            continue
        name, equals, column = (word.strip() for word in part.partition("="))
        if not (name and equals and column):
            raise ConfigError(f"dataset_columns has {part.strip()!r}; expected name=column, such as prompt=question.")
        if name not in known:
            raise ConfigError(
                f"dataset_columns names {name!r}; expected name=column, with the name one of "
                f"{', '.join(dict.fromkeys(known))}."
            )
        pairs.append((name, column))
    twice = {name for name, _ in pairs if [n for n, _ in pairs].count(name) > 1}
    if twice:
        raise ConfigError(f"dataset_columns names {', '.join(sorted(twice))} twice.")
    return Reading(text_field, tuple(pairs), on_bad_row, prompt_format)


def _named(prompt_format: str) -> list[str]:
    """The columns that a prompt format names."""
    try:
        fields = [name for _, name, _, _ in string.Formatter().parse(prompt_format) if name is not None]
    except ValueError as error:
        raise ConfigError(f"prompt_format is {prompt_format!r}: {error}. Write {{{{ and }}}} for braces.") from None
    if not fields or not all(name.isidentifier() for name in fields):
        raise ConfigError(f"prompt_format is {prompt_format!r}; expected text with {{column}} in it.")
    return fields


# --- rows -----------------------------------------------------------------------------------------------------------

NAMED = 5
"""How many bad rows are named; all are counted."""
UNUSED = "unused "
"""Begins the names under which rows with columns that are not used are counted."""


def parse_rows(batch: Sequence[RawRow], reading: Reading, counts: dict[str, Any]) -> list[Document]:
    """What the rows of a batch mean. Rows that are skipped are counted in `counts` by `count_bad`."""
    found = []
    for raw in batch:
        try:
            found.append(_parse_row(raw, reading))
            for name in found[-1].unused or ():
                counts[f"{UNUSED}{name}"] = counts.get(f"{UNUSED}{name}", 0) + 1
        except BadRow as bad:
            if reading.on_bad_row != "skip":
                raise _error(raw, bad) from None
            count_bad(counts, f"{raw.where}: {bad.why}")
    return found


def parse_row(raw: RawRow, reading: Reading = DEFAULT_READING) -> Document:
    """What a row means, or a `DataError` that shows it."""
    try:
        return _parse_row(raw, reading)
    except BadRow as bad:
        raise _error(raw, bad) from None


def count_bad(counts: dict[str, Any], said: str) -> None:
    """Count a row that is left out: "bad" counts all, "bad_rows" holds what was said of the first few."""
    counts["bad"] = counts.get("bad", 0) + 1
    named = counts.setdefault("bad_rows", [])
    if len(named) < NAMED:
        named.append(said)


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
        raise BadRow(f"{short(row)} is not an object with columns.", row)
    whole = _renamed(row, reading.columns)
    row = {name: value for name, value in whole.items() if not _is_null(value)}
    shapes = _shapes(reading.text_field, reading.prompt_format)
    shape = next((s for s in shapes if all(column in row for column in s.columns)), None)
    try:
        read = (*shape.columns, *shape.optional) if shape is not None else ()
        foreign_columns.check(row, read)
        if shape is not None:
            unused = foreign_columns.unused(row, read)
            return Document(raw.where, **shape.read(row), unused=unused, data_set=raw.data_set)
    except BadRow as bad:
        raise BadRow(bad.why, whole) from None
    alone = " A prompt alone is for trainers that generate the answer (GRPO, PPO)." if "prompt" in row else ""
    raise BadRow(
        f"columns {names(whole)}; expected "
        f"{', '.join(' and '.join(f'`{c}`' for c in shape.columns) for shape in shapes)}. Name columns that are called "
        f"otherwise by dataset_columns (such as prompt=question,completion=answer) or dataset_text_field.{alone}",
        whole,
    )


def _renamed(row: Mapping[str, Any], columns: tuple[tuple[str, str], ...]) -> Mapping[str, Any]:
    if not columns:
        return row
    absent = [f"{name}={column}" for name, column in columns if column not in row]
    if absent:
        raise BadRow(f"dataset_columns says {', '.join(absent)}, but the columns are {names(row)}.", row)
    old = {column for _, column in columns}
    return {**{k: v for k, v in row.items() if k not in old}, **{name: row[column] for name, column in columns}}


def _is_null(value: Any) -> bool:
    """Whether a column is as good as not there. Tables write NaN where they have no value."""
    return value is None or (isinstance(value, float) and value != value)


# --- shapes ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """A kind of row: the columns by which it is known, and how a row becomes a `Document`'s fields."""

    columns: tuple[str, ...]
    """All of them must be there, and not null."""
    read: Callable[[Mapping[str, Any]], dict[str, Any]]
    optional: tuple[str, ...] = ()
    """Columns that are read where they are there. Of all others `foreign_columns.py` decides."""


def _conversation(row: Mapping[str, Any], turns: list[dict[str, Any]]) -> dict[str, Any]:
    """The turns, after what the row's `system` column says; and what else the row tells the template."""
    foreign_columns.check_conversation(row)
    if row.get("system", "") != "":
        if turns[0]["role"] == "system":
            raise BadRow("a `system` column and a system turn; expected one of them.")
        turns = [{"role": "system", "content": text_of(row["system"], "`system`")}, *turns]
    found: dict[str, Any] = {"messages": tuple({k: v for k, v in t.items() if k != "weight"} for t in turns)}
    if any("weight" in turn for turn in turns):
        found["weights"] = tuple(turn.get("weight") for turn in turns)
    return {
        **found,
        "tools": tools_of(row.get("tools")),
        "template_kwargs": template_kwargs_of(row.get("chat_template_kwargs")),
    }


def _read_completion(row: Mapping[str, Any]) -> dict[str, Any]:
    prompt, completion = messages_from_json(row["prompt"], row["completion"])
    if isinstance(prompt, str) and isinstance(completion, str):
        if not completion:
            raise BadRow("`completion` is empty; expected text.")
        return {"prompt": text_of(prompt, "`prompt`"), "text": text_of(completion, "`completion`")}
    if isinstance(prompt, str) or isinstance(completion, str):
        raise BadRow("one of `prompt` and `completion` is text; expected both as text, or both as lists of messages.")
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
    asked = [text_of(row[name], f"`{name}`") for name in ("instruction", "input") if name in row]
    question = "\n\n".join(text for text in asked if text.strip())
    answer = text_of(row["output"], "`output`")
    for name, text in (("instruction", question), ("output", answer)):
        if not text.strip():
            raise BadRow(f"`{name}` is empty; expected text.")
    turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return _conversation(row, [message_of(turn, f"turn {i}") for i, turn in enumerate(turns)])


def _formatted(prompt_format: str) -> Shape:
    """Rows whose prompt is written by the user's format; the completion is `completion` or `output`."""
    named = _named(prompt_format)

    def read(row: Mapping[str, Any]) -> dict[str, Any]:
        absent = [name for name in named if name not in row]
        answer = next((name for name in ("completion", "output") if name in row and name not in named), None)
        if answer is None or len(absent) == len(named):
            raise BadRow(
                f"columns {names(row)}; prompt_format names {', '.join(named)}, and the answer is expected as "
                f"`completion` or `output` (dataset_columns names columns that are called otherwise)."
            )
        said = text_of(row[answer], f"`{answer}`")
        if not said:
            raise BadRow(f"`{answer}` is empty; expected text.")
        values = {name: text_of(row.get(name, ""), f"`{name}`") for name in named}
        return {"prompt": prompt_format.format_map(values), "text": said}

    return Shape((), read, ("completion", "output", *named))


FOR_TEMPLATES = ("system", "tools", "chat_template_kwargs")
"""Columns that any conversation may have."""

SHAPES = (
    Shape(("input_ids",), pretokenized.read_tokens, pretokenized.COLUMNS),
    *(
        Shape((name,), lambda row, name=name: _conversation(row, messages_of(row[name], name)), FOR_TEMPLATES)  # type: ignore[misc]
        for name in ("messages", "conversations")
    ),
    Shape(("prompt", "completion"), _read_completion, FOR_TEMPLATES),
    Shape(("instruction", "output"), _read_instruction, ("input", "history", *FOR_TEMPLATES)),
)
"""In the order in which they are looked for; the text column comes after them. One that the user names, by
`dataset_text_field` other than "text", comes before `prompt` and `instruction`.

- `input_ids`, maybe `labels` or masks: tokens made elsewhere. A label is -100 (not learnt) or the token itself.
- `messages`: a conversation, as a list of {role, content}. Content is text, or a list of parts of type text, which are
  joined. Keys besides these are kept for the template, nulls left out.
- `conversations`: the same in ShareGPT's words, {from, value}. Both columns take both.
- `prompt` and `completion`: both text: one text, prompt + completion, with nothing put between them. Both lists of
  messages: one conversation. Only the completion is learnt, all of it, unless completion_only_loss is false.
- `instruction` and `output`, maybe `input`, `history`: Alpaca's columns, read as a conversation. The user says the
  instruction, an empty line and the input (or one of them, if the other is empty), the assistant the output; pairs of
  `history` come before.
- the text column: running text.

A `system` column leads any conversation, `tools` and `chat_template_kwargs` go to its template. A list may also be JSON
text, as in CSV. A user or an assistant who says nothing makes a row bad, and so does a completion without text; a text
that is empty is counted as empty. Null and NaN are as if the column were not there. Columns that other trainers read
and that are not read here are refused or named (`foreign_columns.py`); others are not looked at."""


@functools.lru_cache(maxsize=64)
def _shapes(text_field: str, prompt_format: str | None) -> tuple[Shape, ...]:
    if prompt_format is not None:
        return (_formatted(prompt_format),)
    text = Shape((text_field,), lambda row: {"text": text_of(row[text_field], "the text")})
    before = len(SHAPES) if text_field == "text" else 3
    return (*SHAPES[:before], text, *SHAPES[before:])
