"""Compares a model with files by names and shapes, and plans what loading has to do (`LoadPlan`).

Only file headers are read and nothing is communicated, so every rank gets the same plan.
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
from fullshard.lora.virtual_tokens import encoders, init_rows
from fullshard.torch_private import buffers_of, non_persistent_buffers
from fullshard.weights import adapter_init
from fullshard.weights.key_mapping import find_readers, may_be_missing, plain_model, plain_name
from fullshard.weights.load_report import LoadProblems
from fullshard.weights.resize_vocab import may_grow
from fullshard.weights.safetensors_index import SafetensorsFiles
from fullshard.weights.slice_reader import TensorReader
from fullshard.weights.transforms import own_readers


@dataclass
class LoadPlan:
    """What loading has to read and compute, and the mismatches that were found."""

    source: SafetensorsFiles
    parameters: list[ShardedParameter]
    plain: PreTrainedModel | None
    adapted: bool
    """Whether the model has an adapter."""
    reads: list[tuple[ShardedParameter, TensorReader]] = field(default_factory=list)
    grows: list[tuple[ShardedParameter, TensorReader]] = field(default_factory=list)
    adapts: list[tuple[ShardedParameter, TensorReader]] = field(default_factory=list)
    """Parameters that are loaded from an adapter's files."""
    rows: list[tuple[ShardedParameter, ShardedParameter, list[int]]] = field(default_factory=list)
    """Trained rows of an embedding or head, its table, and the row indices they are initialized from."""
    originals: list[tuple[str, nn.Module, str, ShardedParameter, list[int]]] = field(default_factory=list)
    """Buffers with the original values of those rows."""
    own: list[tuple[Any, dict[str, TensorReader], dict[str, ShardedParameter]]] = field(default_factory=list)
    """Modules that read files themselves, their readers and their parameters."""
    buffers: list[tuple[str, nn.Module, str, TensorReader]] = field(default_factory=list)
    initialize: list[ShardedParameter] = field(default_factory=list)
    derived: list[adapter_init.DerivedAdapter] = field(default_factory=list)
    """Adapter layers whose values are computed from the weights they adapt."""
    problems: LoadProblems = field(default_factory=LoadProblems)
    conversions: list[Any] | None = None

    changed: list[ShardedParameter] = field(default_factory=list)
    """Parameters that a transform changed."""

    @property
    def provided(self) -> list[ShardedParameter]:
        """Parameters whose values can be read again from the files."""
        made = [p for _, _, parameters in self.own for p in parameters.values()]
        # With an adapter, trained new rows belong to the adapter; the table itself can be resized again.
        read = [*self.reads, *(self.grows if self.adapted else ())]
        return [p for p, _ in read if p not in self.changed] + made


def match(
    model: nn.Module, engine: Engine, source: SafetensorsFiles, key_mapping: Any, new: set[str], resize_vocab: bool,
    adapter: Mapping[str, TensorReader] | None = None, first: Mapping[str, TensorReader] | None = None,
) -> LoadPlan:  # fmt: skip
    """Compare names and shapes, and plan the load."""
    prefix, plain = plain_model(model)
    parameters = [p for unit in engine.units for p in unit.parameters]
    plan = LoadPlan(source, parameters, plain, hasattr(model, "peft_config"))
    by_site = {(module, name): p for p in parameters for module, name in p.sites}
    modules_reading = own_readers(model)
    made = {id(by_site[module, name]) for module in modules_reading.values() for name in module.made_parameters()}

    wanted: dict[str, tuple[int, ...]] = {}
    for p in parameters:
        if id(p) not in made:
            wanted.update({plain_name(name, prefix): p.plan.shape for name in p.plan.names})
    buffers = _persistent_buffers(model)
    wanted.update({plain_name(name, prefix): tuple(b.shape) for name, (_, _, b) in buffers.items()})
    for name, module in modules_reading.items():
        for tensor, shape in module.file_tensors().items():
            wanted[plain_name(f"{name}.{tensor}", prefix)] = tuple(shape)

    found = find_readers(plain, wanted, source, key_mapping)
    plan.conversions, plan.problems.unexpected = found.conversions, found.unexpected
    plan.problems.unconvertible = found.unconvertible
    excused = may_be_missing(plain, wanted)
    grows = may_grow(plain, {id(p.shard): list(p.plan.names) for p in parameters}) if resize_vocab else set()

    def fits(name: str, reader: TensorReader | None, shape: tuple[int, ...]) -> bool:
        if reader is not None and reader.shape != shape:
            plan.problems.misshaped.append((name, reader.shape, shape))
        return reader is not None and reader.shape == shape

    from_adapter = adapter or {}
    rows = _token_rows(model, by_site, plan)
    for p in parameters:
        if id(p) in made:
            continue
        plain_names = [plain_name(name, prefix) for name in p.plan.names]
        reader = next((found.readers[n] for n in plain_names if n in found.readers), None)
        if reader_of_adapter := next((from_adapter[n] for n in p.plan.names if n in from_adapter), None):
            plan.adapts.append((p, reader_of_adapter))
        elif id(p) in rows and p.local.is_meta:
            plan.rows.append((p, *rows[id(p)]))
        elif reader is None:
            expected = any(n in new or _in_adapter(model, n) for n in p.plan.names) or excused & set(plain_names)
            if not expected:
                plan.problems.missing.append(plain_names[0])
            if p.local.is_meta:
                plan.initialize.append(p)
        elif p.plan.name in grows and reader.shape[1:] == p.plan.shape[1:] and reader.shape[0] < p.plan.shape[0]:
            plan.grows.append((p, reader))
        elif fits(plain_names[0], reader, p.plan.shape):
            plan.reads.append((p, reader))
    for name, (module, key, buffer) in buffers.items():
        reader = found.readers.get(plain_name(name, prefix))
        if reader is not None and fits(name, reader, tuple(buffer.shape)):
            plan.buffers.append((name, module, key, reader))
    for name, reader in from_adapter.items():  # buffers of the adapter, such as VeRA's shared projections
        path, _, key = name.rpartition(".")
        if key in buffers_of(model.get_submodule(path)):
            plan.buffers.append((name, model.get_submodule(path), key, reader))
    for name, module in modules_reading.items():
        tensors = {t: plain_name(f"{name}.{t}", prefix) for t in module.file_tensors()}
        held = {t: found.readers.get(n) for t, n in tensors.items()}
        lacking = [tensors[t] for t, reader in held.items() if reader is None]
        # These layers cannot be initialized, so this is an error even if not strict.
        plan.problems.unconvertible += [(n, f"{type(module).__name__} needs it") for n in lacking]
        if all(fits(tensors[t], held[t], wanted[tensors[t]]) for t in tensors):
            parts = {n: by_site[module, n] for n in module.made_parameters()}
            plan.own.append((module, held, parts))  # type: ignore[arg-type]
    dense, packed = {id(p): reader for p, reader in plan.reads}, {module: readers for module, readers, _ in plan.own}
    plan.derived = adapter_init.find(model, by_site, from_adapter, dense, packed, first or {})
    computed = {id(one.parameters[kind]) for one in plan.derived for kind in one.computed if kind in one.parameters}
    plan.initialize = [p for p in plan.initialize if id(p) not in computed]
    return plan


def _token_rows(
    model: nn.Module, by_site: dict[Any, ShardedParameter], plan: LoadPlan
) -> dict[int, tuple[ShardedParameter, list[int]]]:
    """The table and row indices that initialize each parameter of PEFT's trainable tokens and of prompts with an
    initial text."""
    found = {}
    for encoder in encoders(model).values():
        if (rows := init_rows(encoder)) is not None:
            table = by_site[cast(Any, model).word_embeddings, "weight"]
            found[id(by_site[encoder.embedding, "weight"])] = (table, rows)
    for name, module in model.named_modules():
        if getattr(module, "token_adapter", None) is None or module.token_adapter.tied_adapter is not None:
            continue
        layer: Any = module.token_adapter
        table = by_site[layer.base_layer, "weight"]
        for adapter, indices in layer.token_indices.items():
            found[id(by_site[layer.trainable_tokens_delta, adapter])] = (table, list(indices))
            kept = layer.trainable_tokens_original
            if buffers_of(kept)[adapter].is_meta:
                where = f"{name}.token_adapter.trainable_tokens_original.{adapter}"
                plan.originals.append((where, kept, adapter, table, list(indices)))
    return found


def _persistent_buffers(model: nn.Module) -> dict[str, tuple[nn.Module, str, torch.Tensor]]:
    return {
        f"{prefix}.{name}" if prefix else name: (module, name, buffer)
        for prefix, module in model.named_modules()
        for name, buffer in buffers_of(module).items()
        if buffer is not None and name not in non_persistent_buffers(module)
    }


def _in_adapter(model: nn.Module, name: str) -> bool:
    """Whether a parameter belongs to an adapter rather than to its base layer."""
    parts = name.split(".")
    module: Any = model
    if parts[0] == "prompt_encoder":
        return bool(encoders(model))
    for part, child in itertools.pairwise(parts):
        module = getattr(module, part)
        if child in getattr(module, "adapter_layer_names", ()):
            return True
    return False
