"""Products of frozen weights by form: the same as those of the layers themselves."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fullshard.quant import base_product
from fullshard.quant.linear import NF4Linear
from fullshard.quant.sharded_groups import Scheme


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    plain = nn.Linear(48, 80, bias=False).requires_grad_(False)
    four = [NF4Linear.of(plain, Scheme(kind, 64, double)) for kind in ("nf4", "fp4") for double in (False, True)]
    return [plain, *four]


@pytest.mark.parametrize("index", range(5))
def test_products_are_those_of_the_layer(index: int) -> None:
    layer = layers()[index]
    found = base_product.base_form(layer)
    assert found is not None
    form, tensors, _ = found
    assert base_product.shape(form, tensors) == (80, 48)
    x, dy = torch.randn(7, 48, requires_grad=True), torch.randn(7, 80)
    y = layer(x)
    (dx,) = torch.autograd.grad(y, x, dy)
    x = x.detach()
    out = torch.empty(7, 80)
    assert torch.equal(base_product.product(form, tensors, x, out), y) and torch.equal(out, y)
    assert torch.equal(base_product.product(form, tensors, x), y)
    bias = torch.randn(80)
    torch.testing.assert_close(base_product.product(form, tensors, x, bias=bias), y + bias)
    assert torch.equal(base_product.grad_input(form, tensors, dy), dx)
    base = torch.randn(7, 48)
    sums = base_product.grad_input(form, tensors, dy, base.clone(), accumulate=True)
    torch.testing.assert_close(sums, base + dx)
    assert torch.equal(base_product.grad_input(form, tensors, dy, base), dx) and torch.equal(base, dx)


def test_other_layers_have_no_form() -> None:
    class Doubled(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    assert base_product.base_form(Doubled(4, 4)) is None
    assert base_product.base_form(nn.Conv1d(4, 4, 1)) is None
