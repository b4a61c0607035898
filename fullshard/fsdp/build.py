"""From a module and the user's choices to units and an engine: what happens while `FSDPv2(module, …)` runs.

A wrapped module inside the one being wrapped keeps its units; they join the outer engine, which from then on runs the
whole model.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn

from fullshard import runtime
from fullshard.errors import FSDPError, MeshError
from fullshard.fsdp import backward_entry, checks, shard
from fullshard.fsdp import policy as policies
from fullshard.fsdp.comm import make_link, travels_by_messages
from fullshard.fsdp.counters import Meter
from fullshard.fsdp.engine import Engine, Settings
from fullshard.fsdp.offload import HostTraffic
from fullshard.fsdp.output import OutputRule
from fullshard.fsdp.parameter import ShardedParameter
from fullshard.fsdp.plan import SMALL_BYTES, SMALL_BYTES_COLLECTIVE, ShardingPlan, Terms, plan_unit
from fullshard.fsdp.strategy import BackwardPrefetch, MixedPrecision, ShardingStrategy
from fullshard.fsdp.streams import Lane
from fullshard.fsdp.unit import Means, Unit
from fullshard.spmd.dtensor_fixes import draw_global_on_cpu
from fullshard.spmd.mesh import Mesh
from fullshard.spmd.tensor import is_sharded
from fullshard.torch_private import parameters_of, submodules_of


@dataclass(frozen=True)
class Options:
    """A user's choices, checked."""

    mesh: Mesh
    shard_output: Callable[[Any, Mesh], Any] | None
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
        """Axes besides `fsdp` over which the batch is split."""
        if self.extra_data_axis is not None:
            return (self.extra_data_axis,)
        return ("replica",) if self.mesh.get_axis_name_idx("replica") is not None else ()

    @property
    def terms(self) -> Terms:
        any_order = "sort_ranks" in inspect.signature(dist.new_group).parameters
        small = self.small_bytes
        if small is None:
            small = SMALL_BYTES if travels_by_messages(dist.group.WORLD) else SMALL_BYTES_COLLECTIVE
        return Terms(self.mesh, self.strategy, self.precision, self.replica_axes, small, any_order)


# --- assembling -----------------------------------------------------------------------------------------------------


def assemble(
    root: nn.Module,
    options: Options,
    auto_wrap_policy: Any,
    auto_wrapper_callable: Callable[..., Any] | None,
    given: dict[str, Any],
    extended_class: Callable[[nn.Module], type],
) -> None:
    """Make the module's units and its engine, and extend the classes of the modules that are units."""
    checks.check_strategy(options.strategy, options.mesh, options.replica_axes)
    if options.gathers_in_flight < 0:
        raise FSDPError(f"gathers_in_flight={options.gathers_in_flight}: expected 0 or more")
    runtime.use_spmd()
    runtime.announce_transport()
    chosen = policies.find_units(root, policies.resolve(auto_wrap_policy, root), options.ignored)
    if auto_wrapper_callable is not None and chosen:
        _wrap_children(root, chosen, auto_wrapper_callable, options.mesh, given)
        chosen = []
    inner = _inner_engines(root, options)
    ignored = _with_children(options.ignored)
    means = _means(options)
    meta = [n for n, p in root.named_parameters() if p.is_meta and not is_sharded(p)]
    if options.param_init_fn is not None and meta:
        shard.materialize([m for m in root.modules() if m not in ignored], options.param_init_fn)
        meta = []
    sync = options.sync_module_states if options.sync_module_states is not None else not meta

    modules = [root, *(m for m in root.modules() if m in set(chosen))]
    taken = [unit for engine in inner for unit in engine.units]
    units = _make_units(root, modules, taken, options, means, sync, ignored)
    shard.place_buffers(root, options.mesh, ignored, options.precision.buffer_dtype, sync)
    settings = Settings(options.forward_prefetch, options.backward_prefetch, options.gathers_in_flight)
    order = {module: i for i, module in enumerate(root.modules())}
    engine = Engine(sorted([*units, *taken], key=lambda u: order[u.module]), means, settings)
    for unit in units:
        unit.module.__class__ = extended_class(unit.module)
        _attach(unit, engine, options, options.shard_output if unit.module is root else None)
        unit.output_dtype = options.precision.output_dtype if unit.module is root else None
    for unit in taken:
        unit.means = means
        if unit.precision == options.precision:
            unit.output_dtype = None  # one model in one precision, however it was wrapped: its root casts
        unit.module._fullshard_engine = engine
    _name_units(root, engine, options)
    modules_below = {unit.module: set(unit.module.modules()) - {unit.module} for unit in engine.units}
    for unit in engine.units:
        unit.holds_units = any(other.module in modules_below[unit.module] for other in engine.units)
    engine.before_pass = checks.Readiness(root, engine, ignored)
    engine.has_global_parameters = any(any(p.gathered_layout.dims) for unit in engine.units for p in unit.parameters)
    checks.expect_optimizers()
    backward_entry.watch_backward()
    draw_global_on_cpu()
    if options.precision != MixedPrecision.of(None):
        runtime.get_logger().info("mixed precision: %s", options.precision)


def _attach(unit: Unit, engine: Engine, options: Options, shard_output: Any) -> None:
    module: Any = unit.module
    module._fullshard_unit, module._fullshard_engine = unit, engine
    module._fullshard_mesh = options.mesh
    module._fullshard_output = OutputRule(shard_output, options.mesh, (*options.replica_axes, "fsdp"))


def _means(options: Options) -> Means:
    meter, device = Meter(), runtime.device()
    gather_lane, reduce_lane = Lane(device), Lane(device)
    return Means(
        gather_link=make_link(options.mesh, ("fsdp",), "gather", options.timeout, meter),
        reduce_link=make_link(options.mesh, ("fsdp",), "reduce", options.timeout, meter),
        replica_link=make_link(options.mesh, options.replica_axes, "replica", options.timeout, meter),
        meter=meter,
        gather_lane=gather_lane,
        reduce_lane=reduce_lane,
        host=HostTraffic(reduce_lane),
    )


def _wrap_children(
    root: nn.Module, chosen: list[nn.Module], wrapper: Callable[..., Any], mesh: Mesh, given: dict[str, Any]
) -> None:
    """Hand every chosen child to the user's own wrapper and put what it returns in the child's place."""
    for child in chosen:
        wrapped = wrapper(child, mesh, **given)
        if wrapped is not child:
            for parent in root.modules():
                for name, module in submodules_of(parent).items():
                    if module is child:
                        submodules_of(parent)[name] = wrapped


def _inner_engines(root: nn.Module, options: Options) -> list[Engine]:
    engines: dict[int, Engine] = {}
    for name, module in root.named_modules():
        engine = getattr(module, "_fullshard_engine", None)
        if engine is None:
            continue
        if module._fullshard_mesh != options.mesh:
            raise MeshError(f"{name} is wrapped on {module._fullshard_mesh} and the module around it on {options.mesh}")
        engines[id(engine)] = engine
        engine.reset()  # what it holds gathered is counted by its own meter
    return list(engines.values())


def _with_children(modules: Iterable[nn.Module]) -> set[nn.Module]:
    return {below for module in modules for below in module.modules()}


def _make_units(
    root: nn.Module,
    modules: list[nn.Module],
    taken: list[Unit],
    options: Options,
    means: Means,
    sync: bool,
    ignored: set[nn.Module],
) -> list[Unit]:
    owned: dict[nn.Module, list[ShardedParameter]] = {module: [] for module in modules}
    inside = {module: set(module.modules()) for module in modules}
    theirs = {id(p.shard): p for unit in taken for p in unit.parameters}
    meets_plain = any(p.requires_grad for module in ignored for p in module.parameters())
    for parameter, named_sites in shard.find_sites(root, ignored).values():
        if id(parameter) in theirs:
            continue
        sites = [site for _, site in named_sites]
        known = shard.replaced.get(parameter)
        if known is not None and any(known is p for p in theirs.values()):
            # Tied to a parameter of a module wrapped earlier: both belong to the unit around them now.
            known.sites += sites
            home = next(unit for unit in taken if known in unit.parameters)
            home.parameters.remove(known)
            owned[shard.owner_of(known.sites, inside)].append(known)
            known.show_shard()
            continue
        plan = shard.plan_for([name for name, _ in named_sites], parameter, options.terms)
        made = shard.make_shard(
            parameter, plan, options.mesh, sync=sync, offload=options.cpu_offload, meets_plain=meets_plain
        )
        data_axes = ("fsdp", *options.replica_axes)
        sharded = ShardedParameter(plan, made, sites, options.mesh, data_axes, options.cpu_offload)
        shard.install(parameter, sharded)
        owned[shard.owner_of(sites, inside)].append(sharded)
    keeps = options.strategy.keeps_after_forward
    names = {module: name for name, module in root.named_modules()}
    return [
        Unit(
            plan_unit(names[m], type(m).__name__, [p.plan for p in owned[m]]),
            m,
            owned[m],
            means,
            keeps,
            options.precision,
        )
        for m in modules
        if owned[m] or m is root
    ]


# --- names and plans ------------------------------------------------------------------------------------------------


def _name_units(root: nn.Module, engine: Engine, options: Options) -> None:
    """Write every unit's plan in the names of the outermost module."""
    where: dict[tuple[int, str], str] = {}
    for prefix, module in root.named_modules(remove_duplicate=True):
        for name in parameters_of(module):
            where[(id(module), name)] = f"{prefix}.{name}" if prefix else name
    names = {module: name for name, module in root.named_modules()}
    for unit in engine.units:
        plans = []
        for p in unit.parameters:
            found = tuple(where[(id(module), name)] for module, name in p.sites)
            p.plan = dataclasses.replace(p.plan, names=found)
            plans.append(p.plan)
        unit.plan = plan_unit(names[unit.module], type(unit.module).__name__, plans)
    root._fullshard_outline = (options.mesh, options.strategy, options.replica_axes)


def plan_of(module: nn.Module) -> ShardingPlan:
    """The plan of the model that the module is the root of, or belongs to."""
    engine: Engine = module._fullshard_engine
    root: Any = engine.units[0].module
    mesh, strategy, replica_axes = root._fullshard_outline
    axes = tuple((str(name), size) for name, size in mesh.shape().items())
    return ShardingPlan(axes, strategy.name, replica_axes, tuple(unit.plan for unit in engine.units))
