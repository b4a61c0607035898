"""Temporary directories that do not outlive their process.

A lock file next to the directory shows that its process is alive: the system releases the lock however the process
ends. So directories of killed processes are recognized, and removed by the next process that uses the same root.
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
LOCK, DELETED = ".lock", ".gone"


class TempDir:
    """A new directory under `root`, removed by `remove()`. Removes leftovers of dead processes first."""

    def __init__(self, root: Path) -> None:
        root.mkdir(parents=True, exist_ok=True)
        _sweep(root)
        self.folder = root / f"{PREFIX}{uuid.uuid4().hex[:16]}"
        self._lock = os.open(_lock_of(self.folder), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        _try_lock(self._lock, fcntl.LOCK_EX)
        self.folder.mkdir()

    def remove(self) -> None:
        """Remove the directory, if it still exists, and release the lock. Can be called more than once."""
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
    """Whether the process that created a temporary directory is still alive."""
    try:
        lock = os.open(_lock_of(folder), os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:
        return True  # unknown: assume that it is
    try:
        return not _try_lock(lock, fcntl.LOCK_SH)
    finally:
        os.close(lock)


def _sweep(root: Path) -> None:
    for path in root.glob(f"{PREFIX}{'[0-9a-f]' * 16}{LOCK}"):
        folder = path.with_name(path.name.removesuffix(LOCK))
        # A lock without a directory may belong to a process that is about to create it.
        if (folder.exists() or _deleted_name(folder).exists()) and not is_alive(folder):
            _remove(folder)
            path.unlink(missing_ok=True)


def _remove(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rename(_deleted_name(folder))  # under another name, nothing is added while it is deleted
    shutil.rmtree(_deleted_name(folder), ignore_errors=True)


def _deleted_name(folder: Path) -> Path:
    return folder.with_name(folder.name + DELETED)


def _lock_of(folder: Path) -> Path:
    return folder.with_name(folder.name + LOCK)


def _try_lock(file: int, kind: int) -> bool:
    """Try to acquire a lock. On file systems without locks this fails, so that nothing is removed."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
        return True
    except OSError:
        return False
