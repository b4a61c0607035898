"""What the XLA engine does not have: settings that are refused by name, and what the settings of PyTorch/XLA mean.

Nothing here imports torch. The keys of `xla_fsdp_settings` are keywords of PyTorch/XLA's first FSDP wrapper. There a
wrapper issues collectives; here the compiler inserts them, so some keywords have nothing to set. They are accepted at
their default and refused otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from fullshard.config.errors import ConfigError
from fullshard.config.options import as_bool, nearest
from fullshard.optim.names import SERVED

_TORCH = "it needs the torch engine: install torch 2.11 or newer."
LACKS: Mapping[str, str] = {
    "inputs in host memory": f"inputs of recomputed modules stay on XLA devices; {_TORCH}",
    "quantized weights": f"{_TORCH}",
    "device meshes of torch": f"XLA's mesh spans devices, not processes; {_TORCH}",
    "plans": f"the compiler decides what a step holds; {_TORCH}",
}
"""What `engines.require` refuses here."""

# --- sharding settings ------------------------------------------------------------------------------------------------

PRECISION = {"float32": "no", "bfloat16": "bf16"}
"""The dtypes of `compute_dtype`, and the `mixed_precision` of each."""

_COMPILER = "on XLA the compiler inserts and schedules the collectives"
_MESH = "the mesh decides who holds which shard; use dp_replicate_size and dp_shard_size"
REFUSED: dict[str, tuple[Any, str]] = {
    "reshard_after_forward": (True, f"{_COMPILER}, and decides how long gathered parameters are kept"),
    "disable_reshard_on_root": (True, f"{_COMPILER}, and decides how long gathered parameters are kept"),
    "flatten_parameters": (False, "parameters keep their shapes and names"),
    "execute_sharding_on_init": (True, "parameters are always sharded when the model is wrapped"),
    "sync_on_finalization": (False, "the trainer ends each step's graph; your own loop calls xm.mark_step()"),
    "fp32_reduce_scatter": (False, f"{_COMPILER}, in the dtype in which gradients are computed"),
    "sharding_groups": (None, _MESH),
    "sharding_rank": (None, _MESH),
    "sharding_world_size": (None, _MESH),
    "optimization_barrier_in_forward": (True, _COMPILER),
    "optimization_barrier_in_backward": (True, _COMPILER),
    "pin_layout_in_collective_ops": (True, _COMPILER),
    "reduce_scatter_bucket_size_mb": (0, f"{_COMPILER}; it combines small ones itself"),
    "coalesce_all_gather_ops": (False, f"{_COMPILER}; it combines small ones itself"),
    "shard_param_on_dim_0": (False, "the sharding plan chooses the dim of each parameter; annotate a parameter with "
                                    "fullshard.spmd.mark_sharding to choose it yourself"),
    "auto_wrap_policy": (None, "use fsdp_auto_wrap_policy and fsdp_transformer_layer_cls_to_wrap"),
    "auto_wrapper_callable": (None, "use xla_fsdp_grad_ckpt to checkpoint layers; in a script, FSDPv2 takes it"),
    "param_init_fn": (None, "each process reads the slices of its devices from the model's files; in a script, FSDPv2 "
                            "takes it"),
}  # fmt: skip
"""By key: its default, and why other values are refused."""
HONORED = ("compute_dtype", "buffer_dtype")


def check_sharding(settings: Any) -> None:
    """Refuse sharding settings (an `EngineSettings`) that the compiler decides or does not have."""
    for wrong, text in (
        (settings.mixed_precision == "fp16", "mixed_precision: fp16 needs a loss scaler, which reads a value in every "
                                             "step; use bf16 on XLA"),
        (settings.tp_size > 1, f"tp_size {settings.tp_size}: on XLA, split parameters with mark_sharding; use 1"),
        (settings.ep_size > 1, f"ep_size {settings.ep_size}: experts stay on XLA devices; use 1"),
        (settings.offload_params, "fsdp_offload_params: shards stay on XLA devices; remove it"),
        (settings.activation_checkpointing_offload, "fsdp_activation_checkpointing_offload: inputs of checkpointed "
                                                    "units stay on XLA devices; remove it"),
        (settings.backend.lower() != "no", f"dynamo_backend: {settings.backend}: XLA compiles whole steps already; "
                                           f"remove it"),
        (settings.strategy in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2"), f"{settings.strategy}: {_COMPILER}, and decides "
         "how long gathered parameters are kept; use FULL_SHARD or HYBRID_SHARD"),
    ):  # fmt: skip
        if wrong:
            raise ConfigError(text)
    _check_keys(settings.xla_fsdp_settings or {}, settings.mixed_precision)


def _check_keys(options: Mapping[str, Any], precision: str) -> None:
    for key, value in options.items():
        if key not in REFUSED and key not in HONORED:
            raise ConfigError(f"xla_fsdp_settings: unknown key {key!r}{nearest(key, (*REFUSED, *HONORED))}")
        if key in REFUSED and not _is_default(value, REFUSED[key][0]):
            raise ConfigError(f"xla_fsdp_settings: {key}: {value!r} is not supported: {REFUSED[key][1]}")
        if key in HONORED and value is not None and _dtype(options, key) is None:
            raise ConfigError(f"xla_fsdp_settings: {key} is {value!r}; choose float32 or bfloat16")
    computes = _dtype(options, "compute_dtype")
    if computes is not None and precision not in ("no", PRECISION[computes]):
        raise ConfigError(
            f"xla_fsdp_settings: compute_dtype: {computes} and mixed_precision: {precision} contradict each other; "
            "keep one of them"
        )


def sharding_overrides(settings: Any) -> dict[str, Any]:
    """The sharding settings that other keys of PyTorch/XLA set."""
    computes = _dtype(settings.xla_fsdp_settings or {}, "compute_dtype")
    implied: dict[str, Any] = {"activation_checkpointing": True} if settings.xla_fsdp_grad_ckpt else {}
    return implied | ({"mixed_precision": PRECISION[computes]} if computes is not None else {})


def buffer_dtype(settings: Any) -> str | None:
    """The name of the dtype that floating-point buffers are cast to; None leaves them as they are."""
    return _dtype(settings.xla_fsdp_settings or {}, "buffer_dtype")


def _dtype(options: Mapping[str, Any], key: str) -> str | None:
    name = str(options.get(key)).removeprefix("torch.")
    name = {"bf16": "bfloat16", "fp32": "float32"}.get(name, name)
    return name if name in PRECISION else None


def _is_default(value: Any, default: Any) -> bool:
    if isinstance(default, bool) and value is not None:
        try:
            return as_bool(value) is default
        except ValueError:
            return False
    return value is None or str(value) == str(default)


# --- settings of a run ------------------------------------------------------------------------------------------------

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


def check_run(config: Any) -> None:
    """Refuse settings of a training run (an `SFTConfig`) that only the torch engine has."""
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
            "dequantize", config.dequantize, "shipped weights are unpacked by the torch engine; give the model in bf16"
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
        Limit(
            f"sequence_slices {config.sequence_slices}",
            (config.slices or 1) > 1,
            "the compiler schedules whole steps; leave it out",
        ),
        Limit("offload_embedding", config.offload_embedding is True, "parameters stay on XLA devices; leave it out"),
        Limit("offload_experts", config.offload_experts, "parameters stay on XLA devices; leave it out"),
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
