"""A row of data before it is parsed: its location, its value, and how errors print it.

`file_formats.py` produces raw rows, `row_formats.py` parses them. They are plain data and can be sent to another
process.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

RowPosition = Any
"""The position of a row in a data source, as JSON-compatible data. None is the beginning."""


@dataclass(frozen=True)
class RawRow:
    """A row before it is parsed."""

    where: str
    """Its location, for error messages: `train.jsonl, line 7`."""
    value: Any
    """A mapping of columns, the JSON bytes of one, or a `BadRow`."""
    after: RowPosition
    """The position of the next row."""
    data_set: int | None = None
    """The index of its dataset, if datasets have their own settings."""


class BadRow(Exception):
    """A row that cannot be used: the reason as a sentence, the row if it can be shown, and in two or three words the
    kind of reason, by which rows that are left out are counted."""

    def __init__(self, why: str, row: Any = None, kind: str = "unusable values") -> None:
        super().__init__(why, row, kind)
        self.why, self.row, self.kind = why, row, kind


BROKEN_JSON, TRUNCATED_JSON = "broken JSON", "truncated JSON"


def parse_json(line: bytes | str) -> Any:
    """Parse JSON; raises `BadRow` if it is invalid."""
    try:
        text = line.decode() if isinstance(line, bytes) else line
        return json.loads(text.rstrip("\r\n"), object_pairs_hook=no_key_twice)
    except UnicodeDecodeError as error:
        raise BadRow(f"not UTF-8 text ({error.reason} at byte {error.start}).", line, "not UTF-8") from None
    except json.JSONDecodeError as error:
        number, column = json_place(error)
        place = f"column {column}" if number == 1 else f"column {column} of its line {number}"
        kind = TRUNCATED_JSON if _is_truncated(error) else BROKEN_JSON
        raise BadRow(f"not JSON ({json_reason(error)} at {place}).", line, kind) from None
    except RecursionError:
        raise BadRow("JSON that is nested too deeply.", line, BROKEN_JSON) from None
    except ValueError as error:  # an integer with too many digits
        raise BadRow(f"not usable JSON ({error}).", line, BROKEN_JSON) from None


def json_reason(error: json.JSONDecodeError) -> str:
    """What is wrong with JSON, without the place."""
    return error.msg.removesuffix(" at")


def json_place(error: json.JSONDecodeError) -> tuple[int, int]:
    """The line and column, from 1, at which JSON is broken. What is missing is missing after the last thing that is
    there; Python's parser names the place of the next one, which may be lines below."""
    text, at = error.doc, error.pos
    if "delimiter" in error.msg or not text[at:].strip():
        at = len(text[:at].rstrip())
    return place_in(text, at)


def place_in(text: str, at: int) -> tuple[int, int]:
    """The line and column of a character, from 1."""
    return 1 + text.count("\n", 0, at), at - text.rfind("\n", 0, at)


def _is_truncated(error: json.JSONDecodeError) -> bool:
    """Whether text that continues could be JSON."""
    return not error.doc[error.pos :].strip() or error.msg.startswith("Unterminated string")


def no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object without duplicate keys. Python's parser would keep only the last value of a duplicate key."""
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        names = [name for name, _ in pairs]
        raise BadRow(f"the key {short(next(n for n in names if names.count(n) > 1))} occurs twice.", None, BROKEN_JSON)
    return mapping


_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 120
_REPR.maxdict = _REPR.maxlist = _REPR.maxtuple = 8


def short(value: Any, length: int = 60) -> str:
    """A value on one line of at most `length` characters."""
    if isinstance(value, bytes | str) and len(value) > length:
        value = value[:length]
    try:
        text = _REPR.repr(dict(value) if isinstance(value, Mapping) else value)
    except Exception:  # an integer with too many digits, or an object without a working repr
        text = type(value).__name__
    return text if len(text) <= length else f"{text[: length - 1]}…"


def names(columns: Iterable[Any]) -> str:
    """Column names on one line, at most twelve of them."""
    first = list(islice(columns, 13))
    shown = [n if isinstance(n, str) and n.isprintable() and 0 < len(n) <= 40 else short(n, 40) for n in first[:12]]
    return ", ".join([*shown, *["…"] * (len(first) > 12)]) or "none"
