"""Which weights of a model can be quantized: linear layers of any class, and fused experts.

Whether a subclass of `nn.Linear` computes the same as its base class is tested on a small weight, not inferred from its
name. All other weights stay dense.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from fullshard.device.torch_private import buffers_of, parameters_of, replace_parameters, submodules_of

ROUNDING = 1e-9
"""Tolerance (fp64) between two ways to compute the same product."""


class LinearForm(NamedTuple):
    """Sizes and storage order of a linear layer's weight."""

    in_features: int
    out_features: int
    transposed: bool
    """Whether the weight is stored as (in, out), as in transformers' `Conv1D`."""


def form_of(module: nn.Module) -> LinearForm | None:
    """The form of a layer that computes `x @ weight.T + bias` and nothing else; None for other modules."""
    if not isinstance(module, nn.Linear | Conv1D):
        return None
    transposed = isinstance(module, Conv1D)
    if type(module) not in (nn.Linear, Conv1D) and not _computes_a_product(module, transposed):
        return None
    shape = module.weight.shape
    return LinearForm(shape[0], shape[1], True) if transposed else LinearForm(shape[1], shape[0], False)


def _computes_a_product(module: nn.Linear | Conv1D, transposed: bool) -> bool:
    """Whether a subclass computes the same as its base class on a small fp64 weight."""
    if set(parameters_of(module)) != {"weight", "bias"} or buffers_of(module) or submodules_of(module):
        return False
    if type(module).__module__.startswith("torch."):
        return False  # used inside torch's own layers, which access its weight directly
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
        for shape in ((2, 5, 3), (4, 3), (4,))
    )
    probe: Any = copy.copy(module)
    probe_bias = bias if module.bias is not None else None
    replace_parameters(
        probe,
        {
            "weight": nn.Parameter(weight.T.contiguous() if transposed else weight),
            "bias": nn.Parameter(probe_bias) if probe_bias is not None else None,
        },
    )
    probe.in_features, probe.out_features, probe.nx, probe.nf = 3, 4, 3, 4
    expected = nn.functional.linear(x, weight, probe_bias)
    for probe.training in (True, False):
        try:
            out = type(module).forward(probe, x)
        except Exception:  # it needs something that a plain linear layer does not have
            return False
        alike = isinstance(out, torch.Tensor) and (out.shape, out.dtype) == (expected.shape, expected.dtype)
        if not alike or (out - expected).abs().max() > ROUNDING:
            return False
    return True


def fused_experts(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """A module's parameters of shape [experts, rows, columns], with one matrix per expert."""
    count = getattr(module, "num_experts", None)
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.ndim == 3 and parameter.shape[0] == count and parameter.is_floating_point():
            yield name, parameter
