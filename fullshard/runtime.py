"""The process group, this process's rank and device, and seeds.

`use_spmd()` makes the process one rank of a program over all devices. It reads the launcher's variables (without a
launcher the world size is 1), chooses device and backend, and sets the same random state on every rank.
`fullshard.spmd` lays tensors out over those ranks. Logging is in `rank_logging.py` and is available here too.
"""

from __future__ import annotations

import atexit
import os
import random
import socket
import threading
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from fullshard import accelerator, engines, groups, xla_names
from fullshard.device_kinds import KINDS
from fullshard.errors import RuntimeSetupError, UnsupportedError, first_line
from fullshard.foreign_wrappers import refuse_foreign_wrappers as refuse_foreign_wrappers
from fullshard.foreign_wrappers import refuse_live_wrappers
from fullshard.processes import this_process
from fullshard.rank_env import (
    DEVICE_VARIABLE,
    INIT_TIMEOUT_VARIABLE,
    Launch,
    choose_backend,
    choose_device,
    choose_init_timeout,
    gpu_count,
    read_launcher,
    read_local_place,
)
from fullshard.rank_logging import forget_warnings as forget_warnings
from fullshard.rank_logging import get_logger as get_logger
from fullshard.rank_logging import print0 as print0
from fullshard.rank_logging import print_rank as print_rank
from fullshard.rank_logging import warn_once as warn_once
from fullshard.rank_logging import warned as warned
from fullshard.rendezvous import Meeting, meet
from fullshard.torch_private import default_store
from fullshard.transport import Transport, transport_of

SHUTDOWN_PATIENCE = 5.0
"""Seconds that `shutdown()` waits for unfinished communication."""

_launch: Launch | None = None  # set while SPMD is on
_device: torch.device | None = None
_owns_group = False
_leaving: _Leaving | None = None  # of the process group that we own
_announced = False  # whether the transport of this process group was logged
_met = Meeting()  # what the ranks of our process group found out about each other
_starts = 0  # how many groups were created: keeps their keys in the store apart


# ------------------------------------------------------------------------------------------------- starting, stopping


def use_spmd(
    auto: bool = False,
    *,
    modules: torch.nn.Module | Iterable[torch.nn.Module] = (),
    device: str | None = None,
    init_timeout: float | None = None,
) -> None:
    """Make this process one rank of a program over all devices. Further calls do nothing.

    - `modules` are checked for wrappers that cannot be combined with SPMD (DDP, FSDP, DeepSpeed); modules that exist
      when a process group does are checked without being passed.
    - `device` is "cpu" or the type of an accelerator, such as "cuda"; default: `FULLSHARD_DEVICE`, else the accelerator
      if there is one (docs/devices.md).
    - `init_timeout` is how many seconds to wait for the other ranks; default: `FULLSHARD_INIT_TIMEOUT`, else 300.

    An existing process group is used as it is.
    """
    check_use_spmd(auto, modules)
    if is_spmd():
        return
    engines.require_torch_engine("use_spmd()")
    seconds = choose_init_timeout(init_timeout, os.environ)
    if dist.is_initialized():
        # Every such wrapper needs a process group, so only now can one exist.
        refuse_live_wrappers()
        place = _place_in_group() or _place_by_host()
        joined(place, _adopted_device(device or os.environ.get(DEVICE_VARIABLE)), owned=False)
    else:
        launch = read_launcher(os.environ)
        asked = device or os.environ.get(DEVICE_VARIABLE)
        if asked != "cpu" and device_note():
            warn_once("accelerator", device_note())
        chosen = choose_device(asked, launch.local_rank, gpu_count())
        accelerator.use(chosen)
        _init_group(launch, chosen, seconds)
        joined(launch, chosen, owned=True)
    _share_generator()


def check_use_spmd(auto: bool, modules: torch.nn.Module | Iterable[torch.nn.Module]) -> None:
    """Refuse arguments of `use_spmd` that no engine supports."""
    if auto:
        raise UnsupportedError(
            "use_spmd(auto=True): fullshard does not choose layouts automatically. Call use_spmd() and mark tensors "
            "with fullshard.spmd.mark_sharding."
        )
    for module in [modules] if isinstance(modules, torch.nn.Module) else modules:
        refuse_foreign_wrappers(module)


def joined(launch: Launch, chosen: torch.device, owned: bool) -> None:
    """Record this process's place and device in the process group; `owned` if `shutdown()` destroys the group."""
    global _launch, _device, _owns_group, _announced, _leaving
    _launch, _device, _owns_group, _announced = launch, chosen, owned, False
    if owned:
        _leaving = _Leaving()


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
        found, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=seconds)))
        # A restarted job may find the store of its last attempt, with addresses of processes that have ended.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"fullshard/{attempt}/{_starts}", found)
        _met = meet(store, launch, device, seconds, get_logger().warning)
        backend = choose_backend(device.type, own=_met.own)
        dist.init_process_group(backend, store=store, rank=launch.rank, world_size=launch.world_size)
        # So that a rank stopped or killed before its first heartbeat can be found (see `watchdog/heartbeat.py`).
        default_store().set(f"watch/process/{launch.rank}", this_process().text())
    except (RuntimeError, ValueError, OSError) as error:
        if isinstance(error, RuntimeSetupError):
            raise
        reason = first_line(error)
        raise RuntimeSetupError(
            f"Rank {launch.rank} of {launch.world_size} could not join the process group at {launch.master} "
            f"(MASTER_ADDR:MASTER_PORT) with backend {backend}, within {seconds:g} s: {reason}. Check that every node "
            f"reaches that address and that all ranks were started; {INIT_TIMEOUT_VARIABLE} sets the timeout."
        ) from error


def _place_in_group() -> Launch | None:
    """This rank's place in an existing process group, if it can be determined without communication."""
    world, local = dist.get_world_size(), read_local_place(os.environ)
    if world == 1:
        return Launch()
    return Launch(dist.get_rank(), world, *local, node_count=-(-world // local[1])) if local else None


def _place_by_host() -> Launch:
    """The same, from the host names of all ranks."""
    me, hosts = dist.get_rank(), [""] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    here = [r for r, host in enumerate(hosts) if host == hosts[me]]
    return Launch(me, len(hosts), here.index(me), len(here), len(set(hosts)))


def _adopted_device(wanted: str | None) -> torch.device:
    assert dist.group.WORLD is not None
    chosen = choose_device(wanted, 0, gpu_count() if groups.carries(dist.group.WORLD, accelerator.kind()) else 0)
    # The program that created the group has also chosen the GPU.
    return accelerator.current() if accelerator.is_accelerator(chosen) else chosen


def _share_generator() -> None:
    """Copy rank 0's default random states to all ranks, so that a random global value is the same everywhere."""
    assert _device is not None and dist.group.WORLD is not None
    if dist.get_world_size() == 1:
        return
    carrier = torch.device("cpu") if groups.carries(dist.group.WORLD, "cpu") else _device
    state = torch.get_rng_state().to(carrier)
    dist.broadcast(state, src=0)
    torch.set_rng_state(state.cpu())
    own = accelerator.rng_state(_device)
    if own is not None:
        own = own.to(carrier)
        dist.broadcast(own, src=0)
        accelerator.set_rng_state(_device, own)


@atexit.register
def shutdown() -> None:
    """Destroy the process group. Safe to call twice, at exit, after an exception, and when other ranks are gone."""
    global _launch, _device, _owns_group
    owned, _launch, _device, _owns_group = _owns_group, None, None, False
    if not owned or not dist.is_initialized():
        return
    assert _leaving is not None
    _leaving.asked.set()
    _leaving.join(SHUTDOWN_PATIENCE)


def abandon() -> None:
    """Do not destroy the process group at exit: its communicators are being aborted already."""
    global _owns_group
    _owns_group = False


class _Leaving(threading.Thread):
    """Destroys the process group when it is asked to.

    Communication that never finishes (its peer is stopped) would block the group's destructor, so that runs in a
    thread, which is abandoned if it takes too long. It waits from the start, since Python starts no thread at exit.
    """

    def __init__(self) -> None:
        super().__init__(name="fullshard-shutdown", daemon=True)
        self.asked = threading.Event()
        self.start()

    def run(self) -> None:
        self.asked.wait()
        try:
            dist.destroy_process_group()
        except Exception as error:  # the program ends: nothing is left to do
            get_logger().debug("destroying the process group: %s", error)


def barrier() -> None:
    """Wait for all ranks; returns at once without a process group."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        assert dist.group.WORLD is not None
        on_gpu = accelerator.is_accelerator(device()) and groups.backend_of(dist.group.WORLD, device()) != "gloo"
        dist.barrier(device_ids=[device().index] if on_gpu else None)


# ---------------------------------------------------------------------------------------------------- rank and device


def _place() -> Launch:
    """This process's place among all, before `use_spmd()` too; never communicates."""
    if _launch is not None:
        return _launch
    if not dist.is_initialized():
        return read_launcher(os.environ)
    place = _place_in_group()
    if place is None:
        raise RuntimeSetupError(
            "A process group exists, but LOCAL_RANK and LOCAL_WORLD_SIZE are not set, so the node of each rank is not "
            "known. Call fullshard.runtime.use_spmd() first; it determines them."
        )
    return place


def is_spmd() -> bool:
    """Whether `use_spmd()` was called."""
    return _launch is not None and dist.is_initialized()


def rank() -> int:
    """This process's rank, from 0."""
    return dist.get_rank() if dist.is_initialized() else _place().rank


def world_size() -> int:
    """The number of processes. On the torch engine each has one device."""
    return dist.get_world_size() if dist.is_initialized() else _place().world_size


def local_rank() -> int:
    """This process's rank on its node, from 0."""
    return _place().local_rank


def local_world_size() -> int:
    """The number of processes on this node."""
    return _place().local_world_size


def node_count() -> int:
    """The number of nodes."""
    return _place().node_count


def is_main() -> bool:
    """Whether this is rank 0, which prints, and writes files for all ranks."""
    return rank() == 0


def device() -> torch.device:
    """The device of this rank."""
    if _device is not None:
        return _device
    return choose_device(os.environ.get(DEVICE_VARIABLE), _place().local_rank, gpu_count())


def device_note() -> str:
    """What to know about this machine's accelerator: its type has no entry in `device_kinds.KINDS`, or fullshard was
    never run on it; "" if neither is so."""
    found, kind = accelerator.found(), accelerator.kind()
    if found and kind == "cpu":
        return (
            f"torch reports an accelerator of type {found!r}, which fullshard does not support, so the CPU is used. "
            f"Supported types: {', '.join(KINDS)}; docs/devices.md tells what another one needs."
        )
    if found and not KINDS[kind].tested:
        return (
            f"Devices of type {kind!r} have not been tried with fullshard so far. Compare the first losses with those "
            f"of a short run on the CPU ({DEVICE_VARIABLE}=cpu); see docs/devices.md."
        )
    return ""


def transport() -> Transport:
    """How tensors of this rank's device are sent to other ranks, and why."""
    assert dist.group.WORLD is not None or world_size() == 1, "call use_spmd() first"
    backend = groups.backend_of(dist.group.WORLD, device()) if dist.group.WORLD is not None else ""
    kind, numbers = device().type, (world_size(), local_world_size(), gpu_count())
    if _owns_group:
        return transport_of(backend, kind, *numbers, shared=_met.shared, without=_met.without)
    without = "" if groups.has_own(kind) else "this rank"
    shared = "ranks share GPUs" if local_world_size() > gpu_count() else ""
    return transport_of(backend, kind, *numbers, shared=shared, without=without, ours=False)


def announce_transport(say: Callable[[str], None] | None = None) -> None:
    """Report the transport once per process group; as a warning if NCCL could be used and is not.

    `say` prints a line on rank 0; without it the line is logged.
    """
    global _announced
    if _announced:
        return
    _announced, way = True, transport()
    if way.fix:
        warn_once("transport", f"transport: {way}. Every step waits for copies that NCCL does not need. {way.fix}")
    elif say is not None:
        say(f"transport: {way}")
    elif world_size() > 1:
        get_logger().info("transport: %s", way)


# PyTorch/XLA's names. Each rank has one device, so there are as many devices as processes.
xla_device = device
global_runtime_device_count = global_device_count = process_count = world_size
process_index = global_ordinal = rank
local_ordinal = local_rank
local_process_count = local_device_count = local_world_size


def addressable_device_count() -> int:
    """The number of devices of this process: one."""
    return 1


def addressable_runtime_device_count() -> int:
    """The same, by PyTorch/XLA's older name."""
    return addressable_device_count()


def more_devices(count: int) -> str:
    """How to start a job with `count` devices, for messages."""
    return f"start more processes (torchrun --nproc_per_node {count})"


def device_type() -> str:
    """The type of this rank's device: `CPU` or `CUDA`."""
    return device().type.upper()


def host_index() -> int:
    """The index of this rank's node, from 0."""
    return rank() // local_world_size()


def get_master_ip() -> str:
    """The address of rank 0."""
    return os.environ.get("MASTER_ADDR", "127.0.0.1")


def initialize_cache(path: str, readonly: bool = False) -> None:
    """Does nothing: there is no cache of compiled programs."""


def sync(wait: bool = False) -> None:
    """With `wait`, wait until this rank's device has finished. (On XLA, run what was recorded.)"""
    if wait:
        accelerator.synchronize(device())


def flush() -> None:
    """Nothing: operators are issued at once. (On XLA, run what was recorded, and keep the generator's state.)"""


def __getattr__(name: str) -> Any:
    return xla_names.find(__name__, "xr", name)


# ------------------------------------------------------------------------------------------------------------- seeds


def seed(n: int, *, per_rank: bool = False, deterministic: bool = False) -> None:
    """Seed Python, numpy and torch (CPU and CUDA) with `n` on every rank, or with `n + rank` if `per_rank`.

    `deterministic` also restricts torch to deterministic kernels; operators without one then raise.
    """
    if not isinstance(n, int | np.integer) or n < 0:
        raise RuntimeSetupError(f"seed({n!r}): expected an integer of 0 or more.")
    value = int(n) + (rank() if per_rank else 0)
    random.seed(value)
    np.random.seed(value % 2**32)
    torch.manual_seed(value)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


def generator_state() -> tuple[str, Any]:
    """The type of this rank's device, and the state of its default generator: None for the CPU."""
    return device().type, accelerator.rng_state(device())


def set_generator_state(state: Any) -> None:
    """Restore the state of the device's generator."""
    accelerator.set_rng_state(device(), state)


engines.use_xla_names(globals(), "devices")
