"""LoRA layers of a PEFT model that run as groups: layers of one module that get the same input share one operator.

`fuse_lora` replaces the forward of single PEFT layers. Modules, names, parameters and files stay PEFT's. The first
layer of a group that is called computes the outputs of all of them; the others return theirs if they get the same
tensor, and compute their own if they do not. A layer that does anything else than plain LoRA on a frozen weight runs
PEFT's forward: `why_not` says why, and `LoraGroup.part` looks again in each call, because adapters can be disabled,
merged or changed and modules can get hooks at any time.
"""

from __future__ import annotations

import types
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn

from fullshard.device.torch_private import has_hooks, submodules_of
from fullshard.lora.fused_dropout import draw_seed, seed_of_slice
from fullshard.lora.fused_math import Layer
from fullshard.lora.fused_ops import lora_group
from fullshard.quant.base_product import base_form
from fullshard.quant.ops import autocasts, compute_dtype
from fullshard.spmd.tensor import is_sharded

SharedInputs = Mapping[type, Sequence[Sequence[str]]]
"""By class of module, the names of its linear layers that get the same input; see `models/layer_groups.py`."""


@dataclass
class FusedReport:
    """What `fuse_lora` did."""

    groups: list[list[str]] = field(default_factory=list)
    """The names of the layers of each group."""
    aside: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """The names of the LoRA layers that run PEFT's forward, by reason."""

    @property
    def layers(self) -> int:
        """The number of layers in groups."""
        return sum(map(len, self.groups))

    def note(self) -> str:
        """A sentence about the layers that run PEFT's forward; empty if there are none."""
        kinds = [
            f"{len(names)} LoRA layers ({', '.join(sorted({n.rpartition('.')[2] for n in names})[:4])}): {reason}"
            for reason, names in self.aside.items()
        ]
        return f"fused_lora: PEFT's own forward runs for {'; '.join(kinds)}." if kinds else ""


class LoraGroup:
    """LoRA layers that get the same input."""

    def __init__(self, layers: list[Any], adapter: str) -> None:
        self.layers, self.adapter = layers, adapter
        self.types = [(type(layer), type(layer.base_layer)) for layer in layers]
        """The classes of the layers; a layer that became a unit of its own has another one."""
        self.computed: tuple[torch.Tensor, list[torch.Tensor | None]] | None = None
        """The last input, and the outputs that are still to be returned."""

    def output(self, index: int, x: torch.Tensor) -> torch.Tensor | None:
        """The output of a layer; None if it must run PEFT's forward."""
        if self.computed is not None and self.computed[0] is x:
            out = self.computed[1][index]
            if out is not None:
                self._take(index)
                return out
        self.computed = None
        dtype, casts = compute_dtype(x), autocasts(x.device)
        own = self.part(index, dtype, casts)
        if own is None:
            return None
        rate, parts = self.rate(index), {index: own}
        if len(self.layers) > 1:
            every = range(len(self.layers))
            now = {i: own if i == index else self.part(i, dtype, casts) for i in every if self.rate(i) == rate}
            parts = {i: part for i, part in now.items() if part is not None}
        seed = seed_of_slice(draw_seed(x.device), self.layers[index]) if rate else None
        outputs = dict(zip(parts, lora_group(x.to(dtype), list(parts.values()), seed, rate), strict=True))
        if len(parts) > 1:
            self.computed = x, [outputs.get(i) for i in every]
            self._take(index)
        return outputs[index]

    def _take(self, index: int) -> None:
        """Forget an output that is returned, and the input with the last one."""
        assert self.computed is not None
        outputs = self.computed[1]
        outputs[index] = None
        if all(y is None for y in outputs):
            self.computed = None

    def rate(self, index: int) -> float:
        """The probability of dropout."""
        dropout = self.layers[index].lora_dropout[self.adapter]
        return dropout.p if isinstance(dropout, nn.Dropout) and dropout.training else 0.0

    def part(self, index: int, dtype: torch.dtype, casts: bool) -> Layer | None:
        """A layer of the group as it is now, for a product in `dtype`; None if it must run PEFT's forward. `casts`:
        autocast brings adapters to that dtype. Every call of a layer comes here: on small models its time counts."""
        layer, name = self.layers[index], self.adapter
        if layer.disable_adapters or layer.merged or layer.active_adapters != [name]:
            return None
        modules = submodules_of(layer)
        base, dropout = modules["base_layer"], submodules_of(modules["lora_dropout"])[name]
        a, b = submodules_of(modules["lora_A"])[name], submodules_of(modules["lora_B"])[name]
        if (type(layer), type(base)) != self.types[index] or type(a) is not nn.Linear or type(b) is not nn.Linear:
            return None
        if has_hooks(base) or has_hooks(a) or has_hooks(b) or has_hooks(dropout):
            return None
        base_weights, bias, weight_a, weight_b = base_form(base), base.bias, a.weight, b.weight
        if (
            base_weights is None
            or base_weights.compute_dtype not in (None, dtype)
            or (bias is not None and bias.requires_grad)
        ):
            return None
        for t in base_weights.tensors:
            if t.requires_grad or (t.dtype != dtype and t.is_floating_point()):
                return None
        if weight_a.dtype != dtype or weight_b.dtype != dtype:
            if not casts:
                return None
            weight_a, weight_b = weight_a.to(dtype), weight_b.to(dtype)
        if bias is not None and bias.dtype != dtype:
            bias = bias.to(dtype)
        return Layer(base_weights.form, base_weights.tensors, bias, weight_a, weight_b, layer.scaling[name])


def _forward(layer: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The forward of a LoRA layer in a group."""
    if not args and not kwargs and not is_sharded(x):
        group, index = layer._fullshard_lora
        out = group.output(index, x)
        if out is not None:
            return out
    plain: torch.Tensor = type(layer).forward(layer, x, *args, **kwargs)
    return plain


# --- forming groups -------------------------------------------------------------------------------------------------


def fuse_lora(model: nn.Module, shared: SharedInputs) -> FusedReport:
    """Let the LoRA layers of a PEFT model run as groups; `shared` tells which of them get the same input."""
    report = FusedReport()
    for path, parent in list(model.named_modules()):
        prefix = f"{path}." if path else ""
        fitting: dict[str, Any] = {}
        for name, layer in parent.named_children():
            if _is_lora(layer) and "_fullshard_lora" not in layer.__dict__:
                if reason := why_not(layer):
                    report.aside[reason].append(prefix + name)
                else:
                    fitting[name] = layer
        for names in _grouped(fitting, shared.get(type(parent), ())):
            _join([fitting[name] for name in names])
            report.groups.append([prefix + name for name in names])
    return report


def report_sharded(model: nn.Module, param_dtype: torch.dtype | None) -> FusedReport:
    """The layers in groups that run PEFT's forward all the same, now that the model is sharded: units of their own, and
    layers in another dtype than their adapter, if the engine does not cast both to `param_dtype`."""
    report = FusedReport()
    for path, layer in model.named_modules():
        if "_fullshard_lora" not in layer.__dict__:
            continue
        (group, index), lora_layer = layer._fullshard_lora, cast("Any", layer)
        base, adapter = lora_layer.base_layer, lora_layer.lora_A[group.adapter].weight.dtype
        if (type(layer), type(base)) != group.types[index]:
            report.aside["they are units of their own"].append(path)
        elif param_dtype is None and base.weight.dtype != adapter:
            reason = f"they compute in {_short(base.weight.dtype)}, their adapter in {_short(adapter)}"
            report.aside[f"{reason} (bf16, or adapter_dtype, makes them the same)"].append(path)
    return report


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def why_not(layer: Any) -> str:
    """Why a LoRA layer cannot run in a group; empty if it can."""
    from peft.tuners.lora import Linear

    if type(layer) is not Linear:
        return f"they are of type {type(layer).__name__}"
    names = layer.active_adapters
    if len(names) != 1 or names[0] not in layer.lora_A:
        return f"{len(names)} adapters are active"
    (name,) = names
    base, dropout = layer.base_layer, layer.lora_dropout[name]
    if base_form(base) is None or layer.fan_in_fan_out:
        return f"their weights are those of a {type(base).__name__}"
    if name in layer.lora_variant or layer.use_dora.get(name):
        return "they are a variant of LoRA"
    if layer.lora_B[name].bias is not None:
        return "the adapter has a bias"
    if any(p.requires_grad for p in base.parameters()):
        return "their own weights or biases train too"
    if type(dropout) not in (nn.Identity, nn.Dropout) or getattr(dropout, "p", 0.0) >= 1:
        return f"of their dropout, {dropout}"
    if any(has_hooks(part) for part in (base, dropout, layer.lora_A[name], layer.lora_B[name])):
        return "modules inside them have hooks"
    return ""


def _is_lora(module: nn.Module) -> bool:
    from peft.tuners.lora import LoraLayer

    return isinstance(module, LoraLayer)


def _grouped(fitting: Mapping[str, Any], shared: Sequence[Sequence[str]]) -> Iterator[list[str]]:
    """The names of layers, in groups: those of the same adapter that get the same input, and the others alone."""
    left = dict(fitting)
    for together in shared:
        by_adapter: dict[tuple[Any, ...], list[str]] = defaultdict(list)
        for name in together:
            if name in left:
                layer = left.pop(name)
                by_adapter[(layer.active_adapters[0], layer.in_features)].append(name)
        yield from by_adapter.values()
    yield from ([name] for name in left)


def _join(layers: list[Any]) -> None:
    group = LoraGroup(layers, layers[0].active_adapters[0])
    for index, layer in enumerate(layers):
        layer._fullshard_lora = group, index
        layer.forward = types.MethodType(_forward, layer)
