"""Uneven batches: the weight of a rank's rows in a step whose rows do not divide evenly among the ranks.

Gradients are averaged over the ranks, so a loss that is a mean over a rank's own rows must be scaled by `rows × ranks /
rows of all ranks` to give the mean over all rows. The engine scales gradients inside each outermost call: a gradient is
multiplied where it enters the call (at an output here, at other tensors in `backward_entry.py`) and divided again where
it leaves through an input. So parameters get the factor exactly once, whatever is computed before and after the call,
and it is invisible outside.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fullshard.config.errors import FSDPError
from fullshard.distributed import data_ranks, runtime
from fullshard.spmd.tensor_tree import map_tensors, tensors_in


@dataclass(eq=False)
class Share:
    """This rank's part of a step."""

    weight: float = 1.0
    """The factor for its gradients before they are averaged over the ranks."""
    rows: int | None = None
    """This rank's rows in the step; 0 for a placeholder batch; None if unknown."""
    total: int | None = None
    """The rows of the step on all ranks."""


_open: list[Share] = []
"""The open shares; the last one is active."""


def active_share() -> Share:
    """The active share."""
    return _open[-1] if _open else Share()


def current_rows() -> Share:
    """The share of the loader that returned the last batch."""
    return next((share for share in reversed(_open) if share.rows is not None), Share())


@contextlib.contextmanager
def activate(share: Share) -> Iterator[Share]:
    """Make a share active inside, unless another one is opened or moved to the front later."""
    _open.append(share)
    try:
        yield share
    finally:
        _open.remove(share)


def to_front(share: Share) -> None:
    """Make an open share the active one."""
    _open.remove(share)
    _open.append(share)


@contextlib.contextmanager
def weighted(count: float) -> Iterator[float]:
    """Inside, the loss of a forward counts as a mean over `count` items of this rank (tokens, for example).

    The gradients are then those of the mean over the items of all ranks. Yields their number. All ranks must enter it.
    A placeholder batch from a prepared loader counts 0, whatever `count` is.
    """
    if not count >= 0:
        raise FSDPError(f"weighted({count}): expected the number of items this rank's loss is a mean over, 0 or more")
    own = 0.0 if current_rows().rows == 0 else float(count)
    summed = torch.tensor(own, dtype=torch.float64, device=runtime.device())
    total = data_ranks.sum_over_rows("sum of the weights", summed).item()
    with activate(Share(own / total * data_ranks.data_size() if total else 0.0)):
        yield total


# --- in the engine ----------------------------------------------------------------------------------------------------


class _Scaled(torch.autograd.Function):
    """Identity in forward; multiplies the gradient by a number in backward."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad * ctx.factor, None


def divide_input_grads(inputs: Any, weight: float) -> Any:
    """The inputs of a call, such that gradients leaving through them are divided by the weight (zeros if it is 0)."""
    return inputs if weight in (0.0, 1.0) else map_tensors(lambda t: scale_grad(t, 1 / weight), inputs)


def multiply_output_grads(output: Any, weight: float) -> Any:
    """The outputs of a call, such that gradients entering through them are multiplied by the weight."""
    if weight == 1.0:
        return output
    weighed = map_tensors(lambda t: scale_grad(t, weight), output)
    if weighed is output and not isinstance(output, torch.Tensor) and any(t.requires_grad for t in tensors_in(output)):
        weighed = copy.copy(output)  # an object of a user-defined class
        vars(weighed).update({name: multiply_output_grads(value, weight) for name, value in vars(output).items()})
    return weighed


def is_weighed(node: Any, weight: float) -> bool:
    """Whether an operation is the one that multiplies gradients by this weight."""
    return type(node).__name__ == "_ScaledBackward" and node.factor == weight


def scale_grad(value: torch.Tensor, factor: float) -> torch.Tensor:
    """The same value, whose gradient is multiplied by `factor`."""
    return _Scaled.apply(value, factor) if value.requires_grad and factor != 1.0 else value
