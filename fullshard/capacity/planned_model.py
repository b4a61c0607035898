"""The model of a run as a plan sees it: on the meta device, with the sharding plan of the whole model.

`train/planned_model.py` makes it from the settings of a run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from fullshard.fsdp.plan import ShardingPlan, item_size
from fullshard.fsdp.strategy import MixedPrecision
from fullshard.parallelize.settings import EngineSettings


@dataclass(frozen=True)
class HeldTensor:
    """A tensor that every rank holds whole and that is not in the plan."""

    shape: tuple[int, ...]
    dtype: str
    trainable: bool = False

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * item_size(self.dtype)


@dataclass(frozen=True)
class PlannedModel:
    """A run's model on the meta device and its sharding plan.

    The model is condensed: of many layers that are alike it has a few. Everything else here is about the whole model.
    """

    model: Any
    """The condensed model on the meta device, with its adapter and loss head, before sharding."""
    head: Any
    """The `LeanHead` that computes the loss."""
    packed: Any
    """The `Packed` inputs; None where the model needs none."""
    plan: ShardingPlan
    layers: tuple[str, ...]
    """The names of the layers that activation checkpointing can recompute, in order."""
    kinds: dict[str, str]
    """For each of these layers, the layer of the condensed model that stands for it."""
    buffers: dict[str, HeldTensor]
    ignored: dict[str, HeldTensor]
    """Parameters of modules that are not sharded (`fsdp_ignored_modules`)."""
    parameters: int
    """The number of parameters; quantized weights count as the weights they store."""
    engine: EngineSettings
    """The sharding settings, with the compiler that the run would choose."""
    precision: MixedPrecision
    device: torch.device
    """The device that the run would use, which need not exist here."""
    notes: tuple[str, ...]
    """What the plan takes for granted."""
