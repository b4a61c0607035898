"""Pages of a stream on their way from the rank that makes them to all ranks of its node.

One thread of the node's first rank reads, tokenises (or has worker processes do it) and writes each page, a small
`TokenTable`, into a folder of its own; a page, or the error that stands in its place, appears by one rename. Every rank
marks how far it has read. Nobody waits in a collective, and a page is on disk only while somebody needs it.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import shutil
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullshard import runtime
from fullshard.data.encode import TextSettings
from fullshard.data.raw_row import RowPosition
from fullshard.data.sources import DataSource
from fullshard.data.temp_dirs import TempDir, is_alive
from fullshard.data.token_table import CACHE_VARIABLE, TableWriter, TokenTable, check_some, open_table
from fullshard.data.tokenize import RowBatch, TokenizerPool, batch_rows, pack_error, unpack_error
from fullshard.errors import DataError, UserError

AHEAD = 4
"""Pages that are ready or in the making before the slowest reader."""
POLLS_EVERY = 0.02
PATIENCE = 10.0
"""Seconds the other ranks get to read what the node's first rank has read."""
LEFT = 2**62
"""The mark of a reader that wants no more."""
_MARK = struct.Struct("<q")
LOOKS_EVERY = 1.0
"""Seconds after which a reader that waits looks whether anybody is at work."""


@dataclass(frozen=True)
class Pages:
    """What a stream is made of."""

    source: DataSource
    tokenizer: Any
    settings: TextSettings
    size: int
    """Rows of the source in a page; the last page of an epoch may have fewer."""
    workers: int = 0


class PageMaker:
    """Makes pages from a place in the source on, over and over, until it is closed."""

    def __init__(self, pages: Pages, root: Path, epoch: int, page: int, place: RowPosition, readers: int) -> None:
        self._pages, self._readers = pages, readers
        self._start = (epoch, page, place)
        try:
            self._scratch = TempDir(root)
        except OSError as error:
            raise DataError(
                f"the folder {root}, where a stream's tokens go, cannot be written ({error.strerror or error}); "
                f"{CACHE_VARIABLE} names another."
            ) from None
        self.folder = self._scratch.folder
        self._stop = threading.Event()
        self._number = self._removed = 0
        self._tokenizing: TokenizerPool | None = None
        # Daemon: a program that ends without closing must not wait for it.
        self._thread = threading.Thread(target=self._run, name="fullshard-stream", daemon=True)
        self._thread.start()

    def close(self, read: int) -> None:
        """Stop, end the worker processes, remove the folder. The other ranks first get to what this one has `read`: a
        page that it refuses, or an error in the place of a page, is theirs to meet too."""
        self._stop.set()
        if self._tokenizing is not None:
            self._tokenizing.close()  # the thread may be waiting for a worker that is busy, or stuck
        self._thread.join()
        end = time.monotonic() + PATIENCE
        while min(_marks(self.folder, self._readers)) < read and time.monotonic() < end:
            time.sleep(POLLS_EVERY)
        self._scratch.remove()

    def _run(self) -> None:
        try:
            # A copy: the program may use its tokenizer meanwhile, and tokenizers are not made for two threads.
            tokenizer = copy.deepcopy(self._pages.tokenizer)
            with TokenizerPool(tokenizer, self._pages.settings, self._pages.workers) as self._tokenizing:
                self._make(self._tokenizing)
        except BaseException as error:
            if not self._stop.is_set():
                self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Put an error in the place of the page that was being made."""
        if isinstance(error, OSError):
            error = DataError(f"{self.folder.parent}: a stream's tokens cannot be written ({error.strerror or error}).")
        if not isinstance(error, UserError):
            runtime.get_logger().error("the thread that reads the data failed", exc_info=error)
        try:
            part = self.folder / "error"
            part.write_text(json.dumps(pack_error(error)))
            part.rename(_error(self.folder, self._number))
        except OSError:
            self._scratch.remove()  # a full disk: readers see that nobody is at work

    def _make(self, tokenizing: TokenizerPool) -> None:
        epoch, page, place = self._start
        totals: Counter[str] | None = Counter() if page == 0 else None  # of an epoch that is seen whole
        writer: TableWriter | None = None
        for call, chunk in tokenizing.chunks(self._calls()):
            if writer is None:
                if not self._wait():
                    return
                part = self.folder / "part"
                part.mkdir()
                writer = TableWriter(part, self._pages.settings, self._pages.source.name)
            if self._stop.is_set():
                return
            writer.add(chunk)
            if not call.ends_page:
                continue
            facts = writer.finish(epoch=epoch, page=page, place=place, ends_epoch=call.ends_data)
            if totals is not None:
                totals.update({name: facts[name] for name in ("documents", "targets", "empty", "bad", "dropped")})
            if call.ends_data:
                if totals is not None:  # or the stream would go round and round without a row
                    check_some({"source": facts["source"], **totals}, self._pages.settings)
                totals = Counter()
            (self.folder / "part").rename(_page(self.folder, self._number))
            self._number, writer = self._number + 1, None
            epoch, page, place = (epoch + 1, 0, None) if call.ends_data else (epoch, page + 1, call.rows[-1].after)

    def _calls(self) -> Iterator[RowBatch]:
        place = self._start[2]
        while not self._stop.is_set():
            yield from batch_rows(self._pages.source.rows(place), self._pages.size)
            place = None

    def _wait(self) -> bool:
        """Remove what everybody has read, and wait until another page is wanted; whether one is."""
        while True:
            read = min(self._number, *_marks(self.folder, self._readers))
            for number in range(self._removed, read):
                shutil.rmtree(_page(self.folder, number), ignore_errors=True)
            self._removed = read
            if self._number < read + AHEAD:
                return not self._stop.is_set()
            if self._stop.wait(POLLS_EVERY):
                return False


class PageReader:
    """The pages that a maker on this node makes, one after the other."""

    def __init__(self, folder: Path, reader: int) -> None:
        self.folder, self.number = folder, 0
        # Held open: a mark that were written by name could come into a folder that is being removed.
        self._marks: int | None = None
        with contextlib.suppress(FileNotFoundError):  # the maker is gone: the first page will say so
            self._marks = os.open(folder / f"reader-{reader}", os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)

    def close(self) -> None:
        if self._marks is not None:
            with contextlib.suppress(DataError):  # a full disk: the maker's patience ends
                self._mark(LEFT)
            os.close(self._marks)
            self._marks = None

    def read(self) -> TokenTable:
        """The next page, or the error that stands in its place."""
        pause, looks = 0.001, time.monotonic() + LOOKS_EVERY
        while True:
            table = open_table(_page(self.folder, self.number))
            if table is not None:
                self.number += 1
                self._mark(self.number)
                return table
            with contextlib.suppress(FileNotFoundError):
                failure = unpack_error(*json.loads(_error(self.folder, self.number).read_text()))
                self.number += 1
                self._mark(self.number)
                raise failure
            if time.monotonic() > looks:
                if not is_alive(self.folder):
                    raise DataError(
                        "the stream of training data has ended: the node's first rank, which reads it, is gone or "
                        f"could not write to {self.folder.parent}."
                    )
                looks = time.monotonic() + LOOKS_EVERY
            time.sleep(pause)
            pause = min(POLLS_EVERY, pause * 1.5)

    def _mark(self, number: int) -> None:
        """Say how many pages this rank has opened. An open page needs no name any more."""
        if self._marks is None:
            return
        try:
            os.pwrite(self._marks, _MARK.pack(number), 0)
        except OSError as error:
            raise DataError(f"{self.folder} cannot be written: {error.strerror or error}.") from None


def _marks(folder: Path, readers: int) -> list[int]:
    marks = []
    for reader in range(readers):
        try:
            marks.append(_MARK.unpack((folder / f"reader-{reader}").read_bytes())[0])
        except (OSError, struct.error):
            marks.append(0)
    return marks


def _page(folder: Path, number: int) -> Path:
    return folder / f"page-{number:08}"


def _error(folder: Path, number: int) -> Path:
    return folder / f"error-{number:08}.json"
