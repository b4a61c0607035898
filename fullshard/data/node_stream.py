"""Shares the pages of a stream with all ranks of a node, through files.

A thread of the node's first rank reads and tokenizes the data (or has worker processes do it) and writes each page, a
small `TokenTable`, to a temporary directory. A page, or an error in its place, appears by one rename. Every rank
records how far it has read. No collective is needed, and a page is on disk only while a rank still needs it.
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

from fullshard.config.errors import DataError, UserError
from fullshard.data.encode import TextSettings
from fullshard.data.raw_row import RowPosition
from fullshard.data.row_formats import BAD
from fullshard.data.sources import DataSource
from fullshard.data.temp_dirs import TempDir, is_alive
from fullshard.data.token_table import CACHE_VARIABLE, LEFT_OUT, TableWriter, TokenTable, check_some, open_table
from fullshard.data.tokenize import RowBatch, TokenizerPool, batch_rows, pack_error, unpack_error
from fullshard.distributed import runtime

AHEAD = 4
"""Pages that are prepared ahead of the slowest reader."""
POLL_INTERVAL = 0.02
PATIENCE = 10.0
"""Seconds that the other ranks have to read the pages that the node's first rank has read."""
FINISHED = 2**62
"""The recorded page number of a reader that has finished."""
_MARK = struct.Struct("<q")
CHECK_INTERVAL = 1.0
"""Seconds between checks of a waiting reader that the page maker is alive."""


@dataclass(frozen=True)
class Pages:
    """The contents of a stream: source, tokenizer, settings and page size."""

    source: DataSource
    tokenizer: Any
    settings: TextSettings
    size: int
    """Source rows per page; the last page of an epoch may have fewer."""
    workers: int = 0


class PageMaker:
    """Makes pages from a position in the source on, repeating the source, until it is closed."""

    def __init__(self, pages: Pages, root: Path, epoch: int, page: int, place: RowPosition, readers: int) -> None:
        self._pages, self._readers = pages, readers
        self._start = (epoch, page, place)
        try:
            self._temp_dir = TempDir(root)
        except OSError as error:
            raise DataError(
                f"the token cache {root} of a stream cannot be written ({error.strerror or error}); set "
                f"{CACHE_VARIABLE} to another folder."
            ) from None
        self.folder = self._temp_dir.folder
        self._stop = threading.Event()
        self._number = self._removed = 0
        self._pool: TokenizerPool | None = None
        # A daemon thread: a program that ends without closing the stream must not wait for it.
        self._thread = threading.Thread(target=self._run, name="fullshard-stream", daemon=True)
        self._thread.start()

    def close(self, read: int) -> None:
        """Stop, end the worker processes, and remove the directory. The other ranks first get time to read the pages
        that this rank has `read`, so that an error in one of them is raised on every rank."""
        self._stop.set()
        if self._pool is not None:
            self._pool.close()  # the thread may be waiting for a busy or hanging worker
        self._thread.join()
        end = time.monotonic() + PATIENCE
        while min(_marks(self.folder, self._readers)) < read and time.monotonic() < end:
            time.sleep(POLL_INTERVAL)
        self._temp_dir.remove()

    def _run(self) -> None:
        try:
            # A copy: the program may use its tokenizer at the same time, and tokenizers are not thread-safe.
            tokenizer = copy.deepcopy(self._pages.tokenizer)
            with TokenizerPool(tokenizer, self._pages.settings, self._pages.workers) as self._pool:
                self._make(self._pool)
        except BaseException as error:
            if not self._stop.is_set():
                self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Write an error in place of the page that was being made."""
        if isinstance(error, OSError):
            error = DataError(f"{self.folder.parent}: a stream's tokens cannot be written ({error.strerror or error}).")
        if not isinstance(error, UserError):
            runtime.get_logger().error("the thread that reads the data failed", exc_info=error)
        try:
            part = self.folder / "error"
            part.write_text(json.dumps(pack_error(error)))
            part.rename(_error(self.folder, self._number))
        except OSError:
            self._temp_dir.remove()  # the disk is full: readers notice that the directory is gone

    def _make(self, pool: TokenizerPool) -> None:
        epoch, page, place = self._start
        totals: Counter[str] | None = Counter() if page == 0 else None  # only of an epoch read from its start
        writer: TableWriter | None = None
        for batch, chunk in pool.chunks(self._batches()):
            if writer is None:
                if not self._wait():
                    return
                part = self.folder / "part"
                part.mkdir()
                writer = TableWriter(part, self._pages.settings, self._pages.source.name)
            if self._stop.is_set():
                return
            writer.add(chunk)
            if not batch.ends_page:
                continue
            facts = writer.finish(epoch=epoch, page=page, place=place, ends_epoch=batch.ends_data)
            if totals is not None:
                counted = ("documents", "targets", *LEFT_OUT, *(name for name in facts if name.startswith(BAD)))
                totals.update({name: facts[name] for name in counted})
            if batch.ends_data:
                if totals is not None:  # else the stream would repeat forever without a row
                    shown = {name: facts[name] for name in ("source", "bad_rows")}
                    check_some({**shown, **totals}, self._pages.settings)
                totals = Counter()
            (self.folder / "part").rename(_page(self.folder, self._number))
            self._number, writer = self._number + 1, None
            epoch, page, place = (epoch + 1, 0, None) if batch.ends_data else (epoch, page + 1, batch.rows[-1].after)

    def _batches(self) -> Iterator[RowBatch]:
        place = self._start[2]
        while not self._stop.is_set():
            yield from batch_rows(self._pages.source.rows(place), self._pages.size)
            place = None

    def _wait(self) -> bool:
        """Remove pages that all ranks have read, and wait until another page is needed; False if the stream was
        closed."""
        while True:
            read = min(self._number, *_marks(self.folder, self._readers))
            for number in range(self._removed, read):
                shutil.rmtree(_page(self.folder, number), ignore_errors=True)
            self._removed = read
            if self._number < read + AHEAD:
                return not self._stop.is_set()
            if self._stop.wait(POLL_INTERVAL):
                return False


class PageReader:
    """Reads the pages of this node's `PageMaker` in order."""

    def __init__(self, folder: Path, reader: int) -> None:
        self.folder, self.number = folder, 0
        # Kept open: opening it by name could recreate a file in a directory that is being removed.
        self._marks: int | None = None
        with contextlib.suppress(FileNotFoundError):  # the maker is gone: reading the first page raises
            self._marks = os.open(folder / f"reader-{reader}", os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)

    def close(self) -> None:
        """Stop reading; the process that makes the pages no longer waits for this reader."""
        if self._marks is not None:
            with contextlib.suppress(DataError):  # the disk is full: the maker stops waiting after PATIENCE
                self._mark(FINISHED)
            os.close(self._marks)
            self._marks = None

    def read(self) -> TokenTable:
        """The next page; raises the error if there is one in its place."""
        pause, next_check = 0.001, time.monotonic() + CHECK_INTERVAL
        while True:
            page = _page(self.folder, self.number)
            is_there = page.exists()
            table = open_table(page)
            if is_there and table is None and page.exists():  # else its maker has just removed it
                raise DataError(f"the tokens in {page} are damaged: its files are not as they were written.")
            if table is not None:
                self.number += 1
                self._mark(self.number)
                return table
            with contextlib.suppress(FileNotFoundError):
                failure = unpack_error(*json.loads(_error(self.folder, self.number).read_text()))
                self.number += 1
                self._mark(self.number)
                raise failure
            if time.monotonic() > next_check:
                if not is_alive(self.folder):
                    raise DataError(
                        "the stream of training data has ended: the node's first rank, which reads it, has exited or "
                        f"could not write to {self.folder.parent}."
                    )
                next_check = time.monotonic() + CHECK_INTERVAL
            time.sleep(pause)
            pause = min(POLL_INTERVAL, pause * 1.5)

    def _mark(self, number: int) -> None:
        """Record how many pages this rank has opened. The files of an open page can be deleted."""
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
