"""Building a sharded model: from a module and the user's options to units and an engine.

If the module contains wrapped modules, their units join the new engine, which from then on runs the whole model.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import nn

from fullshard.config.errors import FSDPError, MeshError
from fullshard.device.streams import SideStream
from fullshard.device.torch_private import parameters_of, spec_of
from fullshard.distributed import groups, runtime
from fullshard.distributed.ranks import require_equal
from fullshard.distributed.watchdog import watch as watching
from fullshard.distributed.watchdog.watch import watch_for
from fullshard.fsdp import backward_entry, checks, shard
from fullshard.fsdp.comm import Collectives, Link
from fullshard.fsdp.counters import Meter
from fullshard.fsdp.engine import Engine
from fullshard.fsdp.offload import HostTraffic
from fullshard.fsdp.output import OutputRule
from fullshard.fsdp.parameter import ShardedParameter
from fullshard.fsdp.plan import ParameterPlan, ShardingPlan
from fullshard.fsdp.plan_model import (
    AlreadySharded,
    axes_of,
    own_meshes,
    plan_model,
    tensor_parallel_layout,
    with_children,
)
from fullshard.fsdp.point_to_point import PointToPoint
from fullshard.fsdp.prefetch import PrefetchSettings
from fullshard.fsdp.strategy import MixedPrecision
from fullshard.fsdp.unit import EngineContext, Unit
from fullshard.fsdp.wrapped_module import Options, WrappedModule, choose_units, extended_class, wrapped_inside
from fullshard.spmd.dtensor_fixes import draw_global_where_needed
from fullshard.spmd.mesh import Mesh
from fullshard.spmd.tensor import is_sharded


def make_link(mesh: Mesh, axes: tuple[str, ...], purpose: str, timeout: float | None, meter: Meter) -> Link:
    """The link along one axis, or along several merged into one, for one purpose. Collective: all ranks of the mesh
    must call it."""
    ranks, device = _ranks_along(mesh, axes), runtime.device()
    communicator = _communicator(ranks, purpose, timeout)
    group, model = communicator.group, next(communicator.models)
    kind = PointToPoint if uses_point_to_point(group) else Collectives
    return kind(group, watch_for(purpose, ranks, group), device, meter, model)


def uses_point_to_point(group: dist.ProcessGroup | None) -> bool:
    """Whether tensors of this rank's device are sent point to point in a group, not in collectives."""
    return group is None or groups.backend_of(group, runtime.device()) == "gloo"


def _ranks_along(mesh: Mesh, axes: tuple[str, ...]) -> tuple[int, ...]:
    """The ranks that differ from this one only along the given axes, in mesh order."""
    indices = [mesh.get_axis_name_idx(axis) for axis in axes]
    coordinate = mesh.coordinate(runtime.rank())
    if coordinate is None:
        raise MeshError(f"rank {runtime.rank()} is not in {mesh}; wrap the module on the ranks of the mesh only")
    index = tuple(slice(None) if axis in indices else coordinate[axis] for axis in range(mesh.ndim))
    return tuple(int(rank) for rank in mesh.get_logical_mesh()[index].reshape(-1))


@dataclass
class _Communicator:
    """A process group for one purpose. Models on the same ranks share it."""

    group: dist.ProcessGroup | None
    models: Iterator[int] = field(default_factory=itertools.count)
    """Numbers its models, the same on every rank."""


def _communicator(ranks: tuple[int, ...], purpose: str, timeout: float | None) -> _Communicator:
    if len(ranks) == 1:
        return _Communicator(None)
    known = _communicators()
    key = (ranks, purpose, timeout)
    if key not in known:
        options: dict[str, Any] = {} if timeout is None else {"timeout": timedelta(seconds=timeout)}
        known[key] = _Communicator(groups.new_group(ranks, **options))
    return known[key]


_cache: tuple[Any, dict[Any, _Communicator]] = (None, {})


def _communicators() -> dict[Any, _Communicator]:
    """The communicators made so far. They become invalid with the default process group, and when one of them fails."""
    global _cache
    age = (dist.group.WORLD, watching.failures())
    if _cache[0] is None or _cache[0][0] is not age[0] or _cache[0][1] != age[1]:
        _cache = (age, {})
    return _cache[1]


# --- building ---------------------------------------------------------------------------------------------------------


def assemble(root: nn.Module, options: Options, wrapped_class: type[WrappedModule]) -> None:
    """Make the module's units and its engine, and extend the classes of the modules that are units."""
    checks.check_strategy(options.strategy, options.mesh, options.replica_axes)
    if options.gathers_in_flight < 0:
        raise FSDPError(f"gathers_in_flight={options.gathers_in_flight}: expected 0 or more")
    runtime.use_spmd()
    runtime.announce_transport()
    chosen = choose_units(root, options)
    inner_units = [unit for engine in _inner_engines(root, options) for unit in engine.units]
    ignored = with_children(options.ignored)
    sync = _materialize(root, options, ignored)
    plan = _make_plan(root, chosen, inner_units, options, ignored)
    _require_equal_plans(plan, options)
    contexts = _Contexts(root, options, plan, inner_units)
    context = contexts.of(root)
    units = _make_units(root, plan, inner_units, options, contexts, sync, ignored)
    shard.place_buffers(root, options.mesh, ignored, options.precision.buffer_dtype, sync)
    settings = PrefetchSettings(options.forward_prefetch, options.backward_prefetch, options.gathers_in_flight)
    engine = Engine(units, context, settings, before_pass=checks.BeforePass(root, units, ignored))
    for unit in units:
        if unit in inner_units:
            unit.module._fullshard_engine = engine
        else:
            unit.module.__class__ = extended_class(unit.module, wrapped_class)
            _attach(unit, engine, options, options.shard_output if unit.module is root else None)
    root._fullshard_outline = (options.mesh, options.strategy, options.replica_axes)
    checks.check_optimizers()
    backward_entry.intercept_backward()
    draw_global_where_needed()
    if options.precision != MixedPrecision.of(None):
        runtime.get_logger().info("mixed precision: %s", options.precision)


def _materialize(root: nn.Module, options: Options, ignored: set[nn.Module]) -> bool:
    """Run `param_init_fn` on modules on the meta device; returns whether values are broadcast from the first rank."""
    shard.read_values(root, ignored)
    meta = any(p.is_meta and not is_sharded(p) for p in root.parameters())
    if options.param_init_fn is not None and meta:
        shard.materialize(root, ignored, options.param_init_fn, runtime.device())
        meta = False
    return options.sync_module_states if options.sync_module_states is not None else not meta


def _attach(unit: Unit, engine: Engine, options: Options, shard_output: Any) -> None:
    module: Any = unit.module
    module._fullshard_unit, module._fullshard_engine = unit, engine
    module._fullshard_mesh = options.mesh
    module._fullshard_output = OutputRule(shard_output, options.mesh, (*options.replica_axes, "fsdp"))


class _Contexts:
    """What the units of a model share, by the mesh that their parameters are on."""

    def __init__(self, root: nn.Module, options: Options, plan: ShardingPlan, inner_units: list[Unit]) -> None:
        self._options, device = options, runtime.device()
        self._meter, self._gather_stream, self._reduce_stream = Meter(), SideStream(device), SideStream(device)
        self._host = HostTraffic(self._reduce_stream)
        self._summed = sorted({p.summed_axes for unit in plan.units for p in unit.parameters if p.summed_axes})
        self._meshes = own_meshes(root, options.mesh)
        self._meshes |= {unit.module: unit.parameters[0].layout.mesh for unit in inner_units if unit.parameters}
        self._known: dict[Mesh, EngineContext] = {}

    def mesh_of(self, module: nn.Module) -> Mesh:
        """The mesh of the parameters of a unit."""
        return self._meshes.get(module, self._options.mesh)

    def of(self, module: nn.Module) -> EngineContext:
        """The context of a unit. Collective, as `make_link` is."""
        mesh = self.mesh_of(module)
        if mesh not in self._known:
            self._known[mesh] = self._make(mesh)
        return self._known[mesh]

    def _make(self, mesh: Mesh) -> EngineContext:
        options, meter = self._options, self._meter
        own = mesh == options.mesh
        replicas = tuple(axis for axis in options.replica_axes if own or axis in mesh.shape())
        sizes, all_sizes = mesh.shape(), options.mesh.shape()
        rows = math.prod(all_sizes[axis] for axis in ("fsdp", *options.replica_axes))
        return EngineContext(
            gather_link=make_link(mesh, ("fsdp",), "gather", options.timeout, meter),
            reduce_link=make_link(mesh, ("fsdp",), "reduce", options.timeout, meter),
            replica_link=make_link(mesh, replicas, "replica", options.timeout, meter),
            grad_factor=1.0 if own else math.prod(sizes[axis] for axis in ("fsdp", *replicas)) / rows,
            term_links={
                axes: make_link(mesh, axes, "terms", options.timeout, meter)
                for axes in self._summed
                if set(axes) <= set(sizes)
            },
            meter=meter,
            gather_stream=self._gather_stream,
            reduce_stream=self._reduce_stream,
            host=self._host,
        )


def _inner_engines(root: nn.Module, options: Options) -> list[Engine]:
    inner: list[Any] = wrapped_inside(root, options.mesh)
    engines = list({id(module._fullshard_engine): module._fullshard_engine for module in inner}.values())
    for engine in engines:
        engine.reset()  # its own meter counts what it has gathered
    return engines


def _earlier(root: nn.Module, inner_units: list[Unit]) -> dict[int, ShardedParameter]:
    """The parameters of modules that were wrapped before, by the id of what the modules of the model hold: the shard,
    or the original where another module holds it too."""
    by_shard = {id(p.shard): p for unit in inner_units for p in unit.parameters}
    known = {id(p): p for p in by_shard.values()}
    originals = {id(p): shard.replaced[p] for p in root.parameters() if p in shard.replaced}
    return by_shard | {key: p for key, p in originals.items() if id(p) in known}


def _make_plan(
    root: nn.Module, chosen: list[nn.Module], inner_units: list[Unit], options: Options, ignored: set[nn.Module]
) -> ShardingPlan:
    homes = {id(p): AlreadySharded(p.plan, unit.module, p.layout.mesh) for unit in inner_units for p in unit.parameters}
    earlier = {key: homes[id(p)] for key, p in _earlier(root, inner_units).items()}
    inputs = options.inputs(point_to_point=uses_point_to_point(dist.group.WORLD))
    return plan_model(root, chosen, inputs, ignored, earlier, {unit.module for unit in inner_units})


def _require_equal_plans(plan: ShardingPlan, options: Options) -> None:
    """Raise on all ranks if they wrap with other options or models. A mesh of some of the ranks is not compared."""
    if options.mesh.size() != runtime.world_size():
        return
    parameters = [p for unit in plan.units for p in unit.parameters]
    facts = {
        "strategy": plan.strategy, "axes of the mesh": plan.axes, "replica_axes": plan.replica_axes,
        **{f"{name} of mixed_precision": str(value) for name, value in asdict(options.precision).items()},
        "cpu_offload": options.cpu_offload,
        "forward_prefetch": options.forward_prefetch, "backward_prefetch": options.backward_prefetch.name,
        "gathers_in_flight": options.gathers_in_flight, "sync_module_states": options.sync_module_states,
        "timeout": options.timeout, "small_parameter_bytes": options.small_bytes,
        "number of units": len(plan.units), "number of parameters": len(parameters),
        "number of trainable parameters": sum(p.trainable for p in parameters),
        "checksum of the sharding plan": hashlib.blake2b(plan.to_json().encode(), digest_size=8).hexdigest(),
    }  # fmt: skip
    require_equal(facts, "model and options of FSDPv2", watched=True)


def _make_units(
    root: nn.Module,
    plan: ShardingPlan,
    inner_units: list[Unit],
    options: Options,
    contexts: _Contexts,
    sync: bool,
    ignored: set[nn.Module],
) -> list[Unit]:
    """The units of the plan: new ones, and those of modules that were wrapped before. Shards every parameter that is
    not sharded yet."""
    modules = dict(root.named_modules())
    members = {modules[unit.name] for unit in plan.units}
    existing = {unit.module: unit for unit in inner_units}
    earlier = _earlier(root, inner_units)
    meets_plain = any(p.requires_grad for module in ignored for p in module.parameters())
    units = []
    for index, unit_plan in enumerate(plan.units):
        module = modules[unit_plan.name]
        mesh, context = contexts.mesh_of(module), contexts.of(module)
        # Lists of optimizers have tensors of all meshes, and only our own class can combine those.
        plain = meets_plain or mesh != options.mesh
        parameters = [_sharded(p, modules, earlier, options, mesh, sync, plain) for p in unit_plan.parameters]
        holds_units = any(below in members for below in module.modules() if below is not module)
        unit = existing.get(module)
        if unit is None:
            output_dtype = options.precision.output_dtype if module is root else None
            keeps = options.strategy.keeps_after_forward
            precision = options.precision
            if unit_plan.axes:  # a part of a layer, which has cast its inputs
                precision = replace(precision, cast_forward_inputs=False)
            unit = Unit(unit_plan, index, context, holds_units, module, parameters, precision, keeps, output_dtype)
        else:
            unit.parameters = parameters
            unit.join(unit_plan, index, context, holds_units)
            if unit.precision == options.precision:
                unit.output_dtype = None  # one model in one precision, however it was wrapped: its root casts
        units.append(unit)
    return units


def _sharded(
    plan: ParameterPlan,
    modules: dict[str, nn.Module],
    earlier: dict[int, ShardedParameter],
    options: Options,
    mesh: Mesh,
    sync: bool,
    meets_plain: bool,
) -> ShardedParameter:
    """A parameter of the plan, sharded on its unit's mesh. The whole value is not kept, so that its memory is free
    afterwards."""
    sites = [(modules[path], name) for path, _, name in (full.rpartition(".") for full in plan.names)]
    parameters = [parameters_of(module)[name] for module, name in sites]
    known = next((earlier[id(p)] for p in parameters if id(p) in earlier), None)
    if known is not None:
        known.sites = sites
        known.follow(plan)
        known.show_shard()
        return known
    parameter: Any = parameters[0]
    if (tied := shard.replaced.get(parameter)) is not None:  # to one of another module, which was wrapped alone
        tensor = tied.shard_for(plan, mesh)
    else:
        tensor = shard.make_shard(parameter, plan, mesh, sync=sync, meets_plain=meets_plain)
    parallel = tensor_parallel_layout(parameter, mesh, options.replica_axes) is not None
    sharded = ShardedParameter(
        plan, tensor, sites, mesh, ("fsdp", *options.replica_axes),
        module_spec=spec_of(parameter) if parallel else None,
    )  # fmt: skip
    shard.install(parameter, sharded)
    return sharded


def plan_of(module: nn.Module) -> ShardingPlan:
    """The plan of the model that the module is the root or a part of."""
    engine: Engine = module._fullshard_engine
    root: Any = engine.units[0].module
    mesh, strategy, replica_axes = root._fullshard_outline
    return ShardingPlan(axes_of(mesh), strategy.name, replica_axes, tuple(unit.plan for unit in engine.units))
