"""Readers of data files, by file name extension. Each can start at any row.

A reader is a function of a path and a `RowPosition`; a new file format is one entry in `READERS`. A malformed row is
yielded as a `BadRow`, which `on_bad_row` handles; a file that cannot be read any further raises `DataError`.
`text_files.py` reads plain text and CSV. pyarrow is imported when a file needs it.
"""

from __future__ import annotations

import functools
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from fullshard.config.errors import DataError
from fullshard.data.raw_row import (
    BadRow,
    RawRow,
    RowPosition,
    json_place,
    json_reason,
    names,
    no_key_twice,
    parse_json,
    place_in,
    short,
)
from fullshard.data.text_files import MARK, open_file, read_csv, read_table, read_text

CONTENT = {b"PAR1": ".parquet", b"ARROW1": ".arrow", b"\x1f\x8b": ".gz", b"PK\x03\x04": ".zip"}
"""The first bytes of binary formats, and their file name extensions."""
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
"""The last bytes of Arrow's stream format."""
BATCH = 256
"""Rows of a columnar file that are converted to Python objects at a time, at most."""
BYTES = 2 << 20
"""Bytes of such rows, at most: Python's objects take several times as much. A longer row comes alone."""


FileReader = Callable[[Path, RowPosition], Iterator[RawRow]]


def kind_of(path: Path) -> str | None:
    """The file name extension that selects a reader, such as `.jsonl`; None if there is no reader."""
    name = path.name.lower()
    ends = [end for end in READERS if name.endswith(end) or (end in TEXTS and name.endswith(f"{end}.gz"))]
    return max(ends, key=len, default=None)


def stem_of(path: Path) -> str:
    """A file's name without its extension."""
    return path.name[: path.name.lower().rindex(str(kind_of(path)))]


def check_kind(path: Path) -> str:
    """The file's extension; raises if there is no reader for it."""
    kind = kind_of(path)
    if kind is None:
        raise DataError(
            f"{path}: unsupported file type {path.suffix or 'unknown'!r}; expected {', '.join(READERS)} "
            f"(text formats also with .gz)."
        )
    return kind


def read_file(path: Path, start: RowPosition = None, sample_by: str = "line") -> Iterator[RawRow]:
    """The rows of a file from `start` on, which is the `after` of an earlier row. `sample_by` is what a row of a .txt
    file is: a line, a paragraph or the document."""
    kind = check_kind(path)
    try:
        if kind in TEXTS:
            with open_file(path) as file:
                head = file.read(8)
            actual_kind = next((name for magic, name in CONTENT.items() if head.startswith(magic)), None)
            if actual_kind is not None:
                raise DataError(f"{path}: the content is that of a {actual_kind} file, not {kind}; rename it.")
        reader = functools.partial(read_text, sample_by=sample_by) if kind == ".txt" else READERS[kind]
        yield from reader(path, start)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {_reason(error)}.") from None


def _reason(error: BaseException) -> str:
    text = getattr(error, "strerror", None) or str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200].rstrip(".")


# --- JSON -----------------------------------------------------------------------------------------------------------


def _json_lines(path: Path, start: RowPosition) -> Iterator[RawRow]:
    """One object per line; blank lines are skipped. Rows stay bytes and are parsed in the process that tokenizes
    them."""
    offset, number = start or (0, 0)
    with open_file(path) as file:
        file.seek(offset)
        for line in file:
            row = line if offset else line.removeprefix(MARK)
            offset, number = offset + len(line), number + 1
            if row.strip():
                yield RawRow(f"{path}, line {number}", row, (offset, number))


LISTS = ("data", "train", "rows")
"""Keys under which a JSON object may hold the list of rows."""
_DECODER = json.JSONDecoder(object_pairs_hook=no_key_twice)
_LENIENT = json.JSONDecoder()
_BLANK = re.compile(r"[ \t\r\n]*")


def _json(path: Path, start: RowPosition) -> Iterator[RawRow]:
    """A list of rows; an object that holds one as `data`, `train` or `rows`; an object of columns, which are lists of
    the same length; a single row; or JSON lines."""
    with open_file(path) as file:
        if _are_lines(file):
            yield from _json_lines(path, start)
            return
        file.seek(0)
        text = file.read().decode("utf-8-sig", "surrogateescape")
    begin = _skip(text, 0)
    if begin == len(text):
        raise DataError(f"{path}: the file is empty; expected a list of rows.")
    if text[begin] == "[":
        yield from _json_list(path, text, start or (begin + 1, 0, 1 + text.count("\n", 0, begin)))
        return
    value, end = _decode(_DECODER, text, begin, path, "")
    if _skip(text, end) < len(text):
        raise DataError(f"{path}, line {1 + text.count(chr(10), 0, end)}: not JSON (extra data after the first value).")
    for number, row in enumerate(_rows_in(value, path)[start or 0 :], start or 0):
        yield RawRow(f"{path}, row {number}", row, number + 1)


def _are_lines(file: BinaryIO) -> bool:
    """Whether the first line is a complete object and the second line is not blank."""
    first = file.readline().removeprefix(MARK)
    try:
        return first.lstrip().startswith(b"{") and isinstance(parse_json(first), dict) and bool(file.readline().strip())
    except BadRow:
        return False


def _json_list(path: Path, text: str, start: RowPosition) -> Iterator[RawRow]:
    """The rows of a list one by one, with their line numbers. A position is (character, row, line)."""
    at, number, line = start
    while True:
        begin = _skip(text, at)
        line += text.count("\n", at, begin)
        if text.startswith("]", begin):
            break
        where = f"{path}, line {line} (row {number})"
        value: Any
        try:
            value, end = _decode(_DECODER, text, begin, path, where)
        except BadRow as bad:  # a duplicate key
            value, end = bad, _decode(_LENIENT, text, begin, path, where)[1]
        after = _skip(text, end)
        if text.startswith(",", after):
            after += 1
        elif not text.startswith("]", after):
            last, column = place_in(text, end)
            raise DataError(f"{path}, line {last}: not JSON (expected , or ] after row {number} at column {column}).")
        line += text.count("\n", begin, after)
        at, number = after, number + 1
        yield RawRow(where, value, (at, number, line))
    if _skip(text, begin + 1) < len(text):
        raise DataError(f"{path}, line {line}: not JSON (extra data after the end of the list).")


def _decode(decoder: json.JSONDecoder, text: str, begin: int, path: Path, where: str) -> tuple[Any, int]:
    try:
        return decoder.raw_decode(text, begin)
    except json.JSONDecodeError as error:
        line, column = json_place(error)
        raise DataError(f"{path}, line {line}: not JSON ({json_reason(error)} at column {column}).") from None
    except (RecursionError, ValueError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise DataError(f"{where or path}: not usable JSON ({why}).") from None


def _skip(text: str, at: int) -> int:
    blank = _BLANK.match(text, at)
    return blank.end() if blank else at


def _rows_in(value: Any, path: Path) -> list[Any]:
    if not isinstance(value, dict):
        raise DataError(f"{path}: the file holds {short(value)}; expected a list of rows.")
    lists = {name: rows for name, rows in value.items() if isinstance(rows, list)}
    inner = [name for name in lists if name in LISTS]
    if inner and len(lists) > 1 and not _are_columns(value):
        raise DataError(f"{path}: the file holds several lists ({names(lists)}); write each split to its own file.")
    if len(inner) == 1 and len(lists) == 1:
        return lists[inner[0]]
    if _are_columns(value):
        return [dict(zip(value, row, strict=True)) for row in zip(*value.values(), strict=True)]
    return [value]


def _are_columns(value: dict[str, Any]) -> bool:
    """Whether all values are lists of the same length. A list of objects is a conversation rather than a column."""
    lists = list(value.values())
    return (
        bool(lists)
        and all(isinstance(column, list) and len(column) == len(lists[0]) for column in lists)
        and not any(isinstance(item, dict) for column in lists for item in column)
    )


# --- columns --------------------------------------------------------------------------------------------------------


def _parquet(path: Path, start: RowPosition) -> Iterator[RawRow]:
    """Parquet, one row group at a time. A position is a row number."""
    arrow = _pyarrow(path)
    number = start or 0
    try:
        with arrow.parquet.ParquetFile(path, pre_buffer=False) as file:
            first = 0
            for group in range(file.num_row_groups):
                count = file.metadata.row_group(group).num_rows
                if first + count > number:
                    fitting = BYTES * count // max(1, file.metadata.row_group(group).total_byte_size)
                    rows = min(BATCH, max(1, fitting))
                    yield from _objects(path, file.iter_batches(rows, row_groups=[group]), first, number)
                first += count
    except (arrow.ArrowException, MemoryError) as error:
        raise DataError(f"{path} cannot be read as parquet: {_reason(error)}.") from None


def _arrow(path: Path, start: RowPosition) -> Iterator[RawRow]:
    """Arrow files, as saved by `datasets`. A position is a row number."""
    arrow = _pyarrow(path)
    try:
        with arrow.memory_map(str(path)) as file:
            whole = file.read(6) == b"ARROW1"
            file.seek(max(0, file.size() - len(END_OF_STREAM)))
            if not whole and file.read() != END_OF_STREAM:  # nothing else reveals a truncation between two batches
                raise DataError(f"{path} cannot be read as Arrow data: the file is truncated.")
            file.seek(0)
            opened = arrow.ipc.open_file(file) if whole else arrow.ipc.open_stream(file)
            batches = map(opened.get_batch, range(opened.num_record_batches)) if whole else opened
            yield from _objects(path, batches, 0, start or 0)
    except (arrow.ArrowException, MemoryError) as error:
        raise DataError(f"{path} cannot be read as Arrow data: {_reason(error)}.") from None


def _objects(path: Path, batches: Iterable[Any], first: int, start: int) -> Iterator[RawRow]:
    """The rows of record batches as Python objects, from row `start` on; the first batch begins with row `first`."""
    for batch in batches:
        if first + batch.num_rows > start:
            number = max(start, first)
            for part in _small(batch.slice(number - first)):
                for at, row in enumerate(_to_objects(part), number):
                    yield RawRow(f"{path}, row {at}", row, at + 1)
                number += part.num_rows
        first += batch.num_rows


def _small(batch: Any) -> Iterator[Any]:
    """A record batch in parts of few rows and bytes."""
    rows = batch.num_rows
    if rows > 1 and (rows > BATCH or batch.nbytes > BYTES):
        half = BATCH if rows > BATCH else rows // 2
        yield from _small(batch.slice(0, half))
        yield from _small(batch.slice(half))
    elif rows:
        yield batch


def _to_objects(batch: Any) -> list[Any]:
    try:
        batch.validate(full=True)  # offsets in a damaged file could point anywhere
        return batch.to_pylist()
    except ValueError as error:  # text that is not UTF-8, or a time that Python cannot represent
        if batch.num_rows == 1:
            return [BadRow(f"a value that cannot be read ({_reason(error)}).")]
        return [row for i in range(batch.num_rows) for row in _to_objects(batch.slice(i, 1))]


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(f"{path}: reading this needs pyarrow; pip install datasets.") from None
    return pyarrow


TEXTS: dict[str, FileReader] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json,
    ".csv": read_csv,
    ".tsv": functools.partial(read_table, delimiter="\t"),
    ".txt": read_text,
}
"""Formats that may also be compressed, as `.jsonl.gz`."""
READERS: dict[str, FileReader] = {**TEXTS, ".parquet": _parquet, ".arrow": _arrow}
