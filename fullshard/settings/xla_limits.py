"""Settings of a run that the XLA engine does not have, refused by name. Nothing here imports torch.

Sharding settings (offload, strategies, torch.compile) are refused where they are read: `parallelize/xla_settings.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from fullshard.errors import ConfigError
from fullshard.optimizers.names import SERVED

ELEMENTWISE = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop", "lion_32bit")
"""The optimizers whose updates are plain operators, which the compiler fuses."""
_READS = "reads values in every step, which ends the compiled program"
_LENGTHS = "makes batches of many lengths, and XLA compiles a program for each"


class Limit(NamedTuple):
    """A setting that the XLA engine does not have."""

    name: str
    is_set: bool
    why: str
    """The reason, and what to use."""


def refuse_on_xla(config: Any) -> None:
    """Refuse settings of an `SFTConfig` that only the torch engine has."""
    for limit in _limits(config):
        if limit.is_set:
            raise ConfigError(f"{limit.name} is not supported on XLA: {limit.why}.")


def _limits(config: Any) -> tuple[Limit, ...]:
    optim = "needs bitsandbytes' kernels" if SERVED[config.optim].package else "updates whole matrices"
    attention = config.attn_implementation or ""
    return (
        Limit(
            "use_4bit_quantization",
            config.use_4bit_quantization,
            "4-bit weights need kernels of the torch engine; leave it out, or use LoRA on the model as it is",
        ),
        Limit(
            "base_dtype", config.base_dtype is not None, "fp8 weights need kernels of the torch engine; leave it out"
        ),
        Limit(
            f"optim {config.optim}", config.optim not in ELEMENTWISE, f"{optim}; use one of {', '.join(ELEMENTWISE)}"
        ),
        Limit(
            "torch_compile",
            config.torch_compile is True or config.torch_compile_backend is not None,
            "XLA compiles whole steps already; leave it out",
        ),
        Limit(
            f"gradient_checkpointing {config.gradient_checkpointing}",
            config.activation_budget is not None,
            "budgets are measured on GPUs; use true or false",
        ),
        Limit(
            "activation_offloading",
            config.activation_offloading,
            "inputs of recomputed layers stay on XLA devices; leave it out",
        ),
        Limit("offload_embedding", config.offload_embedding is True, "parameters stay on XLA devices; leave it out"),
        Limit("fused_lora", config.fused_lora is True, "the compiler fuses LoRA layers itself; leave it out"),
        Limit("use_flash_attn", config.use_flash_attn, "flash-attn's kernels are for GPUs; leave it out"),
        Limit(
            f"attn_implementation {attention}",
            attention not in ("", "sdpa", "eager"),
            "its kernels are for GPUs; use sdpa or eager",
        ),
        Limit("padding_free", config.padding_free, f"{_LENGTHS}; use packing"),
        Limit("on_nonfinite_loss skip", config.on_nonfinite_loss == "skip", f"{_READS}; use stop"),
        Limit("eval_samples", config.eval_samples > 0, f"generation {_LENGTHS}; use fullshard chat afterwards"),
        Limit(
            "sample_prompts", config.sample_prompts is not None, f"generation {_LENGTHS}; use fullshard chat afterwards"
        ),
    )
