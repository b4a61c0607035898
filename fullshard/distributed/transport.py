"""How tensors are sent between ranks: the backend, the reason for it, and what to change if it is the wrong one.

Everything is a function of counts and names, so every case can be tested on any machine. `fullshard.runtime` provides
them.
"""

from __future__ import annotations

from dataclasses import dataclass

from fullshard.device.device_kinds import KINDS


@dataclass(frozen=True)
class Transport:
    """How this rank's tensors are sent to other ranks."""

    backend: str
    """"nccl", "gloo" or another backend of torch; "" with one rank."""
    sentence: str
    fix: str = ""
    """What to change if the device's own backend could be used and is not; "" otherwise."""

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
    """How tensors of a device type are sent with a backend.

    - `gpus`: the number of GPUs that this rank sees
    - `shared`: which ranks share a GPU; empty if none do
    - `without`: which ranks have a torch without the device's own backend; empty if none do
    - `ours`: whether fullshard created the process group
    """
    if world_size == 1:
        return Transport("", "none: there is one rank")
    own = KINDS[device_type].backend if device_type in KINDS else "gloo"
    name = "Gloo" if backend == "gloo" else own.upper() if backend == own else backend
    if device_type == "cpu":
        return Transport(backend, f"{name} (CPU)")
    if backend != "gloo":
        return Transport(backend, name)
    if shared and local_world_size > gpus:
        shared = f"more ranks than GPUs on this node ({local_world_size} on {gpus})"
    if shared:
        return Transport(backend, f"Gloo through host memory: {shared}")
    if without:
        fix = f"torch has no {own.upper()} on {without}: install a build that has it."
    else:
        assert not ours
        fix = (
            'The program created its process group with backend "gloo": use '
            f'"cpu:gloo,{device_type}:{own}", or let fullshard create the group.'
        )
    return Transport(backend, "Gloo through host memory, although each rank has its own GPU", fix)
