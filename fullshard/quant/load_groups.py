"""One rank's groups of a weight from files: of a dense weight, quantised slice by slice, or of a 4-bit one as it is.

A reader gives any range of a flattened tensor (`weights/slice_reader.py`); no more is read than the groups this rank
holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from fullshard import runtime
from fullshard.errors import QuantizationError
from fullshard.quant import blocks, bnb_format, codebooks, sharded_groups
from fullshard.quant.codebooks import NESTED_BLOCK
from fullshard.quant.sharded_groups import Parts, rows_of

if TYPE_CHECKING:
    from fullshard.quant.linear import NF4Linear

Read = tuple[torch.Tensor, torch.Tensor] | Parts
"""Packed values and fp32 scales, which are not finished, or all parts."""


def read(layer: NF4Linear, readers: Mapping[str, Any], rows: slice) -> Read:
    """What the files hold of these groups. Nothing is communicated."""
    if layer.stored is not None:
        return _stored(layer, readers, rows)
    numel, scheme = layer.in_features * layer.out_features, layer.scheme
    start, stop = (min(row * scheme.group, numel) for row in (rows.start, rows.stop))
    flat = _flat(readers["weight"], layer, start, stop) if start < stop else torch.empty(0)
    return blocks.quantize(flat.to(device=runtime.device(), dtype=layer.dtype), scheme.blocksize, scheme.quant_type)


def _flat(reader: Any, layer: NF4Linear, start: int, stop: int) -> torch.Tensor:
    """A run of the flattened weight [out, in], whichever way files hold it."""
    if not layer.transposed:
        return reader.flat(start, stop)
    width = layer.in_features
    first = start // width
    columns = reader[:, first : -(-stop // width)]  # [in, some of out]
    return columns.T.reshape(-1)[start - first * width : stop - first * width]


def finish(layer: NF4Linear, found: Read, group: dist.ProcessGroup | None) -> Parts:
    """All parts of these groups; every rank of `group` must take part."""
    if isinstance(found, dict):
        return found
    return sharded_groups.finish_shard(*found, layer.in_features * layer.out_features, layer.scheme, group)


def _stored(layer: NF4Linear, readers: Mapping[str, Any], rows: slice) -> Parts:
    """A weight that lies in the files as bitsandbytes stores it."""
    scheme, numel = layer.scheme, layer.in_features * layer.out_features
    key = next(name for name in readers if bnb_format.STATE in name)
    about = bnb_format.read_state(readers[key][:])
    found = (tuple(about["shape"]), about["quant_type"], about["blocksize"], "nested_offset" in about)
    if found != (layer.shape, scheme.quant_type, scheme.blocksize, scheme.double):
        raise QuantizationError(
            f"the files hold a 4-bit weight of shape {found[0]}, {found[1]}, blocks of {found[2]}, "
            f"{'double' if found[3] else 'single'}; the layer is laid out as {layer.shape}, {scheme}. Load it with the "
            f"configuration it was quantised with"
        )
    bnb_format.check_map(
        readers["weight.quant_map"][:], codebooks.values(scheme.quant_type, torch.device("cpu")), "quant_map"
    )

    def part(name: str, per_group: int, total: int) -> torch.Tensor:
        reader, start, stop = readers[name], *(min(row * per_group, total) for row in (rows.start, rows.stop))
        held = reader.flat(start // reader.dtype.itemsize, stop // reader.dtype.itemsize) if start < stop else None
        return rows_of(torch.empty(0, dtype=torch.uint8) if held is None else held.view(torch.uint8), per_group)

    count = -(-numel // scheme.blocksize)
    scales = 1 if scheme.double else 4
    parts = {
        "packed": part("weight", scheme.group // 2, -(-numel // 2)),
        "absmax": part("weight.absmax", NESTED_BLOCK * scales, count * scales),
    }
    if scheme.double:
        bnb_format.check_map(
            readers["weight.nested_quant_map"][:], codebooks.nested_values(torch.device("cpu")), "nested_quant_map"
        )
        largest = part("weight.nested_absmax", 4, 4 * scheme.groups(numel)).view(torch.float32)
        offset = torch.full_like(largest, about["nested_offset"])
        parts["nested"] = torch.cat([largest, offset], dim=1).view(torch.uint8)
    return parts
