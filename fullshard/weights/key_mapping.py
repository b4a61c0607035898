"""From the names in files to the names in a model.

transformers knows how the checkpoints of each architecture differ from its modules: prefixes, renamed layers, experts
that are stored one by one and computed together. Its own mapping is asked here, name by name, and what it would do to
whole tensors is turned into `Reader`s of slices. Adapters' changes to names are undone first.
"""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from fullshard.weights.safetensors_index import Source
from fullshard.weights.slice_reader import Computed, Joined, Reader, Stacked, Stored, Transposed

Shapes = Mapping[str, tuple[int, ...]]

_BASE_LAYER = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+|token_adapter)(?=\.)")
"""What PEFT puts into the names of the layers it wraps."""


@dataclass
class Found:
    """What files offer a model."""

    readers: dict[str, Reader] = field(default_factory=dict)
    """By the plain model's names."""
    unexpected: list[str] = field(default_factory=list)
    """Tensors in the files, under the names they would have in the model, that the model has no place for."""
    unconvertible: list[tuple[str, str]] = field(default_factory=list)
    """Tensors that a conversion should give and cannot, and why."""
    conversions: list[Any] | None = None
    """transformers' mapping as far as it was needed; writing the model back reverses it."""


def plain_model(model: nn.Module) -> tuple[str, PreTrainedModel | None]:
    """The transformers model that files were written for, and its prefix in `model`, which may be an adapter's."""
    for name, module in model.named_modules():
        if isinstance(module, PreTrainedModel):
            return (f"{name}." if name else ""), module
    return "", None


def plain_name(name: str, prefix: str) -> str:
    """A parameter's name in the model without adapters."""
    return _BASE_LAYER.sub("", name.removeprefix(prefix))


def find(model: PreTrainedModel | None, wanted: Shapes, source: Source, key_mapping: Any = None) -> Found:
    """A reader for every wanted tensor that the files hold, whatever they call it."""
    if model is None:
        readers: dict[str, Reader] = {
            name: Stored(source, source.entries[name]) for name in wanted if name in source.entries
        }
        return Found(readers, [name for name in source.entries if name not in wanted])
    conversions = get_model_conversion_mapping(model, key_mapping)
    found = Found()
    direct, fused, lost = _assign(model, wanted, source, conversions)
    for name, entry_name in direct.items():
        found.readers[name] = Stored(source, source.entries[entry_name])
    for name, (converter, parts) in fused.items():
        stored: dict[str, list[Reader]] = {
            pattern: [Stored(source, source.entries[e]) for e in entries] for pattern, entries in parts.items()
        }
        try:
            made = _convert(converter, name, stored, _Shown(model, wanted))
        except (ValueError, RuntimeError, IndexError) as error:
            found.unconvertible.append((name, str(error)))
            continue
        found.readers.update({target: reader for target, reader in made.items() if target in wanted})
        found.unexpected += [target for target in made if target not in wanted]
    found.unexpected = _without(found.unexpected + lost, _ignored_when_unexpected(model))
    found.conversions = [conversion for conversion in conversions if conversion.was_used()]
    return found


def may_be_missing(model: PreTrainedModel | None, names: Iterable[str]) -> set[str]:
    """Those that the model itself says its files need not have."""
    patterns = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    return {name for name in names if any(re.search(pattern, name) for pattern in patterns)}


def _ignored_when_unexpected(model: PreTrainedModel) -> list[str]:
    patterns = list(model._keys_to_ignore_on_load_unexpected or ())
    # Older files hold buffers that are computed nowadays.
    for buffer, pattern in (("rotary_emb.inv_freq", r"rotary_emb\.inv_freq"), ("position_ids", r"(^|\.)position_ids$")):
        if any(name.endswith(buffer) for name, _ in model.named_buffers()):
            patterns.append(pattern)
    return patterns


def _without(names: list[str], patterns: list[str]) -> list[str]:
    return [name for name in names if not any(re.search(pattern, name) for pattern in patterns)]


Fused = dict[str, tuple[WeightConverter, dict[str, list[str]]]]


def _assign(
    model: PreTrainedModel, wanted: Shapes, source: Source, conversions: list[Any]
) -> tuple[dict[str, str], Fused, list[str]]:
    """Each file tensor to the parameter it is, or to the conversion it takes part in, or to neither."""
    renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
    converters = [c for c in conversions if isinstance(c, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    prefix, known = model.base_model_prefix, dict(wanted)
    direct: dict[str, str] = {}
    fused: Fused = {}
    lost = []
    for entry in sorted(source.entries, key=dot_natural_key):
        name, pattern = rename_source_key(entry, renamings, converters, prefix, known)
        if name not in known and entry in known:  # already as the model has it; only a prefix may differ
            name, pattern = rename_source_key(entry, [], [], prefix, known)
        if name not in known:
            lost.append(name)
        elif pattern is None:
            direct[name] = entry
        else:
            _, parts = fused.setdefault(name, (copy.deepcopy(by_pattern[pattern]), defaultdict(list)))
            parts[pattern].append(entry)
    return direct, fused, lost


class _Shown:
    """The model as conversions look at it: whole shapes under plain names, whatever wraps its layers now."""

    def __init__(self, model: PreTrainedModel, wanted: Shapes):
        self.model, self.wanted = model, wanted

    def get_parameter(self, name: str) -> torch.Tensor:
        return torch.empty(self.wanted[name], device="meta")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def _convert(converter: WeightConverter, name: str, parts: dict[str, list[Reader]], model: _Shown) -> dict[str, Reader]:
    """What a conversion makes of its tensors, by full name."""
    made: Any = parts
    for operation in converter.operations:
        made = _apply(operation, made, converter, name, model)
        if made is None:
            return _compute(converter, name, parts, model)
    full_name = name.replace("*.", "0.")
    within = [pattern for pattern in made if pattern in full_name]
    start, _, end = full_name.partition(within[0]) if within else ("", "", "")
    return {start + pattern + end: _one(readers) for pattern, readers in made.items()}


def _apply(operation: Any, parts: Any, converter: WeightConverter, name: str, model: _Shown) -> Any:
    """One operation on readers; None where it is not known how it acts on a slice."""
    sources, targets = converter.source_patterns, converter.target_patterns
    if type(operation) is MergeModulelist:
        return {
            operation.get_target_pattern(len(parts), pattern, targets): Stacked(readers, operation.dim)
            for pattern, readers in parts.items()
        }
    if type(operation) is Concatenate and len(targets) == 1:
        listed = [parts[pattern] for pattern in sources if pattern in parts]
        flat = [reader for readers in listed for reader in (readers if isinstance(readers, list) else [readers])]
        return {targets[0]: Joined(flat, operation.dim)}
    if type(operation) is Transpose and len(parts) == 1:
        reader = _one(next(iter(parts.values())))
        target = operation.get_target_pattern(parts, sources, targets)
        as_is = getattr(operation, "check_dims", False) and reader.shape == model.wanted.get(name)
        return {target: reader if as_is else Transposed(reader, operation.dim0, operation.dim1)}
    return None


def _compute(converter: WeightConverter, name: str, parts: dict[str, list[Reader]], model: _Shown) -> dict[str, Reader]:
    """Readers that let transformers convert whole tensors, one conversion at a time."""

    def run(value_of: Any) -> dict[str, Any]:
        fresh = copy.deepcopy(converter)
        for pattern, readers in parts.items():
            for reader in readers:
                fresh.add_tensor(name, name, pattern, value_of(reader))
        return {target: _one(value) for target, value in fresh.convert(name, model=model, config=model.config).items()}

    shapes = run(lambda reader: torch.empty(reader.shape, dtype=reader.dtype, device="meta"))
    return {
        target: Computed(value.shape, value.dtype, lambda whole, target=target: run(whole)[target])  # type: ignore[misc]
        for target, value in shapes.items()
    }


def _one(value: Any) -> Any:
    return value[0] if isinstance(value, list) else value
