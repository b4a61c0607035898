"""A run is planned before its weights are read: one that cannot fit stops with advice, and `plan.json` holds what was
planned, for the report to show beside what is measured.

The first rank plans for all, from the real sharding plan and a trace of the run's largest batch. Nothing here may stop
a run that would have fitted: what cannot be planned is only noted, and the limit is the estimate less its error.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

from fullshard import accelerator, runtime
from fullshard.byte_size import memory_size
from fullshard.capacity.estimate import Estimate
from fullshard.capacity.machines import MACHINES, Machine, host_memory, recognize
from fullshard.capacity.step_trace import BatchShape
from fullshard.capacity.verdict import MOMENTS, cannot_fit
from fullshard.errors import ConfigError, UserError, first_line
from fullshard.models.inner_model import causal
from fullshard.parallelize.settings import EngineSettings
from fullshard.ranks import on_rank_0
from fullshard.settings.sft_config import SFTConfig
from fullshard.train.adapter import Say
from fullshard.train.estimate_run import Pricing, advise
from fullshard.train.plan_request import PlanRequest


@dataclasses.dataclass(frozen=True)
class RunToPlan:
    """A run whose model is sharded and has no weights yet."""

    config: SFTConfig
    engine: EngineSettings
    model: Any
    """The sharded model."""
    base: Path | None
    """The folder with its weights; None for a model that was given in memory."""
    batch: BatchShape | None
    """Its largest micro-batch; None if that is unknown."""
    steps: int
    own_optimizer: bool = True
    """Whether the optimizer is the one that the settings name."""
    own_loss: bool = True
    """Whether the loss and the batches are the engine's, not a script's."""


def plan_first(run: RunToPlan, say: Say) -> Estimate | None:
    """The estimate of a run that is about to begin, on the first rank; None on others, and where none can be made.
    Raises if the run cannot fit. All ranks must call it."""
    return on_rank_0(lambda: _checked(run, say), "plan")


def _checked(run: RunToPlan, say: Say) -> Estimate | None:
    if run.batch is None:
        say("plan: the length of batches is not known in advance, so activations cannot be planned.")
        return None
    try:
        estimate = _estimate(run, run.batch)
    except UserError as error:
        say(f"plan: activations cannot be planned: {first_line(error)}")
        return None
    except Exception as error:  # the plan is advice: whatever is wrong with it must not stop a run
        say(f"plan: activations cannot be planned ({type(error).__name__}: {first_line(error)}).")
        return None
    ...
    return estimate
