"""Ending communication that can never finish, and, where that does not help, the process."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from datetime import timedelta
from typing import Any

import torch

from fullshard import runtime
from fullshard.errors import RankLostError
from fullshard.groups import backend_of, carries
from fullshard.torch_private import all_groups, backend_for, backend_timeout

GIVE_UP = 8.0
"""Seconds the program gets to come back from its wait once communication was ended."""


def all_communicators(waits_in: Any = None) -> None:
    """End all communication of this rank: every NCCL communicator, and on Gloo the one the host waits in."""
    device = runtime.device()
    # All at once: taking one communicator apart frees device memory, which waits for kernels of others.
    for group in _on_nccl():
        backend = backend_for(group, device.type)
        threading.Thread(target=_quietly, args=(backend.abort,), daemon=True).start()
    if waits_in is not None and waits_in.group is not None and backend_of(waits_in.group, device) != "nccl":
        _close_gloo(waits_in.group)


def all_on_gloo() -> None:
    """End all communication of this rank on Gloo: a wait that the watch did not begin may be in any of its groups."""
    for group in all_groups():
        if group.size() > 1 and carries(group, "cpu"):
            threading.Thread(target=_quietly, args=(lambda group=group: _close_gloo(group),), daemon=True).start()


def _close_gloo(group: Any) -> None:
    """Gloo has no abort. A receive that times out closes its connections, which ends every wait on them."""
    with contextlib.suppress(RuntimeError):
        other = (group.rank() + 1) % group.size()
        group.recv([torch.empty(1)], other, (1 << 30) + 1).wait(timedelta(milliseconds=1))


def take_over() -> None:
    """Leave taking communicators apart to `all_communicators`: to destroy a process group whose communicators are, or
    have lost a rank, ends the process inside torch. Must come before the program is told."""
    if _on_nccl():
        runtime.abandon()


def _on_nccl() -> list[Any]:
    """The process groups in which NCCL carries this rank's tensors."""
    device, found = runtime.device(), []
    for group in all_groups():
        with contextlib.suppress(Exception):  # a group that is being destroyed
            if backend_of(group, device) == "nccl":
                found.append(group)
    return found


def _quietly(job: Any) -> None:
    with contextlib.suppress(Exception):
        job()


def time_out(group: Any) -> float | None:
    """Seconds that an operation of a group may take, where the group says so."""
    with contextlib.suppress(Exception):
        return backend_timeout(backend_for(group, runtime.device().type))
    return None


def give_up(rank: int, why: str) -> None:
    """End the process at once: the program is inside a wait that nothing ends."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.write(f"[rank {rank}] ERROR {why}\n")
        sys.stderr.write(f"[rank {rank}] ERROR the program did not come back from its wait: ending the process\n")
        sys.stderr.flush()
    os._exit(RankLostError.exit_code)
