"""The engine's settings: which part of a configuration decides how a model is sharded, and what it means for `FSDPv2`.

`EngineSettings` is the one place that knows these options. `fullshard.launch` reads them from a file or flags and hands
them to the processes as environment variables; `fullshard.prepare` and the trainer take them from there
(`EngineSettings.from_environment()`), so the variables work without a launcher too. Nothing here imports torch.
What is done to a model is in `model.py`; how processes start is the business of `fullshard.launch`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fullshard.errors import ConfigError
from fullshard.options import convert, option, options_of

if TYPE_CHECKING:
    from torch import nn

    from fullshard.spmd import Mesh

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
KEEPING = {"FULL_SHARD": "SHARD_GRAD_OP", "HYBRID_SHARD": "HYBRID_SHARD_ZERO2"}
"""Strategies that drop gathered values after forward, and their likes that keep them."""
RESOLVED_VARIABLE = "FULLSHARD_RESOLVED"
"""Holds what `fullshard launch` resolved, as JSON, for the run to write down beside its results."""

_fsdp = functools.partial(option, section="fsdp_config", prefix="fsdp_")
_sizes = functools.partial(option, section="parallelism_config", prefix="parallelism_config_")
_NO_PARALLELISM = "it belongs to context or sequence parallelism, which the engine does not have"
_dynamo = functools.partial(option, section="dynamo_config", prefix="dynamo_")


@dataclass(frozen=True)
class EngineSettings:
    """How a model is sharded, in the words of the configuration file. None means that nothing was said."""

    mixed_precision: Literal["no", "fp16", "bf16", "fp8"] = option("no", env="ACCELERATE_MIXED_PRECISION")
    """The dtype that forward and backward run in. What trains is stored in fp32; gradients are reduced in fp32.
    fp16 needs a `torch.amp.GradScaler` in a loop of your own. fp8 is refused: the engine does not have it."""
    use_cpu: bool = option(False, env="ACCELERATE_USE_CPU", flags=("cpu",))
    """Train on CPUs even where there are GPUs: the model is sharded over CPU processes that talk through Gloo."""
    debug: bool = option(False, env="ACCELERATE_DEBUG_MODE")
    """Check that values which count as global are the same on every rank (slow), and let torch report collectives
    that do not match."""

    version: Literal[1, 2] = _fsdp(1, env="FSDP_VERSION")
    """Whose spelling the other options follow. It decides the default of `fsdp_state_dict_type` and nothing else:
    there is one engine."""
    sharding_strategy: Literal[STRATEGIES] | None = _fsdp(  # type: ignore[valid-type]
        None, numbers_from=1, env="FSDP_SHARDING_STRATEGY"
    )
    """How parameters lie at rest and how long a gathered layer is kept. Unset: `fsdp_reshard_after_forward` decides,
    else FULL_SHARD."""
    reshard_after_forward: str | None = _fsdp(
        None, env="FSDP_RESHARD_AFTER_FORWARD", given_as="true, false, or a strategy by name or number"
    )
    """Version 2's way to say the strategy: true is FULL_SHARD, false SHARD_GRAD_OP (with `dp_replicate_size`:
    HYBRID_SHARD, HYBRID_SHARD_ZERO2). Version 1 writes the strategy's name here."""
    offload_params: bool = _fsdp(False, env="FSDP_OFFLOAD_PARAMS", wrong=("cpu_offload",))
    """Keep shards, gradients and optimizer state in host memory."""
    auto_wrap_policy: Literal["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"] | None = _fsdp(
        None, env="FSDP_AUTO_WRAP_POLICY", numbers_from=1, wrong=("wrap_policy",)
    )
    """Which modules are gathered as a unit: the layers named, modules of a minimum size, or the whole model at once.
    Unset: the layers that the model names itself; the whole model where it names none."""
    transformer_layer_cls_to_wrap: tuple[str, ...] | None = _fsdp(
        None, env="FSDP_TRANSFORMER_CLS_TO_WRAP", aliases=("transformer_cls_to_wrap",), given_as="class names"
    )
    """The classes of the layers that are units. Unset: the model's own `_no_split_modules`."""
    min_num_params: int | None = _fsdp(None, env="FSDP_MIN_NUM_PARAMS", wrong=("min_num_param",))
    """How many parameters a module needs to be a unit of its own, with SIZE_BASED_WRAP. Unset: 1e8."""
    backward_prefetch: Literal["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"] | None = _fsdp(
        None, env="FSDP_BACKWARD_PREFETCH", numbers_from=1, wrong=("backward_prefetch_policy",)
    )
    """When the next unit of a backward pass is gathered. Unset: BACKWARD_PRE."""
    forward_prefetch: bool | None = _fsdp(None, env="FSDP_FORWARD_PREFETCH")
    """Gather the next unit of a forward pass while the current one computes. Unset: true."""
    state_dict_type: Literal["FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"] | None = _fsdp(
        None, env="FSDP_STATE_DICT_TYPE", numbers_from=1
    )
    """Whether checkpoints hold whole values in one place or each rank's shards. LOCAL_STATE_DICT is written as
    SHARDED_STATE_DICT. Unset: FULL_STATE_DICT in version 1, SHARDED_STATE_DICT in version 2."""
    activation_checkpointing: bool = _fsdp(False, env="FSDP_ACTIVATION_CHECKPOINTING")
    """Compute each unit's activations again in backward instead of keeping them."""
    activation_checkpointing_offload: bool = _fsdp(False, env="FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD")
    """Keep the inputs of checkpointed units in host memory. Needs `fsdp_activation_checkpointing`."""
    ignored_modules: str | None = _fsdp(None, env="FSDP_IGNORED_MODULES", given_as="a regular expression")
    """Modules whose whole name matches stay as they are, whole on every rank."""
    sync_module_states: bool = _fsdp(True, env="FSDP_SYNC_MODULE_STATES")
    """Start from the first rank's values everywhere. With false each rank's shard is cut from its own."""
    use_orig_params: bool = _fsdp(
        True, env="FSDP_USE_ORIG_PARAMS",
        no_op="parameters always keep their names and dtypes; a unit may hold trainable and frozen ones side by side",
    )  # fmt: skip
    """Accelerate: whether parameters are seen one by one or flattened together."""
    cpu_ram_efficient_loading: bool = _fsdp(
        True, env="FSDP_CPU_RAM_EFFICIENT_LOADING",
        no_op="each rank always reads its own slices only; no rank holds the whole model, and nothing is broadcast",
    )  # fmt: skip
    """Accelerate: whether only the first rank reads the weights."""
    limit_all_gathers: bool = _fsdp(
        True, env="FSDP_LIMIT_ALL_GATHERS", no_op="the number of units gathered ahead is always bounded"
    )
    """Accelerate: whether gathers in flight are bounded."""
    xla: bool = option(False, section="fsdp_config", env="FSDP_XLA", aliases=("xla_fsdp_v2",))
    """Train through PyTorch/XLA. Refused: the XLA engine is not there yet."""
    xla_fsdp_settings: dict[str, Any] | None = option(  # noqa: RUF009 - a field, not a shared dict
        None, section="fsdp_config", no_op="it belongs to the XLA engine, which is not there yet"
    )
    """Accelerate: options of PyTorch/XLA's wrapper."""
    xla_fsdp_grad_ckpt: bool = option(
        False, section="fsdp_config",
        no_op="it belongs to the XLA engine, which is not there yet; use fsdp_activation_checkpointing",
    )  # fmt: skip
    """Accelerate: activation checkpointing under PyTorch/XLA."""

    dp_replicate_size: int | None = _sizes(None, env="PARALLELISM_CONFIG_DP_REPLICATE_SIZE")
    """Number of groups of ranks that hold copies of each other, for the HYBRID strategies. More than 1 turns FULL_SHARD
    into HYBRID_SHARD and SHARD_GRAD_OP into HYBRID_SHARD_ZERO2. Unset: the number of nodes."""
    dp_shard_size: int | None = _sizes(None, env="PARALLELISM_CONFIG_DP_SHARD_SIZE")
    """Number of ranks that a model is split over. Unset: what the copies leave."""
    tp_size: int = _sizes(1, env="PARALLELISM_CONFIG_TP_SIZE")
    """Tensor parallelism. Only 1: mark the parameters yourself with `fullshard.spmd` for more."""
    cp_size: int = _sizes(1, env="PARALLELISM_CONFIG_CP_SIZE")
    """Context parallelism. Only 1: the engine does not have it."""
    sp_size: int = _sizes(1, env="PARALLELISM_CONFIG_SP_SIZE")
    """Sequence parallelism. Only 1: the engine does not have it."""
    cp_backend: str | None = _sizes(None, no_op=_NO_PARALLELISM)
    """Accelerate: how context parallelism is done."""
    cp_comm_strategy: str | None = _sizes(None, no_op=_NO_PARALLELISM)
    """Accelerate: how context parallelism communicates."""
    sp_backend: str | None = _sizes(None, no_op=_NO_PARALLELISM)
    """Accelerate: how sequence parallelism is done."""
    sp_seq_length: int | None = _sizes(None, no_op=_NO_PARALLELISM)
    """Accelerate: the length of every sequence under sequence parallelism."""
    sp_seq_length_is_variable: bool = _sizes(True, no_op=_NO_PARALLELISM)
    """Accelerate: whether sequences differ in length under sequence parallelism."""
    sp_attn_implementation: str | None = _sizes(None, no_op=_NO_PARALLELISM)
    """Accelerate: the attention used under sequence parallelism."""

    backend: str = _dynamo("no", env="ACCELERATE_DYNAMO_BACKEND", given_as="no, or a backend of torch.compile")
    """Compile each unit's forward with this backend of `torch.compile`; gathers stay outside the graphs."""
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = _dynamo(
        "default", env="ACCELERATE_DYNAMO_MODE"
    )
    """The mode of `torch.compile`."""
    use_fullgraph: bool = _dynamo(False, env="ACCELERATE_DYNAMO_USE_FULLGRAPH")
    """Let `torch.compile` refuse graph breaks inside a unit."""
    use_dynamic: bool = _dynamo(False, env="ACCELERATE_DYNAMO_USE_DYNAMIC")
    """Let `torch.compile` trace dynamic shapes."""
    use_regional_compilation: bool = _dynamo(
        False, env="ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", no_op="compilation is always unit by unit"
    )
    """Accelerate: whether layers are compiled one by one."""

    def __post_init__(self) -> None:
        for wrong, text in (
            (self.mixed_precision == "fp8", "mixed_precision: fp8 is not offered; use bf16, fp16 or no"),
            (self.xla, "xla: true asks for the XLA engine, which is not there yet; take the key out to train on torch"),
            (self.tp_size > 1, f"tp_size {self.tp_size}: launch offers 1 only; mark parameters with fullshard.spmd"),
            (self.cp_size > 1, f"cp_size {self.cp_size}: context parallelism is not offered; use 1"),
            (self.sp_size > 1, f"sp_size {self.sp_size}: sequence parallelism is not offered; use 1"),
            (
                self.activation_checkpointing_offload and not self.activation_checkpointing,
                "fsdp_activation_checkpointing_offload: true needs fsdp_activation_checkpointing: true",
            ),
            ((self.min_num_params or 1) < 1, f"fsdp_min_num_params: expected 1 or more, got {self.min_num_params}"),
            ((self.dp_replicate_size or 1) < 1, f"dp_replicate_size: expected 1 or more, got {self.dp_replicate_size}"),
            ((self.dp_shard_size or 1) < 1, f"dp_shard_size: expected 1 or more, got {self.dp_shard_size}"),
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
        _ = self.strategy  # finds contradictions

    # --- what the settings come to ----------------------------------------------------------------------------------

    @functools.cached_property
    def strategy(self) -> str:
        """The strategy's name, from everything that may say it."""
        named, bool_said = self.sharding_strategy, None
        if self.reshard_after_forward is not None:
            reshard = _strategy_or_bool(self.reshard_after_forward)
            if isinstance(reshard, bool):
                bool_said = reshard
            elif named in (None, "FULL_SHARD", reshard):
                named = reshard  # launchers fill the other key with FULL_SHARD when nothing was said there
            elif reshard != "FULL_SHARD":
                raise ConfigError(
                    f"fsdp_sharding_strategy: {named} and fsdp_reshard_after_forward: {reshard} contradict each other; "
                    "keep one of them"
                )
        strategy = named or "FULL_SHARD"
        if (self.dp_replicate_size or 1) > 1 and strategy in ("FULL_SHARD", "SHARD_GRAD_OP"):
            strategy = {"FULL_SHARD": "HYBRID_SHARD", "SHARD_GRAD_OP": "HYBRID_SHARD_ZERO2"}[strategy]
        if bool_said is False and strategy in KEEPING:
            if named == "HYBRID_SHARD":
                raise ConfigError(
                    "fsdp_sharding_strategy: HYBRID_SHARD and fsdp_reshard_after_forward: false contradict each other; "
                    "HYBRID_SHARD_ZERO2 keeps gathered values"
                )
            strategy = KEEPING[strategy]
        return strategy

    @property
    def hybrid(self) -> bool:
        return self.strategy.startswith("HYBRID")

    @property
    def wrap_policy(self) -> str | None:
        """The wrap policy's name; None leaves it to the model."""
        if self.auto_wrap_policy is None and self.transformer_layer_cls_to_wrap:
            return "TRANSFORMER_BASED_WRAP"
        if self.auto_wrap_policy is None and self.min_num_params is not None:
            return "SIZE_BASED_WRAP"
        return self.auto_wrap_policy

    @property
    def saved_as(self) -> str:
        """FULL_STATE_DICT or SHARDED_STATE_DICT."""
        if self.state_dict_type is None:
            return "FULL_STATE_DICT" if self.version == 1 else "SHARDED_STATE_DICT"
        return self.state_dict_type.replace("LOCAL", "SHARDED")

    def describe(self) -> dict[str, str]:
        """The effective settings in words, in the order to show them."""
        wrap = self.wrap_policy
        units = {
            None: "the model's own layers",
            "NO_WRAP": "the whole model",
            "SIZE_BASED_WRAP": f"modules of {self.min_num_params or 10**8:,} parameters",
            "TRANSFORMER_BASED_WRAP": ", ".join(self.transformer_layer_cls_to_wrap or ()) or "the model's own layers",
        }[wrap]
        said = {
            "strategy": self.strategy,
            "units": units,
            "mixed precision": self.mixed_precision,
            "offload to host": _word(self.offload_params),
            "prefetch": f"backward {self.backward_prefetch or 'BACKWARD_PRE'}, "
            f"forward {_word(self.forward_prefetch is not False)}",
            "checkpoints": self.saved_as,
            "activation checkpointing": _word(self.activation_checkpointing)
            + (" (inputs on the host)" if self.activation_checkpointing_offload else ""),
            "device": "cpu" if self.use_cpu else "GPU where there is one",
        }
        if self.hybrid:
            said["mesh"] = f"{self.dp_replicate_size or 'one'} copies of {self.dp_shard_size or 'the other'} ranks"
            if self.dp_replicate_size is None and self.dp_shard_size is None:
                said["mesh"] = "one copy per node"
        if self.backend.lower() != "no":
            said["torch.compile"] = f"{self.backend} ({self.mode})"
        if self.ignored_modules:
            said["ignored modules"] = self.ignored_modules
        if not self.sync_module_states:
            said["initial values"] = "each rank's own"
        return said

    # --- for the engine ---------------------------------------------------------------------------------------------

    def mesh_shape(self, world_size: int, nodes: int) -> dict[str, int]:
        """The mesh of the strategy: all ranks along `fsdp`, or `replica` × `fsdp`, one copy per node unless said."""
        copies, ranks = self.dp_replicate_size, self.dp_shard_size
        if not self.hybrid:
            if ranks not in (None, 1, world_size):
                raise ConfigError(
                    f"dp_shard_size {ranks} with {self.strategy} on {world_size} processes: expected {world_size}, or "
                    "dp_replicate_size beside it for copies"
                )
            return {"fsdp": world_size}
        copies = copies or (world_size // ranks if ranks else nodes) or 1
        ranks = ranks or max(1, world_size // copies)
        if copies * ranks != world_size:
            raise ConfigError(
                f"{self.strategy}: {copies} copies (dp_replicate_size, else the number of nodes) of {ranks} ranks "
                f"(dp_shard_size) are {copies * ranks} processes, but there are {world_size}; make these equal"
            )
        return {"replica": copies, "fsdp": ranks}

    def build_mesh(self) -> Mesh:
        """The mesh of the strategy over all ranks of this job."""
        from fullshard.parallelize import model as wrapping

        return wrapping.build_mesh(self)

    def fsdp_options(self, model: nn.Module, mesh: Mesh) -> dict[str, Any]:
        """The keywords of `FSDPv2(model, mesh, ...)`."""
        from fullshard.parallelize import model as wrapping

        return wrapping.fsdp_options(self, model)

    def wrap(self, model: nn.Module, mesh: Mesh | None = None, **more: Any) -> Any:
        """`FSDPv2` with these settings, activation checkpointing and compilation included; the same object."""
        from fullshard.parallelize import model as wrapping

        return wrapping.wrap(self, model, mesh, more)

    def checkpointed(self, model: nn.Module) -> list[nn.Module]:
        """The modules that activation checkpointing is for: the units, else the layers that the model names."""
        from fullshard.parallelize import model as wrapping

        return wrapping.checkpointed_modules(self, model)

    # --- to and from processes --------------------------------------------------------------------------------------

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> EngineSettings:
        """The settings that `fullshard launch`, `accelerate launch` or the user put into the environment."""
        return cls(**values_in(os.environ if environment is None else environment))

    @classmethod
    def from_trainer_flags(
        cls,
        fsdp: str | bool | Iterable[str] | None = None,
        fsdp_config: str | Path | Mapping[str, Any] | None = None,
        *,
        notes: list[str] | None = None,
        base: EngineSettings | None = None,
    ) -> EngineSettings:
        """The settings of transformers' `--fsdp "full_shard auto_wrap"` and `--fsdp_config FILE`, over those of `base`
        (the environment's by default). What had to be interpreted is added to `notes`."""
        from fullshard.parallelize.fsdp_flags import read_trainer_flags

        values = read_trainer_flags(fsdp, fsdp_config, notes if notes is not None else [])
        base = cls.from_environment() if base is None else base
        return cls(**overlay({f.name: getattr(base, f.name) for f in dataclasses.fields(cls)}, values))

    def to_environment(self) -> dict[str, str]:
        """The variables that carry these settings; what is at its default is left out."""
        variables = {"ACCELERATE_USE_FSDP": "true", "ACCELERATE_MIXED_PRECISION": self.mixed_precision}
        for one in options_of(type(self)):
            value = getattr(self, one.name)
            if one.env and value != one.default:
                text = ",".join(value) if isinstance(value, tuple) else str(value)
                variables[one.env] = text.lower() if isinstance(value, bool) else text
        # transformers acts on this one by itself, and would leave every rank but the first without weights.
        variables["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
        if self.use_cpu:
            variables["FULLSHARD_DEVICE"] = "cpu"
        if self.debug:
            variables |= {"FULLSHARD_CHECK_GLOBAL": "1", "TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
        return variables


def values_in(environment: Mapping[str, str]) -> dict[str, Any]:
    """The option values that environment variables hold."""
    values = {}
    for one in options_of(EngineSettings):
        for variable in dict.fromkeys((one.env, f"FSDP_{one.name.upper()}" if one.prefix == "fsdp_" else "")):
            if variable and environment.get(variable):
                values[one.name] = convert(one, environment[variable], variable)
    return values


def overlay(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Option values with others on top. The strategy has two keys: whoever says one of them has said both."""
    strategy = {"sharding_strategy", "reshard_after_forward"}
    kept = {k: v for k, v in base.items() if not (k in strategy and strategy & over.keys())}
    return {**kept, **over}


def resolved_launch(environment: Mapping[str, str] | None = None) -> dict[str, Any] | None:
    """What `fullshard launch` resolved (file, settings, notes), to be saved with the run; None without it."""
    text = (os.environ if environment is None else environment).get(RESOLVED_VARIABLE)
    return json.loads(text) if text else None


def _strategy_or_bool(value: str) -> str | bool:
    text = str(value).strip().upper().removeprefix("SHARDINGSTRATEGY.")
    if text in ("TRUE", "FALSE", "YES", "NO"):
        return text in ("TRUE", "YES")
    if text == "NO_RESHARD":
        return False
    if text.isdigit() and 1 <= int(text) <= len(STRATEGIES):
        return STRATEGIES[int(text) - 1]
    if text in STRATEGIES:
        return text
    raise ConfigError(
        f"fsdp_reshard_after_forward: expected true, false or one of {', '.join(STRATEGIES)}, got {value!r}"
    )


def _word(on: bool) -> str:
    return "on" if on else "off"
