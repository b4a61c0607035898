"""`NF4Linear` computes what a dense layer with bitsandbytes' rounded weight computes, and keeps nothing dense."""

import bitsandbytes as bnb
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.checkpoint import checkpoint

from fullshard.config.errors import QuantizationError
from fullshard.quant.linear import NF4Linear
from fullshard.quant.quantize import dequantize_model, quantize_model
from fullshard.quant.quantized_linear import QuantizedWeight
from fullshard.quant.sharded_groups import Scheme
from tests.quant.programs import llama, rounded, with_lora
from tests.quant.unpacked import unpacked

SCHEMES = [Scheme(), Scheme(double=True), Scheme("fp4", 128, True)]


def pair(scheme, bias=True, compute_dtype=None):
    """An `NF4Linear`, and the dense layer bitsandbytes rounds to."""
    torch.manual_seed(0)
    plain = nn.Linear(192, 100, bias=bias)
    layer = NF4Linear.of(plain, scheme, compute_dtype)
    packed, state = bnb.functional.quantize_4bit(
        plain.weight.data, blocksize=scheme.blocksize, compress_statistics=scheme.double, quant_type=scheme.quant_type
    )
    plain.weight.data = unpacked(packed, state)
    return layer, plain.requires_grad_(False)


def results(module, x, g):
    x = x.clone().requires_grad_()
    y = module(x)
    y.backward(g)
    return y.detach(), x.grad


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_forward_and_backward_equal_a_dense_layer(scheme, bias):
    layer, plain = pair(scheme, bias)
    x, g = torch.randn(3, 5, 192), torch.randn(3, 5, 100)
    for got, expected in zip(results(layer, x, g), results(plain, x, g), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


def test_equals_linear4bit_of_bitsandbytes():
    torch.manual_seed(0)
    plain = nn.Linear(192, 100)
    layer = NF4Linear.of(plain, Scheme(double=True), torch.bfloat16)
    theirs = bnb.nn.Linear4bit(192, 100, compute_dtype=torch.bfloat16, compress_statistics=True, quant_type="nf4")
    theirs.weight = bnb.nn.Params4bit(plain.weight.data, requires_grad=False, quant_type="nf4")
    theirs.bias = plain.bias
    theirs.to("cpu")
    x, g = torch.randn(4, 192), torch.randn(4, 100)
    (y, dx), (expected, their_dx) = results(layer, x, g), results(theirs, x, g)
    assert y.dtype == expected.dtype == torch.float32  # the result has the dtype of the input
    torch.testing.assert_close(y, expected, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(dx, their_dx, rtol=1e-2, atol=1e-2)


def test_nothing_dense_is_kept_for_backward():
    layer, _ = pair(SCHEMES[1])
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(torch.randn(2, 192, requires_grad=True))
    assert {tuple(t.shape) for t in kept} == {tuple(p.shape) for p in layer.parts.values()}
    assert all(t.dtype == torch.uint8 for t in kept)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant):
    layer, plain = pair(SCHEMES[1])
    x, g = torch.randn(4, 192), torch.randn(4, 100)
    got = results(lambda t: checkpoint(layer, t, use_reentrant=reentrant), x, g)
    for a, b in zip(got, results(plain, x, g), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("double", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_compile_keeps_nothing_dense_either(double):
    layer, plain = pair(Scheme(double=double))
    saved = []

    def backend(graph, inputs):
        from functorch.compile import make_boxed_func
        from torch._dynamo.backends.common import aot_autograd
        from torch._functorch.partitioners import min_cut_rematerialization_partition

        def forward(made, example):
            saved.extend(node for node in made.graph.output_node().args[0] if hasattr(node, "meta"))
            return make_boxed_func(made.forward)

        return aot_autograd(
            fw_compiler=forward,
            bw_compiler=lambda m, e: make_boxed_func(m.forward),
            partition_fn=min_cut_rematerialization_partition,
        )(graph, inputs)

    torch._dynamo.reset()
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    x, g = torch.randn(4, 192), torch.randn(4, 100)
    for a, b in zip(results(compiled, x, g), results(plain, x, g), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    shapes = [tuple(node.meta["val"].shape) for node in saved]
    assert (4, 100) in shapes and (100, 192) not in shapes and (192, 100) not in shapes


@pytest.mark.parametrize(
    ("compute", "given", "autocast", "expected"),
    [
        (None, torch.bfloat16, False, torch.bfloat16),
        (None, torch.float32, True, torch.bfloat16),
        (torch.float32, torch.bfloat16, False, torch.bfloat16),
        (torch.float32, torch.float32, True, torch.float32),
    ],
)
def test_dtypes(compute, given, autocast, expected):
    layer, plain = pair(SCHEMES[0], compute_dtype=compute)
    x = torch.randn(4, 192).to(given)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = layer(x)
    assert y.dtype == expected
    exact = plain(x.float())
    narrow = compute is None
    torch.testing.assert_close(y.float(), exact, rtol=2e-2 if narrow else 1e-2, atol=2e-2 if narrow else 5e-3)
    if compute == torch.float32 and given == torch.float32:
        torch.testing.assert_close(y, exact, rtol=1e-6, atol=1e-6)  # autocast did not get at the product


def test_the_weight_is_read_as_a_dense_one_and_never_written():
    layer, plain = pair(SCHEMES[1])
    weight = layer.weight
    assert isinstance(weight, QuantizedWeight)
    assert (weight.shape, weight.dtype, weight.device) == (plain.weight.shape, torch.float32, plain.weight.device)
    torch.testing.assert_close(weight @ torch.eye(192), plain.weight, rtol=0, atol=0)
    torch.testing.assert_close(weight.data.clone(), plain.weight, rtol=0, atol=0)
    before = {name: p.clone() for name, p in layer.parts.items()}
    with pytest.raises(QuantizationError, match="cannot be changed"):
        layer.weight.data += torch.ones(100, 192)
    with pytest.raises(QuantizationError, match="cannot be changed"):
        layer.weight.data = torch.ones(100, 192)
    with pytest.raises(QuantizationError, match="cannot be changed"):
        torch.nn.init.zeros_(layer.weight)
    assert all(torch.equal(p, before[name]) for name, p in layer.parts.items())


def test_casts_do_not_reach_the_bytes():
    layer, _ = pair(SCHEMES[0])
    before = {name: p.clone() for name, p in layer.parts.items()}
    layer.half().to(torch.bfloat16).double()
    assert layer.bias.dtype == torch.float64
    assert all(p.dtype == torch.uint8 and torch.equal(p, before[name]) for name, p in layer.parts.items())


def test_it_cannot_train():
    layer, _ = pair(SCHEMES[0])
    with pytest.raises(QuantizationError, match="Add adapters"):
        layer.requires_grad_(True)
    assert layer.requires_grad_(False) is layer


def test_states_come_and_go():
    layer, _ = pair(Scheme(double=True, storage=torch.bfloat16))
    packed, state = layer.quant_state()
    assert packed.dtype == torch.bfloat16
    other = NF4Linear(192, 100, scheme=Scheme(double=True))
    other.set_quant_state(packed, state)
    assert all(torch.equal(p, other.parts[name]) for name, p in layer.parts.items())
    assert other.scheme.storage == torch.bfloat16
    with pytest.raises(QuantizationError, match=r"has shape \(100, 192\), the layer \(100, 64\)"):
        NF4Linear(64, 100).set_quant_state(packed, state)
    with pytest.raises(QuantizationError, match="but the layer expects"):
        NF4Linear(192, 100).set_quant_state(packed, state)


def test_peft_trains_it_like_a_dense_layer():
    scheme, ids = Scheme(double=True), torch.randint(3, 131, (2, 9))
    ours, dense = with_lora(quantize_model(llama(), scheme)), with_lora(rounded(llama(), scheme))
    gradients = []
    for model in (ours, dense):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.requires_grad} | {"loss": loss.detach()})
    assert len(gradients[0]) == 2 * 7 * 2 + 1
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("safe", [False, True])
def test_merging_is_refused_unless_dequantized_first(safe):
    ids = torch.randint(3, 131, (2, 9))
    model = with_lora(quantize_model(llama(), Scheme(double=True))).eval()
    expected = model(input_ids=ids).logits
    with pytest.raises(QuantizationError, match="Merge into dense weights"):
        model.merge_adapter(safe_merge=safe)
    torch.testing.assert_close(model(input_ids=ids).logits, expected, rtol=0, atol=0)
    merged = dequantize_model(model).merge_and_unload(safe_merge=safe)
    assert not any(isinstance(m, NF4Linear) for m in merged.modules())
    torch.testing.assert_close(merged(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-5)


def test_adapters_are_made_in_the_compute_dtype():
    for dtype, automatic, expected in [
        (torch.bfloat16, True, torch.float32), (torch.bfloat16, False, torch.bfloat16), (None, False, torch.float32),
    ]:  # fmt: skip
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))
        model[0] = NF4Linear.of(model[0], Scheme(), dtype)
        peft = get_peft_model(model, LoraConfig(r=2, target_modules=["0"]), autocast_adapter_dtype=automatic)
        found = {p.dtype for n, p in peft.named_parameters() if "lora" in n}
        assert found == {expected}
