"""Ends what a launcher leaves behind when it is killed: its ranks, even stopped ones, their children and its folder.

A process of its own, `guard.py FOLDER`. It reads the process groups of the ranks from a pipe that only the launcher
holds; once the pipe is closed, by a launcher that ends for whatever reason, it kills the groups of the last line.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence


class Guard:
    """The launcher's side."""

    def __init__(self, folder: str):
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, folder], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, start_new_session=True, text=True,
        )  # fmt: skip

    def watch(self, groups: Sequence[int]) -> None:
        """Kill these process groups if the launcher ends from now on."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(" ".join(map(str, groups)) + "\n")
            self._process.stdin.flush()

    def end(self) -> None:
        """End the guard; what it watches has ended."""
        self.watch([])
        with contextlib.suppress(OSError):
            self._process.communicate()


def main(folder: str) -> None:
    """Wait for the launcher's end."""
    groups: list[str] = []
    for line in sys.stdin:
        groups = line.split()
    for group in groups:
        with contextlib.suppress(OSError):
            os.killpg(int(group), signal.SIGKILL)
    if groups:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1])
