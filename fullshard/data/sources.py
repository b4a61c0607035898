"""Data sources: rows of files or lists, and combinations of sources (concatenated, mixed by weights, split).

A source yields its rows in a fixed order from any position on, and has a fingerprint of its content. Positions are
plain data, so that a checkpoint can store them. Only the choice of validation rows is random, and it depends on the
seed.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from fullshard.config.errors import ConfigError, DataError
from fullshard.data.file_formats import check_kind, read_file
from fullshard.data.raw_row import RawRow, RowPosition
from fullshard.data.row_formats import DEFAULT_READING, Document, Reading, parse_row


@dataclass(frozen=True)
class DataSource:
    """Rows that can be read from any position on, and a fingerprint of their content."""

    name: str
    rows: Callable[[RowPosition], Iterator[RawRow]]
    """The rows from a position on (None: all rows); positions come from `RawRow.after`."""
    fingerprint: Callable[[], str]
    parts: tuple[DataSource, ...] = ()
    """The sources that this one combines."""
    join: Callable[[Sequence[DataSource]], DataSource] | None = None
    """For a mix: makes the same mix of other parts."""
    own_files: tuple[Path, ...] = ()
    """The files that its rows are read from, without those of its parts."""

    @property
    def files(self) -> list[Path]:
        """All files that rows are read from."""
        return [*self.own_files, *(file for part in self.parts for file in part.files)]

    def documents(self, reading: Reading = DEFAULT_READING) -> Iterator[Document]:
        """All rows as documents, from the first row."""
        return (parse_row(row, reading) for row in self.rows(None))


def _digest(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


# --- files and lists ------------------------------------------------------------------------------------------------


def file_source(paths: Sequence[Path], sample_by: str = "line") -> DataSource:
    """The rows of files, one file after the other; `sample_by` applies to .txt files."""
    return chain([_one_file(path, sample_by) for path in paths])


def _one_file(path: Path, sample_by: str) -> DataSource:
    kind = check_kind(path)

    def fingerprint() -> str:
        try:
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror or error}.") from None
        return _digest(content, sample_by) if kind == ".txt" else content

    reads = functools.partial(read_file, path, sample_by=sample_by)
    return DataSource(str(path), reads, fingerprint, own_files=(path,))


def row_source(rows: Iterable[Any], name: str) -> DataSource:
    """Rows in memory: a list of objects, or a `datasets.Dataset`. A position is a row number."""
    rows = rows if hasattr(rows, "__len__") or hasattr(rows, "skip") else list(rows)

    def walk(start: RowPosition) -> Iterator[RawRow]:
        first = start or 0
        remaining = rows.skip(first) if hasattr(rows, "skip") and first else islice(rows, first, None)
        return (RawRow(f"{name}, row {i}", row, i + 1) for i, row in enumerate(remaining, first))

    def fingerprint() -> str:
        digest = hashlib.sha256()
        for row in walk(None):
            try:
                digest.update(json.dumps(row.value, default=_plain, skipkeys=True).encode())
            except (ValueError, RecursionError) as error:
                raise DataError(f"{row.where}: the row is not JSON-compatible ({error}).") from None
            digest.update(b"\n")
        return digest.hexdigest()

    cached = getattr(rows, "cache_files", None)  # of a `datasets.Dataset`, which reads them lazily
    files = tuple(Path(file["filename"]) for file in cached) if isinstance(cached, list) else ()
    return DataSource(name, walk, fingerprint, own_files=files)


def _plain(value: Any) -> Any:
    """Arrays and tensors as lists, in full; anything else as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def shuffled(source: DataSource, seed: int) -> DataSource:
    """The rows of a source in random order. They are read into memory."""

    def rows(start: RowPosition) -> Iterator[RawRow]:
        buffered = list(source.rows(None))
        order = np.random.Generator(np.random.PCG64([seed, 2])).permutation(len(buffered)).tolist()
        return (replace(buffered[row], after=i + 1) for i, row in enumerate(order[start or 0 :], start or 0))

    return DataSource(
        source.name, rows, lambda: _digest("shuffled", seed, source.fingerprint()), own_files=tuple(source.files)
    )


def numbered(source: DataSource, number: int) -> DataSource:
    """A source whose rows carry the index of their dataset, which has its own settings."""

    def rows(start: RowPosition) -> Iterator[RawRow]:
        return (replace(row, data_set=number) for row in source.rows(start))

    def fingerprint() -> str:
        return _digest("data set", number, source.fingerprint())

    return DataSource(source.name, rows, fingerprint, own_files=tuple(source.files))


# --- several sources ------------------------------------------------------------------------------------------------


def chain(sources: Sequence[DataSource]) -> DataSource:
    """Concatenate sources. A position is (index of the source, position in it)."""
    if len(sources) == 1:
        return sources[0]

    def rows(start: RowPosition) -> Iterator[RawRow]:
        first, within = start or (0, None)
        for number, source in enumerate(sources[first:], first):
            for row in source.rows(within if number == first else None):
                yield replace(row, after=(number, row.after))

    def fingerprint() -> str:
        return _digest([source.fingerprint() for source in sources])

    return DataSource(", ".join(s.name for s in sources), rows, fingerprint, tuple(sources))


def mix(sources: Sequence[DataSource], weights: Sequence[float], stopping: str = "all_exhausted") -> DataSource:
    """Mix sources by weights: the next row always comes from the source that is furthest behind its share.

    With shares w (weights divided by their sum), row i (from 0) comes from the source s with the largest
    w[s] * (i + 1) - taken[s], the first one in a tie. So after any number of rows each source is within one row of its
    share (with two sources; within a few rows with many). `all_exhausted` ends once every source was read completely; a
    source that ends earlier starts again. `first_exhausted` ends with the last row of the source that ends first. A
    position is {"taken", "places", "ended"}, each with a value per source.
    """
    shares = [weight / sum(weights) for weight in weights]
    over = all if stopping == "all_exhausted" else any

    def rows(start: RowPosition) -> Iterator[RawRow]:
        begin = start or {
            "taken": [0] * len(sources),
            "places": [None] * len(sources),
            "ended": [False] * len(sources),
        }
        counts, places, ended = list(begin["taken"]), list(begin["places"]), list(begin["ended"])
        walks = [source.rows(place) for source, place in zip(sources, places, strict=True)]
        coming: list[RawRow | None] = [None] * len(sources)
        while not over(ended):
            count = sum(counts) + 1
            s = max(range(len(sources)), key=lambda s: shares[s] * count - counts[s])
            row = coming[s] or next(walks[s], None)
            if row is None:
                raise DataError(f"{sources[s].name}: no rows; expected at least one.")
            counts[s] += 1
            coming[s] = next(walks[s], None)
            places[s] = row.after
            if coming[s] is None:
                ended[s], places[s], walks[s] = True, None, sources[s].rows(None)
            yield replace(row, after={"taken": list(counts), "places": list(places), "ended": list(ended)})

    def fingerprint() -> str:
        return _digest("mix", list(weights), stopping, [source.fingerprint() for source in sources])

    name = " + ".join(f"{share:.0%} {source.name}" for share, source in zip(shares, sources, strict=True))
    return DataSource(name, rows, fingerprint, tuple(sources), lambda parts: mix(parts, weights, stopping))


# --- validation split -----------------------------------------------------------------------------------------------


def hold_back(source: DataSource, size: float, seed: int, streaming: bool = False) -> tuple[DataSource, DataSource]:
    """Split a source into training and validation rows.

    `size` is the number of validation rows or, below 1, their fraction (rounded, at least one row). The choice depends
    only on the seed and the number of rows. When streaming, the first rows are held out, and `size` must be a number. A
    mix is split per source, so that a row that repeats is never on both sides.
    """
    if streaming and size < 1:
        raise ConfigError(
            f"val_size is {size:g}: the length of a stream is not known in advance; give a number of rows. The first "
            f"rows are then held out."
        )
    return _hold_back_first(source, int(size)) if streaming else _hold_back_random(source, size, seed)


def _hold_back_random(source: DataSource, size: float, seed: int) -> tuple[DataSource, DataSource]:
    parts = source.parts if source.join else (source,)

    @functools.cache
    def held_out_rows() -> list[frozenset[int]]:
        ends = np.cumsum([sum(1 for _ in part.rows(None)) for part in parts])
        rows = int(ends[-1])
        count = int(size) if size >= 1 else max(1, round(size * rows))
        if count >= rows:
            raise DataError(f"val_size {size:g} holds out {count} rows, but {source.name} has only {rows}.")
        chosen = np.sort(np.random.Generator(np.random.PCG64([seed, 1])).choice(rows, count, replace=False))
        return [
            frozenset((chosen[(chosen >= begin) & (chosen < end)] - begin).tolist())
            for begin, end in zip([0, *ends[:-1]], ends, strict=True)
        ]

    def select(number: int, inside: bool) -> DataSource:
        part = parts[number]

        def rows(start: RowPosition) -> Iterator[RawRow]:
            first, place = start or (0, None)
            mine = held_out_rows()[number]
            for i, row in enumerate(part.rows(place), first):
                if (i in mine) == inside:
                    yield replace(row, after=(i + 1, row.after))

        def fingerprint() -> str:
            return _digest("held back" if inside else "kept", size, seed, number, [p.fingerprint() for p in parts])

        return DataSource(part.name, rows, fingerprint)

    training, held_out = ([select(number, inside) for number in range(len(parts))] for inside in (False, True))
    return source.join(training) if source.join else training[0], chain(held_out)


def _hold_back_first(source: DataSource, count: int) -> tuple[DataSource, DataSource]:
    @functools.cache
    def place() -> RowPosition:
        """The position of the first row that is not held out."""
        rows = source.rows(None)
        *_, last = [None, *islice(rows, count)]
        if next(rows, None) is None or last is None or (source.join and any(last.after["ended"])):
            raise DataError(
                f"val_size holds out {count} rows, which are all rows of {source.name}, or of one of its parts."
            )
        return last.after

    def first(start: RowPosition) -> Iterator[RawRow]:
        begin, within = start or (0, None)
        for i, row in enumerate(islice(source.rows(within), count - begin), begin + 1):
            yield replace(row, after=(i, row.after))

    def later(part: DataSource, begin: Callable[[], RowPosition]) -> DataSource:
        return DataSource(
            part.name,
            lambda start: part.rows(begin() if start is None else start),
            lambda: _digest("after", count, source.fingerprint(), part.fingerprint()),
        )

    back = DataSource(
        f"the first {count} rows of {source.name}", first, lambda: _digest("first", count, source.fingerprint())
    )
    if source.join is None:
        return later(source, place), back
    begins = [functools.partial(lambda s: place()["places"][s], s) for s in range(len(source.parts))]
    return source.join([later(part, begin) for part, begin in zip(source.parts, begins, strict=True)]), back
