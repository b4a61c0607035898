"""Where the tensors of a batch go. On XLA the names in `fullshard.xla.placement.REPLACES` are that file's."""

from __future__ import annotations

import torch

from fullshard import accelerator, engines, runtime


def place(value: torch.Tensor, pin: bool = False) -> torch.Tensor:
    """A tensor of this rank's batch on its device; `pin` copies through pinned memory, without waiting."""
    pinned = pin and accelerator.pins(runtime.device())
    return (value.pin_memory() if pinned else value).to(runtime.device(), non_blocking=pinned)


engines.use_xla_names(globals(), "placement")
