"""What compiled layers keep: the recorded graphs against layers that torch really compiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fullshard.activations.levels import Level, set_level
from fullshard.device.torch_private import compiled_call, replace_compiled_call, storage_id
from fullshard.fsdp.compile import compile_modules, norms_between
from fullshard.planner.batch import BatchShape
from fullshard.planner.step_trace import Segment
from fullshard.planner.tracer import trace_step
from fullshard.quant.config import Quantization
from fullshard.quant.sharded_groups import Scheme
from fullshard.spmd.tensor_tree import tensors_in
from tests.planner.small_models import planned

BATCH = BatchShape(2, 24)
LORA: dict[str, Any] = {"lora": {}, "fused": True}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama in bf16": ("llama", {"dtype": torch.bfloat16}),
    "qwen3": ("qwen3", {}),
    "gemma3": ("gemma3", {}),
    "lora": ("llama", {"lora": {}}),
    "fused lora": ("llama", LORA),
    "qlora": ("llama", {**LORA, "quantize": Quantization(Scheme())}),
    "mixtral": ("mixtral", {"dtype": torch.bfloat16}),
}
NEAR = {"mixtral": 0.005}
"""Where the graphs differ: torch sorts tokens by expert with another operator."""


def measured(model: Any, level: Level, backend: str) -> list[int]:
    """The bytes that really compiled layers keep: what autograd saves, and the output."""
    torch.compiler.reset()
    layers = [module for name, module in model.model.named_modules() if name in model.kinds]
    for layer in layers:
        set_level(layer, level)
    compile_modules(layers, None, backend=backend)
    held = {storage_id(t) for t in (*model.model.parameters(), *model.model.buffers())}
    found: list[int] = []
    alive: list[Any] = []
    for layer in layers:
        call = compiled_call(layer)
        assert call is not None

        def measure(*args: Any, call: Any = call, **kwargs: Any) -> Any:
            known = held | {storage_id(t) for t in tensors_in((args, kwargs))}
            kept: dict[int, int] = {}

            def count(t: torch.Tensor) -> torch.Tensor:
                alive.append(t)
                if storage_id(t) not in known:
                    kept[storage_id(t)] = t.untyped_storage().nbytes()
                return t

            with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t):
                output = call(*args, **kwargs)
            count(tensors_in(output)[0])
            found.append(sum(kept.values()))
            return output

        replace_compiled_call(layer, measure)
    ids = torch.zeros(BATCH.rows, BATCH.length, dtype=torch.int64)
    with model.head.loss_pass(1.0, BATCH.rows * (BATCH.length - 1)):
        model.model(input_ids=ids, labels=ids.clone(), use_cache=False)
    return found


def layers(name: str, level: Level, moment: str = "forward", **options: Any) -> list[Segment]:
    trace = trace_step(planned(name, "meta", compiled=True, **options), BATCH, level)
    return [s for s in trace.segments if s.unit and s.moment == moment]


def compare(case: str, level: Level, backend: str) -> None:
    name, options = CASES[case]
    expected = measured(planned(name, "cpu", **options), level, backend)
    if level is Level.RECOMPUTE:  # the state of the CPU's random generator, where attention may use it
        states = {n - torch.get_rng_state().nbytes for n in expected} | set(expected)
        assert {s.kept for s in layers(name, level, **options)} <= states
    else:
        found = [s.kept for s in layers(name, level, **options)]
        assert found == pytest.approx(expected, rel=NEAR.get(case, 0))


@pytest.mark.slow
@pytest.mark.parametrize("level", [Level.KEEP_ALL, Level.RECOMPUTE_MLP, Level.RECOMPUTE], ids=lambda one: one.name)
@pytest.mark.parametrize("case", CASES)
def test_compiled_layers_keep_what_the_graph_says(case: str, level: Level) -> None:
    compare(case, level, "aot_eager_decomp_partition")


@pytest.mark.slow
def test_generated_code_keeps_the_same() -> None:
    compare("llama", Level.KEEP_ALL, "inductor")


@pytest.mark.parametrize("options", [{}, LORA], ids=["full", "lora"])
def test_forward_and_backward_of_compiled_layers_balance(options: dict[str, Any]) -> None:
    for level in (Level.KEEP_ALL, Level.RECOMPUTE):
        for forward, backward in zip(
            layers("llama", level, **options), reversed(layers("llama", level, "backward", **options)), strict=True
        ):
            assert forward.kept == backward.gradients - backward.kept
            assert 0 < forward.kept <= forward.peak and backward.peak > 0
    states = 2 * 24 * 64 * 4
    assert {s.kept for s in layers("llama", Level.RECOMPUTE, **options)} == {states}


def test_compiled_layers_keep_less_and_multiply_as_much() -> None:
    traces = [trace_step(planned("llama", "meta", compiled=one), BATCH, Level.KEEP_ALL) for one in (False, True)]
    for plain, compiled in zip(*(trace.segments for trace in traces), strict=True):
        assert (plain.unit, plain.moment, plain.flops) == (compiled.unit, compiled.moment, compiled.flops)
        if plain.unit and plain.moment == "forward":
            assert compiled.kept < 0.9 * plain.kept and compiled.peak < plain.peak
            assert compiled.read_write < plain.read_write
        elif not plain.unit:  # the norm before the head is compiled too
            assert compiled.peak <= plain.peak and compiled.read_write <= plain.read_write
    kept = [sum(s.kept for s in trace.segments if s.moment in ("forward", "loss") and not s.unit) for trace in traces]
    assert kept[1] < kept[0]


def test_compiled_norms_keep_their_input() -> None:
    model = planned("llama", "cpu", dtype=torch.bfloat16)
    modules = dict(model.model.named_modules())
    norms = norms_between(model.model, [modules[name] for name in model.kinds])
    assert norms == [modules["model.norm"]]
    plain = {id(t) for t in norms[0].parameters()}
    states = torch.randn(2, 24, 64).bfloat16().requires_grad_()
    expected = norms[0](states)
    compile_modules(norms, None, backend="aot_eager_decomp_partition")
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        assert torch.equal(norms[0](states), expected)
    sizes = {storage_id(t): t.untyped_storage().nbytes() for t in saved if id(t) not in plain}
    assert sizes.pop(storage_id(states)) == 2 * 24 * 64 * 2
    assert sum(sizes.values()) <= 2 * 24 * 4 + sum(p.nbytes for p in norms[0].parameters())


def test_layers_with_a_router_loss_are_noted() -> None:
    model = planned("mixtral", "meta", compiled=True, dtype=torch.bfloat16, output_router_logits=True)
    trace = trace_step(model, BATCH, Level.RECOMPUTE)
    assert "router" in trace.notes[0]
