"""The names of `torch_xla.core.xla_model` that a program uses, so that it runs with its imports changed.

PyTorch/XLA collects operations until a step is marked; here they run as they are called, so `mark_step` has nothing
to do. Names without a meaning here are refused one by one (`xla_names.py`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TextIO

import torch
import torch.distributed as dist

from fullshard import accelerator, runtime, xla_names
from fullshard.errors import RuntimeSetupError, UnsupportedError
from fullshard.torch_private import tree_map

__all__ = [
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
    """The device of this rank. A process has one, so no other can be asked for."""
    if n not in (None, 0):
        raise UnsupportedError(
            f"xm.xla_device({n!r}): a process drives one device here; start one process per device with torchrun or "
            f"fullshard launch, and call xm.xla_device()"
        )
    return runtime.device()


def get_xla_supported_devices(devkind: str | None = None, max_devices: int | None = None) -> list[str]:
    """This rank's device, in a list."""
    return [str(runtime.device())]


def xla_device_hw(device: str | torch.device) -> str:
    """The kind of a device: `CPU`, `CUDA`."""
    return torch.device(device).type.upper()


def get_ordinal(defval: int = 0) -> int:
    """This process's number among all, from 0."""
    return runtime.rank()


def get_local_ordinal(defval: int = 0) -> int:
    """This process's number among those of its node, from 0."""
    return runtime.local_rank()


def xrt_world_size(defval: int = 1) -> int:
    """How many processes, and so devices, the program runs on."""
    return runtime.world_size()


def is_master_ordinal(local: bool = True) -> bool:
    """Whether this is the first rank of its node, or with `local=False` of all."""
    return (runtime.local_rank() if local else runtime.rank()) == 0


def get_memory_info(device: str | torch.device | None = None) -> dict[str, int]:
    """Bytes used and present on this rank's GPU."""
    if runtime.device().type != "cuda":
        raise UnsupportedError(f"xm.get_memory_info: known of GPUs only; this rank's device is {runtime.device()}")
    free, total = torch.cuda.mem_get_info(runtime.device())
    return {"bytes_used": total - free, "bytes_limit": total, "peak_bytes_used": torch.cuda.max_memory_reserved()}


# --- steps -----------------------------------------------------------------------------------------------------------


def mark_step(wait: bool = False, reset_scope: bool = True) -> None:
    """Nothing to launch; with `wait`, wait until the device has finished."""
    if wait:
        wait_device_ops()


def wait_device_ops(devices: Sequence[Any] = ()) -> None:
    """Wait until this rank's device has finished what it was given."""
    accelerator.synchronize(runtime.device())


def unlazy(tensors: Any) -> None:
    """Wait for the values of tensors; none is lazy here."""
    wait_device_ops()


def optimization_barrier_(tensors: Any) -> None:
    """Nothing to do: no compiler reorders operations."""


def add_step_closure(closure: Callable[..., Any], args: Sequence[Any] = (), run_async: bool = False) -> None:
    """Call `closure(*args)`, at once: the values are there."""
    closure(*args)


def optimizer_step(
    optimizer: torch.optim.Optimizer,
    barrier: bool = False,
    optimizer_args: dict[str, Any] | None = None,
    groups: Any = None,
    pin_layout: bool = True,
) -> Any:
    """`optimizer.step()`. In a program over all devices gradients are global, so there is nothing to add up."""
    if not runtime.is_spmd() and runtime.world_size() > 1:
        raise RuntimeSetupError(
            "xm.optimizer_step: without use_spmd() each rank has gradients of its own, and nothing here adds them up. "
            "Call fullshard.runtime.use_spmd() first, and shard batch or model (mark_sharding, FSDPv2)."
        )
    return optimizer.step(**(optimizer_args or {}))


def set_rng_state(seed: int, device: Any = None) -> None:
    """Seed torch's generators."""
    torch.manual_seed(seed)


def get_rng_state(device: Any = None) -> int:
    """The seed of torch's generators."""
    return torch.initial_seed()


# --- between ranks ---------------------------------------------------------------------------------------------------


def master_print(*values: object, fd: TextIO | None = None, local: bool = False, flush: bool = True) -> None:
    """`print` on rank 0, or with `local` on the first rank of each node."""
    if is_master_ordinal(local):
        print(*values, file=fd or sys.stdout, flush=flush)


def rendezvous(tag: str, payload: bytes = b"", replicas: Sequence[int] = ()) -> list[bytes]:
    """Wait for all ranks; returns what each gave, in their order."""
    if replicas and set(replicas) != set(range(runtime.world_size())):
        raise UnsupportedError(
            f"xm.rendezvous({tag!r}, replicas={list(replicas)}): all ranks meet here; for some of them use a group of "
            f"torch.distributed"
        )
    return _of_all_ranks(payload)


def mesh_reduce(tag: str, data: Any, reduce_fn: Callable[[list[Any]], Any]) -> Any:
    """What `reduce_fn` makes of the list of every rank's `data`."""
    return reduce_fn(_of_all_ranks(_on_host(data)))


def do_on_ordinals(target: Callable[..., Any], data: Sequence[Any] = (), ordinals: Iterable[int] = (0,)) -> Any:
    """Call `target(*data)` on the given ranks, tensors on the host; the others wait and get None."""
    values = _on_host(tuple(data))
    result = target(*values) if runtime.rank() in tuple(ordinals) else None
    runtime.barrier()
    return result


def save(data: Any, file_or_path: Any, master_only: bool = True, global_master: bool = False) -> None:
    """`torch.save` of whole values on the host, by the first rank of each node (of all, with `global_master`).

    Every rank calls it. Each holds all of `data` in host memory on the way; `fullshard.save_state` does not.
    """
    whole = _on_host(data)
    if not master_only or is_master_ordinal(local=not global_master):
        torch.save(whole, os.fspath(file_or_path) if isinstance(file_or_path, os.PathLike) else file_or_path)
    runtime.barrier()


def broadcast_master_param(model: torch.nn.Module) -> None:
    """Give every rank the plain parameters and buffers of rank 0; sharded ones are one value already."""
    from fullshard.spmd.tensor import is_sharded

    for t in (*model.parameters(), *model.buffers()):
        if not is_sharded(t) and runtime.world_size() > 1:
            dist.broadcast(t.data, src=0)


def _of_all_ranks(value: Any) -> list[Any]:
    if not dist.is_initialized() or runtime.world_size() == 1:
        return [value]
    found: list[Any] = [None] * runtime.world_size()
    dist.all_gather_object(found, value)
    return found


def _on_host(data: Any) -> Any:
    from fullshard.spmd.tensor import is_sharded

    def move(t: Any) -> Any:
        if not isinstance(t, torch.Tensor):
            return t
        return (t.full_tensor() if is_sharded(t) else t).detach().cpu()

    return tree_map(move, data)


def __getattr__(name: str) -> Any:
    xla_names.refuse(__name__, "xm", name)
