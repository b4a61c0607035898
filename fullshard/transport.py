"""How tensors travel between ranks: the backend that carries them, why, and what to change if it is the wrong one.

Functions of counts and names alone, so that every case can be tried on any machine. What the process group has and what
the node has is asked by `fullshard.runtime`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Transport:
    """How this rank's tensors travel to other ranks."""

    backend: str
    """"nccl", "gloo" or another of torch's; "" where nothing travels."""
    sentence: str
    fix: str = ""
    """What to change if NCCL could carry the tensors and does not; "" if all is as it should be."""

    def __str__(self) -> str:
        return self.sentence


def transport_of(
    backend: str,
    device_type: str,
    world_size: int,
    local_world_size: int,
    gpus: int,
    *,
    shared: str,
    without: str,
    ours: bool = True,
) -> Transport:
    """How tensors of a device type travel by a backend.

    `gpus` counts those that this rank sees. `shared` says which ranks share a GPU, `without` which have a torch without
    NCCL; both are empty where there are none. `ours` is whether fullshard made the process group.
    """
    if world_size == 1:
        return Transport("", "nothing travels: there is one rank")
    name = {"gloo": "Gloo", "nccl": "NCCL"}.get(backend, backend)
    if device_type == "cpu":
        return Transport(backend, f"{name} (CPU)")
    if backend != "gloo":
        return Transport(backend, name)
    if shared and local_world_size > gpus:
        shared = f"more ranks than GPUs on this node ({local_world_size} on {gpus})"
    if shared:
        return Transport(backend, f"Gloo through host memory: {shared}")
    if without:
        fix = f"Torch has no NCCL on {without}: install a build that has it."
    else:
        assert not ours
        fix = (
            'The program made its process group with backend "gloo": make it with "cpu:gloo,cuda:nccl", or leave it to '
            "fullshard by not making one."
        )
    return Transport(backend, "Gloo through host memory, though each rank has a GPU of its own", fix)
