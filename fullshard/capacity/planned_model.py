"""The model of a run as a plan sees it: on the meta device, with the sharding plan of the whole model.

`train/planned_model.py` makes it from the settings of a run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fullshard.fsdp.plan import ShardingPlan
from fullshard.fsdp.strategy import MixedPrecision
from fullshard.parallelize.settings import EngineSettings


@dataclass(frozen=True)
class PlannedModel:
    """A run's model on the meta device and its sharding plan.

    The model is condensed: of layers that are alike it has one. The plan is that of the whole model.
    """

    model: Any
    """The condensed model on the meta device, with its adapter and loss head, before sharding."""
    head: Any
    """The `LeanHead` that computes the loss."""
    packed: Any
    """The `Packed` inputs; None where the model needs none."""
    plan: ShardingPlan
    """The plan of the whole model."""
    layers: tuple[str, ...]
    """The names of the layers of the whole model that activation checkpointing wraps, in order."""
    kinds: dict[str, str]
    """For each of these layers, the layer of the condensed model that stands for it."""
    buffers: dict[str, tuple[int, ...]]
    engine: EngineSettings
    """The sharding settings, with the compiler that the run would choose."""
    precision: MixedPrecision
    device: torch.device
    """The device that the run would use, which need not exist here."""
    notes: tuple[str, ...]
    """What the run would report, and what the plan takes for granted."""
