"""The file tensors of a weight in a released model's format: their names, what is wrong with them, and their rows.

Parts are split by rows between ranks, each by itself. A rank reads the bytes of its rows of each part and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from fullshard.config.errors import QuantizationError
from fullshard.fsdp.strategy import dtype_name
from fullshard.quant.stored_format import StoredWeight, Tile
from fullshard.quant.stored_values import decode


def file_names(weight: StoredWeight, name: str) -> dict[str, str]:
    """The name of each part's tensor in files; `name` is that of the dense weight."""
    return {part: name + weight.format.suffixes[part] for part in weight.parts}


def file_shapes(weight: StoredWeight, name: str) -> dict[str, tuple[int, ...]]:
    """The shapes of these tensors, by name."""
    shapes = weight.file_shapes()
    return {key: shapes[part] for part, key in file_names(weight, name).items()}


def check_reader(weight: StoredWeight, part: str, reader: Any) -> str | None:
    """What is wrong with a part's tensor; None if it fits."""
    shape, dtypes = weight.file_shapes()[part], weight.format.file_dtypes(part)
    if _form(reader.shape) == _form(shape) and reader.dtype in dtypes:
        return None
    expected = " or ".join(dtype_name(dtype) for dtype in dtypes)
    return (
        f"found {dtype_name(reader.dtype)} {list(reader.shape)}, expected {expected} {list(shape)} for "
        f"{weight.format.name} weights of shape {list(weight.shape)}; check quantization_config in config.json"
    )


def _form(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without dims of size 1, which files write or leave out."""
    return tuple(size for size in shape if size != 1)


def read_rows(weight: StoredWeight, part: str, reader: Any, rows: slice) -> torch.Tensor:
    """Some rows of a part, as bytes."""
    height, width = weight.part_shapes()[part]
    size = width // reader.dtype.itemsize
    start, stop = min(rows.start, height), min(rows.stop, height)
    per = height // max(weight.experts, 1)
    if start >= stop:
        return torch.empty((0, width), dtype=torch.uint8)
    if not weight.experts or len(reader.shape) != 3 or reader.shape[1:] != (per, size):
        return reader.flat(start * size, stop * size).contiguous().view(torch.uint8).view(stop - start, width)
    runs = []
    for i in range(start // per, -(-stop // per)):
        first, last = max(start - i * per, 0), min(stop - i * per, per)
        runs.append(reader[i : i + 1, first:last][0].contiguous().view(torch.uint8))
    return torch.cat(runs)


def read_weight(weight: StoredWeight, readers: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """All parts of a weight, as bytes. `readers` are by part."""
    shapes = weight.part_shapes()
    return {part: read_rows(weight, part, readers[part], slice(0, shapes[part][0])) for part in weight.parts}


def dense_rows(weight: StoredWeight, readers: Mapping[str, Any], matrix: int, rows: slice, dtype: torch.dtype) -> Any:
    """Some rows of one of the matrices, unpacked: [rows, columns]. Only the parts of these rows are read."""
    coding = weight.format.coding
    shapes = coding.shapes(weight.rows, weight.columns)
    block = coding.block[0]
    if coding.zeros:  # several rows of scales share a row of zero points
        rows_read = slice(0, weight.rows)
    elif block:
        rows_read = slice(rows.start // block * block, min(-(-rows.stop // block) * block, weight.rows))
    else:
        rows_read = rows
    tensors = []
    for part in weight.parts:
        height = shapes[part][0]
        span = slice(0, height)
        if part == "packed":
            span = rows_read
        elif part == "scales" and block:
            span = slice(rows_read.start // block, -(-rows_read.stop // block))
        offset = matrix * height
        tensors.append(read_rows(weight, part, readers[part], slice(offset + span.start, offset + span.stop)))
    count = rows_read.stop - rows_read.start
    out = torch.empty((rows.stop - rows.start, weight.columns), dtype=dtype)
    tile = Tile(1, count, weight.columns, start=rows.start - rows_read.start, stop=rows.stop - rows_read.start)
    return decode(coding, tensors, tile, out)


def as_file_tensor(weight: StoredWeight, part: str, value: torch.Tensor) -> torch.Tensor:
    """A part's bytes as the tensor that files store; meta tensors give meta tensors."""
    shape, dtype = weight.file_shapes()[part], weight.format.file_dtypes(part)[0]
    if value.is_meta:
        return torch.empty(shape, dtype=dtype, device="meta")
    if value.numel() != math.prod(shape) * dtype.itemsize:
        raise QuantizationError(f"{part}: {value.numel()} bytes given, {list(shape)} of {dtype_name(dtype)} expected")
    return value.contiguous().view(-1).view(dtype).view(shape)
