"""How far work has come: lines that move on the first rank's terminal and go away; for loading and writing a bar with
bytes and rate. What else there is to show is its owner's business."""

from __future__ import annotations

import os
import sys
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from fullshard import runtime


def shown_as(progress: str) -> str:
    """What the option `progress` comes to here: live, plain, json or quiet."""
    moves = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    live = moves if progress == "auto" else progress == "live"
    return progress if progress in ("json", "quiet") else "live" if live else "plain"


class Terminal(Console):
    """The terminal, with its cursor left alone: a process that is killed could not bring a hidden one back."""

    def show_cursor(self, show: bool = True) -> bool:
        return False


class Moving:
    """Something that moves on the terminal, where there is one, and goes away when it is done."""

    _bar: Progress | None = None

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._bar is not None:
            self._bar.stop()


class Bar(Moving):
    """A progress bar."""

    def __init__(self, what: str, total: int, wanted: bool = True):
        console = Terminal(stderr=True)
        if wanted and runtime.is_main() and console.is_terminal:
            columns = (TextColumn(what), BarColumn(20), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=console, transient=True)
            self._task = self._bar.add_task(what, total=total)

    def at(self, done: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=done)
