"""Who am I among the devices: the process group, this rank's device, seeds, and rank-aware output.

`use_spmd()` turns the process into one rank of a program over all devices: it takes what the launcher gives (or a
world of one without a launcher), chooses device and backend, and gives every rank the same random generator.
How tensors are laid out over those ranks is left to `fullshard.spmd`.
"""

from __future__ import annotations

import atexit
import logging
import os
import random
import socket
import sys
import threading
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from fullshard import accelerator, groups, xla_names
from fullshard.errors import RuntimeSetupError, UnsupportedError, first_line
from fullshard.foreign_wrappers import refuse_foreign_wrappers as refuse_foreign_wrappers
from fullshard.foreign_wrappers import refuse_live_wrappers
from fullshard.log_filter import own_line
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
from fullshard.rendezvous import Meeting, meet
from fullshard.torch_private import default_store
from fullshard.transport import Transport, transport_of

SHUTDOWN_PATIENCE = 5.0
"""Seconds `shutdown()` waits for unfinished communication before it lets go of it."""

_launch: Launch | None = None  # set while SPMD is on
_device: torch.device | None = None
_owns_group = False
_announced = False  # whether it was said how tensors travel in this process group
_met = Meeting()  # what the ranks of the group that was built found out about each other
_starts = 0  # how often a group was built: keeps the store's keys of one start apart from the next


# ------------------------------------------------------------------------------------------------- starting, stopping


def use_spmd(
    auto: bool = False,
    *,
    modules: torch.nn.Module | Iterable[torch.nn.Module] = (),
    device: str | None = None,
    init_timeout: float | None = None,
) -> None:
    """Make this process one rank of a program over all devices. Calling it again changes nothing.

    `modules` are checked for wrappers that SPMD cannot be mixed with (DDP, FSDP, DeepSpeed); live ones are found
    without being named. `device` is "cpu" or "cuda" (else `FULLSHARD_DEVICE`, else CUDA where there is one).
    `init_timeout`, in seconds (else `FULLSHARD_INIT_TIMEOUT`, else 300), bounds the wait for the other ranks.
    A process group that exists already is taken as it is.
    """
    global _launch, _device, _owns_group, _announced
    if auto:
        raise UnsupportedError(
            "use_spmd(auto=True): fullshard does not choose layouts by itself. Call use_spmd() and mark tensors with "
            "fullshard.spmd.mark_sharding."
        )
    for module in [modules] if isinstance(modules, torch.nn.Module) else modules:
        refuse_foreign_wrappers(module)
    if _launch is not None and dist.is_initialized():
        return
    seconds = choose_init_timeout(init_timeout, os.environ)
    if dist.is_initialized():
        # Every foreign wrapper needs a process group, so only now can one be alive.
        refuse_live_wrappers()
        _launch = _place_in_group() or _place_by_host()
        _device = _adopted_device(device or os.environ.get(DEVICE_VARIABLE))
        _owns_group = False
    else:
        launch = read_launcher(os.environ)
        chosen = choose_device(device or os.environ.get(DEVICE_VARIABLE), launch.local_rank, gpu_count())
        accelerator.use(chosen)
        _init_group(launch, chosen, seconds)
        _launch, _device, _owns_group = launch, chosen, True
    _announced = False
    _share_generator()


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
        # A job that is started again may meet the store of its last attempt, with addresses of processes long gone.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"fullshard/{attempt}/{_starts}", found)
        _met = meet(store, launch, device, seconds, get_logger().warning)
        backend = choose_backend(device.type, own=_met.own)
        dist.init_process_group(backend, store=store, rank=launch.rank, world_size=launch.world_size)
        # So that a rank which is stopped or killed before its first heartbeat is known (see `watchdog/heartbeat.py`).
        default_store().set(f"watch/process/{launch.rank}", this_process().text())
    except (RuntimeError, ValueError, OSError) as error:
        if isinstance(error, RuntimeSetupError):
            raise
        reason = first_line(error)
        raise RuntimeSetupError(
            f"Rank {launch.rank} of {launch.world_size} could not join the process group at {launch.master} "
            f"(MASTER_ADDR:MASTER_PORT) with backend {backend}, within {seconds:g} s: {reason}. Check that every node "
            f"reaches that address and that all ranks were started; {INIT_TIMEOUT_VARIABLE} sets the time allowed."
        ) from error


def _place_in_group() -> Launch | None:
    """This rank's place in a process group that someone else made, as far as it shows without asking the others."""
    world, local = dist.get_world_size(), read_local_place(os.environ)
    if world == 1:
        return Launch()
    return Launch(dist.get_rank(), world, *local, node_count=-(-world // local[1])) if local else None


def _place_by_host() -> Launch:
    """The same by asking every rank which host it is on."""
    me, hosts = dist.get_rank(), [""] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    here = [r for r, host in enumerate(hosts) if host == hosts[me]]
    return Launch(me, len(hosts), here.index(me), len(here), len(set(hosts)))


def _adopted_device(wanted: str | None) -> torch.device:
    assert dist.group.WORLD is not None
    chosen = choose_device(wanted, 0, gpu_count() if groups.carries(dist.group.WORLD, accelerator.kind()) else 0)
    # Whoever made the group has also chosen the GPU.
    return accelerator.current() if accelerator.is_accelerator(chosen) else chosen


def _share_generator() -> None:
    """Give all ranks rank 0's default generators, so that a global value drawn at random is one value."""
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
    """Leave the process group. Safe to call twice, at exit, after an exception, and when other ranks are gone."""
    global _launch, _device, _owns_group
    owned, _launch, _device, _owns_group = _owns_group, None, None, False
    if not owned or not dist.is_initialized():
        return
    # Communication that never finishes (its peer stopped elsewhere) would hold the group's destructor, so that runs
    # beside us and is let go of when it takes too long.
    leaving = threading.Thread(target=_destroy_group, name="fullshard-shutdown", daemon=True)
    leaving.start()
    leaving.join(SHUTDOWN_PATIENCE)


def abandon() -> None:
    """Leave the process group as it is when the program ends: its communicators are being taken apart already."""
    global _owns_group
    _owns_group = False


def _destroy_group() -> None:
    try:
        dist.destroy_process_group()
    except Exception as error:  # the ranks are parting: nothing is left to rescue
        get_logger().debug("leaving the process group: %s", error)


def barrier() -> None:
    """Wait for all ranks. Without a process group there is nobody to wait for."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        assert dist.group.WORLD is not None
        on_gpu = accelerator.is_accelerator(device()) and groups.backend_of(dist.group.WORLD, device()) != "gloo"
        dist.barrier(device_ids=[device().index] if on_gpu else None)


# --------------------------------------------------------------------------------------------------------- who am I


def _place() -> Launch:
    """Where this process stands, before `use_spmd()` too; never communicates."""
    if _launch is not None:
        return _launch
    if not dist.is_initialized():
        return read_launcher(os.environ)
    place = _place_in_group()
    if place is None:
        raise RuntimeSetupError(
            "A process group exists, but neither LOCAL_RANK nor LOCAL_WORLD_SIZE says how its ranks lie on the nodes. "
            "Call fullshard.runtime.use_spmd() first; it finds out."
        )
    return place


def is_spmd() -> bool:
    """Whether `use_spmd()` is in force."""
    return _launch is not None and dist.is_initialized()


def rank() -> int:
    """This process's number among all, from 0."""
    return dist.get_rank() if dist.is_initialized() else _place().rank


def world_size() -> int:
    """How many processes, and so devices, the program runs on."""
    return dist.get_world_size() if dist.is_initialized() else _place().world_size


def local_rank() -> int:
    """This process's number among those of its node, from 0."""
    return _place().local_rank


def local_world_size() -> int:
    """How many processes run on this node."""
    return _place().local_world_size


def node_count() -> int:
    """How many nodes the program runs on."""
    return _place().node_count


def is_main() -> bool:
    """Whether this is rank 0, the one that prints and writes what all ranks share."""
    return rank() == 0


def device() -> torch.device:
    """The device of this rank."""
    if _device is not None:
        return _device
    return choose_device(os.environ.get(DEVICE_VARIABLE), _place().local_rank, gpu_count())


def transport() -> Transport:
    """How tensors of this rank's device travel to other ranks, and why."""
    assert dist.group.WORLD is not None or world_size() == 1, "use_spmd() comes first"
    backend = groups.backend_of(dist.group.WORLD, device()) if dist.group.WORLD is not None else ""
    kind, numbers = device().type, (world_size(), local_world_size(), gpu_count())
    if _owns_group:
        return transport_of(backend, kind, *numbers, shared=_met.shared, without=_met.without)
    without = "" if groups.has_own(kind) else "this rank"
    shared = "ranks share GPUs" if local_world_size() > gpu_count() else ""
    return transport_of(backend, kind, *numbers, shared=shared, without=without, ours=False)


def announce_transport(say: Callable[[str], None] | None = None) -> None:
    """Say once per process group how tensors travel; as a warning if NCCL could carry them and does not.

    `say` prints a line for the user, on rank 0; else it is logged.
    """
    global _announced
    if _announced:
        return
    _announced, way = True, transport()
    if way.fix:
        warn_once("transport", f"transport: {way}. Every step waits for copies that NCCL would not make. {way.fix}")
    elif say is not None:
        say(f"transport: {way}")
    elif world_size() > 1:
        get_logger().info("transport: %s", way)


# PyTorch/XLA's names. A rank drives one device here, so devices and processes count alike.
xla_device = device
global_runtime_device_count = global_device_count = process_count = world_size
process_index = global_ordinal = rank
local_ordinal = local_rank
local_process_count = local_device_count = local_world_size


def addressable_device_count() -> int:
    """How many devices this process drives: one."""
    return 1


def device_type() -> str:
    """The kind of this rank's device: `CPU`, `CUDA`."""
    return device().type.upper()


def host_index() -> int:
    """The number of this rank's node, from 0."""
    return rank() // local_world_size()


def get_master_ip() -> str:
    """Where rank 0 can be reached."""
    return os.environ.get("MASTER_ADDR", "127.0.0.1")


def initialize_cache(path: str, readonly: bool = False) -> None:
    """Nothing to do: no compiled programs are kept."""


def __getattr__(name: str) -> Any:
    xla_names.refuse(__name__, "xr", name)


# ------------------------------------------------------------------------------------------- seeds, printing, logging


def seed(n: int, *, per_rank: bool = False, deterministic: bool = False) -> None:
    """Seed Python, numpy and torch (CPU and CUDA) alike on every rank, or with `n + rank` if `per_rank`.

    `deterministic` also makes torch use only kernels that repeat bit for bit; operators without one then raise.
    """
    if not isinstance(n, int | np.integer) or n < 0:
        raise RuntimeSetupError(f"seed({n!r}): expected an integer from 0 upwards.")
    value = int(n) + (rank() if per_rank else 0)
    random.seed(value)
    np.random.seed(value % 2**32)
    torch.manual_seed(value)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


def print0(*values: object, **options: Any) -> None:
    """`print` on rank 0 only."""
    if is_main():
        print(*values, **{"flush": True, **options})


def print_rank(*values: object, sep: str = " ", end: str = "\n", **options: Any) -> None:
    """`print` on every rank, led by its rank, in one write so that ranks do not cut into each other's lines."""
    print(f"[rank {rank()}] {sep.join(map(str, values))}{end}", **{"end": "", "flush": True, **options})


class _RankFilter(logging.Filter):
    """Marks each record with its rank and keeps ranks other than 0 quiet below WARNING."""

    def __init__(self, all_ranks: bool) -> None:
        super().__init__()
        self.all_ranks = all_ranks

    def filter(self, record: logging.LogRecord) -> bool:
        vars(record)["rank"] = rank()
        return self.all_ranks or is_main() or record.levelno >= logging.WARNING


class _Terminal(logging.StreamHandler):
    """Writes to the current stderr, unless the application has set up logging itself."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            self.stream = sys.stderr
            super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        start = "" if getattr(record, "rank", 0) == 0 else own_line(self.stream)
        return start + super().format(record)


def get_logger(name: str = "fullshard", *, all_ranks: bool = False) -> logging.Logger:
    """A logger whose lines carry the rank. Below WARNING only rank 0 speaks, unless `all_ranks`."""
    top = logging.getLogger("fullshard")
    if not any(isinstance(handler, _Terminal) for handler in top.handlers):
        terminal = _Terminal()
        terminal.setFormatter(logging.Formatter("[rank %(rank)s] %(levelname)s %(message)s", defaults={"rank": "?"}))
        top.addHandler(terminal)
        if top.level == logging.NOTSET:
            top.setLevel(logging.INFO)
    logger = top if name == "fullshard" else logging.getLogger(f"fullshard.{name.removeprefix('fullshard.')}")
    filters = [f for f in logger.filters if isinstance(f, _RankFilter)]
    if not filters:
        logger.addFilter(_RankFilter(all_ranks))
    for existing in filters:
        existing.all_ranks |= all_ranks
    return logger


_warned: set[str] = set()


def warn_once(key: str, message: str, *, all_ranks: bool = False) -> bool:
    """Log `message` as a warning, on rank 0 or on all, if `key` is seen for the first time; returns whether it is."""
    if key in _warned:
        return False
    _warned.add(key)
    if all_ranks or is_main():
        get_logger().warning(message)
    return True


def warned() -> frozenset[str]:
    """The keys that `warn_once` has seen on this rank."""
    return frozenset(_warned)


def forget_warnings() -> None:
    """Let every `warn_once` speak again."""
    _warned.clear()
