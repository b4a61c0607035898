"""The process group, this process's rank and device, and seeds.

`use_spmd()` makes the process one rank of a program over all devices. It reads the launcher's variables (without a
launcher the world size is 1), chooses device and backend, and sets the same random state on every rank.
`fullshard.spmd` lays tensors out over those ranks. Logging is in `rank_logging.py` and is available here too.
"""

from __future__ import annotations

import atexit
import os
import random
import threading
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from fullshard.config.errors import RuntimeSetupError, UnsupportedError
from fullshard.device import accelerator
from fullshard.device.device_kinds import KINDS
from fullshard.distributed import engines, groups
from fullshard.distributed.foreign_wrappers import refuse_foreign_wrappers as refuse_foreign_wrappers
from fullshard.distributed.job_store import JobStore
from fullshard.distributed.rank_env import DEVICE_VARIABLE, Launch, read_launcher, read_local_place
from fullshard.distributed.rank_logging import forget_warnings as forget_warnings
from fullshard.distributed.rank_logging import get_logger as get_logger
from fullshard.distributed.rank_logging import print0 as print0
from fullshard.distributed.rank_logging import print_rank as print_rank
from fullshard.distributed.rank_logging import warn_once as warn_once
from fullshard.distributed.rank_logging import warned as warned
from fullshard.distributed.transport import Transport

SHUTDOWN_PATIENCE = 5.0
"""Seconds that `shutdown()` waits for unfinished communication."""

_launch: Launch | None = None  # set while SPMD is on
_device: torch.device | None = None
_owns_group = False
_leaving: _Leaving | None = None  # of the process group that we own
_announced = False  # whether the transport of this process group was logged
_generation = ""  # of the values in the store of our process group


# ------------------------------------------------------------------------------------------------- starting, stopping


def use_spmd(
    auto: bool = False,
    *,
    modules: torch.nn.Module | Iterable[torch.nn.Module] = (),
    device: str | None = None,
    init_timeout: float | None = None,
) -> None:
    """Make this process part of a program over all devices. Further calls do nothing.

    - `modules` are checked for wrappers that cannot be combined with SPMD (DDP, FSDP, DeepSpeed); modules that exist
      when a process group does are checked without being passed.
    - `device` is "cpu" or the type of an accelerator, such as "cuda"; default: `FULLSHARD_DEVICE`, else the accelerator
      if there is one (docs/devices.md).
    - `init_timeout` is how many seconds to wait for the other ranks; default: `FULLSHARD_INIT_TIMEOUT`, else 300.

    On the torch engine each process is a rank with one device, and an existing process group is used as it is. On XLA
    one process drives all devices of its host; processes on several hosts are joined by torch_xla, and also get a Gloo
    group, for data of the host.
    """
    if auto:
        raise UnsupportedError(
            "use_spmd(auto=True): fullshard does not choose layouts automatically. Call use_spmd() and mark tensors "
            "with fullshard.spmd.mark_sharding."
        )
    for module in [modules] if isinstance(modules, torch.nn.Module) else modules:
        refuse_foreign_wrappers(module)
    if not is_spmd():
        engines.current().devices.join(device, init_timeout)


def record_join(launch: Launch, chosen: torch.device, owned: bool) -> None:
    """Record this process's place and device in the process group; `owned` if `shutdown()` destroys the group."""
    global _launch, _device, _owns_group, _announced, _leaving
    _launch, _device, _owns_group, _announced = launch, chosen, owned, False
    if owned:
        _leaving = _Leaving()


def begin_generation(generation: str) -> None:
    """Set which generation of the job the values in its store must belong to."""
    global _generation
    _generation = generation


def watch_store(store: Any) -> JobStore:
    """The watchdog's values in the store of the job's process group."""
    return JobStore(store, _generation, "watch/", get_logger().warning)


def place_in_group() -> Launch | None:
    """This rank's place in an existing process group, if it can be determined without communication."""
    world, local = dist.get_world_size(), read_local_place(os.environ)
    if world == 1:
        return Launch()
    return Launch(dist.get_rank(), world, *local, node_count=-(-world // local[1])) if local else None


@atexit.register
def shutdown() -> None:
    """Destroy the process group. Safe to call twice, at exit, after an exception, and when other ranks are gone."""
    global _launch, _device, _owns_group
    owned, _launch, _device, _owns_group = _owns_group, None, None, False
    if not owned or not dist.is_initialized():
        return
    assert _leaving is not None
    _leaving.leave.set()
    _leaving.join(SHUTDOWN_PATIENCE)


def owns_group() -> bool:
    """Whether the process group was created by `use_spmd()`."""
    return _owns_group


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
        self.leave = threading.Event()
        self.start()

    def run(self) -> None:
        self.leave.wait()
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
    place = place_in_group()
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
    """The device of this process."""
    return _device if _device is not None else engines.current().devices.default_device()


def device_note() -> str:
    """What to know about this machine's accelerator: its type has no entry in `device_kinds.KINDS`, or fullshard was
    never run on it; "" if neither is so."""
    reported, kind = accelerator.reported_kind(), accelerator.kind()
    if reported and kind == "cpu":
        return (
            f"torch reports an accelerator of type {reported!r}, which fullshard does not support, so the CPU is used. "
            f"Supported types: {', '.join(KINDS)}; docs/devices.md tells what another one needs."
        )
    if reported and not KINDS[kind].tested:
        return (
            f"Devices of type {kind!r} have not been tried with fullshard so far. Compare the first losses with those "
            f"of a short run on the CPU ({DEVICE_VARIABLE}=cpu); see docs/devices.md."
        )
    return ""


def warn_of_new_device() -> None:
    """Warn once where this machine's accelerator has not been tried."""
    if device_note():
        warn_once("accelerator", device_note())


def transport() -> Transport:
    """How tensors of this process's device are sent to others, and why."""
    return engines.current().devices.transport()


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


def addressable_device_count() -> int:
    """The number of devices of this process."""
    return engines.current().devices.addressable_count()


def local_device_count() -> int:
    """The number of devices of this node."""
    return engines.current().devices.local_count()


def global_device_count() -> int:
    """The number of devices of the job, over all processes."""
    return engines.current().devices.global_count()


# PyTorch/XLA's names.
xla_device, global_runtime_device_count = device, global_device_count
process_count, process_index, global_ordinal = world_size, rank, rank
local_ordinal, local_process_count = local_rank, local_world_size


def addressable_runtime_device_count() -> int:
    """The same, by PyTorch/XLA's older name."""
    return addressable_device_count()


def more_devices(count: int) -> str:
    """How to start a job with `count` devices, for messages."""
    return engines.current().devices.more_devices(count)


def device_type() -> str:
    """The type of the devices: `CPU`, `CUDA` or `TPU`."""
    return engines.current().devices.device_type()


def place(value: torch.Tensor, pin: bool = False) -> torch.Tensor:
    """A tensor of this process's batch on its devices; `pin` copies through pinned memory, without waiting."""
    return engines.current().devices.place(value, pin)


def host_index() -> int:
    """The index of this rank's node, from 0."""
    return rank() // local_world_size()


def get_master_ip() -> str:
    """The address of process 0."""
    return engines.current().devices.master_address()


def initialize_cache(path: str, readonly: bool = False) -> None:
    """Keep compiled programs in a folder, for the next run. The torch engine has none."""
    engines.current().devices.initialize_cache(path, readonly)


def sync(wait: bool = False) -> None:
    """Compile what was recorded, and start it (the torch engine records nothing); with `wait`, wait until the devices
    have finished."""
    engines.current().devices.sync(wait)


def flush() -> None:
    """Run what was recorded. Unlike after `sync()`, the next random values are those that would have come anyway: a
    checkpoint between two steps does not change the run."""
    engines.current().devices.flush()


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
    seed_device(value)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


def seed_device(n: int) -> None:
    """Seed the random numbers that torch draws from here on, on the host and on the devices."""
    torch.manual_seed(n)
    engines.current().devices.seed(n)


def generator_state() -> tuple[str, Any]:
    """The type of this process's devices, and the state of their default generator: None for the CPU.

    On XLA it is the seed of the next random operator. It is exact between `sync()` and the next operator; a run that is
    resumed from elsewhere has another sequence after its next `sync()`.
    """
    return engines.current().devices.generator_state()


def set_generator_state(state: Any) -> None:
    """Restore the state of the devices' generator."""
    engines.current().devices.set_generator_state(state)
