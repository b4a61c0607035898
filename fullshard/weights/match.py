"""Compares a model with files by names and shapes, and plans what loading has to do (`LoadPlan`).

Only file headers are read and nothing is communicated, so every rank gets the same plan.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from fullshard.config.byte_size import file_size
from fullshard.device.torch_private import buffers_of, non_persistent_buffers
from fullshard.fsdp.parameter import ShardedParameter
from fullshard.lora.virtual_tokens import encoders, init_rows
from fullshard.quant.stored_files import check_reader
from fullshard.weights import adapter_init
from fullshard.weights.key_mapping import find_readers, may_be_missing, plain_model, plain_name
from fullshard.weights.safetensors_files import SafetensorsFiles
from fullshard.weights.slice_reader import TensorReader
from fullshard.weights.transforms import KeepsFiles, may_grow, own_readers
from fullshard.weights.unpacked import PartRows

SHOWN = 8
"""How many names of each kind an error lists; the others are counted."""


@dataclass
class LoadProblems:
    """Differences between files and model in names and shapes."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misshaped: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    """Name, shape in the files, shape in the model."""
    unconvertible: list[tuple[str, str]] = field(default_factory=list)
    """Name, and why transformers' conversion fails."""

    def text(self, path: Any, model: str) -> str:
        """The error message; empty if there are no problems."""
        parts = []
        if self.missing:
            near = {name: self._nearest(name) for name in self.missing[:SHOWN]}
            lines = [
                f"{name}{f' (the files have {near[name]})' if near[name] else ''}" for name in self.missing[:SHOWN]
            ]
            parts.append(_listed("missing in the files", lines, len(self.missing)))
        if self.unexpected:
            parts.append(_listed("in the files but not in the model", self.unexpected, len(self.unexpected)))
        if self.misshaped:
            lines = [f"{name}: {there} in the files, {here} in the model" for name, there, here in self.misshaped]
            parts.append(_listed("with a different shape", lines, len(self.misshaped)))
        if self.unconvertible:
            lines = [f"{name}: {why}" for name, why in self.unconvertible]
            parts.append(_listed("that cannot be converted", lines, len(self.unconvertible)))
        if not parts:
            return ""
        hint = (
            "Check that path and model class (or config) belong together; strict=False initializes missing parameters "
            "and skips unexpected tensors"
        )
        if any(there[1:] == here[1:] and there[0] < here[0] for _, there, here in self.misshaped if there and here):
            hint += "; resize_vocab= allows embeddings with more rows than in the files"
        return f"the weights in {path} do not match {model}.\n" + "\n".join(parts) + f"\n{hint}."

    def _nearest(self, name: str) -> str:
        close = difflib.get_close_matches(name, self.unexpected, n=1, cutoff=0.75)
        return close[0] if close else ""


def _listed(what: str, lines: Sequence[str], count: int) -> str:
    more = f"\n    … and {count - SHOWN} more" if count > SHOWN else ""
    return f"  {count} tensor(s) {what}:\n    " + "\n    ".join(lines[:SHOWN]) + more


NAMED = 3
"""Up to this many names are listed in full; of more (an adapter has many), only the first."""


@dataclass
class LoadReport:
    """Summary of a load on this rank."""

    path: str
    read: list[str] = field(default_factory=list)
    """Parameters and buffers loaded from files."""
    initialized: list[str] = field(default_factory=list)
    """Parameters that are not in the files."""
    resized: list[str] = field(default_factory=list)
    """Embeddings with more rows than in the files."""
    skipped: list[str] = field(default_factory=list)
    """Tensors in the files that the model does not have."""
    bytes: int = 0
    """Bytes read by this rank."""
    seconds: float = 0.0

    def __str__(self) -> str:
        rate = file_size(self.bytes / max(self.seconds, 1e-9))
        text = f"loaded {len(self.read)} tensors from {self.path}"
        text += f": {file_size(self.bytes)} on this rank in {self.seconds:.1f} s, {rate}/s"
        for names, action in ((self.initialized, "initialized"), (self.resized, "resized"), (self.skipped, "skipped")):
            if names:
                shown = names if len(names) <= NAMED else [names[0], "…"]
                text += f"; {len(names)} {action} ({', '.join(shown)})"
        return text


ParameterReads = list[tuple[ShardedParameter, TensorReader]]
BufferReads = list[tuple[str, nn.Module, str, TensorReader]]
"""Name in the model, module, name in the module, reader."""


@dataclass
class LoadPlan:
    """What loading has to read and compute, and the mismatches that were found."""

    source: SafetensorsFiles
    parameters: list[ShardedParameter]
    """All parameters of the model."""
    plain: PreTrainedModel | None
    """The transformers model inside the model."""
    adapted: bool
    """Whether the model has an adapter."""
    reads: ParameterReads = field(default_factory=list)
    """Parameters that are read from the files."""
    resizes: ParameterReads = field(default_factory=list)
    """Embeddings with more rows than in the files."""
    adapter_reads: ParameterReads = field(default_factory=list)
    """Parameters that are read from an adapter's files."""
    token_rows: list[tuple[ShardedParameter, ShardedParameter, list[int]]] = field(default_factory=list)
    """Trained rows of an embedding or head, its table, and the row indices they are initialized from."""
    token_buffers: list[tuple[str, nn.Module, str, ShardedParameter, list[int]]] = field(default_factory=list)
    """Buffers with the original values of those rows."""
    self_loading: list[tuple[Any, dict[str, TensorReader], dict[str, ShardedParameter]]] = field(default_factory=list)
    """Modules that read files themselves (`ReadsFiles`), their readers and their parameters."""
    parts: ParameterReads = field(default_factory=list)
    """Parameters that are read from the files as bytes (`KeepsFiles`)."""
    buffers: BufferReads = field(default_factory=list)
    """Buffers that are read from files."""
    initialize: list[ShardedParameter] = field(default_factory=list)
    """Parameters that are initialized."""
    derived: list[adapter_init.DerivedAdapter] = field(default_factory=list)
    """Adapter layers whose values are computed from the weights they adapt."""
    changed: list[ShardedParameter] = field(default_factory=list)
    """Parameters that a transform changed; set during loading."""
    problems: LoadProblems = field(default_factory=LoadProblems)
    conversions: list[Any] | None = None
    """The conversions of transformers' mapping that are used."""
    left_out: tuple[str, ...] = ()
    """The tensors in the files of parts that are left out of the model."""

    @property
    def provided(self) -> list[ShardedParameter]:
        """Parameters whose values can be read again from the files."""
        self_loaded = [p for _, _, parameters in self.self_loading for p in parameters.values()]
        # With an adapter, trained new rows belong to the adapter; the table itself can be resized again.
        read = [*self.reads, *(self.resizes if self.adapted else ())]
        return [p for p, _ in read if p not in self.changed] + [p for p, _ in self.parts] + self_loaded


def match(
    model: nn.Module, parameters: list[ShardedParameter], source: SafetensorsFiles, key_mapping: Any, new: set[str],
    resize_vocab: bool,
    adapter: Mapping[str, TensorReader] | None = None, first: Mapping[str, TensorReader] | None = None,
) -> LoadPlan:  # fmt: skip
    """Compare names and shapes, and plan the load."""
    matcher = _Matcher(model, parameters, source, key_mapping, adapter or {})
    matcher.match_parameters(new, resize_vocab)
    matcher.match_buffers()
    matcher.match_self_loading()
    matcher.match_derived(first or {})
    return matcher.plan


class _Matcher:
    """The comparison of one model with its files, and with an adapter's (`from_adapter`, by name in the model)."""

    def __init__(
        self, model: nn.Module, parameters: list[ShardedParameter], source: SafetensorsFiles, key_mapping: Any,
        from_adapter: Mapping[str, TensorReader],
    ):  # fmt: skip
        self.model, self.from_adapter = model, from_adapter
        self.prefix, plain = plain_model(model)
        self.plan = LoadPlan(source, parameters, plain, hasattr(model, "peft_config"))
        self.by_site = {(module, name): p for p in parameters for module, name in p.sites}
        self.modules = own_readers(model)
        self.self_loaded = {id(self.by_site[m, name]) for m in self.modules.values() for name in m.made_parameters()}
        self.sources: dict[nn.Module, Mapping[str, TensorReader]] = {}
        self.buffers = _persistent_buffers(model)
        self.file_shapes = self._file_shapes()
        self.mapping = find_readers(plain, self.file_shapes, source, key_mapping)
        self.plan.conversions = self.mapping.conversions
        self.plan.left_out = tuple(self.mapping.left_out)
        self.plan.problems.unexpected = self.mapping.unexpected
        self.plan.problems.unconvertible = self.mapping.unconvertible

    def _file_shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of all tensors that the model needs from files."""
        shapes: dict[str, tuple[int, ...]] = {}
        for p in self.plan.parameters:
            if id(p) not in self.self_loaded:
                shapes.update({self._plain(name): p.plan.shape for name in p.plan.names})
        shapes.update({self._plain(name): tuple(b.shape) for name, (_, _, b) in self.buffers.items()})
        for name, module in self.modules.items():
            for tensor, shape in module.file_tensors().items():
                shapes[self._plain(f"{name}.{tensor}")] = tuple(shape)
        return shapes

    def _plain(self, name: str) -> str:
        return plain_name(name, self.prefix)

    def _fits(self, name: str, reader: TensorReader | None, shape: tuple[int, ...]) -> bool:
        if reader is not None and reader.shape != shape:
            self.plan.problems.misshaped.append((name, reader.shape, shape))
        return reader is not None and reader.shape == shape

    def match_parameters(self, new: set[str], resize_vocab: bool) -> None:
        """Decide for each parameter where its value comes from. `new` has names that need not be in the files."""
        plan, plain = self.plan, self.plan.plain
        excused = may_be_missing(plain, self.file_shapes)
        names_by_id = {id(p.shard): list(p.plan.names) for p in plan.parameters}
        resizable = may_grow(plain, names_by_id) if resize_vocab else set()
        token_rows = _token_rows(self.model, self.by_site, plan)
        for p in plan.parameters:
            if id(p) in self.self_loaded:
                continue
            names = [self._plain(name) for name in p.plan.names]
            reader = next((self.mapping.readers[n] for n in names if n in self.mapping.readers), None)
            from_adapter = next((self.from_adapter[n] for n in p.plan.names if n in self.from_adapter), None)
            if from_adapter is not None:
                plan.adapter_reads.append((p, from_adapter))
            elif id(p) in token_rows and p.is_meta:
                plan.token_rows.append((p, *token_rows[id(p)]))
            elif reader is None:
                is_new = any(n in new or _in_adapter(self.model, n) for n in p.plan.names)
                if not is_new and not excused & set(names):
                    plan.problems.missing.append(names[0])
                if p.is_meta:
                    plan.initialize.append(p)
            elif p.plan.name in resizable and _has_fewer_rows(reader.shape, p.plan.shape):
                plan.resizes.append((p, reader))
            elif self._fits(names[0], reader, p.plan.shape):
                plan.reads.append((p, reader))

    def match_buffers(self) -> None:
        """Find the persistent buffers of the model, and those of its adapter such as VeRA's shared projections."""
        for name, (module, key, buffer) in self.buffers.items():
            reader = self.mapping.readers.get(self._plain(name))
            if reader is not None and self._fits(name, reader, tuple(buffer.shape)):
                self.plan.buffers.append((name, module, key, reader))
        for name, reader in self.from_adapter.items():
            path, _, key = name.rpartition(".")
            module = self.model.get_submodule(path)
            if key in buffers_of(module):
                self.plan.buffers.append((name, module, key, reader))

    def match_self_loading(self) -> None:
        """Find the file tensors of modules that read files themselves."""
        for name, module in self.modules.items():
            names = {t: self._plain(f"{name}.{t}") for t in module.file_tensors()}
            readers = {t: self.mapping.readers.get(n) for t, n in names.items()}
            lacking = [names[t] for t, reader in readers.items() if reader is None]
            # These modules cannot be initialized, so this is an error even if not strict.
            self.plan.problems.unconvertible += [(n, f"{type(module).__name__} needs it") for n in lacking]
            if isinstance(module, KeepsFiles):
                self._match_parts(module, names, {t: reader for t, reader in readers.items() if reader is not None})
            elif all(self._fits(names[t], readers[t], self.file_shapes[names[t]]) for t in names):
                parameters = {n: self.by_site[module, n] for n in module.made_parameters()}
                self.plan.self_loading.append((module, readers, parameters))  # type: ignore[arg-type]

    def _match_parts(self, module: Any, names: Mapping[str, str], readers: Mapping[str, TensorReader]) -> None:
        """Find the bytes of a module that keeps those of its file tensors."""
        self.sources[module] = readers
        for own, (weight, part, file) in module.part_files().items():
            if file not in readers:
                continue
            if why := check_reader(weight, part, readers[file]):
                self.plan.problems.unconvertible.append((names[file], why))
            else:
                self.plan.parts.append((self.by_site[module, own], PartRows(weight, part, readers[file])))

    def match_derived(self, first: Mapping[str, TensorReader]) -> None:
        """Find the adapter layers whose values are computed from weights; these are not initialized otherwise."""
        plan = self.plan
        dense = {id(p): reader for p, reader in plan.reads}
        packed = {module: readers for module, readers, _ in plan.self_loading} | self.sources
        plan.derived = adapter_init.find_derived_adapters(
            self.model, self.by_site, self.from_adapter, dense, packed, first
        )
        computed = {id(one.parameters[kind]) for one in plan.derived for kind in one.computed if kind in one.parameters}
        plan.initialize = [p for p in plan.initialize if id(p) not in computed]


def _has_fewer_rows(stored: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    return stored[1:] == expected[1:] and stored[0] < expected[0]


def _token_rows(
    model: nn.Module, by_site: dict[Any, ShardedParameter], plan: LoadPlan
) -> dict[int, tuple[ShardedParameter, list[int]]]:
    """The table and row indices that initialize each parameter of PEFT's trainable tokens and of prompts with an
    initial text."""
    row_sources = {}
    for encoder in encoders(model).values():
        if (rows := init_rows(encoder)) is not None:
            table = by_site[cast(Any, model).word_embeddings, "weight"]
            row_sources[id(by_site[encoder.embedding, "weight"])] = (table, rows)
    for name, module in model.named_modules():
        if getattr(module, "token_adapter", None) is None or module.token_adapter.tied_adapter is not None:
            continue
        layer: Any = module.token_adapter
        table = by_site[layer.base_layer, "weight"]
        for adapter, indices in layer.token_indices.items():
            row_sources[id(by_site[layer.trainable_tokens_delta, adapter])] = (table, list(indices))
            kept = layer.trainable_tokens_original
            if buffers_of(kept)[adapter].is_meta:
                where = f"{name}.token_adapter.trainable_tokens_original.{adapter}"
                plan.token_buffers.append((where, kept, adapter, table, list(indices)))
    return row_sources


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
