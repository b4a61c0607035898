"""From a model's names back to those of its files: what loading converted is converted back, group by group.

Most parameters stand alone. Where files hold several tensors for one parameter, or one for several, those parameters
form a group that is converted together; a group is all that has to be whole at one time.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)


class Reverse:
    """The way back for one model."""

    def __init__(self, model: PreTrainedModel):
        self.model = model
        used = getattr(model, "_weight_conversions", None)
        if used is None:  # never loaded: the usual form of its files, without prefixes that only some files have
            used = [c for c in get_model_conversion_mapping(model, add_legacy=False) if not isinstance(c, PrefixChange)]
        # Conversions of inner models were noted last and are undone first.
        back = [conversion.reverse_transform() for conversion in reversed(used)]
        self.renamings = [c for c in back if isinstance(c, WeightRenaming)]
        self.converters = [c for c in back if isinstance(c, WeightConverter)]
        self.by_pattern = {pattern: c for c in self.converters for pattern in c.source_patterns}

    def groups(self, names: Iterable[str]) -> list[Group]:
        """The names in the groups that are converted together, in the order of the files."""
        found: dict[str, Group] = {}
        for name in sorted(names, key=dot_natural_key):
            renamed, pattern = rename_source_key(name, [], self.converters)
            group = found.setdefault(renamed if pattern else name, Group(self, renamed))
            group.members[name] = pattern
        return list(found.values())

    def renamed(self, name: str) -> str:
        return rename_source_key(name, self.renamings, [])[0]


class Group:
    """Parameters that are converted together."""

    def __init__(self, reverse: Reverse, first: str):
        self.reverse, self.first = reverse, first
        self.members: dict[str, str | None] = {}
        """Each parameter, with the pattern by which a conversion knows it; None if none does."""

    def convert(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors of the files, by name."""
        ((name, pattern), *_) = self.members.items()
        if pattern is None:
            return {self.reverse.renamed(name): values[name]}
        converter = copy.deepcopy(self.reverse.by_pattern[pattern])
        for member, known_by in self.members.items():
            converter.add_tensor(self.first, member, known_by, values[member])
        model: Any = self.reverse.model
        made = converter.convert(self.first, model=model, config=model.config)
        return {self.reverse.renamed(n): v[0] if isinstance(v, list) else v for n, v in made.items()}
