"""How tensors travel between ranks: the backend that carries them, why, and what to change if it is the wrong one.

Functions of counts and names alone, so that every case can be tried on any machine. What the process group has and what
the node has is asked by `fullshard.runtime`.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    backend: str, device_type: str, world_size: int, local_world_size: int, gpus: int, *, has_own: bool, ours: bool
) -> Transport:
    """How tensors of a device type travel by a backend.

    `gpus` counts those that this rank sees, `has_own` says whether torch has NCCL, `ours` whether fullshard made the
    process group.
    """
    if world_size == 1:
        return Transport("", "nothing travels: there is one rank")
    name = {"gloo": "Gloo", "nccl": "NCCL"}.get(backend, backend)
    if device_type == "cpu":
        return Transport(backend, f"{name} (CPU)")
    if backend != "gloo":
        return Transport(backend, name)
    if local_world_size > gpus:
        counted = f"{local_world_size} on {gpus}"
        return Transport(backend, f"Gloo through host memory: more ranks than GPUs on this node ({counted})")
    if not has_own:
        fix = "This build of torch has no NCCL: install one that has it."
    elif ours:
        fix = "This rank sees more GPUs than when it started: set CUDA_VISIBLE_DEVICES before the start."
    else:
        fix = (
            'The program made its process group with backend "gloo": make it with "cpu:gloo,cuda:nccl", or leave it to '
            "fullshard by not making one."
        )
    return Transport(backend, "Gloo through host memory, though each rank has a GPU of its own", fix)


@dataclass(frozen=True)
class Choice:
    """The backend that one rank has chosen, and from what."""

    backend: str
    host: str
    local_world_size: int
    gpus: int


def differing(choices: Sequence[Choice]) -> str:
    """Which ranks have chosen which backend, by rank, in words."""
    ranks: dict[Choice, list[int]] = {}
    for rank, choice in enumerate(choices):
        ranks.setdefault(choice, []).append(rank)
    told = []
    for choice, those in ranks.items():
        shown = ", ".join(map(str, those[:8])) + (f" and {len(those) - 8} more" if len(those) > 8 else "")
        why = f"{choice.local_world_size} rank(s) and {choice.gpus} GPU(s) on {choice.host}"
        told.append(f"{choice.backend} on rank(s) {shown} ({why})")
    return "; ".join(told[:8]) + (f"; and {len(told) - 8} more nodes" if len(told) > 8 else "")
