"""Shards a model as `EngineSettings` says: mesh, options of `FSDPv2`, activation checkpointing, compilation."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from fullshard.config.errors import ConfigError
from fullshard.device import accelerator
from fullshard.distributed import data_ranks, engines, runtime
from fullshard.fsdp import (
    FSDPv2,
    MixedPrecision,
    checkpoint_module,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)
from fullshard.fsdp.plan import ShardingPlan
from fullshard.fsdp.plan_model import plan_fsdp
from fullshard.fsdp.wrap import find_units, resolve
from fullshard.parallel.experts import connect_experts, split_experts
from fullshard.parallel.settings import XLA_DEVICES_VARIABLE, EngineSettings
from fullshard.parallel.tensor_parallel import split_model
from fullshard.spmd import Mesh
from fullshard.spmd.mesh import VirtualMesh


def shard_model(
    model: nn.Module, settings: EngineSettings, mesh: Mesh | None = None, *, say: Callable[[str], None] | None = None,
    split_tables: bool = True, **overrides: Any,
) -> Any:  # fmt: skip
    """Shard a model in place and return it. `overrides` are options of `FSDPv2` that replace those of the settings;
    `say` is called when compilation begins. Without `split_tables`, tensor parallelism leaves embedding and head whole:
    code of a script may multiply by their weights itself."""
    mesh = mesh if mesh is not None else build_mesh(settings)
    if settings.tp_size > 1:
        split_model(model, mesh, settings.tp_plan, tables=split_tables, say=say)
    if (dtype := engines.current().buffer_dtype(settings)) is not None:
        precision = MixedPrecision.of(overrides.get("mixed_precision", settings.mixed_precision))
        overrides["mixed_precision"] = dataclasses.replace(precision, buffer_dtype=dtype)
    layers = checkpointed_modules(model, settings) if settings.activation_checkpointing else []
    of_experts = experts_mesh(settings, mesh)
    split_experts(model, mesh, of_experts)
    wrapped: Any = FSDPv2(model, mesh, **{**fsdp_options(model, settings), **overrides})  # type: ignore[call-arg]
    connect_experts(wrapped, mesh, of_experts, overrides.get("timeout"))
    for layer in layers:
        # The last layer's inputs are needed again at once.
        checkpoint_module(layer, offload=settings.activation_checkpointing_offload and layer is not layers[-1])
    config: Any = getattr(model, "config", None)
    if layers and getattr(config, "use_cache", False):
        config.use_cache = False  # a recomputed layer would append to its cache twice
    if settings.backend.lower() != "no":
        wrapped.compile_units(
            say, backend=settings.backend.lower(), fullgraph=settings.use_fullgraph,
            dynamic=True if settings.use_dynamic else None,
            **({} if settings.mode == "default" else {"mode": settings.mode}),
        )  # fmt: skip
    return wrapped


def plan_sharding(
    model: nn.Module, settings: EngineSettings, mesh: Mesh, device: torch.device, **overrides: Any
) -> ShardingPlan:
    """The plan by which `shard_model` would shard a model on ranks with a device of this type each. The mesh may be
    absent."""
    if settings.tp_size > 1:
        split_model(model, mesh, settings.tp_plan)
    options = {**fsdp_options(model, settings), **overrides}
    split_experts(model, mesh, experts_mesh(settings, mesh))
    return plan_fsdp(model, mesh, point_to_point=not accelerator.is_accelerator(device), **options)


def absent_mesh(settings: EngineSettings, processes: int, nodes: int = 1) -> VirtualMesh:
    """The mesh of the strategy over processes that need not exist."""
    shape = settings.mesh_shape(processes, nodes)
    return VirtualMesh(tuple(shape.values()), tuple(shape))


def join_ranks(settings: EngineSettings) -> None:
    """Connect the ranks, on the device that the settings choose, and divide the rows among them."""
    runtime.use_spmd(device="cpu" if settings.use_cpu else None)
    settings.mesh_shape(runtime.global_device_count(), runtime.node_count())
    data_ranks.share_rows(settings.ranks_per_row)


def build_mesh(settings: EngineSettings) -> Mesh:
    """The mesh of the strategy over all devices of this job."""
    devices = runtime.global_device_count()
    requested = os.environ.get(XLA_DEVICES_VARIABLE, "")
    if engines.current().drives_machine and requested not in ("", str(devices)):
        raise ConfigError(
            f"num_processes is {requested}, and XLA has {devices} device(s); on the XLA engine it is the number of "
            f"devices. Leave it out to use all"
        )
    shape = settings.mesh_shape(devices, runtime.node_count())
    return Mesh(np.arange(devices), tuple(shape.values()), tuple(shape))


def experts_mesh(settings: EngineSettings, mesh: Mesh) -> Mesh:
    """The mesh of experts, over the ranks of the model's mesh: `ep` consecutive ranks hold all experts of a layer.

    `ep` comes before `fsdp`, because dim 0 of a stack is split over `ep` first.
    """
    replicas, size = mesh.shape().get("replica", 1), settings.ep_size
    ranks, rest = divmod(mesh.size(), replicas * size)
    assert not rest, f"ep_size {size} over {mesh}"
    axes = {**({"replica": replicas} if "replica" in mesh.shape() else {}), "ep": size, "fsdp": ranks}
    if isinstance(mesh, VirtualMesh):
        return VirtualMesh(tuple(axes.values()), tuple(axes))
    ids = mesh.device_ids.reshape(replicas, ranks, size).transpose(0, 2, 1)
    return Mesh(ids.reshape(-1), tuple(axes.values()), tuple(axes))


def fsdp_options(model: nn.Module, settings: EngineSettings) -> dict[str, Any]:
    """The keyword arguments of `FSDPv2` for this model."""
    options: dict[str, Any] = {
        "auto_wrap_policy": wrap_policy(model, settings),
        "strategy": settings.strategy,
        "mixed_precision": settings.mixed_precision,
        "cpu_offload": settings.offload_params,
        "forward_prefetch": settings.forward_prefetch is not False,
        "backward_prefetch": settings.backward_prefetch or "BACKWARD_PRE",
        "ignored_modules": ignored_modules(model, settings),
    }
    if not settings.sync_module_states:
        options["sync_module_states"] = False
    return options


def wrap_policy(model: nn.Module, settings: EngineSettings) -> Any:
    """The `auto_wrap_policy` that selects the units of this model; None makes the whole model one unit."""
    name = settings.wrap_policy
    if name == "NO_WRAP":
        return None
    if name == "SIZE_BASED_WRAP":
        return functools.partial(size_based_auto_wrap_policy, min_num_params=settings.min_num_params or 10**8)
    if settings.transformer_layer_cls_to_wrap:
        names = set(settings.transformer_layer_cls_to_wrap)
        return functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=names)
    if name is None and not any(getattr(m, "_no_split_modules", None) for m in model.modules()):
        return None
    return transformer_auto_wrap_policy


def checkpointed_modules(model: nn.Module, settings: EngineSettings) -> list[nn.Module]:
    """The modules to use activation checkpointing on: the units, or the model's own layers if there is one unit."""
    ignored = set(ignored_modules(model, settings))
    for chosen in (wrap_policy(model, settings), transformer_auto_wrap_policy):
        if layers := find_units(model, resolve(chosen, model), ignored):
            return layers
    raise ConfigError(
        f"activation checkpointing recomputes layers, and {type(model).__name__} neither names its layers "
        f"(_no_split_modules) nor repeats any; name them with fsdp_transformer_layer_cls_to_wrap, or turn activation "
        f"checkpointing off"
    )


def ignored_modules(model: nn.Module, settings: EngineSettings) -> list[nn.Module]:
    """The modules that are not sharded."""
    if settings.ignored_modules is None:
        return []
    names = {name: module for name, module in model.named_modules() if name}
    ignored = [module for name, module in names.items() if re.fullmatch(settings.ignored_modules, name)]
    if not ignored:
        raise ConfigError(
            f"fsdp_ignored_modules: no module's full name matches {settings.ignored_modules!r}; names look like "
            f"{', '.join(list(names)[:3])}"
        )
    return ignored
