"""Unpacks weights in the formats of released models, and packs dense ones: the arithmetic of `stored_format.py`.

This is the reference implementation and the one used on CPUs. It works through a bounded number of rows at a time.
CUDA tensors are unpacked by `stored_kernels.py`, which gives the same bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import torch

from fullshard.device import accelerator
from fullshard.fsdp.strategy import dtype_of
from fullshard.quant.stored_format import CODES, E2M1, PARTS, Coding, Tile, part_as, table

SLICE = 1 << 21
"""Number of values unpacked at a time."""
LARGEST = {"e4m3": 448.0, "e2m1": 6.0}
"""The largest value of the codes that are floats."""

Parts = Mapping[str, torch.Tensor]
"""The parts of a weight as bytes, by name."""


def decode(coding: Coding, tensors: Sequence[torch.Tensor], tile: Tile, out: torch.Tensor) -> torch.Tensor:
    """Unpack a tile into `out` (contiguous, any shape of as many values)."""
    if out.is_meta or not out.numel():
        return out
    if accelerator.runs_triton(out.device):
        from fullshard.quant import stored_kernels

        return stored_kernels.decode(coding, tensors, tile, out)
    parts = dict(zip(coding.parts, tensors, strict=True))
    target = out.view(tile.shape)
    step = max(1, SLICE // max(1, tile.shape[0] * tile.columns))
    for start in range(0, tile.height, step):
        end = min(start + step, tile.height)
        rows = torch.arange(tile.start + start, tile.start + end, device=out.device)
        target[:, start:end] = _values(coding, parts, tile, rows)
    return out


def _values(coding: Coding, parts: Parts, tile: Tile, rows: torch.Tensor) -> torch.Tensor:
    """The values of some rows of each matrix, fp32 or rounded."""
    packed = _of_matrices(parts["packed"], tile)[:, rows]
    values = table(coding.codes, packed.device)[_unpacked(packed, coding.bits)[..., : tile.columns].int()]
    height = coding.block[0]
    lines = rows // height if height else torch.zeros_like(rows)
    groups = _groups(coding, parts, tile)
    if "zeros" in parts:
        values = values - _spread(_zeros(coding, parts, tile)[:, lines], groups)
    scales = _scales(coding, parts, tile)[:, lines]
    values = values * _spread(scales, groups)
    return values.to(dtype_of(coding.rounded)) if coding.rounded else values


def _of_matrices(part: torch.Tensor, tile: Tile) -> torch.Tensor:
    """A part [rows of all matrices, bytes] as [matrices, rows, bytes]."""
    return part.view(tile.matrices, -1, part.shape[-1])[tile.first :: tile.step]


def _unpacked(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """The codes in bytes, the first in the low bits."""
    if bits == 8:
        return packed
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return ((packed[..., None] >> shifts) & (2**bits - 1)).flatten(-2)


def _groups(coding: Coding, parts: Parts, tile: Tile) -> torch.Tensor | None:
    """The column of scales that each column of values has [matrices, 1, columns]; None if all have the same."""
    width, device = coding.block[1], parts["packed"].device
    if not width:
        return None
    neighbors = (torch.arange(tile.columns, device=device) // width).expand(tile.shape[0], 1, -1)
    if "order" not in parts:
        return neighbors
    order = _of_matrices(part_as(parts["order"], torch.int32), tile).long()
    return torch.where(order < 0, neighbors, order)  # -1: not ordered


def _spread(scales: torch.Tensor, groups: torch.Tensor | None) -> torch.Tensor:
    """Each column's scale [matrices, rows, columns], or [matrices, rows, 1] if all have the same."""
    return scales if groups is None else scales.gather(2, groups.expand(-1, scales.shape[1], -1))


def _scales(coding: Coding, parts: Parts, tile: Tile) -> torch.Tensor:
    """The scales, fp32."""
    if coding.scale in ("e4m3", "exponent"):
        scales = table(coding.scale, parts["scales"].device)[parts["scales"].int()]
    else:
        dtype = dtype_of(coding.scale)
        assert dtype is not None
        scales = part_as(parts["scales"], dtype).float()
    scales = _of_matrices(scales, tile)
    return scales / _of_matrices(part_as(parts["divisor"], torch.float32), tile) if coding.divisor else scales


def _zeros(coding: Coding, parts: Parts, tile: Tile) -> torch.Tensor:
    """The zero points [matrices, rows of scales, columns of scales], fp32. They are packed along the rows."""
    words = _of_matrices(part_as(parts["zeros"], torch.int32), tile)
    shifts = torch.arange(0, 32, coding.bits, dtype=torch.int32, device=words.device)
    codes = ((words[:, :, None] >> shifts[:, None]) & (2**coding.bits - 1)).flatten(1, 2)
    down, _ = coding.grid(tile.rows, tile.columns)
    return table(coding.codes, words.device)[codes[:, :down]]


# --- packing ----------------------------------------------------------------------------------------------------------


def encode(coding: Coding, weight: torch.Tensor, before: Parts | None = None) -> dict[str, torch.Tensor]:
    """Pack a dense matrix. Returns its parts as bytes.

    With the parts of the matrix `before` it was changed, the columns keep their order, and a block keeps its scale and
    zero point where they leave a smaller error than new ones.
    """
    rows, columns = weight.shape
    shapes, weight = coding.shapes(rows, columns), weight.detach().float()
    before = before or {}
    kept = {part: before[part] for part in ("divisor", "order") if part in before}
    if coding.order and "order" not in kept:
        kept["order"] = (torch.arange(columns, dtype=torch.int32) // coding.block[1]).view(1, -1).view(torch.uint8)
    if coding.divisor:
        kept["divisor"] = _divisor(coding, weight, before.get("divisor"))
    candidates = [_new_scales(coding, weight, kept)]
    if before and all(torch.equal(kept[part], before[part]) for part in kept):
        candidates.append({part: before[part] for part in ("scales", "zeros") if part in before})
    packed = [_with_scales(coding, weight, {**kept, **one}) for one in candidates]
    if len(packed) > 1:
        packed = [_better(coding, weight, packed, {**kept})]
    parts = packed[0]
    assert {part: tuple(t.shape) for part, t in parts.items()} == shapes
    return parts


def _with_scales(coding: Coding, weight: torch.Tensor, parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The parts of a weight with these scales."""
    tile = Tile(1, *weight.shape)
    packed = torch.zeros(coding.shapes(*weight.shape)["packed"], dtype=torch.uint8)
    whole = {"packed": packed, **parts}
    for rows in _slices(tile):
        height = coding.block[0]
        lines = rows // height if height else torch.zeros_like(rows)
        groups = _groups(coding, whole, tile)
        scales = _spread(_scales(coding, whole, tile)[:, lines], groups)[0]
        scaled = weight[rows] / torch.where(scales == 0, 1.0, scales)
        if coding.zeros:
            scaled = scaled + _spread(_zeros(coding, whole, tile)[:, lines], groups)[0]
        packed[rows] = _packed(_nearest(coding.codes, scaled), coding, packed.shape[1])
    return {part: whole[part] for part in coding.parts}


def _slices(tile: Tile) -> Iterator[torch.Tensor]:
    step = max(1, SLICE // max(1, tile.columns))
    for start in range(0, tile.rows, step):
        yield torch.arange(start, min(start + step, tile.rows))


def _nearest(codes: str, scaled: torch.Tensor) -> torch.Tensor:
    """The code of the nearest value, uint8."""
    if codes == "e4m3":
        return scaled.clamp(-LARGEST[codes], LARGEST[codes]).to(torch.float8_e4m3fn).view(torch.uint8)
    if codes == "e2m1":
        bounds = torch.tensor([(a + b) / 2 for a, b in itertools.pairwise(E2M1)])
        size = scaled.abs()
        low = torch.bucketize(size, bounds)  # a bound belongs to the value below it
        tie = (low < len(bounds)) & (size == bounds[low.clamp(max=len(bounds) - 1)]) & (low % 2 == 1)
        return (low + tie.int() + 8 * scaled.signbit().int()).to(torch.uint8)
    bits = CODES[codes].bits
    rounded = scaled.round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return (rounded if codes == "int8" else rounded + 2 ** (bits - 1)).to(torch.int32).to(torch.uint8)


def _packed(codes: torch.Tensor, coding: Coding, width: int) -> torch.Tensor:
    """Codes [rows, columns] as bytes [rows, width]."""
    per = 8 // coding.bits
    codes = torch.nn.functional.pad(codes, (0, width * per - codes.shape[1])).view(len(codes), width, per)
    shifts = torch.arange(0, 8, coding.bits, dtype=torch.uint8)
    return (codes << shifts).sum(-1, dtype=torch.uint8)


def _ordered(coding: Coding, weight: torch.Tensor, parts: Parts) -> torch.Tensor:
    """The weight with the columns of each group side by side."""
    if "order" not in parts:
        return weight
    order = part_as(parts["order"], torch.int32).view(-1)
    return weight if bool((order < 0).any()) else weight[:, torch.argsort(order, stable=True)]


def _blocks(coding: Coding, weight: torch.Tensor, fill: float = 0.0) -> torch.Tensor:
    """A weight [rows, columns] as [rows of scales, columns of scales, values of a block]."""
    height, width = (size or full for size, full in zip(coding.block, weight.shape, strict=True))
    padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % width, 0, -weight.shape[0] % height), value=fill)
    down, across = coding.grid(*weight.shape)
    return padded.view(down, height, across, width).transpose(1, 2).flatten(2)


def _new_scales(coding: Coding, weight: torch.Tensor, kept: Parts) -> dict[str, torch.Tensor]:
    """The scales, and zero points if it has some, for the range of each block."""
    blocks = _blocks(coding, _ordered(coding, weight, kept))
    if coding.zeros:
        return _asymmetric(coding, blocks)
    largest = blocks.abs().amax(-1)
    limit = LARGEST.get(coding.codes) or (2**coding.bits - 1) / 2
    if coding.codes == "e4m3":  # as transformers rounds: the inverse first
        scales = 1.0 / (limit / torch.where(largest > 0, largest, limit))
    else:
        scales = torch.where(largest > 0, largest / limit, 1.0)
    if "divisor" in kept:
        scales = torch.where(largest > 0, scales * part_as(kept["divisor"], torch.float32), 0.0)
    return {"scales": _scale_bytes(coding, scales)}


def _asymmetric(coding: Coding, blocks: torch.Tensor) -> dict[str, torch.Tensor]:
    """Scales and zero points that cover each block's range, zero included."""
    low, high = blocks.amin(-1).clamp(max=0), blocks.amax(-1).clamp(min=0)
    span, lowest = 2**coding.bits - 1, -(2 ** (coding.bits - 1))
    scales = torch.where(high > low, (high - low) / span, 1.0)
    zeros = (lowest - low / scales).round().clamp(lowest, lowest + span)
    return {"scales": _scale_bytes(coding, scales), "zeros": _packed_zeros(coding, zeros)}


def _scale_bytes(coding: Coding, scales: torch.Tensor) -> torch.Tensor:
    """Scales as they are stored. Exponents are rounded up, so that no value is clipped."""
    if coding.scale == "exponent":
        mantissa, exponent = torch.frexp(scales.double())
        exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
        return (exponent + 127).clamp(0, 254).to(torch.uint8)
    dtype = torch.float8_e4m3fn if coding.scale == "e4m3" else dtype_of(coding.scale)
    assert dtype is not None
    if coding.scale == "e4m3":
        scales = scales.clamp(max=LARGEST["e4m3"])
    return scales.to(dtype).contiguous().view(torch.uint8)


def _divisor(coding: Coding, weight: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
    """What scales are divided by, so that the largest one uses its range; the number from before if that fits."""
    largest = weight.abs().max()
    full = LARGEST["e4m3"] * LARGEST[coding.codes]
    if before is not None and float(largest) * float(part_as(before, torch.float32)) <= full:
        return before
    return (full / torch.where(largest > 0, largest, 1.0)).float().view(1, 1).view(torch.uint8)


def _better(
    coding: Coding, weight: torch.Tensor, packed: Sequence[dict[str, torch.Tensor]], kept: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The parts in which each block has those scales of the two that leave the smaller error."""
    new, old = (_ordered(coding, weight - decoded(coding, parts, weight.shape), kept) for parts in packed)
    keep = _blocks(coding, old).square().sum(-1) <= _blocks(coding, new).square().sum(-1)
    chosen = {part: packed[1][part] for part in kept}
    size = packed[0]["scales"].shape[1] // keep.shape[1]
    both = [parts["scales"].view(*keep.shape, size) for parts in packed]
    chosen["scales"] = torch.where(keep[..., None], both[1], both[0]).flatten(1)
    if coding.zeros:
        tile = Tile(1, *weight.shape)
        zeros = [_zeros(coding, parts, tile)[0] for parts in packed]
        chosen["zeros"] = _packed_zeros(coding, torch.where(keep, zeros[1], zeros[0]))
    return _with_scales(coding, weight, chosen)


def _packed_zeros(coding: Coding, zeros: torch.Tensor) -> torch.Tensor:
    """Zero points [rows of scales, columns of scales], packed along the rows."""
    per = 32 // coding.bits
    codes = (zeros + 2 ** (coding.bits - 1)).long()
    words = torch.nn.functional.pad(codes, (0, 0, 0, -len(codes) % per)).view(-1, per, codes.shape[1])
    packed = (words << torch.arange(0, 32, coding.bits)[:, None]).sum(1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32).contiguous().view(torch.uint8)


def decoded(coding: Coding, parts: Parts, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """One matrix, dense."""
    rows, columns = shape
    out = torch.empty((rows, columns), dtype=dtype, device=parts["packed"].device)
    return decode(coding, [parts[part] for part in PARTS if part in parts], Tile(1, rows, columns), out)
