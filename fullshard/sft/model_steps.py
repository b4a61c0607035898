"""The steps from a bare model to a sharded one, in order. A run and its plan take the same ones, but the last.

Everything that depends on the device gets it as an argument. A plan is made for a device that need not be in this
machine (`present=False`): then nothing runs on it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fullshard.config.errors import ConfigError
from fullshard.device import accelerator
from fullshard.distributed import engines
from fullshard.distributed.ranks import on_rank_0, run_on_all_ranks
from fullshard.distributed.watchdog import collectives
from fullshard.fsdp import MixedPrecision
from fullshard.fsdp.strategy import dtype_of
from fullshard.lora.fused import report_sharded
from fullshard.lora.language_model import freeze_other_parts
from fullshard.lora.model_size import count_parameters
from fullshard.lora.trainable_tokens import keep_tables_whole
from fullshard.models.attention import is_own
from fullshard.models.causal_lm import get_causal_lm
from fullshard.models.chunked_loss import ChunkedLossHead
from fullshard.models.experts import ExpertsVerdict, has_experts, try_experts, use_own_experts
from fullshard.models.host_weights import offload_embedding, offload_experts
from fullshard.models.packed_inputs import Packed, PackingMethod, takes_positions
from fullshard.models.packing_check import PackingVerdict, try_packing
from fullshard.models.router_loss import set_router_loss
from fullshard.models.token_loss import TokenLoss
from fullshard.parallel.model import shard_model
from fullshard.parallel.settings import EngineSettings
from fullshard.quant import fp8
from fullshard.quant.quantize import quantize_model
from fullshard.sft import adapter
from fullshard.sft.adapter import Say, fuse_adapter, quantization, set_adapter_dtype
from fullshard.sft.base_model import choose_attention, uses_flash
from fullshard.sft.sequence_slices import choose_slices, slice_count
from fullshard.sft.sft_config import SFTConfig

COMPILE_FROM = 1e16
"""Floating-point operations per rank that amortize compilation: about a minute of one GPU, which is what compiling
takes. 13 steps of 16,384 tokens with 8 billion parameters."""


def choose_compilation(
    config: SFTConfig, engine: EngineSettings, parameters: int, steps: int, device: torch.device
) -> EngineSettings:
    """The sharding settings with the compiler that `torch_compile` leaves open: torch's default one on GPUs, where
    so many steps of a model of this size amortize compilation."""
    if config.torch_compile is not None or engine.backend.lower() != "no" or engine.ep_size > 1:
        return engine
    if not accelerator.runs_inductor(device) or training_flops(config, parameters, steps) < COMPILE_FROM:
        return engine
    return dataclasses.replace(engine, backend="inductor")


def training_flops(config: SFTConfig, parameters: int, steps: int) -> float:
    """Floating-point operations of a rank in this many steps, for full rows: 6 per parameter and token."""
    rows = config.per_device_train_batch_size * config.gradient_accumulation_steps
    return 6.0 * parameters * steps * rows * (config.max_length or 1)


class AdaptedModel(NamedTuple):
    """A model with its attention, its quantized layers and its adapter."""

    model: Any
    packing: PackingMethod | None
    """How the model receives packed rows; None without packing."""


def adapt_model(
    config: SFTConfig, engine: EngineSettings, model: Any, tokenizer: Any, peft_config: Any, adapter_dir: Path | None,
    device: torch.device, say: Say, *, in_memory: bool = False, trains: bool = True, present: bool = True,
) -> AdaptedModel:  # fmt: skip
    """Choose attention, experts and packing, quantize a model that is `in_memory`, add the adapter. All ranks must call
    it."""
    if in_memory and not hasattr(model, "peft_config") and (line := freeze_other_parts(model)):
        say(line)
    choose_attention(config, model, device, in_memory)
    choose_experts(model, say, in_memory=in_memory)
    packing = choose_packing(config, model, device, say, present=present) if config.keeps_apart else None
    if note := run_on_all_ranks(lambda: set_router_loss(model, config.router_aux_loss_coef), "router loss"):
        say(note)
    if in_memory and (chosen := config.base_dtype or quantization(config)) is not None:
        model = quantize_model(model, chosen)
    if config.base_dtype and present and (slower := fp8.hardware_note(device)):
        say(f"base_dtype {config.base_dtype}: {slower}")
    model = adapter.make_trainable(
        config, engine.activation_checkpointing, model, tokenizer, peft_config, adapter_dir, trains, say
    )
    return AdaptedModel(model, packing)


@dataclass(frozen=True)
class ReadyModel:
    """How a model is to be sharded, and what was attached to it."""

    engine: EngineSettings
    """The sharding settings, with the compiler where the settings leave it open."""
    packed: Packed | None
    head: ChunkedLossHead
    precision: MixedPrecision


def ready_model(
    config: SFTConfig, engine: EngineSettings, model: Any, packing: PackingMethod | None, steps: int,
    device: torch.device, say: Say, *, size: Callable[[Any], int] = lambda model: count_parameters(model)[1],
) -> ReadyModel:  # fmt: skip
    """Fuse the adapter, put the loss head in place and choose dtypes, for this many optimizer steps. `size` counts the
    model's parameters."""
    compiled = choose_compilation(config, engine, size(model), steps, device)
    keep_tables_whole(model)
    fuse_adapter(config, model, device, say)
    slices = slice_count(config, model, engine, compiled.backend.lower() != "no")
    if slices is None or not choose_slices(config, engine, model, slices, say):
        engine = compiled
    if config.neftune_noise_alpha:
        _add_noise(model, config.neftune_noise_alpha)
    packed = packed_inputs(model, packing, engine.mixed_precision)
    loss = TokenLoss(config.label_smoothing_factor, config.loss_type == "dft")
    # A compiler of whole steps schedules the logits itself.
    chunked = config.chunked_loss and not engines.current().compiles_steps
    head = ChunkedLossHead(model, config.loss_chunk_tokens, chunked, loss, config.measures_entropy)
    if head.why_not:
        say(f"chunked_loss: {head.why_not}.")
    _place_weights(config, model, device, say)
    precision = set_adapter_dtype(config, model, engine.mixed_precision, say)
    return ReadyModel(engine, packed, head, precision)


def _add_noise(model: Any, alpha: float) -> None:
    """NEFTune: during training, add uniform noise to the output of the embedding, scaled by alpha / sqrt(length ×
    hidden size), as transformers' Trainer does. It comes from torch's default generator, which is seeded at each step,
    so a resumed run draws the same noise."""

    def noisy(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        if not module.training:
            return output
        size = alpha / math.sqrt(output.shape[1] * output.shape[2])
        return output + torch.zeros_like(output).uniform_(-size, size)

    get_causal_lm(model).get_input_embeddings().register_forward_hook(noisy)


def _place_weights(config: SFTConfig, model: Any, device: torch.device, say: Say) -> None:
    """Keep the input embedding on the host, if the settings or the size of the other weights say so, and experts."""
    wanted = config.offload_embedding
    by_default = config.use_4bit_quantization and accelerator.runs_triton(device)
    if (by_default if wanted is None else wanted) and (why_not := offload_embedding(model)) and wanted:
        say(f"offload_embedding: {why_not}, so it stays on the device.")
    if config.offload_experts and (why_not := offload_experts(model)):
        say(f"offload_experts: {why_not}, so it has no effect.")


def shard_ready_model(config: SFTConfig, model: Any, ready: ReadyModel, say: Say) -> Any:
    """The model sharded over the ranks, without weights. All ranks must call it."""
    collectives.meet("start of sharding")  # creating process groups waits for all ranks unwatched
    compiled = engines.current().compiles_steps  # then the compiler issues collectives
    waits: dict[str, Any] = {} if compiled else {"timeout": config.ddp_timeout}
    sharded = shard_model(model, ready.engine, say=say, mixed_precision=ready.precision, **waits)
    if note := report_sharded(sharded, ready.precision.param_dtype).note():
        say(note)
    if not compiled:
        every = (p.layout.mesh for unit in sharded._fullshard_engine.units for p in unit.parameters)
        meshes = dict.fromkeys([sharded._fullshard_mesh, *every])  # in the same order on every rank
        along_axes = [m.get_group(axis) for m in meshes for axis in range(m.ndim) if m.mesh_shape[axis] > 1]
        collectives.set_timeout(along_axes, config.ddp_timeout)
    return sharded


# --- experts and packing --------------------------------------------------------------------------------------------


def choose_experts(model: Any, say: Say, *, in_memory: bool = False) -> None:
    """Let the experts of a mixture run our implementation, where a trial on the first rank shows that it is right. All
    ranks must call it. A model that is `in_memory` keeps an implementation that its script chose."""
    inner = get_causal_lm(model)
    chosen = getattr(inner.config.get_text_config(), "_experts_implementation", None)
    if not has_experts(inner) or engines.current().compiles_steps or (in_memory and chosen not in (None, "grouped_mm")):
        return
    verdict: ExpertsVerdict = on_rank_0(functools.partial(try_experts, model), "experts check")
    if not (verdict.usable and use_own_experts(model)):
        say(f"experts: {type(inner).__name__} runs them by transformers' own code, because {verdict.reason}.")


def choose_packing(
    config: SFTConfig, model: Any, device: torch.device, say: Say, *, present: bool = True
) -> PackingMethod:
    """How this model receives packed rows, tried on the first rank. All ranks must call it.

    Where the device is not in this machine (`present=False`), the trial runs on the CPU.
    """
    trial_device = device if present else torch.device("cpu")
    work = functools.partial(try_packing, model, trial_device, uses_flash(model))
    verdict: PackingVerdict = on_rank_0(work, "packing check")
    name = type(get_causal_lm(model)).__name__
    if verdict.way is not None:
        if verdict.way.alone or (verdict.way.masks and not is_own(get_causal_lm(model).config)):
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


def packed_inputs(model: Any, method: PackingMethod | None, precision: str) -> Packed | None:
    """What isolates packed documents in a model that needs more than position ids, and lets our own attention know
    which rows are packed; None for other models."""
    method = method or PackingMethod()
    if method == PackingMethod() and not is_own(get_causal_lm(model).config):
        return None
    return Packed(model, method, dtype_of(precision) if precision != "no" else get_causal_lm(model).dtype)
