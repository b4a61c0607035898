"""Weights are dequantized into one buffer, and nobody who still needs a weight loses it to the next one."""

import threading

import torch
from torch import nn

from fullshard.quant import workspace
from fullshard.quant.linear import NF4Linear
from fullshard.quant.sharded_groups import Scheme, weight_of


def parts_of(layer):
    return layer.packed, layer.absmax, layer.nested


def layer_of(rows, columns, double=True):
    return NF4Linear.of(nn.Linear(columns, rows, bias=False), Scheme(double=double))


def dequantized(layer, dtype=torch.float32):
    return workspace.dequantized(*parts_of(layer), layer.shape, 64, "nf4", dtype)


def test_all_weights_share_one_buffer():
    small, large = layer_of(48, 64), layer_of(96, 128)
    with torch.no_grad():
        with dequantized(large) as weight:
            address = weight.data_ptr()
            assert torch.equal(weight, large.dequantize())
        for layer in (small, large):
            for dtype in (torch.float32, torch.bfloat16):
                with dequantized(layer, dtype) as weight:
                    assert weight.data_ptr() == address
                    assert torch.equal(weight, weight_of(*parts_of(layer), layer.shape, 64, "nf4", dtype))


def test_forward_and_backward_take_no_other_memory():
    """The dense weight is nowhere but in the buffer: in forward, in backward, and in a pass without gradients."""
    layer = layer_of(96, 128)
    made = []
    plain = weight_of

    def counted(*args):
        made.append(len(args) == 8)
        return plain(*args)

    workspace.weight_of, kept = counted, workspace.weight_of
    try:
        x = torch.randn(5, 128, requires_grad=True)
        layer(x).sum().backward()
        with torch.no_grad():
            layer(x)
    finally:
        workspace.weight_of = kept
    assert made == [True] * 3


def test_a_recorded_backward_keeps_its_weights():
    """With create_graph autograd keeps the weight that backward used: the next layer must not overwrite it."""
    layers = nn.Sequential(layer_of(128, 128), nn.Tanh(), layer_of(128, 128), nn.Tanh(), layer_of(128, 128))
    dense = nn.Sequential(*(nn.Linear(128, 128, bias=False) if isinstance(m, NF4Linear) else m for m in layers))
    for ours, plain in zip(layers, dense, strict=True):
        if isinstance(ours, NF4Linear):
            plain.weight.data = ours.dequantize()
    x = torch.randn(4, 128)
    found = []
    for model in (layers, dense):
        given = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(model(given).square().sum(), given, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), given)
        found.append(second)
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-5)


def test_a_second_thread_gets_memory_of_its_own():
    one, other = layer_of(96, 128), layer_of(96, 128)
    found = []

    @torch.no_grad()
    def use():
        with dequantized(other) as weight:
            found.append((weight.data_ptr(), torch.equal(weight, other.dequantize())))

    with torch.no_grad(), dequantized(one) as weight:
        thread = threading.Thread(target=use)
        thread.start()
        thread.join()
        assert torch.equal(weight, one.dequantize())
        assert found == [(found[0][0], True)] and found[0][0] != weight.data_ptr()
