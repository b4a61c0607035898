"""Number formats: the sixteen NF4 and FP4 values, and the 256 values of the 8-bit format for double quantization.

Tables only, cached per device. They equal bitsandbytes' bit for bit, so files can be exchanged.
"""

from __future__ import annotations

from functools import cache

import torch

from fullshard.config.errors import QuantizationError

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Quantiles of a normal distribution, ascending."""

_FP4_TWELFTHS = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)
"""Magnitudes (in twelfths) by the low three bits of an FP4 code; the fourth bit is the sign."""

_FP4_ASCENDING = (11, 10, 13, 12, 15, 14, 9, 0, 8, 1, 6, 7, 4, 5, 2, 3)
"""FP4 codes sorted by value. Two codes are zero; which one a tiny value gets follows bitsandbytes."""

QUANT_TYPES = ("nf4", "fp4")
BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
NESTED_BLOCK = 256
"""Block size of double quantization: how many scales share one second-level scale."""
NESTED_GRID = 65535
"""Number of steps from -1 to 1 on the grid that 8-bit codes are looked up on."""
SMALLEST_SCALE = 1e-38
"""Lower bound for a block's scale in divisions; a block of zeros has the scale 0."""


def check_format(quant_type: str, blocksize: int) -> None:
    """Raise `QuantizationError` for an unknown type or block size."""
    if quant_type not in QUANT_TYPES:
        raise QuantizationError(f"unknown 4-bit type {quant_type!r}; choose one of {', '.join(QUANT_TYPES)}")
    if blocksize not in BLOCK_SIZES:
        raise QuantizationError(f"blocksize {blocksize!r}: expected one of {', '.join(map(str, BLOCK_SIZES))}")


@cache
def values(quant_type: str, device: torch.device) -> torch.Tensor:
    """The sixteen values, indexed by code, [16] fp32."""
    if quant_type == "nf4":
        return torch.tensor(NF4, dtype=torch.float32, device=device)
    magnitudes = torch.tensor(_FP4_TWELFTHS, dtype=torch.float32)
    signed = torch.cat([magnitudes, magnitudes.neg() + 0.0])  # + 0.0: both zeros are positive
    return (signed / 12.0).to(device)


@cache
def value_pairs(quant_type: str, device: torch.device) -> torch.Tensor:
    """The two values in each byte, [256, 2] fp32; the first is in the high four bits."""
    one = values(quant_type, device)
    byte = torch.arange(256, device=device)
    return torch.stack([one[byte >> 4], one[byte & 15]], dim=1)


@cache
def codes_ascending(quant_type: str, device: torch.device) -> torch.Tensor:
    """Codes sorted by their values, [16] uint8."""
    order = range(16) if quant_type == "nf4" else _FP4_ASCENDING
    return torch.tensor(list(order), dtype=torch.uint8, device=device)


@cache
def midpoints(quant_type: str, device: torch.device) -> torch.Tensor:
    """Midpoints between neighboring values, [15] fp32: the boundaries for rounding to the nearest value."""
    ascending = values(quant_type, torch.device("cpu"))[codes_ascending(quant_type, torch.device("cpu")).long()]
    return ((ascending[:-1] + ascending[1:]) / 2).to(device)


@cache
def nested_values(device: torch.device) -> torch.Tensor:
    """bitsandbytes' dynamic 8-bit map, [256] fp32, ascending.

    Seven decades, each with twice as many values as the one below it; symmetric except for 0 and 1.
    """
    levels = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2**decade + 1, dtype=torch.float32)
        centers = 10.0 ** (decade - 6) * ((edges[:-1] + edges[1:]) / 2)
        levels += [*centers.tolist(), *(-centers).tolist()]
    return torch.tensor(sorted(levels), dtype=torch.float32, device=device)


@cache
def nested_table(device: torch.device) -> torch.Tensor:
    """The code of the nearest 8-bit value for each point of the grid from -1 to 1, [65536] uint8."""
    ascending = nested_values(torch.device("cpu"))
    points = torch.arange(NESTED_GRID + 1, dtype=torch.float32) * 2 / NESTED_GRID - 1
    return torch.bucketize(points, (ascending[:-1] + ascending[1:]) * 0.5).to(torch.uint8).to(device)
