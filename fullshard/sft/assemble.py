"""How a run is put together, in order: from checked settings to a training loop.

ranks → model without weights → tokens → packing, adapter → data (`gather_parts`, when the trainer is made) → loss →
sharding → weights → optimizer → loop (`build_loop`, when training or evaluation begins). The steps between the bare
model and sharding are those of `model_steps.py`; `planned_model.py` takes the same ones without ranks.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fullshard.config.errors import ConfigError
from fullshard.data.stream import Stream
from fullshard.data.token_table import TokenTable
from fullshard.distributed import engines, runtime
from fullshard.distributed.ranks import agree, require_equal, run_on_all_ranks
from fullshard.distributed.watchdog import collectives
from fullshard.lora.fused import report_sharded
from fullshard.models.packed_inputs import PackingMethod
from fullshard.models.router_loss import has_router_loss
from fullshard.parallel.model import checkpointed_modules, shard_model
from fullshard.parallel.prepare import rebind, step_facts
from fullshard.parallel.settings import EngineSettings
from fullshard.planner import memory_check
from fullshard.planner.activation_budget import ActivationBudget, largest_batch
from fullshard.planner.plan_first import RunToPlan, plan_first
from fullshard.report.reporter import Reporter
from fullshard.sft import adapter
from fullshard.sft.adapter import Say, set_projection_dtype
from fullshard.sft.batches import StepLoader, Steps, describe_shapes, load_data
from fullshard.sft.checked_run import CheckedRun
from fullshard.sft.given_model import take_model
from fullshard.sft.loop import Loop
from fullshard.sft.model import find_folders, has_own_tables, prepare_vocabulary, read_tokenizer
from fullshard.sft.model_steps import adapt_model, ready_model
from fullshard.sft.optimizer import check_given, schedule_of
from fullshard.sft.read_model import read_model
from fullshard.sft.run_dir import settings_that_train
from fullshard.sft.sft_config import SFTConfig
from fullshard.weights.fill import fill


@dataclass(frozen=True)
class Parts:
    """The parts of a run before the model is sharded."""

    engine: EngineSettings
    model: Any
    """The model with its adapter. `build_loop` shards it in place."""
    base: Path | None
    """The folder with the weights; None if the model was given in memory, with its weights."""
    adapter: Path | None
    """The folder of the adapter to resume."""
    tokenizer: Any
    new_adapter: bool
    """Whether the run has added a new adapter to the model."""
    grown: bool
    """Whether the model has more token rows than its files."""
    own_tables: bool
    """Whether embedding and head are saved with the adapter, because those of its base differ."""
    packing: PackingMethod | None
    """How the model receives packed rows; None without packing."""
    train: TokenTable | Stream | None
    evaluation: TokenTable | dict[str, TokenTable] | None
    """Several sets by name, where the script gave a dict."""
    adapter_config: Any = None
    """PEFT's configuration of the adapter, with the tokens that train beside it."""

    @property
    def from_weights(self) -> bool:
        """Whether the new adapter is initialized from the base weights (PiSSA, OLoRA)."""
        return self.new_adapter and adapter.is_from_weights(self.model)


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
    config: SFTConfig, parts: Parts, reporter: Reporter, first: Path | None, steps: Steps | None, trainer: Any
) -> Loop:
    """Shard the model, read its weights and make the loop around it. All ranks must call it.

    `first` is the folder of initial adapter values to read instead of computing them again; `steps` are the training
    data. The trainer makes optimizer and schedule.
    """
    model = parts.model
    steps_to_run = reporter.total if steps is not None else 0
    ready = ready_model(config, parts.engine, model, parts.packing, steps_to_run, runtime.device(), reporter.say)
    engine, dtypes = ready.engine, ready.precision
    layers = checkpointed_modules(model, engine) if config.gradient_checkpointing else []
    collectives.meet("start of sharding")  # creating process groups waits for all ranks unwatched
    compiled = engines.current().compiles_steps  # then the compiler issues collectives, and nothing is planned
    waits: dict[str, Any] = {} if compiled else {"timeout": config.ddp_timeout}
    sharded = shard_model(model, engine, say=reporter.say, mixed_precision=dtypes, **waits)
    if note := report_sharded(sharded, dtypes.param_dtype).note():
        reporter.say(note)
    if not compiled:
        mesh = sharded._fullshard_mesh
        along_axes = [mesh.get_group(axis) for axis in range(mesh.ndim) if mesh.mesh_shape[axis] > 1]
        collectives.set_timeout(along_axes, config.ddp_timeout)
    reentrant = config.use_reentrant and not has_router_loss(model)
    if reentrant != config.use_reentrant:
        reporter.say("use_reentrant: routers would get no gradient; gradient checkpointing is not reentrant.")
    if compiled and isinstance(steps, StepLoader):
        reporter.say(describe_shapes(config, steps.dataset))
    largest = largest_batch(config, steps, model)
    activations = ActivationBudget(
        layers, config.activation_budget if steps is not None else None, largest, sharded,
        reporter.say, offload=config.activation_offloading, reentrant=reentrant,
    )  # fmt: skip
    optim = config.optim if trainer.makes_optimizer else None
    memory_check.check_and_report(sharded, optim, engine.offload_params, reporter.say, **config.optimizer_arguments())
    if steps is not None and not config.skip_plan and not compiled:
        usable = activations.usable()
        shape = largest.shape(config) if largest is not None else None
        run = RunToPlan(
            config, engine, sharded, parts.base, shape, reporter.total, parts.grown, parts.adapter_config,
            trainer.makes_optimizer, trainer.makes_loss, usable,
        )  # fmt: skip
        trainer.estimate = plan_first(run, reporter.say)
        activations.begin(trainer.estimate.choice if trainer.estimate is not None and run.is_whole else None)
    if parts.base is not None:
        fill(
            sharded, parts.base, seed=config.seed, progress=reporter.mode in ("live", "plain"),
            resize_vocab=parts.grown, adapter=parts.adapter, first=first,
        )  # fmt: skip
    set_projection_dtype(sharded, dtypes.param_dtype)
    trainer.create_optimizer_and_scheduler(reporter.total)
    optimizer, schedule = check_given(rebind(trainer.optimizer)), schedule_of(trainer.lr_scheduler)
    require_equal(step_facts(trainer.optimizer, trainer.lr_scheduler), "optimizer and schedule")
    activations.watch(optimizer)
    return Loop(
        config, sharded, ready.head, optimizer, schedule, steps, reporter, engine.mixed_precision, ready.packed,
        trainer, activations,
    )  # fmt: skip
