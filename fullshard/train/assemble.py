"""The whole system on one screen: from settings to a loop that is ready to run, every part in its order.

launched ranks → mesh → empty model → way to pack → adapter → tokens → lean head → plan → weights → optimizer → loop
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fullshard import runtime
from fullshard.checkpoint.manager import CheckpointManager
from fullshard.data.sources import DataSource
from fullshard.data.stream import Stream
from fullshard.data.token_table import TokenTable
from fullshard.errors import ConfigError
from fullshard.fsdp import checkpoint_module
from fullshard.fsdp.strategy import dtype_of
from fullshard.lora.adapter_config import taken_from_weights
from fullshard.lora.model_size import dense_line, summary
from fullshard.lora.peft_model import check_trains
from fullshard.lora.trainable_tokens import keep_tables_whole
from fullshard.lora.virtual_tokens import init_from_tokens, prompt_kinds
from fullshard.models.chunked_loss import LeanHead
from fullshard.models.inner_model import causal
from fullshard.models.neftune import add_noise
from fullshard.models.packed_inputs import Packed, PackingMethod, takes_positions
from fullshard.models.packing_check import PackingVerdict, try_packing
from fullshard.parallelize.fsdp_flags import settings_from_trainer_flags
from fullshard.parallelize.model import checkpointed_modules, shard_model
from fullshard.parallelize.prepare import rebind
from fullshard.parallelize.settings import EngineSettings
from fullshard.quant.quantize import quantize_model
from fullshard.ranks import agree, agree_locally, on_rank_0
from fullshard.reporting.reporter import Reporter
from fullshard.train import memory_check, run_dir
from fullshard.train.adapter import Say, add_adapter, quantization, settle_dtypes, settle_projections
from fullshard.train.adapter_options import check_prompt
from fullshard.train.batches import describe_data, make_loader, make_stream, make_table
from fullshard.train.config import SFTConfig
from fullshard.train.freeze import freeze
from fullshard.train.loop import Loop
from fullshard.train.model import check_rows, empty_model, read_tokenizer, resized, settle_vocabulary, uses_flash
from fullshard.train.optimizer import Schedule, make_optimizer
from fullshard.train.start import base_of_adapter
from fullshard.watchdog import collectives
from fullshard.weights.adapter_base import check_base
from fullshard.weights.adapter_files import embedding_rows
from fullshard.weights.fill import fill
from fullshard.weights.locate import resolve


@dataclass
class Parts:
    """What a run is made of before it is sharded."""

    config: SFTConfig
    engine: EngineSettings
    model: Any
    base: Path | None
    """The folder with the weights; None if the model came with its values."""
    tokenizer: Any
    train: TokenTable | Stream | None = None
    evaluation: TokenTable | None = None
    earlier: Path | None = None
    """The folder of the adapter that is gone on with."""
    adds_adapter: bool = False
    """Whether the run itself put a new adapter into the model."""
    grown: bool = False
    """Whether the model has more token rows than its files."""
    tables: bool = False
    """Whether embedding and head are written with the adapter: those of its base are others."""
    first: Path | None = None
    """The folder of the adapter as the run began with it, where it was taken out of the weights."""
    way: PackingMethod | None = None
    """How the model is given packed rows; None without packing."""

    @property
    def takes_from_weights(self) -> bool:
        """Whether the run's own adapter begins with what it takes out of the weights."""
        configs = getattr(self.model, "peft_config", {}).values() if self.adds_adapter else ()
        return any(taken_from_weights(getattr(one, "init_lora_weights", None)) for one in configs)


def engine_settings(config: SFTConfig, notes: list[str]) -> EngineSettings:
    """How the model is sharded: what the launcher said, overruled by the run's own settings."""
    engine = settings_from_trainer_flags(config.fsdp, config.fsdp_config, notes=notes)
    changes: dict[str, Any] = {"mixed_precision": config.precision} if config.precision else {}
    if config.torch_compile and engine.backend.lower() == "no":
        changes["backend"] = "inductor"
    return dataclasses.replace(engine, **changes)


def join_ranks(engine: EngineSettings) -> None:
    """Meet the other ranks, on the device that the settings choose."""
    runtime.use_spmd(device="cpu" if engine.use_cpu else None)


def gather_parts(
    config: SFTConfig, engine: EngineSettings, model: Any, tokenizer: Any, train: DataSource | None,
    evaluation: DataSource | None, peft_config: Any, say: Say,
) -> Parts:  # fmt: skip
    """Ranks, model without values, adapter, tokens."""
    join_ranks(engine)
    runtime.announce_transport(say)
    runtime.seed(config.seed)
    named = config.adapter_name_or_path if not hasattr(model, "peft_config") else None
    earlier = resolve(named) if named is not None else None
    model = base_of_adapter(earlier) if model is None and earlier is not None else model
    base = resolve(model) if isinstance(model, str | Path) else None
    named_base = base or _origin(model)
    if earlier is not None and named_base is not None:
        agree(lambda: check_base(earlier, named_base), "base of the adapter")
    if tokenizer is None:
        tokenizer = agree_locally(lambda: read_tokenizer(config, named_base, earlier), "tokenizer")
    if base is not None:
        model = agree_locally(lambda: empty_model(config, base, say), "model without weights")

    def has_tables() -> bool:
        return bool(embedding_rows(earlier)) if earlier is not None else base is None and resized(model)

    tables = any(agree(has_tables, "embeddings of the adapter"))
    settle = functools.partial(settle_vocabulary, config, model, tokenizer, peft_config, earlier, say)
    peft_config, grown = agree_locally(settle, "vocabulary")
    way = way_to_pack(config, model, say) if config.packing else None
    if base is None and (four_bits := quantization(config)) is not None:
        model = quantize_model(model, four_bits)
    if peft_config is not None:
        model = add_adapter(model, peft_config, config.seed, earlier)
        if config.prompt_tuning_init_text:
            init_from_tokens(model, tokenizer(config.prompt_tuning_init_text)["input_ids"])
    for kind in prompt_kinds(model):
        check_prompt(kind, config.packing, config.gradient_checkpointing or engine.activation_checkpointing)
    if config.freeze and train is not None:
        agree(functools.partial(freeze, model, config.freeze, say), "freezing")
    check_trains(model)
    adds = peft_config is not None and earlier is None
    parts = Parts(
        config, engine, model, base, tokenizer, earlier=earlier, adds_adapter=adds, grown=grown, tables=tables, way=way
    )
    if train is not None and config.streaming:
        parts.train = make_stream(config, train, tokenizer, functools.partial(check_rows, model))
    elif train is not None:
        parts.train = table_of(parts, "training", train, say)
    if evaluation is not None:
        parts.evaluation = table_of(parts, "evaluation", evaluation, say)
    return parts


def table_of(parts: Parts, name: str, source: DataSource, say: Say) -> TokenTable:
    """The tokens of a data set, checked against the model. All ranks must call this."""
    table = make_table(parts.config, source, parts.tokenizer)
    say(describe_data(name, table.facts, parts.config))
    agree(functools.partial(check_rows, parts.model, table), f"check of the {name} data")
    return table


def way_to_pack(config: SFTConfig, model: Any, say: Say) -> PackingMethod:
    """How this model is given packed rows, as the first rank finds by trying. All ranks must call this."""
    work = functools.partial(try_packing, model, runtime.device(), uses_flash(model))
    verdict: PackingVerdict = on_rank_0(work, "packing check")
    name = type(causal(model)).__name__
    if verdict.way is not None:
        if verdict.way != PackingMethod():
            say(f"packing: documents are kept apart in {name} by {verdict.way}.")
        return verdict.way
    if verdict.tried:
        raise ConfigError(f"packing: {verdict.reason} in {name}, however they are given to it; leave packing out.")
    if not config.trust_packing:
        raise ConfigError(
            f"packing: whether {name} keeps documents in a row apart cannot be tried on a small model of its class "
            f"({verdict.reason}); leave packing out, or set trust_packing if you know that it does."
        )
    if not takes_positions(model):
        raise ConfigError(f"packing: {name} does not take position_ids, so documents would see each other.")
    say(f"packing: {name} is trusted to keep documents in a row apart; it could not be tried ({verdict.reason}).")
    return PackingMethod()


def build_loop(parts: Parts, reporter: Reporter, optimizer: Any = None, notify: Any = None) -> Loop:
    """Shard the model as planned, fill it, and put a loop around it."""
    config, engine, model = parts.config, parts.engine, parts.model
    keep_tables_whole(model)
    if config.neftune_noise_alpha:
        add_noise(model, config.neftune_noise_alpha)
    packed = Packed(model, parts.way, _computed_in(engine, model)) if parts.way not in (None, PackingMethod()) else None
    head = LeanHead(model, config.loss_chunk_tokens, config.chunked_loss)
    if head.why_not:
        reporter.say(f"chunked_loss: {head.why_not}.")
    layers = (
        checkpointed_modules(model, engine)
        if config.gradient_checkpointing and not engine.activation_checkpointing
        else []
    )
    dtypes = settle_dtypes(config, model, engine.mixed_precision, reporter.say)
    collectives.meet("start of sharding")  # making groups waits for all ranks unwatched
    sharded = shard_model(model, engine, timeout=config.ddp_timeout, mixed_precision=dtypes)
    mesh = sharded._fullshard_mesh
    along_axes = [mesh.get_group(axis) for axis in range(mesh.ndim) if mesh.mesh_shape[axis] > 1]
    collectives.set_timeout(along_axes, config.ddp_timeout)
    for layer in layers:
        checkpoint_module(layer, reentrant=config.use_reentrant)
    need = agree(lambda: memory_check.check_fit(sharded.plan, config.optim, engine.offload_params), "memory check")[0]
    for line in (*memory_check.describe(sharded.plan, need), dense_line(sharded), summary(sharded)):
        if line is not None:
            reporter.say(line)
    if parts.base is not None:
        shown = reporter.mode in ("live", "plain")
        fill(
            sharded, parts.base, seed=config.seed, progress=shown, resize_vocab=parts.grown, adapter=parts.earlier,
            first=parts.first,
        )  # fmt: skip
    settle_projections(sharded, dtypes.param_dtype)
    optimizer = rebind(optimizer) if optimizer is not None else make_optimizer(sharded, config)
    schedule = Schedule(
        optimizer, config.lr_scheduler_type, config.warmup(reporter.total), reporter.total, config.schedule_settings()
    )
    table = parts.train if parts.train is not None else parts.evaluation
    assert table is not None
    loader = make_loader(config, table, parts.tokenizer.pad_token_id, uses_flash(model))
    precision, more = engine.mixed_precision, {"notify": notify} if notify is not None else {}
    return Loop(
        config, sharded, head, optimizer, schedule, loader, reporter, reporter.total, evaluation=parts.evaluation,
        precision=precision, packed=packed, **more,
    )  # fmt: skip


def open_checkpoints(config: SFTConfig, loop: Loop, needed: Callable[[int], bool]) -> CheckpointManager:
    """The run's checkpoints; the best one, and those that are `needed` (by an upload), are not removed."""

    def protect(step: int) -> bool:
        return step == loop.progress.best_step or needed(step)

    place = run_dir.place_of(config) / run_dir.CHECKPOINTS
    return CheckpointManager(place, config.save_steps, config.save_total_limit, protect=protect)


def _computed_in(engine: EngineSettings, model: Any) -> torch.dtype:
    return dtype_of(engine.mixed_precision) if engine.mixed_precision != "no" else causal(model).dtype


def _origin(model: Any) -> str | None:
    """Where a model of the user's came from, if it says so."""
    return getattr(getattr(model, "config", None), "_name_or_path", None) or None
