"""bitsandbytes' file keys: a 4-bit weight as named tensors, as it lies in safetensors files, and back.

For a weight `q_proj.weight` those are `q_proj.weight` (packed), `q_proj.weight.absmax`, `.quant_map`, with double
quantisation `.nested_absmax` and `.nested_quant_map`, and `.quant_state.bitsandbytes__nf4`: the rest, as JSON in bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from fullshard.errors import QuantizationError
from fullshard.fsdp.strategy import dtype_name, dtype_of
from fullshard.quant import codebooks
from fullshard.quant.nf4 import NestedState, QuantState

STATE = "quant_state.bitsandbytes__"
"""What the key of the JSON begins with, after the weight's name; the type follows."""


STATE_LENGTH = 256
"""Bytes of that JSON in files whose layout must be known before the values are: more than any of them takes."""


def is_quantized(keys: Iterable[str], name: str) -> bool:
    """Whether a file with these keys holds the weight `name` in 4 bits."""
    found = set(keys)
    return any(f"{name}.{STATE}{kind}" in found for kind in codebooks.QUANT_TYPES)


def keys_of(name: str, quant_type: str, double: bool) -> list[str]:
    """The keys under which the weight `name` lies in a file."""
    ends = ["absmax", "quant_map", *(["nested_absmax", "nested_quant_map"] if double else []), STATE + quant_type]
    return [name, *(f"{name}.{end}" for end in ends)]


def to_tensors(
    packed: torch.Tensor, state: QuantState, name: str = "weight", length: int = 0
) -> dict[str, torch.Tensor]:
    """A 4-bit weight under bitsandbytes' keys.

    The JSON is filled up with blanks to `length`. On the meta device the result has only shapes and dtypes.
    """
    rest: dict[str, Any] = {
        "quant_type": state.quant_type,
        "blocksize": state.blocksize,
        "dtype": dtype_name(state.dtype),
        "shape": list(state.shape),
    }
    tensors = {
        name: packed,
        f"{name}.absmax": state.absmax,
        f"{name}.quant_map": codebooks.values(state.quant_type, packed.device).clone(),
    }
    if state.nested is not None:
        assert state.offset is not None
        tensors[f"{name}.nested_absmax"] = state.nested.absmax
        tensors[f"{name}.nested_quant_map"] = state.nested.code.clone()
        rest |= {
            "nested_blocksize": state.nested.blocksize,
            "nested_dtype": dtype_name(state.nested.dtype),
            "nested_offset": 0.0 if state.offset.is_meta else state.offset.item(),
        }
    text = torch.tensor(list(json.dumps(rest).ljust(length).encode()), dtype=torch.uint8)
    return tensors | {f"{name}.{STATE}{state.quant_type}": text}


def from_tensors(tensors: Mapping[str, torch.Tensor], name: str = "weight") -> tuple[torch.Tensor, QuantState]:
    """The 4-bit weight `name` from tensors under bitsandbytes' keys."""
    kinds = [kind for kind in codebooks.QUANT_TYPES if f"{name}.{STATE}{kind}" in tensors]
    if not kinds:
        raise QuantizationError(f"no 4-bit weight {name!r} here: {name}.{STATE}nf4 (or fp4) is missing")
    rest = read_state(tensors[f"{name}.{STATE}{kinds[0]}"], name)
    missing = [key for key in keys_of(name, kinds[0], "nested_offset" in rest) if key not in tensors]
    if missing:
        raise QuantizationError(f"the 4-bit weight {name!r} is not complete: {', '.join(missing)} missing")
    quant_map = tensors[f"{name}.quant_map"]
    check_map(quant_map, codebooks.values(rest["quant_type"], quant_map.device), f"{name}.quant_map")
    device = tensors[f"{name}.absmax"].device
    offset, inner = None, None
    if "nested_offset" in rest:
        offset = torch.tensor(float(rest["nested_offset"]), dtype=torch.float32, device=device)
        inner = NestedState(
            tensors[f"{name}.nested_absmax"], tensors[f"{name}.nested_quant_map"], rest["nested_blocksize"],
            _dtype(rest["nested_dtype"]),
        )  # fmt: skip
    return tensors[name], QuantState(
        tensors[f"{name}.absmax"], torch.Size(rest["shape"]), _dtype(rest["dtype"]), rest["blocksize"],
        rest["quant_type"], offset, inner,
    )  # fmt: skip


def check_map(found: torch.Tensor, known: torch.Tensor, name: str) -> None:
    """Refuse codes that stand for other values than they usually do."""
    if not torch.equal(found.float(), known):
        raise QuantizationError(
            f"{name} holds other values than bitsandbytes' (from {found[0]:g} to {found[-1]:g}, expected "
            f"{known[0]:g} to {known[-1]:g}); such a weight cannot be read"
        )


def read_state(text: torch.Tensor, name: str = "weight") -> dict[str, Any]:
    """What the JSON of a 4-bit weight says: quant_type, blocksize, dtype, shape and, if nested, three more."""
    try:
        rest = json.loads(bytes(text.cpu().tolist()))
        codebooks.check(rest["quant_type"], rest["blocksize"])
        _dtype(rest["dtype"])
        torch.Size(rest["shape"])
    except (ValueError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise QuantizationError(f"the quantisation state of {name!r} cannot be read: {error}") from error
    return rest


def _dtype(name: str) -> torch.dtype:
    found = dtype_of(name)
    assert found is not None
    return found
