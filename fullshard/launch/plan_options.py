"""The options of `fullshard plan` that `fullshard sft` and `fullshard launch` do not have."""

from __future__ import annotations

from dataclasses import dataclass

from fullshard.capacity.machines import MachineOptions
from fullshard.options import Option, option, options_of


@dataclass(frozen=True)
class PlanOptions(MachineOptions):
    """The machine to plan for, and what to print."""

    search: bool = False
    """Rank the settings that fit this machine by estimated speed, each with the YAML that runs it."""
    allow: tuple[str, ...] = option((), kind=tuple, given_as="lora,qlora,fp8,…")
    """What the search may change beside strategy, offload, checkpointing and micro-batch."""
    json: bool = False
    """Print one JSON object; docs/planning.md describes it."""


def plan_options() -> tuple[Option, ...]:
    """The flags that `fullshard plan` alone has, or reads for the machine."""
    return options_of(PlanOptions)
