"""The accelerator of a device: streams, pinned host memory, memory sizes, random states.

The package uses accelerators only through this file, which uses torch's device-neutral interface where there is one,
and the entry of the device's type in `device_kinds.py`. The same calls work for the CPU: it has no streams, its memory
needs no pinning, and there is nothing to wait for.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import socket
import weakref
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from fullshard.device.device_kinds import KINDS, DeviceKind

LARGE = 2**20
"""Bytes from which on ordinary host memory is pinned in place: it then has its own pages."""


@functools.cache
def reported_kind() -> str:
    """The type of the accelerator that torch reports on this machine, supported or not; "" if there is none."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return device.type if device is not None else ""


def kind() -> str:
    """The type of this machine's accelerator; "cpu" if there is no supported one."""
    return reported_kind() if reported_kind() in KINDS else "cpu"


def count() -> int:
    """The number of accelerators that this process sees."""
    return torch.accelerator.device_count() if kind() != "cpu" else 0


def names() -> list[str]:
    """The names of the accelerators."""
    name = getattr(torch.get_device_module(kind()), "get_device_name", lambda index: f"{kind()}:{index}")
    return [name(index) for index in range(count())]


def computes_bf16() -> bool:
    """Whether the accelerators support bf16 in hardware, without emulation."""
    if not count():
        return False
    if supported := getattr(torch.get_device_module(kind()), "is_bf16_supported", None):
        return bool(supported(including_emulation=False))
    return torch.bfloat16 in torch.accelerator.get_device_capability()["supported_dtypes"]


# --- what a device can do -------------------------------------------------------------------------------------------


def kind_of(device: torch.device) -> DeviceKind | None:
    """The entry of the device's type; None for the CPU."""
    return KINDS.get(device.type) if device.type != "meta" else _stand_in.kind


def is_accelerator(device: torch.device) -> bool:
    """Whether the device is an accelerator: it runs work asynchronously, in streams."""
    return kind_of(device) is not None


def runs_triton(device: torch.device) -> bool:
    """Whether the device runs the kernels of this package, which are written in Triton."""
    return (entry := kind_of(device)) is not None and entry.triton


def runs_inductor(device: torch.device) -> bool:
    """Whether torch's compiler, and flex attention with it, are used on the device without being asked for."""
    return (entry := kind_of(device)) is not None and entry.inductor


def adds_wide_products(device: torch.device) -> bool:
    """Whether the device adds a product of narrow matrices to a wider one without rounding."""
    return (entry := kind_of(device)) is not None and entry.wide_products


def draws_by_offset(device: torch.device) -> bool:
    """Whether shards on the device draw their parts of one random stream, each at its own offset."""
    return (entry := kind_of(device)) is not None and entry.random_offsets


def pins(device: torch.device) -> bool:
    """Whether host memory that is copied from or to the device is page-locked."""
    return (entry := kind_of(device)) is not None and entry.pinned


def computes_fp8(device: torch.device) -> bool:
    """Whether the device is an accelerator that multiplies fp8 matrices in hardware."""
    return _stand_in.computes_fp8 if device.type == "meta" else _computes_fp8(device)


@functools.cache
def _computes_fp8(device: torch.device) -> bool:
    entry = kind_of(device)
    if entry is None or entry.fp8_from is None:
        return False
    return torch.get_device_module(device).get_device_capability(device) >= entry.fp8_from


def identity(device: torch.device) -> str:
    """An id of this accelerator that is unique across machines."""
    read = getattr(torch.get_device_module(device), "get_device_properties", lambda device: None)
    return str(getattr(read(device), "uuid", None) or f"{socket.gethostname()}/{device.index}")


class _StandIn:
    """What tensors on the meta device stand for."""

    kind: DeviceKind | None = None
    computes_fp8 = False
    imbalance = 1.0


_stand_in = _StandIn()


@contextlib.contextmanager
def meta_stands_for(device: torch.device, computes_fp8: bool = True, imbalance: float = 1.0) -> Iterator[None]:
    """Inside, tensors on the meta device take the paths of this device, which need not exist here: the same operators
    run, without values. `computes_fp8` tells whether an accelerator multiplies fp8 matrices in hardware, and
    `imbalance` how rows are divided into groups (`rows_of_groups`)."""
    before = _stand_in.kind, _stand_in.computes_fp8, _stand_in.imbalance
    _stand_in.imbalance = imbalance
    _stand_in.kind = entry = KINDS.get(device.type)
    _stand_in.computes_fp8 = entry is not None and entry.fp8_from is not None and computes_fp8
    try:
        yield
    finally:
        _stand_in.kind, _stand_in.computes_fp8, _stand_in.imbalance = before


def rows_of_groups(rows: int, groups: int) -> list[int]:
    """The rows that each group has on the meta device, such as the tokens of experts: equally many, or the first one
    `imbalance` times the mean and the others the rest."""
    if groups == 1:
        return [rows]
    largest = min(rows, round(_stand_in.imbalance * rows / groups))
    ends = [(rows - largest) * i // (groups - 1) for i in range(groups)]
    return [largest, *(stop - start for start, stop in itertools.pairwise(ends))]


def current() -> torch.device:
    """The accelerator that this thread uses."""
    return torch.device(kind(), torch.accelerator.current_device_index())


def use(device: torch.device) -> None:
    """Make this the thread's current accelerator; does nothing for the CPU."""
    if is_accelerator(device):
        torch.accelerator.set_device_index(device.index or 0)


def using(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """A context in which this is the thread's current accelerator; comparing is cheaper than always switching."""
    here = device.type in KINDS
    if not here or device.index == torch.accelerator.current_device_index():
        return contextlib.nullcontext()
    return torch.accelerator.device_index(device.index)


# --- streams --------------------------------------------------------------------------------------------------------


def new_stream(device: torch.device) -> torch.Stream | None:
    """A new stream; None for a device without streams."""
    return torch.Stream(device) if is_accelerator(device) else None


def current_stream(device: torch.device) -> torch.Stream:
    """The device's current stream."""
    return torch.accelerator.current_stream(device)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all its work."""
    if is_accelerator(device):
        torch.accelerator.synchronize(device)


# --- memory ---------------------------------------------------------------------------------------------------------

_peaks: dict[torch.device, int] = {}
"""By device, the peak before the last `mark_peak`."""


def total_memory(device: torch.device) -> int:
    """Bytes of memory on the accelerator."""
    return int(torch.accelerator.get_memory_info(device)[1])


def spare_memory(device: torch.device) -> int:
    """Bytes of the accelerator's memory that nothing has used so far, here or in other processes; 0 for the CPU."""
    if not is_accelerator(device):
        return 0
    return usable_memory(device) - peak_since_mark(device)


def peak_memory(device: torch.device) -> int:
    """The peak number of allocated bytes since the start."""
    return max(peak_since_mark(device), _peaks.get(device, 0))


def mark_peak(device: torch.device) -> None:
    """Begin a new peak; `peak_memory` remembers the earlier one."""
    _peaks[device] = peak_memory(device)
    torch.accelerator.reset_peak_memory_stats(device)


def peak_since_mark(device: torch.device) -> int:
    """The peak number of allocated bytes since `mark_peak`."""
    return int(torch.accelerator.max_memory_allocated(device))


def allocated_memory(device: torch.device) -> int:
    """The bytes of all tensors on the accelerator."""
    return int(torch.accelerator.memory_allocated(device))


def usable_memory(device: torch.device) -> int:
    """The bytes that this process has on the accelerator or can get: free ones, and those that torch holds ready."""
    return int(torch.accelerator.get_memory_info(device)[0] + torch.accelerator.memory_reserved(device))


def empty_cache(device: torch.device) -> None:
    """Return unused memory of the accelerator to its driver; nothing for the CPU."""
    if is_accelerator(device):
        torch.accelerator.empty_cache()


def allocation_rounding(device: torch.device) -> int:
    """Bytes that the device's allocator rounds sizes up to."""
    return entry.rounding if (entry := kind_of(device)) is not None else 1


def pinned(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Uninitialized pinned host memory from torch's pool, which keeps it until copies from or to it are done."""
    return torch.empty(tuple(shape), dtype=dtype, pin_memory=pins(torch.device(kind())))


def staging(size: int, device: torch.device) -> torch.Tensor:
    """A host buffer for copies to a device: pinned for an accelerator."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=pins(device))


class HostCopy:
    """A copy of a tensor in host memory. Making it does not wait for the device; reading it waits for all work up to
    the copy."""

    def __init__(self, value: torch.Tensor) -> None:
        self._copy = pinned(value.shape, value.dtype).copy_(value, non_blocking=True)
        self._event = current_stream(value.device).record_event() if is_accelerator(value.device) else None

    def read(self) -> list[float]:
        """The values."""
        if self._event is not None:
            self._event.synchronize()
        return self._copy.tolist()


def host_memory(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Uninitialized host memory for long use: pinned if there is an accelerator.

    Large pieces are ordinary memory that is pinned afterwards: torch rounds pinned allocations up to a power of two,
    which for the shards of a large model adds up to gigabytes. torch's pool does not track such memory, so the caller
    must keep it until copies from it are done.
    """
    size = math.prod(shape) * dtype.itemsize
    if kind() == "cpu" or not KINDS[kind()].registers_memory or size < LARGE:
        return pinned(shape, dtype)
    owner = np.empty(size, np.uint8)  # lives as long as the tensor's storage does
    if int(torch.cuda.cudart().cudaHostRegister(owner.ctypes.data, size, 0)) == 0:
        # Unpinned before it is freed: numpy calls finalizers before it releases the memory.
        weakref.finalize(owner, _unlock, owner.ctypes.data).atexit = False
    return torch.from_numpy(owner).view(dtype).view(tuple(shape))


def _unlock(address: int) -> None:
    with contextlib.suppress(RuntimeError):  # the process may be ending
        torch.accelerator.synchronize()  # a copy may still be running
        torch.cuda.cudart().cudaHostUnregister(address)


# --- random generators ----------------------------------------------------------------------------------------------


def rng_state(device: torch.device) -> torch.Tensor | None:
    """The state of the accelerator's default generator; None for the CPU."""
    return torch.get_device_module(device).get_rng_state(device) if is_accelerator(device) else None


def set_rng_state(device: torch.device, state: torch.Tensor) -> None:
    """Set the state of a device's random number generator."""
    if is_accelerator(device):
        torch.get_device_module(device).set_rng_state(state.cpu(), device)
