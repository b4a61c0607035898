"""How far loading or writing has come: a bar with bytes and rate on the first rank's terminal, nothing elsewhere."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from fullshard import runtime


class Bar:
    """A progress bar that goes away when it is done."""

    def __init__(self, what: str, total: int, wanted: bool = True):
        console = Console(stderr=True)
        self._bar: Progress | None = None
        if wanted and runtime.is_main() and console.is_terminal:
            columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=console, transient=True)
            self._task = self._bar.add_task(what, total=total)

    def at(self, done: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=done)

    def __enter__(self) -> Bar:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._bar is not None:
            self._bar.stop()
