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

_own: dict[tuple[int, int], list[int]] = {}
"""The locks of this process: its handle, and how often each was taken. To close a second handle of such a file would
give up the lock."""


class FolderLock:
    """The right to write to a run's folder, for the first rank alone. The process that has it may take it again."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOCK
        self._identity: tuple[int, int] | None = None

    def take(self) -> None:
        """Take the lock, or say which process has it."""
        there = _identity_of(self.path)
        if there in _own:
            _own[there][1] += 1
            self._identity = there
            return
        while True:
            file = os.open(self.path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
            if not _locked(file, fcntl.LOCK_EX):
                os.close(file)
                refuse_occupied(self.path.parent)
                continue  # it was given free meanwhile
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
        """Give the folder free, if this was the last to hold it. Calling it again changes nothing."""
        if self._identity is None:
            return
        held, self._identity = self._identity, None
        _own[held][1] -= 1
        if _own[held][1] == 0:
            with contextlib.suppress(OSError):
                self.path.unlink()
            os.close(_own.pop(held)[0])


def refuse_occupied(folder: Path) -> None:
    """Refuse a folder that another run writes to now."""
    if (owner := _owner(folder / LOCK)) is not None:
        raise ConfigError(
            f"output_dir: {folder} is in use by another run ({owner}); wait until it has ended, or choose another "
            f"folder."
        )


def _owner(path: Path) -> str | None:
    if _identity_of(path) in _own:
        return None
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if _locked(file, fcntl.LOCK_SH):  # shared: several may ask at once
            return None
        return os.read(file, 200).decode(errors="replace") or "a process that has just begun"
    finally:
        os.close(file)


def _identity_of(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _locked(file: int, kind: int) -> bool:
    """Take a lock that is free; whether nobody else has it."""
    try:
        fcntl.lockf(file, kind | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EACCES, errno.EAGAIN)
    return True
