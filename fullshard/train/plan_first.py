"""A run is planned before its model is sharded: one that cannot fit stops with advice, and `plan.json` records what was
planned beside what is measured.

The first rank plans for all. Nothing here may stop a run that would have fitted: what cannot be planned is noted, and
the limit is the estimate less its error.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from fullshard import accelerator, runtime
from fullshard.byte_size import memory_size
from fullshard.capacity.estimate import Estimate
from fullshard.capacity.machines import MACHINES, Machine, host_memory, recognize
from fullshard.capacity.step_trace import BatchShape
from fullshard.capacity.verdict import MOMENTS, cannot_fit
from fullshard.errors import ConfigError, UserError, first_line
from fullshard.ranks import alone, on_rank_0
from fullshard.settings.sft_config import SFTConfig
from fullshard.train.adapter import Say
from fullshard.train.plan_request import PlanRequest


def plan_first(request: PlanRequest, say: Say) -> Estimate | None:
    """The estimate of a run that is about to start; None on other ranks than the first, and where it cannot be made.
    Raises if the run cannot fit. All ranks must call it."""
    ...


def machine_of_run() -> Machine:
    """The devices of this job. Their rates are those of the table; nothing is measured."""
    device = runtime.device()
    host = host_memory()
    if accelerator.is_accelerator(device):
        name, memory = accelerator.names()[0], accelerator.total_memory(device)
        found = recognize(name, memory) or dataclasses.replace(MACHINES["rtx3090"], name=name)
    else:
        found, memory = MACHINES["cpu"], host
    return dataclasses.replace(
        found, num_processes=runtime.world_size(), gpus_per_node=runtime.local_world_size(), device_memory=memory,
        host_memory=host,
    )  # fmt: skip
