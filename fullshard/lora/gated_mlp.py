"""Gated MLPs of a PEFT model that run as one operator: `down(activation(gate(x)) * up(x))` with adapters on all three.

`fuse_mlps` replaces the forward of single modules; it comes after `fuse_lora` and, like it, looks again in each call
whether the layers are plain LoRA on frozen weights. If one is not, the module's own forward runs.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from fullshard.lora.fused_dropout import draw_seed
from fullshard.lora.gated_mlp_ops import GatedMlp, gated_mlp
from fullshard.quant.ops import autocasts, compute_dtype
from fullshard.spmd.tensor import is_sharded
from fullshard.torch_private import has_hooks

LARGEST_RANK = 64
"""Of adapters: the kernels keep a row's rank-sized sums in registers."""


class GatedParts(NamedTuple):
    """The names of the layers of a gated MLP, and of its activation function; see `models/gated_mlps.py`."""

    gate: str
    up: str
    down: str
    activation: str


def fuse_mlps(model: nn.Module, known: Mapping[type, GatedParts]) -> int:
    """Let gated MLPs whose three layers are in LoRA groups run as one operator; `known` has the parts by class of
    module. Returns how many do."""
    count = 0
    for module in model.modules():
        parts = known.get(type(module))
        if parts is None or "forward" in module.__dict__:
            continue
        layers = [getattr(module, name, None) for name in parts[:3]]
        if all("_fullshard_lora" in getattr(layer, "__dict__", ()) for layer in layers) and _fits(layers):
            module._fullshard_mlp = parts
            module.forward = types.MethodType(_run_joint, module)
            count += 1
    return count


def undo_fuse_mlps(model: nn.Module) -> None:
    """Let all MLPs run their own forward again."""
    for module in model.modules():
        if module.__dict__.pop("_fullshard_mlp", None) is not None:
            del module.forward


def _fits(layers: list[Any]) -> bool:
    groups = [layer._fullshard_lora[0] for layer in layers]
    ranks = [layer.r[group.adapter] for layer, group in zip(layers, groups, strict=True)]
    return max(ranks) <= LARGEST_RANK and len({group.adapter for group in groups}) == 1


def _run_joint(module: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The forward of a gated MLP."""
    if not args and not kwargs and not is_sharded(x):
        found = _fused(module, x)
        if found is not None:
            return found
    plain: torch.Tensor = type(module).forward(module, x, *args, **kwargs)
    return plain


def _fused(module: Any, x: torch.Tensor) -> torch.Tensor | None:
    """The output; None if the module's own forward must run."""
    names = module._fullshard_mlp
    if any(has_hooks(child) for child in module.children()):
        return None
    dtype, casts = compute_dtype(x), autocasts(x.device)
    found, rates = [], []
    for name in names[:3]:
        layer = getattr(module, name)
        group, index = layer._fullshard_lora
        part = group.part(index, dtype, casts)
        if part is None:
            return None
        found.append(part)
        rates.append(group.rate(index))
    if rates[0] != rates[1] or rates[1] != rates[2]:
        return None
    seeds = draw_seed(x.device, 2) if rates[0] else None
    gate, up, down = found
    return gated_mlp(x.to(dtype), GatedMlp(gate, up, down, names.activation), seeds, rates[0])
