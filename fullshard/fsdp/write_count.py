"""Write counts of parameters: a gathered or loaded value is out of date once its parameter's count has changed.

torch counts writes to a tensor, but not those of multi-tensor optimizers (`foreach`, `fused`) to sharded tensors, so
optimizer steps are counted here. Writes into `.data`, and direct calls of multi-tensor operators, are not detected.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from fullshard.spmd.tensor import is_sharded
from fullshard.torch_private import local_of, version_of

_STEPS = "_fullshard_steps"


def writes_of(shard: torch.Tensor) -> tuple[int, int, int]:
    """A value that changes with every write, counted from the first call in the process."""
    _count_steps()
    # Operators on a sharded tensor change its own version only; those on its local tensor change only that version.
    return version_of(shard), version_of(piece_of(shard)), getattr(shard, _STEPS, 0)


def piece_of(shard: torch.Tensor) -> torch.Tensor:
    return local_of(shard) if is_sharded(shard) else shard


@functools.cache
def _count_steps() -> None:
    register_optimizer_step_post_hook(_count)


def _count(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                setattr(parameter, _STEPS, getattr(parameter, _STEPS, 0) + 1)
