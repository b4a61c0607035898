"""Machines to plan for: what a device can hold and how fast it computes and communicates.

Plain numbers; nothing here imports torch. Sources are in docs/planning.md.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """The devices of a run, in nodes of equal size. Rates are per device and second."""

    name: str
    kind: str
    """The type of device that the model runs on: "cuda" or "cpu"."""
    num_processes: int
    """Devices, and so ranks, in all nodes."""
    gpus_per_node: int
    """Devices in one node."""
    device_memory: int
    """Bytes of one device that its driver leaves to processes."""
    host_memory: int
    """Bytes of host memory of one node."""
    flops: dict[str, float]
    """Dense matrix products by dtype: "bfloat16", "float16", "float32" (TF32 where the device has it), "float8"."""
    memory_bandwidth: float
    """Bytes that a device reads and writes in its own memory."""
    node_link: float
    """Bytes that a device sends to others in its node, in one direction."""
    network: float
    """Bytes that a device sends to other nodes, in one direction: the node's network divided by its devices."""
    host_link: float
    """Bytes between a device and the host's memory, in one direction."""

    @property
    def nodes(self) -> int:
        return self.num_processes // self.gpus_per_node
