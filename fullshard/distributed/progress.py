"""Progress on rank 0's terminal: a bar with bytes and rate for loading and writing, a line for tokenizing.

Both are erased when the work is done. Where stdout is not a terminal, tokenizing prints a plain line now and then.
Training's own display is in `report/terminal.py`.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any, Self

from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from fullshard.distributed import runtime
from fullshard.distributed.console import Terminal
from fullshard.distributed.terminal_text import print_text, visible

PLAIN_LINE_EVERY = 10.0
"""Seconds between plain lines; shorter work prints none."""


def resolve_progress(progress: str) -> str:
    """The display that the option `progress` selects here: live, plain, json or quiet."""
    moves = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    live = moves if progress == "auto" else progress == "live"
    return progress if progress in ("json", "quiet") else "live" if live else "plain"


class _Display:
    """A live display, where there is a terminal; erased at the end."""

    _bar: Progress | None = None

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._bar is not None:
            self._bar.stop()


class Bar(_Display):
    """A progress bar that counts bytes."""

    def __init__(self, what: str, total: int, enabled: bool = True):
        console = Terminal(stderr=True)
        if enabled and runtime.is_main() and console.is_terminal:
            columns = (
                TextColumn(what, markup=False),
                BarColumn(20),
                DownloadColumn(),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=console, transient=True)
            self._task = self._bar.add_task(what, total=total)

    def at(self, done: int) -> None:
        """Show that `done` bytes are finished."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done)

    def advance(self, more: int) -> None:
        """Show that `more` bytes are finished."""
        if self._bar is not None:
            self._bar.update(self._task, advance=more)


class TokenizingProgress(_Display):
    """Counts rows and tokens and shows them as the option `progress` selects."""

    def __init__(self, name: str, progress: str) -> None:
        self.name, self.rows, self.tokens = visible(name), 0, 0
        mode = resolve_progress(progress) if runtime.is_main() else "quiet"
        self._started = self._printed = time.monotonic()
        self._plain = mode == "plain"
        if mode == "live":
            self._bar = Progress(
                SpinnerColumn(), TextColumn("{task.description}", markup=False), console=Terminal(), transient=True
            )
            self._task = self._bar.add_task(f"tokenizing {self.name}", total=None)

    def __call__(self, rows: int, tokens: int) -> None:
        self.rows, self.tokens = self.rows + rows, self.tokens + tokens
        if self._bar is not None:
            self._bar.update(self._task, description=self._line())
        elif self._plain and time.monotonic() > self._printed + PLAIN_LINE_EVERY:
            self._printed = time.monotonic()
            print_text(self._line())

    def _line(self) -> str:
        rate = self.tokens / max(1e-9, time.monotonic() - self._started)
        return f"tokenizing {self.name}: {self.rows:,} rows, {self.tokens:,} tokens, {rate:,.0f} tok/s"
