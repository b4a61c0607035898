"""The optimizer of a run, and its learning rate at each step (computed in `lr_schedule.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from fullshard import runtime
from fullshard.errors import ConfigError
from fullshard.train.config import SFTConfig
from fullshard.train.lr_schedule import factor


class Schedule:
    """Sets the learning rate of an optimizer step by step. It has no state: the rate follows from the step."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, kind: str, warmup: int, total: int,
        settings: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.optimizer, self.kind, self.warmup, self.total, self.settings = optimizer, kind, warmup, total, settings
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])

    def set(self, step: int) -> float:
        """Set the learning rates of this step; returns that of the first group."""
        by = factor(self.kind, step, self.warmup, self.total, self.settings)
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * by
        return float(self.optimizer.param_groups[0]["lr"])

    def advance(self, step: int) -> None:
        """Go on to the learning rates of the next step, after an update."""
        self.set(step)

    def get_last_lr(self) -> list[float]:
        """The learning rate of each parameter group, as torch's schedulers have it."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def saved(self) -> dict[str, Any]:
        """What a checkpoint holds of it."""
        return {}


class ScriptSchedule(Schedule):
    """A script's own scheduler of torch: it takes a step after each update, one that follows a metric (such as
    `ReduceLROnPlateau`) after each evaluation."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler, self.optimizer = scheduler, scheduler.optimizer
        self.follows_metric = isinstance(scheduler, ReduceLROnPlateau) or type(scheduler).__name__ == "GreedyLR"

    def set(self, step: int) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def advance(self, step: int) -> None:
        if not self.follows_metric:
            self.scheduler.step()

    def saved(self) -> dict[str, Any]:
        return {"lr_scheduler": self.scheduler}


def schedule_of(given: Any) -> Schedule:
    """The schedule of a run: ours, or a scheduler of torch that a script has made."""
    if isinstance(given, Schedule):
        return given
    if not isinstance(given, LRScheduler):
        raise ConfigError(
            f"the scheduler is a {type(given).__name__}; expected one of torch.optim.lr_scheduler, such as "
            f"transformers' get_scheduler makes."
        )
    return ScriptSchedule(given)


def make_schedule(optimizer: torch.optim.Optimizer, config: SFTConfig, total: int) -> Schedule:
    """The learning-rate schedule of a run with this many steps."""
    return Schedule(optimizer, config.lr_scheduler_type, config.warmup(total), total, config.schedule_settings())


def make_optimizer(model: nn.Module, config: SFTConfig) -> torch.optim.Optimizer:
    """The optimizer of the trainable parameters. Matrices have weight decay; vectors (biases, norms) have none."""
    options: dict[str, Any] = {"lr": config.learning_rate}
    if config.optim == "sgd":
        return _made(model, config, torch.optim.SGD, options)
    options |= {"betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_epsilon}
    if config.optim == "adamw_torch_fused":
        try:
            return _made(model, config, torch.optim.AdamW, {**options, "fused": True})
        except RuntimeError as error:
            runtime.warn_once("fused", f"no fused AdamW for these parameters ({error}); the plain one is used")
    return _made(model, config, torch.optim.AdamW, options)


def _made(model: nn.Module, config: SFTConfig, kind: Any, options: dict[str, Any]) -> torch.optim.Optimizer:
    if config.loraplus_lr_ratio is not None:
        return _loraplus(model, config, kind, options)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return kind([group for group in groups if group["params"]], **options)


def _loraplus(model: Any, config: SFTConfig, kind: Any, options: dict[str, Any]) -> torch.optim.Optimizer:
    """PEFT's parameter groups: B matrices (and vectors) have a higher learning rate than A matrices, and embeddings
    their own."""
    from peft.optimizers import create_loraplus_optimizer

    if not any("lora_B" in name for name, p in model.named_parameters() if p.requires_grad):
        raise ConfigError("loraplus_lr_ratio is set, but no LoRA matrix is trainable; turn LoRA on with use_peft_lora.")
    made = create_loraplus_optimizer(
        model, kind, loraplus_lr_ratio=config.loraplus_lr_ratio or 1.0, loraplus_weight_decay=config.weight_decay,
        loraplus_lr_embedding=config.loraplus_lr_embedding, **options,
    )  # fmt: skip
    made.param_groups[:] = [group for group in made.param_groups if group["params"]]
    return made
