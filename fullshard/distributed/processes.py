"""Processes of the operating system: how to identify one, and whether it runs, is stopped or has ended."""

from __future__ import annotations

import hashlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path


def node_id() -> str:
    """An id of the scope in which process ids are unique: a boot of a machine, and a namespace of process ids on it.

    Host names are not enough: containers or machines made from one image may all have the same.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""  # not Linux: every other process is treated as one on another node
    return hashlib.blake2b(f"{boot} {space}".encode(), digest_size=6).hexdigest()


@dataclass(frozen=True)
class Process:
    """The identity of a process."""

    node: str
    pid: int
    start: str
    """Its start time in the kernel's ticks: distinguishes it from a later process with the same id."""
    host: str

    def __str__(self) -> str:
        return f" (process {self.pid} on {self.host})"

    def text(self) -> str:
        """The process as one line of text; see `parse`."""
        return f"{self.node or '-'} {self.pid} {self.start} {self.host}"

    @classmethod
    def parse(cls, text: str) -> Process:
        """A process from its text."""
        node, pid, start, host = text.split(" ", 3)
        return cls("" if node == "-" else node, int(pid), start, host)


def this_process() -> Process:
    """This process as other ranks identify it."""
    return Process(node_id(), os.getpid(), (stat_of(os.getpid()) or ("", ""))[1], socket.gethostname())


def state_of(process: Process | None) -> str:
    """A process's state: "dead", "stopped", "alive"; "" if it is on another node."""
    if process is None or not process.node or process.node != node_id():
        return ""
    stat = stat_of(process.pid)
    if stat is None or stat[0] in "ZX" or stat[1] != process.start:
        return "dead"
    return "stopped" if stat[0] in "Tt" else "alive"


def is_stopped(pid: int) -> bool:
    """Whether a process of this node is stopped, by a signal or a debugger."""
    stat = stat_of(pid)
    return stat is not None and stat[0] in "Tt"


def stat_of(pid: int) -> tuple[str, str] | None:
    """State and start time of a process; None if there is no process with this id."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], fields[19]
