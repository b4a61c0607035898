"""How a run's numbers look on the terminal: lines that stay, and a bar below them that moves with the steps.

Columns have fixed widths, so that numbers stand below each other. They come in the order of their importance: a
terminal that is too narrow for all of them shows the first ones. A pipe or a file has no width and gets them all.
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
    """Numbers of training, each with its name."""
    return [f"{COLUMNS[key][0]} {COLUMNS[key][1].format(values[key])}" for key in names if key in values]


def evaluation_columns(values: Mapping[str, Any]) -> list[str]:
    """Numbers of an evaluation, by whatever prefix it was asked for; nothing for those of training."""
    prefix = next((key.removesuffix("_loss") for key in values if key.endswith("_loss")), None)
    if prefix is None:
        return []
    own = {key.removeprefix(f"{prefix}_"): value for key, value in values.items()}
    first, *others = columns(own, ("loss", "mean_token_accuracy"))
    return [f"{prefix} {first}", *others, *([f"epoch {values['epoch']:.2f}"] if "epoch" in values else [])]


def step_line(step: int, total: int, values: Mapping[str, Any], left: str = "", width: int | None = None) -> str:
    """What is shown of a step: its number, then its columns as far as they fit."""
    numbers = evaluation_columns(values) or columns(values)
    return fitted([f"step {step:>{len(str(total))}}/{total}", *numbers, *([f"ETA {left}"] if left else [])], width)


def fitted(parts: Sequence[str], width: int | None) -> str:
    """The first parts that fit into the width, at least one; None is any width."""
    shown = parts[0]
    for part in parts[1:]:
        if width is not None and len(shown) + 2 + len(part) > width:
            break
        shown = f"{shown}  {part}"
    return shown


def width_of_stdout() -> int | None:
    """Columns of the terminal that stdout is; None where it is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


class Clock:
    """The time that is left, from the steps since the start."""

    def __init__(self, total: int, step: int) -> None:
        self.total, self._first, self._began = total, step, time.monotonic()

    def left(self, step: int) -> str:
        done = step - self._first
        if done <= 0 or step >= self.total:
            return ""
        return str(timedelta(seconds=round((time.monotonic() - self._began) / done * (self.total - step))))


class LiveBar:
    """A line at the bottom of the terminal that moves with the steps; other lines appear above it."""

    def __init__(self, clock: Clock, step: int) -> None:
        from rich.progress import BarColumn, Progress, TextColumn

        from fullshard.progress import Terminal

        self._clock = clock
        columns = (BarColumn(bar_width=BAR_WIDTH), TextColumn("{task.description}", markup=False))
        self._progress = Progress(*columns, console=Terminal())
        self._task = self._progress.add_task(f"{step}/{clock.total}", total=clock.total, completed=step)
        self._progress.start()

    @property
    def width(self) -> int:
        return self._progress.console.width

    def move(self, step: int, values: Mapping[str, Any]) -> None:
        left = self._clock.left(step)
        parts = [f"{step}/{self._clock.total}", *([f"ETA {left}"] if left else []), *columns(values, IN_BAR)]
        # The bar would give way to a text that is too long.
        text = fitted(parts, self.width - BAR_WIDTH - 1)
        self._progress.update(self._task, completed=step, description=text)

    def say(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._progress.stop()
