"""What a plan is asked for: the settings of a run, its model and the machine. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fullshard.parallel.settings import EngineSettings
from fullshard.planner.machines import Machine
from fullshard.sft.sft_config import SFTConfig


@dataclass(frozen=True)
class PlanRequest:
    """A run to plan."""

    config: SFTConfig
    engine: EngineSettings
    """How the model is sharded."""
    model: Any
    """A folder, a name on the hub or a config.json; None where only the adapter names it."""
    adapter: str | None
    """The adapter to resume, by name or folder."""
    machine: Machine
    lengths: Sequence[int] | None = None
    """The lengths of the rows of the data; None assumes full rows."""
    data: str = ""
    """Where these lengths come from, or why they are not known."""
    routing_imbalance: float = 1.0
    """How many times the mean of tokens the busiest expert of a mixture gets."""
    notes: tuple[str, ...] = ()
    """What was interpreted, for the user to read."""
