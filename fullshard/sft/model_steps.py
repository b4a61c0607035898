"""The steps from a bare model to one that can be sharded, in order. A run and its plan take the same ones.

Everything that depends on the device gets it as an argument. A plan is made for a device that need not be in this
machine (`present=False`): then nothing runs on it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fullshard.device import accelerator
from fullshard.distributed import engines
from fullshard.distributed.ranks import run_on_all_ranks
from fullshard.fsdp import MixedPrecision
from fullshard.lora.language_model import freeze_other_parts
from fullshard.lora.model_size import count_parameters
from fullshard.lora.trainable_tokens import keep_tables_whole
from fullshard.models.chunked_loss import ChunkedLossHead
from fullshard.models.embeddings import add_noise, offload_embedding
from fullshard.models.packed_inputs import Packed, PackingMethod
from fullshard.models.router_loss import set_router_loss
from fullshard.models.token_loss import TokenLoss
from fullshard.parallel.settings import EngineSettings
from fullshard.quant import fp8
from fullshard.quant.quantize import quantize_model
from fullshard.sft import adapter
from fullshard.sft.adapter import Say, fuse_adapter, quantization, set_adapter_dtype
from fullshard.sft.model import choose_experts, choose_packing, packed_inputs
from fullshard.sft.read_model import choose_attention
from fullshard.sft.sft_config import SFTConfig

PAYS = 1e16
"""Floating-point operations per rank from which on a run is compiled: about a minute of one GPU, which is what
compiling takes. 13 steps of 16,384 tokens with 8 billion parameters."""


def choose_compilation(
    config: SFTConfig, engine: EngineSettings, parameters: int, steps: int, device: torch.device
) -> EngineSettings:
    """The sharding settings with the compiler that `torch_compile` leaves open: torch's default one on GPUs, for models
    of so many parameters that so many steps pay for it."""
    if config.torch_compile is not None or engine.backend.lower() != "no":
        return engine
    if not accelerator.runs_inductor(device) or operations(config, parameters, steps) < PAYS:
        return engine
    return dataclasses.replace(engine, backend="inductor")


def operations(config: SFTConfig, parameters: int, steps: int) -> float:
    """Floating-point operations of a rank in so many steps, for full rows: 6 per parameter and token."""
    rows = config.per_device_train_batch_size * config.gradient_accumulation_steps
    return 6.0 * parameters * steps * rows * (config.max_length or 1)


class AdaptedModel(NamedTuple):
    """A model with its attention, its quantized layers and its adapter."""

    model: Any
    packing: PackingMethod | None
    """How the model receives packed rows; None without packing."""


def adapt_model(
    config: SFTConfig, engine: EngineSettings, model: Any, tokenizer: Any, peft_config: Any, earlier: Path | None,
    device: torch.device, say: Say, *, given: bool = False, trains: bool = True, present: bool = True,
) -> AdaptedModel:  # fmt: skip
    """Choose attention, experts and packing, quantize a model that was `given` in memory, add the adapter. All ranks
    must call it."""
    if given and not hasattr(model, "peft_config") and (line := freeze_other_parts(model)):
        say(line)
    choose_attention(config, model, device, given)
    choose_experts(model, say, given=given)
    packing = choose_packing(config, model, device, say, present=present) if config.keeps_apart else None
    if note := run_on_all_ranks(lambda: set_router_loss(model, config.router_aux_loss_coef), "router loss"):
        say(note)
    if given and (chosen := config.base_dtype or quantization(config)) is not None:
        model = quantize_model(model, chosen)
    if config.base_dtype and present and (slower := fp8.hardware_note(device)):
        say(f"base_dtype {config.base_dtype}: {slower}")
    model = adapter.make_trainable(
        config, engine.activation_checkpointing, model, tokenizer, peft_config, earlier, trains, say
    )
    return AdaptedModel(model, packing)


@dataclass(frozen=True)
class ReadyModel:
    """What was made of a model so that it can be sharded."""

    engine: EngineSettings
    """The sharding settings, with the compiler where the settings leave it open."""
    packed: Packed | None
    head: ChunkedLossHead
    precision: MixedPrecision


def ready_model(
    config: SFTConfig, engine: EngineSettings, model: Any, packing: PackingMethod | None, steps: int,
    device: torch.device, say: Say, *, size: Callable[[Any], int] = lambda model: count_parameters(model)[1],
) -> ReadyModel:  # fmt: skip
    """Fuse the adapter, put the loss head in place and choose dtypes, for so many optimizer steps. `size` counts the
    model's parameters."""
    engine = choose_compilation(config, engine, size(model), steps, device)
    keep_tables_whole(model)
    fuse_adapter(config, model, device, say)
    if config.neftune_noise_alpha:
        add_noise(model, config.neftune_noise_alpha)
    packed = packed_inputs(model, packing, engine.mixed_precision)
    loss = TokenLoss(config.label_smoothing_factor, config.loss_type == "dft")
    chunked = (
        config.chunked_loss and not engines.current().compiles_steps
    )  # there the compiler schedules the logits of a program
    head = ChunkedLossHead(model, config.loss_chunk_tokens, chunked, loss, config.measures_entropy)
    if head.why_not:
        say(f"chunked_loss: {head.why_not}.")
    _place_embedding(config, model, device, say)
    precision = set_adapter_dtype(config, model, engine.mixed_precision, say)
    return ReadyModel(engine, packed, head, precision)


def _place_embedding(config: SFTConfig, model: Any, device: torch.device, say: Say) -> None:
    """Keep the input embedding on the host, if the settings or the size of the other weights say so."""
    asked = config.offload_embedding
    by_default = config.use_4bit_quantization and accelerator.runs_triton(device)
    if (by_default if asked is None else asked) and (why_not := offload_embedding(model)) and asked:
        say(f"offload_embedding: {why_not}, so it stays on the device.")
