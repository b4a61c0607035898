"""The optimizer of a run, and its learning rate at each step (computed in `optim/lr_schedule.py`)."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from fullshard.config.errors import ConfigError
from fullshard.device import accelerator
from fullshard.distributed import engines, runtime
from fullshard.distributed.ranks import require_equal
from fullshard.optim import check_sharded_updates as optimizer_trial
from fullshard.optim.bnb import is_bnb
from fullshard.optim.lion import Lion
from fullshard.optim.lr_schedule import factor
from fullshard.optim.muon import MuonWithAdamW, embeddings_of, is_hidden_matrix, tables_of
from fullshard.optim.names import SERVED
from fullshard.optim.sharded import refuse_unable
from fullshard.parallel.prepare import rebind, step_facts
from fullshard.sft.sft_config import SFTConfig


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
        """The learning rate as the scheduler has set it."""
        return float(self.optimizer.param_groups[0]["lr"])

    def advance(self, step: int) -> None:
        """Take a step of the scheduler, unless it follows a metric."""
        if not self.follows_metric:
            self.scheduler.step()

    def saved(self) -> dict[str, Any]:
        """What a checkpoint holds of it: the scheduler's state."""
        return {"lr_scheduler": self.scheduler}


def schedule_of(scheduler: Any) -> Schedule:
    """The schedule of a run: ours, or a script's own scheduler of torch."""
    if isinstance(scheduler, Schedule):
        return scheduler
    if not isinstance(scheduler, LRScheduler):
        raise ConfigError(
            f"the scheduler is a {type(scheduler).__name__}; expected one of torch.optim.lr_scheduler, such as "
            f"transformers' get_scheduler makes."
        )
    return ScriptSchedule(scheduler)


def make_schedule(optimizer: torch.optim.Optimizer, config: SFTConfig, total: int) -> Schedule:
    """The learning-rate schedule of a run with this many steps."""
    return Schedule(optimizer, config.lr_scheduler_type, config.warmup(total), total, config.schedule_settings())


def make_optimizer(
    model: nn.Module, config: SFTConfig, decayed: Collection[str] | None = None
) -> torch.optim.Optimizer:
    """The optimizer of the trainable parameters. `decayed` names those with weight decay; None means matrices: vectors
    (biases, norms) have none."""
    if config.optim == "muon":
        return _muon(model, config, decayed)
    kind, options = class_and_options(config)
    if not options.get("fused"):
        return _optimizer(model, config, kind, options, decayed)
    try:
        return _optimizer(model, config, kind, options, decayed)
    except RuntimeError as error:
        runtime.warn_once("fused", f"no fused {kind.__name__} for these parameters ({error}); the plain one is used")
        return _optimizer(model, config, kind, {**options, "fused": None}, decayed)


def class_and_options(config: SFTConfig) -> tuple[Any, dict[str, Any]]:
    """The class of the optimizer and its options, as transformers' `Trainer` chooses them."""
    options: dict[str, Any] = {"lr": config.learning_rate, **config.optimizer_arguments()}
    betas: dict[str, Any] = {"betas": (config.adam_beta1, config.adam_beta2)}
    adam = {**betas, "eps": config.adam_epsilon}
    if config.optim == "muon":
        raise ConfigError(
            "optim muon is made of two optimizers, so it has no single class; let create_optimizer make it, or set "
            "another optim."
        )
    if SERVED[config.optim].package == "bitsandbytes":
        return _bitsandbytes(config.optim, options, adam)
    if config.optim.startswith("adamw_torch"):
        # A compiler of whole steps fuses updates itself.
        fused = config.optim == "adamw_torch_fused" and not engines.current().compiles_steps
        return torch.optim.AdamW, options | adam | ({"fused": True} if fused else {})
    if config.optim == "lion_32bit":
        return Lion, options | betas
    if config.optim == "adafactor":
        from transformers.optimization import Adafactor

        return Adafactor, options | {"scale_parameter": False, "relative_step": False}
    kinds = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "rmsprop": torch.optim.RMSprop}
    if config.optim == "sgd" and not options.get("momentum") and accelerator.is_accelerator(runtime.device()):
        options["fused"] = True  # one that is skipped in the first step would leave momentum without values
    return kinds[config.optim], options


def _bitsandbytes(optim: str, options: dict[str, Any], adam: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    bnb: Any = importlib.import_module("bitsandbytes.optim")
    options = options | {"optim_bits": SERVED[optim].bits}
    if "rmsprop" in optim:
        return bnb.RMSprop, options
    options["is_paged"] = optim.startswith("paged_")
    return (bnb.Lion, options | {"betas": adam["betas"]}) if "lion" in optim else (bnb.AdamW, options | adam)


def sharded_optimizer(optimizer: Any, scheduler: Any) -> tuple[torch.optim.Optimizer, Schedule]:
    """The optimizer for the sharded parameters, and its schedule; an error if those of the ranks differ. All ranks must
    call it."""
    checked, schedule = check_optimizer(rebind(optimizer)), schedule_of(scheduler)
    require_equal(step_facts(optimizer, scheduler), "optimizer and schedule")
    return checked, schedule


def check_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Refuse an optimizer that the training loop cannot step; returns it."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"{type(optimizer).__name__} needs a closure that computes the loss again, and a step has several "
            f"micro-batches; use an optimizer that steps without one, such as AdamW."
        )
    refuse_unable(optimizer)
    return optimizer


def optimizer_from_class(
    model: nn.Module, kind: Any, options: dict[str, Any], weight_decay: float, decayed: Collection[str] | None = None
) -> torch.optim.Optimizer:
    """The user's optimizer class with its options, as with the `optimizer_cls_and_kwargs` of transformers' `Trainer`,
    for the sharded model. `decayed` names the parameters with weight decay; None means matrices. A class that cannot
    update sharded parameters is refused. All ranks must call it."""
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise ConfigError(
            f"optimizer_cls_and_kwargs: got {kind!r}; expected a class of optimizers, such as torch.optim.AdamW, and "
            f"its options."
        )
    optimizer_trial.try_on_shards(kind, options, model)
    optimizer = kind(_groups(_trained(model), decayed, weight_decay), **options)
    if is_bnb(optimizer) and options.get("optim_bits") == 8:
        _keep_embeddings_wide(optimizer, model)
    return optimizer


def _groups(
    named: Mapping[str, nn.Parameter], decayed: Collection[str] | None, weight_decay: float
) -> list[dict[str, Any]]:
    chosen = {name for name, p in named.items() if (p.dim() > 1 if decayed is None else name in decayed)}
    groups = [
        {"params": [p for name, p in named.items() if name in chosen], "weight_decay": weight_decay},
        {"params": [p for name, p in named.items() if name not in chosen], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _optimizer(
    model: nn.Module, config: SFTConfig, kind: Any, options: dict[str, Any], decayed: Collection[str] | None
) -> torch.optim.Optimizer:
    if config.loraplus_lr_ratio is not None:
        optimizer = _loraplus(model, config, kind, options)
    else:
        optimizer = kind(_groups(_trained(model), decayed, config.weight_decay), **options)
    if options.get("optim_bits") == 8:
        _keep_embeddings_wide(optimizer, model)
    return optimizer


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _keep_embeddings_wide(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Move embeddings to groups with 32-bit state, as transformers' `Trainer` does."""
    wide = embeddings_of(model)
    for group in list(optimizer.param_groups):
        if tables := [p for p in group["params"] if p in wide]:
            group["params"] = [p for p in group["params"] if p not in wide]
            optimizer.param_groups.append({**group, "params": tables, "optim_bits": 32})
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]


def _muon(model: nn.Module, config: SFTConfig, decayed: Collection[str] | None) -> torch.optim.Optimizer:
    """Muon for hidden matrices and AdamW for the rest. Unless `optim_args` says otherwise, both have the same learning
    rate, and Muon scales its updates to the size of AdamW's."""
    arguments = {"adjust_lr_fn": "match_rms_adamw", "lr": config.learning_rate, **config.optimizer_arguments()}
    tables = tables_of(model)
    named = _trained(model)
    hidden = {name: p for name, p in named.items() if is_hidden_matrix(name, p, tables)}
    if not hidden:
        raise ConfigError("optim is muon, but no matrix of a hidden layer is trainable; use adamw_torch.")
    muon = torch.optim.Muon(hidden.values(), weight_decay=config.weight_decay, **arguments)
    rest = _groups({name: p for name, p in named.items() if name not in hidden}, decayed, config.weight_decay)
    if not rest:
        return muon
    betas = (config.adam_beta1, config.adam_beta2)
    return MuonWithAdamW(muon, torch.optim.AdamW(rest, config.learning_rate, betas, config.adam_epsilon))


def _loraplus(model: Any, config: SFTConfig, kind: Any, options: dict[str, Any]) -> torch.optim.Optimizer:
    """PEFT's parameter groups: B matrices (and vectors) have a higher learning rate than A matrices, and embeddings
    their own."""
    from peft.optimizers import create_loraplus_optimizer

    if not any("lora_B" in name for name, p in model.named_parameters() if p.requires_grad):
        raise ConfigError("loraplus_lr_ratio is set, but no LoRA matrix is trainable; turn LoRA on with use_peft_lora.")
    optimizer = create_loraplus_optimizer(
        model, kind, loraplus_lr_ratio=config.loraplus_lr_ratio or 1.0, loraplus_weight_decay=config.weight_decay,
        loraplus_lr_embedding=config.loraplus_lr_embedding, **options,
    )  # fmt: skip
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
    return optimizer
