"""Readers for plain text and CSV files, line by line, from any position on.

`file_formats.py` lists all file formats and converts read errors to `DataError`.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from fullshard.config.errors import DataError
from fullshard.data.raw_row import BadRow, RawRow, RowPosition, names, short

MARK = b"\xef\xbb\xbf"
"""The UTF-8 byte order mark."""
LONGEST_FIELD = 1 << 28
"""The maximum number of characters in a CSV value."""
DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs"}
"""The delimiters that a .csv file may use."""


def open_file(path: Path) -> BinaryIO:
    """Open a file, compressed with gzip or not, for reading bytes."""
    return cast(BinaryIO, gzip.open(path, "rb") if path.suffix.lower() == ".gz" else path.open("rb"))


class Lines:
    """Iterates over a file's lines as text, and tracks the position."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.offset, self.number, self.ended = file, 0, 0, False

    def __iter__(self) -> Lines:
        return self

    def __next__(self) -> str:
        line = self.file.readline()
        if not line:
            self.ended = True
            raise StopIteration
        text = line if self.offset else line.removeprefix(MARK)
        self.offset, self.number = self.offset + len(line), self.number + 1
        # Invalid UTF-8 is rejected later, if the value that contains it is used.
        return text.decode("utf-8", "surrogateescape")


# --- text -----------------------------------------------------------------------------------------------------------


def read_text(path: Path, start: RowPosition, sample_by: str = "line") -> Iterator[RawRow]:
    """Plain text: one row per line, per paragraph (separated by blank lines) or per file. Blank lines are skipped. A
    position is (byte, line)."""
    with open_file(path) as file:
        lines = Lines(file)
        if start:
            lines.offset, lines.number = start
            file.seek(lines.offset)
        pending: list[str] = []
        first = lines.number + 1
        for line in lines:
            if line.strip() or (pending and sample_by == "document"):
                first = first if pending else lines.number
                pending.append(line)
            if pending and (sample_by == "line" or (sample_by == "paragraph" and not line.strip())):
                yield _row_of_text(path, first, pending, lines)
                pending = []
        if pending:
            yield _row_of_text(path, first, pending, lines)


def _row_of_text(path: Path, first: int, text_lines: list[str], lines: Lines) -> RawRow:
    text = "".join(text_lines).rstrip("\r\n").replace("\r\n", "\n")
    return RawRow(f"{path}, line {first}", {"text": text}, (lines.offset, lines.number))


# --- CSV ------------------------------------------------------------------------------------------------------------


def read_csv(path: Path, start: RowPosition) -> Iterator[RawRow]:
    """CSV with a header; the delimiter is detected from the header."""
    delimiters = []
    for delimiter in DELIMITERS:
        # With the wrong delimiter, quotes may make the header invalid.
        with open_file(path) as file, contextlib.suppress(DataError):
            header = _header(path, Lines(file), delimiter)[0]
            delimiters += [delimiter] if len(header) > 1 else []
    if len(delimiters) > 1:
        with open_file(path) as file:
            line = next(Lines(file), "").strip()
        raise DataError(
            f"{path}: the header {short(line)} has {' and '.join(DELIMITERS[d] for d in delimiters)}; expected one "
            f"delimiter. Quote column names that contain another one."
        )
    return read_table(path, start, delimiters[0] if delimiters else ",")


def _header(path: Path, lines: Lines, delimiter: str) -> tuple[list[str], Iterator[Any]]:
    """The column names, and the records that follow."""
    csv.field_size_limit(max(csv.field_size_limit(), LONGEST_FIELD))
    rows = csv.reader(lines, delimiter=delimiter, strict=True)
    records = _records(rows, lines, path)
    header: Any = next((fields for fields in records if fields), None)
    if header is None or isinstance(header, BadRow):
        problem = "the file is empty;" if header is None else header.why
        raise DataError(f"{path}: {problem} expected a line of column names.")
    return header, records


def read_table(path: Path, start: RowPosition, delimiter: str) -> Iterator[RawRow]:
    """Delimited values with a header. Quoted values may contain delimiters, doubled quotes and line breaks. A row with
    more or fewer values than the header is bad. A position is (byte, line)."""
    with open_file(path) as file:
        lines = Lines(file)
        header, records = _header(path, lines, delimiter)
        if len(set(header)) < len(header):
            raise DataError(f"{path}, line {lines.number}: columns {names(header)}; expected each name once.")
        if start:
            lines.offset, lines.number = start
            file.seek(lines.offset)
        line = lines.number + 1
        for fields in records:
            where, place, line = f"{path}, line {line}", (lines.offset, lines.number), lines.number + 1
            if isinstance(fields, BadRow):
                yield RawRow(where, fields, place)
            elif fields and len(fields) != len(header):
                why = f"{len(fields)} values, the header has {len(header)} ({names(header)})."
                yield RawRow(where, BadRow(why, fields, "too few or too many values"), place)
            elif fields:
                yield RawRow(where, dict(zip(header, fields, strict=True)), place)


def _records(rows: Iterator[list[str]], lines: Lines, path: Path) -> Iterator[Any]:
    while True:
        line = lines.number + 1
        try:
            yield next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            if lines.ended:
                raise DataError(f"{path}, line {line}: the quote that is opened here is never closed.") from None
            yield BadRow(f"not a row of values ({error}).")
