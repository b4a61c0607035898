"""Planning a model: which modules are units, which unit owns each parameter, and the layout of all.

Needs no processes, shards or memory: the mesh may be absent and the model on the meta device. `plan_layout.py` has the
arithmetic on shapes; `build.py` executes the plan.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn

from fullshard.config.errors import FSDPError
from fullshard.device.torch_private import parameters_of
from fullshard.fsdp.host_embedding import stays_on_host
from fullshard.fsdp.local_axes import local_axes_of
from fullshard.fsdp.offload import is_offloaded
from fullshard.fsdp.plan import ParameterPlan, ShardingPlan
from fullshard.fsdp.plan_layout import SMALL_BYTES, SMALL_BYTES_COLLECTIVE, PlanInputs, plan_parameter, plan_unit
from fullshard.fsdp.strategy import MixedPrecision, ShardingStrategy
from fullshard.fsdp.wrap import find_units, resolve
from fullshard.spmd.mesh import Mesh, VirtualMesh
from fullshard.spmd.sharding import layout_on, sharding_of
from fullshard.spmd.spec import Layout
from fullshard.spmd.tensor import is_sharded

Site = tuple[nn.Module, str]
"""A module and the name under which it holds a parameter."""


class AlreadySharded(NamedTuple):
    """A parameter that was sharded when a part of the model was wrapped."""

    plan: ParameterPlan
    unit: nn.Module
    mesh: Mesh | None = None
    """Of its unit, if it may be another one than the model's."""


class Sites(NamedTuple):
    """A parameter with all its names and the modules that hold it."""

    parameter: nn.Parameter
    names: list[str]
    sites: list[Site]


def plan_fsdp(
    root: nn.Module, mesh: Mesh, *, point_to_point: bool, auto_wrap_policy: Any = None,
    extra_data_axis: str | None = None, strategy: ShardingStrategy | str | int = ShardingStrategy.FULL_SHARD,
    mixed_precision: Any = None, ignored_modules: Iterable[nn.Module] | None = None,
    small_parameter_bytes: int | None = None, cpu_offload: bool = False, **options: Any,
) -> ShardingPlan:  # fmt: skip
    """The plan that `FSDPv2(root, mesh, …)` would make; its other `options` do not change the plan."""
    inputs = plan_inputs(
        mesh, ShardingStrategy.of(strategy), MixedPrecision.of(mixed_precision), extra_data_axis, small_parameter_bytes,
        point_to_point=point_to_point, offload=cpu_offload,
    )  # fmt: skip
    ignored = set(ignored_modules or ())
    chosen = find_units(root, resolve(auto_wrap_policy, root), ignored)
    return plan_model(root, chosen, inputs, with_children(ignored))


def with_children(modules: Iterable[nn.Module]) -> set[nn.Module]:
    """The modules and all modules inside them."""
    return {below for module in modules for below in module.modules()}


def plan_inputs(
    mesh: Mesh, strategy: ShardingStrategy, precision: MixedPrecision, extra_data_axis: str | None,
    small_bytes: int | None, *, point_to_point: bool, offload: bool = False,
) -> PlanInputs:  # fmt: skip
    """What the plan depends on, from the options of `FSDPv2`. `point_to_point` is whether tensors are sent so (Gloo),
    not in collectives (NCCL)."""
    any_order = "sort_ranks" in inspect.signature(dist.new_group).parameters
    if small_bytes is None:
        small_bytes = SMALL_BYTES if point_to_point else SMALL_BYTES_COLLECTIVE
    return PlanInputs(mesh, strategy, precision, replica_axes(mesh, extra_data_axis), small_bytes, any_order, offload)


def replica_axes(mesh: Mesh, extra_data_axis: str | None) -> tuple[str, ...]:
    """The axes besides `fsdp` over which the batch is split."""
    if extra_data_axis is not None:
        return (extra_data_axis,)
    return ("replica",) if mesh.get_axis_name_idx("replica") is not None else ()


def plan_model(
    root: nn.Module,
    chosen: Iterable[nn.Module],
    inputs: PlanInputs,
    ignored: Collection[nn.Module] = (),
    earlier: Mapping[int, AlreadySharded] | None = None,
    wrapped: Collection[nn.Module] = (),
) -> ShardingPlan:
    """The plan of a model whose `chosen` modules are units, and the root.

    `ignored` are all modules that are not sharded. `earlier` has the parameters that are sharded already: by id, those
    that modules hold now, and the originals that other modules may still hold because they were tied. `wrapped` are the
    modules that are units already.
    """
    earlier = earlier or {}
    units = {root, *chosen}
    meshes = own_meshes(root, inputs.mesh)
    inside = {unit: set(unit.modules()) for unit in root.modules() if unit in units}
    around: dict[nn.Module, list[nn.Module]] = {}
    for unit, below in inside.items():
        for module in below:
            around.setdefault(module, []).append(unit)
    owned: dict[nn.Module, list[ParameterPlan]] = {module: [] for module in (*inside, *meshes)}
    owned |= {module: [] for module in wrapped}
    for entry in find_sites(root, ignored, earlier):
        known = earlier.get(id(entry.parameter))
        if known is None:
            plan = plan_for(entry.names, entry.parameter, inputs)
            form, weights = stored_form(*entry.sites[0])
            plan = dataclasses.replace(plan, form=form, weights=weights)
            apart = mesh_of(entry.parameter, inputs.mesh) != inputs.mesh
            owner = entry.sites[0][0] if apart else _owner(entry.sites, around, inside)
        else:
            meshes |= {known.unit: known.mesh} if known.mesh not in (None, inputs.mesh) else {}
            plan = dataclasses.replace(known.plan, names=tuple(entry.names))
            below = set(known.unit.modules())
            # Tied to a parameter outside the module that was wrapped: the unit around both owns it.
            within = all(module in below for module, _ in entry.sites)
            owner = known.unit if within else _owner(entry.sites, around, inside)
        owned[owner].append(plan)
    unit_plans = [
        plan_unit(name, type(module).__name__, owned[module], axes_of(meshes[module]) if module in meshes else ())
        for name, module in root.named_modules()
        if module is root or module in wrapped or owned.get(module)
    ]
    return ShardingPlan(axes_of(inputs.mesh), inputs.strategy.name, inputs.replica_axes, tuple(unit_plans))


def axes_of(mesh: Mesh) -> tuple[tuple[str, int], ...]:
    """The axes of a mesh and their sizes, as a plan has them."""
    return tuple((str(name), size) for name, size in mesh.shape().items())


def own_meshes(root: nn.Module, mesh: Mesh) -> dict[nn.Module, Mesh]:
    """The modules with parameters on another mesh of the same ranks, with that mesh: such a module is a unit."""
    meshes = {}
    for module in root.modules():
        for parameter in parameters_of(module).values():
            if parameter is not None and (own := mesh_of(parameter, mesh)) != mesh:
                meshes[module] = own
    return meshes


def mesh_of(parameter: nn.Parameter, mesh: Mesh) -> Mesh:
    """The mesh of a parameter in a model on `mesh`: its own, if its module computes with slices along axes of that."""
    layout = sharding_of(parameter) if local_axes_of(parameter).split and not is_sharded(parameter) else None
    return mesh if layout is None else layout.mesh


def find_sites(
    root: nn.Module, ignored: Collection[nn.Module], earlier: Mapping[int, AlreadySharded] | None = None
) -> list[Sites]:
    """Every parameter of the module, in module order. A sharded parameter and its original are one (`earlier`)."""
    sites: dict[int, Sites] = {}
    for prefix, module in root.named_modules():
        for name, parameter in parameters_of(module).items():
            known = earlier.get(id(parameter)) if earlier else None
            if parameter is None or (module in ignored and known is None):
                continue
            entry = sites.setdefault(id(parameter if known is None else known), Sites(parameter, [], []))
            entry.names.append(f"{prefix}.{name}" if prefix else name)
            entry.sites.append((module, name))
    return list(sites.values())


def _owner(
    sites: Iterable[Site], around: Mapping[nn.Module, list[nn.Module]], inside: Mapping[nn.Module, set[nn.Module]]
) -> nn.Module:
    """The smallest unit that contains all modules that hold a parameter; several modules hold a tied one."""
    first, *others = dict.fromkeys(module for module, _ in sites)
    containing = (unit for unit in around[first] if all(module in inside[unit] for module in others))
    return min(containing, key=lambda unit: len(inside[unit]))


def stored_form(module: nn.Module, name: str) -> tuple[str, int]:
    """The format of a parameter that is a part of a weight as a released model stores it, and the number of weights
    that it has the codes of; empty and 0 for others. Such a module has a method `stored_form`."""
    own = getattr(module, "stored_form", None)
    form, weights = own(name) if own is not None else ("", 0)
    return form, weights


def tensor_parallel_layout(parameter: nn.Parameter, mesh: Mesh, replica_axes: Sequence[str]) -> Layout | None:
    """The layout of a parameter that is torch's `DTensor` on other axes of the mesh than those of the data: its module
    computes with it as one, and each rank has rows of its own. None for any other."""
    if not is_sharded(parameter) or isinstance(mesh, VirtualMesh):
        return None
    return layout_on(parameter, mesh, ("fsdp", *replica_axes))


def plan_for(names: list[str], parameter: nn.Parameter, inputs: PlanInputs) -> ParameterPlan:
    """The plan of a parameter that is not sharded yet."""
    inputs = dataclasses.replace(inputs, mesh=mesh_of(parameter, inputs.mesh))
    annotation = tensor_parallel_layout(parameter, inputs.mesh, inputs.replica_axes) or sharding_of(parameter)
    if annotation is not None and annotation.mesh != inputs.mesh:
        raise FSDPError(
            f"{names[0]} is annotated on {annotation.mesh} and the module is wrapped over {inputs.mesh}; use one mesh "
            f"for both"
        )
    on_host = stays_on_host(parameter) and annotation is None
    if on_host:
        inputs = dataclasses.replace(inputs, strategy=ShardingStrategy.NO_SHARD)
    plan = plan_parameter(names, parameter.shape, parameter.dtype, parameter.requires_grad, annotation, inputs)
    offloaded = not on_host and (inputs.offload or is_offloaded(parameter))
    local = local_axes_of(parameter)
    return dataclasses.replace(
        plan, on_host=on_host, offloaded=offloaded, local_axes=local.split, summed_axes=local.summed
    )
