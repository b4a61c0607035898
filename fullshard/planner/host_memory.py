"""Host memory of a node, and device memory that torch does not allocate: measured constants and sums."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fullshard.fsdp.plan import ShardingPlan

GIB = 2**30
CONTEXT = 600 * 2**20
"""Bytes of a device that CUDA and the kernels of torch take in each process: an assumption, about what recent GPUs show
in nvidia-smi before a tensor is made."""
COMMUNICATOR = 256 * 2**20
"""Bytes of a device that NCCL takes for one communicator: an assumption; its buffers are 4 MiB for each channel and
neighbor by default, and machines with many links have more channels."""
MARGIN = 0.04
"""The part of a device's memory that is left free, because torch cannot use all free blocks again; twice this with
several ranks, which cannot repeat a step that ran out of memory."""
PROCESS = 3 * GIB // 2
"""Host memory of a rank's process besides tensors: Python, torch, CUDA, without the libraries' files, which processes
share (1.1 to 1.7 GB in `benchmarks/qlora_70b.py`)."""
STAGING = 256 * 2**20
"""Host buffers of a rank that reads weights."""


@dataclass(frozen=True)
class HostNeeds:
    """Bytes of one rank."""

    device: int
    """The peak on the device, which is the host's memory on CPUs."""
    shards: int
    gradients: int
    optimizer: int
    activations: int
    largest: int
    """The largest parameter, whole."""
    snapshot: int
    """A copy of what a checkpoint holds, for saves in the background."""


def host_memory(needs: HostNeeds, ranks: int, accelerator: bool) -> dict[str, int]:
    """Bytes of a node's host memory by part."""
    parts = {
        "processes": PROCESS,
        "device memory": 0 if accelerator else needs.device,
        "shards": needs.shards,
        "gradients": needs.gradients,
        "optimizer": needs.optimizer,
        "activations": needs.activations,
        "loading": STAGING if accelerator else 0,
        "snapshot": needs.snapshot,
    }
    return {part: size * ranks for part, size in parts.items() if size}


def margin(ranks: int) -> float:
    """The part of a device's memory that is left free."""
    return MARGIN * (2 if ranks > 1 else 1)


def reserved_memory(plan: ShardingPlan, accelerator: bool, peak: int, device_memory: int | None) -> int:
    """Bytes of a device beside the `peak` that torch allocates: context, communicators, fragmentation."""
    if not accelerator:
        return 0
    sizes = dict(plan.axes)
    ranks = math.prod(sizes.values())
    communicators = 0 if ranks == 1 else 3 + sum(sizes[axis] > 1 for axis in plan.replica_axes)
    return CONTEXT + communicators * COMMUNICATOR + int(margin(ranks) * (device_memory or peak))
