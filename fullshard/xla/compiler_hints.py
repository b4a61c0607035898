"""Changes to modules that help the compiler: linear layers that keep batch dims apart, and barriers in backward."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch_xla.distributed.spmd import xla_sharding


def apply_xla_patch_to_nn_linear(module: nn.Module, patched_function: Any = None) -> nn.Module:
    """Let the linear layers of a module multiply without flattening batch and sequence dims together, which would hide
    their layouts from the compiler. Layers and parameters stay the same objects."""
    for layer in module.modules():
        if type(layer) is nn.Linear:
            layer.__class__ = xla_sharding.EinsumLinear
    return module


def apply_backward_optimization_barrier(module: nn.Module) -> nn.Module:
    """Keep the compiler from moving a module's backward pass across that of the next one."""
    xla_sharding.apply_backward_optimization_barrier(module)
    return module
