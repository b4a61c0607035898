"""Tokenizes the rows of a source in batches, in this process or in worker processes.

A batch's result depends on its rows alone, and results come in the order of the rows, so the tokens are the same for
any number of workers. Workers are new processes, not forks (this process may hold GPUs, process groups and threads).
They run `work` and end with this process.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt

from fullshard.config import errors
from fullshard.config.errors import DataError, UserError
from fullshard.data.encode import BATCH, TextSettings, encode_rows
from fullshard.data.raw_row import RawRow
from fullshard.data.row_formats import BadRows

WEIGHT = 4 << 20
"""Bytes of text or tokens after which a batch is full, however few its rows."""
PATIENCE = 5.0
"""Seconds to wait for a process to end."""


@dataclass(frozen=True)
class RowBatch:
    """Rows that are tokenized together."""

    rows: list[RawRow]
    ends_page: bool
    ends_data: bool


@dataclass(frozen=True)
class Chunk:
    """The tokenized documents of a batch, concatenated, and the counts of what was left out."""

    tokens: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    lengths: npt.NDArray[np.int32]
    """Tokens in each document; never 0."""
    targets: npt.NDArray[np.int32]
    """Tokens in each document that contribute to the loss. The first token is never predicted, so it does not count."""
    continues: npt.NDArray[np.bool_]
    """Whether each document continues the row of the one before it."""
    counts: Counter[str]
    bad_rows: BadRows
    """Why a few of the bad rows could not be parsed."""


def batch_rows(rows: Iterable[RawRow], page: int = 0) -> Iterator[RowBatch]:
    """Split rows into batches of at most `BATCH` rows. With `page`, every `page` rows end a batch.

    The last batch ends the data; it is the only one that may be empty.
    """
    batch: list[RawRow] = []
    weight, on_page = 0, 0
    for row in rows:
        full_page = on_page == page and page > 0
        if batch and (full_page or len(batch) == BATCH or weight >= WEIGHT):
            yield RowBatch(batch, full_page, False)
            batch, weight = [], 0
            on_page = 0 if full_page else on_page
        batch.append(row)
        weight += _weight(row.value)
        on_page += 1
    yield RowBatch(batch, True, True)


def _weight(value: Any) -> int:
    if isinstance(value, bytes | str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_weight, value.values()))
    if isinstance(value, list | tuple) and value:
        return 8 * len(value) if isinstance(value[0], int) else sum(map(_weight, value))
    return 8


def encode_chunk(rows: Sequence[RawRow], tokenizer: Any, settings: TextSettings) -> Chunk:
    """Tokenize the rows of a batch."""
    counts: Counter[Any] = Counter()
    encoded = list(encode_rows(rows, tokenizer, settings, counts))
    bad_rows: Any = counts.pop("bad_rows", [])
    if not encoded:
        nothing = np.empty(0, np.int32)
        return Chunk(nothing, np.empty(0, np.uint8), nothing, nothing, np.empty(0, np.bool_), counts, bad_rows)
    lengths = np.fromiter((len(one.tokens) for one in encoded), np.int32, len(encoded))
    tokens, loss_mask = (
        np.concatenate([one.tokens for one in encoded]),
        np.concatenate([one.loss_mask for one in encoded]),
    )
    continues = np.fromiter((one.continues for one in encoded), np.bool_, len(encoded))
    targets = count_targets(loss_mask, lengths)
    return Chunk(tokens.astype(np.int32, copy=False), loss_mask, lengths, targets, continues, counts, bad_rows)


def count_targets(loss_mask: npt.NDArray[np.uint8], lengths: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Tokens in each document that contribute to the loss, all but its first one."""
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    return np.add.reduceat(loss_mask, starts, dtype=np.int32) - loss_mask[starts]


class TokenizerPool:
    """Tokenizes batches in `workers` processes, or in this process if `workers` is 0."""

    def __init__(self, tokenizer: Any, settings: TextSettings, workers: int = 0) -> None:
        self.tokenizer, self.settings, self.workers = tokenizer, settings, workers
        self._processes: list[_Process] = []
        self._mine = threading.local()
        if not workers:
            return
        try:
            self._setup = pickle.dumps((tokenizer, settings))
        except Exception as error:
            raise DataError(
                f"dataloader_num_workers is {workers}, but a {type(tokenizer).__name__} cannot be sent to another "
                f"process ({error}); use 0."
            ) from None
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="fullshard-tokens")

    def chunks(self, batches: Iterable[RowBatch]) -> Iterator[tuple[RowBatch, Chunk]]:
        """Each batch with its chunk, in order. Workers process a few batches ahead."""
        if not self.workers:
            yield from ((batch, encode_chunk(batch.rows, self.tokenizer, self.settings)) for batch in batches)
            return
        pending: deque[tuple[RowBatch, Future[Chunk]]] = deque()
        for batch in batches:
            pending.append((batch, self._threads.submit(self._ask, batch.rows)))
            if len(pending) > 2 * self.workers:
                first, chunk = pending.popleft()
                yield first, chunk.result()
        for first, chunk in pending:
            yield first, chunk.result()

    def _ask(self, rows: list[RawRow]) -> Chunk:
        """Tokenize rows in this thread's worker process, which is started when first needed."""
        if not hasattr(self._mine, "process"):
            self._mine.process = _Process(self._setup)
            self._processes.append(self._mine.process)
        kind, value = self._mine.process.ask(rows)
        if kind is None:
            return value
        raise unpack_error(kind, value)

    def close(self) -> None:
        """End the worker processes."""
        if not self.workers:
            return
        for process in list(self._processes):
            process.end()  # first, since threads may be waiting for one
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            process.end()

    def __enter__(self) -> TokenizerPool:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


def pack_error(error: BaseException) -> tuple[str, str]:
    """An error as (class name, message), for another process."""
    if isinstance(error, UserError):
        return type(error).__name__, str(error)
    return DataError.__name__, f"the data cannot be read: {error!r}"


def unpack_error(kind: str, text: str) -> UserError:
    """The error that `pack_error` was given in another process."""
    error_class = getattr(errors, kind, DataError)
    return error_class(text)


class _Process:
    """A worker process."""

    def __init__(self, setup: bytes) -> None:
        self._link, there = Pipe()
        # The same module search path. The tokenizers library's own threads would compete with the other workers. A
        # separate process group, so that Ctrl-C reaches only this process, which then ends the worker.
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": os.pathsep.join(sys.path)}
        program = f"from {__name__} import work; work({there.fileno()}, {os.getpid()})"
        command = [sys.executable, "-P", "-c", program]
        self._process = subprocess.Popen(
            command, pass_fds=[there.fileno()], env=environment, stdin=subprocess.DEVNULL, process_group=0
        )
        there.close()
        self._link.send_bytes(setup)

    def ask(self, rows: list[RawRow]) -> tuple[str | None, Any]:
        try:
            self._link.send_bytes(pickle.dumps(rows))
            return pickle.loads(self._link.recv_bytes())
        except (EOFError, OSError):
            raise DataError(
                f"a tokenization worker (dataloader_num_workers) {self._fate()}; fewer workers need less memory."
            ) from None

    def _fate(self) -> str:
        try:
            code = self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            return "does not respond"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"exited with code {code}; see its output"

    def end(self) -> None:
        self._process.kill()  # it has no state to save
        self._process.wait()


# --- in a worker process --------------------------------------------------------------------------------------------

CHECK_INTERVAL = 1.0
"""Seconds between looks at whether the parent process is still there."""


def work(link: int, parent: int) -> None:
    """Receive a tokenizer and its settings, then tokenize batches of rows until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    pipe = Connection(link)
    answer: Any
    try:
        setup = pipe.recv_bytes()
        try:
            tokenizer, settings = pickle.loads(setup)
            failure = None
        except Exception as error:  # such as a class defined in the main program
            tokenizer = settings = None
            failure = ("DataError", f"dataloader_num_workers: the tokenizer cannot be used in another process: {error}")
        while True:
            rows = pickle.loads(pipe.recv_bytes())
            try:
                answer = failure or (None, encode_chunk(rows, tokenizer, settings))
            except Exception as error:
                answer = pack_error(error)
            pipe.send_bytes(pickle.dumps(answer))
    except (EOFError, OSError):
        return


def _end_with(parent: int) -> None:
    """Exit when the parent process is gone. The pipe may stay open, if another process has inherited it."""
    while os.getppid() == parent:
        time.sleep(CHECK_INTERVAL)
    os._exit(1)
