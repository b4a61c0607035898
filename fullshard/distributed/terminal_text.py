"""Text on the terminal. Whatever comes from elsewhere (data, answers of a model, names, errors) cannot control it, and
secrets that the run knows are hidden.

`print_text` is the only place where fullshard prints; tables and displays are drawn on a `Terminal` (`console.py`), log
lines pass `rank_logging.py`, and both use `visible` too. Only the standard library is imported here.
"""

from __future__ import annotations

import re
import sys
from typing import TextIO

from fullshard.config.redaction import hide
from fullshard.distributed.log_filter import own_line

_CONTROLS = re.compile(
    "["
    "\x00-\x08\x0b-\x1f"  # C0 (ESC, carriage return, backspace, …), without tab and line feed
    "\x7f-\x9f"  # DEL and C1, which some terminals take for ESC and a letter
    "\u00ad\u180e\u200b\u2060-\u2064\ufeff\ufff9-\ufffb\U000e0000-\U000e007f"  # invisible; joiners stay, for emoji
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u206f"  # bidirectional: shown in another order than it is
    "\u2028\u2029"  # line and paragraph separators
    "\ud800-\udfff"  # halves of surrogate pairs, which cannot be written
    "]"
)


def visible(text: str) -> str:
    """The text with control characters written out, as `\\x1b`: they cannot move the cursor, color, link, hide or
    reorder anything."""
    return _CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def print_text(text: str, file: TextIO | None = None, end: str = "\n", over_bar: bool = False) -> None:
    """Print text for the user, by default on stdout. With `over_bar`, a progress bar that another process draws on the
    line is erased first."""
    stream = sys.stdout if file is None else file
    print(f"{own_line(stream) if over_bar else ''}{visible(hide(text))}", file=stream, end=end, flush=True)
