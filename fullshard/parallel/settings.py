"""The sharding settings: the options that decide how a model is sharded, and what they mean for `FSDPv2`.

`EngineSettings` defines these options. `fullshard.launch` reads them from a file or flags and passes them to the
processes as environment variables; `fullshard.prepare` and the trainer read them back with
`EngineSettings.from_environment()`, so the variables also work without a launcher. Nothing here imports torch.
`model.py` applies the settings to a model; `ignored_options.py` lists options that are accepted and ignored.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fullshard.config.errors import ConfigError
from fullshard.config.options import Option, convert, counting_number, option, options_of
from fullshard.distributed import engines

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
KEEPING = {"FULL_SHARD": "SHARD_GRAD_OP", "HYBRID_SHARD": "HYBRID_SHARD_ZERO2"}
"""Strategies that free gathered parameters after forward, and the variants that keep them until backward."""
RESOLVED_VARIABLE = "FULLSHARD_RESOLVED"
"""Holds the settings that `fullshard launch` resolved, as JSON; the run saves them with its results."""

_fsdp = functools.partial(option, section="fsdp_config", prefix="fsdp_")
_xla = functools.partial(option, section="fsdp_config")
_sizes = functools.partial(option, section="parallelism_config", prefix="parallelism_config_")
_dynamo = functools.partial(option, section="dynamo_config", prefix="dynamo_")

XLA_DEVICES_VARIABLE = "FULLSHARD_XLA_DEVICES"
"""The number of devices that `num_processes` asks for where one process drives them all."""


@dataclass(frozen=True)
class EngineSettings:
    """How a model is sharded. Fields are the keys of the configuration file; None means unset."""

    mixed_precision: Literal["no", "fp16", "bf16", "fp8"] = option("no", env="ACCELERATE_MIXED_PRECISION")
    """The dtype of forward and backward. Trainable parameters are stored in fp32; gradients are reduced in fp32.
    With fp16, your own training loop needs a `torch.amp.GradScaler`. fp8 is an error: it is not supported."""
    use_cpu: bool = option(False, env="ACCELERATE_USE_CPU", flags=("cpu",))
    """Train on CPUs even if there are GPUs: the model is sharded over CPU processes that communicate with Gloo."""
    debug: bool = option(False, env="ACCELERATE_DEBUG_MODE")
    """Check that global values are the same on every rank (slow), and let torch report mismatched collectives."""

    version: Literal[1, 2] = _fsdp(1, env="FSDP_VERSION")
    """Which version of FSDP the file was written for. It only changes the default of `fsdp_state_dict_type`: there is
    one engine."""
    sharding_strategy: Literal[STRATEGIES] | None = _fsdp(  # type: ignore[valid-type]
        None, numbers_from=1, env="FSDP_SHARDING_STRATEGY"
    )
    """What is sharded, and how long a gathered layer is kept. Unset: `fsdp_reshard_after_forward` decides, else
    FULL_SHARD."""
    reshard_after_forward: str | None = _fsdp(
        None, env="FSDP_RESHARD_AFTER_FORWARD", metavar="true, false, or a strategy by name or number"
    )
    """The strategy in files for FSDP version 2: true is FULL_SHARD, false is SHARD_GRAD_OP (with `dp_replicate_size`:
    HYBRID_SHARD and HYBRID_SHARD_ZERO2). Files for version 1 have the strategy's name here."""
    offload_params: bool = _fsdp(False, env="FSDP_OFFLOAD_PARAMS", wrong=("cpu_offload",))
    """Keep sharded parameters, gradients and optimizer state in host memory."""
    auto_wrap_policy: Literal["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"] | None = _fsdp(
        None, env="FSDP_AUTO_WRAP_POLICY", numbers_from=1, wrong=("wrap_policy",)
    )
    """Which modules become units, gathered together: layers, modules of a minimum size, or the whole model. Unset: the
    model's own `_no_split_modules`; the whole model if it has none."""
    transformer_layer_cls_to_wrap: tuple[str, ...] | None = _fsdp(
        None, env="FSDP_TRANSFORMER_CLS_TO_WRAP", aliases=("transformer_cls_to_wrap",), metavar="class names"
    )
    """The layer classes that become units. Unset: the model's own `_no_split_modules`; with TRANSFORMER_BASED_WRAP the
    layers that repeat, if it has none."""
    min_num_params: int | None = _fsdp(None, env="FSDP_MIN_NUM_PARAMS", wrong=("min_num_param",))
    """With SIZE_BASED_WRAP, the number of parameters that makes a module a unit. Unset: 1e8."""
    backward_prefetch: Literal["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"] | None = _fsdp(
        None, env="FSDP_BACKWARD_PREFETCH", numbers_from=1, wrong=("backward_prefetch_policy",)
    )
    """When the next unit of the backward pass is gathered. Unset: BACKWARD_PRE."""
    forward_prefetch: bool | None = _fsdp(None, env="FSDP_FORWARD_PREFETCH")
    """Gather the next unit of the forward pass while the current one computes. Unset: true."""
    state_dict_type: Literal["FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"] | None = _fsdp(
        None, env="FSDP_STATE_DICT_TYPE", numbers_from=1
    )
    """Whether checkpoints hold full tensors or each rank's shards. LOCAL_STATE_DICT is written as SHARDED_STATE_DICT.
    Unset: FULL_STATE_DICT in version 1, SHARDED_STATE_DICT in version 2."""
    activation_checkpointing: bool = _fsdp(False, env="FSDP_ACTIVATION_CHECKPOINTING")
    """Recompute each unit's activations in backward instead of keeping them."""
    activation_checkpointing_offload: bool = _fsdp(False, env="FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD")
    """Keep the inputs of checkpointed units in host memory. Needs `fsdp_activation_checkpointing`."""
    ignored_modules: str | None = _fsdp(None, env="FSDP_IGNORED_MODULES", metavar="a regular expression")
    """Modules whose full name matches are not sharded; every rank holds them whole."""
    sync_module_states: bool = _fsdp(True, env="FSDP_SYNC_MODULE_STATES")
    """Start from rank 0's parameter values on every rank. With false, each rank's shard is cut from its own values."""
    xla: bool = _xla(False, env="FSDP_XLA")
    """Train on the XLA engine: PyTorch/XLA's compiler partitions the program, and one process drives all devices of the
    machine. true is an error where torch_xla is not installed; where it is, all runs are on XLA."""
    xla_fsdp_v2: bool | None = _xla(None, env="FSDP_XLA_FSDP_V2")
    """Which FSDP wrapper of PyTorch/XLA the file was written for. The model is sharded by FSDPv2 in any case."""
    xla_fsdp_grad_ckpt: bool = _xla(False, env="FSDP_XLA_FSDP_GRAD_CKPT")
    """On the XLA engine, the same as `fsdp_activation_checkpointing`."""
    xla_fsdp_settings: dict[str, Any] | None = _xla(  # noqa: RUF009 - a field, not a shared dict
        None, env="FSDP_XLA_FSDP_SETTINGS", kind=object, metavar="a mapping, JSON, or the path of a JSON file"
    )
    """Keywords of PyTorch/XLA's first FSDP wrapper. On the XLA engine `compute_dtype` and `buffer_dtype` are used; the
    others are accepted at their default."""

    dp_replicate_size: int | None = _sizes(
        None, env="PARALLELISM_CONFIG_DP_REPLICATE_SIZE", flags=("dp_replicate_size",)
    )
    """For the HYBRID strategies, the number of model replicas. More than 1 turns FULL_SHARD into HYBRID_SHARD and
    SHARD_GRAD_OP into HYBRID_SHARD_ZERO2. Unset: the number of nodes."""
    dp_shard_size: int | None = _sizes(None, env="PARALLELISM_CONFIG_DP_SHARD_SIZE", flags=("dp_shard_size",))
    """Number of ranks that each replica is sharded over. Unset: the ranks that the other sizes leave."""
    tp_size: int = _sizes(1, env="PARALLELISM_CONFIG_TP_SIZE", flags=("tp_size",))
    """Tensor parallelism: the number of consecutive ranks that compute parts of the same rows, each with its own heads,
    columns of products, and tokens of the vocabulary."""
    ep_size: int = _sizes(1, env="PARALLELISM_CONFIG_EP_SIZE", flags=("ep_size",))
    """Expert parallelism: the number of consecutive ranks that divide the experts of each layer among them. Tokens
    travel to their experts; over the remaining ranks of a replica each expert is sharded."""
    tp_plan: dict[str, Any] | None = _sizes(  # noqa: RUF009 - a field, not a shared dict
        None, env="FULLSHARD_TP_PLAN", kind=object, metavar="a mapping, JSON, or the path of a JSON file"
    )
    """How layers are split with `tp_size`: by names of modules (`*` stands for numbers) the styles of transformers'
    plans, such as colwise, rowwise or replicate. It changes the model's own plan."""
    cp_size: int = _sizes(1, env="PARALLELISM_CONFIG_CP_SIZE", flags=("cp_size",))
    """Context parallelism. Only 1: it is not supported yet."""
    sp_size: int = _sizes(1, env="PARALLELISM_CONFIG_SP_SIZE")
    """Sequence parallelism. Only 1: it is not supported."""

    backend: str = _dynamo("no", env="ACCELERATE_DYNAMO_BACKEND", metavar="no, or a backend of torch.compile")
    """Compile each unit's forward with this backend of `torch.compile`. All-gathers stay outside the graphs."""
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = _dynamo(
        "default", env="ACCELERATE_DYNAMO_MODE"
    )
    """The mode of `torch.compile`."""
    use_fullgraph: bool = _dynamo(False, env="ACCELERATE_DYNAMO_USE_FULLGRAPH")
    """Make graph breaks inside a unit an error in `torch.compile`."""
    use_dynamic: bool = _dynamo(False, env="ACCELERATE_DYNAMO_USE_DYNAMIC")
    """Let `torch.compile` trace dynamic shapes."""

    def __post_init__(self) -> None:
        for wrong, text in (
            (self.mixed_precision == "fp8", "mixed_precision: fp8 is not supported; use bf16, fp16 or no"),
            (self.cp_size > 1, f"cp_size {self.cp_size}: context parallelism is not supported yet; use 1"),
            (self.sp_size > 1, f"sp_size {self.sp_size}: sequence parallelism is not supported; use 1"),
            (
                self.ep_size > 1 and self.backend.lower() != "no",
                f"ep_size {self.ep_size} with dynamo_backend {self.backend} (torch_compile): layers whose experts are "
                f"on other ranks are not compiled yet; use dynamo_backend no (torch_compile false), or ep_size 1",
            ),
            (
                self.activation_checkpointing_offload and not self.activation_checkpointing,
                "fsdp_activation_checkpointing_offload: true needs fsdp_activation_checkpointing: true",
            ),
            ((self.min_num_params or 1) < 1, f"fsdp_min_num_params: expected 1 or more, got {self.min_num_params}"),
            *(
                (
                    (size := getattr(self, f"{name}_size")) is not None and size < 1,
                    f"{name}_size: expected 1 or more, got {size}",
                )
                for name in ("dp_replicate", "dp_shard", "tp", "ep", "cp", "sp")
            ),
        ):
            if wrong:
                raise ConfigError(text)
        if self.ignored_modules is not None:
            try:
                re.compile(self.ignored_modules)
            except re.error as error:
                raise ConfigError(
                    f"fsdp_ignored_modules: {self.ignored_modules!r} is not a regular expression: {error}"
                ) from None
        _ = self.strategy  # raises if two keys contradict each other
        for name in ("xla_fsdp_settings", "tp_plan"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, read_mapping(name, value))
        if self.tp_plan is not None and self.tp_size == 1:
            raise ConfigError("tp_plan says how layers are split over tp_size ranks; set tp_size too, or leave it out")
        engines.current().check_sharding(self)
        for name, value in engines.current().sharding_overrides(self).items():
            object.__setattr__(self, name, value)

    # --- derived values ---------------------------------------------------------------------------------------------

    @functools.cached_property
    def strategy(self) -> str:
        """The name of the effective strategy, from all keys that set it."""
        named, reshards = self.sharding_strategy, None
        if self.reshard_after_forward is not None:
            reshard = _strategy_or_bool(self.reshard_after_forward)
            if isinstance(reshard, bool):
                reshards = reshard
            elif named in (None, "FULL_SHARD", reshard):
                named = reshard  # launchers write FULL_SHARD into the other key when it is unset
            elif reshard != "FULL_SHARD":
                raise ConfigError(
                    f"fsdp_sharding_strategy: {named} and fsdp_reshard_after_forward: {reshard} contradict each other; "
                    "keep one of them"
                )
        strategy = named or "FULL_SHARD"
        if (self.dp_replicate_size or 1) > 1 and strategy in ("FULL_SHARD", "SHARD_GRAD_OP"):
            strategy = {"FULL_SHARD": "HYBRID_SHARD", "SHARD_GRAD_OP": "HYBRID_SHARD_ZERO2"}[strategy]
        if reshards is False and strategy in KEEPING:
            if named == "HYBRID_SHARD":
                raise ConfigError(
                    "fsdp_sharding_strategy: HYBRID_SHARD and fsdp_reshard_after_forward: false contradict each other; "
                    "HYBRID_SHARD_ZERO2 keeps gathered parameters"
                )
            strategy = KEEPING[strategy]
        return strategy

    @property
    def hybrid(self) -> bool:
        """Whether the model is sharded inside groups of ranks and replicated across them."""
        return self.strategy.startswith("HYBRID")

    @property
    def wrap_policy(self) -> str | None:
        """The name of the wrap policy; None uses the model's own `_no_split_modules`."""
        if self.auto_wrap_policy is None and self.transformer_layer_cls_to_wrap:
            return "TRANSFORMER_BASED_WRAP"
        if self.auto_wrap_policy is None and self.min_num_params is not None:
            return "SIZE_BASED_WRAP"
        return self.auto_wrap_policy

    @property
    def saved_as(self) -> str:
        """The checkpoint format: FULL_STATE_DICT or SHARDED_STATE_DICT."""
        if self.state_dict_type is None:
            return "FULL_STATE_DICT" if self.version == 1 else "SHARDED_STATE_DICT"
        return self.state_dict_type.replace("LOCAL", "SHARDED")

    def describe(self) -> dict[str, str]:
        """The effective settings as text, in display order."""
        wrap = self.wrap_policy
        units = {
            None: "the model's own layers",
            "NO_WRAP": "the whole model",
            "SIZE_BASED_WRAP": f"modules of {self.min_num_params or 10**8:,} parameters",
            "TRANSFORMER_BASED_WRAP": ", ".join(self.transformer_layer_cls_to_wrap or ()) or "the model's own layers",
        }[wrap]
        shown = {
            "strategy": self.strategy,
            "units": units,
            "mixed precision": self.mixed_precision,
            "offload to host": _on_off(self.offload_params),
            "prefetch": f"backward {self.backward_prefetch or 'BACKWARD_PRE'}, "
            f"forward {_on_off(self.forward_prefetch is not False)}",
            "checkpoints": self.saved_as,
            "activation checkpointing": _on_off(self.activation_checkpointing)
            + (" (inputs on the host)" if self.activation_checkpointing_offload else ""),
            "device": "cpu" if self.use_cpu else "GPU where there is one",
        }
        if engines.current().compiles_steps:  # the compiler decides
            del shown["offload to host"], shown["prefetch"]
            shown["device"] = "XLA devices"
        if self.tp_size > 1:
            shown["tensor parallelism"] = f"over {self.tp_size} ranks"
        if self.hybrid:
            replicas = f"{self.dp_replicate_size or ''} replicas".strip()
            shown["mesh"] = f"{replicas} of {self.dp_shard_size} ranks" if self.dp_shard_size else replicas
            if self.dp_replicate_size is None and self.dp_shard_size is None:
                shown["mesh"] = "one replica per node"
        if self.ep_size > 1:
            shown["experts"] = f"divided among {self.ep_size} ranks"
        if self.backend.lower() != "no":
            shown["torch.compile"] = f"{self.backend} ({self.mode})"
        if self.ignored_modules:
            shown["ignored modules"] = self.ignored_modules
        if not self.sync_module_states:
            shown["initial values"] = "each rank's own"
        return shown

    @property
    def ranks_per_row(self) -> int:
        """The number of consecutive ranks that compute parts of the same rows."""
        return self.cp_size * self.tp_size

    def mesh_shape(self, world_size: int, nodes: int) -> dict[str, int]:
        """The mesh over all ranks: `replica` (hybrid strategies; by default one per node), `fsdp`, and `cp` and `tp`
        where they have more than one rank."""
        inner = {axis: size for axis, size in (("cp", self.cp_size), ("tp", self.tp_size)) if size > 1}
        groups, rest = divmod(world_size, self.ranks_per_row)
        if rest:
            sizes = ", ".join(str(n) for n in range(1, world_size + 1) if world_size % (n * self.cp_size) == 0)
            raise ConfigError(
                f"tp_size {self.tp_size} on {world_size} processes: expected a size that divides their number: {sizes}"
            )
        replicas, ranks = self.dp_replicate_size, self.dp_shard_size
        of_rows = f" with tp_size {self.tp_size}" if inner else ""
        if not self.hybrid:
            if ranks not in (None, 1, groups):
                raise ConfigError(
                    f"dp_shard_size {ranks} with {self.strategy} on {world_size} processes{of_rows}: expected "
                    f"{groups}, or set dp_replicate_size as well to train several replicas"
                )
            shape = {"fsdp": groups}
        else:
            replicas = replicas or (groups // ranks if ranks else nodes) or 1
            ranks = ranks or max(1, groups // replicas)
            if replicas * ranks != groups:
                fitting = ", ".join(f"{n} of {groups // n}" for n in range(1, groups + 1) if groups % n == 0)
                raise ConfigError(
                    f"{self.strategy}: {replicas} replicas (dp_replicate_size, else the number of nodes) of {ranks} "
                    f"ranks (dp_shard_size) need {replicas * ranks * self.ranks_per_row} processes{of_rows}, but there "
                    f"are {world_size}; expected replicas of ranks such as {fitting}"
                )
            shape = {"replica": replicas, "fsdp": ranks}
        if (inside := shape["fsdp"] * self.ranks_per_row) % self.ep_size:
            sizes = ", ".join(str(n) for n in range(1, inside + 1) if inside % n == 0)
            raise ConfigError(
                f"ep_size {self.ep_size} with {inside} ranks per replica: expected a size that divides their number: "
                f"{sizes}"
            )
        return shape | inner

    # --- environment variables --------------------------------------------------------------------------------------

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> EngineSettings:
        """The settings that `fullshard launch`, `accelerate launch` or the user set as environment variables."""
        return cls(**values_in(os.environ if environment is None else environment))

    def to_environment(self) -> dict[str, str]:
        """The environment variables for these settings; defaults are left out."""
        variables = {"ACCELERATE_USE_FSDP": "true", "ACCELERATE_MIXED_PRECISION": self.mixed_precision}
        for one in options_of(type(self)):
            value = getattr(self, one.name)
            if one.env and value != one.default:
                text = ",".join(value) if isinstance(value, tuple) else _text(value)
                variables[one.env] = text.lower() if isinstance(value, bool) else text
        # transformers reads this variable itself and would leave every rank but the first without weights.
        variables["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
        if self.use_cpu:
            variables["FULLSHARD_DEVICE"] = "cpu"
        if self.debug:
            variables |= {"FULLSHARD_CHECK_GLOBAL": "1", "TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
        return variables


def values_in(environment: Mapping[str, str], ignored: Iterable[Option] = ()) -> dict[str, Any]:
    """The values of these settings, and of `ignored` options, in environment variables."""
    values = {}
    for one in (*options_of(EngineSettings), *ignored):
        for variable in dict.fromkeys(
            (one.env, f"FSDP_{one.name.upper()}" if one.env and one.prefix == "fsdp_" else "")
        ):
            if variable and environment.get(variable):
                values[one.name] = convert(one, environment[variable], variable)
    return values


def overlay(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Option values, with those in `over` taking precedence. The strategy has two keys: one in `over` replaces both."""
    strategy = {"sharding_strategy", "reshard_after_forward"}
    kept = {k: v for k, v in base.items() if not (k in strategy and strategy & over.keys())}
    return {**kept, **over}


def resolved_launch(environment: Mapping[str, str] | None = None) -> dict[str, Any] | None:
    """The file, settings and notes that `fullshard launch` resolved; None if the run was started without it."""
    text = (os.environ if environment is None else environment).get(RESOLVED_VARIABLE)
    return json.loads(text) if text else None


def _strategy_or_bool(value: str) -> str | bool:
    text = str(value).strip().upper().removeprefix("SHARDINGSTRATEGY.")
    if text in ("TRUE", "FALSE", "YES", "NO"):
        return text in ("TRUE", "YES")
    if text == "NO_RESHARD":
        return False
    if 1 <= (number := counting_number(text) or 0) <= len(STRATEGIES):
        return STRATEGIES[number - 1]
    if text in STRATEGIES:
        return text
    raise ConfigError(
        f"fsdp_reshard_after_forward: expected true, false or one of {', '.join(STRATEGIES)}, got {value!r}"
    )


def _text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict) else str(value)


def _on_off(on: bool) -> str:
    return "on" if on else "off"


def read_mapping(name: str, value: Any) -> dict[str, Any]:
    """The value of a setting as a mapping: it may also be JSON, or the path of a JSON file."""
    if isinstance(value, Mapping):
        return dict(value)
    text = str(value).strip()
    if not text.startswith("{"):
        try:
            text = Path(text).expanduser().read_text()
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{name}: expected a mapping, a JSON object or a file of one, got {value!r} "
                f"({getattr(error, 'strerror', error)})"
            ) from None
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name}: expected JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise ConfigError(f"{name}: {value!r} holds {parsed!r}; expected a JSON object")
    return parsed
