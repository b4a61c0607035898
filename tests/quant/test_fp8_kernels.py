"""The fp8 kernels in Triton's interpreter, which needs no GPU: `conftest.py` sets `TRITON_INTERPRET=1` where
there is none.

The interpreter does not round to fp8 as GPUs do, so kernels write fp32 here and torch rounds; `test_gpu.py` compares
the bits.
"""

from __future__ import annotations

import os

import pytest
import torch

from fullshard.quant import fp8

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1" and torch.cuda.is_available(), reason="needs a machine without a GPU"
)


@pytest.mark.parametrize("widths", [(48,), (300,), (48, 64), (64, 8), (64, 16, 32, 16), (64, 16, 32, 24)])
@pytest.mark.parametrize("fold", [False, True])
@pytest.mark.parametrize("multiple", [1, 16])
def test_rows(widths: tuple[int, ...], fold: bool, multiple: int) -> None:
    from fullshard.quant import fp8_kernels

    torch.manual_seed(0)
    xs = [torch.randn(5, n).bfloat16() for n in widths]
    for x in xs:
        x[1] = 0
    factors = [torch.rand(n) for n in widths] if fold else None
    expected = fp8.quantize_rows(xs, factors, multiple)
    values, scales = torch.full(expected.values.shape, torch.nan), torch.empty(5, 1)
    assert values.shape[1] == sum(widths) + -sum(widths) % multiple
    fp8_kernels.quantize_rows(xs, factors, values, scales)
    assert torch.equal(values.to(fp8.DTYPE).view(torch.uint8), expected.values.view(torch.uint8))
    assert torch.equal(scales, expected.scales)


def test_transpose_into_columns() -> None:
    from fullshard.quant import fp8_kernels

    matrix, out = torch.randint(0, 256, (200, 130), dtype=torch.uint8), torch.zeros(130, 300, dtype=torch.uint8)
    fp8_kernels.transpose(matrix, out[:, 50:250])
    assert torch.equal(out[:, 50:250], matrix.t()) and not out[:, :50].any() and not out[:, 250:].any()
    out.fill_(7)
    fp8_kernels.transpose(matrix, out[:, 50:260])
    assert torch.equal(out[:, 50:250], matrix.t()) and not out[:, 250:260].any() and (out[:, 260:] == 7).all()
