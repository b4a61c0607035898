"""The Triton kernels give the bits of the CPU reference. `benchmarks/qlora_gpu.py` checks more cases and times them."""

import itertools

import pytest
import torch

from fullshard.quant import fp8, nf4
from fullshard.quant.linear import NF4Linear
from fullshard.quant.sharded_groups import Scheme, dense, quantize_shard

pytestmark = pytest.mark.gpu


def bits(t):
    return t.contiguous().view(-1).view(torch.uint8).cpu()


@pytest.mark.parametrize(("quant_type", "double"), list(itertools.product(["nf4", "fp4"], [False, True])))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kernels_give_the_bits_of_the_cpu(quant_type, double, dtype):
    torch.manual_seed(0)
    for shape, blocksize in itertools.product([(64, 64), (1000, 333), (129,), (1, 1), (2048, 512)], [64, 256, 4096]):
        w = (torch.randn(shape) * 0.02).to(dtype)
        w.view(-1)[: w.numel() // 3] = 0
        options = {"quant_type": quant_type, "blocksize": blocksize, "compress_statistics": double}
        packed, state = nf4.quantize_4bit(w, **options)
        got, held = nf4.quantize_4bit(w.cuda(), **options)
        assert torch.equal(bits(got), bits(packed)) and torch.equal(bits(held.absmax), bits(state.absmax))
        expected = nf4.dequantize_4bit(packed, state)
        assert torch.equal(bits(nf4.dequantize_4bit(got, held)), bits(expected))
        scheme = Scheme(quant_type, blocksize, double)
        parts = quantize_shard(w.cuda().view(-1), w.numel(), scheme)
        assert torch.equal(bits(dense(parts, tuple(shape), scheme, dtype)), bits(expected))


def test_a_layer_on_the_gpu_equals_one_on_the_cpu():
    torch.manual_seed(0)
    layer = NF4Linear.of(torch.nn.Linear(320, 96), Scheme(double=True))
    x, g = torch.randn(5, 320, requires_grad=True), torch.randn(5, 96)
    y = layer(x)
    y.backward(g)
    there = x.detach().cuda().requires_grad_()
    out = layer.cuda()(there)
    out.backward(g.cuda())
    torch.testing.assert_close(out.cpu(), y, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(there.grad.cpu(), x.grad, rtol=1e-4, atol=1e-4)


def test_streams_do_not_share_a_buffer():
    """Products on two streams at once: each stream has a buffer of its own for the dequantized weight."""
    torch.manual_seed(0)
    layers = [NF4Linear.of(torch.nn.Linear(2048, 2048, bias=False), Scheme(double=True)).cuda() for _ in range(2)]
    x = torch.randn(4096, 2048, device="cuda")
    with torch.no_grad():
        expected = [layer(x) for layer in layers]
        streams = [torch.cuda.Stream() for _ in layers]
        found = [[], []]
        torch.cuda.synchronize()
        for _ in range(20):
            for layer, stream, outputs in zip(layers, streams, found, strict=True):
                with torch.cuda.stream(stream):
                    outputs.append((layer(x) - expected[layers.index(layer)]).abs().max())
        torch.cuda.synchronize()
    assert all(float(difference) == 0 for outputs in found for difference in outputs)


@pytest.mark.parametrize(
    "widths", [(48,), (4096,), (20000,), (64, 48), (64, 8), (4096, 1024, 1024, 24), (16, 16, 16, 16, 32)]
)
@pytest.mark.parametrize("fold", [False, True])
def test_fp8_kernels_give_the_bits_of_the_cpu(widths, fold):
    torch.manual_seed(0)
    xs = [torch.randn(33, n).bfloat16() * torch.logspace(-3, 3, 33)[:, None].bfloat16() for n in widths]
    for x in xs:
        x[5] = 0
    factors = [torch.rand(n) for n in widths] if fold else None
    expected = fp8.quantize_rows(xs, factors, 16)
    found = fp8.quantize_rows([x.cuda() for x in xs], [f.cuda() for f in factors] if fold else None, 16)
    assert torch.equal(bits(found.values), bits(expected.values)) and torch.equal(found.scales.cpu(), expected.scales)


@pytest.mark.parametrize("sizes", [(1024, (512,)), (256, (512, 128, 128)), (48, (16,))])
def test_fp8_products_on_the_gpu_equal_those_on_the_cpu(sizes):
    torch.manual_seed(0)
    columns, outs = sizes
    weights = [fp8.pack(torch.randn(n, columns) * 0.02) for n in outs]
    there = [fp8.Weight(*(t.cuda() for t in w)) for w in weights]
    x, grads = torch.randn(77, columns).bfloat16(), [torch.randn(77, n).bfloat16() for n in outs]
    ready, gpu_ready = fp8.prepare(x), fp8.prepare(x.cuda())
    for weight, on_gpu in zip(weights, there, strict=True):
        expected = fp8.product(weight, ready)
        torch.testing.assert_close(fp8.product(on_gpu, gpu_ready).cpu(), expected, rtol=2e-2, atol=2e-2)
    assert all(t.is_contiguous() for t in fp8.pack(torch.randn(16, columns, device="cuda")))  # rows without gaps
    found = fp8.grad_input(there, [g.cuda() for g in grads])
    torch.testing.assert_close(found.cpu(), fp8.grad_input(weights, grads), rtol=2e-2, atol=2e-2)
    dh, a = torch.randn(77, 24).bfloat16(), torch.randn(24, columns).bfloat16() * 0.02
    found = fp8.grad_input(there, [g.cuda() for g in grads], adapters=(dh.cuda(), a.cuda()))
    expected = fp8.grad_input(weights, grads, adapters=(dh, a))
    torch.testing.assert_close(found.cpu(), expected, rtol=2e-2, atol=2e-2)
