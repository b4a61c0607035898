"""The kernel that unpacks released models' formats, in Triton's interpreter, which needs no GPU: `conftest.py` sets
`TRITON_INTERPRET=1` where there is none.

The interpreter does not round to 16 bits as GPUs do, so the kernel writes fp32 here, without rounding in between.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from fullshard.quant.shipped import block_fp8, compressed_bytes, compressed_fp4, compressed_words, mxfp4
from fullshard.quant.stored_format import StoredFormat, Tile
from fullshard.quant.stored_values import decode, encode

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1" and torch.cuda.is_available(), reason="needs a machine without a GPU"
)
FORMATS = [
    mxfp4(),
    block_fp8((16, 16)),
    block_fp8(None),
    compressed_bytes("e4m3", (1, 0), "fp8 by channel"),
    compressed_bytes("int8", (1, 0), "int8"),
    compressed_words(4, (1, 32), True, False, "int4 with zero points"),
    compressed_words(4, (1, 32), False, True, "int4 with reordered columns"),
    compressed_words(2, (1, 0), False, False, "int2"),
    compressed_words(8, (1, 40), True, False, "int8 in words"),
    compressed_fp4(16, "nvfp4"),
]


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_the_kernel_unpacks_as_torch_does(form: StoredFormat) -> None:
    from fullshard.quant import stored_kernels

    rows, columns, coding = 21, 160, replace(form.coding, rounded="")
    generator = torch.Generator().manual_seed(0)
    matrices = [encode(coding, torch.randn(rows, columns, generator=generator)) for _ in range(4)]
    for matrix in matrices if coding.order else ():
        order = torch.randperm(columns, generator=generator, dtype=torch.int32) // 32
        matrix["order"] = order.to(torch.int32).view(1, -1).view(torch.uint8)
    parts = [torch.cat([matrix[part] for matrix in matrices]) for part in coding.parts]
    for tile in (Tile(4, rows, columns), Tile(4, rows, columns, 1, 2, 5, 19)):
        expected = decode(coding, parts, tile, torch.empty(tile.shape))
        assert expected.abs().max() > 1
        found = stored_kernels.decode(coding, parts, tile, torch.full(tile.shape, torch.nan))
        assert torch.equal(found, expected)
