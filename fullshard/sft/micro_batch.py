"""What a micro-batch shares between the loop, the loss and `trainer.accelerator`."""

from __future__ import annotations

from typing import Any

import torch

from fullshard.distributed import runtime


class MicroBatch:
    """The scale of the loss in fp16, whether the micro-batch contributes, and what its passes measure."""

    def __init__(self) -> None:
        self.scale = 1.0
        """The scale of the loss in fp16; otherwise 1."""
        self.stands_in = False
        """Whether the micro-batch is a repeated row, because this rank has none; it must not contribute."""
        self.measured = torch.zeros(4, dtype=torch.float64, device=runtime.device())
        """Correct predictions, entropy, router's loss × tokens, and tokens, summed over passes."""

    def take_measured(self) -> torch.Tensor:
        """What was measured on this rank since the last call."""
        measured, self.measured = self.measured, torch.zeros_like(self.measured)
        return measured

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """The gradients of the micro-batch's loss; in fp16 the loss is scaled."""
        factor = 0.0 if self.stands_in else self.scale
        (loss if factor == 1 else loss * factor).backward(**options)
