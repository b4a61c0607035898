"""Nested Python values as JSON and back, without loss.

Types that JSON lacks (tuples, keys that are not strings, infinities, bytes and others) are written with a tag. The
caller stores the tensors inside a value. Any other type raises an error that names its path in the value: nothing is
pickled.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from fullshard.config.errors import CheckpointError

TAG = "$"
"""The key of the tag in a tagged value."""

PutTensor = Callable[[str, torch.Tensor], dict[str, Any]]
"""Stores a tensor under its path in the value; returns the reference to write to the JSON."""
TakeTensor = Callable[[dict[str, Any]], torch.Tensor]


def encode(value: Any, put: PutTensor, where: str = "") -> Any:
    """`value` as JSON; tensors are passed to `put` with their path inside the value."""
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {TAG: "float", "value": repr(value)}
    if isinstance(value, torch.Tensor):
        return {TAG: "tensor", **put(where, value)}
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            raise _refused(value, where)
        return {TAG: "array", "dtype": value.dtype.str, **put(where, torch.from_numpy(_bytes_of(value))),
                "shape": list(value.shape)}  # fmt: skip
    if isinstance(value, np.generic) and not value.dtype.hasobject:
        return {TAG: "numpy", "dtype": value.dtype.str, "value": base64.b64encode(value.tobytes()).decode()}
    if type(value) is list:
        return [encode(v, put, _below(where, i)) for i, v in enumerate(value)]
    if isinstance(value, tuple) and type(value) in (tuple, torch.Size):
        return {TAG: "tuple", "value": [encode(v, put, _below(where, i)) for i, v in enumerate(value)]}
    if type(value) is dict and all(type(k) is str and k != TAG for k in value):
        return {k: encode(v, put, _below(where, k)) for k, v in value.items()}
    if type(value) in _DICTS.values():
        kind = next(k for k, t in _DICTS.items() if t is type(value))
        pairs = [
            [encode(k, _no_tensor, _below(where, "(key)")), encode(v, put, _below(where, k))] for k, v in value.items()
        ]
        return {TAG: kind, "value": pairs}
    if type(value) in (set, frozenset):
        try:
            members = sorted(value)
        except TypeError:
            members = sorted(value, key=repr)
        return {TAG: type(value).__name__, "value": [encode(v, _no_tensor, where) for v in members]}
    if type(value) is bytes:
        return {TAG: "bytes", "value": base64.b64encode(value).decode()}
    if type(value) is complex:
        return {TAG: "complex", "value": [encode(value.real, put), encode(value.imag, put)]}
    if isinstance(value, torch.dtype):
        return {TAG: "dtype", "value": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {TAG: "device", "value": str(value)}
    raise _refused(value, where)


_DICTS: dict[str, type] = {"dict": dict, "ordered": OrderedDict, "counter": Counter}


def decode(data: Any, take: TakeTensor) -> Any:
    """The value that `encode` was given; `take` returns the tensor of a reference. Raises `CheckpointError` for other
    data."""
    try:
        return _decode(data, take)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RuntimeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"a saved value cannot be read ({type(error).__name__}: {error})") from error


def _decode(data: Any, take: TakeTensor) -> Any:
    if isinstance(data, list):
        return [_decode(v, take) for v in data]
    if not isinstance(data, dict):
        return data
    if TAG not in data:
        return {k: _decode(v, take) for k, v in data.items()}
    kind: str = data[TAG]
    value: Any = data.get("value")
    if kind == "tensor":
        return take(data)
    if kind == "array":
        return take(data).numpy().view(np.dtype(data["dtype"])).reshape(data["shape"]).copy()
    if kind == "numpy":
        return np.frombuffer(base64.b64decode(value), np.dtype(data["dtype"]))[0]
    if kind == "float":
        return float(value)
    if kind == "bytes":
        return base64.b64decode(value)
    if kind == "dtype":
        if not isinstance(dtype := getattr(torch, value), torch.dtype):
            raise TypeError(f"torch.{value} is no dtype")
        return dtype
    if kind == "device":
        return torch.device(value)
    if kind in _DICTS:
        pairs = [(_decode(k, take), _decode(v, take)) for k, v in value]
        return _DICTS[kind](dict(pairs) if kind == "counter" else pairs)
    decoders: dict[str, Callable[[Any], Any]] = {
        "tuple": tuple,
        "set": set,
        "frozenset": frozenset,
        "complex": lambda v: complex(*v),
    }
    if kind not in decoders:
        raise CheckpointError(f"a value has the tag {kind!r}, which this version of fullshard cannot read")
    return decoders[kind](_decode(v, take) for v in value)


def tensor_refs(data: Any) -> list[dict[str, Any]]:
    """The references to tensors inside an encoded value."""
    if isinstance(data, list):
        return [t for v in data for t in tensor_refs(v)]
    if not isinstance(data, dict):
        return []
    if data.get(TAG) in ("tensor", "array"):
        return [data]
    return [t for v in data.values() for t in tensor_refs(v)]


def _bytes_of(value: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8).copy()


def _below(where: str, key: Any) -> str:
    return f"{where}/{key}" if where else str(key)


def _no_tensor(where: str, value: torch.Tensor) -> dict[str, Any]:
    raise _refused(value, where)


def _refused(value: Any, where: str) -> CheckpointError:
    shown = repr(value)
    return CheckpointError(
        f"{where}: a {type(value).__module__}.{type(value).__qualname__} cannot be saved "
        f"({shown if len(shown) < 80 else shown[:77] + '...'}): checkpoints hold tensors and plain values (numbers, "
        f"text, lists, tuples, dicts, sets, bytes, numpy values), and are never pickled. "
        f"Turn it into those in state_dict(), or leave it out"
    )
