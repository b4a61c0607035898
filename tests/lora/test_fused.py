"""LoRA layers that run as groups against PEFT's own: numbers, what steps aside, names and files."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from fullshard.activations.checkpointing import checkpoint_module
from fullshard.lora.fused import FusedReport, fuse_lora, report_sharded
from fullshard.lora.fused_dropout import Dropout
from fullshard.lora.gated_mlp import fuse_mlps
from fullshard.models.layer_groups import gated_mlps, shared_inputs
from fullshard.quant.config import Quantization
from fullshard.quant.quantize import quantize_model
from fullshard.quant.sharded_groups import Scheme
from tests.lora.fused_models import ARCHITECTURES, IDS, adapted, assert_same, bare, step

QKV, BRANCHES = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
GATED = frozenset((QKV, ("o_proj",), BRANCHES, ("down_proj",)))
GROUPS: dict[str, Any] = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "cohere"), GATED),
    "phi3": {("qkv_proj",), ("o_proj",), ("gate_up_proj",), ("down_proj",)},
    "phi": {QKV, ("dense",), ("fc1",), ("fc2",)},
    "starcoder2": {QKV, ("o_proj",), ("c_fc",), ("c_proj",)},
    "neox": {("query_key_value",), ("dense",), ("dense_h_to_4h",), ("dense_4h_to_h",)},
    "deepseek": {("q_a_proj", "kv_a_proj_with_mqa"), ("q_b_proj",), ("kv_b_proj",), ("o_proj",)},
    **dict.fromkeys(("mixtral", "qwen3_moe", "gpt_oss"), frozenset((QKV, ("o_proj",)))),
}
EPSILON = 5e-4
"""A step of finite differences; norms compute in float32, whose rounding a smaller one would show."""
EXPERTS = ("deepseek", "mixtral", "qwen3_moe")


_known: dict[type, Any] = {}


def fuse(model: Any) -> FusedReport:
    kind = type(model.get_base_model())
    if kind not in _known:
        _known[kind] = shared_inputs(model)
    return fuse_lora(model, _known[kind])


def kinds(report: FusedReport) -> set[tuple[str, ...]]:
    return {tuple(name.rpartition(".")[2] for name in group) for group in report.groups}


def layers(model: Any) -> Any:
    return model.get_base_model().model.layers


def test_no_tokens_are_no_error() -> None:
    """An expert, or a rank, may get none."""
    model = adapted(bare("llama"))
    fuse(model)
    attention, x = layers(model)[0].self_attn, torch.empty(0, 32, requires_grad=True)
    found = [attention.q_proj(x), attention.k_proj(x), attention.v_proj(x), attention.o_proj(x)]
    assert [tuple(y.shape) for y in found] == [(0, 32), (0, 16), (0, 16), (0, 32)]
    torch.cat(found, 1).sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape


def test_inputs_are_recorded_whatever_the_default_device_is() -> None:
    model = bare("llama")
    expected = shared_inputs(model), gated_mlps(model)
    with torch.device("cuda"):  # where this build has none, a tensor made there is an error
        assert (shared_inputs(model), gated_mlps(model)) == expected
    assert expected[0] and expected[1]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == "qwen2" else [pytest.mark.slow]) for n in ARCHITECTURES]
)
def test_architectures_train_as_with_peft(name: str) -> None:
    model = adapted(bare(name), rank_pattern={"k_proj": 2}, use_rslora=True)
    wide = name not in ("gpt_oss", *EXPERTS)  # torch's products of experts have no float64
    model = model.double() if wide else model
    expected = step(model)
    report = fuse(model)
    assert kinds(report) == GROUPS[name]
    assert bool(report.aside) == (name in EXPERTS)
    assert "ParamWrapper" in report.note() if report.aside else not report.note()
    assert_same(step(model), expected, close=1e-12 if wide else 1e-5)


def test_fp32_and_bf16_stay_within_rounding() -> None:
    model = adapted(bare("llama"))
    expected = step(model)
    fuse(model)
    assert_same(step(model), expected, close=1e-5)
    assert_same(step(model.bfloat16()), expected, close=0.1)


def test_the_operator_runs_and_peft_forward_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    from peft.tuners.lora import Linear

    model = adapted(bare("llama"))
    fuse(model)
    monkeypatch.setattr(Linear, "forward", None)
    step(model)
    assert all(m._fullshard_lora[0].computed is None for m in model.modules() if hasattr(m, "_fullshard_lora"))


@pytest.mark.parametrize("double", [pytest.param(False, marks=pytest.mark.slow), True])
def test_four_bit_layers_train_as_with_peft(double: bool) -> None:
    quantized = quantize_model(bare("qwen2", hidden_size=64), Quantization(Scheme(double=double)))
    model = adapted(quantized)
    expected = step(model)
    assert kinds(fuse(model)) == GROUPS["qwen2"]
    assert_same(step(model), expected, close=2e-5)


@pytest.mark.parametrize("reentrant", [pytest.param(False, marks=pytest.mark.slow), True])
def test_gradient_checkpointing(reentrant: bool) -> None:
    model = adapted(bare("llama"), lora_dropout=0.3)
    model.enable_input_require_grads()
    fuse(model)
    expected = step(model)
    for layer in layers(model):
        checkpoint_module(layer, reentrant=reentrant)
    assert_same(step(model), expected, close=0.0)


# --- compiled -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_one_compilation_without_breaks_serves_all_layers() -> None:
    torch._dynamo.reset()
    model = adapted(bare("llama", num_hidden_layers=3), lora_dropout=0.3)
    model.enable_input_require_grads()
    fuse(model)
    expected = step(model)
    counter = CompileCounterWithBackend("aot_eager")
    for layer in layers(model):
        layer.compile(backend=counter, fullgraph=True)
    assert_same(step(model), expected, close=1e-6)
    assert counter.frame_count == 1
    names = [node.name for node in counter.graphs[0].graph.nodes if "lora_group" in str(node.target)]
    assert len(names) == 4
    step(model, seed=4)
    with model.disable_adapter():
        plain = model(input_ids=IDS).logits
    torch.testing.assert_close(plain, model.unload()(input_ids=IDS).logits)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("around", [False, True])
def test_compiled_layers_recompute_the_same_masks(backend: str, around: bool) -> None:
    """By finite differences: other masks in backward than in forward would give another gradient."""
    torch._dynamo.reset()
    model = adapted(bare("llama", num_hidden_layers=1), lora_dropout=0.4).double()
    model.enable_input_require_grads()
    fuse(model)
    fuse_mlps(model, gated_mlps(model))
    (layer,) = layers(model)
    if not around:
        checkpoint_module(layer)
    layer.compile(backend=backend)
    if around:
        layer._compiled_call_impl = _recomputed(layer._compiled_call_impl)
    _, grads = step(model)
    for name in ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"):
        parameter = layer.get_submodule(name).lora_A["default"].weight
        direction, ends = torch.randn_like(parameter), []
        for sign in (1, -1):
            parameter.data.add_(direction, alpha=sign * EPSILON)
            logits = step(model)[0].double()
            ends.append(torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten()))
            parameter.data.add_(direction, alpha=-sign * EPSILON)
        slope = float(ends[0] - ends[1]) / (2 * EPSILON)
        (grad,) = (g for n, g in grads.items() if f"{name}.lora_A" in n)
        assert slope == pytest.approx(float((grad * direction).sum()), rel=1e-2, abs=2e-5), name


def _recomputed(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: checkpoint(function, *args, use_reentrant=False, **kwargs)


# --- dropout --------------------------------------------------------------------------------------------------------


def test_dropout_drops_and_scales_the_input_of_each_adapter_on_its_own() -> None:
    model = adapted(bare("llama"), lora_dropout=0.25)
    fuse(model)
    one, again, other = step(model, seed=3), step(model, seed=3), step(model, seed=4)
    assert_same(again, one, close=0.0)
    assert float((one[0] - other[0]).abs().max()) > 1e-3
    attention = layers(model)[0].self_attn
    x = torch.ones(1, 4000, 32)
    with torch.no_grad():
        masks = []
        for layer in (attention.q_proj, attention.v_proj):
            layer.lora_A["default"].weight.copy_(torch.eye(4, 32))
            layer.lora_B["default"].weight.zero_()[:4, :4].copy_(torch.eye(4))
        for layer in (attention.q_proj, attention.k_proj, attention.v_proj):
            masks.append((layer(x) - layer.base_layer(x))[0, :, :4] / 1.5)
    q, v = masks[0], masks[2]
    for mask in (q, v):
        assert set(mask.mul(3).round(decimals=3).unique().tolist()) == {0.0, 4.0}  # kept ones are divided by 0.75
        assert float((mask > 0).float().mean()) == pytest.approx(0.75, abs=0.02)
    both = ((q > 0) & (v > 0)).float().mean()
    assert float(both) == pytest.approx(0.75**2, abs=0.02)
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(attention.q_proj(x)[0, :, :4], (attention.q_proj.base_layer(x) + 1.5)[0, :, :4])


def test_gradients_with_dropout_are_those_of_the_drawn_masks() -> None:
    torch.manual_seed(0)
    dropout, width, dtype = Dropout(torch.tensor([5]), 0.4), 3, torch.float64
    x, a = torch.randn(20, 16, dtype=dtype, requires_grad=True), torch.randn(6, 16, dtype=dtype, requires_grad=True)
    kept = [dropout.kept(x.shape, i) * dropout.scale for i in range(2)]
    assert not torch.equal(*kept)
    expected = torch.cat([(x * kept[i]) @ a[i * width : (i + 1) * width].t() for i in range(2)], dim=1)
    dh = torch.randn_like(expected)
    dx, da = torch.autograd.grad(expected, (x, a), dh)
    x, a = x.detach(), a.detach()
    torch.testing.assert_close(dropout.product(x, a, width), expected)
    torch.testing.assert_close(dropout.grad_weight(dh, x, width), da)
    torch.testing.assert_close(dropout.grad_input(dh, a, width), dx)
    torch.testing.assert_close(dropout.grad_input(dh, a, width, torch.ones_like(x)), dx + 1)


# --- stepping aside -------------------------------------------------------------------------------------------------


def hooked(model: Any) -> None:
    layers(model)[0].self_attn.k_proj.base_layer.register_forward_hook(lambda m, args, out: out * 2)


ASIDE: dict[str, tuple[dict[str, Any], Callable[[Any], Any] | None, str]] = {
    # name: (options of LoRA, what is changed before, the reason)
    "dora": ({"use_dora": True}, None, "a variant of LoRA"),
    "bias of the adapter": ({"lora_bias": True}, None, "the adapter has a bias"),
    "trained biases": ({"bias": "all", "target_modules": ["q_proj"]}, None, "their own weights or biases train"),
    "hooks": ({"target_modules": ["k_proj", "v_proj"]}, hooked, "hooks"),
    "several adapters": ({}, lambda m: m.base_model.set_adapter(["default", "second"]), "2 adapters are active"),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == "hooks" else [pytest.mark.slow]) for n in ASIDE])
def test_steps_aside_and_says_why(name: str) -> None:
    options, change, reason = ASIDE[name]
    model = adapted(bare("qwen2", num_hidden_layers=1), **options)
    if name == "several adapters":
        model.add_adapter("second", copy.deepcopy(model.peft_config["default"]))
    if change is not None:
        change(model)
    expected = step(model)
    report = fuse(model)
    assert any(reason in one for one in report.aside), report.aside
    assert reason in report.note()
    assert_same(step(model), expected, close=2e-5)


CHANGED: dict[str, Callable[[Any], Any]] = {
    "disabled": lambda m: m.base_model.disable_adapter_layers(),
    "merged": lambda m: m.merge_adapter(),
    "hooks": hooked,
    "trained": lambda m: layers(m)[0].self_attn.q_proj.base_layer.weight.requires_grad_(),
    "inputs of their own": lambda m: layers(m)[0].self_attn.k_proj.register_forward_pre_hook(lambda _, a: (a[0] * 2,)),
    "another adapter": lambda m: (
        m.add_adapter("second", copy.deepcopy(m.peft_config["default"])),
        m.set_adapter("second"),
    ),
    "no dropout of one": lambda m: layers(m)[0].self_attn.k_proj.lora_dropout.eval(),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in ("disabled", "hooks") else [pytest.mark.slow]) for n in CHANGED]
)
def test_changes_after_fusing_count(name: str) -> None:
    plain = adapted(bare("qwen2", num_hidden_layers=1))
    fused = copy.deepcopy(plain)
    fuse(fused)
    for model in (plain, fused):
        torch.manual_seed(5)
        CHANGED[name](model)
    if name in ("disabled", "merged"):
        found, expected = (model(input_ids=IDS).logits for model in (fused, plain))
        torch.testing.assert_close(found, expected, atol=0, rtol=0)
    else:
        assert_same(step(fused), step(plain), close=2e-5)


@pytest.mark.slow
def test_an_adapter_in_another_dtype_than_its_base_runs_as_in_peft() -> None:
    model = adapted(bare("llama", num_hidden_layers=1).bfloat16())
    assert {p.dtype for n, p in model.named_parameters() if "lora_" in n} == {torch.float32}
    expected = step(model)
    fuse(model)
    assert_same(step(model), expected, close=0.0)
    assert "compute in bfloat16, their adapter in float32" in report_sharded(model, None).note()
    assert not report_sharded(model, torch.bfloat16).note()


@pytest.mark.slow
def test_autocast_computes_in_its_dtype() -> None:
    model = adapted(bare("llama", num_hidden_layers=1))
    model.get_base_model().bfloat16()
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.float() if "lora_" in name else parameter.data
    with torch.autocast("cpu", torch.bfloat16):
        expected = step(model)
        fuse(model)
        layer = layers(model)[0].self_attn.q_proj
        assert layer._fullshard_lora[0].part(0, torch.bfloat16, casts=True) is not None
        assert_same(step(model), expected, close=0.05)


# --- life around it -------------------------------------------------------------------------------------------------


def test_names_files_generation_and_merging_are_pefts(tmp_path: Path) -> None:
    plain = adapted(bare("llama"))
    model = copy.deepcopy(plain)
    fuse(model)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in model.named_modules()] == [n for n, _ in plain.named_modules()]
    for made, folder in ((plain, "plain"), (model, "fused")):
        made.save_pretrained(tmp_path / folder)
    file = "adapter_model.safetensors"
    assert (tmp_path / "plain" / file).read_bytes() == (tmp_path / "fused" / file).read_bytes()
    plain.eval(), model.eval()
    texts = [m.generate(input_ids=IDS, max_new_tokens=5, do_sample=False) for m in (plain, model, copy.deepcopy(model))]
    assert torch.equal(texts[0], texts[1]) and torch.equal(texts[0], texts[2])
    merged = [m.merge_and_unload()(input_ids=IDS).logits for m in (plain, model)]
    torch.testing.assert_close(*merged, atol=0, rtol=0)


def test_unused_outputs_get_no_gradient() -> None:
    model = adapted(bare("llama", num_hidden_layers=1))
    fuse(model)
    attention, x = layers(model)[0].self_attn, torch.randn(2, 3, 32, requires_grad=True)
    q, k, _ = attention.q_proj(x), attention.k_proj(x), attention.v_proj(x)
    (q.sum() + k.sum()).backward()
    found = {n: p.grad for n, p in attention.named_parameters() if p.grad is not None}
    assert {n.partition("_")[0] for n in found} == {"q", "k"}
    expected = torch.autograd.grad(
        sum(type(m).forward(m, x).sum() for m in (attention.q_proj, attention.k_proj)), x
    )[0]  # fmt: skip
    torch.testing.assert_close(x.grad, expected)
