"""The learning rate as a function of the step, and the optimizer it is given to.

A schedule has no state: the rate of step n is computed from n, so a resumed run has the right one at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from fullshard import runtime
from fullshard.train.config import SFTConfig


def factor(kind: str, step: int, warmup: int, total: int) -> float:
    """By what the learning rate is multiplied at optimizer step `step`, counted from 0."""
    if kind == "constant":
        return 1.0
    if step < warmup:
        return step / max(1, warmup)
    if kind == "constant_with_warmup":
        return 1.0
    done = (step - warmup) / max(1, total - warmup)
    return max(0.0, 1 - done if kind == "linear" else 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


class Schedule:
    """Sets the learning rate of an optimizer step by step."""

    def __init__(self, optimizer: torch.optim.Optimizer, kind: str, warmup: int, total: int) -> None:
        self.optimizer, self.kind, self.warmup, self.total = optimizer, kind, warmup, total
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])

    def set(self, step: int) -> float:
        """Make the optimizer ready for this step; the learning rate of its first group."""
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor(self.kind, step, self.warmup, self.total)
        return float(self.optimizer.param_groups[0]["lr"])


def make_optimizer(model: nn.Module, config: SFTConfig) -> torch.optim.Optimizer:
    """The optimizer of what trains. Matrices decay; vectors (biases, norms) do not."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.optim == "sgd":
        return torch.optim.SGD(groups, lr=config.learning_rate)
    options: dict[str, Any] = {
        "lr": config.learning_rate,
        "betas": (config.adam_beta1, config.adam_beta2),
        "eps": config.adam_epsilon,
    }
    if config.optim == "adamw_torch_fused":
        try:
            return torch.optim.AdamW(groups, fused=True, **options)
        except RuntimeError as error:
            runtime.warn_once("fused", f"no fused AdamW for these parameters ({error}); the plain one is used")
    return torch.optim.AdamW(groups, **options)


def counted(parameters: Iterable[nn.Parameter]) -> int:
    return sum(p.numel() for p in parameters)
