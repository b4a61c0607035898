"""Process groups: creating and naming them, and which backend they use for a device.

A process group may have one backend per device type. torch's name for the group lists all of them, so ask here for the
backend of one device.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as torch_groups

from fullshard.device.device_kinds import KINDS
from fullshard.device.torch_private import backend_for, device_types, group_name, set_group_timeout


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """The backend of a group for the device's tensors ("nccl", "gloo", "fake"); "" if it has none."""
    if not has_backend_for(group, device.type):
        return ""
    return str(backend_for(group, device.type).name()).lower()


def has_backend_for(group: dist.ProcessGroup, device_type: str) -> bool:
    """Whether the group has a backend for tensors of this device type."""
    return device_type in device_types(group)


def is_simulated(group: dist.ProcessGroup | None) -> bool:
    """Whether the group's other ranks exist in name only (torch's fake process group, for measurements)."""
    return "fake" in str(dist.get_backend_config(group)).lower()


def coalesces(group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Whether the group's backend for the device can issue several collectives as one launch."""
    return bool(backend_for(group, device.type).supports_coalescing)


def has_own(device_type: str) -> bool:
    """Whether this build of torch has the device type's own backend (NCCL for CUDA)."""
    return dist.is_backend_available(KINDS[device_type].backend if device_type in KINDS else "gloo")


def short_name(ranks: Sequence[int]) -> str:
    """A short name for a sequence of ranks, even of thousands: 0-7, 0-28:4, or a digest."""
    first, last = ranks[0], ranks[-1]
    step = ranks[1] - first if len(ranks) > 1 else 1
    if step > 0 and list(ranks) == list(range(first, last + 1, step)):
        return f"{first}-{last}" + (f":{step}" if step > 1 else "")
    return f"{len(ranks)}x{hashlib.blake2b(repr(list(ranks)).encode(), digest_size=8).hexdigest()}"


def disable_nccl_abort(backend: str) -> None:
    """Keep torch's NCCL watchdog from ending the process before our own watchdog has named the missing rank.

    Must be called before a group is created. Variables that the user set are not changed. By default torch's watchdog
    ends the process when a work fails or times out. It also locks its list of works, which every new operation needs,
    for four times the second limit, 60 s by default.
    """
    if "nccl" not in backend.lower():
        return
    if "NCCL_ASYNC_ERROR_HANDLING" not in os.environ:
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "1000")


def set_timeout(group: dist.ProcessGroup, seconds: float) -> None:
    """Set how long an operation of a group may take."""
    with contextlib.suppress(ValueError, RuntimeError):  # a backend without timeouts
        set_group_timeout(group, timedelta(seconds=seconds))


_counts: dict[tuple[int, ...], int] = {}


def new_group(ranks: tuple[int, ...], **options: Any) -> dist.ProcessGroup:
    """A new process group of these ranks; exactly these ranks must call this.

    torch names a group by how many groups this rank already has. Ranks that created different groups before (a mesh of
    some of the devices, say) would wait for each other under different names. Here the name is made of the ranks and
    the number of groups of these ranks.
    """
    disable_nccl_abort(str(options.get("backend") or dist.get_backend_config()))
    number = _counts[ranks] = _counts.get(ranks, 0) + 1
    name = f"fullshard/{short_name(ranks)}/{number}"
    if list(ranks) != sorted(ranks):
        options["sort_ranks"] = False  # `Mesh` refuses such orders if torch lacks this
    with group_name(name):
        # torch's own: torch_xla replaces `dist.new_group` by a function with fewer options.
        return torch_groups.new_group(list(ranks), use_local_synchronization=True, **options)
