"""`fullshard.prepare`: run your own training loop with the launched configuration.

It takes the model, optimizer, data loader and scheduler of a training loop and returns them ready for sharded training
with `EngineSettings.from_environment()`. `settings.py` defines the settings; `data_loader.py` splits a loader's batches
over the ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sized
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer
from torch.utils.data import DataLoader

from fullshard.config.errors import ConfigError
from fullshard.distributed import engines, runtime
from fullshard.distributed.ranks import require_equal
from fullshard.fsdp import FSDPv2, shard
from fullshard.parallel.data_loader import RankLoader
from fullshard.parallel.model import join_ranks, shard_model
from fullshard.parallel.settings import EngineSettings


def prepare(*objects: Any, settings: EngineSettings | None = None, loss_reduction: str = "mean") -> Any:
    """Prepare models, optimizers, data loaders and schedulers, in any order; returns them in the same order.

    - A model is sharded in place (`FSDPv2`).
    - An optimizer stays the same object; its parameters are replaced by the sharded ones.
    - A `DataLoader` is replaced by one that yields this rank's batches, on its device. With W ranks, a step consists of
      W batches of the loader's size, as with Accelerate. No row is repeated. If ranks have different numbers of rows,
      their gradients are weighted: a loss that is a mean over a rank's rows (or a sum, with `loss_reduction="sum"`)
      trains like the mean (or sum) over the rows of all ranks.
    - A scheduler is unchanged: call `step()` once per optimizer step, whatever the world size.

    `settings` replaces the launched settings.
    """
    settings = settings if settings is not None else EngineSettings.from_environment()
    join_ranks(settings)
    facts = {**dataclasses.asdict(settings), "loss_reduction": loss_reduction, **step_facts(*objects)}
    require_equal(facts, "settings, versions and data")
    prepared: dict[int, Any] = {}
    for one in objects:
        if isinstance(one, nn.Module):
            if isinstance(one, FSDPv2):
                raise ConfigError(f"prepare: this {type(one).__name__} is already sharded; prepare a model once")
            prepared[id(one)] = shard_model(one, settings, split_tables=False)
            runtime.get_logger().info("%s: %s", type(one).__name__, str(prepared[id(one)].plan).splitlines()[0])
    for one in objects:
        if isinstance(one, Optimizer):
            prepared[id(one)] = rebind(one)
        elif isinstance(one, DataLoader):
            prepared[id(one)] = one if isinstance(one, RankLoader) else RankLoader.of(one, loss_reduction)
        elif isinstance(one, nn.Module | LRScheduler) or one is None:
            prepared.setdefault(id(one), one)
        else:
            raise ConfigError(
                f"prepare: got a {type(one).__name__}; expected torch models, optimizers, data loaders and schedulers"
            )
    results = tuple(prepared[id(one)] for one in objects)
    return results[0] if len(results) == 1 else results


def step_facts(*objects: Any) -> dict[str, Any]:
    """What decides a step of these objects, except for values of tensors: sizes, and the numbers of optimizers,
    loaders and schedules."""
    facts: dict[str, Any] = {}
    for number, one in enumerate(one for one in objects if one is not None):
        name = f"{type(one).__name__} (argument {number + 1})"
        if isinstance(one, nn.Module):
            facts[f"parameters of {name}"] = [len(list(one.parameters())), sum(p.numel() for p in one.parameters())]
        elif isinstance(one, Optimizer):
            for index, group in enumerate(one.param_groups):
                numbers = {f"{key} of group {index}": value for key, value in group.items() if key != "params"}
                facts |= {f"{key} of {name}": value for key, value in _numbers(numbers).items()}
        elif isinstance(one, DataLoader):
            rows = len(one.dataset) if isinstance(one.dataset, Sized) else None
            facts |= {f"rows of {name}": rows, f"batch_size of {name}": one.batch_size}
            facts[f"drop_last of {name}"] = one.drop_last
        elif isinstance(one, LRScheduler):
            facts |= {f"{key} of {name}": value for key, value in _numbers(one.state_dict()).items()}
    return facts


def _numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """The plain values among these, and the values of tensors with one element."""
    numbers: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, torch.Tensor) and value.numel() == 1 and value.device.type != "meta":
            numbers[name] = value.item()
        elif (
            isinstance(value, bool | int | float | str | None)
            or isinstance(value, list | tuple)
            and all(isinstance(each, bool | int | float) for each in value)
        ):
            numbers[name] = value
    return numbers


def rebind(optimizer: Optimizer) -> Optimizer:
    """Replace an optimizer's parameters with the sharded ones; it stays the same object. State that it was made with
    (Adagrad's) is sharded too."""
    with_state = [p for p in optimizer.state if p in shard.replaced]
    if any(optimizer.state[p].get("step") != 0 for p in with_state):
        raise ConfigError(
            f"prepare: this {type(optimizer).__name__} has already taken steps on the unsharded parameters, and its "
            "state cannot be sharded; prepare it before the first step"
        )
    for p in with_state:
        new, state = shard.replaced[p], optimizer.state.pop(p)
        optimizer.state[new.shard] = {
            name: engines.current().as_shard(new, value).clone() for name, value in state.items()
        }
    for group in optimizer.param_groups:
        group["params"] = [shard.replaced[p].shard if p in shard.replaced else p for p in group["params"]]
    return optimizer
