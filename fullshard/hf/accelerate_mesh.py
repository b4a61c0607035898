"""Accelerate with ranks that share rows (tensor parallelism): which meshes it accepts, and rows gathered once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

from fullshard.device.torch_private import tree_flatten, tree_unflatten
from fullshard.distributed import data_ranks, runtime
from fullshard.hf.accelerate_prepare import is_served


def validate_mesh(original: Callable[..., None]) -> Callable[..., None]:
    """Patch of `ParallelismConfig._validate_accelerator`."""

    def validate(self: Any, accelerator: Any) -> None:
        if not (is_served(accelerator) and self.total_size == accelerator.num_processes > 1):
            original(self, accelerator)

    return validate


def gather_rows(original: Callable[..., Any]) -> Callable[..., Any]:
    """Patch of `Accelerator.gather_for_metrics`."""

    def gathered(self: Any, input_data: Any, use_gather_object: bool = False) -> Any:
        sharing = data_ranks.ranks_per_row()
        if not is_served(self) or sharing == 1:
            return original(self, input_data, use_gather_object)
        if not use_gather_object and _is_of_tensors(input_data):
            plain = self.gather
            with mock.patch.object(self, "gather", lambda tensors: _rows_once(plain(tensors), tensors, sharing)):
                return original(self, input_data, use_gather_object)
        mine = input_data if runtime.rank() % sharing == 0 else input_data[:0]
        return original(self, mine, True)

    return gathered


def _rows_once(gathered: Any, tensors: Any, sharing: int) -> Any:
    """What was gathered of tensors, with the rows of every rank that has its own. A tensor without rows is a value of
    each process, as libraries count on."""
    values, tree = tree_flatten(gathered)
    for index, mine in enumerate(tree_flatten(tensors)[0]):
        if mine.ndim:
            by_rank = values[index].view(runtime.world_size(), -1, *mine.shape[1:])
            values[index] = by_rank[::sharing].flatten(0, 1)
    return tree_unflatten(values, tree)


def _is_of_tensors(value: Any) -> bool:
    from accelerate.utils import recursively_apply

    try:
        recursively_apply(lambda t: t, value, error_on_other_type=True)
    except TypeError:
        return False
    return True
