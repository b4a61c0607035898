"""Processes and devices on XLA: one process drives all devices of its host, as one logical device.

Implements `engines.Devices`. Operators are recorded, and run when `sync` ends a graph. A value that the host reads ends
a graph too, and a graph of new operators or shapes is compiled, which takes seconds to minutes. So batches have one
shape, values are read when they are needed and not in every step, and the update is guarded by operators of the same
graph. torch_xla is imported when the first function is called: that takes seconds.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fullshard.config.errors import RuntimeSetupError, UnsupportedError
from fullshard.distributed import runtime
from fullshard.distributed.rank_env import DEVICE_VARIABLE, Launch, read_launcher
from fullshard.distributed.transport import Transport
from fullshard.spmd.mesh import get_1d_mesh
from fullshard.xla.sharding import mark_sharding
from fullshard.xla.tensor import annotate, is_xla_tensor, sharding_of


def _xr() -> Any:
    import torch_xla.runtime as xr

    return xr


def _xm() -> Any:
    import torch_xla.core.xla_model as xm

    return xm


# --- processes and devices --------------------------------------------------------------------------------------------


def join(device: str | None, init_timeout: float | None) -> None:
    """Let this process drive all its devices as one. `device` is "cpu" or "tpu"; default: `FULLSHARD_DEVICE`, else
    `PJRT_DEVICE`, else what torch_xla finds."""
    if requested := device or os.environ.get(DEVICE_VARIABLE):
        _xr().set_device_type(requested.upper())
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
    runtime.record_join(Launch(dist.get_rank(), processes, node_count=processes), default_device(), owned)


def default_device() -> torch.device:
    """The logical device that stands for all devices of this process."""
    import torch_xla

    return torch_xla.device()


def device_type() -> str:
    """The type of the devices: `CPU` or `TPU`."""
    return str(_xr().device_type())


def addressable_count() -> int:
    """The number of devices of this process."""
    return int(_xr().addressable_runtime_device_count())


local_count = addressable_count  # one process per host


def global_count() -> int:
    """The number of devices of the job, over all processes."""
    return int(_xr().global_runtime_device_count())


def more_devices(count: int) -> str:
    """How to start a job with `count` devices, for messages."""
    return f"start on hosts with more devices (CPU_NUM_DEVICES={count} on CPUs)"


def master_address() -> str:
    """The address of process 0."""
    return str(_xr().get_master_ip()) if device_type() == "TPU" else "127.0.0.1"


def initialize_cache(path: str, readonly: bool) -> None:
    """Keep compiled programs in a folder, for the next run. Call it before the first computation."""
    _xr().initialize_cache(path, readonly)


def transport() -> Transport:
    """How tensors travel between devices: the compiler's collectives."""
    return Transport("xla", f"the XLA compiler's, over {global_count()} {device_type()} devices")


def memory_info(device: torch.device) -> dict[str, int]:
    """Used and total memory of the devices of this process, in bytes."""
    try:
        return dict(_xm().get_memory_info(device))
    except RuntimeError as error:
        raise UnsupportedError(f"xm.get_memory_info: {device_type()} devices do not report it") from error


# --- random numbers ---------------------------------------------------------------------------------------------------


def seed(number: int) -> None:
    """Seed the devices' generator."""
    _xm().set_rng_state(int(number) % 2**31)


def initial_seed() -> int:
    """The seed of the next random operator."""
    return int(_xm().get_rng_state())


def generator_state() -> tuple[str, int]:
    """The state of the devices' generator: the seed of the next random operator."""
    return "xla", initial_seed()


def set_generator_state(state: int) -> None:
    """Restore the state of the devices' generator."""
    _xm().set_rng_state(state)


# --- steps ------------------------------------------------------------------------------------------------------------


def sync(wait: bool) -> None:
    """Compile what was recorded, and start it; with `wait`, wait until the devices have finished."""
    import torch_xla

    torch_xla.sync(wait=wait)


def flush() -> None:
    """Run what was recorded, and keep the generator's state, which `sync` changes."""
    state = initial_seed()
    sync(wait=False)
    set_generator_state(state)


def add_step_closure(closure: Callable[..., Any], args: Sequence[Any], run_async: bool) -> None:
    """Call `closure(*args)` when the recorded step has been computed."""
    _xm().add_step_closure(closure, args, run_async)


def optimization_barrier_(tensors: Any) -> None:
    """Keep the compiler from moving operators across these tensors."""
    _xm().optimization_barrier_(tensors)


@torch.no_grad()
def broadcast_(t: torch.Tensor) -> None:
    """Give a tensor the value of process 0, through host memory."""
    value = t.detach().cpu()
    dist.broadcast(value, src=0)
    t.copy_(value)


def place(value: torch.Tensor, pin: bool) -> torch.Tensor:
    """A tensor of this process's batch on its devices, split over them by rows. `pin` changes nothing."""
    placed = value.to(runtime.device())
    if not value.ndim:
        return placed
    return mark_sharding(placed, get_1d_mesh("batch"), ("batch", *(None for _ in value.shape[1:])))


class DeferredCopy:
    """A value that the host reads later. Reading it runs what was recorded, and waits."""

    def __init__(self, value: torch.Tensor) -> None:
        self._value = value.detach()

    def read(self) -> list[float]:
        """The values."""
        return self._value.cpu().tolist()


host_copy = DeferredCopy


class ChoosingGuard:
    """An `engines.UpdateGuard`: the devices choose between the values before and after the update."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._failed = torch.zeros((), device=runtime.device())
        """1 from the first step on that must not change weights."""

    @torch.no_grad()
    def step(self, values: torch.Tensor) -> None:
        """The optimizer's step, unless this step or an earlier one failed."""
        unusable = torch.isfinite(values[0] + values[-1]).logical_not()
        self._failed = torch.maximum(self._failed, unusable.to(torch.float32))
        before = [(t, t.clone()) for _, t in self._tensors()]
        self._optimizer.step()
        for t, old in before:
            t.copy_(torch.where(self._failed > 0, old, t))
        for p, t in self._tensors():
            layout = sharding_of(p)
            if layout is not None and t.shape == p.shape and sharding_of(t) != layout:
                annotate(t, layout)

    def _tensors(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The tensors on the devices that an update changes, each with its parameter."""
        for group in self._optimizer.param_groups:
            for p in group["params"]:
                state = self._optimizer.state.get(p, {}).values()
                yield from ((p, t) for t in (p, *state) if is_xla_tensor(t))

    def reset(self) -> None:
        """Update again, after the updates issued so far."""
        self._failed = torch.zeros_like(self._failed)


update_guard = ChoosingGuard
