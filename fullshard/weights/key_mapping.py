"""Mapping between tensor names in files and in a model, in both directions.

transformers defines how the files of each architecture differ from its modules: prefixes, renamed layers, experts that
are stored separately and fused in the model. `find_readers` applies that mapping to names, and turns its conversions of
whole tensors into readers of slices. `ReverseMapping` converts back for export. The names that PEFT adds are removed
first.
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
    PrefixChange,
    Transpose,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from fullshard.lora.language_model import left_out_tensors, with_all_parts
from fullshard.quant.shipped import BESIDE
from fullshard.quant.shipped_layers import stored_weights
from fullshard.quant.stored_files import file_names
from fullshard.quant.stored_format import StoredWeight
from fullshard.weights.safetensors_files import SafetensorsFiles
from fullshard.weights.slice_reader import AsMatrix, Computed, Joined, Stacked, Stored, TensorReader, Transposed
from fullshard.weights.unpacked import unpack

Shapes = Mapping[str, tuple[int, ...]]

_BASE_LAYER = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+|token_adapter)(?=\.)")
"""What PEFT inserts into the names of the layers it wraps."""


@dataclass
class KeyMatch:
    """What the files contain for a model."""

    readers: dict[str, TensorReader] = field(default_factory=dict)
    """By name in the model without adapters."""
    unexpected: list[str] = field(default_factory=list)
    """Tensors in the files that the model does not have, under the names they would have in the model."""
    unconvertible: list[tuple[str, str]] = field(default_factory=list)
    """Tensors whose conversion fails, and why."""
    conversions: list[Any] | None = None
    """The conversions of transformers' mapping that were used; export reverses them."""
    left_out: list[str] = field(default_factory=list)
    """Tensors in the files of the parts that are left out of the model, under their names there."""


def plain_model(model: nn.Module) -> tuple[str, PreTrainedModel | None]:
    """The transformers model inside `model` (which may be a PEFT model), and the prefix of its names."""
    for name, module in model.named_modules():
        if isinstance(module, PreTrainedModel):
            return (f"{name}." if name else ""), module
    return "", None


def plain_name(name: str, prefix: str) -> str:
    """The name of a parameter in the model without adapters."""
    return _BASE_LAYER.sub("", name.removeprefix(prefix))


def find_readers(
    model: PreTrainedModel | None, shapes: Shapes, source: SafetensorsFiles, key_mapping: Any = None
) -> KeyMatch:
    """A reader for every wanted tensor that the files contain, under whatever name."""
    if model is None:
        readers: dict[str, TensorReader] = {
            name: Stored(source, source.entries[name]) for name in shapes if name in source.entries
        }
        return KeyMatch(readers, [name for name in source.entries if name not in shapes])
    away = {name: tuple(t.shape) for name, t in left_out_tensors(model).items()}
    packed = {plain_name(name, ""): weight for name, weight in stored_weights(model).items()}
    with with_all_parts(model):
        conversions = get_model_conversion_mapping(model, key_mapping)
        direct, fused, lost = _assign(model, {**shapes, **away}, source, conversions, packed)
    result = KeyMatch()
    for name, entry_name in direct.items():
        if name in away:
            result.left_out.append(entry_name)
        else:
            result.readers[name] = Stored(source, source.entries[entry_name])
    wanted = {*shapes, *(file for name, weight in packed.items() for file in file_names(weight, name).values())}
    for (name, suffix), (converter, parts) in fused.items():
        if name in away:
            result.left_out += [entry for entries in parts.values() for entry in entries]
            continue
        stored: dict[str, list[TensorReader]] = {
            pattern: [_matrix(Stored(source, source.entries[e]), name in packed, suffix) for e in entries]
            for pattern, entries in parts.items()
        }
        try:
            outputs = _convert(converter, name, stored, _PlainShapes(model, shapes))
            outputs = {target + suffix: reader for target, reader in outputs.items()}
        except (ValueError, RuntimeError, IndexError) as error:
            result.unconvertible.append((name, str(error)))
            continue
        result.readers.update({target: reader for target, reader in outputs.items() if target in wanted})
        result.unexpected += [target for target in outputs if target not in wanted]
    result.unconvertible += unpack(model, result.readers)
    ignored = [*_ignored_when_unexpected(model), *([BESIDE] if packed else [])]
    result.unexpected = _without(result.unexpected + lost, ignored)
    result.conversions = [conversion for conversion in conversions if conversion.was_used()]
    return result


def may_be_missing(model: PreTrainedModel | None, names: Iterable[str]) -> set[str]:
    """The names that may be missing in files according to the model class."""
    patterns = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    return {name for name in names if any(re.search(pattern, name) for pattern in patterns)}


def _ignored_when_unexpected(model: PreTrainedModel) -> list[str]:
    patterns = list(model._keys_to_ignore_on_load_unexpected or ())
    # Older files contain buffers that are now computed.
    for buffer, pattern in (("rotary_emb.inv_freq", r"rotary_emb\.inv_freq"), ("position_ids", r"(^|\.)position_ids$")):
        if any(name.endswith(buffer) for name, _ in model.named_buffers()):
            patterns.append(pattern)
    return patterns


def _without(names: list[str], patterns: list[str]) -> list[str]:
    return [name for name in names if not any(re.search(pattern, name) for pattern in patterns)]


Fused = dict[tuple[str, str], tuple[WeightConverter, dict[str, list[str]]]]
"""By the name of the parameter, and what names of parts of a quantized weight end with behind it."""


def _matrix(reader: TensorReader, packed: bool, suffix: str) -> TensorReader:
    """A part of a quantized weight as a matrix, which conversions stack and join as they do dense ones."""
    return AsMatrix(reader, suffix == "_g_idx") if packed and len(reader.shape) < 2 else reader


def _assign(
    model: PreTrainedModel, shapes: Shapes, source: SafetensorsFiles, conversions: list[Any],
    packed: Mapping[str, StoredWeight],
) -> tuple[dict[str, str], Fused, list[str]]:  # fmt: skip
    """Assign each file tensor to a parameter (direct), to a conversion (fused), or to neither (unexpected). A part of a
    quantized weight (`packed`) has the name of the dense weight and a suffix."""
    renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
    converters = [c for c in conversions if isinstance(c, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    prefix, known = model.base_model_prefix, {**{name: weight.shape for name, weight in packed.items()}, **shapes}
    suffixes = sorted({s for w in packed.values() for s in w.format.suffixes.values() if s}, key=len, reverse=True)
    direct: dict[str, str] = {}
    fused: Fused = {}
    lost = []
    for entry in sorted(source.entries, key=dot_natural_key):
        name = ""
        for suffix in (*(s for s in suffixes if entry.endswith(s)), ""):
            dense = entry.removesuffix(suffix) if suffix else entry
            name, pattern = rename_source_key(dense, renamings, converters, prefix, known)
            if name not in known and dense in known:  # the file already uses the model's name, except for a prefix
                name, pattern = rename_source_key(dense, [], [], prefix, known)
            if not suffix or name in packed:
                break
        if name not in known:
            lost.append(name)
        elif pattern is None:
            direct[name + suffix] = entry
        else:
            _, parts = fused.setdefault((name, suffix), (copy.deepcopy(by_pattern[pattern]), defaultdict(list)))
            parts[pattern].append(entry)
    return direct, fused, lost


class _PlainShapes:
    """A model for transformers' conversions: full shapes under plain names, regardless of wrappers."""

    def __init__(self, model: PreTrainedModel, shapes: Shapes):
        self.model, self.shapes = model, shapes

    def get_parameter(self, name: str) -> torch.Tensor:
        shape = self.shapes[name] if name in self.shapes else self.model.get_parameter(name).shape
        return torch.empty(shape, device="meta")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def converted_readers(
    converter: WeightConverter, name: str, parts: dict[str, list[TensorReader]], model: PreTrainedModel
) -> dict[str, TensorReader]:
    """Readers for the results of one conversion of a model without wrappers, by full name."""
    return _convert(converter, name, parts, _PlainShapes(model, {name: tuple(model.get_parameter(name).shape)}))


def _convert(
    converter: WeightConverter, name: str, parts: dict[str, list[TensorReader]], model: _PlainShapes
) -> dict[str, TensorReader]:
    """Readers for the results of a conversion, by full name."""
    outputs: Any = parts
    for operation in converter.operations:
        outputs = _apply(operation, outputs, converter, name, model)
        if outputs is None:
            return _compute(converter, name, parts, model)
    full_name = name.replace("*.", "0.")
    within = [pattern for pattern in outputs if pattern in full_name]
    start, _, end = full_name.partition(within[0]) if within else ("", "", "")
    return {start + pattern + end: _one(readers) for pattern, readers in outputs.items()}


def _apply(operation: Any, parts: Any, converter: WeightConverter, name: str, model: _PlainShapes) -> Any:
    """Apply one operation to readers; None if it cannot be applied slice by slice."""
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
        as_is = getattr(operation, "check_dims", False) and reader.shape == model.shapes.get(name)
        return {target: reader if as_is else Transposed(reader, operation.dim0, operation.dim1)}
    return None


def _compute(
    converter: WeightConverter, name: str, parts: dict[str, list[TensorReader]], model: _PlainShapes
) -> dict[str, TensorReader]:
    """Readers that run the conversion on whole tensors, with transformers' code."""

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


# --- back to the files' names -----------------------------------------------------------------------------------------


class ReverseMapping:
    """Conversion of a model's tensors back to the names and form of its files.

    Most tensors are converted alone. If files store several tensors for one parameter, or one for several, these
    parameters form a group that is converted together; only one group has to be gathered at a time.
    """

    def __init__(self, model: PreTrainedModel):
        self.model = model
        used = getattr(model, "_weight_conversions", None)
        if used is None:  # not loaded from files: the usual form, without prefixes that only some files have
            used = [c for c in get_model_conversion_mapping(model, add_legacy=False) if not isinstance(c, PrefixChange)]
        # Conversions of inner models come last and are reversed first.
        reverse = [conversion.reverse_transform() for conversion in reversed(used)]
        self.renamings = [c for c in reverse if isinstance(c, WeightRenaming)]
        self.converters = [c for c in reverse if isinstance(c, WeightConverter)]
        self.by_pattern = {pattern: c for c in self.converters for pattern in c.source_patterns}

    def groups(self, names: Iterable[str]) -> list[TensorGroup]:
        """The groups of names that are converted together, in file order."""
        by_name: dict[str, TensorGroup] = {}
        for name in sorted(names, key=dot_natural_key):
            renamed, pattern = rename_source_key(name, [], self.converters)
            group = by_name.setdefault(renamed if pattern else name, TensorGroup(self, renamed))
            group.members[name] = pattern
        return list(by_name.values())

    def renamed(self, name: str) -> str:
        """The file name of a tensor that is not converted."""
        return rename_source_key(name, self.renamings, [])[0]


class TensorGroup:
    """Parameters that are converted together."""

    def __init__(self, reverse: ReverseMapping, first: str):
        self.reverse, self.first = reverse, first
        self.members: dict[str, str | None] = {}
        """Each parameter and the source pattern of its conversion; None if it is not converted."""

    def convert(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The file tensors of the group, by name."""
        ((name, pattern), *_) = self.members.items()
        if pattern is None:
            return {self.reverse.renamed(name): values[name]}
        converter = copy.deepcopy(self.reverse.by_pattern[pattern])
        for member, member_pattern in self.members.items():
            converter.add_tensor(self.first, member, member_pattern, values[member])
        model: Any = self.reverse.model
        outputs = converter.convert(self.first, model=model, config=model.config)
        return {self.reverse.renamed(n): v[0] if isinstance(v, list) else v for n, v in outputs.items()}
