"""`StoredExperts`: a module with fused expert weights that are kept as a released model stores them.

Files store the experts of a weight together, or one by one; `weights/key_mapping.py` joins these, codes and scales. A
tile of the stack is unpacked for each product, never a whole layer of large experts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import nn

from fullshard.device.torch_private import parameters_of
from fullshard.quant import stored_files
from fullshard.quant.grouped_product import Stack
from fullshard.quant.packed_experts import PackedExperts, parameter_name
from fullshard.quant.stored_format import PARTS, StoredWeight


class StoredExperts(PackedExperts):
    """A module with fused expert weights in the format of a released model's files."""

    PARTS = PARTS
    stored: dict[str, StoredWeight]
    """The weights by name."""
    forms: dict[str, str]
    """What `grouped_product` calls them, but for the number of experts."""
    rows: dict[str, int]
    """The rows of codes that an expert has in each."""

    @staticmethod
    def of(module: nn.Module, stored: Mapping[str, StoredWeight]) -> StoredExperts:
        """Convert a module on the meta device in place."""
        device = next(parameters_of(module)[name].device for name in stored)
        experts: StoredExperts = StoredExperts._convert(module, list(stored), None)
        experts.stored, experts.forms = dict(stored), {name: weight.form for name, weight in stored.items()}
        experts.rows = {name: weight.joined * weight.rows for name, weight in stored.items()}
        for name, weight in stored.items():
            shapes = weight.part_shapes()
            experts._set_parts(
                name, {p: torch.zeros(shape, dtype=torch.uint8, device=device) for p, shape in shapes.items()}
            )
        return experts

    # --- the weights --------------------------------------------------------------------------------------------------

    @property
    def format(self) -> str:
        return next(iter(self.stored.values())).format.name

    def stored_weights(self) -> dict[str, StoredWeight]:
        """The weights in files, by name."""
        return self.stored

    def stored_form(self, name: str) -> tuple[str, int]:
        """The format of a parameter, and how many weights it has the codes of (`fsdp/plan_model.py`)."""
        codes = math.prod(self.fused[name]) if name in self.fused else 0
        return (self.format, codes) if name in self.made_parameters() else ("", 0)

    def part_shapes(self, name: str) -> dict[str, tuple[int, int]]:
        return self.stored[name].part_shapes()

    def stack_of(self, name: str, parts: Mapping[str, torch.Tensor]) -> Stack:
        count = len(parts["packed"]) // self.rows[name]  # all experts, or those of this rank
        kind, _, sizes = self.forms[name].rpartition(":")
        return Stack(f"{kind}:{count}x{sizes.partition('x')[2]}", [parts[part] for part in PARTS if part in parts])

    def is_swapped(self, name: str) -> bool:
        return self.stored[name].format.transposed

    # --- loading: the protocol `KeepsFiles` of `weights/transforms.py` ------------------------------------------------

    def file_tensors(self) -> dict[str, tuple[int, ...]]:
        """The tensors that files store, those of single experts stacked."""
        return {
            key: shape
            for name, weight in self.stored.items()
            for key, shape in stored_files.file_shapes(weight, name).items()
        }

    def part_files(self) -> dict[str, tuple[StoredWeight, str, str]]:
        """The weight, part and file tensor of each parameter that is read as bytes."""
        return {
            parameter_name(name, part): (weight, part, file)
            for name, weight in self.stored.items()
            for part, file in stored_files.file_names(weight, name).items()
        }

    def as_files(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors that files store, from the whole parts."""
        files = self.part_files().items()
        return {file: stored_files.as_file_tensor(weight, part, values[own]) for own, (weight, part, file) in files}
