"""How released models store quantized weights, as data: one `StoredFormat` per format.

A format says which tensors make a weight, what their shapes are for a weight of some shape, and how a value is
computed: `(code − zero point) · scale`, where a rectangle of values shares a scale. Reading, sharding, products, the
planner and export use these descriptions; `stored_values.py` computes with them. A new format is a row in `shipped.py`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch


class Codes(NamedTuple):
    """How values are stored as codes."""

    bits: int
    dtype: torch.dtype
    """The dtype of the tensor in files. Several codes share an element, the first in its low bits."""


CODES = {
    "e4m3": Codes(8, torch.float8_e4m3fn),
    "int8": Codes(8, torch.int8),
    "e2m1": Codes(4, torch.uint8),
    **{f"uint{bits}": Codes(bits, torch.int32) for bits in (2, 4, 8)},
}
"""The kinds of codes: 8-bit floats and integers, 4-bit floats in bytes, and integers with an offset in 32-bit words."""

SCALES: dict[torch.dtype, str] = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float8_e4m3fn: "e4m3",
    torch.uint8: "exponent",
    torch.float8_e8m0fnu: "exponent",
}
"""How scales are stored, by their dtype in files: as floats, or as exponents of 2 with an offset of 127."""
_SCALE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "e4m3": 1, "exponent": 1}

PARTS = ("packed", "scales", "divisor", "zeros", "order")
"""The parts of a weight: codes, scales, what all scales are divided by, zero points, and each column's group."""


@dataclass(frozen=True)
class Coding:
    """How values are computed from the parts of a weight [rows, columns]."""

    codes: str
    """A key of `CODES`."""
    block: tuple[int, int]
    """The rows and columns that share a scale; 0 for all."""
    scale: str = "float32"
    """How scales are stored, a value of `SCALES`."""
    divisor: bool = False
    """Whether scales are divided by one fp32 number."""
    zeros: bool = False
    """Whether each scale has a zero point, packed along the rows."""
    order: bool = False
    """Whether a tensor says which group of columns each column belongs to; otherwise groups are neighbors."""
    rounded: str = ""
    """The dtype to which values are rounded, whatever the dtype of the product; empty for none."""

    def __str__(self) -> str:
        flags = "".join(part[0] for part in PARTS[2:] if getattr(self, part))
        return f"{self.codes}:{self.block[0]}x{self.block[1]}:{self.scale}:{flags}:{self.rounded}"

    @staticmethod
    @functools.cache
    def parse(codes: str, block: str, scale: str, flags: str, rounded: str) -> Coding:
        """The coding of a string, split at colons."""
        rows, _, columns = block.partition("x")
        return Coding(codes, (int(rows), int(columns)), scale, "d" in flags, "z" in flags, "o" in flags, rounded)

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return CODES[self.codes].bits

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts that the weight has."""
        return tuple(part for part in PARTS if part in ("packed", "scales") or getattr(self, part))

    def grid(self, rows: int, columns: int) -> tuple[int, int]:
        """The number of scales along each dim; the last ones may cover less."""
        (height, width) = self.block
        return (-(-rows // height) if height else 1), (-(-columns // width) if width else 1)

    def shapes(self, rows: int, columns: int) -> dict[str, tuple[int, int]]:
        """The shape of each part in bytes."""
        down, across = self.grid(rows, columns)
        everything = {
            "packed": (rows, _elements(columns, self.codes) * CODES[self.codes].dtype.itemsize),
            "scales": (down, across * _SCALE_BYTES[self.scale]),
            "divisor": (1, 4),
            "zeros": (_elements(down, self.codes), across * 4),
            "order": (1, columns * 4),
        }
        return {part: everything[part] for part in self.parts}


def _elements(count: int, codes: str) -> int:
    """The number of elements of a tensor with so many codes."""
    bits, dtype = CODES[codes]
    return -(-count * bits // (8 * dtype.itemsize))


@dataclass(frozen=True)
class StoredFormat:
    """A format of weights in files."""

    name: str
    """What plans, logs and errors call it."""
    coding: Coding
    suffixes: Mapping[str, str] = field(hash=False)
    """What the names of the tensors in files end with, behind the name of the dense weight, by part."""
    transposed: bool = False
    """Whether the model's parameter is the transpose of the matrix in the files."""
    blocked: bool = False
    """Whether codes have a dim of their own for the values that share a scale."""

    def file_shape(self, part: str, rows: int, columns: int) -> tuple[int, ...]:
        """The shape of a part's tensor in files, for one matrix."""
        if part == "packed" and self.blocked:
            return rows, columns // self.coding.block[1], self.coding.block[1] * self.coding.bits // 8
        height, width = self.coding.shapes(rows, columns)[part]
        return height, width // self.file_dtypes(part)[0].itemsize

    def file_dtypes(self, part: str) -> tuple[torch.dtype, ...]:
        """The dtypes that a part's tensor may have in files."""
        if part == "scales":
            return tuple(dtype for dtype, kind in SCALES.items() if kind == self.coding.scale)
        if part == "divisor":
            return (torch.float32,)
        return (CODES[self.coding.codes].dtype if part == "packed" else torch.int32,)

    @property
    def bits(self) -> float:
        """Bits of a stored value, its share of a scale included, in a large matrix."""
        height, width = self.coding.block
        shared = height * width if height and width else math.inf
        return self.coding.bits + 8 * _SCALE_BYTES[self.coding.scale] / shared


@dataclass(frozen=True)
class StoredWeight:
    """A weight in a format: a matrix, or a stack of matrices with one for each expert.

    Several matrices of an expert may be joined along their rows (gate and up). Each has blocks of its own then.
    """

    format: StoredFormat
    rows: int
    """Of one matrix."""
    columns: int
    joined: int = 1
    """How many matrices an expert has."""
    experts: int = 0
    """The number of experts; 0 for the weight of a linear layer."""

    @classmethod
    def of(cls, form: StoredFormat, shape: tuple[int, ...], joined: int = 1) -> StoredWeight:
        """The weight of a parameter with this shape in the model."""
        *experts, rows, columns = shape if not form.transposed else (*shape[:-2], shape[-1], shape[-2])
        return cls(form, rows // joined, columns, joined, *experts)

    @property
    def matrices(self) -> int:
        """The number of matrices."""
        return max(self.experts, 1) * self.joined

    @property
    def stack(self) -> tuple[int, int, int]:
        """(experts, rows, columns) as they are stored."""
        return max(self.experts, 1), self.joined * self.rows, self.columns

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the model's parameter."""
        matrix = self.stack[:0:-1] if self.format.transposed else self.stack[1:]
        return (self.experts, *matrix) if self.experts else matrix

    @property
    def form(self) -> str:
        """The weight as `base_product` and `grouped_product` name it."""
        experts = max(self.experts, 1)
        return f"stored:{self.format.coding}:{experts}x{self.joined}x{self.rows}x{self.columns}"

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of its parts."""
        return self.format.coding.parts

    def part_shapes(self) -> dict[str, tuple[int, int]]:
        """The shape of each part in bytes, of all matrices one below the other."""
        shapes = self.format.coding.shapes(self.rows, self.columns)
        return {part: (self.matrices * height, width) for part, (height, width) in shapes.items()}

    def file_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each part's tensor in files, without dims of size 1 where files may leave them out."""
        shapes = {}
        for part in self.parts:
            height, *rest = self.format.file_shape(part, self.rows, self.columns)
            height *= self.joined
            shapes[part] = (self.experts, height, *rest) if self.experts else (height, *rest)
        return shapes


# --- what torch and the kernel compute with ---------------------------------------------------------------------------

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The values of 4-bit floats without sign."""


@functools.cache
def table(codes: str, device: torch.device) -> torch.Tensor:
    """The value of each code, fp32. "exponent" is the table of scales that are powers of 2."""
    byte = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    if codes == "exponent":
        values = torch.tensor([2.0 ** (i - 127) for i in range(255)] + [math.inf], dtype=torch.float64).float()
    elif codes == "e4m3":
        values = byte.view(torch.float8_e4m3fn).float()
    elif codes == "e2m1":
        values = torch.tensor([*E2M1, *(-v for v in E2M1)])
    elif codes == "int8":
        values = byte.view(torch.int8).float()
    else:
        bits = CODES[codes].bits
        values = torch.arange(2**bits, dtype=torch.float32) - 2 ** (bits - 1)
    return values.to(device)


class Tile(NamedTuple):
    """Which part of a stack of matrices [matrices, rows, columns] is unpacked."""

    matrices: int
    rows: int
    columns: int
    first: int = 0
    """The first matrix."""
    step: int = 1
    """Every so many matrices are unpacked, from the first on."""
    start: int = 0
    """The first row of each."""
    stop: int = -1
    """The row behind the last of each; -1 for all."""

    @property
    def height(self) -> int:
        """The number of rows of each matrix."""
        return (self.rows if self.stop < 0 else self.stop) - self.start

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of the values."""
        return len(range(self.first, self.matrices, self.step)), self.height, self.columns


def part_as(part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bytes as another dtype; they are copied where they do not begin at its alignment."""
    aligned = part.is_contiguous() and part.storage_offset() % dtype.itemsize == 0 and not part.data_ptr() % 4
    return (part if aligned else part.clone(memory_format=torch.contiguous_format)).view(dtype)
