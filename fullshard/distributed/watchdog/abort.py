"""Aborting communication that can never finish, and ending the process where that does not help."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from datetime import timedelta
from typing import Any

import torch

from fullshard.config.errors import RankLostError
from fullshard.device.device_kinds import KINDS
from fullshard.device.torch_private import all_groups, backend_for, backend_timeout
from fullshard.distributed import runtime
from fullshard.distributed.groups import backend_of, has_backend_for
from fullshard.distributed.terminal_text import print_text

GIVE_UP = 8.0
"""Seconds the program has to return from its wait once communication was aborted."""


def all_communicators(waits_in: Any = None) -> None:
    """Abort this rank's communication: every NCCL communicator, and on Gloo the group that the host waits in."""
    device = runtime.device()
    # All at once: aborting one communicator frees device memory, which waits for kernels of others.
    for group in _abortable():
        backend = backend_for(group, device.type)
        threading.Thread(target=_quietly, args=(backend.abort,), daemon=True).start()
    if waits_in is not None and not _can_abort(waits_in):
        _close_gloo(waits_in)


def all_on_gloo() -> None:
    """Abort all of this rank's communication on Gloo: an external wait may be in any of its groups."""
    for group in all_groups():
        if group.size() > 1 and has_backend_for(group, "cpu"):
            threading.Thread(target=_quietly, args=(lambda group=group: _close_gloo(group),), daemon=True).start()


def _close_gloo(group: Any) -> None:
    """Close a Gloo group's connections. Gloo has no abort, but a receive that times out closes them, and every wait on
    them ends."""
    with contextlib.suppress(RuntimeError):
        other = (group.rank() + 1) % group.size()
        group.recv([torch.empty(1)], other, (1 << 30) + 1).wait(timedelta(milliseconds=1))


def take_over() -> None:
    """Leave the process group's end to `all_communicators`: destroying a group whose communicators are aborted, or have
    lost a rank, ends the process inside torch. Must be called before the failure is raised in the program."""
    if _abortable():
        runtime.abandon()


def _abortable() -> list[Any]:
    """The process groups in which this rank's tensors are carried by a backend that can abort (NCCL)."""
    abortable = []
    for group in all_groups():
        with contextlib.suppress(Exception):  # a group that is being destroyed
            if _can_abort(group):
                abortable.append(group)
    return abortable


def _can_abort(group: Any) -> bool:
    return backend_of(group, runtime.device()) in {kind.backend for kind in KINDS.values() if kind.aborts}


def _quietly(job: Any) -> None:
    with contextlib.suppress(Exception):
        job()


def timeout_of(group: Any) -> float | None:
    """Seconds that an operation of a group may take; None if the group has no timeout."""
    with contextlib.suppress(Exception):
        return backend_timeout(backend_for(group, runtime.device().type))
    return None


def end_process(rank: int, why: str) -> None:
    """End the process at once: the program is in a wait that nothing else ends."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        print_text(f"[rank {rank}] ERROR {why}", sys.stderr)
        print_text(f"[rank {rank}] ERROR the program did not return from its wait: ending the process", sys.stderr)
        sys.stderr.flush()
    os._exit(RankLostError.exit_code)
