"""Sharded storage of 4-bit weights: groups of 256 blocks, each with everything needed to dequantize it.

A group (16,384 weights at the default block size) is one row of every part: its packed values, its 256 scales and, with
double quantization, their second-level scale and offset. All parts are uint8 and sharded on dim 0, so no dtype cast can
change their meaning. The last group is padded; `to_state` removes the padding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fullshard.config.errors import QuantizationError
from fullshard.device import accelerator
from fullshard.distributed import runtime
from fullshard.distributed.groups import has_backend_for
from fullshard.quant import blocks, bnb_format, codebooks
from fullshard.quant.codebooks import NESTED_BLOCK
from fullshard.quant.nf4 import NestedState, QuantState, storage_dtype, stored_as
from fullshard.spmd.mesh import origin

Parts = dict[str, torch.Tensor]
"""`packed` [groups, bytes], `absmax` [groups, 256 or 1024], `nested` [groups, 8] if double-quantized; all uint8."""


@dataclass(frozen=True)
class Scheme:
    """The quantization format of a weight."""

    quant_type: str = "nf4"
    blocksize: int = 64
    double: bool = False
    """Whether scales are quantized too (double quantization)."""
    storage: torch.dtype = torch.uint8
    """The dtype of packed values in files; in memory and in collectives they are uint8."""

    def __post_init__(self) -> None:
        codebooks.check_format(self.quant_type, self.blocksize)
        object.__setattr__(self, "storage", storage_dtype(self.storage))

    @property
    def group(self) -> int:
        """Number of weights in a group."""
        return NESTED_BLOCK * self.blocksize

    def groups(self, numel: int) -> int:
        """Number of groups of a weight with `numel` elements."""
        return -(-numel // self.group)

    def shapes(self, numel: int, matrices: int = 1) -> dict[str, tuple[int, int]]:
        """The shape of each part of a weight with `numel` elements, or of `matrices` stacked ones."""
        count = matrices * self.groups(numel)
        shapes = {"packed": (count, self.group // 2), "absmax": (count, NESTED_BLOCK * (1 if self.double else 4))}
        return shapes | ({"nested": (count, 8)} if self.double else {})


def shard_range(numel: int, scheme: Scheme, index: int, count: int) -> tuple[int, int]:
    """The range (start, stop) of the flattened weight in shard `index` of `count`."""
    size = -(-scheme.groups(numel) // count) * scheme.group
    return min(index * size, numel), min((index + 1) * size, numel)


def quantize_shard(flat: torch.Tensor, numel: int, scheme: Scheme, group: dist.ProcessGroup | None = None) -> Parts:
    """Quantize one rank's range of a flattened weight (see `shard_range`). Returns that rank's rows of all parts.

    Double quantization needs the mean over the whole weight, so all ranks of `group` must call it.
    """
    packed, absmax = blocks.quantize(flat, scheme.blocksize, scheme.quant_type)
    return finish_shard(packed, absmax, numel, scheme, group)


def finish_shard(
    packed: torch.Tensor, absmax: torch.Tensor, numel: int, scheme: Scheme, group: dist.ProcessGroup | None = None
) -> Parts:
    """Build the rows of all parts from packed values and fp32 scales: the communicating half of `quantize_shard`."""
    return finish_runs([GroupRun(0, packed, absmax)], 1, numel, scheme, group)


class GroupRun(NamedTuple):
    """Consecutive groups of one matrix of a stack."""

    matrix: int
    packed: torch.Tensor
    absmax: torch.Tensor
    """fp32."""


def finish_runs(
    runs: Sequence[GroupRun], count: int, numel: int, scheme: Scheme, group: dist.ProcessGroup | None = None
) -> Parts:
    """Build this rank's rows of all parts of a stack of `count` matrices with `numel` elements each.

    Each matrix is quantized separately. With double quantization all ranks of `group` must call it.
    """
    parts = {"packed": torch.cat([rows_of(run.packed, scheme.group // 2) for run in runs])}
    scales = torch.cat([rows_of(run.absmax, NESTED_BLOCK) for run in runs])
    if not scheme.double:
        return parts | {"absmax": scales.view(torch.uint8)}
    rows = count * scheme.groups(numel)
    by_matrix = _gather_scales(scales, rows, group).view(count, -1)[:, : -(-numel // scheme.blocksize)]
    scale_codes, pairs = [], []
    for run, mean in zip(runs, blocks.means_of(by_matrix[run.matrix] for run in runs), strict=True):
        offset = mean.to(run.absmax.device)
        code, largest = blocks.quantize_scales(run.absmax, offset)
        scale_codes.append(rows_of(code, NESTED_BLOCK))
        pairs.append(torch.stack([largest, offset.expand_as(largest)], dim=1))
    return parts | {"absmax": torch.cat(scale_codes), "nested": torch.cat(pairs).view(torch.uint8)}


def ranks_of_shards(parameter: Any) -> dist.ProcessGroup | None:
    """The ranks along `fsdp`, if each of them has some groups of a sharded weight."""
    mesh, axes = origin(parameter.device_mesh)
    fsdp = mesh.get_axis_name_idx("fsdp")
    split = any(fsdp in merged and p.is_shard() for merged, p in zip(axes, parameter.placements, strict=True))
    return mesh.get_group("fsdp") if split else None


def _gather_scales(mine: torch.Tensor, rows: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    """All-gather the fp32 scales of all ranks, `rows` rows in rank order."""
    size = group.size() if group is not None else 1
    if size == 1:
        return mine
    assert group is not None
    carried = mine.cpu() if has_backend_for(group, "cpu") else mine
    carried = torch.nn.functional.pad(carried, (0, 0, 0, -(-rows // size) - len(carried)))
    everyone = [torch.empty_like(carried) for _ in range(size)]
    dist.all_gather(everyone, carried, group=group)
    return torch.cat(everyone)[:rows]


def rows_of(flat: torch.Tensor, length: int) -> torch.Tensor:
    """Reshape a flat tensor to rows of `length`, zero-padding the last one."""
    return torch.nn.functional.pad(flat, (0, -flat.numel() % length)).view(-1, length)


def runs_of(rows: slice, count: int, numel: int, scheme: Scheme) -> Iterator[tuple[int, int, int]]:
    """The element ranges in rows of a stack's parts: (matrix, start, stop)."""
    per = scheme.groups(numel)
    for matrix in range(rows.start // per, min(-(-rows.stop // per), count)):
        first, last = max(rows.start - matrix * per, 0), min(rows.stop - matrix * per, per)
        if first < last:
            yield matrix, first * scheme.group, min(last * scheme.group, numel)


def matrix_of(parts: Parts, index: int, shape: tuple[int, ...], scheme: Scheme) -> Parts:
    """The parts of matrix `index` of a stack."""
    per = scheme.groups(math.prod(shape))
    return {name: part[index * per : (index + 1) * per] for name, part in parts.items()}


def dense(parts: Parts, shape: tuple[int, ...], scheme: Scheme, dtype: torch.dtype) -> torch.Tensor:
    """Dequantize a whole weight from all its groups."""
    return weight_of(
        parts["packed"], parts["absmax"], parts.get("nested"), shape, scheme.blocksize, scheme.quant_type, dtype
    )


def weight_of(
    packed: torch.Tensor, absmax: torch.Tensor, pairs: torch.Tensor | None, shape: tuple[int, ...], blocksize: int,
    quant_type: str, dtype: torch.dtype, out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """`dense`, with each part as an argument; into `out` (contiguous, of that shape and dtype) if it is given."""
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=packed.device)
    if accelerator.runs_triton(packed.device):
        from fullshard.quant import triton_kernels

        return triton_kernels.dequantize(packed, absmax, pairs, blocksize, quant_type, out)
    blocks.dequantize(packed.view(-1), _scales(absmax, pairs), blocksize, quant_type, out.view(-1))
    return out


def _scales(absmax: torch.Tensor, pairs: torch.Tensor | None) -> torch.Tensor:
    """The fp32 scale of every block."""
    if pairs is None:
        return absmax.view(torch.float32).view(-1)
    floats = pairs.view(torch.float32)
    return blocks.dequantize_scales(absmax, floats[:, 0], floats[:, 1].repeat_interleave(NESTED_BLOCK))


def to_state(
    parts: Parts, shape: tuple[int, ...], scheme: Scheme, dtype: torch.dtype
) -> tuple[torch.Tensor, QuantState]:
    """Convert all groups of a weight to bitsandbytes' form, without padding."""
    n = math.prod(shape)
    count = -(-n // scheme.blocksize)
    packed = stored_as(parts["packed"].reshape(-1)[: -(-n // 2)].clone(), scheme.storage)
    if not scheme.double:
        absmax = parts["absmax"].contiguous().view(torch.float32).view(-1)[:count].clone()
        return packed, QuantState(absmax, torch.Size(shape), dtype, scheme.blocksize, scheme.quant_type)
    pairs = parts["nested"].contiguous().view(torch.float32)
    inner = NestedState(
        pairs[:, 0].clone(memory_format=torch.contiguous_format), codebooks.nested_values(pairs.device).clone()
    )
    return packed, QuantState(
        parts["absmax"].reshape(-1)[:count].clone(), torch.Size(shape), dtype, scheme.blocksize, scheme.quant_type,
        pairs[0, 1].clone(), inner,
    )  # fmt: skip


def from_state(packed: torch.Tensor, state: QuantState) -> tuple[Parts, Scheme]:
    """Convert a weight from bitsandbytes' form to groups."""
    scheme = Scheme(state.quant_type, state.blocksize, state.nested is not None, packed.dtype)
    n = math.prod(state.shape)
    flat_bytes = packed.contiguous().view(-1).view(torch.uint8)
    if flat_bytes.numel() != -(-n // 2) or state.absmax.numel() != -(-n // state.blocksize):
        raise QuantizationError(
            f"a 4-bit weight of shape {tuple(state.shape)} in blocks of {state.blocksize} needs {-(-n // 2)} bytes and "
            f"{-(-n // state.blocksize)} scales; got {flat_bytes.numel()} and {state.absmax.numel()}"
        )
    parts = {"packed": rows_of(flat_bytes, scheme.group // 2)}
    if state.nested is None:
        return parts | {"absmax": rows_of(state.absmax.float().contiguous(), NESTED_BLOCK).view(torch.uint8)}, scheme
    inner, known = state.nested, codebooks.nested_values(state.nested.code.device)
    if inner.blocksize != NESTED_BLOCK or not torch.equal(inner.code, known):
        raise QuantizationError(
            f"scales quantized in blocks of {inner.blocksize} with a custom table (from {inner.code[0]:g} to "
            f"{inner.code[-1]:g}); only bitsandbytes' dynamic map in blocks of {NESTED_BLOCK} can be sharded. "
            f"Dequantize the weight (dequantize_4bit) and quantize it again"
        )
    assert state.offset is not None
    pairs = torch.stack([inner.absmax.float(), state.offset.float().expand_as(inner.absmax)], dim=1)
    return parts | {"absmax": rows_of(state.absmax, NESTED_BLOCK), "nested": pairs.view(torch.uint8)}, scheme


Loaded = tuple[torch.Tensor, torch.Tensor] | Parts
"""Packed values and fp32 scales of a weight just quantized, or all parts of one stored in 4 bits."""


@dataclass(frozen=True)
class GroupLoader:
    """How one layer's weight is read from files and quantized."""

    shape: tuple[int, int]
    """(out, in)"""
    scheme: Scheme
    dtype: torch.dtype
    """The dtype that a dense weight is converted to before quantization."""
    transposed: bool = False
    """Whether files store the dense weight as (in, out)."""
    prequantized: bool = False
    """Whether files store the weight in 4 bits."""

    @property
    def numel(self) -> int:
        """The number of values of the dense weight."""
        return self.shape[0] * self.shape[1]

    def read(self, readers: Mapping[str, Any], rows: slice) -> Loaded:
        """Read and quantize these groups (rows of the parts). Does not communicate."""
        if self.prequantized:
            return self._read_prequantized(readers, rows)
        start, stop = (min(row * self.scheme.group, self.numel) for row in (rows.start, rows.stop))
        flat = self._read_flat(readers["weight"], start, stop) if start < stop else torch.empty(0)
        flat = flat.to(device=runtime.device(), dtype=self.dtype)
        return blocks.quantize(flat, self.scheme.blocksize, self.scheme.quant_type)

    def finish(self, loaded: Loaded, group: dist.ProcessGroup | None) -> Parts:
        """All parts of the groups from `read`; all ranks of `group` must call it."""
        if isinstance(loaded, dict):
            return loaded
        return finish_shard(*loaded, self.numel, self.scheme, group)

    def _read_flat(self, reader: Any, start: int, stop: int) -> torch.Tensor:
        """A range of the flattened weight [out, in]."""
        if not self.transposed:
            return reader.flat(start, stop)
        width = self.shape[1]
        first = start // width
        columns = reader[:, first : -(-stop // width)]  # [in, part of out]
        return columns.T.reshape(-1)[start - first * width : stop - first * width]

    def _read_prequantized(self, readers: Mapping[str, Any], rows: slice) -> Parts:
        """Groups of a weight stored in bitsandbytes' format."""
        scheme = self.scheme
        key = next(name for name in readers if bnb_format.STATE in name)
        metadata = bnb_format.read_state(readers[key][:])
        self._check(metadata)
        bnb_format.check_map(
            readers["weight.quant_map"][:], codebooks.values(scheme.quant_type, torch.device("cpu")), "quant_map"
        )

        def part(name: str, per_group: int, total: int) -> torch.Tensor:
            reader, start, stop = readers[name], *(min(row * per_group, total) for row in (rows.start, rows.stop))
            stored = (
                reader.flat(start // reader.dtype.itemsize, stop // reader.dtype.itemsize) if start < stop else None
            )
            return rows_of(torch.empty(0, dtype=torch.uint8) if stored is None else stored.view(torch.uint8), per_group)

        count = -(-self.numel // scheme.blocksize)
        scale_bytes = 1 if scheme.double else 4
        parts = {
            "packed": part("weight", scheme.group // 2, -(-self.numel // 2)),
            "absmax": part("weight.absmax", NESTED_BLOCK * scale_bytes, count * scale_bytes),
        }
        if scheme.double:
            bnb_format.check_map(
                readers["weight.nested_quant_map"][:], codebooks.nested_values(torch.device("cpu")), "nested_quant_map"
            )
            largest = part("weight.nested_absmax", 4, 4 * scheme.groups(self.numel)).view(torch.float32)
            offset = torch.full_like(largest, metadata["nested_offset"])
            parts["nested"] = torch.cat([largest, offset], dim=1).view(torch.uint8)
        return parts

    def _check(self, metadata: Mapping[str, Any]) -> None:
        """Raise `QuantizationError` if the stored weight is quantized differently from the layer."""
        scheme = self.scheme
        stored = (
            tuple(metadata["shape"]), metadata["quant_type"], metadata["blocksize"], "nested_offset" in metadata,
        )  # fmt: skip
        if stored != (self.shape, scheme.quant_type, scheme.blocksize, scheme.double):
            raise QuantizationError(
                f"the files contain a 4-bit weight of shape {stored[0]}, {stored[1]}, blocks of {stored[2]}, "
                f"{'double' if stored[3] else 'single'} quantization; the layer expects {self.shape}, {scheme}. Load "
                f"it with the configuration it was quantized with"
            )
