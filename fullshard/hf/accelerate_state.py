"""Accelerate's process state: fullshard's process group and device, and FSDP on every kind of rank."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from fullshard.device import accelerator
from fullshard.distributed import runtime

DEVICE_VARIABLE = "ACCELERATE_TORCH_DEVICE"


def partial_state(original: Callable[..., None]) -> Callable[..., None]:
    """Seam of `PartialState.__init__`."""

    def __init__(self: Any, cpu: bool = False, **kwargs: Any) -> None:
        if not self._shared_state:
            runtime.use_spmd(device="cpu" if cpu else None)
            os.environ[DEVICE_VARIABLE] = str(runtime.device())
            if not accelerator.is_accelerator(runtime.device()):
                # Otherwise Accelerate takes ranks without a GPU for independent programs.
                cpu = True
        original(self, cpu, **kwargs)

    return __init__


def accelerator_state(original: Callable[..., None]) -> Callable[..., None]:
    """Seam of `AcceleratorState.__init__`."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        first = not self._shared_state
        original(self, *args, **kwargs)
        plugin: Any = kwargs.get("fsdp_plugin")
        if not first or not hasattr(plugin, "fullshard"):
            return
        from accelerate.state import PartialState
        from accelerate.utils import DistributedType

        self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        self.fsdp_plugin = plugin
        if self._mixed_precision != "no":
            plugin.set_mixed_precision(self._mixed_precision)
        if "served" not in _announced:
            _announced.add("served")
            strategy = plugin.fullshard.settings.strategy
            runtime.print0(f"Accelerate's FSDP is served by fullshard ({strategy}); --no_integrations turns this off")

    return __init__


_announced: set[str] = set()
