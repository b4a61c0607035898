"""A run is planned before its weights are read: one that cannot fit stops with advice, and `plan.json` holds what was
planned, for the report to show beside what is measured.

The first rank plans for all, from the real sharding plan and a trace of the run's largest batch. Nothing here may stop
a run that would have fitted: what cannot be planned is only noted, and the limit is the estimate less its error.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fullshard.config.byte_size import memory_size
from fullshard.config.errors import CapacityError, ConfigError, UserError, first_line
from fullshard.device import accelerator
from fullshard.distributed import runtime
from fullshard.distributed.ranks import on_rank_0
from fullshard.distributed.temporary_folders import temporary_folder
from fullshard.fsdp.plan import ShardingPlan
from fullshard.fsdp.strategy import dtype_name
from fullshard.models.causal_lm import get_causal_lm
from fullshard.parallel.settings import EngineSettings
from fullshard.planner.estimate import Estimate
from fullshard.planner.estimate_run import Pricing, advised
from fullshard.planner.machines import MACHINES, Machine, host_memory, recognize
from fullshard.planner.plan_request import PlanRequest
from fullshard.planner.planned_model import planned_model
from fullshard.planner.step_trace import BatchShape
from fullshard.planner.verdict import MOMENTS, cannot_fit
from fullshard.sft.adapter import Say
from fullshard.sft.sft_config import SFTConfig


@dataclasses.dataclass(frozen=True)
class RunToPlan:
    """A run whose model is sharded and has no weights yet."""

    config: SFTConfig
    engine: EngineSettings
    """The sharding settings, with the compiler that was chosen."""
    model: Any
    """The sharded model."""
    base: Path | None
    """The folder with its weights; None for a model that was given in memory."""
    batch: BatchShape | None
    """Its largest micro-batch; None if that is unknown."""
    steps: int
    grown: bool = False
    """Whether the model has more token rows than its files."""
    peft_config: Any = None
    """PEFT's configuration of the adapter."""
    own_optimizer: bool = True
    """Whether the optimizer is the one that the settings name, not a script's."""
    own_loss: bool = True
    """Whether the loss is the engine's, not a script's."""
    usable: int | None = None
    """The bytes that each rank may allocate as far as other programs are concerned; None where that decides nothing."""

    @property
    def is_whole(self) -> bool:
        """Whether the plan counts everything that a step needs."""
        return self.own_optimizer and self.own_loss


def plan_first(run: RunToPlan, say: Say) -> Estimate | None:
    """The estimate of a run that is about to begin; None where none can be made, and on other ranks than the first.
    Raises if the run cannot fit. All ranks must call it."""
    found: list[Estimate] = []

    def plan() -> None:
        try:
            estimate = estimate_now(run)
        except UserError as error:
            say(f"plan: activations cannot be planned: {first_line(error)}")
            return
        except Exception as error:  # a plan is advice: a fault of the planner must not stop a run
            say(f"plan: activations cannot be planned ({type(error).__name__}: {first_line(error)}).")
            return
        check(estimate, run)
        say(describe(estimate))
        found.append(estimate)

    on_rank_0(plan, "plan of the run")
    return found[0] if found else None


def estimate_now(run: RunToPlan) -> Estimate:
    """What the run needs and costs on the devices of this job."""
    if run.batch is None:
        raise CapacityError("the length of batches is not known in advance.")
    machine, price = machine_of_run(), Pricing()
    with price.clock("model and plan"), described(run) as (config, place):
        planned = planned_model(
            config, run.engine, place, machine.num_processes, machine.nodes, device=machine.kind, steps=run.steps,
            peft_config=run.peft_config, started=True, all_parts=run.base is None,
        )  # fmt: skip
    check_same(planned.plan, run.model.plan)
    planned = dataclasses.replace(planned, plan=run.model.plan)
    assumed = [] if run.own_loss else ["the loss is the script's: what it keeps is not counted"]
    name = str(run.base) if run.base is not None else type(get_causal_lm(run.model)).__name__
    return price.price(run.config, planned, machine, run.batch, name, assumed, run.own_optimizer, run.usable)


@contextlib.contextmanager
def described(run: RunToPlan) -> Iterator[tuple[SFTConfig, Path]]:
    """The settings and the place of a model that is like the run's, with as many token rows; for one in memory, its
    configuration is written to a temporary folder."""
    config, inner = copy.copy(run.config), get_causal_lm(run.model)
    if run.base is not None:
        if run.grown:
            config.model_init_kwargs = {**config.config_changes, **_vocabulary(inner.config)}
        yield config, run.base
        return
    if not hasattr(getattr(inner, "config", None), "to_json_file"):
        raise CapacityError(f"{type(inner).__name__} is not a model of transformers.")
    config.torch_dtype = dtype_name(inner.dtype)  # type: ignore[assignment]
    with temporary_folder() as folder:
        inner.config.to_json_file(folder / "config.json")
        yield config, folder


def _vocabulary(shape: Any) -> dict[str, Any]:
    """The number of token rows, as a setting of a configuration or of the part of it that describes the language
    model."""
    text = shape.get_text_config()
    rows = {"vocab_size": text.vocab_size}
    return next(({name: rows} for name in shape.sub_configs if getattr(shape, name, None) is text), rows)


def check_same(planned: ShardingPlan, real: ShardingPlan) -> None:
    """Refuse a planned model with other units or parameters than the run's: a script may have changed its own."""
    found, there = ({unit.name: {p.names for p in unit.parameters} for unit in one.units} for one in (planned, real))
    if found != there:
        unlike = next(name for name in (*there, *found) if found.get(name) != there.get(name))
        raise CapacityError(f"the model is not what its configuration describes (in {unlike or 'the root'}).")


def check(estimate: Estimate, run: RunToPlan) -> None:
    """Stop a run that certainly does not fit."""
    machine = estimate.machine
    # On CPUs the kernel decides what is free, and may swap: `memory_check.py` looks at what is certain.
    if machine.shares_host_memory or not run.own_loss or not cannot_fit(estimate.memory, machine):
        return
    request = PlanRequest(run.config, run.engine, run.base, None, machine)
    if run.base is not None:
        estimate = advised(estimate, request, Pricing())
    raise ConfigError(f"{' '.join(estimate.verdict.sentences())} --skip_plan starts the run all the same.")


def describe(estimate: Estimate) -> str:
    """One line: the planned peak."""
    memory, verdict = estimate.memory, estimate.verdict
    tight = "" if verdict.fits is not False else "; this may not fit"
    where = MOMENTS.get(memory.peak_moment, memory.peak_moment)
    of = f"{memory_size(memory.peak)} of {memory_size(verdict.has)}"
    return f"planned peak: {of}, {where}{tight}"


def machine_of_run() -> Machine:
    """The devices of this job, with the rates of the table: nothing is measured."""
    device, host = runtime.device(), host_memory()
    if accelerator.is_accelerator(device):
        name, memory = accelerator.names()[0], accelerator.total_memory(device)
        found = recognize(name, memory) or dataclasses.replace(MACHINES["rtx3090"], name=name)
    else:
        found, memory = MACHINES["cpu"], host
    return dataclasses.replace(
        found, num_processes=runtime.world_size(), gpus_per_node=runtime.local_world_size(), device_memory=memory,
        host_memory=host, node_devices=max(runtime.local_world_size(), accelerator.count()),
    )  # fmt: skip
