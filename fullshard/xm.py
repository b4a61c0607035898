"""The names of `torch_xla.core.xla_model`, so that programs for PyTorch/XLA run after changing their imports.

PyTorch/XLA records operations until `mark_step`; the torch engine runs them immediately, so `mark_step` does nothing.
Names without an equivalent raise an error that names the replacement (`distributed/guide_names.py`).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TextIO

import torch
import torch.distributed as dist

from fullshard.config.errors import RuntimeSetupError, UnsupportedError
from fullshard.device.torch_private import tree_map
from fullshard.distributed import engines, guide_names, runtime

__all__ = [
    "RateTracker",
    "add_step_closure",
    "broadcast_master_param",
    "do_on_ordinals",
    "get_local_ordinal",
    "get_memory_info",
    "get_ordinal",
    "get_rng_state",
    "get_xla_supported_devices",
    "is_master_ordinal",
    "mark_step",
    "master_print",
    "mesh_reduce",
    "optimization_barrier_",
    "optimizer_step",
    "rendezvous",
    "save",
    "set_rng_state",
    "unlazy",
    "wait_device_ops",
    "xla_device",
    "xla_device_hw",
    "xrt_world_size",
]

# --- devices and ranks -----------------------------------------------------------------------------------------------


def xla_device(n: int | None = None, devkind: str | None = None) -> torch.device:
    """The device of this process; on XLA, the logical device that stands for all of them. `n` must be None or 0."""
    if n not in (None, 0):
        raise UnsupportedError(
            f"xm.xla_device({n!r}): a process uses one device here, {runtime.device()}; call xm.xla_device(), and for "
            f"more devices {runtime.more_devices(int(n) + 1)}"
        )
    return runtime.device()


def get_xla_supported_devices(devkind: str | None = None, max_devices: int | None = None) -> list[str]:
    """A list with this rank's device."""
    return [str(runtime.device())]


def xla_device_hw(device: str | torch.device) -> str:
    """The type of a device: `CPU`, `CUDA` or `TPU`."""
    kind = torch.device(device).type
    return runtime.device_type() if kind == runtime.device().type else kind.upper()


def get_ordinal(defval: int = 0) -> int:
    """The rank of this process."""
    return runtime.rank()


def get_local_ordinal(defval: int = 0) -> int:
    """The local rank of this process."""
    return runtime.local_rank()


def xrt_world_size(defval: int = 1) -> int:
    """The world size: the number of processes, which is the number of devices."""
    return runtime.world_size()


def is_master_ordinal(local: bool = True) -> bool:
    """Whether this is the first rank of its node, or of the job with `local=False`."""
    return (runtime.local_rank() if local else runtime.rank()) == 0


def get_memory_info(device: str | torch.device | None = None) -> dict[str, int]:
    """Used and total memory of this process's devices, in bytes."""
    return _devices().memory_info(runtime.device() if device is None else torch.device(device))


class RateTracker:
    """Counts per second, for progress lines: `rate()` since it was last read, smoothed; `global_rate()` of all.

    `smooth_factor` is the weight of the last rate in the next one; the default is PyTorch/XLA's.
    """

    def __init__(self, smooth_factor: float | None = None):
        default = os.environ.get("RATE_TRACKER_SMOOTHING", "0.4")
        self.smooth_factor = float(default) if smooth_factor is None else smooth_factor
        self._total = self._since_read = 0.0
        self._began = self._read = time.time()
        self._last: float | None = None

    def add(self, count: float) -> None:
        """Count something, such as the rows of a step."""
        self._total += count
        self._since_read += count

    def rate(self) -> float:
        """Counts per second since the last call, smoothed."""
        now = time.time()
        if now <= self._read:
            return 0.0
        rate = self._since_read / (now - self._read)
        if self._last is not None:
            rate = self.smooth_factor * self._last + (1 - self.smooth_factor) * rate
        self._since_read, self._read, self._last = 0.0, now, rate
        return rate

    def global_rate(self) -> float:
        """Counts per second since the tracker was made."""
        seconds = time.time() - self._began
        return self._total / seconds if seconds > 0 else 0.0


# --- steps -----------------------------------------------------------------------------------------------------------


def mark_step(wait: bool = False, reset_scope: bool = True) -> None:
    """Compile what was recorded, and start it (the torch engine records nothing); with `wait`, wait until the devices
    have finished."""
    runtime.sync(wait)


def wait_device_ops(devices: Sequence[Any] = ()) -> None:
    """Wait until the devices of this process have finished."""
    runtime.sync(wait=True)


def unlazy(tensors: Any) -> None:
    """Compute the tensors, and wait for them."""
    runtime.sync(wait=True)


def optimization_barrier_(tensors: Any) -> None:
    """Keep the compiler from moving operators across these tensors; the torch engine moves none."""
    _devices().optimization_barrier_(tensors)


def add_step_closure(closure: Callable[..., Any], args: Sequence[Any] = (), run_async: bool = False) -> None:
    """Call `closure(*args)` when the step has been computed: at once on the torch engine."""
    _devices().add_step_closure(closure, args, run_async)


def optimizer_step(
    optimizer: torch.optim.Optimizer,
    barrier: bool = False,
    optimizer_args: dict[str, Any] | None = None,
    groups: Any = None,
    pin_layout: bool = True,
) -> Any:
    """`optimizer.step()`, then `mark_step()` if `barrier`. In an SPMD program gradients are global, so nothing is
    reduced here."""
    if not runtime.is_spmd() and runtime.world_size() > 1:
        raise RuntimeSetupError(
            "xm.optimizer_step: without use_spmd() each rank has its own gradients, and they are not reduced. Call "
            "fullshard.runtime.use_spmd() first, and shard the batch or the model (mark_sharding, FSDPv2)."
        )
    loss = optimizer.step(**(optimizer_args or {}))
    if barrier:
        mark_step()
    return loss


def set_rng_state(seed: int, device: Any = None) -> None:
    """Seed the devices' generator."""
    _devices().seed(seed)


def get_rng_state(device: Any = None) -> int:
    """The seed of the devices' generator."""
    return _devices().initial_seed()


# --- between ranks ---------------------------------------------------------------------------------------------------


def master_print(*values: object, fd: TextIO | None = None, local: bool = False, flush: bool = True) -> None:
    """`print` on rank 0, or with `local` on the first rank of each node."""
    if is_master_ordinal(local):
        print(*values, file=fd or sys.stdout, flush=flush)


def rendezvous(tag: str, payload: bytes = b"", replicas: Sequence[int] = ()) -> list[bytes]:
    """Wait for all ranks; returns the payloads of all ranks, in rank order."""
    if replicas and set(replicas) != set(range(runtime.world_size())):
        raise UnsupportedError(
            f"xm.rendezvous({tag!r}, replicas={list(replicas)}): only all ranks are supported; for some of them, use a "
            f"process group of torch.distributed"
        )
    return _of_all_ranks(payload)


def mesh_reduce(tag: str, data: Any, reduce_fn: Callable[[list[Any]], Any]) -> Any:
    """`reduce_fn` applied to the list of all ranks' `data`."""
    return reduce_fn(_of_all_ranks(_on_host(data)))


def do_on_ordinals(target: Callable[..., Any], data: Sequence[Any] = (), ordinals: Iterable[int] = (0,)) -> Any:
    """Call `target(*data)` on the given ranks, with tensors on the host; other ranks wait and return None."""
    values = _on_host(tuple(data))
    result = target(*values) if runtime.rank() in tuple(ordinals) else None
    runtime.barrier()
    return result


def save(data: Any, file_or_path: Any, master_only: bool = True, global_master: bool = False) -> None:
    """`torch.save` of full tensors, by the first rank of each node (of the job, with `global_master`).

    Every rank must call this, and every rank holds all of `data` in host memory; `fullshard.save_state` avoids that.
    """
    whole = _on_host(data)
    if not master_only or is_master_ordinal(local=not global_master):
        torch.save(whole, os.fspath(file_or_path) if isinstance(file_or_path, os.PathLike) else file_or_path)
    runtime.barrier()


def broadcast_master_param(model: torch.nn.Module) -> None:
    """Broadcast unsharded parameters and buffers from rank 0; sharded ones are already consistent."""
    from fullshard.spmd import is_sharded

    for t in (*model.parameters(), *model.buffers()):
        if not is_sharded(t) and runtime.world_size() > 1:
            _devices().broadcast_(t)


def _devices() -> engines.Devices:
    return engines.current().devices


def _of_all_ranks(value: Any) -> list[Any]:
    if not dist.is_initialized() or runtime.world_size() == 1:
        return [value]
    values: list[Any] = [None] * runtime.world_size()
    dist.all_gather_object(values, value)
    return values


def _on_host(data: Any) -> Any:
    from fullshard.spmd.tensor import is_sharded

    def move(t: Any) -> Any:
        if not isinstance(t, torch.Tensor):
            return t
        return (t.full_tensor() if is_sharded(t) else t).detach().cpu()

    return tree_map(move, data)


def __getattr__(name: str) -> Any:
    return guide_names.find_guide_name(__name__, "xm", name)
