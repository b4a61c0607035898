"""Processes and devices on torch's own engine: one process per device, joined in a process group.

Implements `engines.Devices`. Operators run at once, so there is nothing to compile, to flush or to wait for in order.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fullshard.config.errors import RuntimeSetupError, UnsupportedError, first_line
from fullshard.device import accelerator
from fullshard.device.torch_private import default_store, sign_objects, skips_on_device
from fullshard.distributed import groups, runtime
from fullshard.distributed.foreign_wrappers import refuse_live_wrappers
from fullshard.distributed.job_store import JobStore, SignedPickler, attempt, job_secret, listen
from fullshard.distributed.processes import this_process
from fullshard.distributed.rank_env import (
    DEVICE_VARIABLE,
    INIT_TIMEOUT_VARIABLE,
    JOINED_VARIABLE,
    Launch,
    choose_backend,
    choose_device,
    choose_init_timeout,
    gpu_count,
    read_launcher,
)
from fullshard.distributed.rank_logging import get_logger
from fullshard.distributed.rendezvous import Meeting, meet
from fullshard.distributed.transport import Transport, transport_of
from fullshard.distributed.watchdog import watch

_met = Meeting()  # what the ranks of our process group found out about each other
_starts = 0  # how many groups were created: keeps their keys in the store apart

host_copy = accelerator.HostCopy


# --- joining ----------------------------------------------------------------------------------------------------------


def join(device: str | None, init_timeout: float | None) -> None:
    """Create the process group, or use an existing one as it is; copy rank 0's random states to all ranks."""
    seconds = choose_init_timeout(init_timeout, os.environ)
    if job_secret():
        sign_objects(SignedPickler)
    requested = device or os.environ.get(DEVICE_VARIABLE)
    if dist.is_initialized():
        # Every such wrapper needs a process group, so only now can one exist.
        refuse_live_wrappers()
        runtime.begin_generation(attempt())
        place = runtime.place_in_group() or _place_by_host()
        chosen = _adopted_device(requested)
        runtime.record_join(place, chosen, owned=False)
    else:
        launch = read_launcher(os.environ)
        if requested != "cpu":
            runtime.warn_of_new_device()
        chosen = choose_device(requested, launch.local_rank, gpu_count())
        accelerator.use(chosen)
        _init_group(launch, chosen, seconds)
        runtime.record_join(launch, chosen, owned=True)
    _share_generator(chosen)
    if folder := os.environ.get(JOINED_VARIABLE):
        with contextlib.suppress(OSError):  # a launcher that has ended
            (Path(folder) / f"{attempt()}-{runtime.rank()}").touch()


def _init_group(launch: Launch, device: torch.device, seconds: float) -> None:
    global _starts, _met
    _starts += 1
    backend = choose_backend(device.type, own=groups.has_own(device.type))
    groups.disable_nccl_abort(backend)
    if launch.world_size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        return
    if launch.one_node and "GLOO_SOCKET_IFNAME" not in os.environ:
        for _, name in socket.if_nameindex():
            if name in ("lo", "lo0"):  # as Linux and macOS call it
                os.environ["GLOO_SOCKET_IFNAME"] = name
    try:
        # A restarted job may find the store of its last attempt, with addresses of processes that have ended.
        generation = f"{attempt()}/{_starts}"
        runtime.begin_generation(generation)
        store = dist.PrefixStore(f"fullshard/{generation}", _open_store(launch, timedelta(seconds=seconds)))
        warn = get_logger().warning
        _met = meet(JobStore(store, generation, "meet/", warn), launch, device, seconds, warn)
        backend = choose_backend(device.type, own=_met.own)
        dist.init_process_group(backend, store=store, rank=launch.rank, world_size=launch.world_size)
        # So that a rank stopped or killed before its first heartbeat can be found (`watchdog/heartbeat.py`).
        runtime.watch_store(default_store()).put(f"process/{launch.rank}", this_process().text())
    except (RuntimeError, ValueError, OSError) as error:
        if isinstance(error, RuntimeSetupError):
            raise
        reason = first_line(error)
        raise RuntimeSetupError(
            f"Rank {launch.rank} of {launch.world_size} could not join the process group at {launch.master} "
            f"(MASTER_ADDR:MASTER_PORT) with backend {backend}, within {seconds:g} s: {reason}. Check that every node "
            f"reaches that address and that all ranks were started; {INIT_TIMEOUT_VARIABLE} sets the timeout."
        ) from error


def _open_store(launch: Launch, timeout: timedelta) -> dist.TCPStore:
    """The store that the launcher holds, else rank 0."""
    host, _, port = launch.master.rpartition(":")
    if launch.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return listen(host, int(port), timeout)
    return dist.TCPStore(host, int(port), is_master=False, timeout=timeout)


def _place_by_host() -> Launch:
    """This rank's place in an existing process group, from the host names of all ranks."""
    me, hosts = dist.get_rank(), [""] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    here = [r for r, host in enumerate(hosts) if host == hosts[me]]
    return Launch(me, len(hosts), here.index(me), len(here), len(set(hosts)))


def _adopted_device(requested: str | None) -> torch.device:
    assert dist.group.WORLD is not None
    has_backend = groups.has_backend_for(dist.group.WORLD, accelerator.kind())
    chosen = choose_device(requested, 0, gpu_count() if has_backend else 0)
    # The program that created the group has also chosen the GPU.
    return accelerator.current() if accelerator.is_accelerator(chosen) else chosen


def _share_generator(device: torch.device) -> None:
    """Copy rank 0's default random states to all ranks, so that a random global value is the same everywhere."""
    assert dist.group.WORLD is not None
    if dist.get_world_size() == 1:
        return
    carrier = torch.device("cpu") if groups.has_backend_for(dist.group.WORLD, "cpu") else device
    state = torch.get_rng_state().to(carrier)
    dist.broadcast(state, src=0)
    torch.set_rng_state(state.cpu())
    own = accelerator.rng_state(device)
    if own is not None:
        own = own.to(carrier)
        dist.broadcast(own, src=0)
        accelerator.set_rng_state(device, own)


# --- devices ----------------------------------------------------------------------------------------------------------


def default_device() -> torch.device:
    """The device that this rank would join with."""
    return choose_device(os.environ.get(DEVICE_VARIABLE), runtime.local_rank(), gpu_count())


def device_type() -> str:
    """The type of this rank's device: `CPU` or `CUDA`."""
    return runtime.device().type.upper()


def addressable_count() -> int:
    """One: a process has one device."""
    return 1


def local_count() -> int:
    """The number of processes on this node."""
    return runtime.local_world_size()


def global_count() -> int:
    """The number of processes."""
    return runtime.world_size()


def more_devices(count: int) -> str:
    """How to start a job with `count` devices, for messages."""
    return f"start more processes (torchrun --nproc_per_node {count})"


def master_address() -> str:
    """The address of rank 0."""
    return os.environ.get("MASTER_ADDR", "127.0.0.1")


def initialize_cache(path: str, readonly: bool) -> None:
    """Does nothing: there is no cache of compiled programs."""


def transport() -> Transport:
    """How tensors of this rank's device are sent to other ranks, and why."""
    assert dist.group.WORLD is not None or runtime.world_size() == 1, "call use_spmd() first"
    device = runtime.device()
    backend = groups.backend_of(dist.group.WORLD, device) if dist.group.WORLD is not None else ""
    kind, numbers = device.type, (runtime.world_size(), runtime.local_world_size(), gpu_count())
    if runtime.owns_group():
        return transport_of(backend, kind, *numbers, shared=_met.shared, without=_met.without)
    without = "" if groups.has_own(kind) else "this rank"
    shared = "ranks share GPUs" if runtime.local_world_size() > gpu_count() else ""
    return transport_of(backend, kind, *numbers, shared=shared, without=without, ours=False)


def memory_info(device: torch.device) -> dict[str, int]:
    """Used and total memory of this rank's GPU, in bytes."""
    if not accelerator.is_accelerator(device):
        raise UnsupportedError(f"xm.get_memory_info: only for GPUs; this rank's device is {device}")
    free, total = torch.accelerator.get_memory_info(device)
    peak = torch.accelerator.max_memory_reserved(device)
    return {"bytes_used": total - free, "bytes_limit": total, "peak_bytes_used": peak}


# --- random numbers ---------------------------------------------------------------------------------------------------


def seed(number: int) -> None:
    """Seed torch's generators, that of the device included."""
    torch.manual_seed(number)


def initial_seed() -> int:
    """The seed of torch's generators."""
    return torch.initial_seed()


def generator_state() -> tuple[str, Any]:
    """The type of this rank's device, and the state of its default generator: None for the CPU."""
    return runtime.device().type, accelerator.rng_state(runtime.device())


def set_generator_state(state: Any) -> None:
    """Restore the state of the device's generator."""
    accelerator.set_rng_state(runtime.device(), state)


# --- steps ------------------------------------------------------------------------------------------------------------


def sync(wait: bool) -> None:
    """With `wait`, wait until this rank's device has finished."""
    if wait:
        accelerator.synchronize(runtime.device())


def flush() -> None:
    """Does nothing: operators are issued at once."""


def add_step_closure(closure: Callable[..., Any], args: Sequence[Any], run_async: bool) -> None:
    """Call `closure(*args)` immediately."""
    closure(*args)


def optimization_barrier_(tensors: Any) -> None:
    """Does nothing: no compiler reorders operations."""


def broadcast_(t: torch.Tensor) -> None:
    """Broadcast an unsharded tensor from rank 0."""
    dist.broadcast(t.data, src=0)


def place(value: torch.Tensor, pin: bool) -> torch.Tensor:
    """A tensor of this rank's batch on its device; `pin` copies through pinned memory, without waiting."""
    pinned = pin and accelerator.pins(runtime.device())
    return (value.pin_memory() if pinned else value).to(runtime.device(), non_blocking=pinned)


class SkippingGuard:
    """An `engines.UpdateGuard`: the optimizer's own kernels skip the update, as they do for a `GradScaler`."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer: Any = optimizer
        self._failed = torch.zeros((), device=runtime.device())
        """1 from the first step on that must not change weights."""

    def step(self, values: torch.Tensor) -> None:
        """The optimizer's step, unless this step or an earlier one failed."""
        unusable = torch.isfinite(values[0] + values[-1]).logical_not_()
        self._failed = torch.maximum(self._failed, unusable.to(torch.float32))
        if runtime.world_size() > 1:
            lost = watch.failure_flag().to(runtime.device(), non_blocking=True)
            self._failed = torch.maximum(self._failed, lost)
        self._optimizer.found_inf = self._failed
        try:
            self._optimizer.step()
        finally:
            del self._optimizer.found_inf

    def reset(self) -> None:
        """Update again, after the updates issued so far."""
        self._failed = torch.zeros_like(self._failed)


def update_guard(optimizer: torch.optim.Optimizer) -> SkippingGuard | None:
    """A guard, where the optimizer can skip an update on the device and all of its parameters are there."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    serves = skips_on_device(optimizer) and all(p.device == runtime.device() for p in parameters)
    return SkippingGuard(optimizer) if serves else None
