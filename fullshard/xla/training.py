"""What a training step asks of XLA devices. `train/step_device.py` takes the names in `REPLACES` from here.

Operators are recorded, and run when `runtime.sync` ends a graph. A value that the host reads ends a graph too, and a
graph of new operators or shapes is compiled, which takes seconds to minutes. So batches have one shape, values are read
when they are needed and not in every step, and the update is guarded by operators of the same graph.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from fullshard import runtime
from fullshard.xla.tensor import annotate, is_xla_tensor, sharding_of

REPLACES = ("AHEAD", "FIXED_SHAPES", "HostCopy", "UpdateGuard", "seed_device")

AHEAD = math.inf
FIXED_SHAPES = True


def seed_device(number: int) -> None:
    """Seed the random numbers that the devices and the host draw from here on."""
    import torch_xla.core.xla_model as xm

    torch.manual_seed(number)
    xm.set_rng_state(number % 2**31)


class HostCopy:
    """A value that the host reads later. Reading it runs what was recorded, and waits."""

    def __init__(self, value: torch.Tensor) -> None:
        self._value = value.detach()

    def read(self) -> list[float]:
        """The values."""
        return self._value.cpu().tolist()


class UpdateGuard:
    """Takes an optimizer's steps as long as all losses and gradients were finite; the devices decide, by choosing
    between the values before and after the update."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._failed = torch.zeros((), device=runtime.device())
        """1 from the first step on that must not change weights."""

    @staticmethod
    def serves(optimizer: torch.optim.Optimizer) -> bool:
        """Whether updates can be undone in their own graph: those of any optimizer."""
        return True

    @torch.no_grad()
    def step(self, values: torch.Tensor) -> None:
        """The optimizer's step, unless this step or an earlier one failed; `values` are those of a `LaunchedStep`."""
        unusable = torch.isfinite(values[0] + values[-1]).logical_not()
        self._failed = torch.maximum(self._failed, unusable.to(torch.float32))
        before = [(t, t.clone()) for _, t in self._tensors()]
        self._optimizer.step()
        for t, old in before:
            t.copy_(torch.where(self._failed > 0, old, t))
        for p, t in self._tensors():
            layout = sharding_of(p)
            if layout is not None and t.shape == p.shape and sharding_of(t) != layout:
                annotate(t, layout)

    def _tensors(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The tensors on the devices that an update changes, each with its parameter."""
        for group in self._optimizer.param_groups:
            for p in group["params"]:
                state = self._optimizer.state.get(p, {}).values()
                yield from ((p, t) for t in (p, *state) if is_xla_tensor(t))

    def reset(self) -> None:
        """Update again, after the updates issued so far."""
        self._failed = torch.zeros_like(self._failed)
