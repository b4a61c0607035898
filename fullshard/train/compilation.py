"""Whether a run compiles its layers, where the settings leave it open."""

from __future__ import annotations

import dataclasses

import torch

from fullshard import accelerator
from fullshard.parallelize.settings import EngineSettings
from fullshard.settings.sft_config import SFTConfig

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
