"""Whether a run compiles its layers, where the settings leave it open."""

from __future__ import annotations

import dataclasses
from typing import Any

from fullshard import accelerator, runtime
from fullshard.lora.model_size import count_parameters
from fullshard.parallelize.settings import EngineSettings
from fullshard.settings.sft_config import SFTConfig

PAYS = 1e16
"""Floating-point operations per rank from which on a run is compiled: about a minute of one GPU, which is what
compiling takes. 13 steps of 16,384 tokens with 8 billion parameters."""


def choose_compilation(config: SFTConfig, engine: EngineSettings, model: Any, steps: int) -> EngineSettings:
    """The sharding settings with the compiler that `torch_compile` leaves open: torch's default one on GPUs."""
    if config.torch_compile is not None or engine.backend.lower() != "no":
        return engine
    if not accelerator.is_accelerator(runtime.device()) or operations(config, model, steps) < PAYS:
        return engine
    return dataclasses.replace(engine, backend="inductor")


def operations(config: SFTConfig, model: Any, steps: int) -> float:
    """Floating-point operations of a rank in so many steps, for full rows: 6 per parameter and token."""
    rows = config.per_device_train_batch_size * config.gradient_accumulation_steps
    _, parameters = count_parameters(model)
    return 6.0 * parameters * steps * rows * (config.max_length or 1)
