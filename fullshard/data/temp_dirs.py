"""Folders that live no longer than the process that made them.

A lock beside the folder says that its maker is alive: the system lets go of it when the process ends, however it ends,
so what a killed process left behind is known, and is removed by the next that works in the same place.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import uuid
from pathlib import Path
from typing import Any

PREFIX = "scratch-"
LOCK, GONE = ".lock", ".gone"


class TempDir:
    """A new folder under `root`, removed by `remove()`. Leftovers of processes that are gone are removed first."""

    def __init__(self, root: Path) -> None:
        root.mkdir(parents=True, exist_ok=True)
        _sweep(root)
        self.folder = root / f"{PREFIX}{uuid.uuid4().hex[:16]}"
        self._lock = os.open(_lock_of(self.folder), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        _try_lock(self._lock, fcntl.LOCK_EX)
        self.folder.mkdir()

    def remove(self) -> None:
        """Remove the folder, if it is still there, and give up the lock. Calling it again changes nothing."""
        _remove(self.folder)
        if self._lock >= 0:
            _lock_of(self.folder).unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> TempDir:
        return self

    def __exit__(self, *error: Any) -> None:
        self.remove()


def is_alive(folder: Path) -> bool:
    """Whether the process that made a scratch folder still has it."""
    try:
        lock = os.open(_lock_of(folder), os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:
        return True  # cannot be told
    try:
        return not _try_lock(lock, fcntl.LOCK_SH)
    finally:
        os.close(lock)


def _sweep(root: Path) -> None:
    for path in root.glob(f"{PREFIX}{'[0-9a-f]' * 16}{LOCK}"):
        folder = path.with_name(path.name.removesuffix(LOCK))
        # A lock that has no folder yet may belong to a process that is about to take it.
        if (folder.exists() or _gone(folder).exists()) and not is_alive(folder):
            _remove(folder)
            path.unlink(missing_ok=True)


def _remove(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rename(_gone(folder))  # under another name nobody puts anything into it while it is emptied
    shutil.rmtree(_gone(folder), ignore_errors=True)


def _gone(folder: Path) -> Path:
    return folder.with_name(folder.name + GONE)


def _lock_of(folder: Path) -> Path:
    return folder.with_name(folder.name + LOCK)


def _try_lock(file: int, kind: int) -> bool:
    """Take a lock that is free. Where the file system has no locks nothing counts as free, so nothing is removed."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
        return True
    except OSError:
        return False
