"""What a model wants and what files offer, compared by names and shapes alone: the work that loading has to do.

No data is read here and nothing is communicated; every rank comes to the same result from the same headers.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from fullshard.fsdp.engine import Engine
from fullshard.fsdp.parameter import ShardedParameter
from fullshard.lora.virtual_tokens import begins_as, encoders
from fullshard.weights import adapter_init
from fullshard.weights.key_mapping import find_readers, may_be_missing, plain_model, plain_name
from fullshard.weights.load_report import LoadProblems
from fullshard.weights.resize_vocab import may_grow
from fullshard.weights.safetensors_index import SafetensorsFiles
from fullshard.weights.slice_reader import TensorReader
from fullshard.weights.transforms import own_readers


@dataclass
class LoadPlan:
    """What has to be read, computed and noted."""

    source: SafetensorsFiles
    parameters: list[ShardedParameter]
    plain: PreTrainedModel | None
    adapted: bool
    """Whether the model has an adapter."""
    reads: list[tuple[ShardedParameter, TensorReader]] = field(default_factory=list)
    grows: list[tuple[ShardedParameter, TensorReader]] = field(default_factory=list)
    adapts: list[tuple[ShardedParameter, TensorReader]] = field(default_factory=list)
    """Parameters that an adapter's files give their values."""
    rows: list[tuple[ShardedParameter, ShardedParameter, list[int]]] = field(default_factory=list)
    """Trained rows of a layer, the layer's own table, and which rows of it they begin as."""
    originals: list[tuple[str, nn.Module, str, ShardedParameter, list[int]]] = field(default_factory=list)
    """Buffers that keep those rows as they were."""
    own: list[tuple[Any, dict[str, TensorReader], dict[str, ShardedParameter]]] = field(default_factory=list)
    """Modules that read files themselves, their readers, their parameters."""
    buffers: list[tuple[str, nn.Module, str, TensorReader]] = field(default_factory=list)
    initialise: list[ShardedParameter] = field(default_factory=list)
    derived: list[adapter_init.DerivedAdapter] = field(default_factory=list)
    """Adapter layers whose values follow from the weights they adapt."""
    problems: LoadProblems = field(default_factory=LoadProblems)
    conversions: list[Any] | None = None

    changed: list[ShardedParameter] = field(default_factory=list)
    """Parameters that a transform gave another value than the files."""

    @property
    def provided(self) -> list[ShardedParameter]:
        """Parameters that reading the files again gives again."""
        made = [p for _, _, parameters in self.own for p in parameters.values()]
        # Beside an adapter, what is trained of the new rows is the adapter's; the table itself can be grown again.
        read = [*self.reads, *(self.grows if self.adapted else ())]
        return [p for p, _ in read if p not in self.changed] + made


def match(
    model: nn.Module, engine: Engine, source: SafetensorsFiles, key_mapping: Any, new: set[str], resize_vocab: bool,
    adapter: Mapping[str, TensorReader] | None = None, first: Mapping[str, TensorReader] | None = None,
) -> LoadPlan:  # fmt: skip
    """Compare names and shapes, and lay out the work."""
    prefix, plain = plain_model(model)
    parameters = [p for unit in engine.units for p in unit.parameters]
    work = LoadPlan(source, parameters, plain, hasattr(model, "peft_config"))
    by_site = {(module, name): p for p in parameters for module, name in p.sites}
    readers_own = own_readers(model)
    made = {id(by_site[module, name]) for module in readers_own.values() for name in module.made_parameters()}

    wanted: dict[str, tuple[int, ...]] = {}
    for p in parameters:
        if id(p) not in made:
            wanted.update({plain_name(name, prefix): p.plan.shape for name in p.plan.names})
    buffers = _persistent_buffers(model)
    wanted.update({plain_name(name, prefix): tuple(b.shape) for name, (_, _, b) in buffers.items()})
    for name, module in readers_own.items():
        for tensor, shape in module.file_tensors().items():
            wanted[plain_name(f"{name}.{tensor}", prefix)] = tuple(shape)

    found = find_readers(plain, wanted, source, key_mapping)
    work.conversions, work.problems.unexpected = found.conversions, found.unexpected
    work.problems.unconvertible = found.unconvertible
    excused = may_be_missing(plain, wanted)
    grows = may_grow(plain, {id(p.shard): list(p.plan.names) for p in parameters}) if resize_vocab else set()

    def fits(name: str, reader: TensorReader | None, shape: tuple[int, ...]) -> bool:
        if reader is not None and reader.shape != shape:
            work.problems.misshaped.append((name, reader.shape, shape))
        return reader is not None and reader.shape == shape

    given = adapter or {}
    rows = _token_rows(model, by_site, work)
    for p in parameters:
        if id(p) in made:
            continue
        plain_names = [plain_name(name, prefix) for name in p.plan.names]
        reader = next((found.readers[n] for n in plain_names if n in found.readers), None)
        if brought := next((given[n] for n in p.plan.names if n in given), None):
            work.adapts.append((p, brought))
        elif id(p) in rows and p.local.is_meta:
            work.rows.append((p, *rows[id(p)]))
        elif reader is None:
            expected = any(n in new or _in_adapter(model, n) for n in p.plan.names) or excused & set(plain_names)
            if not expected:
                work.problems.missing.append(plain_names[0])
            if p.local.is_meta:
                work.initialise.append(p)
        elif p.plan.name in grows and reader.shape[1:] == p.plan.shape[1:] and reader.shape[0] < p.plan.shape[0]:
            work.grows.append((p, reader))
        elif fits(plain_names[0], reader, p.plan.shape):
            work.reads.append((p, reader))
    for name, (module, key, buffer) in buffers.items():
        reader = found.readers.get(plain_name(name, prefix))
        if reader is not None and fits(name, reader, tuple(buffer.shape)):
            work.buffers.append((name, module, key, reader))
    for name, reader in given.items():  # an adapter's own, such as VeRA's shared projections
        path, _, key = name.rpartition(".")
        if key in model.get_submodule(path)._buffers:
            work.buffers.append((name, model.get_submodule(path), key, reader))
    for name, module in readers_own.items():
        tensors = {t: plain_name(f"{name}.{t}", prefix) for t in module.file_tensors()}
        held = {t: found.readers.get(n) for t, n in tensors.items()}
        lacking = [tensors[t] for t, reader in held.items() if reader is None]
        # Nothing else could give these layers their values, so this is an error even if not strict.
        work.problems.unconvertible += [(n, f"{type(module).__name__} needs it") for n in lacking]
        if all(fits(tensors[t], held[t], wanted[tensors[t]]) for t in tensors):
            parts = {n: by_site[module, n] for n in module.made_parameters()}
            work.own.append((module, held, parts))  # type: ignore[arg-type]
    dense, packed = {id(p): reader for p, reader in work.reads}, {module: readers for module, readers, _ in work.own}
    work.derived = adapter_init.find(model, by_site, given, dense, packed, first or {})
    computed = {id(one.parameters[kind]) for one in work.derived for kind in one.sends if kind in one.parameters}
    work.initialise = [p for p in work.initialise if id(p) not in computed]
    return work


def _token_rows(
    model: nn.Module, by_site: dict[Any, ShardedParameter], work: LoadPlan
) -> dict[int, tuple[ShardedParameter, list[int]]]:
    """Rows that an adapter trains in place of a layer's own (PEFT's trainable tokens), or before all others (a prompt
    that begins as a text): of which table, and which."""
    found = {}
    for encoder in encoders(model).values():
        if (begins := begins_as(encoder)) is not None:
            table = by_site[cast(Any, model).word_embeddings, "weight"]
            found[id(by_site[encoder.embedding, "weight"])] = (table, begins)
    for name, module in model.named_modules():
        if getattr(module, "token_adapter", None) is None or module.token_adapter.tied_adapter is not None:
            continue
        layer: Any = module.token_adapter
        table = by_site[layer.base_layer, "weight"]
        for adapter, indices in layer.token_indices.items():
            found[id(by_site[layer.trainable_tokens_delta, adapter])] = (table, list(indices))
            kept = layer.trainable_tokens_original
            if kept._buffers[adapter].is_meta:
                where = f"{name}.token_adapter.trainable_tokens_original.{adapter}"
                work.originals.append((where, kept, adapter, table, list(indices)))
    return found


def _persistent_buffers(model: nn.Module) -> dict[str, tuple[nn.Module, str, torch.Tensor]]:
    return {
        f"{prefix}.{name}" if prefix else name: (module, name, buffer)
        for prefix, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }


def _in_adapter(model: nn.Module, name: str) -> bool:
    """Whether a parameter belongs to an adapter rather than to the layer it adapts."""
    parts = name.split(".")
    module: Any = model
    if parts[0] == "prompt_encoder":
        return bool(encoders(model))
    for part, child in itertools.pairwise(parts):
        module = getattr(module, part)
        if child in getattr(module, "adapter_layer_names", ()):
            return True
    return False
