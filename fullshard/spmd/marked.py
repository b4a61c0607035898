"""`MarkedTensor`: the plain tensor `t` after `mark_sharding(t, ...)`, which shards `t` in place.

torch cannot turn a plain tensor object into a sharded one. The object keeps its identity, holds a `ShardedTensor` and
forwards every function and attribute to it.
"""

from __future__ import annotations

from typing import Any

import torch

from fullshard.device.torch_private import tree_map
from fullshard.spmd.tensor import ShardedTensor


class MarkedTensor(torch.Tensor):
    """A plain tensor that was sharded in place. It holds its sharded value and behaves like it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*tree_map(unmarked, args), **tree_map(unmarked, kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        return getattr(unmarked(self), name)

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # so that is_sharded(t) is true
        return ShardedTensor

    def __reduce_ex__(self, protocol: Any) -> Any:
        return unmarked(self).__reduce_ex__(protocol)


_set_class = object.__dict__["__class__"].__set__


def become_marked(t: torch.Tensor, sharded: ShardedTensor) -> None:
    """Make the plain tensor `t` hold `sharded`; its own memory is freed."""
    t.data = t.detach().new_empty(0)
    t.__dict__["_sharded"] = sharded
    _set_class(t, MarkedTensor)


def become_plain(t: torch.Tensor, value: torch.Tensor) -> None:
    """Undo `become_marked`: `t` is a plain tensor that holds `value`."""
    _set_class(t, torch.Tensor)
    t.__dict__.pop("_sharded")
    t.data = value.detach()


def unmarked(t: Any) -> Any:
    """The sharded value of a tensor that was marked in place; anything else unchanged."""
    return t.__dict__["_sharded"] if type(t) is MarkedTensor else t
