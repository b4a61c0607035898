"""Training data as people keep it: which files belong to a data set, and what one row means.

A `Reader` turns a kind of file into rows, a `Shape` turns a kind of row into a `Document`; a new format is one small
entry in `READERS` or `SHAPES`. Nothing here knows tokenizers, and torch is not imported, so that a bad row is reported
at once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from fullshard.errors import DataError

ROLES = ("system", "user", "assistant", "tool")


Place = Any
"""Where in a source a row begins: plain data that JSON can hold. None is the beginning."""


@dataclass(frozen=True)
class Raw:
    """A row before it is understood."""

    where: str
    """Where it stands, for messages: `train.jsonl, line 7`."""
    value: Any
    """An object with columns, or the bytes of one in JSON."""
    after: Place
    """Where the next row begins."""


@dataclass(frozen=True)
class Document:
    """One row of training data, understood: running text, a conversation, or tokens made elsewhere."""

    where: str
    """Where it stands, for messages: `train.jsonl, line 7`."""
    text: str | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    input_ids: tuple[int, ...] | None = None
    labels: tuple[int, ...] | None = None
    """For `input_ids`: -100 where nothing is learnt; None learns everything."""


# --- what a row means -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """A kind of row: the column by which it is known, and how it is read."""

    column: str
    """The column's name; empty stands for the text column the user names."""
    read: Callable[[Any, Mapping[str, Any], str], Document]


def _read_messages(value: Any, row: Mapping[str, Any], where: str) -> Document:
    if not isinstance(value, list | tuple) or not value:
        raise DataError(f"{where}: `messages` is {_short(value)}; expected a list of {{role, content}} objects.")
    for i, message in enumerate(value):
        if not isinstance(message, Mapping):
            raise DataError(f"{where}: messages[{i}] is {_short(message)}; expected an object with role and content.")
        if message.get("role") not in ROLES:
            raise DataError(
                f"{where}: messages[{i}] has the role {message.get('role')!r}; expected one of {', '.join(ROLES)}."
            )
        if not isinstance(message.get("content"), str):
            raise DataError(f"{where}: messages[{i}] has the content {_short(message.get('content'))}; expected text.")
    return Document(where, messages=tuple(dict(m) for m in value))


def _read_tokens(value: Any, row: Mapping[str, Any], where: str) -> Document:
    labels = row.get("labels")
    for name, numbers in (("input_ids", value), ("labels", labels)):
        if numbers is None and name == "labels":
            continue
        if not isinstance(numbers, Sequence) or isinstance(numbers, str) or not all(type(n) is int for n in numbers):
            raise DataError(f"{where}: `{name}` is {_short(numbers)}; expected a list of integers.")
    if labels is not None and len(labels) != len(value):
        raise DataError(f"{where}: {len(value)} input_ids but {len(labels)} labels; expected as many.")
    return Document(where, input_ids=tuple(value), labels=None if labels is None else tuple(labels))


def _read_text(value: Any, row: Mapping[str, Any], where: str) -> Document:
    if not isinstance(value, str):
        raise DataError(f"{where}: the text is {_short(value)}; expected a string.")
    return Document(where, text=value)


SHAPES = (Shape("input_ids", _read_tokens), Shape("messages", _read_messages), Shape("", _read_text))
"""In the order in which they are looked for."""


def understand(raw: Raw, text_field: str) -> Document:
    """What a row means. `text_field` names the column that holds running text."""
    where, row = raw.where, raw.value
    if isinstance(row, bytes):
        row = _parse(row, where)
    if not isinstance(row, Mapping):
        raise DataError(f"{where}: {_short(row)} is not an object with columns.")
    for shape in SHAPES:
        column = shape.column or text_field
        if row.get(column) is not None:
            return shape.read(row[column], row, where)
    columns = ", ".join(map(str, row)) or "none"
    raise DataError(
        f"{where}: columns {columns}; expected `messages` (a conversation) or `{text_field}` (running text; "
        f"dataset_text_field names its column)."
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


# --- files ----------------------------------------------------------------------------------------------------------


def _parse(line: bytes, where: str) -> Any:
    try:
        return json.loads(line)
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 text ({error.reason} at byte {error.start}).") from None
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON ({error.msg} at column {error.colno}).") from None


def _read_json_lines(path: Path, start: Place) -> Iterator[Raw]:
    offset, number = start or (0, 0)
    with path.open("rb") as file:
        file.seek(offset)
        for line in file:
            offset, number = offset + len(line), number + 1
            if line.strip():
                yield Raw(f"{path}, line {number}", line, (offset, number))


READERS: dict[str, Callable[[Path, Place], Iterator[Raw]]] = {
    ".jsonl": _read_json_lines,
    ".ndjson": _read_json_lines,
}
"""How a file is read from a place in it on, by the end of its name."""


@dataclass(frozen=True)
class Source:
    """Rows that can be gone through, from any place on, and a fingerprint of their content."""

    name: str
    rows: Callable[[Place], Iterator[Raw]]
    """The rows from a place on (None: all); a place is what `Raw.after` gave."""
    fingerprint: Callable[[], str]

    def documents(self, text_field: str) -> Iterator[Document]:
        return (understand(row, text_field) for row in self.rows(None))


def find_files(dataset: str, splits: str, evaluates: bool) -> tuple[list[Path], list[Path]]:
    """The files of the training and of the evaluation split of `dataset`: a file, or a folder with a file per split.

    `splits` names them, training first ("train,test"). Only existence is checked here.
    """
    path = Path(dataset).expanduser()
    names = [s.strip() for s in splits.split(",") if s.strip()]
    if not names:
        raise DataError("splits is empty; expected names such as 'train' or 'train,test'.")
    if len(names) > 2:
        raise DataError(f"splits={splits!r}: expected at most two names, training then evaluation.")
    if not path.exists():
        raise DataError(
            f"the data {str(path)!r} does not exist. Give a file ({', '.join(READERS)}) or a folder with one per "
            f"split, "
            f"such as {names[0]}.jsonl."
        )
    if path.is_file():
        _reader(path)
        return [path], []
    found = [_split_files(path, name) for name in names]
    if not found[0]:
        there = ", ".join(sorted(p.name for p in path.iterdir())[:8]) or "nothing"
        raise DataError(f"{path}: no file for the split {names[0]!r} ({names[0]}.jsonl); the folder holds {there}.")
    if evaluates and len(names) == 2 and not found[1]:
        raise DataError(
            f"{path}: evaluation is on, but there is no file for the split {names[1]!r} ({names[1]}.jsonl)."
        )
    return found[0], found[1] if len(found) > 1 else []


def _split_files(folder: Path, split: str) -> list[Path]:
    """`train.jsonl`, or several: `train-00000-of-00002.jsonl`, `train_1.jsonl`."""
    return sorted(
        p
        for p in folder.iterdir()
        if p.suffix in READERS and p.is_file() and (p.stem == split or p.stem.startswith((f"{split}-", f"{split}_")))
    )


def _reader(path: Path) -> Callable[[Path, Place], Iterator[Raw]]:
    if path.suffix not in READERS:
        raise DataError(f"{path}: a file of kind {path.suffix or 'unknown'!r}; expected {' or '.join(READERS)}.")
    return READERS[path.suffix]


def file_source(paths: Sequence[Path]) -> Source:
    """Rows of files, one after the other."""

    def rows(start: Place) -> Iterator[Raw]:
        first, within = start or (0, None)
        for number, path in enumerate(paths[first:], first):
            try:
                for row in _reader(path)(path, within if number == first else None):
                    yield replace(row, after=(number, row.after))
            except OSError as error:
                raise DataError(f"{path} cannot be read: {error.strerror or error}.") from None

    def fingerprint() -> str:
        digest = hashlib.sha256()
        for path in paths:
            try:
                with path.open("rb") as file:
                    digest.update(hashlib.file_digest(file, "sha256").digest())
            except OSError as error:
                raise DataError(f"{path} cannot be read: {error.strerror or error}.") from None
        return digest.hexdigest()

    return Source(", ".join(map(str, paths)), rows, fingerprint)


def row_source(rows: Iterable[Any], name: str) -> Source:
    """Rows that are in memory: a list of objects, or a `datasets.Dataset`."""
    kept = rows if hasattr(rows, "__len__") else list(rows)

    def walk(start: Place) -> Iterator[Raw]:
        return (Raw(f"{name}, row {i}", row, i + 1) for i, row in enumerate(islice(kept, start, None), start or 0))

    def fingerprint() -> str:
        digest = hashlib.sha256()
        for row in walk(None):
            digest.update(json.dumps(row.value, sort_keys=True, default=str).encode())
            digest.update(b"\n")
        return digest.hexdigest()

    return Source(name, walk, fingerprint)


def source_of(data: Any, name: str) -> Source:
    """A source from what a user hands over: a path, a list of paths, or rows."""
    if isinstance(data, Source):
        return data
    if isinstance(data, str | Path):
        return file_source([Path(data)])
    if isinstance(data, list | tuple) and data and all(isinstance(item, Path) for item in data):
        return file_source(list(data))
    if not isinstance(data, Iterable):
        raise DataError(f"{name} is {_short(data)}; expected rows (a list of objects, a datasets.Dataset) or a file.")
    return row_source(data, name)
