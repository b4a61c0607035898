"""Formats metrics for the terminal: one line per logged step, and a progress bar below them.

Columns have fixed widths, so that numbers are aligned. They are ordered by importance: a narrow terminal shows the
first ones that fit. A pipe or a file has no width and gets all of them.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

COLUMNS = {
    "loss": ("loss", "{:6.4f}"),
    "learning_rate": ("lr", "{:8.2e}"),
    "grad_norm": ("grad norm", "{:6.3f}"),
    "mean_token_accuracy": ("acc", "{:5.3f}"),
    "tokens_per_second": ("tok/s", "{:7,.0f}"),
    "memory_gib": ("GiB", "{:5.2f}"),
}
IN_BAR = ("loss", "tokens_per_second", "memory_gib")
BAR_WIDTH = 12


def columns(values: Mapping[str, Any], names: Sequence[str] = tuple(COLUMNS)) -> list[str]:
    """Training metrics as text, each with its name."""
    return [f"{COLUMNS[key][0]} {COLUMNS[key][1].format(values[key])}" for key in names if key in values]


def evaluation_columns(values: Mapping[str, Any]) -> list[str]:
    """Evaluation metrics as text, with any prefix; empty for training metrics."""
    prefix = next((key.removesuffix("_loss") for key in values if key.endswith("_loss")), None)
    if prefix is None or "loss" in values:
        return []
    own = {key.removeprefix(f"{prefix}_"): value for key, value in values.items()}
    first, *others = columns(own, ("loss", "mean_token_accuracy"))
    return [f"{prefix} {first}", *others, *([f"epoch {values['epoch']:.2f}"] if "epoch" in values else [])]


def step_line(step: int, total: int, values: Mapping[str, Any], left: str = "", width: int | None = None) -> str:
    """The line for a step: its number, then the columns that fit."""
    numbers = evaluation_columns(values) or columns(values)
    return fit_parts([f"step {step:>{len(str(total))}}/{total}", *numbers, *([f"ETA {left}"] if left else [])], width)


def fit_parts(parts: Sequence[str], width: int | None) -> str:
    """The first parts that fit into the width, at least one; None means no limit."""
    shown = parts[0]
    for part in parts[1:]:
        if width is not None and len(shown) + 2 + len(part) > width:
            break
        shown = f"{shown}  {part}"
    return shown


def width_of_stdout() -> int | None:
    """The width of the terminal; None if stdout is not a terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


class Clock:
    """Estimates the remaining time from the steps so far."""

    def __init__(self, total: int, step: int) -> None:
        self.total, self._first, self._began = total, step, time.monotonic()

    def left(self, step: int) -> str:
        """The remaining time as H:MM:SS; empty before the first step and after the last."""
        done = step - self._first
        if done <= 0 or step >= self.total:
            return ""
        return str(timedelta(seconds=round((time.monotonic() - self._began) / done * (self.total - step))))


class LiveBar:
    """A progress bar at the bottom of the terminal; other lines are printed above it."""

    def __init__(self, clock: Clock, step: int) -> None:
        from rich.progress import BarColumn, Progress, TextColumn

        from fullshard.distributed.console import Terminal

        self._clock = clock
        columns = (BarColumn(bar_width=BAR_WIDTH), TextColumn("{task.description}", markup=False))
        self._progress = Progress(*columns, console=Terminal())
        self._task = self._progress.add_task(f"{step}/{clock.total}", total=clock.total, completed=step)
        self._progress.start()

    @property
    def width(self) -> int:
        """The width of the terminal."""
        return self._progress.console.width

    def move(self, step: int, values: Mapping[str, Any]) -> None:
        """Show a step and its metrics."""
        left = self._clock.left(step)
        parts = [f"{step}/{self._clock.total}", *([f"ETA {left}"] if left else []), *columns(values, IN_BAR)]
        # rich would shorten the bar to make room for a long text.
        text = fit_parts(parts, self.width - BAR_WIDTH - 1)
        self._progress.update(self._task, completed=step, description=text)

    def print_above(self, text: str) -> None:
        """Print text above the bar."""
        self._progress.console.print(text, soft_wrap=True)

    def close(self) -> None:
        """End the display."""
        self._progress.stop()
