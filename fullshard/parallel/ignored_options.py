"""Options of other launchers that fullshard reads and ignores, each with the reason.

Files and commands written for Accelerate contain them, so they must not be an error. `fullshard launch` lists those
that were set to something other than their default. No configuration class has a field for them.
"""

from __future__ import annotations

from typing import Any

from fullshard.config.options import Option

_FSDP = {"section": "fsdp_config", "prefix": "fsdp_"}
_PARALLELISM = {"section": "parallelism_config", "prefix": "parallelism_config_"}
_NO_PARALLELISM = "it configures context or sequence parallelism, which the engine does not have"
_NO_TPU_VM = "it starts commands on TPU machines over SSH; start fullshard on the machine itself"


def _ignored(name: str, kind: type, default: Any, reason: str, **about: Any) -> Option:
    return Option(name, kind, default, "", default is None, no_op=reason, **about)


IGNORED_OPTIONS: tuple[Option, ...] = (
    _ignored(
        "use_orig_params", bool, True,
        "parameters always keep their names and dtypes; a unit may hold trainable and frozen ones side by side",
        env="FSDP_USE_ORIG_PARAMS", **_FSDP,
    ),
    # Its variable is not read: `EngineSettings.to_environment` always sets it, because transformers acts on it.
    _ignored(
        "cpu_ram_efficient_loading", bool, True,
        "each rank always reads only its own slices; no rank holds the whole model, and nothing is broadcast", **_FSDP,
    ),
    _ignored(
        "limit_all_gathers", bool, True, "the number of units gathered ahead is always bounded",
        env="FSDP_LIMIT_ALL_GATHERS", **_FSDP,
    ),
    _ignored("cp_backend", str, None, _NO_PARALLELISM, **_PARALLELISM),
    _ignored("cp_comm_strategy", str, None, _NO_PARALLELISM, **_PARALLELISM),
    _ignored("sp_backend", str, None, _NO_PARALLELISM, **_PARALLELISM),
    _ignored("sp_seq_length", int, None, _NO_PARALLELISM, **_PARALLELISM),
    _ignored("sp_seq_length_is_variable", bool, True, _NO_PARALLELISM, **_PARALLELISM),
    _ignored("sp_attn_implementation", str, None, _NO_PARALLELISM, **_PARALLELISM),
    _ignored(
        "use_parallelism_config", bool, False, "the sizes in `parallelism_config` apply whenever they are set",
        in_file=False,
    ),
    _ignored(
        "use_regional_compilation", bool, False, "compilation is always unit by unit",
        section="dynamo_config", prefix="dynamo_", env="ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION",
    ),
    _ignored("same_network", bool, True, "machines always meet at main_process_ip:main_process_port"),
    _ignored(
        "main_training_function", str, "main", "the whole script runs; no function of it is started once per device",
    ),
    _ignored(
        "downcast_bf16", str, "no", "it makes bf16 of every float32 value, weights and optimizer state included; use "
        "mixed_precision: bf16",
    ),
    _ignored("tpu_env", tuple, None, f"{_NO_TPU_VM}, with these variables in its environment"),
    _ignored("tpu_use_cluster", bool, False, _NO_TPU_VM, flags=("tpu_cluster",)),
    _ignored("tpu_use_sudo", bool, False, _NO_TPU_VM),
    _ignored("tpu_name", str, None, _NO_TPU_VM),
    _ignored("tpu_zone", str, None, _NO_TPU_VM),
    _ignored("tpu_vm", tuple, None, _NO_TPU_VM, flags=("vm",)),
    _ignored("command_file", str, None, _NO_TPU_VM),
    _ignored("commands", tuple, None, _NO_TPU_VM),
)  # fmt: skip
