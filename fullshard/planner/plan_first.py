"""Whether a run fits, asked before its weights are read: one that cannot fit stops with advice, and `plan.json` holds
what was planned, for the report to show beside what is measured.

Two parts of one estimate answer. Shards, gradients and optimizer state are known from the sharding plan alone; every
rank compares them with its own memory. For the rest, the first rank plans for all, from a trace of the run's largest
batch. Nothing here may stop a run that would have fitted: what cannot be planned is only noted, and the limit is the
estimate less its error.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from fullshard.config.byte_size import memory_size
from fullshard.config.errors import CapacityError, ConfigError, UserError, first_line
from fullshard.device import accelerator
from fullshard.distributed import engines, runtime
from fullshard.distributed.ranks import agree, on_rank_0
from fullshard.distributed.temporary_folders import temporary_folder
from fullshard.fsdp.plan import ShardingPlan
from fullshard.fsdp.strategy import dtype_name
from fullshard.lora.model_size import dense_line, summary
from fullshard.models.causal_lm import get_causal_lm
from fullshard.models.router_loss import has_router_loss
from fullshard.parallel.settings import EngineSettings
from fullshard.planner.activation_budget import ActivationBudget
from fullshard.planner.batch import BatchShape, largest_in_data
from fullshard.planner.changes import with_advice
from fullshard.planner.estimate import Estimate, Estimator
from fullshard.planner.machines import MACHINES, Machine, recognize, total_host_memory
from fullshard.planner.memory import MemoryOptions, StateMemory, state_memory
from fullshard.planner.optimizer_state import OptimizerMemory, names_apart
from fullshard.planner.planned_model import planned_model
from fullshard.planner.request import PlanRequest
from fullshard.planner.verdict import MOMENTS, cannot_fit, check_state
from fullshard.sft.adapter import Say, quantization
from fullshard.sft.batches import StepLoader, Steps, describe_shapes
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
    batches: Steps | None
    """Its training data; None for a run that only evaluates."""
    steps: int
    grown: bool = False
    """Whether the model has more token rows than its files."""
    peft_config: Any = None
    """PEFT's configuration of the adapter."""
    own_optimizer: bool = True
    """Whether the optimizer is the one that the settings name, not a script's."""
    own_loss: bool = True
    """Whether the loss is the engine's, not a script's."""

    @functools.cached_property
    def batch(self) -> BatchShape | None:
        """Its largest micro-batch; None if that is unknown."""
        return largest_in_data(self.config, self.batches)


def plan_first(run: RunToPlan, layers: Sequence[nn.Module], say: Say) -> tuple[ActivationBudget, Estimate | None]:
    """What these layers of a run that is about to begin keep for backward, and the run's estimate.

    There is no estimate where none can be made, and on other ranks than the first. Raises if the run cannot fit; prints
    the plan of its model. All ranks must call it.
    """
    config, compiled = run.config, engines.current().compiles_steps  # then no step is traced
    if compiled and isinstance(run.batches, StepLoader):
        say(describe_shapes(config, run.batches.dataset))
    activations = _activation_budget(run, layers, say)
    traced = run.batches is not None and not config.skip_plan and not compiled
    usable = activations.usable() if traced else None
    state = agree(lambda: known_state(run), "memory check")[0]
    for line in (*describe_plan(run.model.plan, state), dense_line(run.model), summary(run.model)):
        if line is not None:
            say(line)
    estimate = plan_step(run, usable, say) if traced else None
    activations.begin(estimate.choice if estimate is not None else None)
    return activations, estimate


def _activation_budget(run: RunToPlan, layers: Sequence[nn.Module], say: Say) -> ActivationBudget:
    config = run.config
    reentrant = config.use_reentrant and not has_router_loss(run.model)
    if reentrant != config.use_reentrant:
        say("use_reentrant: routers would get no gradient; gradient checkpointing is not reentrant.")
    budget = config.activation_budget if run.batches is not None else None
    offload = config.activation_offloading
    return ActivationBudget(layers, budget, run.batch, run.model, say, offload=offload, reentrant=reentrant)


def known_state(run: RunToPlan) -> StateMemory:
    """What the run needs whatever its batches are; an error if that is more than this rank has."""
    config, offload = run.config, run.engine.offload_params
    optim = config.optim if run.own_optimizer else None
    optimizer = OptimizerMemory(optim, config.optimizer_arguments(), names_apart(run.model, optim))
    on_device = accelerator.is_accelerator(runtime.device())
    state = state_memory(run.model.plan, MemoryOptions(accelerator=on_device, optimizer=optimizer))
    check_state(state, *available_memory(on_host=offload or not on_device))
    return state


def available_memory(on_host: bool) -> tuple[int, str]:
    """The bytes that this rank can use, and the kind of memory."""
    if not on_host:
        return accelerator.total_memory(runtime.device()), "GPU memory"
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return free // runtime.local_world_size(), "host memory"


def describe_plan(plan: ShardingPlan, state: StateMemory) -> list[str]:
    """The plan in a few lines."""
    axes, experts = (" × ".join(f"{size} {name}" for name, size in mesh) for mesh in (plan.axes, plan.expert_axes))
    of_experts = f"; experts on {experts}" if experts else ""
    layers = Counter(unit.module for unit in plan.units[1:])
    units = ", ".join(f"{count} {name}" for name, count in layers.items()) or "none but the whole model"
    host = f"; embedding on the host {memory_size(plan.host_bytes)}" if plan.host_bytes else ""
    return [
        f"plan: {plan.strategy} on {axes}{of_experts}; units: {units}",
        f"      memory on each rank: shards {memory_size(state.shards)}, gradients {memory_size(state.gradients)},",
        f"      optimizer {memory_size(state.optimizer)}; at most {memory_size(plan.gathered_bound())} gathered at once"
        f"{host}",
    ]


def plan_step(run: RunToPlan, usable: int | None, say: Say) -> Estimate | None:
    """The estimate of the whole run, on the first rank; prints a line about it, or why there is none. Its choice of
    levels counts everything that a step needs. `usable` are the bytes that each rank may allocate as far as other
    programs are concerned; None where that decides nothing."""
    estimates: list[Estimate] = []

    def plan() -> None:
        try:
            estimate = estimate_now(run, usable)
        except UserError as error:
            say(f"plan: activations cannot be planned: {first_line(error)}")
            return
        except Exception as error:  # a plan is advice: a fault of the planner must not stop a run
            say(f"plan: activations cannot be planned ({type(error).__name__}: {first_line(error)}).")
            return
        check_estimate(estimate, run)
        say(describe_peak(estimate) if estimate.verdict.certain else f"plan: {' '.join(estimate.verdict.sentences())}")
        whole = run.own_optimizer and run.own_loss
        estimates.append(estimate if whole else dataclasses.replace(estimate, choice=None))

    on_rank_0(plan, "plan of the run")
    return estimates[0] if estimates else None


def estimate_now(run: RunToPlan, usable: int | None) -> Estimate:
    """What the run needs and costs on the devices of this job."""
    if run.batch is None:
        raise CapacityError("the length of batches is not known in advance.")
    machine, estimator = machine_of_run(), Estimator()
    with estimator.clock("model and plan"), described_model(run) as (config, place):
        planned = planned_model(
            config, run.engine, place, machine.num_processes, machine.nodes, device=machine.kind, steps=run.steps,
            peft_config=run.peft_config, started=True, all_parts=run.base is None,
        )  # fmt: skip
    check_same_plan(planned.plan, run.model.plan)
    planned = dataclasses.replace(planned, plan=run.model.plan)
    assumed = [] if run.own_loss else ["the loss is the script's: what it keeps is not counted"]
    name = str(run.base) if run.base is not None else type(get_causal_lm(run.model)).__name__
    return estimator.of_model(run.config, planned, machine, run.batch, name, assumed, run.own_optimizer, usable)


@contextlib.contextmanager
def described_model(run: RunToPlan) -> Iterator[tuple[SFTConfig, Path]]:
    """The settings and the place of a model that is like the run's, with as many token rows; for one in memory, its
    configuration is written to a temporary folder. Where the settings have quantized it, they do so in the plan too."""
    config, inner = copy.copy(run.config), get_causal_lm(run.model)
    if run.base is not None:
        if run.grown:
            config.model_init_kwargs = {**config.config_changes, **_vocabulary(inner.config)}
        yield config, run.base
        return
    if not hasattr(getattr(inner, "config", None), "to_json_file"):
        raise CapacityError(f"{type(inner).__name__} is not a model of transformers.")
    config.torch_dtype = dtype_name(inner.dtype)  # type: ignore[assignment]
    shape = copy.copy(inner.config)
    if quantization(config) is not None and hasattr(shape, "quantization_config"):
        del shape.quantization_config  # it states a dtype of products, which the settings leave open
    with temporary_folder() as folder:
        shape.to_json_file(folder / "config.json")
        yield config, folder


def _vocabulary(shape: Any) -> dict[str, Any]:
    """The number of token rows, as a setting of a configuration or of the part of it that describes the language
    model."""
    text = shape.get_text_config()
    rows = {"vocab_size": text.vocab_size}
    return next(({name: rows} for name in shape.sub_configs if getattr(shape, name, None) is text), rows)


def check_same_plan(planned: ShardingPlan, real: ShardingPlan) -> None:
    """Refuse a planned model with other units or parameters than the run's: a script may have changed its own."""
    expected, actual = (
        {unit.name: {p.names for p in unit.parameters} for unit in one.units} for one in (planned, real)
    )
    if expected != actual:
        unlike = next(name for name in (*actual, *expected) if expected.get(name) != actual.get(name))
        raise CapacityError(f"the model is not what its configuration describes (in {unlike or 'the root'}).")


def check_estimate(estimate: Estimate, run: RunToPlan) -> None:
    """Stop a run that certainly does not fit."""
    machine = estimate.machine
    # On CPUs the kernel decides what is free, and may swap: only `known_state` stops a run.
    if machine.shares_host_memory or not run.own_loss or not cannot_fit(estimate.memory, machine):
        return
    request = PlanRequest(run.config, run.engine, run.base, None, machine)
    if run.base is not None:
        estimate = with_advice(estimate, request, Estimator())
    raise ConfigError(f"{' '.join(estimate.verdict.sentences())} --skip_plan starts the run anyway.")


def describe_peak(estimate: Estimate) -> str:
    """One line: the planned peak."""
    memory, verdict = estimate.memory, estimate.verdict
    tight = "" if verdict.fits is not False else "; this may not fit"
    where = MOMENTS.get(memory.peak_moment, memory.peak_moment)
    of = f"{memory_size(memory.peak)} of {memory_size(verdict.has)}"
    return f"planned peak: {of}, {where}{tight}"


def machine_of_run() -> Machine:
    """The devices of this job, with the rates of the table: nothing is measured."""
    device, host = runtime.device(), total_host_memory()
    if accelerator.is_accelerator(device):
        name, memory = accelerator.names()[0], accelerator.total_memory(device)
        machine = recognize(name, memory) or dataclasses.replace(MACHINES["rtx3090"], name=name)
    else:
        machine, memory = MACHINES["cpu"], host
    return dataclasses.replace(
        machine, num_processes=runtime.world_size(), gpus_per_node=runtime.local_world_size(), device_memory=memory,
        host_memory=host, node_devices=max(runtime.local_world_size(), accelerator.count()),
    )  # fmt: skip
