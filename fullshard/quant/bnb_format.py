"""bitsandbytes' file format: converts a 4-bit weight to the named tensors in safetensors files, and back.

A weight `q_proj.weight` is stored as `q_proj.weight` (packed), `q_proj.weight.absmax`, `.quant_map`, with double
quantization also `.nested_absmax` and `.nested_quant_map`, and `.quant_state.bitsandbytes__nf4`: the metadata, as JSON
encoded in a uint8 tensor.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from fullshard.config.errors import QuantizationError
from fullshard.fsdp.strategy import dtype_name, dtype_of
from fullshard.quant import codebooks
from fullshard.quant.nf4 import NestedState, QuantState

STATE = "quant_state.bitsandbytes__"
"""Prefix of the metadata tensor's key, after the weight's name; the quantization type follows."""
STATE_LENGTH = 256
"""Fixed length of the metadata in bytes, longer than any JSON; used where the file layout is written before values."""


def is_quantized(keys: Iterable[str], name: str) -> bool:
    """Whether a file with these keys stores the weight `name` in 4 bits."""
    names = set(keys)
    return any(f"{name}.{STATE}{kind}" in names for kind in codebooks.QUANT_TYPES)


def keys_of(name: str, quant_type: str, double: bool) -> list[str]:
    """The file keys of the weight `name`."""
    ends = ["absmax", "quant_map", *(["nested_absmax", "nested_quant_map"] if double else []), STATE + quant_type]
    return [name, *(f"{name}.{end}" for end in ends)]


def to_tensors(
    packed: torch.Tensor, state: QuantState, name: str = "weight", length: int = 0
) -> dict[str, torch.Tensor]:
    """Convert a 4-bit weight to tensors under bitsandbytes' keys.

    The JSON is padded with spaces to `length` bytes. Meta tensors give meta tensors.
    """
    metadata: dict[str, Any] = {
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
        metadata |= {
            "nested_blocksize": state.nested.blocksize,
            "nested_dtype": dtype_name(state.nested.dtype),
            "nested_offset": 0.0 if state.offset.is_meta else state.offset.item(),
        }
    text = torch.tensor(list(json.dumps(metadata).ljust(length).encode()), dtype=torch.uint8)
    return tensors | {f"{name}.{STATE}{state.quant_type}": text}


def from_tensors(tensors: Mapping[str, torch.Tensor], name: str = "weight") -> tuple[torch.Tensor, QuantState]:
    """Read the 4-bit weight `name` from tensors under bitsandbytes' keys."""
    kinds = [kind for kind in codebooks.QUANT_TYPES if f"{name}.{STATE}{kind}" in tensors]
    if not kinds:
        raise QuantizationError(f"no 4-bit weight {name!r} found: {name}.{STATE}nf4 (or fp4) is missing")
    metadata = read_state(tensors[f"{name}.{STATE}{kinds[0]}"], name)
    missing = [key for key in keys_of(name, kinds[0], "nested_offset" in metadata) if key not in tensors]
    if missing:
        raise QuantizationError(f"the 4-bit weight {name!r} is incomplete: {', '.join(missing)} missing")
    quant_map = tensors[f"{name}.quant_map"]
    check_map(quant_map, codebooks.values(metadata["quant_type"], quant_map.device), f"{name}.quant_map")
    device = tensors[f"{name}.absmax"].device
    offset, inner = None, None
    if "nested_offset" in metadata:
        offset = torch.tensor(float(metadata["nested_offset"]), dtype=torch.float32, device=device)
        inner = NestedState(
            tensors[f"{name}.nested_absmax"], tensors[f"{name}.nested_quant_map"], metadata["nested_blocksize"],
            _dtype(metadata["nested_dtype"]),
        )  # fmt: skip
    return tensors[name], QuantState(
        tensors[f"{name}.absmax"], torch.Size(metadata["shape"]), _dtype(metadata["dtype"]), metadata["blocksize"],
        metadata["quant_type"], offset, inner,
    )  # fmt: skip


def check_map(stored: torch.Tensor, known: torch.Tensor, name: str) -> None:
    """Raise `QuantizationError` if a file's table of values differs from bitsandbytes'."""
    if not torch.equal(stored.float(), known):
        raise QuantizationError(
            f"{name} differs from bitsandbytes' table (found {stored[0]:g} to {stored[-1]:g}, expected {known[0]:g} to "
            f"{known[-1]:g}); this weight cannot be read"
        )


def read_state(text: torch.Tensor, name: str = "weight") -> dict[str, Any]:
    """Parse and check the metadata: quant_type, blocksize, dtype, shape and, if nested, three more fields."""
    try:
        metadata = json.loads(bytes(text.cpu().tolist()))
        codebooks.check_format(metadata["quant_type"], metadata["blocksize"])
        _dtype(metadata["dtype"])
        torch.Size(metadata["shape"])
    except (ValueError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise QuantizationError(f"the quantization state of {name!r} cannot be read: {error}") from error
    return metadata


def _dtype(name: str) -> torch.dtype:
    dtype = dtype_of(name)
    assert dtype is not None
    return dtype
