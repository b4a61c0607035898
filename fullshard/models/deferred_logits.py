"""Logits that are computed when they are needed: a tensor without data that records element-wise operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from fullshard.device.torch_private import NoTorchFunction, make_wrapper_subclass
from fullshard.lora.trainable_tokens import TrainedRows, put_over
from fullshard.models.vocabulary_slice import whole_logits

Step = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], int]
"""An element-wise function, its arguments, and the index of the logits among them."""

T = torch.Tensor
_OUT_OF_PLACE = {T.mul_: T.mul, T.__imul__: T.mul, T.div_: T.div, T.__itruediv__: T.div, T.tanh_: T.tanh}
_PRODUCTS = {T.mul, T.__mul__, T.__rmul__, torch.mul}
_QUOTIENTS = {T.div, T.__truediv__, T.true_divide, torch.div, torch.true_divide}
_TANH = {T.tanh, torch.tanh}
_CASTS = {T.float, T.to, T.contiguous, T.type, T.double, T.bfloat16, T.half}
ELEMENTWISE = {*_OUT_OF_PLACE, *_PRODUCTS, *_QUOTIENTS, *_TANH, *_CASTS}
QUESTIONS = {T.shape.__get__, T.dtype.__get__, T.device.__get__, T.size, T.dim, T.ndim.__get__, T.is_floating_point,
             T.requires_grad.__get__, T.is_cuda.__get__, T.layout.__get__, T.__len__, T.numel}  # fmt: skip


class DeferredLogits(torch.Tensor):
    """The logits `steps(head(hidden))` before they are computed: shape and dtype, but no data."""

    hidden: torch.Tensor
    head: nn.Linear
    rows: TrainedRows | None
    """Trainable rows that replace rows of the head."""
    steps: tuple[Step, ...]

    @staticmethod
    def of(
        hidden: torch.Tensor, head: nn.Linear, rows: TrainedRows | None = None, steps: tuple[Step, ...] = (),
        dtype: torch.dtype | None = None,
    ) -> Any:  # fmt: skip
        """The logits of these hidden states."""
        shape = (*hidden.shape[:-1], head.out_features)
        deferred = make_wrapper_subclass(
            DeferredLogits, shape, dtype=dtype or hidden.dtype, device=hidden.device, requires_grad=False
        )
        deferred.hidden, deferred.head, deferred.rows, deferred.steps = hidden, head, rows, steps
        return deferred

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in QUESTIONS:
            with NoTorchFunction():
                return func(*args, **kwargs)
        places = [i for i, value in enumerate(args) if isinstance(value, DeferredLogits)]
        others = [v for i, v in enumerate(args) if i not in places] + list(kwargs.values())
        scalar = not any(isinstance(v, torch.Tensor) and v.dim() for v in others)
        if func in ELEMENTWISE and len(places) == 1 and scalar:
            me = args[places[0]]
            step = (_OUT_OF_PLACE.get(func, func), args, kwargs, places[0])
            sample = _take(step, torch.empty(0, dtype=me.dtype, device=me.device))
            return DeferredLogits.of(me.hidden, me.head, me.rows, (*me.steps, step), sample.dtype)
        args = tuple(v.materialize() if isinstance(v, DeferredLogits) else v for v in args)
        kwargs = {k: v.materialize() if isinstance(v, DeferredLogits) else v for k, v in kwargs.items()}
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = tuple(v.materialize() if isinstance(v, DeferredLogits) else v for v in args)
        return func(*args, **(kwargs or {}))

    def materialize(self) -> torch.Tensor:
        """Compute the logits."""
        with NoTorchFunction():
            hidden, head, rows, steps = self.hidden, self.head, self.rows, self.steps
        logits = whole_logits(F.linear(hidden, head.weight, head.bias), head)
        return apply_steps(steps, logits if rows is None else put_over(logits, hidden, rows))


def _take(step: Step, logits: torch.Tensor) -> torch.Tensor:
    func, args, kwargs, place = step
    return func(*args[:place], logits, *args[place + 1 :], **kwargs)


def apply_steps(steps: tuple[Step, ...], logits: torch.Tensor) -> torch.Tensor:
    """The logits after the element-wise operations that were recorded."""
    for step in steps:
        logits = _take(step, logits)
    return logits


class SoftCap(NamedTuple):
    """`after * tanh(before * logits)`, or `before * logits` without the hyperbolic tangent."""

    before: float = 1.0
    tanh: bool = False
    after: float = 1.0


def soft_cap(steps: tuple[Step, ...], dtype: torch.dtype, device: torch.device) -> SoftCap | None:
    """Steps on logits of this dtype as one formula in fp32; None if they are something else."""
    cap, sample = SoftCap(), torch.empty(0, dtype=dtype, device=device)
    for step in steps:
        func, args, kwargs, place = step
        before, sample = sample, _take(step, sample)
        if func in _CASTS:
            widens = sample.dtype in (before.dtype, torch.float32)
            changed = cap if widens and sample.device == before.device else None
        elif func in _TANH:
            changed = None if cap.tanh else cap._replace(tanh=True)
        else:
            changed = None if kwargs else _times(cap, func, [v for i, v in enumerate(args) if i != place], place)
        if changed is None:
            return None
        cap = changed
    return cap


def _times(cap: SoftCap, func: Any, others: list[Any], place: int) -> SoftCap | None:
    """The formula × or ÷ a constant."""
    if len(others) != 1 or not isinstance(others[0], int | float) or (func in _QUOTIENTS and (place or not others[0])):
        return None
    factor = 1 / others[0] if func in _QUOTIENTS else float(others[0])
    return cap._replace(after=cap.after * factor) if cap.tanh else cap._replace(before=cap.before * factor)
