"""The rendezvous of all ranks before there is a process group: who is missing, what differs, which backend all can use.

Every rank leaves an introduction in the job's store. Rank 0 reads all of them and leaves one answer. That is a few
calls of the store per rank, for any number of ranks, and one per second while some are missing.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import socket
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from fullshard.config.errors import RanksMissingError, RuntimeSetupError
from fullshard.device import accelerator
from fullshard.distributed import groups
from fullshard.distributed.job_store import SECRET_VARIABLE, JobStore, job_secret, parse
from fullshard.distributed.rank_env import DEVICE_VARIABLE, INIT_TIMEOUT_VARIABLE, Launch

REPORT_AFTER = 10.0
"""Seconds after which missing ranks are reported."""
NAMED = 16
COMPARED = ("fullshard", "torch", "transformers", "peft", "bitsandbytes", "triton")
"""The packages whose versions must be equal on all ranks."""
DEVICE, WORLD = "type of device", "WORLD_SIZE"


@dataclass(frozen=True)
class Meeting:
    """What the ranks learned about each other."""

    shared: str = ""
    """Which ranks share a GPU; empty if none do."""
    without: str = ""
    """Which rank's torch lacks the device's own backend (NCCL for CUDA); empty if all have it."""
    different: str = ""
    """What must be equal on all ranks and is not; empty if everything is."""

    @property
    def own(self) -> bool:
        """Whether all ranks can use the accelerator's own backend (NCCL)."""
        return not (self.shared or self.without)


@dataclass(frozen=True)
class Introduction:
    """What a rank says of itself."""

    facts: dict[str, Any]
    """What must be equal on all ranks."""
    gpu: str
    """Its GPU, by UUID: a rank may not see the GPUs of its neighbors. Empty if the device has no backend of its own."""
    backend: bool
    """Whether its torch has the device's own backend."""
    host: str


def versions() -> dict[str, Any]:
    """The versions of Python and of the packages that decide results; None for those that are not installed."""
    return {"Python": ".".join(platform.python_version_tuple()[:2]), **{name: _version(name) for name in COMPARED}}


def _version(package: str) -> str | None:
    try:
        return torch.__version__ if package == "torch" else importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def meet(store: JobStore, launch: Launch, device: torch.device, seconds: float, warn: Callable[[str], Any]) -> Meeting:
    """Wait until every rank has arrived; names the ranks that do not. Returns what the ranks learned about each other.

    Raises the same error on all ranks if their devices, versions or numbers of ranks differ.
    """
    mine = introduce(launch, device)
    store.put(f"here/{launch.rank}", json.dumps(asdict(mine)))
    if launch.rank == 0:
        if not launch.one_node and not job_secret():
            warn(
                f"{SECRET_VARIABLE} is not set: whoever can reach port {launch.master.rpartition(':')[2]} of the first "
                "machine can end this run, or change it. Give all machines the same secret (docs/launch.md)."
            )
        everyone = [f"here/{rank}" for rank in range(launch.world_size)]
        _wait_for(store, everyone, launch, seconds, warn)
        introductions = store.read(everyone)
        if len(introductions) < len(everyone):
            raise _refused(store, launch)
        ranks = [Introduction(**parse(introductions[key])) for key in everyone]
        store.put("met", json.dumps({**asdict(_learn(ranks)), "first": ranks[0].facts}))
    _wait_for(store, ["met"], launch, seconds, warn)
    answer = store.read(["met"])
    if not answer:
        raise _refused(store, launch)
    learned = parse(answer["met"])
    first = learned.pop("first")
    # A rank that rank 0 did not count, because their numbers of ranks differ, finds out here.
    different = learned["different"] or differences({0: first, launch.rank: mine.facts})
    if different:
        hint = ""
        if DEVICE in different:
            hint = (
                f" One program cannot mix types of devices: look for the node whose GPUs are not found, or set "
                f"{DEVICE_VARIABLE} to the same value on all nodes."
            )
        raise RuntimeSetupError(f"the ranks were started differently: {different}.{hint}")
    return Meeting(**learned)


def introduce(launch: Launch, device: torch.device) -> Introduction:
    """The introduction of this process."""
    own, gpu = groups.has_own(device.type), ""
    if accelerator.is_accelerator(device) and own:
        gpu = f"{os.environ.get('NCCL_HOSTID', '')}/{accelerator.identity(device)}"
    facts = {DEVICE: device.type, WORLD: launch.world_size, **versions()}
    return Introduction(facts, gpu, own or not accelerator.is_accelerator(device), socket.gethostname())


def _learn(ranks: Sequence[Introduction]) -> Meeting:
    """What all introductions show together. NCCL refuses two ranks on one GPU, anywhere in the job."""
    of_gpu: dict[str, int] = {}
    shared = without = ""
    for rank, one in enumerate(ranks):
        if not one.backend and not without:
            without = f"rank {rank} on {one.host}"
        if one.gpu and of_gpu.setdefault(one.gpu, rank) != rank and not shared:
            shared = f"ranks {of_gpu[one.gpu]} and {rank} share a GPU of {one.host}"
    return Meeting(shared, without, differences(dict(enumerate(one.facts for one in ranks))))


def differences(facts: Mapping[int, Mapping[str, Any]]) -> str:
    """The facts that are not equal on all ranks: every value, and the ranks that have it. Empty if all are."""
    lines = []
    for name in dict.fromkeys(name for each in facts.values() for name in each):
        ranks: dict[str, list[int]] = {}
        for rank, each in facts.items():
            ranks.setdefault(_short(each.get(name)), []).append(rank)
        if len(ranks) > 1:
            lines.append(f"{name} is " + ", ".join(f"{value} on rank {_some(where)}" for value, where in ranks.items()))
    more = f" and {len(lines) - NAMED} more" if len(lines) > NAMED else ""
    return "; ".join(lines[:NAMED]) + more


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else f"{text[:60]}… (checksum {zlib.crc32(text.encode()):08x})"


def _some(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:NAMED])) + (f" and {len(ranks) - NAMED} more" if len(ranks) > NAMED else "")


def _wait_for(store: JobStore, keys: Sequence[str], launch: Launch, seconds: float, warn: Callable[[str], Any]) -> None:
    """Wait until the last rank has arrived. One rank reports those that are missing; all do at the timeout."""
    began, pause, reported = time.monotonic(), 0.02, False
    # Polled: a wait that times out makes torch print a warning about its sockets.
    while not store.has(keys):
        waited = time.monotonic() - began
        if waited > seconds:
            break
        if waited > REPORT_AFTER and not reported:
            reported = True
            if (absent := _absent(store, launch)) and store.add("reported", 1) == 1:
                warn(f"waiting for {REPORT_AFTER:g} s for rank(s) {_some(absent)} to start")
        time.sleep(pause)
        pause = min(1.0, 1.5 * pause)
    else:
        return
    absent = _absent(store, launch)
    raise RanksMissingError(
        f"Rank {launch.rank} waited {seconds:g} s at {launch.master} (MASTER_ADDR:MASTER_PORT), but of "
        f"{launch.world_size} ranks these did not arrive: {_some(absent) or '0'}. Look at their output first; "
        f"if they are only slow to start, raise {INIT_TIMEOUT_VARIABLE}."
    )


def _absent(store: JobStore, launch: Launch) -> list[int]:
    return [rank for rank in range(launch.world_size) if not store.has([f"here/{rank}"])]


def _refused(store: JobStore, launch: Launch) -> RuntimeSetupError:
    return RuntimeSetupError(
        f"Rank {launch.rank} found values in the job's store at {launch.master} that are not signed with its secret: "
        f"{', '.join(sorted(store.refused)[:NAMED])}. Give all processes of the job the same {SECRET_VARIABLE}; if "
        f"they have it, another program writes to that port."
    )
