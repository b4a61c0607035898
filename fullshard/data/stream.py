"""Streaming: data is read and tokenized during training, in constant memory, and resumed exactly.

A stream is a sequence of pages. A page is a fixed number of source rows, tokenized, packed, and shuffled by (seed,
epoch, page). Each step takes the next rows of a global batch, independent of the number of ranks and worker processes.
The position in a checkpoint holds, as plain data, where in the source the current page begins and how many of its rows
are used. `shared_pages.py` transfers pages to the ranks.
"""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fullshard.data.loader import GlobalBatch, check_same
from fullshard.data.node_stream import PageMaker, PageReader, Pages
from fullshard.data.row_formats import bad_kinds
from fullshard.data.sources import DataSource
from fullshard.data.token_table import LEFT_OUT, TokenTable, cache_root, unused_columns
from fullshard.distributed import runtime
from fullshard.distributed.ranks import agree, exchange, once_per_node

COUNTED = ("documents", "rows", "tokens", "targets", *LEFT_OUT)
START: dict[str, Any] = {
    "epoch": 0, "page": 0, "place": None, "row": 0, "check": None, "before": 0, "epoch_rows": 0, "pass_rows": None,
    "counts": {},
}  # fmt: skip
"""The position at the beginning. `place`: position of the page in the source; `row`: number of its rows that are used;
`check`: checksum of the page; `before`: rows of the stream before this position; `epoch_rows`: those of this epoch;
`pass_rows`: rows of a whole epoch, once one is complete; `counts`: sums over all pages before this one."""


@dataclass(frozen=True)
class Stream:
    """A streamed dataset."""

    pages: Pages
    cache: str | None = None
    check: Callable[[TokenTable], None] = lambda page: None
    """Raises for pages that the model cannot process."""

    @contextlib.contextmanager
    def open(self, at: dict[str, Any]) -> Iterator[PageReader]:
        """The pages from a position on. All ranks must call this; the first rank of each node makes the pages. Raises
        if the nodes' files have different sizes."""
        makers: list[PageMaker] = []

        def begin() -> tuple[str, list[int]]:
            root, readers = cache_root(self.cache), runtime.local_world_size()
            makers.append(PageMaker(self.pages, root, at["epoch"], at["page"], at["place"], readers))
            return str(makers[0].folder), _file_sizes(self.pages.source)

        reader: PageReader | None = None
        try:
            folder, sizes = once_per_node(begin, "start of the stream")
            check_same(exchange(sizes, "files of the stream"), self.pages.source)
            reader = PageReader(Path(folder), runtime.local_rank())
            yield reader
        finally:
            if reader is not None:
                reader.close()
            for maker in makers:
                maker.close(reader.number if reader else 0)


def _file_sizes(source: DataSource) -> list[int]:
    """The sizes of a source's files; 0 for one that is missing, which its reader reports."""
    return [file.stat().st_size if file.exists() else 0 for file in source.files]


@dataclass
class _OpenPage:
    """A page and the order of its rows."""

    table: TokenTable
    order: npt.NDArray[np.int64]
    used: int = 0

    @property
    def left(self) -> int:
        return len(self.order) - self.used


@dataclass(frozen=True)
class StreamRows:
    """Rows of one or more pages, numbered from `first`."""

    first: int
    rows: list[tuple[TokenTable, int]]

    def documents(self, row: int) -> list[tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]]:
        """Tokens and loss mask of each document in a row."""
        table, number = self.rows[row - self.first]
        return table.documents(number)


@dataclass(frozen=True)
class StreamSampler:
    """Samples the rows of a stream in order. The last step of an epoch may have fewer; `drop_last` omits it."""

    stream: Stream
    batch: int
    """Rows in a global batch."""
    seed: int
    shuffle: bool = True
    drop_last: bool = False

    def picks(self, start: int, end: int, position: dict[str, Any] | None) -> Generator[GlobalBatch, None, None]:
        """The rows of steps `start` to `end` - 1, from a position on. All ranks must begin together."""
        at = {**START, **(position or {})}
        if position is None and start > 0 and runtime.is_main():
            runtime.get_logger().warning("the checkpoint has no stream position: the stream starts from the beginning")
        with self.stream.open(at) as reader:
            cursor = _StreamCursor(self, reader, at)
            for number in range(start, end):
                yield cursor.step(number)


class _StreamCursor:
    """Reads a stream step by step. Pages are opened ahead only as far as needed to know whether the epoch ends."""

    def __init__(self, sampler: StreamSampler, reader: PageReader, at: dict[str, Any]) -> None:
        self.sampler, self.reader, self.at = sampler, reader, at
        self.open: deque[_OpenPage] = deque()
        self.counts: Counter[str] = Counter(at["counts"])
        self._open_first_page(at)

    def _open_first_page(self, at: dict[str, Any]) -> None:
        """Open the first page, and check that all nodes have made the same one."""
        checks = agree(lambda: self._read().table.facts["check"], "first page of the stream")
        check_same(checks, self.sampler.stream.pages.source)
        page = self.open[0]
        if at["check"] is not None and page.table.facts["check"] != at["check"]:
            if runtime.is_main():
                runtime.get_logger().warning(
                    "the data, the tokenizer or the settings have changed since the checkpoint: the stream continues "
                    "at the same position in the files, at the start of page %d of epoch %d",
                    at["page"] + 1,
                    at["epoch"] + 1,
                )
            return
        page.used = at["row"]

    def step(self, number: int) -> GlobalBatch:
        sampler, at = self.sampler, self.at
        self._fill(sampler.batch)
        while not self._available():  # the rest of the epoch has no rows, because the data has changed
            self._next_epoch()
            self._fill(sampler.batch)
        picks: list[tuple[TokenTable, int]] = []
        targets = tokens = 0
        while self.open and len(picks) < sampler.batch:
            page = self.open[0]
            rows = page.order[page.used : page.used + sampler.batch - len(picks)]
            picks += [(page.table, row) for row in rows.tolist()]
            targets += int(page.table.row_targets[rows].sum())
            tokens += int(page.table.row_sizes[rows].sum())
            page.used += len(rows)
            if page.left or self._is_last(page):
                break
            self._close_page()
        facts = self._facts()
        first, at["before"] = at["before"], at["before"] + len(picks)
        at["epoch_rows"] += len(picks)
        least = sampler.batch if sampler.drop_last else 1
        self._fill(least)
        ends = self._available() < least
        if ends:
            self._next_epoch()
        numbers = np.arange(first, first + len(picks))
        return GlobalBatch(
            number, numbers, StreamRows(first, picks), targets, tokens, self._epoch(), ends, self._position(), facts
        )  # fmt: skip

    # --- pages ------------------------------------------------------------------------------------------------------

    def _read(self) -> _OpenPage:
        table, sampler = self.reader.read(), self.sampler
        facts = table.facts
        if len(table):
            sampler.stream.check(table)
        if facts["bad"]:
            examples = "; ".join(facts["bad_rows"])
            runtime.warn_once(
                "bad rows",
                f"rows that cannot be used are left out and counted; on the first page with any: {bad_kinds(facts)}. "
                f"The first ones: {examples}",
            )
        for name in unused_columns(facts):
            runtime.warn_once(f"unused {name}", f"the column `{name}` of the data is not used.")
        order = np.arange(len(table))
        if sampler.shuffle:
            seeds = np.random.PCG64([sampler.seed, facts["epoch"], facts["page"]])
            order = np.random.Generator(seeds).permutation(order)
        self.open.append(_OpenPage(table, order))
        return self.open[-1]

    def _fill(self, least: int) -> None:
        """Open pages until `least` rows are available, or the epoch's last page is open."""
        while not (self.open and self._is_last(self.open[-1])) and self._available() < least:
            self._read()
        while self.open and not self.open[0].left and not self._is_last(self.open[0]):
            self._close_page()

    def _available(self) -> int:
        return sum(page.left for page in self.open)

    def _is_last(self, page: _OpenPage) -> bool:
        return bool(page.table.facts["ends_epoch"])

    def _close_page(self) -> None:
        facts = self.open.popleft().table.facts
        self.counts.update({name: facts[name] for name in COUNTED})

    def _next_epoch(self) -> None:
        while self.open:
            self._close_page()
        at = self.at
        at["epoch"], at["pass_rows"], at["epoch_rows"] = at["epoch"] + 1, at["epoch_rows"], 0

    # --- position and statistics ------------------------------------------------------------------------------------

    def _epoch(self) -> float:
        """Epochs completed. The fraction of an epoch is known once a whole epoch is complete."""
        at = self.at
        return at["epoch"] + (min(1.0, at["epoch_rows"] / at["pass_rows"]) if at["pass_rows"] else 0.0)

    def _facts(self) -> dict[str, Any]:
        """Counts over all pages used so far, including the current one."""
        now = self.open[0].table.facts if self.open else {}
        return {name: self.counts[name] + now.get(name, 0) for name in COUNTED}

    def _position(self) -> dict[str, Any]:
        at = {**self.at, "counts": dict(self.counts)}
        if not self.open:
            return {**at, "page": 0, "place": None, "row": 0, "check": None}
        page = self.open[0]
        facts = page.table.facts
        return {**at, "page": facts["page"], "place": facts["place"], "row": page.used, "check": facts["check"]}
