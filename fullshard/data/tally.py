"""How far tokenising has come: a line that moves on the first rank's terminal, elsewhere a plain line now and then."""

from __future__ import annotations

import time

from rich.progress import Progress, SpinnerColumn, TextColumn

from fullshard import runtime
from fullshard.progress import Moving, Terminal, shown_as

SAYS_EVERY = 10.0
"""Seconds between plain lines; shorter work says nothing."""


class Tally(Moving):
    """Counts rows and tokens and shows them as the option `progress` says; it is gone when all is done."""

    def __init__(self, name: str, progress: str) -> None:
        self.name, self.rows, self.tokens = name, 0, 0
        mode = shown_as(progress) if runtime.is_main() else "quiet"
        self._began = self._said = time.monotonic()
        self._plain = mode == "plain"
        if mode == "live":
            self._bar = Progress(
                SpinnerColumn(), TextColumn("{task.description}", markup=False), console=Terminal(), transient=True
            )
            self._task = self._bar.add_task(f"tokenising {name}", total=None)

    def __call__(self, rows: int, tokens: int) -> None:
        self.rows, self.tokens = self.rows + rows, self.tokens + tokens
        if self._bar is not None:
            self._bar.update(self._task, description=self._line())
        elif self._plain and time.monotonic() > self._said + SAYS_EVERY:
            self._said = time.monotonic()
            print(self._line(), flush=True)

    def _line(self) -> str:
        rate = self.tokens / max(1e-9, time.monotonic() - self._began)
        return f"tokenising {self.name}: {self.rows:,} rows, {self.tokens:,} tokens, {rate:,.0f} tok/s"
