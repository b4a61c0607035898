"""Which dtype a model's weights have, when it is loaded and when it is written."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import build_glob_alternation


def dtypes_kept(model: PreTrainedModel, dtype: torch.dtype, names: Iterable[str]) -> dict[str, torch.dtype]:
    """The parameters that a model keeps in another dtype than the one asked for, for the sake of precision."""
    plan = model._get_dtype_plan(dtype)
    if not plan:
        return {}
    pattern, by_group, _ = build_glob_alternation(list(plan))
    found = {name: pattern.search(name) for name in names}
    return {name: plan[by_group[match.lastgroup]] for name, match in found.items() if match is not None}
