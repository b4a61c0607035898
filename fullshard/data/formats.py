"""What a row of training data means: a `Shape` turns a kind of row into a `Document`.

A row is known by its columns, in the fixed order of `SHAPES`; a new kind is one small entry there. What cannot be
understood stops the run or is counted, as `Reading.on_bad_row` says. Where rows come from is said by `files.py` and
`sources.py`; nothing here knows tokenizers, and torch is not imported.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fullshard.data.rows import BadRow, Raw, names, parse, short
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
    learnt_from: int | None = None
    """Of `messages`, the first that belongs to the completion: only assistant turns from here on are learnt when
    completion_only_loss is on."""
    input_ids: tuple[int, ...] | None = None
    labels: tuple[int, ...] | None = None
    """For `input_ids`: -100 where nothing is learnt; None learns everything."""


@dataclass(frozen=True)
class Reading:
    """How the user says rows are to be read."""

    text_field: str = "text"
    """The column with running text."""
    columns: tuple[tuple[str, str], ...] = ()
    """(name here, column in the data) for columns that have other names in the data."""
    on_bad_row: str = "stop"
    """stop: the first row that cannot be understood is an error. skip: it is left out and counted."""


AS_USUAL = Reading()


def reading_of(text_field: str, columns: str | None, on_bad_row: str) -> Reading:
    """How rows are read, from the options' text; `columns` is "name=column,…"."""
    known = [*(name for shape in SHAPES for name in (*shape.columns, *shape.optional)), text_field]
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
    return Reading(text_field, tuple(pairs), on_bad_row)


# --- rows -----------------------------------------------------------------------------------------------------------

NAMED = 5
"""How many bad rows are named; all are counted."""


def documents(batch: Sequence[Raw], reading: Reading, counts: dict[str, Any]) -> list[Document]:
    """What the rows of a batch mean. Rows that are skipped are counted in `counts` by `count_bad`."""
    found = []
    for raw in batch:
        try:
            found.append(_understand(raw, reading))
        except BadRow as bad:
            if reading.on_bad_row != "skip":
                raise _error(raw, bad) from None
            count_bad(counts, f"{raw.where}: {bad.why}")
    return found


def understand(raw: Raw, reading: Reading = AS_USUAL) -> Document:
    """What a row means, or a `DataError` that shows it."""
    try:
        return _understand(raw, reading)
    except BadRow as bad:
        raise _error(raw, bad) from None


def count_bad(counts: dict[str, Any], said: str) -> None:
    """Count a row that is left out: "bad" counts all, "bad_rows" holds what was said of the first few."""
    counts["bad"] = counts.get("bad", 0) + 1
    named = counts.setdefault("bad_rows", [])
    if len(named) < NAMED:
        named.append(said)


def _error(raw: Raw, bad: BadRow) -> DataError:
    row = bad.row if bad.row is not None else raw.value
    shown = "" if isinstance(row, BadRow) else f" The row: {short(row, 160)}"
    return DataError(f"{raw.where}: {bad.why}{shown} (on_bad_row skip leaves such rows out)")


def _understand(raw: Raw, reading: Reading) -> Document:
    row = raw.value
    if isinstance(row, BadRow):
        raise row
    if isinstance(row, bytes):
        row = parse(row)
    if not isinstance(row, Mapping):
        raise BadRow(f"{short(row)} is not an object with columns.", row)
    row = _renamed(row, reading.columns)
    shapes = _shapes(reading.text_field)
    for shape in shapes:
        if all(_given(row, column) for column in shape.columns):
            try:
                return Document(raw.where, **shape.read(row))
            except BadRow as bad:
                raise BadRow(bad.why, row) from None
    raise BadRow(
        f"columns {names(row)}; expected "
        f"{', '.join(' and '.join(f'`{c}`' for c in shape.columns) for shape in shapes)}. Name columns that are called "
        f"otherwise by dataset_columns (such as prompt=question,completion=answer) or dataset_text_field.",
        row,
    )


def _renamed(row: Mapping[str, Any], columns: tuple[tuple[str, str], ...]) -> Mapping[str, Any]:
    if not columns:
        return row
    absent = [f"{name}={column}" for name, column in columns if column not in row]
    if absent:
        raise BadRow(f"dataset_columns says {', '.join(absent)}, but the columns are {names(row)}.", row)
    old = {column for _, column in columns}
    return {**{k: v for k, v in row.items() if k not in old}, **{name: row[column] for name, column in columns}}


def _given(row: Mapping[str, Any], column: str) -> bool:
    """Whether a row has a value in this column. Tables write NaN where they have none."""
    value = row.get(column)
    return value is not None and not (isinstance(value, float) and value != value)


# --- shapes ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """A kind of row: the columns by which it is known, and how a row becomes a `Document`'s fields."""

    columns: tuple[str, ...]
    """All of them must be there, and not null."""
    read: Callable[[Mapping[str, Any]], dict[str, Any]]
    optional: tuple[str, ...] = ()
    """Columns that are read where they are there. All others are not looked at."""


ROLES = {
    "system": "system",
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bot", "model", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
}
"""Who speaks, by the names that files give them, in any case."""


def _text(value: Any, what: str) -> str:
    """The value, if it is text that can be encoded."""
    if not isinstance(value, str):
        raise BadRow(f"{what} is {short(value)}; expected a string.")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise BadRow(
                f"{what} holds {value[error.start]!a} at character {error.start}, which is half of a surrogate pair or "
                f"a byte that is not UTF-8."
            ) from None
    return value


def _list(value: Any, what: str, of: str) -> Sequence[Any]:
    """The value as a list; tables such as CSV hold it as JSON text."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = parse(value)
        except BadRow as bad:
            raise BadRow(f"`{what}`: {bad.why}") from None
    if hasattr(value, "tolist"):  # numpy's and torch's
        value = value.tolist()
    if not isinstance(value, list | tuple) or not value:
        raise BadRow(f"`{what}` is {short(value)}; expected a list of {of}.")
    return value


def _turns(value: Any, what: str) -> list[dict[str, Any]]:
    return [_turn(turn, f"{what}[{i}]") for i, turn in enumerate(_list(value, what, "{role, content} objects"))]


def _turn(turn: Any, what: str) -> dict[str, Any]:
    """{role, content}, from that or from ShareGPT's {from, value}. What else is in it is kept for the template."""
    if not isinstance(turn, Mapping):
        raise BadRow(f"{what} is {short(turn)}; expected an object with role and content.")
    speaker, said = ("from", "value") if "from" in turn and "role" not in turn else ("role", "content")
    role, content = turn.get(speaker), turn.get(said)
    known = ROLES.get(role.lower()) if isinstance(role, str) else None
    if known is None:
        raise BadRow(f"{what} has the role {short(role)}; expected one of {', '.join(dict.fromkeys(ROLES.values()))}.")
    # Tables give every turn the keys of all turns, and null where a turn has none.
    more = {k: _without_nulls(v, what) for k, v in turn.items() if k not in (speaker, said) and v is not None}
    acts = bool(more.get("tool_calls"))
    if content is None and acts:
        content = ""
    if isinstance(content, list | tuple):
        content = "".join(_part(part, what) for part in content)
    if not isinstance(content, str):
        raise BadRow(f"{what} has the content {short(content)}; expected text.")
    _text(content, f"the content of {what}")
    if known in ("user", "assistant") and not content.strip() and not acts:
        raise BadRow(f"{what}: the {known} says nothing; expected text.")
    return {"role": known, "content": content, **more}


def _part(part: Any, what: str) -> str:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else part
    if not isinstance(text, str):
        raise BadRow(f"{what} has {short(part)} in its content; expected text, or parts of type text.")
    return text


def _without_nulls(value: Any, what: str) -> Any:
    """Plain data without nulls, checked to be such: a template may write any of it."""
    try:
        text = json.dumps(value, ensure_ascii=False)
        text.encode()
        return json.loads(text, object_pairs_hook=lambda pairs: {k: v for k, v in pairs if v is not None})
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRow(f"{what} holds {short(value)}, which is no plain data ({error}).") from None


def _conversation(row: Mapping[str, Any], turns: list[dict[str, Any]]) -> dict[str, Any]:
    """The turns, after what the row's `system` column says."""
    if _given(row, "system") and row["system"] != "":
        if turns[0]["role"] == "system":
            raise BadRow("a `system` column and a system turn; expected one of them.")
        turns = [{"role": "system", "content": _text(row["system"], "`system`")}, *turns]
    return {"messages": tuple(turns)}


def _read_tokens(row: Mapping[str, Any]) -> dict[str, Any]:
    ids = _integers(row["input_ids"], "input_ids")
    if not all(0 <= n < 2**31 for n in ids):
        raise BadRow(f"`input_ids` holds {short(next(n for n in ids if not 0 <= n < 2**31))}, which is no token.")
    if not _given(row, "labels"):
        return {"input_ids": ids}
    labels = _integers(row["labels"], "labels")
    if len(labels) != len(ids):
        raise BadRow(f"{len(ids)} input_ids but {len(labels)} labels; expected as many.")
    for i, (label, token) in enumerate(zip(labels, ids, strict=True)):
        if label not in (-100, token):
            raise BadRow(f"labels[{i}] is {short(label)}; expected -100 or its token, {token}.")
    return {"input_ids": ids, "labels": labels}


def _integers(value: Any, what: str) -> tuple[int, ...]:
    numbers = _list(value, what, "integers")
    if not all(type(n) is int for n in numbers):
        raise BadRow(f"`{what}` is {short(value)}; expected a list of integers.")
    return tuple(numbers)


def _read_completion(row: Mapping[str, Any]) -> dict[str, Any]:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        if not completion:
            raise BadRow("`completion` is empty; expected text.")
        return {"prompt": _text(prompt, "`prompt`"), "text": _text(completion, "`completion`")}
    if isinstance(prompt, str) or isinstance(completion, str):
        raise BadRow("one of `prompt` and `completion` is text; expected both as text, or both as lists of messages.")
    before, after = _turns(prompt, "prompt"), _turns(completion, "completion")
    fields = _conversation(row, before + after)
    return {**fields, "learnt_from": len(fields["messages"]) - len(after)}


def _read_instruction(row: Mapping[str, Any]) -> dict[str, Any]:
    turns = []
    if _given(row, "history") and row["history"] not in ("", []):
        for i, pair in enumerate(_list(row["history"], "history", "[question, answer] pairs")):
            if not isinstance(pair, list | tuple) or len(pair) != 2:
                raise BadRow(f"history[{i}] is {short(pair)}; expected [question, answer].")
            turns += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    asked = [_text(row[name], f"`{name}`") for name in ("instruction", "input") if _given(row, name)]
    question = "\n\n".join(text for text in asked if text.strip())
    answer = _text(row["output"], "`output`")
    for name, text in (("instruction", question), ("output", answer)):
        if not text.strip():
            raise BadRow(f"`{name}` is empty; expected text.")
    turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return _conversation(row, [_turn(turn, f"turn {i}") for i, turn in enumerate(turns)])


SHAPES = (
    Shape(("input_ids",), _read_tokens, ("labels",)),
    Shape(("messages",), lambda row: _conversation(row, _turns(row["messages"], "messages")), ("system",)),
    Shape(
        ("conversations",), lambda row: _conversation(row, _turns(row["conversations"], "conversations")), ("system",)
    ),
    Shape(("prompt", "completion"), _read_completion, ("system",)),
    Shape(("instruction", "output"), _read_instruction, ("input", "system", "history")),
)
"""In the order in which they are looked for; the text column comes after them. One that the user names, by
`dataset_text_field` other than "text", comes before `prompt` and `instruction`.

- `input_ids`, maybe `labels`: tokens made elsewhere. A label is -100 (not learnt) or the token itself.
- `messages`: a conversation, as a list of {role, content}. Content is text, or a list of parts of type text, which are
  joined. Keys besides these are kept for the template, nulls left out.
- `conversations`: the same in ShareGPT's words, {from, value}. Both columns take both.
- `prompt` and `completion`: both text: one text, prompt + completion, with nothing put between them. Both lists of
  messages: one conversation. Only the completion is learnt, unless completion_only_loss is false.
- `instruction` and `output`, maybe `input`, `history`: Alpaca's columns, read as a conversation. The user says the
  instruction, an empty line and the input (or one of them, if the other is empty), the assistant the output; pairs of
  `history` come before.
- the text column: running text.

A `system` column leads any conversation. A list may also be JSON text, as in CSV. A user or an assistant who says
nothing makes a row bad, and so does a completion without text; a text that is empty is counted as empty. Null and NaN
are as if the column were not there; columns that are not named here are not looked at."""


@functools.lru_cache(maxsize=8)
def _shapes(text_field: str) -> tuple[Shape, ...]:
    text = Shape((text_field,), lambda row: {"text": _text(row[text_field], "the text")})
    before = len(SHAPES) if text_field == "text" else 3
    return (*SHAPES[:before], text, *SHAPES[before:])
