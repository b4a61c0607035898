"""A lock on a run's folder: one run at a time. The system releases it when the process ends, however it ends.

It is a record lock, which child processes do not inherit, so a killed run never keeps its folder locked. On a file
system without locks nothing is detected, and no run is refused.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import platform
from pathlib import Path

from fullshard.config.errors import ConfigError

LOCK = ".lock"

_own: dict[tuple[int, int], list[int]] = {}
"""The locks of this process: the file handle, and how often each lock was taken. Closing a second handle of the same
file would release the lock."""


class FolderLock:
    """The lock of one run's folder, for the first rank alone. The process that holds it may take it again."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOCK
        self._identity: tuple[int, int] | None = None

    def take(self) -> None:
        """Take the lock; an error names the process that holds it."""
        there = _identity_of(self.path)
        if there in _own:
            _own[there][1] += 1
            self._identity = there
            return
        while True:
            file = os.open(self.path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666)
            if not _locked(file, fcntl.LOCK_EX):
                os.close(file)
                refuse_occupied(self.path.parent)
                continue  # it was released meanwhile
            status = os.fstat(file)
            taken = (status.st_dev, status.st_ino)
            if _identity_of(self.path) == taken:  # else its last owner removed the file meanwhile
                break
            os.close(file)
        os.ftruncate(file, 0)
        os.write(file, f"process {os.getpid()} on {platform.node()}".encode())
        self._identity = taken
        _own[taken] = [file, 1]

    def release(self) -> None:
        """Release the lock, if this was the last to hold it. Calling it again changes nothing."""
        if self._identity is None:
            return
        held, self._identity = self._identity, None
        _own[held][1] -= 1
        if _own[held][1] == 0:
            with contextlib.suppress(OSError):
                self.path.unlink()
            os.close(_own.pop(held)[0])


def refuse_occupied(folder: Path) -> None:
    """Refuse a folder that another run is writing to."""
    if (owner := owner_of(folder)) is not None:
        raise ConfigError(
            f"output_dir: {folder} is in use by another run ({owner}); wait until it has ended, or choose another "
            f"folder."
        )


def owner_of(folder: Path) -> str | None:
    """The other process that holds the lock of a folder, in words; None if there is none. Reading rights are enough."""
    path = folder / LOCK
    if _identity_of(path) in _own:
        return None
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if _locked(file, fcntl.LOCK_SH):  # shared: several processes may ask at once
            return None
        return os.read(file, 200).decode(errors="replace") or "a process that has just started"
    finally:
        os.close(file)


def _identity_of(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _locked(file: int, kind: int) -> bool:
    """Take a lock if it is free. Returns false if another process has it."""
    try:
        fcntl.lockf(file, kind | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EACCES, errno.EAGAIN)
    return True
