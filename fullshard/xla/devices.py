"""Processes and devices on XLA: one process drives all devices of its host, as one logical device.

`runtime` takes the functions that `REPLACES` names from here; the others are the same on both engines. torch_xla is
imported when the first of them is called: that takes seconds.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from fullshard import runtime
from fullshard.errors import RuntimeSetupError
from fullshard.rank_env import DEVICE_VARIABLE, Launch, read_launcher
from fullshard.transport import Transport

REPLACES = (
    "addressable_device_count",
    "announce_transport",
    "device",
    "device_type",
    "flush",
    "generator_state",
    "get_master_ip",
    "global_device_count",
    "global_runtime_device_count",
    "initialize_cache",
    "local_device_count",
    "more_devices",
    "seed",
    "set_generator_state",
    "sync",
    "transport",
    "use_spmd",
    "xla_device",
)
_torch_seed = runtime.seed


def _xr() -> Any:
    import torch_xla.runtime as xr

    return xr


def use_spmd(
    auto: bool = False,
    *,
    modules: torch.nn.Module | Iterable[torch.nn.Module] = (),
    device: str | None = None,
    init_timeout: float | None = None,
) -> None:
    """Let this process drive all its devices as one. Further calls do nothing.

    - `modules` are checked for wrappers that cannot be combined with SPMD (DDP, FSDP, DeepSpeed).
    - `device` is "cpu" or "tpu"; default: `FULLSHARD_DEVICE`, else `PJRT_DEVICE`, else what torch_xla finds.

    Processes on several hosts are joined by torch_xla; they also get a Gloo group, for data of the host.
    """
    runtime.check_use_spmd(auto, modules)
    if runtime.is_spmd():
        return
    if wanted := device or os.environ.get(DEVICE_VARIABLE):
        _xr().set_device_type(wanted.upper())
    _xr().use_spmd()
    processes = _xr().process_count()
    started = read_launcher(os.environ).world_size
    if started not in (1, processes):
        raise RuntimeSetupError(
            f"{started} processes were started, but the XLA runtime sees {processes}: one process drives all devices "
            f"of its host here. Start one process per host (without torchrun on a single host)."
        )
    owned = not dist.is_initialized()
    if owned and processes == 1:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    elif owned:
        import torch_xla.distributed.xla_backend  # noqa: F401  # registers xla://

        dist.init_process_group("gloo", init_method="xla://")
    runtime.joined(Launch(dist.get_rank(), processes, node_count=processes), xla_device(), owned)


def xla_device() -> torch.device:
    """The logical device that stands for all devices of this process."""
    import torch_xla

    return torch_xla.device()


device = xla_device


def global_runtime_device_count() -> int:
    """The number of devices of the job, over all processes."""
    return int(_xr().global_runtime_device_count())


global_device_count = global_runtime_device_count


def addressable_device_count() -> int:
    """The number of devices of this process."""
    return int(_xr().addressable_runtime_device_count())


local_device_count = addressable_device_count  # one process per host


def more_devices(count: int) -> str:
    """How to start a job with `count` devices, for messages."""
    return f"start on hosts with more devices (CPU_NUM_DEVICES={count} on CPUs)"


def device_type() -> str:
    """The type of the devices: `CPU` or `TPU`."""
    return str(_xr().device_type())


def get_master_ip() -> str:
    """The address of process 0."""
    return str(_xr().get_master_ip()) if device_type() == "TPU" else "127.0.0.1"


def initialize_cache(path: str, readonly: bool = False) -> None:
    """Keep compiled programs in a folder, for the next run. Call it before the first computation."""
    _xr().initialize_cache(path, readonly)


def transport() -> Transport:
    """How tensors travel between devices: the compiler's collectives."""
    return Transport("xla", f"the XLA compiler's, over {global_runtime_device_count()} {device_type()} devices")


def announce_transport(say: Callable[[str], None] | None = None) -> None:
    """Report the transport, with `say` if given."""
    if say is not None:
        say(f"transport: {transport()}")


def seed(n: int, *, per_rank: bool = False, deterministic: bool = False) -> None:
    """Seed Python, numpy, torch's host generator and the devices' generator with `n`."""
    import torch_xla.core.xla_model as xm

    _torch_seed(n, per_rank=per_rank, deterministic=deterministic)
    xm.set_rng_state(int(n) + (runtime.rank() if per_rank else 0))


def generator_state() -> tuple[str, int]:
    """The state of the devices' generator: the seed of the next random operator. It is exact between `sync()` and the
    next operator; a run that is resumed from elsewhere has another sequence after its next `sync()`."""
    import torch_xla.core.xla_model as xm

    return "xla", int(xm.get_rng_state())


def set_generator_state(state: int) -> None:
    import torch_xla.core.xla_model as xm

    xm.set_rng_state(state)


def sync(wait: bool = False) -> None:
    """Compile what was recorded, and start it; with `wait`, wait until the devices have finished."""
    import torch_xla

    torch_xla.sync(wait=wait)


def flush() -> None:
    """Run what was recorded. Unlike after `sync()`, the next random values are those that would have come anyway: a
    checkpoint between two steps does not change the run."""
    _, state = generator_state()
    sync()
    set_generator_state(state)
