"""Lion with 32-bit state, for `optim lion_32bit`: unlike the other kinds of Lion it does not need bitsandbytes."""

from __future__ import annotations

from typing import Any

import torch

from fullshard.fsdp.parameter import piece_of


class Lion(torch.optim.Optimizer):
    """Lion (Chen et al. 2023) with decoupled weight decay, computed as bitsandbytes does. It works element by element,
    so each rank updates its shards."""

    def __init__(
        self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update all parameters that have a gradient; returns the loss of `closure`."""
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32))
                value, average = piece_of(p), piece_of(state["exp_avg"])
                grad = piece_of(p.grad).to(average.dtype)
                wide = value.to(average.dtype)
                wide.mul_(1 - group["lr"] * group["weight_decay"])
                wide.add_(average.mul(beta1).add_(grad, alpha=1 - beta1).sign_(), alpha=-group["lr"])
                average.mul_(beta2).add_(grad, alpha=1 - beta2)
                if wide is not value:
                    value.copy_(wide)
        return loss
