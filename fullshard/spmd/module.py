"""`distribute_module`: turns every parameter and buffer of a module into a sharded tensor."""

from __future__ import annotations

import torch
from torch import nn

from fullshard.config.errors import LayoutError
from fullshard.device.torch_private import buffers_of, parameters_of, spec_of
from fullshard.distributed import runtime
from fullshard.spmd import unused_annotations
from fullshard.spmd.marked import unmarked
from fullshard.spmd.mesh import Mesh
from fullshard.spmd.redistribute import layout_of, torch_layout, without_partial
from fullshard.spmd.sharding import shard, sharding_of
from fullshard.spmd.spec import Layout
from fullshard.spmd.tensor import ShardedTensor, is_sharded, redistributed


def distribute_module(module: nn.Module, mesh: Mesh) -> nn.Module:
    """Shard the marked parameters of a module and replicate the others, in place.

    Tied parameters stay tied. Existing gradients are sharded too, and every later gradient gets the layout of its
    parameter. Buffers are replicated, or keep the layout they were marked with.
    """
    runtime.refuse_foreign_wrappers(module)
    moved: dict[int, torch.Tensor] = {}
    for path, part in module.named_modules():
        for name, parameter in parameters_of(part).items():
            if parameter is not None:
                if id(parameter) not in moved:
                    full_name = f"{path}.{name}" if path else name
                    moved[id(parameter)] = _parameter(parameter, mesh, full_name)
                    unused_annotations.replaced(parameter, full_name)
                parameters_of(part)[name] = moved[id(parameter)]
        for name, buffer in buffers_of(part).items():
            if buffer is not None:
                if id(buffer) not in moved:
                    moved[id(buffer)] = _sharded(buffer, _layout(buffer, mesh, name))
                buffers_of(part)[name] = moved[id(buffer)]
    return module


def _parameter(old: nn.Parameter, mesh: Mesh, name: str) -> nn.Parameter:
    layout = _layout(old, mesh, name)
    new = nn.Parameter(_sharded(old.detach(), layout), requires_grad=old.requires_grad)
    if old.grad is not None:
        new.grad = _sharded(old.grad, layout)
    if old.requires_grad:
        new.register_hook(_GradientLayout(new))
    return new


class _GradientLayout:
    """A hook that redistributes a gradient to the layout of its parameter."""

    def __init__(self, parameter: torch.Tensor):
        self.parameter = parameter

    def __call__(self, grad: torch.Tensor) -> torch.Tensor:
        assert is_sharded(self.parameter)
        if not is_sharded(grad):
            return shard(grad, layout_of(spec_of(self.parameter)))
        return redistributed(grad, self.parameter.device_mesh, without_partial(self.parameter.placements))


def _layout(t: torch.Tensor, mesh: Mesh, name: str) -> Layout:
    marked = sharding_of(t)
    if marked is None:
        return Layout(mesh, ((),) * t.ndim)
    if marked.mesh != mesh:
        raise LayoutError(
            f"{name} is marked on {marked.mesh} and the module is distributed over {mesh}; use the same mesh"
        )
    return marked


def _sharded(t: torch.Tensor, layout: Layout) -> ShardedTensor:
    t = unmarked(t)
    if is_sharded(t):
        return redistributed(t, *torch_layout(layout, t.shape))
    return shard(t.detach(), layout)
