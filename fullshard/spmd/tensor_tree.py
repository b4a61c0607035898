"""Tensors inside the inputs and outputs of modules: tuples, dicts, dataclasses, model outputs, caches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from fullshard.device.torch_private import tree_map

DEPTH = 6
"""How deep objects are searched; key-value caches hold tensors three levels down."""


_WITHOUT_TENSORS = (str, bytes, int, float, type, nn.Module, torch.dtype)
_SEQUENCES = (tuple, list, set, frozenset)


def tensors_in(value: Any, *, objects: bool = True) -> list[torch.Tensor]:
    """Every tensor in `value`. With `objects`, attributes of objects of unknown classes are searched too, but never
    those of modules."""
    tensors: list[torch.Tensor] = []
    _collect(value, DEPTH, objects, tensors)
    return tensors


def _collect(value: Any, depth: int, objects: bool, tensors: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return
    if value is None or depth == 0 or isinstance(value, _WITHOUT_TENSORS):
        return
    if isinstance(value, _SEQUENCES):
        inside: Iterable[Any] = value
    elif isinstance(value, Mapping):
        inside = value.values()
    elif objects and hasattr(value, "__dict__") and not callable(value):
        inside = list(vars(value).values())
    else:
        return
    for inner in inside:
        _collect(inner, depth - 1, objects, tensors)


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """The same structure with `change` applied to every tensor, except inside containers that torch does not know."""

    def leaf(inner: Any) -> Any:
        if isinstance(inner, torch.Tensor):
            return change(inner)
        if dataclasses.is_dataclass(inner) and not isinstance(inner, type):
            fields = {f.name: map_tensors(change, getattr(inner, f.name)) for f in dataclasses.fields(inner) if f.init}
            return dataclasses.replace(inner, **fields)
        return inner

    return tree_map(leaf, value)


def cast_tensors(values: Any, dtype: torch.dtype | None) -> Any:
    """The same structure with floating-point tensors cast to `dtype`; unchanged if it is None."""
    if dtype is None or all(t.dtype == dtype or not t.is_floating_point() for t in tensors_in(values)):
        return values
    return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, values)
