"""How a run is put together, in order: from checked settings to a training loop.

`gather_parts`, when the trainer is created: ranks → model without weights → tokens → packing, adapter → data.
`build_loop`, when training or evaluation begins: loss → sharding → memory plan → weights → optimizer → loop.

The steps between the bare model and sharding are those of `model_steps.py`; a plan takes the same ones without ranks.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from fullshard.config.errors import ConfigError
from fullshard.distributed import engines, runtime
from fullshard.distributed.ranks import require_equal
from fullshard.parallel.model import checkpointed_modules
from fullshard.parallel.model import join_ranks as join
from fullshard.parallel.settings import EngineSettings
from fullshard.planner.estimate import Estimate
from fullshard.planner.plan_first import RunToPlan, plan_first
from fullshard.report.reporter import Reporter
from fullshard.sft.adapter import Say, new_adapter_config, set_projection_dtype
from fullshard.sft.base_model import has_own_tables, load_base_model, locate_model
from fullshard.sft.batches import Steps, load_data
from fullshard.sft.checked_run import CheckedRun
from fullshard.sft.loop import Loop
from fullshard.sft.model_steps import adapt_model, ready_model, shard_ready_model
from fullshard.sft.optimizer import sharded_optimizer
from fullshard.sft.optimizer_step import OptimizerSteps
from fullshard.sft.output_dir import settings_that_train
from fullshard.sft.sft_config import SFTConfig
from fullshard.sft.trainer_context import Parts, TrainerFunctions
from fullshard.sft.training_state import TrainingState
from fullshard.sft.vocabulary import load_tokenizer, prepare_vocabulary
from fullshard.weights.fill import fill


def join_ranks(engine: EngineSettings) -> None:
    """Connect the ranks, on the device that the settings choose."""
    join(engine)
    if engines.current().drives_machine and runtime.world_size() > 1:
        raise ConfigError(
            f"{runtime.world_size()} processes: on the {engines.current().name} engine, training is supported in one "
            f"process, which drives all devices of its machine."
        )


def gather_parts(run: CheckedRun, say: Say) -> Parts:
    """The model without weights (with them, if it is in memory), its adapter and its data. All ranks must call it."""
    config, engine = run.config, run.engine
    join_ranks(engine)
    require_equal(settings_that_train(config) | dataclasses.asdict(engine), "settings, versions and data")
    runtime.announce_transport(say)
    runtime.seed(config.seed, deterministic=config.full_determinism)
    if config.tf32 is not None:
        torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
    folders = locate_model(run)
    tokenizer = load_tokenizer(run, folders)
    model = load_base_model(run, folders, runtime.device(), say)
    own_tables = has_own_tables(model, folders)
    peft_config = new_adapter_config(config, run.peft_config, model, say)
    vocabulary = prepare_vocabulary(config, model, tokenizer, peft_config, folders.adapter, say)
    model, packing = adapt_model(
        config, engine, model, tokenizer, vocabulary.peft_config, folders.adapter, runtime.device(), say,
        in_memory=folders.base is None, trains=run.train is not None,
    )  # fmt: skip
    train, evaluation = load_data(config, model, tokenizer, run.train, run.evaluation, say)
    new_adapter = vocabulary.peft_config is not None and folders.adapter is None
    return Parts(
        engine, model, folders.base, folders.adapter, tokenizer, new_adapter, vocabulary.grown, own_tables, packing,
        train, evaluation, vocabulary.adapter_config,
    )  # fmt: skip


def build_loop(
    config: SFTConfig, parts: Parts, reporter: Reporter, first: Path | None, steps: Steps | None,
    functions: TrainerFunctions,
) -> tuple[Loop, Estimate | None]:  # fmt: skip
    """Shard the model, read its weights and make the loop around it. All ranks must call it.

    `first` is the folder of initial adapter values to read instead of computing them again; `steps` are the training
    data. Returns the loop, and what the run was planned to need.
    """
    say, total, events = reporter.say, reporter.total if steps is not None else 0, functions.events
    ready = ready_model(config, parts.engine, parts.model, parts.packing, total, runtime.device(), say)
    layers = checkpointed_modules(parts.model, ready.engine) if config.gradient_checkpointing else []
    sharded = shard_ready_model(config, parts.model, ready, say)
    run = RunToPlan(
        config, ready.engine, sharded, parts.base, steps, reporter.total, parts.grown, parts.adapter_config,
        functions.own_optimizer, functions.own_loss,
    )  # fmt: skip
    activations, estimate = plan_first(run, layers, say)
    if parts.base is not None:
        fill(
            sharded, parts.base, seed=config.seed, progress=reporter.mode in ("live", "plain"),
            resize_vocab=parts.grown, adapter=parts.adapter, first=first,
        )  # fmt: skip
    set_projection_dtype(sharded, ready.precision.param_dtype)
    optimizer, schedule = sharded_optimizer(*functions.make_optimizer(reporter.total))
    activations.watch(optimizer)
    scaler = torch.amp.GradScaler(runtime.device().type, enabled=ready.engine.mixed_precision == "fp16")
    batch = steps.batch if steps is not None else 0
    store_flos = functions.store_flos
    state = TrainingState(config, sharded, optimizer, schedule, scaler, activations, events, store_flos, batch)
    step = OptimizerSteps(config, state, functions.micro, ready.packed, functions.step, events, reporter.close)
    on_start = config.eval_on_start and parts.evaluation is not None
    loop = Loop(config, state, step, ready.head, steps, reporter, functions.loop, events, evaluates_first=on_start)
    return loop, estimate
