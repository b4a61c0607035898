"""Wrapped modules on any engine: the options of `FSDPv2`, and the class that extends the module's own.

A wrapped module stays the same object: its class is replaced by one that extends it. `WrappedModule` is the base of all
such classes; each engine's `FSDPv2` adds its methods.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard.config.errors import FSDPError, MeshError
from fullshard.fsdp import checks, wrap
from fullshard.fsdp.plan_layout import PlanInputs
from fullshard.fsdp.plan_model import plan_inputs, replica_axes
from fullshard.fsdp.strategy import BackwardPrefetch, MixedPrecision, ShardingStrategy
from fullshard.spmd.mesh import Mesh

ShardOutput = Callable[[Any, Mesh], Any]

KEYWORDS = {
    **dict.fromkeys(("reshard_after_forward", "sharding_strategy"), "strategy='FULL_SHARD' or 'SHARD_GRAD_OP'"),
    **dict.fromkeys(("mp_policy", "mixed_precision_policy"), "mixed_precision='bf16', or a MixedPrecision"),
    "offload_policy": "cpu_offload=True",
    "shard_placement_fn": "fullshard.spmd.mark_sharding(p, mesh, spec) before wrapping: 'fsdp' splits that dim",
    **dict.fromkeys(("ignored_params", "ignored_states"), "ignored_modules="),
    "dp_mesh_dims": "a mesh with the axes 'replica' and 'fsdp', or extra_data_axis=",
    **dict.fromkeys(("process_group", "device_mesh"), "mesh="),
    "device_id": "nothing: the device of this rank is fullshard.runtime.device()",
    "limit_all_gathers": "gathers_in_flight=",
    "use_orig_params": "nothing: parameters keep their names, and may differ in dtype and requires_grad",
}
"""Keywords of `fully_shard` and `FullyShardedDataParallel` with another name here."""


def refuse_keywords(keywords: dict[str, Any]) -> None:
    """Refuse keywords that `FSDPv2` does not have; those of torch with their replacement."""
    for name in keywords:
        if name in KEYWORDS:
            raise FSDPError(f"FSDPv2({name}=…) is a keyword of torch's FSDP; use {KEYWORDS[name]}")
        raise TypeError(f"FSDPv2() got an unexpected keyword argument {name!r}")


@dataclass(frozen=True)
class Options:
    """The options of `FSDPv2`, validated."""

    mesh: Mesh
    shard_output: ShardOutput | None
    auto_wrap_policy: Any
    auto_wrapper_callable: Callable[..., Any] | None
    extra_data_axis: str | None
    strategy: ShardingStrategy
    precision: MixedPrecision
    cpu_offload: bool
    forward_prefetch: bool
    backward_prefetch: BackwardPrefetch
    gathers_in_flight: int
    ignored: set[nn.Module]
    param_init_fn: Callable[[nn.Module], Any] | None
    sync_module_states: bool | None
    timeout: float | None
    small_bytes: int | None

    @property
    def replica_axes(self) -> tuple[str, ...]:
        """The axes besides `fsdp` over which the batch is split."""
        return replica_axes(self.mesh, self.extra_data_axis)

    def inputs(self, *, point_to_point: bool) -> PlanInputs:
        """What the sharding plan depends on."""
        return plan_inputs(
            self.mesh, self.strategy, self.precision, self.extra_data_axis, self.small_bytes,
            point_to_point=point_to_point, offload=self.cpu_offload,
        )  # fmt: skip

    def of_children(self) -> dict[str, Any]:
        """The keywords that `auto_wrapper_callable` gets for each child."""
        return {
            "extra_data_axis": self.extra_data_axis, "strategy": self.strategy, "mixed_precision": self.precision,
            "cpu_offload": self.cpu_offload, "forward_prefetch": self.forward_prefetch,
            "backward_prefetch": self.backward_prefetch, "gathers_in_flight": self.gathers_in_flight,
            "ignored_modules": self.ignored, "param_init_fn": self.param_init_fn, "timeout": self.timeout,
            "sync_module_states": self.sync_module_states, "small_parameter_bytes": self.small_bytes,
        }  # fmt: skip


def wrap_module(
    cls: type[WrappedModule],
    module: nn.Module,
    mesh: Mesh | DeviceMesh | None = None,
    shard_output: ShardOutput | None = None,
    *,
    auto_wrap_policy: Any = None,
    auto_wrapper_callable: Callable[..., Any] | None = None,
    extra_data_axis: str | None = None,
    strategy: ShardingStrategy | str | int = ShardingStrategy.FULL_SHARD,
    mixed_precision: MixedPrecision | str | torch.dtype | None = None,
    cpu_offload: bool = False,
    forward_prefetch: bool = True,
    backward_prefetch: BackwardPrefetch | str | None = BackwardPrefetch.BACKWARD_PRE,
    gathers_in_flight: int = 1,
    ignored_modules: Iterable[nn.Module] | None = None,
    param_init_fn: Callable[[nn.Module], Any] | None = None,
    sync_module_states: bool | None = None,
    timeout: float | None = None,
    small_parameter_bytes: int | None = None,
    **of_torch: Any,
) -> Any:
    """Check the options of `FSDPv2(module, mesh, …)` and wrap the module, which it returns."""
    refuse_keywords(of_torch)
    options = Options(
        mesh=checks.check_mesh(mesh, extra_data_axis),
        shard_output=shard_output,
        auto_wrap_policy=auto_wrap_policy,
        auto_wrapper_callable=auto_wrapper_callable,
        extra_data_axis=extra_data_axis,
        strategy=ShardingStrategy.of(strategy),
        precision=MixedPrecision.of(mixed_precision),
        cpu_offload=bool(cpu_offload),
        forward_prefetch=bool(forward_prefetch),
        backward_prefetch=BackwardPrefetch.of(backward_prefetch),
        gathers_in_flight=gathers_in_flight,
        ignored=set(ignored_modules or ()),
        param_init_fn=param_init_fn,
        sync_module_states=sync_module_states,
        timeout=timeout,
        small_bytes=small_parameter_bytes,
    )
    checks.check_module(module, cls, auto_wrap_policy)
    cls._fullshard_assemble(module, options)
    return module


def choose_units(root: nn.Module, options: Options) -> list[nn.Module]:
    """The modules below `root` that become units. Those that the user's wrapper has wrapped are units already."""
    chosen = wrap.find_units(root, wrap.resolve(options.auto_wrap_policy, root), options.ignored)
    if options.auto_wrapper_callable is None or not chosen:
        return chosen
    wrap.wrap_each(root, chosen, options.auto_wrapper_callable, options.mesh, options.of_children())
    return []


def wrapped_inside(root: nn.Module, mesh: Mesh) -> list[WrappedModule]:
    """The modules in `root` that were wrapped before; raises if one is on another mesh."""
    inner = []
    for name, module in root.named_modules():
        if isinstance(module, WrappedModule):
            if module.mesh != mesh:
                raise MeshError(
                    f"{name} is wrapped over {module.mesh} and the module around it over {mesh}; use one mesh for both"
                )
            inner.append(module)
    return inner


# --- the class of a wrapped module ------------------------------------------------------------------------------------


class Factory(type):
    """Lets `FSDPv2(module, …)` wrap a module, and `type(wrapped)(…)` build the plain class.

    Wrapping here rather than in `__new__` keeps Python from calling the module's `__init__` a second time.
    """

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        plain = cls.__dict__.get("_fullshard_plain")
        return wrap_module(cls, *args, **kwargs) if plain is None else plain(*args, **kwargs)  # type: ignore[arg-type]


class WrappedModule(metaclass=Factory):
    """What every wrapped module has, on any engine."""

    _fullshard_mesh: Mesh

    @staticmethod
    def _fullshard_assemble(module: nn.Module, options: Options) -> None:
        """Shard the module on this engine, and extend its class."""
        raise NotImplementedError

    @property
    def mesh(self) -> Mesh:
        """The mesh that the module is sharded on."""
        return self._fullshard_mesh

    def __deepcopy__(self, memo: Any) -> Any:
        raise FSDPError(
            f"a wrapped {type(self).__name__} cannot be deep-copied: its shards belong to an engine that runs on all "
            f"ranks. Copy the module before wrapping it, or build a second one and load_state_dict(model.state_dict()) "
            f"into it. For averaged weights (AveragedModel), keep {{name: p.detach().clone()}} of "
            f"model.named_parameters() and lerp_ each towards its parameter after a step"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise FSDPError(
            f"a wrapped {type(self).__name__} cannot be pickled; save model.state_dict() (sharded) or "
            f"model.full_state_dict() (whole values)"
        )


def extended_class(module: nn.Module, base: type[WrappedModule]) -> type:
    """A class with `base` and the module's class as bases. It has the same name, which `save_pretrained` writes."""
    plain = type(module)
    if plain not in _extended:
        meta = type(plain)
        combined = Factory if meta is type else type("Factory", (Factory, meta), {})
        names = {"_fullshard_plain": plain, "__module__": plain.__module__, "__qualname__": plain.__qualname__}
        for method, needed in (("save_pretrained", "save_pretrained"), ("generate", "prepare_inputs_for_generation")):
            if not hasattr(plain, needed):
                names[method] = inspect.getattr_static(plain, method, None) or _absent(method)
        _extended[plain] = combined(plain.__name__, (base, plain), names)
    return _extended[plain]


_extended: dict[type, type] = {}


def _absent(name: str) -> property:
    """What a class without a method of `FSDPv2` has in its place."""

    def missing(self: Any) -> Any:
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    return property(missing)
