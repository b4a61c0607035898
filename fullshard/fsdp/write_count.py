"""Write counts of parameters: a gathered or loaded value is out of date once its parameter's count has changed.

torch counts writes to a tensor, but not those of multi-tensor optimizers (`foreach`, `fused`) to sharded tensors, so
optimizer steps are added to its count here. Writes into `.data`, and direct calls of multi-tensor operators, are not
detected.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from fullshard.device.torch_private import local_of, version_of, versions_of
from fullshard.spmd.tensor import is_sharded


def writes_of(shard: torch.Tensor) -> tuple[int, int]:
    """A value that changes with every write, counted from the first call in the process."""
    _count_steps()
    # Operators on a sharded tensor change its own version only; those on its local tensor change only that version.
    return version_of(shard), version_of(piece_of(shard))


def writes_of_all(shards: Iterable[torch.Tensor]) -> list[tuple[int, int, int]]:
    """The same of several sharded tensors; it changes if one is replaced, too."""
    _count_steps()
    return versions_of(shards)


def piece_of(shard: torch.Tensor) -> torch.Tensor:
    """The ordinary tensor that has this rank's values."""
    return local_of(shard) if is_sharded(shard) else shard


@functools.cache
def _count_steps() -> None:
    register_optimizer_step_post_hook(_count)


def _count(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        torch.autograd.graph.increment_version([p for p in group["params"] if p.grad is not None and is_sharded(p)])
