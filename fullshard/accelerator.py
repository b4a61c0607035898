"""The accelerator behind a device: streams, events, page-locked host memory, memory figures, random generators.

Everything the package asks of an accelerator goes through here, by torch's device-neutral interface where there is one.
The CPU answers the same calls: it has no streams, its memory needs no lock, and there is nothing to wait for. Another
accelerator is supported by adding its type to `SUPPORTED` and trying `make test-gpu` on it.
"""

from __future__ import annotations

import contextlib
import functools
import math
import socket
import weakref
from collections.abc import Sequence

import numpy as np
import torch

SUPPORTED = {"cuda": "nccl"}
"""Device types that have been tried, and the backend that carries their tensors between devices."""
LARGE = 2**20
"""Bytes from which on host memory is locked in place: it then has pages of its own."""


@functools.cache
def kind() -> str:
    """The type of this machine's accelerator; "cpu" where there is none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return found.type if found is not None and found.type in SUPPORTED else "cpu"


def count() -> int:
    """How many accelerators this process sees."""
    return torch.accelerator.device_count() if kind() != "cpu" else 0


def names() -> list[str]:
    """What the accelerators call themselves."""
    module = torch.get_device_module(kind())
    return [module.get_device_name(index) for index in range(count())]


def computes_bf16() -> bool:
    """Whether the accelerators multiply in bf16 themselves, rather than by emulation."""
    return count() > 0 and bool(torch.get_device_module(kind()).is_bf16_supported(including_emulation=False))


def identity(device: torch.device) -> str:
    """What tells this accelerator from every other one, on this machine and elsewhere."""
    properties = torch.get_device_module(device).get_device_properties(device)
    return str(getattr(properties, "uuid", None) or f"{socket.gethostname()}/{device.index}")


def is_accelerator(device: torch.device) -> bool:
    """Whether work on the device runs beside the host, in streams."""
    return device.type in SUPPORTED


def current() -> torch.device:
    """The accelerator that this thread uses."""
    return torch.device(kind(), torch.accelerator.current_device_index())


def use(device: torch.device) -> None:
    """Make this the thread's accelerator; nothing to do for the CPU."""
    if is_accelerator(device):
        torch.accelerator.set_device_index(device.index or 0)


# --- streams --------------------------------------------------------------------------------------------------------


def new_stream(device: torch.device) -> torch.Stream | None:
    """A stream of its own; None where there are no streams."""
    return torch.Stream(device) if is_accelerator(device) else None


def current_stream(device: torch.device) -> torch.Stream:
    """The stream that work on the device is given to now."""
    return torch.accelerator.current_stream(device)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all it was given."""
    if is_accelerator(device):
        torch.accelerator.synchronize(device)


# --- memory ---------------------------------------------------------------------------------------------------------


def total_memory(device: torch.device) -> int:
    """Bytes of memory on the accelerator."""
    return int(torch.get_device_module(device).mem_get_info(device)[1])


def peak_memory(device: torch.device) -> int:
    """The most bytes that were allocated at once, since the start."""
    return int(torch.get_device_module(device).max_memory_allocated(device))


def pinned(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Page-locked host memory without values, from torch's own pool: kept until copies from or to it are done."""
    return torch.empty(tuple(shape), dtype=dtype, pin_memory=kind() != "cpu")


def staging(size: int, device: torch.device) -> torch.Tensor:
    """Bytes of host memory on the way to a device: page-locked for an accelerator."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=is_accelerator(device))


def host_memory(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Host memory that stays for long, without values: page-locked where there is an accelerator to read it.

    Large pieces are ordinary memory that is locked afterwards: what torch allocates as pinned it rounds up to a power
    of two, which for a large model's shards adds up to gigabytes. torch's pool does not know such memory, so whoever
    copies from it must keep it until the copy is done.
    """
    size = math.prod(shape) * dtype.itemsize
    lock = getattr(torch.get_device_module(kind()), "cudart", None) if kind() != "cpu" else None
    if lock is None or size < LARGE:
        return pinned(shape, dtype)
    owner = np.empty(size, np.uint8)  # lives as long as the tensor's storage does
    if int(lock().cudaHostRegister(owner.ctypes.data, size, 0)) == 0:
        # Unlocked before it is freed: numpy tells of an array's end before it gives the memory back.
        weakref.finalize(owner, _unlock, owner.ctypes.data).atexit = False
    return torch.from_numpy(owner).view(dtype).view(tuple(shape))


def _unlock(address: int) -> None:
    with contextlib.suppress(RuntimeError):  # the process may be ending
        torch.accelerator.synchronize()  # a copy may still be on its way
        torch.get_device_module(kind()).cudart().cudaHostUnregister(address)


# --- random generators ----------------------------------------------------------------------------------------------


def rng_state(device: torch.device) -> torch.Tensor | None:
    """The state of the accelerator's default generator; None for the CPU."""
    return torch.get_device_module(device).get_rng_state(device) if is_accelerator(device) else None


def set_rng_state(device: torch.device, state: torch.Tensor) -> None:
    if is_accelerator(device):
        torch.get_device_module(device).set_rng_state(state.cpu(), device)
