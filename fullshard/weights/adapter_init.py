"""Adapter values that follow from the weight they adapt: matrices of PiSSA, OLoRA and LoftQ, magnitudes of DoRA.

One weight at a time, and each on one rank: it reads the whole weight, PEFT's own layer computes, and only the small
results are kept. They are then sent round; every rank takes its slices of them and, where the adapter was taken out of
the weight, subtracts their product from its slice of that. The same values come out whatever the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fullshard import runtime
from fullshard.errors import WeightsError
from fullshard.fsdp.parameter import ShardedParameter
from fullshard.fsdp.strategy import dtype_of
from fullshard.lora.adapter_config import taken_from_weights
from fullshard.progress import Bar
from fullshard.quant import sharded_groups
from fullshard.quant.linear import NF4Linear
from fullshard.ranks import front_group
from fullshard.weights import init
from fullshard.weights.load_report import together
from fullshard.weights.slice_reader import TensorReader

Values = dict[str, torch.Tensor]
"""Of one layer: `A`, `B`, `magnitude`, whole, as far as they are derived."""


@dataclass
class DerivedAdapter:
    """One adapter layer with values that are computed."""

    name: str
    layer: Any
    """PEFT's."""
    adapter: str
    start: Any
    """`init_lora_weights`."""
    parameters: dict[str, ShardedParameter]
    """`A`, `B` and `magnitude`, those that the files do not bring."""
    weight: ShardedParameter | None
    """The dense weight; None for a 4-bit one."""
    readers: Mapping[str, TensorReader]
    """Of the tensors that make up the weight in files."""
    first: dict[str, TensorReader] = field(default_factory=dict)
    """`A` and `B` as the run began with them, where they were written down."""

    @property
    def subtracts(self) -> bool:
        return taken_from_weights(self.start)

    @property
    def sends(self) -> dict[str, tuple[int, ...]]:
        """What is computed, and its shape."""
        layer, adapter = self.layer, self.adapter
        shapes = {name: p.plan.shape for name, p in self.parameters.items() if name == "magnitude" or self.joint}
        if self.subtracts:
            rank = layer.r[adapter]
            shapes |= {"A": (rank, layer.in_features), "B": (layer.out_features, rank)}
        return shapes

    @property
    def joint(self) -> bool:
        """Whether both matrices come out of one computation."""
        return self.subtracts or self.start in ("loftq", "orthogonal")


def find(
    model: nn.Module, by_site: Mapping[Any, ShardedParameter], brought: Mapping[str, TensorReader],
    dense: Mapping[int, TensorReader], packed: Mapping[nn.Module, Mapping[str, TensorReader]],
    first: Mapping[str, TensorReader],
) -> list[DerivedAdapter]:  # fmt: skip
    """The layers of the model whose adapters are not simply drawn. `brought` has the values that files give."""
    configs: dict[str, Any] = getattr(model, "peft_config", {})
    found = []
    for name, layer in model.named_modules():
        for adapter in getattr(layer, "lora_A", ()):
            start = getattr(configs.get(adapter), "init_lora_weights", True)
            base = layer.get_base_layer()
            if start == "loftq" and not isinstance(base, NF4Linear):
                start = True  # nothing was lost that it could make up for
            sites = {"A": (layer.lora_A[adapter], "weight"), "B": (layer.lora_B[adapter], "weight")}
            if adapter in layer.lora_magnitude_vector:
                sites["magnitude"] = (layer.lora_magnitude_vector[adapter], "weight")
            parameters = {
                kind: by_site[site]
                for kind, site in sites.items()
                if by_site[site].local.is_meta and not brought.keys() & set(by_site[site].plan.names)
            }
            weight = by_site.get((base, "weight"))
            one = DerivedAdapter(name, layer, adapter, start, parameters, weight, packed.get(base, {}))
            if not one.sends or (not parameters and not (one.subtracts and weight and weight.local.is_meta)):
                continue
            if weight is not None and id(weight) in dense:
                one.readers = {"weight": dense[id(weight)]}
            one.first = {k: first[n] for k in ("A", "B") for n in by_site[sites[k]].plan.names if n in first}
            _check(one, base)
            found.append(one)
    return found


def _check(one: DerivedAdapter, base: nn.Module) -> None:
    what = f"init_lora_weights={one.start!r}" if one.joint else "use_dora"
    if not isinstance(base, nn.Linear) and not getattr(one.layer, "fan_in_fan_out", False):
        raise WeightsError(f"{what}: {one.name} is a {type(base).__name__}; expected a linear layer. Leave it out")
    if one.subtracts and (one.weight is None or len(one.weight.sites) > 1):
        kind = "is held in 4 bits" if one.weight is None else "is tied to another"
        raise WeightsError(f"{what} changes the weight of {one.name}, which {kind}; leave that layer out, or use True")
    if one.subtracts and "niter" in one.start and "A" not in one.parameters and not one.first:
        raise WeightsError(
            f"an adapter that began as {one.start} cannot be loaded: what was taken out of the weights was drawn at "
            f"random. Have PEFT save it as plain LoRA (path_initial_model_for_weight_conversion=)"
        )
    if one.start == "loftq" and getattr(base, "stored", None) is not None:
        raise WeightsError(
            f"init_lora_weights='loftq' needs the weights before quantisation, and the files hold {one.name} in 4 "
            f"bits; start from the dense model"
        )
    if not one.readers:
        raise WeightsError(f"{what} needs the weight of {one.name}, which the files do not hold as it is")


def derive(
    model: nn.Module,
    parameters: list[ShardedParameter],
    layers: list[DerivedAdapter],
    seed: int,
    progress: bool = False,
) -> None:
    """Give the layers their values. All ranks must call it, once the weights have been read."""
    mine: dict[int, Values] = {}
    share = range(runtime.rank(), len(layers), runtime.world_size())

    def compute() -> None:
        sizes = {i: sum(math.prod(r.shape) * r.dtype.itemsize for r in layers[i].readers.values()) for i in share}
        bar = Bar("adapters from weights", sum(sizes.values()), progress and bool(layers))
        with init.without_values(parameters), bar:
            for i in share:
                mine[i] = {kind: value.cpu() for kind, value in _values(model, layers[i], seed).items()}
                bar.at(sum(sizes[j] for j in mine))

    together(compute, "adapters from weights")
    for i, one in enumerate(layers):
        _place(one, _sent(one, mine.pop(i, None), i % runtime.world_size()))
    for config in getattr(model, "peft_config", {}).values():
        if getattr(config, "init_lora_weights", None) == "loftq":
            config.init_lora_weights = True  # done; whoever loads the adapter is not to do it again


def _sent(one: DerivedAdapter, values: Values | None, source: int) -> Values:
    """The values on every rank."""
    found = values or {kind: torch.empty(shape) for kind, shape in one.sends.items()}
    if runtime.world_size() > 1:
        for kind in sorted(one.sends):
            dist.broadcast(found[kind], source, group=front_group())
    return found


@torch.no_grad()
def _place(one: DerivedAdapter, values: Values) -> None:
    """Write this rank's slices."""
    for kind, p in one.parameters.items():
        if kind in values:
            p.local.copy_(values[kind][p.layout.slices(p.plan.shape, runtime.rank())])
    if not one.subtracts:
        return
    assert one.weight is not None
    device, dtype = runtime.device(), dtype_of(one.parameters["A"].plan.dtype if "A" in one.parameters else None)
    a, b = (values[kind].to(dtype or torch.float32).float().to(device) for kind in ("A", "B"))  # as they are stored
    product = one.layer.scaling[one.adapter] * b @ a
    product = product.T if one.layer.fan_in_fan_out else product
    local = one.weight.local.detach()
    part = product[one.weight.layout.slices(one.weight.plan.shape, runtime.rank())]
    local.copy_(local.float() - part.to(local.device))


# --- one layer --------------------------------------------------------------------------------------------------------


def _values(model: nn.Module, one: DerivedAdapter, seed: int) -> Values:
    """What is derived of a layer, whole, in fp32."""
    layer, adapter = one.layer, one.adapter
    original, held = _weight(one)
    if len(one.first) == 2:
        found = {kind: reader[()].float().to(held.device) for kind, reader in one.first.items()}
    elif one.start == "loftq":
        found = _lost(original, held, layer.r[adapter])
    elif one.joint:
        found = _by_peft(one, held, seed)
    elif one.start is False:
        found = {k: init.drawn(model, one.parameters[k], seed).float().to(held.device) for k in ("A", "B")}
    else:
        found = {}  # B is zero, so that the adapter adds nothing yet
    if "magnitude" in one.parameters:
        # A weight that the adapter was taken out of and the adapter are together the weight itself.
        added = found["B"] @ found["A"] if found and not one.subtracts else torch.zeros((), device=held.device)
        norm = layer.lora_magnitude_vector[adapter].get_weight_norm
        found["magnitude"] = norm(held.float(), added, layer.scaling[adapter])
    return {kind: found[kind].float().contiguous() for kind in one.sends}


def _weight(one: DerivedAdapter) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole weight as the files have it, and as the layer holds it."""
    device, base = runtime.device(), one.layer.get_base_layer()
    if one.weight is not None:
        value = one.readers["weight"][()].to(device, dtype_of(one.weight.plan.dtype))
        return value, value
    loader = base.group_loader()
    parts = loader.finish(loader.read(one.readers, slice(0, base.packed.shape[0])), None)
    held = sharded_groups.dense(
        {name: part.to(device) for name, part in parts.items()}, base.shape, base.scheme, base.dtype
    )
    if one.start != "loftq":
        return held, held
    original = one.readers["weight"][()].to(device)
    return original.T if base.transposed else original, held


def _by_peft(one: DerivedAdapter, weight: torch.Tensor, seed: int) -> Values:
    """PEFT's own initialisation, on a layer that holds the whole weight for as long."""
    layer, adapter, device = one.layer, one.adapter, weight.device
    pairs = {"A": layer.lora_A[adapter], "B": layer.lora_B[adapter]}
    dense = [layer.get_base_layer()] if one.weight is not None else []
    before = {module: module.weight for module in (*pairs.values(), *dense)}
    for base in dense:
        base.weight = nn.Parameter(weight.clone(), requires_grad=False)
    for kind, module in pairs.items():
        module.weight = nn.Parameter(torch.empty(one.sends[kind], device=device), requires_grad=False)
    try:
        with init.seeded(seed, one.name):
            if one.start == "orthogonal":
                layer.orthogonal_init(adapter)
            elif one.start == "olora":
                layer.olora_init(adapter)
            else:
                layer.pissa_init(adapter, one.start)
        found = {kind: module.weight.detach().to(device) for kind, module in pairs.items()}
    finally:
        for module, parameter in before.items():
            module.weight = parameter
    for kind, value in found.items():
        if tuple(value.shape) != one.sends[kind]:
            raise WeightsError(
                f"init_lora_weights={one.start!r} gives {one.name} a {kind} of shape {tuple(value.shape)}, expected "
                f"{one.sends[kind]}; leave that layer out, or use True"
            )
    return found


def _lost(original: torch.Tensor, held: torch.Tensor, rank: int) -> Values:
    """LoftQ, one round: the part of rank r that is nearest to what the weight lost in 4 bits."""
    left, sizes, right = torch.linalg.svd(original.float() - held.float(), full_matrices=False)
    root = sizes[:rank].sqrt()
    return {"A": root[:, None] * right[:rank], "B": left[:, :rank] * root}
