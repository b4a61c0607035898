"""A training step that was issued to the device, whose values the host reads later.

The host issues a step while the device computes the one before. It must not wait for a loss to decide whether to
update, so the device decides (`engines.UpdateGuard`): a step without a finite loss and gradient changes nothing,
and neither do the steps after it, until the host has read its values and stopped the run. The same holds for a step
whose collectives were aborted because a rank is lost. Optimizers that cannot skip an update on the device are stepped
once the host has read the values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from fullshard.data.loader import Step
from fullshard.distributed import engines, runtime
from fullshard.distributed.ranks import exchange
from fullshard.distributed.watchdog import watch
from fullshard.sft.run_progress import StepResult
from fullshard.spmd.tensor import is_sharded

ROWS_NAMED = 16


class LaunchedStep:
    """A step, with its values on their way to the host."""

    def __init__(
        self, step: Step, place: dict[str, Any], losses: Sequence[torch.Tensor], sums: torch.Tensor, norm: Any
    ) -> None:
        self.step, self.place, self.losses = step, place, losses
        """The step, the place in the run before it, and this rank's loss of each micro-batch."""
        self.values = torch.cat([sums, _on_device(norm)])
        """Loss, correct predictions, entropy, router's loss × tokens, tokens, floating-point operations (sums over all
        ranks), and the norm of the gradients."""
        self._copy = engines.current().devices.host_copy(self.values)
        self._result: StepResult | None = None

    def result(self) -> StepResult:
        """Its metrics; waits until the device has computed them."""
        if self._result is None:
            loss, correct, entropy, router_loss, tokens, flos, norm = self._copy.read()
            watch.raise_failure()  # the host has waited for the device: what it read is valid only if no rank is lost
            tokens = tokens or math.nan
            self._result = StepResult(
                loss / runtime.world_size(), correct / tokens, entropy / tokens, router_loss / tokens, flos, norm
            )
        return self._result

    def why_unusable(self) -> str:
        """Which of its values is not finite, and the rows that it came from. All ranks must call it."""
        result = self.result()
        each = zip(self.step.mine, self.losses, strict=True)
        mine = [row for rows, loss in each if not math.isfinite(float(loss)) for row in rows]
        rows = sorted(row for rank in exchange(mine, "rows without a finite loss") for row in rank)
        shown = ", ".join(map(str, rows[:ROWS_NAMED])) + (", …" if len(rows) > ROWS_NAMED else "")
        where = f"; it came from rows {shown} of the training data" if rows else ""
        if math.isfinite(result.loss):
            return f"the gradient's norm is {result.grad_norm}{where}"
        return f"the loss is {result.loss}{where}"


def _on_device(value: Any) -> torch.Tensor:
    """A number as a vector on the device, without waiting for the device."""
    if not isinstance(value, torch.Tensor):
        return torch.full((1,), float(value), dtype=torch.float64, device=runtime.device())
    whole = value.full_tensor() if is_sharded(value) else value
    return whole.detach().to(runtime.device(), torch.float64).reshape(1)
