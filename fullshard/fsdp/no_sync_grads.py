"""A gradient that `no_sync` holds back: whole on this rank, not yet summed over the ranks.

It is in the shard's `.grad`, like any gradient: `zero_grad()` of a module or an optimizer, or `p.grad = None`, drops it
as on one device. It can be zeroed and scaled; any other use needs the sum and is refused.
"""

from __future__ import annotations

from typing import Any

import torch

from fullshard.errors import FSDPError
from fullshard.torch_private import make_wrapper_subclass, no_torch_function

aten = torch.ops.aten
_LINEAR = {
    aten.zero_.default,
    aten.mul_.Scalar,
    aten.mul_.Tensor,
    aten.div_.Scalar,
    aten.div_.Tensor,
    aten._foreach_zero_.default,
    aten._foreach_mul_.Scalar,
    aten._foreach_mul_.Tensor,
    aten._foreach_div_.Scalar,
    aten._foreach_div_.Tensor,
}
"""Operations that can be applied to the terms of a sum instead of the sum."""


class HeldGradient(torch.Tensor):
    """Has the shape, dtype and device of a shard's gradient, and holds this rank's term of the sum."""

    term: torch.Tensor
    """The whole gradient of this rank, in the dtype it will be reduced in."""
    base: torch.Tensor | None
    """The gradient that was reduced before, to which the sum will be added."""

    @staticmethod
    def __new__(cls, shard: torch.Tensor, term: torch.Tensor, base: torch.Tensor | None) -> HeldGradient:
        made = make_wrapper_subclass(cls, shard.shape, strides=shard.stride(), dtype=shard.dtype, device=shard.device)
        made.term, made.base = term, base
        return made

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def __repr__(self) -> str:
        return f"HeldGradient({tuple(self.shape)}, held back by no_sync)"

    __torch_function__ = no_torch_function

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.detach.default:
            return args[0]
        factors = [a for a in args[1:] if isinstance(a, torch.Tensor)]
        if func not in _LINEAR or any(isinstance(f, HeldGradient) or f.ndim for f in factors):
            raise FSDPError(
                f"{func} on a gradient that no_sync() holds back: it has not been summed over the ranks. Call "
                f"backward() of the last micro-batch outside no_sync() first, or drop the gradients with zero_grad()"
            )
        several = isinstance(args[0], list | tuple)
        for target in args[0] if several else args[:1]:
            for value in (target.term, target.base) if isinstance(target, HeldGradient) else (target,):
                if value is not None:
                    func([value] if several else value, *args[1:], **(kwargs or {}))
        return None if several else args[0]
