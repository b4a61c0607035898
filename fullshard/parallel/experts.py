"""Expert parallelism: which parameters are split by expert, and over which ranks.

`ep` divides the ranks of a replica a second time, for experts only: the mesh of experts is `(replica, ep, fsdp)` over
the same ranks. Along `ep` each rank holds some of a layer's experts, and tokens travel to them
(`models/experts_dispatch.py`); over the remaining ranks each expert is sharded and gathered as usual. What is split are
the stacks of the modules that run our experts implementation, whatever they are stored in. Adapters on them stay on the
model's mesh: they are small, every rank gathers them, and each applies those of its experts.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator
from typing import Any

from torch import nn

from fullshard.config.errors import ConfigError
from fullshard.device.torch_private import parameters_of
from fullshard.distributed.autograd_collectives import RankGroup, group_of
from fullshard.distributed.ranks import on_rank_0
from fullshard.fsdp.build import make_link
from fullshard.fsdp.comm import Link
from fullshard.fsdp.local_axes import compute_with_slices, forget_slices, local_axes_of
from fullshard.models.causal_lm import get_causal_lm
from fullshard.models.experts import (
    DISPATCH,
    ExpertsVerdict,
    experts_modules,
    has_experts,
    try_experts,
    use_own_experts,
)
from fullshard.models.experts_dispatch import AbsentRanks, Dispatch
from fullshard.quant.expert_adapters import runs_own_experts
from fullshard.spmd.mesh import Mesh, VirtualMesh

AXIS = "ep"
STACKS = ("gate_up_proj", "up_proj", "down_proj")
"""The weights of experts; their biases and the parts of their 4-bit form have names that begin so."""


def split_experts(model: nn.Module, mesh: Mesh, of_experts: Mesh) -> None:
    """Annotate the experts of a model, before it is wrapped or planned, with the mesh of experts over the ranks of the
    model's mesh."""
    size = of_experts.shape()[AXIS]
    modules = _checked(model, size) if size > 1 else list(experts_modules(model))
    for number, (path, module) in enumerate(modules):
        vars(module).pop(DISPATCH, None)
        if size > 1 and isinstance(mesh, VirtualMesh):
            setattr(module, DISPATCH, _dispatch(AbsentRanks(size), path, module, number, mesh))
        for name, parameter in parameters_of(module).items():
            if parameter is not None and name.startswith(STACKS):
                if AXIS in local_axes_of(parameter).split:  # of an earlier plan
                    forget_slices(parameter)
                if size > 1:
                    compute_with_slices(parameter, of_experts, (AXIS, *[None] * (parameter.ndim - 1)))
    if size > 1 and mesh.shape().get("tp", 1) > 1:
        for parameter in _beside_stacks(model, {module for _, module in modules}):
            compute_with_slices(parameter, mesh, sums_over=("tp",))


def _beside_stacks(model: nn.Module, modules: Collection[nn.Module]) -> Iterator[nn.Parameter]:
    """Other parameters of these modules with experts: those of adapters, and of norms inside. Ranks along `tp` compute
    terms of their gradients, from the tokens that each gets."""
    for outer in model.modules():
        experts = outer.get_base_layer() if hasattr(outer, "parameter_name") else outer  # PEFT's wrappers
        if experts in modules:
            yield from (
                p for name, p in outer.named_parameters() if name.rpartition(".")[2].startswith(STACKS) is False
            )


def connect_experts(wrapped: Any, mesh: Mesh, of_experts: Mesh, timeout: float | None) -> None:
    """Let the experts of a wrapped model receive tokens of other ranks. All ranks must call it."""
    if of_experts.shape()[AXIS] == 1:
        return
    link = make_link(of_experts, (AXIS,), "experts", timeout, wrapped.meter)
    for number, (path, module) in enumerate(experts_modules(wrapped)):
        setattr(module, DISPATCH, _dispatch(link, path, module, number, mesh))


def _dispatch(link: Link | AbsentRanks, path: str, module: Any, number: int, mesh: Mesh) -> Dispatch:
    """What sends the tokens of one module; its number keeps messages of layers apart."""
    size = mesh.shape().get("tp", 1)
    absent = isinstance(mesh, VirtualMesh) or size == 1
    sharing = RankGroup("", size, 0) if absent else group_of(mesh.get_group("tp"))
    return Dispatch(link, count_experts(module), path, number, sharing)


def count_experts(module: Any) -> int:
    """The number of experts of a module, on all ranks together."""
    fused = getattr(module, "fused", None)  # in 4 bits, a row is not an expert
    if fused is not None:
        return int(next(iter(fused.values()))[0])
    return int(parameters_of(module)["down_proj"].shape[0])


def _checked(model: nn.Module, size: int) -> list[tuple[str, Any]]:
    """The modules with experts; raises if one cannot be split over so many ranks."""
    inner = get_causal_lm(model)
    name = type(inner).__name__
    modules = list(experts_modules(model))
    if not modules:
        why = "does not take its experts from transformers' interface" if has_experts(inner) else "has no experts"
        raise ConfigError(f"ep_size {size}: {name} {why}; use 1")
    if not all(runs_own_experts(module) for _, module in modules):
        verdict: ExpertsVerdict = on_rank_0(functools.partial(try_experts, model), "experts check")
        if not (verdict.usable and use_own_experts(model)):
            raise ConfigError(
                f"ep_size {size}: the experts of {name} run only in transformers' own code ({verdict.reason}); use 1"
            )
    for path, module in modules:
        if (count := count_experts(module)) % size:
            sizes = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
            raise ConfigError(
                f"ep_size {size}: {path} has {count} experts; expected a size that divides their number: {sizes}"
            )
    return modules
