"""Wrapping a model on XLA: from a module and the user's options to annotated units."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from fullshard.config.errors import UnsupportedError
from fullshard.device.torch_private import parameters_of
from fullshard.distributed import runtime
from fullshard.fsdp import checks, shard
from fullshard.fsdp.plan_model import AlreadySharded, plan_model, with_children
from fullshard.fsdp.strategy import BackwardPrefetch, ShardingStrategy
from fullshard.fsdp.wrapped_module import Options, WrappedModule, choose_units, extended_class, wrapped_inside
from fullshard.spmd.mesh import Mesh
from fullshard.spmd.spec import Layout
from fullshard.xla.units import Annotated, OutputRule, ShardedModel, Unit


def refuse_options(options: Options, module: nn.Module) -> None:
    """Refuse what only the torch engine can do."""
    if options.strategy in (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.HYBRID_SHARD_ZERO2):
        instead = "HYBRID_SHARD" if options.strategy.hybrid else "FULL_SHARD"
        raise UnsupportedError(
            f"strategy={options.strategy.name} keeps gathered values until backward; on XLA the compiler decides how "
            f"long they live. Use {instead}, which lays out parameters in the same way"
        )
    if options.cpu_offload:
        raise UnsupportedError(
            "cpu_offload=True keeps parameters in host memory, which the programs of the XLA compiler cannot read; use "
            "more devices, activation checkpointing or LoRA"
        )
    if options.sync_module_states and runtime.process_count() > 1:
        raise UnsupportedError(
            "sync_module_states=True: values are not sent between the processes of the XLA engine. Draw or load the "
            "same values in each (runtime.seed(n) seeds all of them alike)"
        )
    checks.check_strategy(options.strategy, options.mesh, options.replica_axes)
    packed = [name for name, part in module.named_modules() if hasattr(type(part), "see_gathered")]
    if packed:
        raise UnsupportedError(
            f"{packed[0]} has packed weights (4-bit or fp8), which only the torch engine computes with; load the model "
            f"without quantization"
        )


def report_without_effect(options: Options) -> None:
    """Report options that are not at their default and change nothing, because the compiler decides."""
    for name, is_default in {
        "forward_prefetch": options.forward_prefetch,
        "backward_prefetch": options.backward_prefetch is BackwardPrefetch.BACKWARD_PRE,
        "gathers_in_flight": options.gathers_in_flight == 1,
        "timeout": options.timeout is None,
        "small_parameter_bytes": options.small_bytes is None,
    }.items():
        if not is_default:
            runtime.warn_once(
                f"xla-{name}", f"FSDPv2: {name} has no effect on XLA, where the compiler schedules communication"
            )


def assemble(root: nn.Module, options: Options, wrapped_class: type[WrappedModule]) -> None:
    """Annotate the module's parameters as the plan says, and extend the classes of the modules that are units."""
    refuse_options(options, root)
    report_without_effect(options)
    runtime.use_spmd()
    chosen = choose_units(root, options)
    wrapped_before: list[Any] = wrapped_inside(root, options.mesh)
    inner = [module._fullshard_unit for module in wrapped_before]
    ignored = with_children(options.ignored)
    shard.read_values(root, ignored)
    if options.param_init_fn is not None and any(p.is_meta for p in root.parameters()):
        # Values are drawn on the host: the same as on one device, and as on the torch engine.
        shard.materialize(root, ignored, options.param_init_fn, torch.device("cpu"))
    units = _make_units(root, chosen, inner, options, ignored)
    shard.place_buffers(root, options.mesh, ignored, options.precision.buffer_dtype, sync=False)
    model = ShardedModel(root, options.mesh, options.strategy.name, options.replica_axes, ignored, units)
    for unit in units:
        wrapped: Any = unit.module
        if unit not in inner:
            wrapped.__class__ = extended_class(wrapped, wrapped_class)
            wrapped._fullshard_mesh = options.mesh
        wrapped._fullshard_unit, wrapped._fullshard_model = unit, model
    model.follow()
    if options.precision.reduce_dtype not in (None, options.precision.param_dtype):
        runtime.warn_once(
            "xla-reduce_dtype",
            f"MixedPrecision: on XLA the compiler chooses the dtype in which gradients are summed over the devices; "
            f"reduce_dtype={options.precision.reduce_dtype} has no effect",
        )


def _make_units(
    root: nn.Module, chosen: list[nn.Module], inner: list[Unit], options: Options, ignored: set[nn.Module]
) -> list[Unit]:
    """The units of the plan: new ones, and those of modules that were wrapped before."""
    inputs = dataclasses.replace(options.inputs(point_to_point=False), small_bytes=0, any_order=True)
    earlier_parameters = {
        id(p.parameter): AlreadySharded(p.plan, unit.module) for unit in inner for p in unit.parameters
    }
    # A parameter that another module still holds as it was before a part of the model was wrapped.
    originals = {
        id(p): earlier_parameters.get(id(shard.replaced[p].parameter)) for p in root.parameters() if p in shard.replaced
    }
    earlier_parameters |= {key: earlier for key, earlier in originals.items() if earlier is not None}
    plan = plan_model(root, chosen, inputs, ignored, earlier_parameters, {unit.module for unit in inner})
    modules = dict(root.named_modules())
    existing = {unit.module: unit for unit in inner}
    units = []
    for unit_plan in plan.units:
        module = modules[unit_plan.name]
        parameters = [_annotated(p, modules, options.mesh) for p in unit_plan.parameters]
        unit = existing.get(module)
        if unit is None:
            is_root = module is root
            output_dtype = options.precision.output_dtype if is_root else None
            rule = OutputRule(options.shard_output, options.mesh, (*options.replica_axes, "fsdp"), chosen=not is_root)
            unit = Unit(module, parameters, options.precision, output_dtype, rule)
        else:
            unit.parameters = parameters
            if unit.precision == options.precision:
                unit.output_dtype = None  # one model in one precision, however it was wrapped: its root casts
        units.append(unit)
    return units


def _annotated(plan: Any, modules: dict[str, nn.Module], mesh: Mesh) -> Annotated:
    """A parameter of the plan, on the devices."""
    sites = [(modules[path], name) for path, _, name in (full.rpartition(".") for full in plan.names)]
    if plan.in_host_memory:
        raise UnsupportedError(
            f"{plan.name} is kept in host memory (keep_on_host), which the programs of the XLA compiler cannot read"
        )
    annotated = Annotated(plan, Layout.of(mesh, plan.spec, plan.shape), sites)
    parameters: list[Any] = [parameters_of(module)[name] for module, name in sites]
    annotated.place(next((p for p in parameters if p not in shard.replaced), parameters[0]))
    return annotated
