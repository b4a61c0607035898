"""The rendezvous of all ranks before there is a process group: which ranks are missing, which backend all can use.

It takes a few calls of the job's store per rank, for any number of ranks, and one per second while some are missing.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fullshard import accelerator, groups
from fullshard.errors import RanksMissingError, RuntimeSetupError
from fullshard.rank_env import DEVICE_VARIABLE, INIT_TIMEOUT_VARIABLE, Launch

REPORT_AFTER = 10.0
"""Seconds after which missing ranks are reported."""
NAMED = 16


@dataclass(frozen=True)
class Meeting:
    """What the ranks learned about each other."""

    shared: str = ""
    """Which ranks share a GPU; empty if none do."""
    without: str = ""
    """Which rank's torch lacks the device's own backend (NCCL for CUDA); empty if all have it."""

    @property
    def own(self) -> bool:
        """Whether all ranks can use the accelerator's own backend (NCCL)."""
        return not (self.shared or self.without)


def meet(
    store: dist.Store, launch: Launch, device: torch.device, seconds: float, warn: Callable[[str], None]
) -> Meeting:
    """Wait until every rank has arrived; names the ranks that do not. Returns what the ranks learned about each other.

    The store counts the ranks, and the last one sets a key that all others wait for. It also counts the ranks of each
    GPU: NCCL refuses two ranks on one GPU, anywhere in the job, so all ranks must make the same decision. GPUs are
    identified by their UUID, since a rank may not see the GPUs of its neighbors.
    """
    kind, own = device.type, groups.has_own(device.type)
    if store.add(f"here/{launch.rank}", 1) == 1:
        store.add(f"device/{kind}", 1)
        if accelerator.is_accelerator(device) and own:
            place = f"gpu/{os.environ.get('NCCL_HOSTID', '')}/{accelerator.identity(device)}"
            if store.add(place, 1) == 1:
                store.set(f"{place}/rank", str(launch.rank))
            else:
                first = store.get(f"{place}/rank").decode()
                store.set("shared", f"ranks {first} and {launch.rank} share a GPU of {socket.gethostname()}")
        elif accelerator.is_accelerator(device):
            store.set("without", f"rank {launch.rank} on {socket.gethostname()}")
        if store.add("here", 1) == launch.world_size:
            store.set("all here", "1")
    _wait_for_all(store, launch, seconds, warn)
    here = store.add(f"device/{kind}", 0)
    if here < launch.world_size:
        raise RuntimeSetupError(
            f"Rank {launch.rank} and {here - 1} other(s) of the {launch.world_size} ranks run on {kind}, the rest on "
            f"another type of device, which one program cannot mix. Look for the node whose GPUs are not found, or "
            f"set {DEVICE_VARIABLE} to the same value on all nodes."
        )
    shared, without = (store.get(key).decode() if store.check([key]) else "" for key in ("shared", "without"))
    return Meeting(shared, without)


def _wait_for_all(store: dist.Store, launch: Launch, seconds: float, warn: Callable[[str], None]) -> None:
    """Wait until the last rank has arrived. One rank reports those that are missing; all do at the timeout."""
    began, pause, reported = time.monotonic(), 0.02, False
    # Polled: a wait that times out makes torch print a warning about its sockets.
    while not store.check(["all here"]):
        waited = time.monotonic() - began
        if waited > seconds:
            break
        if waited > REPORT_AFTER and not reported:
            reported = True
            if store.add("reported", 1) == 1:
                warn(f"waiting for {REPORT_AFTER:g} s for rank(s) {_absent(store, launch)} to start")
        time.sleep(pause)
        pause = min(1.0, 1.5 * pause)
    else:
        return
    raise RanksMissingError(
        f"Rank {launch.rank} waited {seconds:g} s at {launch.master} (MASTER_ADDR:MASTER_PORT), but of "
        f"{launch.world_size} ranks these did not arrive: {_absent(store, launch)}. Look at their output first; "
        f"if they are only slow to start, raise {INIT_TIMEOUT_VARIABLE}."
    )


def _absent(store: dist.Store, launch: Launch) -> str:
    absent = [str(rank) for rank in range(launch.world_size) if not store.check([f"here/{rank}"])]
    return ", ".join(absent[:NAMED]) + (f" and {len(absent) - NAMED} more" if len(absent) > NAMED else "")
