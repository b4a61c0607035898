"""What a training step asks of the device: how far the host is ahead, random numbers, who guards an update.

On XLA the names in `fullshard.xla.training.REPLACES` are that file's.
"""

from __future__ import annotations

from typing import Any

import torch

from fullshard import engines, runtime
from fullshard.accelerator import HostCopy as HostCopy
from fullshard.torch_private import skips_on_device
from fullshard.watchdog import watch

AHEAD: float = 1
"""Steps whose values the host has not read while it issues the next one."""
FIXED_SHAPES = False
"""Whether all batches should have the same shape."""


def seed_device(number: int) -> None:
    """Seed the random numbers that the device draws from here on."""
    torch.manual_seed(number)


class UpdateGuard:
    """Takes an optimizer's steps as long as all losses and gradients were finite; the device decides."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer: Any = optimizer
        self._failed = torch.zeros((), device=runtime.device())
        """1 from the first step on that must not change weights."""

    @staticmethod
    def serves(optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer can skip an update on the device, where all of its parameters are."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        return skips_on_device(optimizer) and all(p.device == runtime.device() for p in parameters)

    def step(self, values: torch.Tensor) -> None:
        """The optimizer's step, unless this step or an earlier one failed; `values` are those of a `LaunchedStep`."""
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


engines.use_xla_names(globals(), "training")
