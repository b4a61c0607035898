"""Dtypes of a model's weights: which one it is loaded in, and which parameters keep another."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import build_glob_alternation

from fullshard.fsdp.strategy import dtype_of
from fullshard.weights.safetensors_files import SafetensorsFiles


def choose_dtype(requested: Any, config: Any, source: SafetensorsFiles | None) -> torch.dtype:
    """The dtype to load a model in: the given one, or for None and "auto" the config's, else that of the files, else
    (for a plan without files) torch's default."""
    if requested not in (None, "auto"):
        dtype = dtype_of(requested)
        assert dtype is not None
        return dtype
    stated = dtype_of(getattr(config, "dtype", None))
    if stated is not None:
        return stated
    entries = source.entries.values() if source is not None else ()
    floating = (e.dtype for e in entries if e.dtype.is_floating_point and e.dtype.itemsize > 1)
    return next(floating, torch.get_default_dtype())


def dtypes_kept(model: PreTrainedModel, dtype: torch.dtype, names: Iterable[str]) -> dict[str, torch.dtype]:
    """The parameters that the model keeps in another dtype than `dtype` for precision, with their dtypes."""
    plan = model._get_dtype_plan(dtype)
    if not plan:
        return {}
    pattern, by_group, _ = build_glob_alternation(list(plan))
    matches = {name: pattern.search(name) for name in names}
    return {name: plan[by_group[match.lastgroup]] for name, match in matches.items() if match is not None}
