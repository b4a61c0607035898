"""A traced step against the same step with values: every byte, every operation."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

from fullshard.activations.levels import Level
from fullshard.config.errors import CapacityError
from fullshard.models.attention import use_own_attention
from fullshard.models.kernels_on_meta import device_kernels, product_workspace
from fullshard.models.packed_inputs import PackingMethod
from fullshard.planner.batch import BatchShape
from fullshard.planner.step_trace import Segment, StepTrace
from fullshard.planner.storages import StorageTrace
from fullshard.planner.tracer import trace_step
from fullshard.quant.config import Quantization
from fullshard.quant.sharded_groups import Scheme
from tests.planner.small_models import planned

BATCH = BatchShape(2, 24)
LEVELS = [Level.KEEP_ALL, Level.RECOMPUTE_MLP, Level.RECOMPUTE]
HALF: dict[str, Any] = {"dtype": torch.bfloat16, "precision": "bf16"}
NF4 = Quantization(Scheme())
MASKS = PackingMethod(masks=True)
EXPERTS = {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
QUICK: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("llama", {}),
    "fused lora": ("qwen3", {**HALF, "lora": {}, "fused": True}),
    "qlora": ("llama", {**HALF, "lora": {}, "fused": True, "quantize": NF4}),
}
SLOW: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ("mistral", "gemma3", "phi3", "phi", "starcoder2", "neox", "cohere", "gpt2")},
    **{f"{name} in bf16": (name, HALF) for name in ("qwen2", "gemma3", "phi3")},
    "mixed precision": ("llama", {"precision": "bf16"}),
    "eager attention": ("qwen3", {"attention": "eager"}),
    "lora": ("qwen2", {**HALF, "lora": {"lora_dropout": 0.1}}),
    "packed": ("llama", {"packing": MASKS}),
    "experts": ("mixtral", {}),
    "experts with a router loss": ("mixtral", {"output_router_logits": True}),
    "eager gpt2": ("gpt2", {"attention": "eager"}),
    "eager gemma2": ("gemma2", {"attention": "eager"}),
    "lora gpt2": ("gpt2", {"lora": {}}),
    "dora": ("llama", {"lora": {"use_dora": True}}),
    "fused lora in fp32": ("llama", {"lora": {}, "fused": True}),
    "nf4 without groups": ("llama", {"lora": {}, "quantize": NF4}),
    "fp8": ("llama", {"lora": {}, "quantize": "fp8"}),
    "fused fp8": ("llama", {**HALF, "lora": {}, "fused": True, "quantize": "fp8"}),
    "whole logits": ("llama", {"chunked": False}),
    "small chunks": ("llama", {"chunk_tokens": 16}),
    "packed, eager": ("llama", {"packing": MASKS, "attention": "eager"}),
    "qwen3 experts": ("qwen3_moe", {}),
    "latent attention": ("deepseek", {}),
    "experts with biases": ("gpt_oss", {"attention": "eager"}),
    "fused experts in bf16": ("mixtral", HALF),
    **{f"{name} with adapters on experts": (name, {**HALF, "lora": EXPERTS}) for name in ("mixtral", "qwen3_moe")},
    "adapters on experts in fp32": ("qwen3_moe", {"lora": EXPERTS}),
    "adapters on experts with biases": ("gpt_oss", {**HALF, "attention": "eager", "lora": EXPERTS}),
    "adapters on 4-bit experts": ("qwen3_moe", {**HALF, "lora": EXPERTS, "quantize": NF4}),
}


def bytes_and_operations(trace: StepTrace) -> list[Any]:
    found = [(s.unit, s.moment, s.peak, s.kept, s.gradients, s.flops) for s in trace.segments]
    return [*found, trace.workspace]


def compare(case: tuple[str, dict[str, Any]], level: Level) -> None:
    name, options = case
    batch = BatchShape(2, 24, packed="packing" in options)
    devices = ("cpu", "meta")
    if "quantize" in options:  # the tables of 4-bit codes are made once in a process
        for device in devices:
            trace_step(planned(name, device, **options), batch, level)
    measured, traced = (trace_step(planned(name, device, **options), batch, level) for device in devices)
    assert bytes_and_operations(traced) == bytes_and_operations(measured)
    if not ("quantize" in options and "moe" in name):  # 4-bit experts without tokens are not read
        assert traced == measured  # bytes read and written too


@pytest.mark.parametrize("case", QUICK)
def test_a_step_is_traced_exactly(case: str) -> None:
    compare(QUICK[case], Level.KEEP_ALL)


@pytest.mark.slow
def test_recomputation_is_traced_exactly() -> None:
    compare(QUICK["fused lora"], Level.RECOMPUTE)


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.name)
@pytest.mark.parametrize("case", [*QUICK, *SLOW])
def test_every_model_and_level_is_traced_exactly(case: str, level: Level) -> None:
    compare({**QUICK, **SLOW}[case], level)


def segments(trace: StepTrace, unit: str, moment: str) -> list[Segment]:
    return [s for s in trace.segments if (s.unit, s.moment) == (unit, moment)]


def test_forward_and_backward_balance() -> None:
    """What a layer keeps, its backward releases, besides its gradients; the step leaves gradients alone."""
    model = planned("llama", "meta")
    for level in LEVELS:
        trace = trace_step(model, BATCH, level)
        assert sum(s.kept for s in trace.segments) == sum(s.gradients for s in trace.segments)
        assert sum(s.gradients for s in trace.segments) == sum(4 * p.numel() for p in model.model.parameters())
        for unit in model.kinds:
            (forward,), (backward,) = segments(trace, unit, "forward"), segments(trace, unit, "backward")
            assert forward.kept == backward.gradients - backward.kept
            assert forward.peak >= forward.kept and backward.peak >= backward.kept
    assert all(p.grad is None and p.is_meta and p.dtype == torch.float32 for p in model.model.parameters())


def test_inputs_on_the_host_are_not_kept() -> None:
    model = planned("llama", "meta")
    recomputed, offloaded = trace_step(model, BATCH, Level.RECOMPUTE), trace_step(model, BATCH, Level.OFFLOAD)
    states = 2 * 24 * 64 * 4
    for unit in model.kinds:
        (one,), (other,) = segments(recomputed, unit, "forward"), segments(offloaded, unit, "forward")
        assert (one.kept, other.kept) == (states, 0)
    assert sum(s.kept for s in offloaded.segments) == sum(s.kept for s in recomputed.segments)


def test_every_layer_of_a_kind_costs_the_same_as_the_second() -> None:
    """It stands for all but the first, which keeps less where nothing trains below it."""
    for options, less in (({}, 0), ({"lora": {}, **HALF}, 2 * 24 * 64 * 2)):
        trace = trace_step(planned("llama", "meta", num_hidden_layers=3, **options), BATCH, Level.KEEP_ALL)
        first, *others = [s for s in trace.segments if s.unit and s.moment == "forward"]
        assert len(others) == 2 and len({(s.kept, s.flops, s.read_write) for s in others}) == 1
        assert 0 <= others[0].kept - first.kept - less < 1024  # its norm saves nothing


# --- the operators of a GPU -------------------------------------------------------------------------------------------


def on_gpu(**options: Any) -> Any:
    return planned("llama", "meta", **{**HALF, "target": "cuda", **options})


def kept(trace: StepTrace) -> int:
    return max(s.kept for s in trace.segments if s.unit and s.moment == "forward")


def test_attention_on_gpus_is_not_quadratic() -> None:
    one, two = (kept(trace_step(on_gpu(), BatchShape(1, length), Level.KEEP_ALL)) for length in (512, 1024))
    assert two == pytest.approx(2 * one, abs=4096)  # a few numbers that do not depend on the length
    eager = kept(trace_step(on_gpu(attention="eager"), BatchShape(1, 1024), Level.KEEP_ALL))
    assert eager - two > 4 * 1024**2 * 2  # probabilities of four heads, twice


def test_packed_rows_keep_no_mask_with_our_attention() -> None:
    plain, own, dense = on_gpu(), on_gpu(packing=MASKS), on_gpu(packing=MASKS)
    use_own_attention(plain.model)
    use_own_attention(own.model)
    whole = kept(trace_step(plain, BatchShape(1, 1024), Level.KEEP_ALL))
    packed = BatchShape(1, 1024, packed=True)
    near = 4096  # kernels keep a few numbers each
    assert kept(trace_step(own, packed, Level.KEEP_ALL)) == pytest.approx(whole, abs=near)
    mask, repeated = 1024**2 * 2, 2 * (4 - 2) * 16 * 1024 * 2  # in bf16; keys and values of two heads for four
    assert kept(trace_step(dense, packed, Level.KEEP_ALL)) == pytest.approx(whole + mask + repeated, abs=near)


def test_a_quantized_model_has_one_buffer_for_all_layers() -> None:
    trace = trace_step(on_gpu(lora={}, fused=True, quantize=NF4), BATCH, Level.KEEP_ALL)
    assert trace.workspace - product_workspace((9, 0)) == 96 * 64 * 2  # the largest weight
    assert kept(trace) == kept(trace_step(on_gpu(lora={}, fused=True), BATCH, Level.KEEP_ALL))


def test_sizes_are_rounded_as_the_allocator_does() -> None:
    trace = trace_step(on_gpu(), BatchShape(1, 3), Level.KEEP_ALL)
    assert all(value % 512 == 0 for s in trace.segments for value in (s.peak, s.kept, s.gradients))


def test_fp8_is_multiplied_or_dequantized_by_capability() -> None:
    model = on_gpu(lora={}, fused=True, quantize="fp8")
    hopper, ampere = (trace_step(model, BATCH, Level.KEEP_ALL, capability=c) for c in ((9, 0), (8, 0)))
    assert kept(hopper) == kept(ampere)
    assert [s.peak for s in hopper.segments] != [s.peak for s in ampere.segments]


def test_matrix_products_and_attention_are_counted() -> None:
    trace = trace_step(on_gpu(num_hidden_layers=1), BatchShape(2, 128), Level.KEEP_ALL)
    tokens, weights = 256, 64 * (64 + 32 + 32 + 64) + 3 * 64 * 96
    attention = 4 * 2 * 4 * 128 * 128 * 16 // 2  # causal
    (forward,) = segments(trace, "model.layers.0", "forward")
    (backward,) = segments(trace, "model.layers.0", "backward")
    assert forward.flops == 2 * tokens * weights + attention
    assert backward.flops == 4 * tokens * weights + int(2.5 * attention)


# --- what cannot be traced --------------------------------------------------------------------------------------------


def test_a_model_that_reads_values_is_an_error() -> None:
    model = planned("llama", "meta")
    model.model.model.norm.forward = lambda x: x * float(x.sum())
    with pytest.raises(CapacityError, match=r"LlamaForCausalLM cannot be traced without values \(RuntimeError: .*item"):
        trace_step(model, BATCH)
    assert all(p.dtype == torch.float32 for p in model.model.parameters())


def test_a_model_that_looks_for_padding_is_traced() -> None:
    model = planned("gpt2", "meta")
    model.model.config.pad_token_id = model.model.config.eos_token_id = 1
    assert trace_step(model, BATCH).segments
    assert all("warn_if_padding_and_no_attention_mask" not in part.__dict__ for part in model.model.modules())


# --- following storages -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_storages_are_followed_from_allocation_to_release(device: str) -> None:
    weight = nn.Parameter(torch.empty(100, device=device))
    trace = StorageTrace(512, [weight])
    with torch.no_grad(), trace:
        start = trace.mark()
        x = torch.empty(300, device=device)
        y = x.view(3, 100)[1:]
        z = (y * weight).relu_()
        middle = trace.mark()
        del x, y
        z = z + 1
        end = trace.mark()
    assert trace.usage(start, middle) == (1536 + 1024, 1024)  # x is released by the caller, right behind the mark
    assert trace.usage(start, end) == (2560, 1024)
    assert sum(trace.living().values()) == 1024 and trace.size_of(z) == 1024


def test_kernels_of_the_device_are_used_inside_only() -> None:
    plain = torch.nn.functional.scaled_dot_product_attention
    with device_kernels():
        assert torch.nn.functional.scaled_dot_product_attention is not plain
        x = torch.randn(1, 2, 8, 16)
        torch.testing.assert_close(torch.nn.functional.scaled_dot_product_attention(x, x, x), plain(x, x, x))
    assert torch.nn.functional.scaled_dot_product_attention is plain
    with contextlib.suppress(RuntimeError), device_kernels():
        raise RuntimeError
    assert torch.nn.functional.scaled_dot_product_attention is plain
