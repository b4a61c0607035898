"""Data that is read and tokenised while it is trained on, in constant memory, and gone on with exactly.

A stream is a sequence of pages: each is the next so many rows of the source, tokenised, packed and shuffled among
themselves by (seed, epoch, page). The rows of the stream are those of its pages, one after the other, whatever the
number of ranks and worker processes; a step takes the next rows of a global batch. A position says in plain data where
in the source the current page begins and how many of its rows are used, so a resumed run seeks there. How pages get to
the ranks is in `shared_pages.py`.
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

from fullshard import runtime
from fullshard.data.loader import Pick
from fullshard.data.shared_pages import Maker, Pages, Reader
from fullshard.data.token_table import LEFT_OUT, TokenTable, cache_root, unused_columns
from fullshard.errors import DataError
from fullshard.ranks import agree, once_per_node

COUNTED = ("documents", "rows", "tokens", "targets", *LEFT_OUT)
START: dict[str, Any] = {
    "epoch": 0, "page": 0, "place": None, "row": 0, "check": None, "before": 0, "epoch_rows": 0, "pass_rows": None,
    "counts": {},
}  # fmt: skip
"""The position at the beginning. `place`: where in the source the page begins; `row`: how many of its rows are used;
`check`: a checksum of the page; `before`: rows of the stream before this position; `epoch_rows`: those of this epoch;
`pass_rows`: rows of a whole epoch, once one has been gone through; `counts`: sums over all pages before this one."""


@dataclass(frozen=True)
class Stream:
    """A data set that is streamed."""

    pages: Pages
    cache: str | None = None
    check: Callable[[TokenTable], None] = lambda page: None
    """Refuses pages that the model cannot take."""

    @contextlib.contextmanager
    def open(self, at: dict[str, Any]) -> Iterator[Reader]:
        """The pages from a position on. All ranks must open it together; the first of each node makes the pages."""
        makers: list[Maker] = []

        def begin() -> str:
            root, readers = cache_root(self.cache), runtime.local_world_size()
            makers.append(Maker(self.pages, root, at["epoch"], at["page"], at["place"], readers))
            return str(makers[0].folder)

        reader: Reader | None = None
        try:
            reader = Reader(Path(once_per_node(begin, "start of the stream")), runtime.local_rank())
            yield reader
        finally:
            if reader is not None:
                reader.close()
            for maker in makers:
                maker.close(reader.number if reader else 0)


@dataclass
class _Open:
    """A page and the order of its rows."""

    table: TokenTable
    order: npt.NDArray[np.int64]
    used: int = 0

    @property
    def left(self) -> int:
        return len(self.order) - self.used


@dataclass(frozen=True)
class Picked:
    """Rows of several pages, under numbers that count up from `first`."""

    first: int
    rows: list[tuple[TokenTable, int]]

    def documents(self, row: int) -> list[tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]]:
        table, number = self.rows[row - self.first]
        return table.documents(number)


@dataclass(frozen=True)
class StreamFeed:
    """Which rows of a stream each step has. An epoch's last step may have fewer; `drop_last` leaves that out."""

    stream: Stream
    batch: int
    """Rows in a global batch."""
    seed: int
    shuffle: bool = True
    drop_last: bool = False

    def picks(self, start: int, end: int, position: dict[str, Any] | None) -> Generator[Pick, None, None]:
        """The rows of steps `start` to `end` - 1, from a position on. All ranks must begin together."""
        at = {**START, **(position or {})}
        if position is None and start > 0 and runtime.is_main():
            runtime.get_logger().warning("the checkpoint holds no place in a stream: the stream begins anew")
        with self.stream.open(at) as reader:
            walk = _Walk(self, reader, at)
            for number in range(start, end):
                yield walk.step(number)


class _Walk:
    """Goes through a stream step by step. Pages are opened ahead only as far as it takes to tell whether the epoch
    ends."""

    def __init__(self, feed: StreamFeed, reader: Reader, at: dict[str, Any]) -> None:
        self.feed, self.reader, self.at = feed, reader, at
        self.open: deque[_Open] = deque()
        self.counts: Counter[str] = Counter(at["counts"])
        self._meet(at)

    def _meet(self, at: dict[str, Any]) -> None:
        """Open the first page; ranks of different nodes must have made the same one."""
        heard = agree(lambda: self._read().table.facts["check"], "first page of the stream")
        if len(set(heard)) > 1:
            others = ", ".join(str(r) for r, check in enumerate(heard) if check != heard[0])
            raise DataError(
                f"{self.feed.stream.pages.source.name}: ranks {others} read other data than the first rank; every "
                f"node needs the same files, tokenizer and settings."
            )
        page = self.open[0]
        if at["check"] is not None and page.table.facts["check"] != at["check"]:
            if runtime.is_main():
                runtime.get_logger().warning(
                    "the data, the tokenizer or the settings have changed since the checkpoint: the stream goes on at "
                    "the place in the files where it was, with page %d of epoch %d from its beginning",
                    at["page"] + 1,
                    at["epoch"] + 1,
                )
            return
        page.used = at["row"]

    def step(self, number: int) -> Pick:
        feed, at = self.feed, self.at
        self._fill(feed.batch)
        while not self._waiting():  # an epoch without a row, if the rest of it has changed
            self._next_epoch()
            self._fill(feed.batch)
        taken: list[tuple[TokenTable, int]] = []
        targets = tokens = 0
        while self.open and len(taken) < feed.batch:
            page = self.open[0]
            rows = page.order[page.used : page.used + feed.batch - len(taken)]
            taken += [(page.table, row) for row in rows.tolist()]
            targets += int(page.table.row_targets[rows].sum())
            tokens += int(page.table.row_sizes[rows].sum())
            page.used += len(rows)
            if page.left or self._is_last(page):
                break
            self._leave()
        facts = self._facts()
        first, at["before"] = at["before"], at["before"] + len(taken)
        at["epoch_rows"] += len(taken)
        least = feed.batch if feed.drop_last else 1
        self._fill(least)
        ends = self._waiting() < least
        if ends:
            self._next_epoch()
        numbers = np.arange(first, first + len(taken))
        return Pick(
            number, numbers, Picked(first, taken), targets, tokens, self._epoch(), ends, self._position(), facts
        )  # fmt: skip

    # --- pages ------------------------------------------------------------------------------------------------------

    def _read(self) -> _Open:
        table, feed = self.reader.read(), self.feed
        facts = table.facts
        if len(table):
            feed.stream.check(table)
        if facts["bad"]:
            found = "; ".join(facts["bad_rows"])
            runtime.warn_once(
                "bad rows", f"rows that cannot be understood are left out, and counted. The first: {found}"
            )
        for name in unused_columns(facts):
            runtime.warn_once(f"unused {name}", f"`{name}` is in the rows of the data and is not used.")
        order = np.arange(len(table))
        if feed.shuffle:
            order = np.random.Generator(np.random.PCG64([feed.seed, facts["epoch"], facts["page"]])).permutation(order)
        self.open.append(_Open(table, order))
        return self.open[-1]

    def _fill(self, least: int) -> None:
        """Open pages until so many rows wait, or the epoch's last page is open."""
        while not (self.open and self._is_last(self.open[-1])) and self._waiting() < least:
            self._read()
        while self.open and not self.open[0].left and not self._is_last(self.open[0]):
            self._leave()

    def _waiting(self) -> int:
        return sum(page.left for page in self.open)

    def _is_last(self, page: _Open) -> bool:
        return bool(page.table.facts["ends_epoch"])

    def _leave(self) -> None:
        facts = self.open.popleft().table.facts
        self.counts.update({name: facts[name] for name in COUNTED})

    def _next_epoch(self) -> None:
        while self.open:
            self._leave()
        at = self.at
        at["epoch"], at["pass_rows"], at["epoch_rows"] = at["epoch"] + 1, at["epoch_rows"], 0

    # --- what is said of a step -------------------------------------------------------------------------------------

    def _epoch(self) -> float:
        """Epochs gone through; parts of one are known once a whole one has been."""
        at = self.at
        return at["epoch"] + (min(1.0, at["epoch_rows"] / at["pass_rows"]) if at["pass_rows"] else 0.0)

    def _facts(self) -> dict[str, Any]:
        """Counts of all pages that are used so far, the current one included."""
        now = self.open[0].table.facts if self.open else {}
        return {name: self.counts[name] + now.get(name, 0) for name in COUNTED}

    def _position(self) -> dict[str, Any]:
        at = {**self.at, "counts": dict(self.counts)}
        if not self.open:
            return {**at, "page": 0, "place": None, "row": 0, "check": None}
        page = self.open[0]
        facts = page.table.facts
        return {**at, "page": facts["page"], "place": facts["place"], "row": page.used, "check": facts["check"]}
