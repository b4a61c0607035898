"""Accelerate's state on this engine: process group and device, FSDP on every kind of rank, and the FSDP plugin, whose
keywords become settings of the engine.

The launched settings count first; keywords that the script gave to the plugin itself overrule them. Accelerate's own
reading of them is not used: its version 2 drops prefetching and the hybrid strategies.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from fullshard.config.errors import ConfigError
from fullshard.config.options import convert, options_of
from fullshard.device import accelerator
from fullshard.distributed import runtime
from fullshard.fsdp import MixedPrecision, transformer_auto_wrap_policy
from fullshard.parallel.settings import EngineSettings, overlay

DEVICE_VARIABLE = "ACCELERATE_TORCH_DEVICE"
_announced: set[str] = set()


def partial_state(original: Callable[..., None]) -> Callable[..., None]:
    """Patch of `PartialState.__init__`."""

    def __init__(self: Any, cpu: bool = False, **kwargs: Any) -> None:
        if not self._shared_state:
            runtime.use_spmd(device="cpu" if cpu else None)
            os.environ[DEVICE_VARIABLE] = str(runtime.device())
            if not accelerator.is_accelerator(runtime.device()):
                # Otherwise Accelerate takes ranks without a GPU for independent programs.
                cpu = True
        original(self, cpu, **kwargs)

    return __init__


def accelerator_state(original: Callable[..., None]) -> Callable[..., None]:
    """Patch of `AcceleratorState.__init__`."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        first = not self._shared_state
        original(self, *args, **kwargs)
        plugin: Any = kwargs.get("fsdp_plugin")
        if not first or not hasattr(plugin, "fullshard"):
            return
        from accelerate.state import PartialState
        from accelerate.utils import DistributedType

        self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        self.fsdp_plugin = plugin
        if self._mixed_precision != "no":
            plugin.set_mixed_precision(self._mixed_precision)
        if "served" not in _announced:
            _announced.add("served")
            strategy = plugin.fullshard.settings.strategy
            runtime.print0(f"Accelerate's FSDP is served by fullshard ({strategy}); --no_integrations turns this off")

    return __init__


# --- the plugin -----------------------------------------------------------------------------------------------------

NAMES = {
    "fsdp_version": "version",
    "cpu_offload": "offload_params",
    "transformer_cls_names_to_wrap": "transformer_layer_cls_to_wrap",
    **{
        name: name
        for name in (
            "sharding_strategy", "reshard_after_forward", "backward_prefetch", "forward_prefetch", "min_num_params",
            "state_dict_type", "activation_checkpointing", "activation_checkpointing_offload",
        )
    },
}  # fmt: skip
"""Keywords of the plugin, and the settings of the engine that they are."""
IGNORED = ("state_dict_config", "optim_state_dict_config", "limit_all_gathers", "use_orig_params", "sync_module_states",
           "cpu_ram_efficient_loading")  # fmt: skip
"""Keywords that decide nothing here."""


@dataclass
class Serving:
    """What the engine needs to know of a plugin."""

    settings: EngineSettings
    options: dict[str, Any] = field(default_factory=dict)
    """Keywords of `FSDPv2` that settings cannot express: modules, functions, dtypes."""
    policy: Any = None
    """The plugin's `auto_wrap_policy` as it was made. Another one there is the script's own."""

    def wrap_policy(self, current: Any) -> dict[str, Any]:
        """The `auto_wrap_policy` keyword of `FSDPv2` if the script has put one into the plugin."""
        return {} if current is self.policy else {"auto_wrap_policy": without_adapter_units(current)}


def plugin(original: Callable[..., None]) -> Callable[..., None]:
    """Patch of `FullyShardedDataParallelPlugin.__init__`."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = inspect.signature(original).bind_partial(self, *args, **kwargs)
        arguments = {name: value for name, value in list(bound.arguments.items())[1:] if value is not None}
        serving = read(arguments)
        settings = serving.settings
        original(
            self,
            fsdp_version=2,
            reshard_after_forward=settings.strategy in ("FULL_SHARD", "HYBRID_SHARD"),
            cpu_offload=settings.offload_params,
            backward_prefetch="NO_PREFETCH",
            state_dict_type=settings.saved_as,
            auto_wrap_policy=settings.wrap_policy or "TRANSFORMER_BASED_WRAP",
            transformer_cls_names_to_wrap=list(settings.transformer_layer_cls_to_wrap or ()) or None,
            min_num_params=settings.min_num_params,
            activation_checkpointing=settings.activation_checkpointing,
            activation_checkpointing_offload=settings.activation_checkpointing_offload,
            ignored_modules=arguments.get("ignored_modules"),
            mixed_precision_policy=arguments.get("mixed_precision_policy"),
            cpu_ram_efficient_loading=False,
        )
        serving.policy = self.auto_wrap_policy
        self.fullshard = serving

    return __init__


def set_state_dict_type(original: Callable[..., None]) -> Callable[..., None]:
    """Patch of `FullyShardedDataParallelPlugin.set_state_dict_type`."""

    def set_type(self: Any, state_dict_type: Any = None) -> None:
        if state_dict_type is not None:
            self.state_dict_config = self.optim_state_dict_config = None
            if "LOCAL" in str(state_dict_type).upper():
                state_dict_type = "SHARDED_STATE_DICT"
        original(self, state_dict_type)

    return set_type


def read(arguments: dict[str, Any]) -> Serving:
    """The engine's settings of a plugin with these keywords, over the launched ones."""
    base = EngineSettings.from_environment()
    kinds = {one.name: one for one in options_of(EngineSettings)}
    values: dict[str, Any] = {}
    options: dict[str, Any] = {}
    for name, value in arguments.items():
        if name in NAMES:
            key = NAMES[name]
            values[key] = convert(kinds[key], _text(value), f"FullyShardedDataParallelPlugin({name}=…)")
        elif name == "auto_wrap_policy" and isinstance(value, str):
            values[name] = convert(kinds[name], value.upper(), f"FullyShardedDataParallelPlugin({name}=…)")
        elif name == "ignored_modules" and isinstance(value, str):
            values[name] = value
        elif name == "mixed_precision_policy":
            options["mixed_precision"] = _precision(value)
        elif name in ("auto_wrap_policy", "ignored_modules", "param_init_fn"):
            options[name] = without_adapter_units(value) if name == "auto_wrap_policy" else value
        elif name not in IGNORED:
            raise ConfigError(f"FullyShardedDataParallelPlugin({name}={value!r}): fullshard has no such option")
    settings = {f.name: getattr(base, f.name) for f in dataclasses.fields(EngineSettings)}
    return Serving(EngineSettings(**overlay(settings, values)), options)


def _text(value: Any) -> str:
    """A keyword's value in the words of a configuration file."""
    if isinstance(value, enum.Enum):
        return value.name.lstrip("_")
    if hasattr(value, "offload_params"):  # torch's CPUOffload
        return str(bool(value.offload_params))
    if type(value).__name__ in ("CPUOffloadPolicy", "OffloadPolicy"):
        return str(type(value).__name__ == "CPUOffloadPolicy")
    return ",".join(map(str, value)) if isinstance(value, list | tuple | set) else str(value)


def _precision(value: Any) -> MixedPrecision:
    """torch's `MixedPrecision` or `MixedPrecisionPolicy`, a dict of its fields, or a dtype's name."""
    if isinstance(value, str):
        return MixedPrecision.of(value)
    fields = {f.name for f in dataclasses.fields(MixedPrecision)} - {"master_dtype"}
    values = value if isinstance(value, dict) else {name: getattr(value, name, None) for name in fields}
    return MixedPrecision(**{name: one for name, one in values.items() if name in fields and one is not None})


def without_adapter_units(policy: Any) -> Any:
    """A wrap policy without PEFT's rule that makes a unit of every trainable layer.

    `peft.utils.other.fsdp_auto_wrap_policy` has that rule for engines whose units cannot hold trainable and frozen
    parameters side by side. Here it would only make thousands of tiny gathers.
    """
    parts = policy.keywords.get("policies") if isinstance(policy, functools.partial) else None
    if not parts:
        return policy
    other_rules = [part for part in parts if not _is_adapter_rule(part)]
    classes: set[type[nn.Module]] = set()
    for part in other_rules:
        classes |= set(part.keywords.get("transformer_layer_cls", ())) if isinstance(part, functools.partial) else set()
    if len(other_rules) == len(parts) or len(other_rules) != 1 or not classes:
        return policy
    # Not as classes alone: the policy may name layers that this model lacks.
    return lambda module, recurse, nonwrapped_numel: transformer_auto_wrap_policy(
        module, recurse, nonwrapped_numel, transformer_layer_cls=classes
    )


def _is_adapter_rule(part: Any) -> bool:
    rule = part.keywords.get("lambda_fn") if isinstance(part, functools.partial) else None
    return getattr(rule, "__module__", "") == "peft.utils.other"
