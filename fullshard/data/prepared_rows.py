"""The rows of a token table as a read-only dataset: what a trainer's `train_dataset` and `eval_dataset` are.

Rows and columns are read as from a `datasets.Dataset`: `rows[0]`, `rows[:2]`, `rows["labels"]`, `column_names`. Values
are lists. A label is the token, or -100 for tokens without loss, as in TRL's prepared datasets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fullshard.data.node_stream import Pages
from fullshard.data.pretokenized import IGNORED
from fullshard.data.raw_row import names
from fullshard.data.stream import Stream
from fullshard.data.token_table import TokenTable
from fullshard.data.tokenize import TokenizerPool, batch_rows

COLUMNS = ["input_ids", "labels"]
PACKED = "seq_lengths"
"""The column with the lengths of the documents in each packed row."""


@dataclass(frozen=True)
class PreparedRows:
    """The rows of a token table, by number or by column."""

    table: TokenTable

    @property
    def column_names(self) -> list[str]:
        """The names of the columns, as in `datasets`."""
        return [*COLUMNS, *([PACKED] if self._packed else [])]

    @property
    def num_rows(self) -> int:
        """The number of rows, as in `datasets`."""
        return len(self)

    @property
    def _packed(self) -> bool:
        facts = self.table.facts
        return len(self.table.row_documents) > len(self.table) or (facts["packing"] and not facts["wrapped"])

    def __len__(self) -> int:
        return len(self.table)

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        return map(self._row, range(len(self)))

    def __getitem__(self, key: int | slice | str | Sequence[int]) -> Any:
        """A row, a column, or the columns of several rows."""
        if isinstance(key, str):
            if key not in self.column_names:
                raise KeyError(f"no column {key!r}; the columns are {names(self.column_names)}")
            return [row[key] for row in self]
        if isinstance(key, int | np.integer):
            at = int(key) + len(self) * (key < 0)
            if not 0 <= at < len(self):
                raise IndexError(f"row {key} of {len(self)}")
            return self._row(at)
        numbers = range(len(self))[key] if isinstance(key, slice) else list(key)
        rows = [self[number] for number in numbers]
        return {name: [row[name] for row in rows] for name in self.column_names}

    def select(self, indices: Sequence[int]) -> list[dict[str, list[int]]]:
        """Some of the rows."""
        return [self[index] for index in indices]

    def to_list(self) -> list[dict[str, list[int]]]:
        """All rows, as in `datasets`."""
        return list(self)

    def to_dict(self) -> dict[str, list[list[int]]]:
        """All columns, as in `datasets`."""
        columns: dict[str, list[list[int]]] = self[:]
        return columns

    def _row(self, number: int) -> dict[str, list[int]]:
        documents = self.table.documents(number)
        row = {
            "input_ids": [token for ids, _ in documents for token in ids.tolist()],
            "labels": [label for ids, mask in documents for label in labels_of(ids, mask)],
        }
        return {**row, PACKED: [len(ids) for ids, _ in documents]} if self._packed else row

    def __repr__(self) -> str:
        return f"PreparedRows({len(self)} rows; {names(self.column_names)})"


@dataclass(frozen=True)
class StreamedRows:
    """The documents of a stream, tokenized while they are read; packing is not shown."""

    pages: Pages

    @property
    def column_names(self) -> list[str]:
        """The names of the columns, as in `datasets`."""
        return list(COLUMNS)

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        pages = self.pages
        with TokenizerPool(pages.tokenizer, pages.settings) as pool:
            for _, chunk in pool.chunks(batch_rows(pages.source.rows(None))):
                start = 0
                for size in chunk.lengths.tolist():
                    ids, mask = chunk.tokens[start : start + size], chunk.loss_mask[start : start + size]
                    yield {"input_ids": ids.tolist(), "labels": labels_of(ids, mask)}
                    start += size

    def __repr__(self) -> str:
        return f"StreamedRows({self.pages.source.name})"


def prepared_rows(data: TokenTable | Stream | dict[str, TokenTable] | None) -> Any:
    """The rows of a trainer's data; of each set by name if there are several, None if there is none."""
    if isinstance(data, dict):
        return {name: PreparedRows(table) for name, table in data.items()}
    if isinstance(data, Stream):
        return StreamedRows(data.pages)
    return None if data is None else PreparedRows(data)


def labels_of(ids: Any, loss_mask: Any) -> list[int]:
    """The labels of a document."""
    labels: list[int] = np.where(loss_mask.astype(bool), ids, IGNORED).tolist()
    return labels
