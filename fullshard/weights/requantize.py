"""`Requantizer`: merged weights in the format of the files they come from, one weight at a time.

Weights that the adapter does not change are copied with their bytes. Changed ones are quantized again; a block keeps
its scale where that fits better than a new one. The error that this costs is measured for each weight.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fullshard.quant.shipped import BESIDE
from fullshard.quant.shipped_layers import ATTRIBUTE
from fullshard.quant.stored_files import as_file_tensor, file_names
from fullshard.quant.stored_format import StoredWeight
from fullshard.quant.stored_values import decoded, encode
from fullshard.weights.key_mapping import TensorGroup
from fullshard.weights.merge_layers import MergedLayers
from fullshard.weights.safetensors_files import SafetensorsFiles
from fullshard.weights.slice_reader import Stored


class RoundingError(NamedTuple):
    """What quantizing a weight again changes in it."""

    name: str
    """The weight's name in the model."""
    largest: float
    mean: float


class Requantizer:
    """The packed tensors of a merged model; `merged` has the layers that the adapter changes."""

    def __init__(self, model: Any, source: SafetensorsFiles, merged: MergedLayers):
        self.weights: dict[str, StoredWeight] = getattr(model, ATTRIBUTE)
        self.source, self.merged = source, merged
        self.errors: list[RoundingError] = []
        self.packed: set[str] = set()
        """The names of the packed tensors in files."""

    def form(self, groups: Sequence[TensorGroup], form: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """All tensors that are written, on the meta device."""
        written: dict[str, torch.Tensor] = {}
        for group in groups:
            for name, value in group.convert({member: form[member] for member in group.members}).items():
                weight = self._weight(group, value)
                files = {name: value} if weight is None else self._empty(weight, name)
                written |= {file: torch.empty_like(t) for file, t in files.items()}
                self.packed |= set() if weight is None else set(files)
        beside = {name: (e.shape, e.dtype) for name, e in self.source.entries.items() if re.search(BESIDE, name)}
        self._beside = {name: one for name, one in beside.items() if name not in written}
        return written | {n: torch.empty(shape, dtype=d, device="meta") for n, (shape, d) in self._beside.items()}

    def _weight(self, group: TensorGroup, value: torch.Tensor) -> StoredWeight | None:
        """How a tensor of a group is stored; None if it is dense."""
        stored = next((self.weights[name] for name in group.members if name in self.weights), None)
        if stored is None:
            return None
        return StoredWeight.of(stored.format, tuple(value.shape), stored.joined if value.ndim == 3 else 1)

    def _empty(self, weight: StoredWeight, name: str) -> dict[str, torch.Tensor]:
        entries = {file: self.source.entries[file] for file in file_names(weight, name).values()}
        return {file: torch.empty(e.shape, dtype=e.dtype, device="meta") for file, e in entries.items()}

    def unchanged(self, group: TensorGroup, form: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
        """The files' tensors of packed weights that the adapter does not change; None for others."""
        if not any(name in self.weights for name in group.members):
            return None
        if any(name in self.merged.layers or name in self.merged.replaced for name in group.members):
            return None
        outputs = group.convert({name: form[name] for name in group.members})
        files = [
            file
            for name, value in outputs.items()
            if (weight := self._weight(group, value)) is not None
            for file in file_names(weight, name).values()
        ]
        return {file: self._stored(file) for file in files}

    def pack(self, group: TensorGroup, files: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors of a group as they are stored."""
        packed: dict[str, torch.Tensor] = {}
        largest, total, count = 0.0, 0.0, 0
        for name, value in files.items():
            if (weight := self._weight(group, value)) is None:
                packed[name] = value
                continue
            own, errors = self._pack_one(weight, name, value)
            packed |= own
            largest, total, count = max(largest, errors[0]), total + errors[1], count + value.numel()
        if count:
            self.errors.append(RoundingError(next(iter(group.members)), largest, total / count))
        return packed

    def _pack_one(
        self, weight: StoredWeight, name: str, value: torch.Tensor
    ) -> tuple[dict[str, torch.Tensor], tuple[float, float]]:
        """The file tensors of a weight, and its largest error and the sum of them."""
        names, coding = file_names(weight, name), weight.format.coding
        shapes = weight.part_shapes()
        before = {
            part: self._stored(file).contiguous().view(-1).view(torch.uint8).view(weight.matrices, -1, shapes[part][1])
            for part, file in names.items()
        }
        stacked = value if value.ndim == 3 else value[None]
        stacked = stacked.transpose(1, 2) if weight.format.transposed else stacked
        matrices = stacked.reshape(weight.matrices, weight.rows, weight.columns)
        parts: dict[str, list[torch.Tensor]] = {part: [] for part in names}
        largest = total = 0.0
        for i, matrix in enumerate(matrices):
            own = encode(coding, matrix, {part: one[i] for part, one in before.items()})
            error = (decoded(coding, own, matrix.shape) - matrix.float()).abs()
            largest, total = max(largest, float(error.max())), total + float(error.double().sum())
            for part in parts:
                parts[part].append(own[part])
        form = self._empty(weight, name)
        joined = {
            file: as_file_tensor(weight, part, torch.cat(parts[part])).view(form[file].dtype).view(form[file].shape)
            for part, file in names.items()
        }
        return joined, (largest, total)

    def beside(self) -> dict[str, torch.Tensor]:
        """The tensors beside weights that training does not read: shapes, scales of activations."""
        return {name: self._stored(name) for name in self._beside}

    def _stored(self, name: str) -> torch.Tensor:
        return Stored(self.source, self.source.entries[name])[()]
