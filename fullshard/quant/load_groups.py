"""Loading of one rank's groups of a weight from files: a dense weight is quantized slice by slice, a 4-bit one is read
as it is.

`GroupLoader` uses the readers of `weights/slice_reader.py`, which read any range of a flattened tensor; it reads no
more than the groups of this rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fullshard import runtime
from fullshard.errors import QuantizationError
from fullshard.quant import blocks, bnb_format, codebooks, sharded_groups
from fullshard.quant.codebooks import NESTED_BLOCK
from fullshard.quant.sharded_groups import Parts, Scheme, rows_of

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
        return sharded_groups.finish_shard(*loaded, self.numel, self.scheme, group)

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
            held = reader.flat(start // reader.dtype.itemsize, stop // reader.dtype.itemsize) if start < stop else None
            return rows_of(torch.empty(0, dtype=torch.uint8) if held is None else held.view(torch.uint8), per_group)

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
        found = (
            tuple(metadata["shape"]), metadata["quant_type"], metadata["blocksize"], "nested_offset" in metadata,
        )  # fmt: skip
        if found != (self.shape, scheme.quant_type, scheme.blocksize, scheme.double):
            raise QuantizationError(
                f"the files contain a 4-bit weight of shape {found[0]}, {found[1]}, blocks of {found[2]}, "
                f"{'double' if found[3] else 'single'} quantization; the layer expects {self.shape}, {scheme}. Load it "
                f"with the configuration it was quantized with"
            )
