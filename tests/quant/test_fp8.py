"""fp8 weights: rounding against fp64, products against dense ones, shards and files bit for bit."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import Conv1D, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

from fullshard.config.errors import QuantizationError
from fullshard.distributed import runtime
from fullshard.fsdp import FSDPv2, transformer_auto_wrap_policy
from fullshard.lora.fused import fuse_lora
from fullshard.lora.model_size import count_parameters, dense_line
from fullshard.quant import base_product, fp8
from fullshard.quant.fp8_linear import FP8Linear
from fullshard.quant.quantize import dequantize_model, quantize_model, quantized_layers
from fullshard.weights.load import load_pretrained
from tests.fsdp.programs import mesh_for
from tests.pool import ranks
from tests.quant.programs import batches, llama, train, with_lora

STEP = 2.0**-4
"""Half of the distance between neighbors in e4m3, relative to the smaller one."""


def apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The relative error of a matrix."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


# --- rounding ---------------------------------------------------------------------------------------------------------


def nearest(x: torch.Tensor) -> torch.Tensor:
    """Each element rounded to the nearest fp8 number times its row's scale, by trying all of them in fp64."""
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    numbers = numbers[numbers.isfinite()].unique()
    scales = x.double().abs().amax(dim=1, keepdim=True) / numbers.max()
    at = ((x.double() / scales).unsqueeze(-1) - numbers).abs().argmin(dim=-1)
    return numbers[at] * scales


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_rounded_to_the_nearest_number(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (torch.randn(6, 96) * torch.logspace(-6, 6, 6)[:, None]).to(dtype)
    found = fp8.dequantize(fp8.pack(x), torch.float64)
    errors, least = (found - x.double()).abs(), (nearest(x) - x.double()).abs()
    assert (errors <= least + 1e-6 * x.double().abs()).all()  # scales are fp32
    inside = x.double().abs() > x.double().abs().amax(dim=1, keepdim=True) * 2.0**-14
    assert ((found / x.double() - 1).abs()[inside] <= STEP * (1 + 1e-6)).all()


def test_rows_of_zeros_and_of_not_a_number() -> None:
    x = torch.randn(3, 32)
    x[0], x[1, 5] = 0, torch.nan
    found = fp8.dequantize(fp8.pack(x), torch.float32)
    assert torch.equal(found[0], torch.zeros(32)) and found[1].isnan().all() and found[2].isfinite().all()


# --- products ---------------------------------------------------------------------------------------------------------


def weights(*sizes: tuple[int, int]) -> list[fp8.Weight]:
    torch.manual_seed(1)
    return [fp8.pack(torch.randn(size) * torch.logspace(-2, 0, size[0])[:, None]) for size in sizes]


def test_product_is_that_of_the_rounded_matrices() -> None:
    (weight,), x = weights((48, 64)), torch.randn(10, 64)
    dense, rows = fp8.dequantize(weight, torch.float64), fp8.pack(x)
    expected = fp8.dequantize(rows, torch.float64) @ dense.t()
    assert apart(fp8.product(weight, fp8.prepare(x)), expected) < 1e-6
    assert apart(fp8.product(weight, fp8.prepare(x)), x.double() @ dense.t()) < 0.05


def test_gradient_of_the_input_has_the_scales_of_the_weight_s_rows() -> None:
    """They differ by a factor of 100: leaving them out, or quantizing before them, would show."""
    held = weights((48, 64), (16, 64), (32, 64))
    grads = [torch.randn(10, w.packed.shape[0]) * factor for w, factor in zip(held, (1.0, 30.0, 0.1), strict=True)]
    scaled = torch.cat([dy * w.scales.view(1, -1) for w, dy in zip(held, grads, strict=True)], dim=1)
    values = torch.cat([w.values.double() for w in held])
    expected = fp8.dequantize(fp8.pack(scaled), torch.float64) @ values
    assert apart(fp8.grad_input(held, grads), expected) < 1e-6
    exact = sum(dy.double() @ fp8.dequantize(w, torch.float64) for w, dy in zip(held, grads, strict=True))
    assert apart(fp8.grad_input(held, grads), exact) < 0.05
    alone = fp8.grad_input(held[:1], grads[:1])
    out = torch.ones(10, 64)
    torch.testing.assert_close(fp8.grad_input(held[:1], grads[:1], out, accumulate=True), alone + 1)
    assert torch.equal(fp8.grad_input(held[:1], grads[:1], out), alone) and torch.equal(out, alone)


def test_gradients_lose_less_in_e4m3_than_in_e5m2() -> None:
    """Why gradients use the same format as everything else: with a scale per row, three bits beat a wide range."""
    torch.manual_seed(2)
    grads = torch.randn(64, 512) * torch.logspace(-3, 0, 512)
    largest = grads.abs().amax(dim=1, keepdim=True)
    wide = (grads * (57344 / largest)).to(torch.float8_e5m2).float() * (largest / 57344)
    assert apart(fp8.dequantize(fp8.pack(grads), torch.float32), grads) < 0.6 * apart(wide, grads)


def test_weights_that_share_an_input() -> None:
    torch.manual_seed(3)
    plain = [nn.Linear(64, n, bias=False).requires_grad_(False) for n in (48, 16, 24)]
    layers: list[nn.Module] = [FP8Linear.of(plain[0]), FP8Linear.of(plain[1]), plain[2]]
    forms, tensors, _ = zip(*(base_product.base_form(layer) for layer in layers), strict=True)  # type: ignore[misc]
    x = torch.randn(7, 64, requires_grad=True)
    ready, ys = base_product.prepare(forms, x.detach()), [layer(x) for layer in layers]
    for form, held, y in zip(forms, tensors, ys, strict=True):
        assert torch.equal(base_product.product(form, held, ready), y)
        bias = torch.randn(y.shape[1])
        torch.testing.assert_close(base_product.product(form, held, ready, bias=bias), y + bias)
    grads = [torch.randn_like(y) for y in ys]
    (expected,) = torch.autograd.grad(ys, x, grads)
    products = [base_product.Gradient(*one) for one in zip(forms, tensors, grads, strict=True)]
    assert apart(base_product.grad_input_sum(products), expected) < 0.02
    dh, a = torch.randn(7, 24), torch.randn(24, 64) * 0.1
    for some in (products, products[:2], products[2:]):
        alone = base_product.grad_input_sum(some)
        assert apart(base_product.grad_input_sum(some, adapters=(dh, a)) - alone, dh @ a) < 0.1


# --- the layer --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
def test_layer_computes_what_a_dense_one_computes(bias: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(96, 80, bias=bias)
    layer = FP8Linear.of(plain)
    x = torch.randn(3, 5, 96, requires_grad=True)
    y, expected = layer(x), plain(x)
    g = torch.randn_like(y)
    (dx,), (their_dx,) = torch.autograd.grad(y, x, g), torch.autograd.grad(expected, x, g)
    assert apart(y.detach(), expected.detach()) < 0.05 and apart(dx, their_dx) < 0.05
    assert apart(layer.dequantize(), plain.weight.detach()) < 0.03
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16


def test_layer_is_a_linear_layer_with_a_frozen_weight() -> None:
    layer = FP8Linear.of(nn.Linear(32, 16))
    assert isinstance(layer, nn.Linear) and layer.weight.shape == (16, 32) and layer.weight.dtype == torch.float32
    assert torch.equal(layer.weight + 0, layer.dequantize())
    assert {n: tuple(p.shape) for n, p in layer.parts.items()} == {"packed": (16, 32), "scales": (16, 4)}
    assert all(p.dtype == torch.uint8 and not p.requires_grad for p in layer.parts.values())
    with pytest.raises(QuantizationError, match="a fp8 weight cannot be changed in place"):
        layer.weight.add_(1)
    with pytest.raises(QuantizationError, match="fp8 weights are frozen"):
        layer.requires_grad_()


def test_only_bytes_are_kept_for_backward() -> None:
    layer, kept = FP8Linear.of(nn.Linear(64, 32)), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(torch.randn(2, 64, requires_grad=True))
    assert {tuple(t.shape) for t in kept} == {(32, 64), (32, 4)} and all(t.dtype == torch.uint8 for t in kept)


def test_compiled_as_one_opaque_operator() -> None:
    layer = FP8Linear.of(nn.Linear(64, 32))
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x, g = torch.randn(4, 64, requires_grad=True), torch.randn(4, 32)
    results = [(y := module(x), *torch.autograd.grad(y, x, g)) for module in (layer, compiled)]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_layers_of_odd_sizes_stay_dense() -> None:
    model = nn.ModuleDict({"a": nn.Linear(32, 16), "b": nn.Linear(32, 10), "c": nn.Linear(20, 16), "d": Conv1D(48, 32)})
    assert list(quantized_layers(quantize_model(model, "fp8"))) == ["a", "d"]
    with pytest.raises(QuantizationError, match="no weight to quantize to fp8"):
        quantize_model(nn.Sequential(nn.Linear(10, 10)), "fp8")


def test_model_counts_converts_back_and_trains_adapters() -> None:
    plain = llama()
    counts = count_parameters(plain)[1]
    model = quantize_model(copy.deepcopy(plain), "fp8")
    assert len(quantized_layers(model)) == 14 and count_parameters(model)[1] == counts
    assert str(dense_line(model)).startswith("fp8: ") and "head" in str(dense_line(model))
    assert not hasattr(model.config, "quantization_config")
    dense = dequantize_model(copy.deepcopy(model))
    assert not quantized_layers(dense) and type(dense.model.layers[0].mlp.up_proj) is nn.Linear
    losses, expected = train(with_lora(model), 2, sharded=False), train(with_lora(plain), 2, sharded=False)
    assert losses != expected and losses == pytest.approx(expected, rel=0.01)


def test_conv1d_is_quantized_by_output_column() -> None:
    torch.manual_seed(0)
    layer = Conv1D(48, 32)
    made = FP8Linear.of(layer)
    assert made.transposed and torch.equal(made.packed, fp8.pack(layer.weight.detach().T).packed)
    parts = {name: part.data for name, part in made.parts.items()}
    assert made.as_files(parts)["weight"].shape == (32, 48)


# --- LoRA groups ------------------------------------------------------------------------------------------------------


def test_fused_adapters_quantize_an_input_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that share an input: outputs of PEFT's layers one by one, and gradients hardly further from exact."""
    counted: list[int] = []
    quantize = fp8.quantize_rows
    monkeypatch.setattr(fp8, "quantize_rows", lambda *args: (counted.append(len(args)), quantize(*args))[1])
    logits, grads = [], []
    for kind in ("dense", "one by one", "fused"):
        model = quantize_model(llama(), "fp8")
        model = with_lora(dequantize_model(model) if kind == "dense" else model)
        if kind == "fused":
            fuse_lora(model, {LlamaAttention: [("q_proj", "k_proj", "v_proj")], LlamaMLP: [("gate_proj", "up_proj")]})
        counted.clear()
        logits.append(model(input_ids=batches(1)[0]).logits)
        forward = len(counted)
        logits[-1].pow(2).mean().backward()
        assert (forward, counted.count(3)) == {"dense": (0, 0), "one by one": (14, 11), "fused": (8, 7)}[kind]
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad]))
    torch.testing.assert_close(logits[2], logits[1], rtol=1e-4, atol=1e-4)
    # These adapters are as large as the weights; fused ones round `dh @ A` too.
    assert apart(grads[2], grads[0]) < 1.5 * apart(grads[1], grads[0]) < 0.06


# --- shards -----------------------------------------------------------------------------------------------------------


def _sharded(model: nn.Module, **options: object) -> nn.Module:
    wrap: object = FSDPv2(model, mesh_for("FULL_SHARD"), auto_wrap_policy=transformer_auto_wrap_policy, **options)
    assert isinstance(wrap, nn.Module)
    return wrap


@ranks(2)
def test_two_ranks_equal_one_device() -> None:
    expected = train(with_lora(quantize_model(llama(), "fp8")), 2, sharded=False)
    model = _sharded(with_lora(quantize_model(llama(), "fp8")), small_parameter_bytes=2048)
    layer = next(iter(quantized_layers(model).values()))
    assert [tuple(p.to_local().shape) for p in layer.parts.values()] == [(64, 128), (64, 4)]
    losses = train(model, 2, sharded=True)
    assert losses[0] == pytest.approx(expected[0], abs=1e-6)
    # Gradients summed in another order differ in the last bit, after which some inputs round to the next fp8 number.
    assert losses[1] == pytest.approx(expected[1], abs=1e-4)
    with pytest.raises(QuantizationError, match="of a fp8 weight"):
        layer.dequantize()


def test_peft_finds_the_layers() -> None:
    model = quantize_model(llama(), "fp8")
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", use_dora=True))
    assert len(quantized_layers(adapted)) == 14
    assert sum("lora_A" in name for name, _ in adapted.named_parameters()) == 14


@ranks(2)
def test_files_are_read_by_rows_and_written_dequantized(tmp_path: Path) -> None:
    if runtime.is_main():
        llama(torch.bfloat16).save_pretrained(tmp_path / "model")
    runtime.barrier()
    model = load_pretrained(tmp_path / "model", quantization_config="fp8", progress=False)
    expected = quantize_model(LlamaForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16), "fp8")
    for layer, other in zip(quantized_layers(model).values(), quantized_layers(expected).values(), strict=True):
        assert all(torch.equal(part.full_tensor(), other.parts[name]) for name, part in layer.parts.items())
    model.save_pretrained(tmp_path / "out")
    runtime.barrier()
    written = LlamaForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert not hasattr(written.config, "quantization_config") and written.dtype == torch.bfloat16
    dense = dict(dequantize_model(expected).named_parameters())
    assert all(torch.equal(p, dense[name]) for name, p in written.named_parameters())
