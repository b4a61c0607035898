"""The functions of `fullshard.xm` that are different on XLA, where operators are recorded until `mark_step`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch_xla.core import xla_model as upstream

from fullshard import runtime
from fullshard.errors import UnsupportedError

REPLACES = (
    "add_step_closure",
    "broadcast_master_param",
    "get_memory_info",
    "get_rng_state",
    "mark_step",
    "optimization_barrier_",
    "optimizer_step",
    "set_rng_state",
    "unlazy",
    "wait_device_ops",
    "xla_device",
    "xla_device_hw",
)
add_step_closure, optimization_barrier_ = upstream.add_step_closure, upstream.optimization_barrier_
unlazy, wait_device_ops = upstream.unlazy, upstream.wait_device_ops
get_rng_state, set_rng_state = upstream.get_rng_state, upstream.set_rng_state


def xla_device(n: int | None = None, devkind: str | None = None) -> torch.device:
    """The logical device that stands for all devices of this process, so `n` must be None or 0."""
    if n not in (None, 0):
        raise UnsupportedError(
            f"xm.xla_device({n!r}): one logical device stands for all devices of this process; call xm.xla_device() "
            f"and lay tensors out with mark_sharding"
        )
    return runtime.device()


def xla_device_hw(device: str | torch.device) -> str:
    """The type of a device: `CPU` or `TPU`."""
    return runtime.device_type() if torch.device(device).type == "xla" else torch.device(device).type.upper()


def get_memory_info(device: str | torch.device | None = None) -> dict[str, int]:
    """Used and total memory of the devices of this process, in bytes."""
    try:
        return dict(upstream.get_memory_info(device or runtime.device()))
    except RuntimeError as error:
        raise UnsupportedError(f"xm.get_memory_info: {runtime.device_type()} devices do not report it") from error


def mark_step(wait: bool = False, reset_scope: bool = True) -> None:
    """Compile what was recorded, and start it; with `wait`, wait until the devices have finished."""
    runtime.sync(wait)


def optimizer_step(
    optimizer: torch.optim.Optimizer,
    barrier: bool = False,
    optimizer_args: dict[str, Any] | None = None,
    groups: Any = None,
    pin_layout: bool = True,
) -> Any:
    """`optimizer.step()`, then `mark_step()` if `barrier`. Gradients are global, so nothing is reduced here."""
    loss = optimizer.step(**(optimizer_args or {}))
    if barrier:
        mark_step()
    return loss


@torch.no_grad()
def broadcast_master_param(model: torch.nn.Module) -> None:
    """Give parameters and buffers the values of process 0."""
    for t in (*model.parameters(), *model.buffers()) if runtime.world_size() > 1 else ():
        value = t.detach().cpu()
        dist.broadcast(value, src=0)
        t.copy_(value)
