"""What the settings of PyTorch/XLA mean here: the keys of `xla_fsdp_settings`, and the sharding settings that the XLA
engine does not have.

The keys are keywords of PyTorch/XLA's first FSDP wrapper. There a wrapper issues collectives; on the XLA engine the
compiler inserts them, so some keywords have nothing to set. They are accepted at their default and refused otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fullshard import engines
from fullshard.errors import ConfigError
from fullshard.options import as_bool, nearest

DEVICES_VARIABLE = "FULLSHARD_XLA_DEVICES"
"""The number of XLA devices that `num_processes` asks for."""
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


def read_settings(given: Any) -> dict[str, Any]:
    """`xla_fsdp_settings` as a mapping: it may also be JSON, or the path of a JSON file."""
    if isinstance(given, Mapping):
        return dict(given)
    text = str(given).strip()
    if not text.startswith("{"):
        try:
            text = Path(text).expanduser().read_text()
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"xla_fsdp_settings: {given!r} is no mapping, no JSON object and no file that can be read "
                f"({getattr(error, 'strerror', error)})"
            ) from None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"xla_fsdp_settings: not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"xla_fsdp_settings: {given!r} holds {found!r} instead of a JSON object")
    return found


def check(settings: Any) -> None:
    """Refuse `xla: true` without the XLA engine, and what the XLA engine does not have. `settings` are an
    `EngineSettings`."""
    if settings.xla and not engines.is_xla():
        raise ConfigError(
            "xla: true needs the XLA engine, and this installation offers the torch engine. The XLA engine needs torch "
            "2.9.0 with torch_xla 2.9.0; TPUs with a newer torch belong to the torch engine (docs/devices.md). Remove "
            "the key to train with torch"
        )
    if not engines.is_xla():
        return
    for wrong, text in (
        (settings.mixed_precision == "fp16", "mixed_precision: fp16 needs a loss scaler, which reads a value in every "
                                             "step; use bf16 on XLA"),
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


def _check_keys(given: Mapping[str, Any], precision: str) -> None:
    for key, value in given.items():
        if key not in REFUSED and key not in HONORED:
            raise ConfigError(f"xla_fsdp_settings: unknown key {key!r}{nearest(key, (*REFUSED, *HONORED))}")
        if key in REFUSED and not _is_default(value, REFUSED[key][0]):
            raise ConfigError(f"xla_fsdp_settings: {key}: {value!r} is not supported: {REFUSED[key][1]}")
        if key in HONORED and value is not None and _dtype(given, key) is None:
            raise ConfigError(f"xla_fsdp_settings: {key} is {value!r}; choose float32 or bfloat16")
    computes = _dtype(given, "compute_dtype")
    if computes is not None and precision not in ("no", PRECISION[computes]):
        raise ConfigError(
            f"xla_fsdp_settings: compute_dtype: {computes} and mixed_precision: {precision} contradict each other; "
            "keep one of them"
        )


def overruled(settings: Any) -> dict[str, Any]:
    """The sharding settings that other keys of PyTorch/XLA set, on the XLA engine."""
    if not engines.is_xla():
        return {}
    computes = _dtype(settings.xla_fsdp_settings or {}, "compute_dtype")
    found: dict[str, Any] = {"activation_checkpointing": True} if settings.xla_fsdp_grad_ckpt else {}
    return found | ({"mixed_precision": PRECISION[computes]} if computes is not None else {})


def buffer_dtype(settings: Any) -> str | None:
    """The name of the dtype that floating-point buffers are cast to; None leaves them as they are."""
    return _dtype(settings.xla_fsdp_settings or {}, "buffer_dtype") if engines.is_xla() else None


def _dtype(given: Mapping[str, Any], key: str) -> str | None:
    name = str(given.get(key)).removeprefix("torch.")
    name = {"bf16": "bfloat16", "fp32": "float32"}.get(name, name)
    return name if name in PRECISION else None


def _is_default(value: Any, default: Any) -> bool:
    if isinstance(default, bool) and value is not None:
        try:
            return as_bool(value) is default
        except ValueError:
            return False
    return value is None or str(value) == str(default)


def notes(settings: Any) -> Iterator[str]:
    """What happens with settings of PyTorch/XLA that are not taken literally."""
    if not engines.is_xla():
        for key in ("xla_fsdp_v2", "xla_fsdp_settings", "xla_fsdp_grad_ckpt"):
            if getattr(settings, key):
                yield f"{key} is not used without xla: true"
    elif settings.xla_fsdp_v2 is False:
        yield "xla_fsdp_v2: false: PyTorch/XLA's first FSDP wrapper is not offered; the model is sharded by FSDPv2"
