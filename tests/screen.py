"""Terminals for tests: one to write to, and what stands on the screen then, line by line."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import threading
from typing import Self, TextIO

PARTS = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|([\r\n])|([^\x1b\r\n]+)")


def screen(written: str, width: int) -> list[str]:
    """The lines of a terminal of this width, with those that have scrolled off. A line that is too long is wrapped."""
    lines, row, column = [""], 0, 0
    for number, code, motion, text in PARTS.findall(written):
        if code == "A":
            row = max(0, row - int(number or 1))
        elif code == "K" and number == "2":
            lines[row] = ""
        elif code:
            assert code in "mlh", f"a code that this terminal does not know: {number}{code}"
        elif motion == "\r":
            column = 0
        elif motion == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        for character in text:
            if column == width:
                row, column = row + 1, 0
                lines += [""] * (row + 1 - len(lines))
            lines[row] = lines[row][:column].ljust(column) + character + lines[row][column + 1 :]
            column += 1
    return [line.rstrip() for line in lines]


class Window:
    """A pseudo-terminal in this process: `file` is written to, `written` is what has arrived when it is closed."""

    def __init__(self) -> None:
        self._main, side = pty.openpty()
        self.file: TextIO = os.fdopen(side, "w")
        self.written = ""
        self._reader = threading.Thread(target=self._read)

    def _read(self) -> None:
        found = b""
        with contextlib.suppress(OSError):  # the other side is closed
            while part := os.read(self._main, 4096):
                found += part
        self.written = found.decode()

    def __enter__(self) -> Self:
        self._reader.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()
        self._reader.join()
        os.close(self._main)
