"""Weights of a model on XLA, read in host memory. `weights/stored.py` takes the names in `REPLACES` from here.

The host holds a parameter whole from the moment its file is read until it is on the devices.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fullshard.fsdp.strategy import MixedPrecision, dtype_of
from fullshard.xla.tensor import full_tensor
from fullshard.xla.units import Annotated, ShardedModel

REPLACES = ("finish_loading", "stored_units", "whole_value")


class _Whole:
    """The layout of a value in host memory."""

    @staticmethod
    def slices(shape: tuple[int, ...], rank: int) -> tuple[slice, ...]:
        return tuple(slice(0, size) for size in shape)


class HostParameter:
    """A parameter of the plan, whose value is read in host memory."""

    layout = _Whole()

    def __init__(self, annotated: Annotated) -> None:
        self.annotated, self.sites = annotated, annotated.sites
        self.shard = annotated.parameter
        self.local: torch.Tensor = self.shard
        """The value in host memory; on the meta device before it is read."""

    @property
    def plan(self) -> Any:
        return self.annotated.plan

    def give_memory(self) -> None:
        """Allocate the value."""
        if self.local.is_meta:
            self.local = torch.empty(self.plan.shape, dtype=dtype_of(self.plan.dtype))

    def show_shard(self) -> None:
        """Let the modules hold the parameter itself."""
        self.annotated.hold(self.shard)

    def place(self) -> None:
        """Move the value to the devices."""
        if self.shard.is_meta and not self.local.is_meta:
            self.annotated.place(nn.Parameter(self.local, requires_grad=self.shard.requires_grad))
            self.local = self.shard = self.annotated.parameter


@dataclass
class HostUnit:
    """A unit while its weights are read."""

    module: nn.Module
    precision: MixedPrecision
    parameters: list[HostParameter]


@dataclass
class HostModel:
    """A wrapped model while its weights are read."""

    model: ShardedModel
    units: list[HostUnit] = field(default_factory=list)


def stored_units(model: nn.Module) -> HostModel | None:
    """The units of a wrapped model; None if the model is not wrapped."""
    found = getattr(model, "_fullshard_model", None)
    if not isinstance(found, ShardedModel):
        return None
    return HostModel(
        found, [HostUnit(u.module, u.precision, list(map(HostParameter, u.parameters))) for u in found.units]
    )


def finish_loading(read: HostModel) -> None:
    """Move the values that were read to the devices."""
    for unit in read.units:
        for p in unit.parameters:
            p.place()
    read.model.follow()


def whole_value(p: HostParameter) -> torch.Tensor:
    """The whole stored value, in host memory."""
    return full_tensor(p.shard)
