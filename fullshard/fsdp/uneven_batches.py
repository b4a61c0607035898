"""How much a rank counts in a step whose rows do not divide evenly among the ranks.

Gradients are averaged over the ranks, so a loss that is a mean over a rank's own rows has to be scaled by `rows × ranks
/ rows of all ranks` to give the mean over all rows. The engine scales gradients inside each outermost call: where a
gradient enters it is multiplied (through an output here, by another way in `backward_entry.py`), where it leaves
through an input it is divided again. So parameters get the factor once, whatever is computed before and after the call,
and nobody outside sees it.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fullshard import runtime
from fullshard.errors import FSDPError
from fullshard.fsdp.tensor_tree import map_tensors, tensors_in
from fullshard.watchdog import collectives


@dataclass(eq=False)
class Share:
    """This rank's part of a step."""

    weight: float = 1.0
    """What its gradients are multiplied by before they are averaged over the ranks."""
    rows: int | None = None
    """How many rows of the step are its own; 0 for a stand-in; None where nobody counted."""
    total: int | None = None
    """How many rows the step has on all ranks."""


_open: list[Share] = []
"""The shares in force, the latest last."""


def current() -> Share:
    """The share in force."""
    return _open[-1] if _open else Share()


def current_rows() -> Share:
    """The share of the loader whose batch was handed out last."""
    return next((share for share in reversed(_open) if share.rows is not None), Share())


@contextlib.contextmanager
def opened(share: Share) -> Iterator[Share]:
    """Inside, this share is in force, unless another one is opened or raised later."""
    _open.append(share)
    try:
        yield share
    finally:
        _open.remove(share)


def to_front(share: Share) -> None:
    """Make an open share the one in force."""
    _open.remove(share)
    _open.append(share)


@contextlib.contextmanager
def weighted(count: float) -> Iterator[float]:
    """Inside, the loss of a forward is taken as a mean over `count` things on this rank (tokens, say).

    The gradients become those of the mean over the things of all ranks, whose number is given. All ranks must enter it.
    A stand-in from a prepared loader counts 0, whatever is said here.
    """
    if not count >= 0:
        raise FSDPError(f"weighted({count}): expected how many things this rank's loss is a mean over, 0 or more")
    total = mine = 0.0 if current_rows().rows == 0 else float(count)
    if runtime.world_size() > 1:
        summed = torch.tensor(mine, dtype=torch.float64, device=runtime.device())
        collectives.finish("sum of the weights", lambda: dist.all_reduce(summed, async_op=True))
        total = summed.item()
    with opened(Share(mine / total * runtime.world_size() if total else 0.0)):
        yield total


# --- in the engine ----------------------------------------------------------------------------------------------------


class _Scaled(torch.autograd.Function):
    """The same value; its gradient times a number."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad * ctx.factor, None


def entering(inputs: Any, weight: float) -> Any:
    """What a call takes: gradients that leave through it are those of the loss again (zeros if the weight is 0)."""
    return inputs if weight in (0.0, 1.0) else map_tensors(lambda t: scaled(t, 1 / weight), inputs)


def leaving(output: Any, weight: float) -> Any:
    """What a call returns: gradients that enter through it get the weight."""
    if weight == 1.0:
        return output
    weighed = map_tensors(lambda t: scaled(t, weight), output)
    if weighed is output and not isinstance(output, torch.Tensor) and any(t.requires_grad for t in tensors_in(output)):
        weighed = copy.copy(output)  # an object of the user's own class
        vars(weighed).update({name: leaving(value, weight) for name, value in vars(output).items()})
    return weighed


def is_weighed(node: Any, weight: float) -> bool:
    """Whether an operation is the one that gives gradients this weight."""
    return type(node).__name__ == "_ScaledBackward" and node.factor == weight


def scaled(value: torch.Tensor, factor: float) -> torch.Tensor:
    """The same value; gradients that come to it are multiplied."""
    return _Scaled.apply(value, factor) if value.requires_grad and factor != 1.0 else value
