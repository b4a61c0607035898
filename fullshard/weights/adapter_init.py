"""Adapter initialization from the base weights: matrices of PiSSA, OLoRA and LoftQ, magnitudes of DoRA.

Layers are distributed over the ranks. For each of its layers a rank reads the whole weight, lets PEFT's layer compute,
and keeps only the small results. These are broadcast, and every rank takes its slices. For PiSSA and OLoRA, every rank
also subtracts the product of the two matrices from its shard of the weight. The values do not depend on the number of
ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fullshard.config.errors import WeightsError
from fullshard.distributed import engines, runtime
from fullshard.distributed.progress import Bar
from fullshard.distributed.ranks import agree, host_group
from fullshard.fsdp.parameter import ShardedParameter
from fullshard.fsdp.strategy import dtype_of
from fullshard.lora.adapter_config import taken_from_weights
from fullshard.quant.linear import NF4Linear
from fullshard.weights import init
from fullshard.weights.slice_reader import TensorReader
from fullshard.weights.wrapped import set_whole

Values = dict[str, torch.Tensor]
"""The computed values of one layer, unsharded: `A`, `B`, `magnitude`, or some of them."""


@dataclass
class DerivedAdapter:
    """One adapter layer with values computed from its base weight."""

    name: str
    layer: Any
    """PEFT's LoRA layer."""
    adapter: str
    method: Any
    """`init_lora_weights`."""
    parameters: dict[str, ShardedParameter]
    """`A`, `B` and `magnitude`, except those that are loaded from files."""
    weight: ShardedParameter | None
    """The dense base weight; None if it is quantized."""
    readers: Mapping[str, TensorReader]
    """Readers for the file tensors of the base weight."""
    first: dict[str, TensorReader] = field(default_factory=dict)
    """Readers for the saved initial `A` and `B`, if there are any."""

    @property
    def subtracts(self) -> bool:
        """Whether the initial adapter is subtracted from the base weight."""
        return taken_from_weights(self.method)

    @property
    def computed(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the computed values."""
        layer, adapter = self.layer, self.adapter
        shapes = {name: p.plan.shape for name, p in self.parameters.items() if name == "magnitude" or self.joint}
        if self.subtracts:
            rank = layer.r[adapter]
            shapes |= {"A": (rank, layer.in_features), "B": (layer.out_features, rank)}
        return shapes

    @property
    def joint(self) -> bool:
        """Whether both matrices are computed together."""
        return self.subtracts or self.method in ("loftq", "orthogonal")


def find_derived_adapters(
    model: nn.Module, by_site: Mapping[Any, ShardedParameter], loaded: Mapping[str, TensorReader],
    dense: Mapping[int, TensorReader], packed: Mapping[nn.Module, Mapping[str, TensorReader]],
    first: Mapping[str, TensorReader],
) -> list[DerivedAdapter]:  # fmt: skip
    """The layers whose adapters are computed from weights. `loaded` has the values that are loaded from files."""
    configs: dict[str, Any] = getattr(model, "peft_config", {})
    derived = []
    for name, layer in model.named_modules():
        for adapter in getattr(layer, "lora_A", ()):
            method = getattr(configs.get(adapter), "init_lora_weights", True)
            base = layer.get_base_layer()
            if method == "loftq" and not isinstance(base, NF4Linear):
                method = True  # LoftQ corrects quantization errors; a dense weight has none
            sites = {"A": (layer.lora_A[adapter], "weight"), "B": (layer.lora_B[adapter], "weight")}
            if adapter in layer.lora_magnitude_vector:
                sites["magnitude"] = (layer.lora_magnitude_vector[adapter], "weight")
            parameters = {
                kind: by_site[site]
                for kind, site in sites.items()
                if by_site[site].is_meta and not loaded.keys() & set(by_site[site].plan.names)
            }
            weight = by_site.get((base, "weight"))
            one = DerivedAdapter(name, layer, adapter, method, parameters, weight, packed.get(base, {}))
            if not one.computed or (not parameters and not (one.subtracts and weight and weight.is_meta)):
                continue
            if weight is not None and id(weight) in dense:
                one.readers = {"weight": dense[id(weight)]}
            one.first = {k: first[n] for k in ("A", "B") for n in by_site[sites[k]].plan.names if n in first}
            _check(one, base)
            derived.append(one)
    return derived


def _check(one: DerivedAdapter, base: nn.Module) -> None:
    option = f"init_lora_weights={one.method!r}" if one.joint else "use_dora"
    if not isinstance(base, nn.Linear) and not getattr(one.layer, "fan_in_fan_out", False):
        raise WeightsError(
            f"{option}: {one.name} is a {type(base).__name__}; expected a linear layer. Remove it from the targets"
        )
    if one.subtracts and (one.weight is None or len(one.weight.sites) > 1):
        kind = "is quantized" if one.weight is None else "is tied to another"
        raise WeightsError(
            f"{option} changes the weight of {one.name}, which {kind}; remove that layer from the targets, or use True"
        )
    if one.subtracts and "niter" in one.method and "A" not in one.parameters and not one.first:
        raise WeightsError(
            f"an adapter initialized with {one.method} cannot be loaded: the random part that was subtracted from the "
            f"weights is not known. Save it as plain LoRA with PEFT (path_initial_model_for_weight_conversion=)"
        )
    if one.method == "loftq" and getattr(base, "stored", None) is not None:
        raise WeightsError(
            f"init_lora_weights='loftq' needs the weights before quantization, but the files store {one.name} in 4 "
            f"bits; start from the dense model"
        )
    if not one.readers:
        raise WeightsError(f"{option} needs the weight of {one.name}, which the files do not store as one tensor")


def derive(
    model: nn.Module,
    parameters: list[ShardedParameter],
    layers: list[DerivedAdapter],
    seed: int,
    progress: bool = False,
) -> None:
    """Compute and set the values of all layers. All ranks must call it, after the weights have been loaded."""
    mine: dict[int, Values] = {}
    share = range(runtime.rank(), len(layers), runtime.world_size())

    def compute() -> None:
        sizes = {i: sum(math.prod(r.shape) * r.dtype.itemsize for r in layers[i].readers.values()) for i in share}
        bar = Bar("adapters from weights", sum(sizes.values()), progress and bool(layers))
        with init.without_values(parameters), bar:
            for i in share:
                mine[i] = {kind: value.cpu() for kind, value in _values(model, layers[i], seed).items()}
                bar.at(sum(sizes[j] for j in mine))

    agree(compute, "adapters from weights", error=WeightsError)
    for i, one in enumerate(layers):
        _set(one, _broadcast(one, mine.pop(i, None), i % runtime.world_size()))
    for config in getattr(model, "peft_config", {}).values():
        if getattr(config, "init_lora_weights", None) == "loftq":
            config.init_lora_weights = True  # the saved adapter must not be initialized again


def _broadcast(one: DerivedAdapter, values: Values | None, source: int) -> Values:
    """Send the values from rank `source` to all ranks."""
    received = values or {kind: torch.empty(shape) for kind, shape in one.computed.items()}
    if runtime.world_size() > 1:
        for kind in sorted(one.computed):
            dist.broadcast(received[kind], source, group=host_group())
    return received


@torch.no_grad()
def _set(one: DerivedAdapter, values: Values) -> None:
    """Set this rank's shards, and subtract the adapter from the base weight if needed."""
    for kind, p in one.parameters.items():
        if kind in values:
            set_whole(p, values[kind])
    if not one.subtracts:
        return
    assert one.weight is not None
    device, dtype = _device(), dtype_of(one.parameters["A"].plan.dtype if "A" in one.parameters else None)
    # Rounded as they are stored.
    a, b = (values[kind].to(dtype or torch.float32).float().to(device) for kind in ("A", "B"))
    product = one.layer.scaling[one.adapter] * b @ a
    product = product.T if one.layer.fan_in_fan_out else product
    for cuts, memory in one.weight.parts(keep=True):
        memory.copy_(memory.float() - product[cuts].to(memory.device))
    one.weight.written()


def _device() -> torch.device:
    """Where values are computed: on the host for XLA, which would compile a program for every shape."""
    return runtime.device() if engines.current().host_shards is None else torch.device("cpu")


# --- one layer --------------------------------------------------------------------------------------------------------


def _values(model: nn.Module, one: DerivedAdapter, seed: int) -> Values:
    """The computed values of a layer, unsharded, in fp32."""
    layer, adapter = one.layer, one.adapter
    original, weight = _weight(one)
    if len(one.first) == 2:
        matrices = {kind: reader[()].float().to(weight.device) for kind, reader in one.first.items()}
    elif one.method == "loftq":
        matrices = _loftq(original, weight, layer.r[adapter])
    elif one.joint:
        matrices = _by_peft(one, weight, seed)
    elif one.method is False:
        matrices = {k: init.initial_value(model, one.parameters[k], seed).float().to(weight.device) for k in ("A", "B")}
    else:
        matrices = {}  # B is zero, so the adapter adds nothing to the norm
    if "magnitude" in one.parameters:
        # If the adapter was subtracted from the weight, weight + adapter is the original weight.
        added = (
            matrices["B"] @ matrices["A"] if matrices and not one.subtracts else torch.zeros((), device=weight.device)
        )
        norm = layer.lora_magnitude_vector[adapter].get_weight_norm
        matrices["magnitude"] = norm(weight.float(), added, layer.scaling[adapter])
    return {kind: matrices[kind].float().contiguous() for kind in one.computed}


def _weight(one: DerivedAdapter) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole weight as in the files, and as in the layer (after quantization)."""
    device, base = _device(), one.layer.get_base_layer()
    if one.weight is not None:
        value = one.readers["weight"][()].to(device, dtype_of(one.weight.plan.dtype))
        return value, value
    weight = base.from_files(one.readers, device)
    if one.method != "loftq":
        return weight, weight
    original = one.readers["weight"][()].to(device)
    return original.T if base.transposed else original, weight


def _by_peft(one: DerivedAdapter, weight: torch.Tensor, seed: int) -> Values:
    """Run PEFT's initialization on the layer, with the whole weight set temporarily."""
    layer, adapter, device = one.layer, one.adapter, weight.device
    pairs = {"A": layer.lora_A[adapter], "B": layer.lora_B[adapter]}
    dense = [layer.get_base_layer()] if one.weight is not None else []
    before = {module: module.weight for module in (*pairs.values(), *dense)}
    for base in dense:
        base.weight = nn.Parameter(weight.clone(), requires_grad=False)
    for kind, module in pairs.items():
        module.weight = nn.Parameter(torch.empty(one.computed[kind], device=device), requires_grad=False)
    try:
        with init.seeded(seed, one.name):
            if one.method == "orthogonal":
                layer.orthogonal_init(adapter)
            elif one.method == "olora":
                layer.olora_init(adapter)
            else:
                layer.pissa_init(adapter, one.method)
        matrices = {kind: module.weight.detach().to(device) for kind, module in pairs.items()}
    finally:
        for module, parameter in before.items():
            module.weight = parameter
    for kind, value in matrices.items():
        if tuple(value.shape) != one.computed[kind]:
            raise WeightsError(
                f"init_lora_weights={one.method!r} computes {kind} of shape {tuple(value.shape)} for {one.name}, "
                f"expected {one.computed[kind]}; remove that layer from the targets, or use True"
            )
    return matrices


def _loftq(original: torch.Tensor, weight: torch.Tensor, rank: int) -> Values:
    """LoftQ with one iteration: the best rank-r approximation of the quantization error."""
    left, sizes, right = torch.linalg.svd(original.float() - weight.float(), full_matrices=False)
    root = sizes[:rank].sqrt()
    return {"A": root[:, None] * right[:rank], "B": left[:, :rank] * root}
