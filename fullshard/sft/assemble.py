"""How a run is put together, in order: from checked settings to a training loop.

ranks → model without weights → tokens → packing, adapter → data (`gather_parts`, when the trainer is made) → loss →
sharding → weights → optimizer → loop (`build_loop`, when training or evaluation begins). The steps between the bare
model and sharding are those of `model_steps.py`; `planned_model.py` takes the same ones without ranks.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fullshard.config.errors import ConfigError
from fullshard.distributed import engines, runtime
from fullshard.distributed.ranks import agree, require_equal, run_on_all_ranks
from fullshard.distributed.watchdog import collectives
from fullshard.lora.fused import report_sharded
from fullshard.models.router_loss import has_router_loss
from fullshard.parallel.model import checkpointed_modules, shard_model
from fullshard.parallel.prepare import rebind, step_facts
from fullshard.parallel.settings import EngineSettings
from fullshard.planner.activation_budget import ActivationBudget
from fullshard.planner.batch import largest_in_data
from fullshard.planner.estimate import Estimate
from fullshard.planner.plan_first import RunToPlan, plan_first
from fullshard.report.reporter import Reporter
from fullshard.sft import adapter
from fullshard.sft.adapter import Say, set_projection_dtype
from fullshard.sft.base_model import find_folders, has_own_tables, read_model, take_model
from fullshard.sft.batches import StepLoader, Steps, describe_shapes, load_data
from fullshard.sft.callbacks import Callbacks
from fullshard.sft.checked_run import CheckedRun
from fullshard.sft.loop import Loop, LoopFunctions
from fullshard.sft.model_steps import ReadyModel, adapt_model, ready_model
from fullshard.sft.optimizer import check_given, schedule_of
from fullshard.sft.optimizer_step import OptimizerSteps, StepFunctions
from fullshard.sft.output_dir import settings_that_train
from fullshard.sft.sft_config import SFTConfig
from fullshard.sft.trainer_context import Parts
from fullshard.sft.training_state import MicroBatch, TrainingState
from fullshard.sft.vocabulary import prepare_vocabulary, read_tokenizer
from fullshard.weights.fill import fill


@dataclass(frozen=True)
class TrainerFunctions:
    """What a run shares with its trainer and calls of it."""

    micro: MicroBatch
    events: Callbacks
    step: StepFunctions
    loop: LoopFunctions
    store_flos: Callable[[], None]
    make_optimizer: Callable[[int], tuple[Any, Any]]
    """Make the optimizer and the schedule of so many steps."""
    own_optimizer: bool
    """Whether the optimizer is the one that the settings name."""
    own_loss: bool
    """Whether loss and batches are the engine's own, not a script's."""


def join_ranks(engine: EngineSettings) -> None:
    """Connect the ranks, on the device that the settings choose."""
    runtime.use_spmd(device="cpu" if engine.use_cpu else None)
    if engines.current().drives_machine and runtime.world_size() > 1:
        raise ConfigError(
            f"{runtime.world_size()} processes: on the {engines.current().name} engine, training is supported in one "
            f"process, which drives all devices of its machine."
        )


def gather_parts(run: CheckedRun, say: Say) -> Parts:
    """The model without weights (unless it was given in memory), its adapter and its data. All ranks must call it."""
    config, engine = run.config, run.engine
    join_ranks(engine)
    require_equal(settings_that_train(config) | dataclasses.asdict(engine), "settings, versions and data")
    runtime.announce_transport(say)
    runtime.seed(config.seed, deterministic=config.full_determinism)
    if config.tf32 is not None:
        torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
    folders = find_folders(run)
    base, earlier = folders.base, folders.adapter
    tokenizer = run.tokenizer
    if tokenizer is None:
        tokenizer = run_on_all_ranks(lambda: read_tokenizer(config, folders.origin, earlier), "tokenizer")
    model, device = run.model, runtime.device()
    if base is not None:
        model = run_on_all_ranks(lambda: read_model(config, base, device, say), "model without weights")
    else:
        agree(lambda: take_model(model), "model in memory")
    own_tables = any(agree(lambda: has_own_tables(model, folders), "embeddings of the adapter"))
    requested = adapter.requested_config(config, run.peft_config)
    if requested is not None:
        fit = functools.partial(adapter.fitted_config, config, requested, model, say)
        requested = run_on_all_ranks(lambda: fit(from_settings=run.peft_config is None), "adapter")
    held = model.peft_config[model.active_adapters[0]] if hasattr(model, "peft_config") else None
    work = functools.partial(prepare_vocabulary, config, model, tokenizer, requested, earlier, say)
    peft_config, grown = run_on_all_ranks(work, "vocabulary")
    model, packing = adapt_model(
        config, engine, model, tokenizer, peft_config, earlier, device, say, given=base is None,
        trains=run.train is not None,
    )  # fmt: skip
    train, evaluation = load_data(config, model, tokenizer, run.train, run.evaluation, say)
    return Parts(
        engine, model, base, earlier, tokenizer, peft_config is not None and earlier is None, grown, own_tables,
        packing, train, evaluation, peft_config if held is None else held,
    )  # fmt: skip


def build_loop(
    config: SFTConfig, parts: Parts, reporter: Reporter, first: Path | None, steps: Steps | None,
    functions: TrainerFunctions,
) -> tuple[Loop, Estimate | None]:  # fmt: skip
    """Shard the model, read its weights and make the loop around it. All ranks must call it.

    `first` is the folder of initial adapter values to read instead of computing them again; `steps` are the training
    data. Returns the loop, and what the run was planned to need.
    """
    model, say = parts.model, reporter.say
    steps_to_run = reporter.total if steps is not None else 0
    ready = ready_model(config, parts.engine, model, parts.packing, steps_to_run, runtime.device(), say)
    layers = checkpointed_modules(model, ready.engine) if config.gradient_checkpointing else []
    sharded = _shard(config, model, ready, say)
    activations, estimate = _plan(config, parts, sharded, ready.engine, layers, reporter, steps, functions)
    if parts.base is not None:
        fill(
            sharded, parts.base, seed=config.seed, progress=reporter.mode in ("live", "plain"),
            resize_vocab=parts.grown, adapter=parts.adapter, first=first,
        )  # fmt: skip
    set_projection_dtype(sharded, ready.precision.param_dtype)
    of_trainer = functions.make_optimizer(reporter.total)
    optimizer, schedule = check_given(rebind(of_trainer[0])), schedule_of(of_trainer[1])
    require_equal(step_facts(*of_trainer), "optimizer and schedule")
    activations.watch(optimizer)
    scaler = torch.amp.GradScaler(runtime.device().type, enabled=ready.engine.mixed_precision == "fp16")
    batch, events = steps.batch if steps is not None else 0, functions.events
    state = TrainingState(
        config, sharded, optimizer, schedule, scaler, activations, events, functions.store_flos, batch
    )
    step = OptimizerSteps(config, state, functions.micro, ready.packed, functions.step, events, reporter.close)
    evaluates_first = config.eval_on_start and parts.evaluation is not None
    loop = Loop(
        config, state, step, ready.head, steps, reporter, functions.loop, events, evaluates_first=evaluates_first
    )
    return loop, estimate


def _shard(config: SFTConfig, model: Any, ready: ReadyModel, say: Say) -> Any:
    """The model, sharded over the ranks and without weights."""
    collectives.meet("start of sharding")  # creating process groups waits for all ranks unwatched
    compiled = engines.current().compiles_steps  # then the compiler issues collectives
    waits: dict[str, Any] = {} if compiled else {"timeout": config.ddp_timeout}
    sharded = shard_model(model, ready.engine, say=say, mixed_precision=ready.precision, **waits)
    if note := report_sharded(sharded, ready.precision.param_dtype).note():
        say(note)
    if not compiled:
        mesh = sharded._fullshard_mesh
        along_axes = [mesh.get_group(axis) for axis in range(mesh.ndim) if mesh.mesh_shape[axis] > 1]
        collectives.set_timeout(along_axes, config.ddp_timeout)
    return sharded


def _plan(
    config: SFTConfig, parts: Parts, sharded: Any, engine: EngineSettings, layers: Sequence[Any], reporter: Reporter,
    steps: Steps | None, functions: TrainerFunctions,
) -> tuple[ActivationBudget, Estimate | None]:  # fmt: skip
    """What layers keep for backward, and what the run will need. Raises if it cannot fit."""
    say, compiled = reporter.say, engines.current().compiles_steps  # then no step is traced
    reentrant = config.use_reentrant and not has_router_loss(parts.model)
    if reentrant != config.use_reentrant:
        say("use_reentrant: routers would get no gradient; gradient checkpointing is not reentrant.")
    if compiled and isinstance(steps, StepLoader):
        say(describe_shapes(config, steps.dataset))
    largest = largest_in_data(config, steps)
    activations = ActivationBudget(
        layers, config.activation_budget if steps is not None else None, largest, sharded, say,
        offload=config.activation_offloading, reentrant=reentrant,
    )  # fmt: skip
    traces_step = steps is not None and not config.skip_plan and not compiled
    run = RunToPlan(
        config, engine, sharded, parts.base, largest, reporter.total, parts.grown, parts.adapter_config,
        functions.own_optimizer, functions.own_loss, activations.usable() if traces_step else None, traces_step,
    )  # fmt: skip
    estimate = plan_first(run, say)
    activations.begin(estimate.choice if estimate is not None else None)
    return activations, estimate
