"""Which weights of a model can be held in 4 bits: linear layers of any class, and the experts of fused parameters.

What a class computes is found by trying it on a small weight, not by its name. What is left stays dense.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from fullshard.torch_private import buffers_of, parameters_of, replace_parameters, submodules_of

ROUNDING = 1e-9
"""How far, in fp64, two ways to compute the same product may be apart."""


class Form(NamedTuple):
    """What a linear layer's weight looks like."""

    in_features: int
    out_features: int
    transposed: bool
    """Whether it is stored as (in, out), as transformers' `Conv1D` stores it."""


def form_of(module: nn.Module) -> Form | None:
    """The form of a layer that computes nothing but a product with its weight (and adds its bias); None of others."""
    if not isinstance(module, nn.Linear | Conv1D):
        return None
    transposed = isinstance(module, Conv1D)
    if type(module) not in (nn.Linear, Conv1D) and not _computes_a_product(module, transposed):
        return None
    shape = module.weight.shape
    return Form(shape[0], shape[1], True) if transposed else Form(shape[1], shape[0], False)


def _computes_a_product(module: nn.Linear | Conv1D, transposed: bool) -> bool:
    """Whether a subclass computes what its base class does, tried on a small weight in fp64."""
    if set(parameters_of(module)) != {"weight", "bias"} or buffers_of(module) or submodules_of(module):
        return False
    if type(module).__module__.startswith("torch."):
        return False  # parts of torch's own layers, which take the weight from them
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
        for shape in ((2, 5, 3), (4, 3), (4,))
    )
    probe: Any = copy.copy(module)
    held = bias if module.bias is not None else None
    replace_parameters(
        probe,
        {
            "weight": nn.Parameter(weight.T.contiguous() if transposed else weight),
            "bias": nn.Parameter(held) if held is not None else None,
        },
    )
    probe.in_features, probe.out_features, probe.nx, probe.nf = 3, 4, 3, 4
    expected = nn.functional.linear(x, weight, held)
    for probe.training in (True, False):
        try:
            found = type(module).forward(probe, x)
        except Exception:  # whatever it needs, a plain product does not
            return False
        alike = isinstance(found, torch.Tensor) and (found.shape, found.dtype) == (expected.shape, expected.dtype)
        if not alike or (found - expected).abs().max() > ROUNDING:
            return False
    return True


def fused_experts(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """A module's parameters that hold one matrix per expert: [experts, rows, columns]."""
    count = getattr(module, "num_experts", None)
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.ndim == 3 and parameter.shape[0] == count and parameter.is_floating_point():
            yield name, parameter
