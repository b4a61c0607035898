"""Checks for what cannot work: meshes, modules, optimizers, and changes to a model after it was wrapped."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from fullshard.config.errors import FSDPError, MeshError
from fullshard.device.torch_private import in_functorch, saved_tensors_are_mutable
from fullshard.distributed.foreign_wrappers import refuse_foreign_wrappers
from fullshard.distributed.watchdog import watch
from fullshard.fsdp import shard
from fullshard.fsdp.gradients import UnreducedGradient
from fullshard.fsdp.plan_layout import plan_unit, replan
from fullshard.fsdp.plan_model import find_sites
from fullshard.fsdp.strategy import ShardingStrategy
from fullshard.fsdp.unit import Unit
from fullshard.fsdp.wrap import NO_FORWARD
from fullshard.optim import sharded as sharded_optimizers
from fullshard.spmd.mesh import Mesh, data_mesh, get_global_mesh
from fullshard.spmd.tensor import ShardedTensor, is_sharded


def check_mesh(mesh: Mesh | DeviceMesh | None, extra_data_axis: str | None) -> Mesh:
    """The mesh to shard on, or the global one; raises `MeshError` if it has no axis `fsdp`."""
    mesh = mesh if mesh is not None else get_global_mesh()
    if mesh is None:
        raise MeshError(
            "FSDPv2: no mesh. Pass one, FSDPv2(module, mesh), or set one for all calls with "
            "fullshard.spmd.set_global_mesh(mesh); a mesh over all devices is Mesh(np.arange(n), (n, 1), "
            "('fsdp', 'model'))"
        )
    if isinstance(mesh, DeviceMesh):
        mesh = data_mesh(mesh)
    if not isinstance(mesh, Mesh):
        raise MeshError(
            f"FSDPv2: expected a fullshard.spmd.Mesh or a torch DeviceMesh, got {type(mesh).__name__}: {mesh!r}"
        )
    if mesh.get_axis_name_idx("fsdp") is None:
        raise MeshError(
            f"FSDPv2: {mesh} has no axis named 'fsdp', over which parameters are sharded; name one of its axes 'fsdp'"
        )
    if extra_data_axis is not None and (mesh.get_axis_name_idx(extra_data_axis) is None or extra_data_axis == "fsdp"):
        others = [name for name in mesh.shape() if name != "fsdp"]
        raise MeshError(
            f"FSDPv2: extra_data_axis={extra_data_axis!r} is not an axis of {mesh} other than 'fsdp'; it has {others}"
        )
    return mesh


def check_module(module: Any, wrapped_class: type, auto_wrap_policy: Any) -> None:
    """Raise if a module cannot be wrapped."""
    if isinstance(module, list | tuple):
        raise FSDPError(
            f"FSDPv2 wraps one module, and got {len(module)}: as a unit of several, wrap the module around them; tied "
            f"parameters stay one without it"
        )
    if not isinstance(module, nn.Module):
        raise FSDPError(f"FSDPv2 wraps an nn.Module, not {type(module).__name__}")
    if isinstance(module, wrapped_class):
        raise FSDPError(f"this {type(module).__name__} is already wrapped; wrap a module once")
    if type(module).forward is nn.Module.forward and "forward" not in module.__dict__ or isinstance(module, NO_FORWARD):
        raise FSDPError(
            f"{type(module).__name__} has no forward, so FSDPv2 would never see it run; wrap its members, or the "
            f"module that calls them"
        )
    if auto_wrap_policy is not None:
        inner = [name for name, m in module.named_modules() if isinstance(m, wrapped_class)]
        if inner:
            raise FSDPError(
                f"auto_wrap_policy on a module that contains a wrapped module ({inner[0]}): wrap by policy or by hand, "
                f"not both"
            )
    refuse_foreign_wrappers(module)


def check_strategy(strategy: ShardingStrategy, mesh: Mesh, replica_axes: tuple[str, ...]) -> None:
    """Raise if a strategy does not fit the mesh."""
    if strategy.hybrid and not replica_axes:
        raise MeshError(
            f"{strategy.name} replicates parameters across groups of ranks, so the mesh needs a second data axis: "
            f"Mesh(ids, (groups, ranks_per_group), ('replica', 'fsdp')), or name one with extra_data_axis=…; "
            f"{mesh} has neither"
        )


class BeforePass:
    """Called before each pass: refuses what cannot work, and updates plans after changes to parameters."""

    def __init__(self, root: nn.Module, units: Sequence[Unit], ignored: set[nn.Module]):
        self.root, self.units, self.ignored = root, units, ignored
        self.first = True

    def __call__(self) -> None:
        if saved_tensors_are_mutable():
            raise FSDPError(
                "torch.autograd.graph.allow_mutation_on_saved_tensors() around a wrapped model: it copies what "
                "autograd saved before every write, and gathered values are written at every gather. Remove it"
            )
        if in_functorch():
            raise FSDPError(
                "a transform of torch.func (vmap, grad, jacrev, jvp) around a wrapped model: it would need "
                "gathered values that are freed between units. Use it inside the forward of one unit: a module whose "
                "forward calls the transform, wrapped without units inside it"
            )
        if self.first:
            sharded_before = [p.shard for unit in self.units for p in unit.parameters]
            refuse_new_parameters(self.root, self.ignored, sharded_before)
            self.first = False
        for unit in self.units:
            changed = [p for p in unit.parameters if p.adopt()]
            if changed:
                plans = [replan(p.plan, p.shard.dtype, p.shard.requires_grad, unit.precision) for p in unit.parameters]
                unit.follow(plan_unit(unit.plan.name, unit.plan.module, plans, unit.plan.axes))


def refuse_new_parameters(root: nn.Module, ignored: set[nn.Module], sharded: Iterable[nn.Parameter]) -> None:
    """Refuse parameters of a wrapped model that are neither ignored nor sharded."""
    expected = {id(p) for p in sharded}
    for parameter, names, _ in find_sites(root, ignored):
        if id(parameter) not in expected and not is_sharded(parameter):
            raise FSDPError(
                f"parameter {names[0]} was added after the module was wrapped, so it is not sharded and would "
                f"drift apart between ranks; add parameters (adapters, new heads) before FSDPv2(…)"
            )


PART_OF_ANOTHER = "_fullshard_part"
"""Set on an optimizer that is stepped by another one, which was checked and whose step counts."""


@functools.cache
def check_optimizers() -> None:
    """Check every optimizer before its steps. Once per process."""
    register_optimizer_step_pre_hook(_check_optimizer)
    sharded_optimizers.share_muon()


def _check_optimizer(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if getattr(optimizer, PART_OF_ANOTHER, False):
        return
    watch.raise_failure()  # gradients summed without a lost rank must not be used
    watch.stepped()
    for group in optimizer.param_groups:
        if any(isinstance(parameter.grad, UnreducedGradient) for parameter in group["params"]):
            raise FSDPError(
                f"{type(optimizer).__name__}.step() while no_sync() holds gradients back: they have not been summed "
                f"over the ranks. Call backward() of the last micro-batch outside no_sync() before the step"
            )
    if not getattr(optimizer, "_fullshard_checked", False):
        _check_once(optimizer)
        optimizer._fullshard_checked = True
    sharded_optimizers.prepare_step(optimizer)


def _check_once(optimizer: Any) -> None:
    refuse_replaced(optimizer)
    sharded_optimizers.refuse_unable(optimizer)
    _check_lists(optimizer)


def refuse_replaced(optimizer: Any) -> None:
    """Refuse an optimizer that holds parameters from before the module was wrapped."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter in shard.replaced:
                name = shard.replaced[parameter].plan.name
                raise FSDPError(
                    f"this {type(optimizer).__name__} was built before the module was wrapped: it would update the old "
                    f"{name} (shape {tuple(parameter.shape)}), which the model no longer uses. Build the optimizer "
                    f"from model.parameters() after FSDPv2(…)"
                )


def _check_lists(optimizer: Optimizer) -> None:
    """Refuse lists (`foreach`, `fused`) that mix plain tensors with `DTensor`s of torch's own class."""
    for group in optimizer.param_groups:
        trained = [p for p in group["params"] if p.requires_grad]
        plain = [p for p in trained if not is_sharded(p)]
        ours = any(isinstance(p, ShardedTensor) for p in trained)
        if (group.get("foreach") or group.get("fused")) and plain and len(plain) < len(trained) and not ours:
            how = "foreach=True" if group.get("foreach") else "fused=True"
            raise FSDPError(
                f"{type(optimizer).__name__}({how}) with sharded and plain parameters in one group (a plain one has "
                f"shape {tuple(plain[0].shape)}): torch cannot update them in one list. Put the plain ones into a "
                f"separate parameter group, or remove {how}"
            )
