"""Temporary folders whose names have their owner: those of killed processes are removed by the next start."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from fullshard.distributed.processes import Process, state_of, this_process

NAME = re.compile(r"fullshard-([0-9a-f]+)-(\d+)-(\d+)-.*")
"""The node, process id and start time of the owner, and random characters."""


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder of this process, removed at the end; folders that killed processes have left are removed now."""
    remove_abandoned()
    with tempfile.TemporaryDirectory(prefix=owned_prefix()) as folder:
        yield Path(folder)


def owned_prefix() -> str:
    """How the names of this process's temporary folders begin."""
    owner = this_process()
    return f"fullshard-{owner.node}-{owner.pid}-{owner.start}-"


def remove_abandoned() -> None:
    """Remove the temporary folders of processes of this user on this node that have ended."""
    for path in Path(tempfile.gettempdir()).glob("fullshard-*"):
        match = NAME.fullmatch(path.name)
        with contextlib.suppress(OSError):
            facts = path.lstat()
            ours = stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid()
            if match and ours and state_of(Process(match[1], int(match[2]), match[3], "")) == "dead":
                shutil.rmtree(path, ignore_errors=True)
