"""The names of `torch_xla.core.xla_model` that a program for one device uses, so that it runs with its imports changed.

PyTorch/XLA collects operations until a step is marked; here they run as they are called, so `mark_step` has nothing
to do.
"""

from __future__ import annotations

from fullshard import accelerator
from fullshard.runtime import device as xla_device
from fullshard.runtime import print0 as master_print
from fullshard.runtime import rank as get_ordinal
from fullshard.runtime import world_size as xrt_world_size

__all__ = ["get_ordinal", "mark_step", "master_print", "wait_device_ops", "xla_device", "xrt_world_size"]


def mark_step(wait: bool = False) -> None:
    """Nothing to launch; with `wait`, wait until the device has finished."""
    if wait:
        wait_device_ops()


def wait_device_ops() -> None:
    """Wait until this rank's device has finished what it was given."""
    accelerator.synchronize(xla_device())
