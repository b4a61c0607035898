"""A row before it is understood: where it stands, what was found there, and how it is shown.

Readers (`file_formats.py`) make rows, `row_formats.py` says what they mean; between the two they are plain data that
can travel to another process.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

RowPosition = Any
"""Where in a source a row begins: plain data that JSON can hold. None is the beginning."""


@dataclass(frozen=True)
class RawRow:
    """A row before it is understood."""

    where: str
    """Where it stands, for messages: `train.jsonl, line 7`."""
    value: Any
    """An object with columns, the bytes of one in JSON, or a `BadRow`."""
    after: RowPosition
    """Where the next row begins."""
    data_set: int | None = None
    """The number of the data set that it belongs to, where data sets have settings of their own."""


class BadRow(Exception):
    """Why something is no row, as a sentence; and the row, if there is anything to show."""

    def __init__(self, why: str, row: Any = None) -> None:
        super().__init__(why, row)
        self.why, self.row = why, row


def parse_json(line: bytes | str) -> Any:
    """The value that a piece of JSON stands for; anything odd is a `BadRow`."""
    try:
        return json.loads(line.decode() if isinstance(line, bytes) else line, object_pairs_hook=no_key_twice)
    except UnicodeDecodeError as error:
        raise BadRow(f"not UTF-8 text ({error.reason} at byte {error.start}).", line) from None
    except json.JSONDecodeError as error:
        raise BadRow(f"not JSON ({error.msg} at column {error.colno}).", line) from None
    except RecursionError:
        raise BadRow("JSON that is nested too deeply.", line) from None
    except ValueError as error:  # a number of too many digits
        raise BadRow(f"not usable JSON ({error}).", line) from None


def no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of these keys and values. JSON would let the last of two equal keys win, and lose the others."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise BadRow(f"the key {short(next(n for n in names if names.count(n) > 1))} is there twice.")
    return found


_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 120
_REPR.maxdict = _REPR.maxlist = _REPR.maxtuple = 8


def short(value: Any, length: int = 60) -> str:
    """A value in one line of at most `length` characters, whatever its size and depth."""
    if isinstance(value, bytes | str) and len(value) > length:
        value = value[:length]
    try:
        text = _REPR.repr(dict(value) if isinstance(value, Mapping) else value)
    except Exception:  # a number of too many digits, an object that cannot say what it is
        text = type(value).__name__
    return text if len(text) <= length else f"{text[: length - 1]}…"


def names(columns: Iterable[Any]) -> str:
    """The names of columns in one line, whatever they hold and however many there are."""
    first = list(islice(columns, 13))
    shown = [n if isinstance(n, str) and n.isprintable() and 0 < len(n) <= 40 else short(n, 40) for n in first[:12]]
    return ", ".join([*shown, *["…"] * (len(first) > 12)]) or "none"
