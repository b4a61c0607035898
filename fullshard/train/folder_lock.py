"""One run at a time per folder: a lock that the system lets go of when its process ends, however it ends.

It is a record lock, which processes that this one starts do not inherit; so a run that was killed never keeps its
folder. Where a file system has no locks nothing can be told, and nobody is refused.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import platform
from pathlib import Path

from fullshard.errors import ConfigError

LOCK = ".lock"

_own: set[tuple[int, int]] = set()
"""The locks of this process. To close a second handle of such a file would give up the lock."""


class FolderLock:
    """The right to write to a run's folder, for the first rank alone."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOCK
        self._file = -1
        self._identity = (0, 0)

    def take(self) -> None:
        """Take the lock, or say which process has it."""
        refuse_occupied(self.path.parent)
        while True:
            file = os.open(self.path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
            if not _locked(file):
                os.close(file)
                refuse_occupied(self.path.parent)  # another process was quicker
                continue
            status = os.fstat(file)
            self._identity = (status.st_dev, status.st_ino)
            if _identity_of(self.path) == self._identity:  # else its last owner removed the file meanwhile
                break
            os.close(file)
        os.ftruncate(file, 0)
        os.write(file, f"process {os.getpid()} on {platform.node()}".encode())
        self._file = file
        _own.add(self._identity)

    def release(self) -> None:
        """Give the folder free. Calling it again changes nothing."""
        if self._file < 0:
            return
        with contextlib.suppress(OSError):
            self.path.unlink()
        os.close(self._file)
        _own.discard(self._identity)
        self._file = -1


def refuse_occupied(folder: Path) -> None:
    """Refuse a folder that another run writes to now."""
    if (owner := _owner(folder / LOCK)) is not None:
        raise ConfigError(
            f"output_dir: {folder} is in use by another run ({owner}); wait until it has ended, or choose another "
            f"folder."
        )


def _owner(path: Path) -> str | None:
    if _identity_of(path) in _own:
        return "in this process"
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return None if _locked(file) else os.read(file, 200).decode(errors="replace") or "a process that has just begun"
    finally:
        os.close(file)


def _identity_of(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _locked(file: int) -> bool:
    """Take a lock that is free; whether nobody else has it."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EACCES, errno.EAGAIN)
    return True
