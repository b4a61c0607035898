"""The terminal for tables and displays, drawn by rich. Text on it is foreign: no markup, no control characters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from fullshard.distributed.terminal_text import visible


class Terminal(Console):
    """A console that takes text as it is, and a terminal with a visible cursor: a process that is killed could not
    bring a hidden one back."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, "highlight": False, "emoji": False, **options})

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The segments of what is drawn; only rich's own cursor movements contain control characters."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))

    def show_cursor(self, show: bool = True) -> bool:
        """Nothing: the cursor stays visible."""
        return False
