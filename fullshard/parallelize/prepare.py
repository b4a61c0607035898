"""`fullshard.prepare`: a training loop of your own, run with the launched configuration.

It takes what a loop already has (model, optimizer, data loader, scheduler) and gives the same things back, sharded as
`EngineSettings.from_environment()` says. What each setting means is in `settings.py`; how a loader is dealt out over
the ranks is in `data_loader.py`.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer
from torch.utils.data import DataLoader

from fullshard import runtime
from fullshard.errors import ConfigError
from fullshard.fsdp import FSDPv2, shard
from fullshard.parallelize.data_loader import RankLoader
from fullshard.parallelize.settings import EngineSettings


def prepare(*objects: Any, settings: EngineSettings | None = None, loss_reduction: str = "mean") -> Any:
    """Models, optimizers, data loaders and schedulers, in any order; they come back in the same order.

    A model is wrapped in place (`FSDPv2`). An optimizer built before that stays the same object and gets the shards in
    the place of the parameters it held. A `DataLoader` becomes one that gives each rank its own batches, on its device:
    with W ranks, W batches of the loader's size make up a step, as with Accelerate. No row is repeated; where ranks
    have uneven numbers of rows their gradients are weighted, so that a loss that is a mean over a rank's own rows, or
    with `loss_reduction="sum"` their sum, trains as that over the rows of all ranks. A scheduler is left alone: one
    `step()` per optimizer step, whatever the number of ranks. `settings` overrules the launched ones.
    """
    settings = settings if settings is not None else EngineSettings.from_environment()
    runtime.use_spmd(device="cpu" if settings.use_cpu else None)
    made: dict[int, Any] = {}
    for one in objects:
        if isinstance(one, nn.Module):
            if isinstance(one, FSDPv2):
                raise ConfigError(f"prepare: this {type(one).__name__} is sharded already; prepare a model once")
            made[id(one)] = settings.wrap(one)
            runtime.get_logger().info("%s: %s", type(one).__name__, str(made[id(one)].plan).splitlines()[0])
    for one in objects:
        if isinstance(one, Optimizer):
            made[id(one)] = rebind(one)
        elif isinstance(one, DataLoader):
            made[id(one)] = one if isinstance(one, RankLoader) else RankLoader.of(one, loss_reduction)
        elif isinstance(one, nn.Module | LRScheduler) or one is None:
            made.setdefault(id(one), one)
        else:
            raise ConfigError(
                f"prepare takes models, optimizers, data loaders and schedulers of torch; not {type(one).__name__}"
            )
    results = tuple(made[id(one)] for one in objects)
    return results[0] if len(results) == 1 else results


def rebind(optimizer: Optimizer) -> Optimizer:
    """Put the shards in the place of the parameters they were cut from; the optimizer stays the same object."""
    if any(p in shard.replaced for p in optimizer.state):
        raise ConfigError(
            f"prepare: this {type(optimizer).__name__} has taken steps on the whole parameters, and its state "
            "cannot be cut; prepare it before the first step"
        )
    for group in optimizer.param_groups:
        group["params"] = [shard.replaced[p].shard if p in shard.replaced else p for p in group["params"]]
    return optimizer
