"""Where the tensors of a batch go on XLA. `parallelize/placement.py` takes the names in `REPLACES` from here."""

from __future__ import annotations

import torch

from fullshard import runtime
from fullshard.spmd.mesh import get_1d_mesh
from fullshard.xla.sharding import mark_sharding

REPLACES = ("place",)


def place(value: torch.Tensor, pin: bool = False) -> torch.Tensor:
    """A tensor of this process's batch on its devices, split over them by rows. `pin` changes nothing."""
    placed = value.to(runtime.device())
    if not value.ndim:
        return placed
    return mark_sharding(placed, get_1d_mesh("batch"), ("batch", *(None for _ in value.shape[1:])))
