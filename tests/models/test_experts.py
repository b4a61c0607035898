"""Experts by grouped products: losses and gradients of transformers' loop over experts, with PEFT's adapters and
without. The oracles are transformers' `eager` experts and PEFT's own forward, which adds adapters to dense weights."""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from fullshard.models.experts import experts_modules, try_experts, use_own_experts
from fullshard.models.experts_gate import Gate, find_gate
from fullshard.models.experts_math import Routing
from fullshard.quant import grouped_product
from fullshard.quant.quantize import dequantize_model, quantize_model
from fullshard.quant.sharded_groups import Scheme
from tests.sft.test_all_linear import make

EIGHT = ("Mixtral", "Qwen3Moe", "Olmoe", "DeepseekV3", "Glm4Moe", "GptOss", "GraniteMoe", "Gemma4Text")
FEW = ("Qwen3Moe", "GptOss")
PARAMETERS = ["experts.gate_up_proj", "experts.down_proj"]
CLOSE = {torch.float32: 1e-5, torch.float64: 1e-10}


def rows(seed: int = 0) -> torch.Tensor:
    return torch.randint(5, 400, (2, 21), generator=torch.Generator().manual_seed(seed))


def with_lora(model: Any, **options: Any) -> Any:
    torch.manual_seed(3)
    config = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "o_proj"], "target_parameters": PARAMETERS}
    model = get_peft_model(model, LoraConfig(**{**config, "init_lora_weights": False, **options}))
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.2)
    return model


def results(model: Any, ids: torch.Tensor | None = None) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss and all gradients."""
    ids = rows() if ids is None else ids
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    if loss.requires_grad:
        loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def check_equal(model: Any, oracle: Any, dtype: torch.dtype) -> None:
    loss, grads = results(model)
    expected, theirs = results(oracle)
    assert loss == pytest.approx(expected, rel=CLOSE[dtype])
    assert grads.keys() == theirs.keys()
    largest = max(float(g.abs().max()) for g in theirs.values())
    for name, grad in theirs.items():
        torch.testing.assert_close(grads[name], grad, rtol=0, atol=CLOSE[dtype] * largest, msg=name)


def pair(family: str, dtype: torch.dtype, adapt: Any = lambda m: m) -> tuple[Any, Any]:
    """The same model twice: with our experts, and with transformers' loop."""
    own, oracle = adapt(make(family).to(dtype)), adapt(make(family).to(dtype))
    assert use_own_experts(own)
    oracle.set_experts_implementation("eager") if not hasattr(oracle, "peft_config") else (
        oracle.get_base_model().set_experts_implementation("eager")
    )
    return own, oracle


FAMILIES = [pytest.param(f, marks=() if f in FEW else pytest.mark.slow) for f in EIGHT]
DTYPES = [pytest.param(torch.float64, id="fp64"), pytest.param(torch.float32, id="fp32")]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_full_fine_tuning(family: str, dtype: torch.dtype) -> None:
    check_equal(*pair(family, dtype), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_lora(family: str, dtype: torch.dtype) -> None:
    check_equal(*pair(family, dtype, with_lora), dtype)


@pytest.mark.parametrize("family", FAMILIES)
def test_lora_on_4_bits(family: str) -> None:
    scheme = Scheme(double=True)
    own = with_lora(quantize_model(make(family), scheme))
    oracle = with_lora(dequantize_model(quantize_model(make(family), scheme)))
    assert use_own_experts(own)
    oracle.get_base_model().set_experts_implementation("eager")
    check_equal(own, oracle, torch.float32)


# --- adapters ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["Qwen3Moe", "GptOss"])
def test_several_disabled_switched_and_merged_adapters(family: str) -> None:
    own, oracle = pair(family, torch.float64, with_lora)
    second = LoraConfig(
        r=3, lora_alpha=5, target_modules=["q_proj"], target_parameters=PARAMETERS, init_lora_weights=False,
        rank_pattern={"experts.down_proj": 6}, alpha_pattern={"experts.gate_up_proj": 9}, use_rslora=True,
    )  # fmt: skip
    for model in (own, oracle):
        torch.manual_seed(11)
        model.add_adapter("second", second)
        model.double()
        wrappers = {m.parameter_name: m for m in model.modules() if hasattr(m, "parameter_name")}
        ranks = {name: (m.r["second"], m.scaling["second"]) for name, m in wrappers.items()}
        assert ranks == {"gate_up_proj": (3, 9 / 3**0.5), "down_proj": (6, 5 / 6**0.5)}, ranks
    outcomes = []
    for model in (own, oracle):
        every = [results(model)]
        model.set_adapter("second")
        every.append(results(model))
        model.base_model.set_adapter(["default", "second"])
        every.append(results(model))
        with model.disable_adapter():
            every.append(results(model))
        model.base_model.set_adapter("default")
        model.merge_adapter()
        every.append(results(model))
        model.unmerge_adapter()
        every.append(results(model))
        outcomes.append(every)
    for (loss, grads), (expected, theirs) in zip(*outcomes, strict=True):
        assert loss == pytest.approx(expected, rel=1e-10) and grads.keys() == theirs.keys()
        for name, grad in theirs.items():
            torch.testing.assert_close(grads[name], grad, rtol=0, atol=1e-11, msg=name)
    assert len({loss for loss, _ in outcomes[1]}) == 4, "merged and unmerged adapters have the loss of the first"


def test_dropout_of_experts_is_drawn_again_in_backward() -> None:
    """Gradients are those of the masks of forward; in evaluation there are none."""
    own, _ = pair("GptOss", torch.float64, with_lora)
    layer = own.base_model.model.model.layers[0].mlp.experts
    torch.manual_seed(2)
    x, chosen, weights = torch.randn(5, 32, dtype=torch.float64), CHOICES["groups of any size"], torch.rand(5, 2)

    def score() -> torch.Tensor:
        torch.manual_seed(5)
        return layer(x, chosen, weights).square().sum()

    expected = score().item()
    for wrapper in (layer, layer.base_layer):
        wrapper.lora_dropout["default"] = torch.nn.Dropout(0.3)
    own.train()
    assert score().item() != pytest.approx(expected, rel=1e-3)
    x.requires_grad_()
    parameters = [x, *(p for p in layer.parameters() if p.requires_grad)]
    for p, gradient in zip(parameters, torch.autograd.grad(score(), parameters), strict=True):
        direction, scores = torch.randn_like(p), []
        with torch.no_grad():
            for step in (1e-5, -2e-5):
                p.add_(direction, alpha=step)
                scores.append(score().item())
            p.add_(direction, alpha=1e-5)
        assert (scores[0] - scores[1]) / 2e-5 == pytest.approx(float((gradient * direction).sum()), rel=1e-5)
    own.eval()
    assert score().item() == pytest.approx(expected, rel=1e-9)


# --- routing ----------------------------------------------------------------------------------------------------------


def block(family: str, **flags: Any) -> Any:
    module = next(module for _, module in experts_modules(make(family).double()))
    vars(module).update(flags)
    return module


def run(module: Any, way: str, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """The output, and the gradients of hidden states, routing weights and parameters."""
    module.config._experts_implementation = way
    x, chosen, weights = inputs
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    out = module(x, chosen, weights)
    wanted = [x, weights, *module.parameters()]
    return [out, *torch.autograd.grad(out.square().sum(), wanted)]


CHOICES = {
    "some experts without tokens": torch.tensor([[0, 2], [2, 0], [0, 2], [2, 0], [0, 2]]),
    "all on one": torch.ones(5, 1, dtype=torch.int64),
    "groups of any size": torch.tensor([[3, 1], [3, 0], [3, 2], [3, 1], [3, 2]]),
    "one token": torch.tensor([[1, 3]]),
}


@pytest.mark.parametrize("family", ["Qwen3Moe", "GptOss", "NemotronH"])
@pytest.mark.parametrize("chosen", CHOICES.values(), ids=CHOICES)
def test_any_routing(family: str, chosen: torch.Tensor) -> None:
    module = block(family)
    assert find_gate(module) is not None
    use_own_experts(make(family))
    torch.manual_seed(2)
    x, weights = torch.randn(len(chosen), 32, dtype=torch.float64), torch.rand(chosen.shape, dtype=torch.float64)
    for own, theirs in zip(*(run(module, way, x, chosen, weights) for way in ("fullshard", "eager")), strict=True):
        torch.testing.assert_close(own, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("size", "grouped"), [(32, True), (36, False)], ids=["aligned", "unaligned"])
def test_half_precision_and_rows_that_torch_s_products_refuse(size: int, grouped: bool, monkeypatch: Any) -> None:
    """bf16 is about as far from fp64 as transformers' loop; sizes that are no multiple of 16 bytes run
    group by group."""
    used: list[torch.dtype] = []
    multiply = torch.nn.functional.grouped_mm
    monkeypatch.setattr(
        grouped_product.F, "grouped_mm", lambda a, *b, **c: used.append(a.dtype) or multiply(a, *b, **c)
    )
    torch.manual_seed(2)
    module = block("Qwen3Moe")
    module.gate_up_proj = torch.nn.Parameter(torch.randn(4, 2 * size, 32) / 6)
    module.down_proj = torch.nn.Parameter(torch.randn(4, 32, size) / 6)
    use_own_experts(make("Qwen3Moe"))
    chosen, x, weights = CHOICES["groups of any size"], torch.randn(5, 32), torch.rand(5, 2)
    exact = run(module.double(), "eager", x.double(), chosen, weights.double())
    module.bfloat16()
    inputs = x.bfloat16(), chosen, weights
    theirs = [
        float((a.double() - b).detach().norm()) for a, b in zip(run(module, "eager", *inputs), exact, strict=True)
    ]
    used.clear()
    own = [
        float((a.double() - b).detach().norm()) for a, b in zip(run(module, "fullshard", *inputs), exact, strict=True)
    ]
    assert all(a <= 2 * b for a, b in zip(own, theirs, strict=True)), (own, theirs)
    assert used == [torch.bfloat16] * 6 if grouped else len(used) < 6


def test_experts_of_other_ranks_give_nothing() -> None:
    """Sentinels: numbers from the number of local experts on."""
    module = block("GptOss", _is_expert_parallel=True)
    use_own_experts(make("GptOss"))
    torch.manual_seed(2)
    chosen = torch.tensor([[4, 1], [4, 4], [0, 3], [2, 4], [1, 4]])
    x = torch.randn(5, 32, dtype=torch.float64)
    weights = torch.rand(5, 2, dtype=torch.float64)
    found = run(module, "fullshard", x, chosen, weights)
    here = chosen < 4
    theirs = run(module, "eager", x, chosen.where(here, 0), weights * here)
    theirs[2] = theirs[2] * here
    for own, expected in zip(found, theirs, strict=True):
        assert own.isfinite().all()
        torch.testing.assert_close(own, expected, rtol=1e-10, atol=1e-10)
    assert not found[0][1].any() and not found[1][1].any()


def test_a_norm_behind_each_expert() -> None:
    module = block("Qwen3Moe", has_post_expert_norm=True)
    norm = module.post_expert_norm = torch.nn.RMSNorm(32, dtype=torch.float64)
    torch.nn.init.normal_(norm.weight)
    use_own_experts(make("Qwen3Moe"))
    chosen, x = CHOICES["groups of any size"], torch.randn(5, 32, dtype=torch.float64)
    weights = torch.rand(5, 2, dtype=torch.float64)
    found = run(module, "fullshard", x, chosen, weights)
    x, weights = x.requires_grad_(), weights.requires_grad_()
    outs = []
    for token in range(5):
        total = torch.zeros(32, dtype=torch.float64)
        for expert, weight in zip(chosen[token].tolist(), weights[token], strict=True):
            gate, up = (module.gate_up_proj[expert] @ x[token]).chunk(2)
            total = total + weight * norm(module.down_proj[expert] @ (module.act_fn(gate) * up))
        outs.append(total)
    out = torch.stack(outs)
    theirs = [out, *torch.autograd.grad(out.square().sum(), [x, weights, *module.parameters()])]
    for own, expected in zip(found, theirs, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-10, atol=1e-10)


def test_a_stack_in_parts_has_the_values_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too large to be dequantized at once: some rows of all experts at a time."""
    torch.manual_seed(0)
    model = quantize_model(make("Mixtral"), Scheme(double=True, blocksize=64))
    experts = model.model.layers[0].mlp.experts
    weight, ends = torch.randn(3, 1024, 96), torch.tensor([4, 4, 9], dtype=torch.int32)
    parts = type(experts).of(_Stacked(weight), ["weight"], Scheme(double=True)).whole_parts("weight")
    stack = grouped_product.quantized(Scheme(double=True), weight.shape, parts)
    x, dy = torch.randn(9, 96), torch.randn(9, 1024)
    whole = grouped_product.product(x, stack, ends), grouped_product.product(dy, stack, ends, transposed=True)
    size = 3 * 3 * 16384 * 4
    monkeypatch.setattr(grouped_product, "BUFFER", size)
    found = list(stack.dense_parts(torch.float32, size))
    assert [rows for rows, _ in found] == [slice(0, 512), slice(512, 1024)]
    torch.testing.assert_close(grouped_product.product(x, stack, ends), whole[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(grouped_product.product(dy, stack, ends, transposed=True), whole[1], rtol=0, atol=1e-4)


class _Stacked(torch.nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight)


# --- the trial --------------------------------------------------------------------------------------------------------


def test_the_trial_tells_which_models_can_run_them() -> None:
    assert try_experts(make("Qwen3Moe")).usable and try_experts(make("GptOss")).usable
    assert "does not take its experts" in try_experts(make("Llama4Text")).reason
    state, model = torch.get_rng_state(), make("Qwen3Moe")
    before = torch.get_rng_state()
    try_experts(model)
    assert torch.equal(torch.get_rng_state(), before) and state.shape == before.shape


def test_results_that_differ_and_unknown_gates_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("Qwen3Moe")
    kind = type(next(module for _, module in experts_modules(model)))
    with monkeypatch.context() as patch:
        patch.setattr(kind, "_apply_gate", lambda self, x: torch.sin(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1])
        assert "than a gate" in try_experts(model).reason
        assert not use_own_experts(make("Qwen3Moe"))
    with monkeypatch.context() as patch:
        patch.setattr("fullshard.models.experts.find_gate", lambda module: Gate("relu"))
        assert "differ" in try_experts(make("Qwen3Moe")).reason
    with monkeypatch.context() as patch:
        patch.delattr("transformers.PreTrainedModel.set_experts_implementation")
        assert "this version of transformers" in try_experts(model).reason


# --- what steps cost --------------------------------------------------------------------------------------------------


class Operators(TorchDispatchMode):
    """The operators that ran, with the sizes of their results."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.seen[str(func), tuple(out.shape) if isinstance(out, torch.Tensor) else None] += 1
        return out


@pytest.mark.parametrize("steps", [12, pytest.param(200, marks=pytest.mark.slow)])
def test_steps_in_4_bits_do_not_grow(steps: int) -> None:
    """Whatever the routing, each step runs the same operators on tensors of the same sizes, and leaves nothing."""
    model = with_lora(quantize_model(make("Qwen3Moe"), Scheme(double=True))).train()
    assert use_own_experts(model)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    seen, counts, routings = [], [], set()
    hook = next(module for _, module in experts_modules(model)).register_forward_pre_hook(
        lambda module, args: routings.add(tuple(args[1].flatten().tolist()))
    )
    for step in range(steps):
        ids = rows(step)
        with Operators() as operators:
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        seen.append(operators.seen)
        if step in (4, steps - 1):
            gc.collect()
            counts.append(Counter(type(one).__name__ for one in gc.get_objects() if isinstance(one, torch.Tensor)))
    hook.remove()
    assert len(routings) >= steps
    assert all(one == seen[2] for one in seen[2:])
    assert counts[0] == counts[1]


def test_the_same_bits_each_time() -> None:
    model = with_lora(make("Qwen3Moe"))
    use_own_experts(model)
    (loss, grads), (again, others) = results(model), results(model)
    assert loss == again and all(torch.equal(grads[name], others[name]) for name in grads)


def test_on_the_meta_device_shapes_are_those_of_a_real_pass() -> None:
    shapes = []
    for device in ("cpu", "meta"):
        model = with_lora(make("GptOss")).to(device)
        use_own_experts(model)
        kept: list[tuple[Any, ...]] = []
        module = next(module for _, module in experts_modules(model))
        x = torch.randn(10, 32, device=device, requires_grad=True)
        chosen, weights = torch.zeros(10, 2, dtype=torch.int64, device=device), torch.rand(10, 2, device=device)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append((t.shape, t.dtype)) or t, lambda t: t):  # noqa: B023
            out = module(x, chosen, weights)
        out.sum().backward()
        assert x.grad is not None
        shapes.append((out.shape, x.grad.shape, kept))
    assert shapes[0] == shapes[1]


def test_routing_does_not_depend_on_the_interface() -> None:
    chosen = torch.tensor([[2, 0], [1, 2], [2, 3]])
    routing = Routing.of(chosen, 3)
    assert routing.ends.tolist() == [1, 2, 5] and routing.absent().nonzero().tolist() == [[2, 1]]
    assert torch.equal(routing.order[routing.position.flatten()], torch.arange(6))
    assert "grouped_mm" in ALL_EXPERTS_FUNCTIONS


# --- compiled layers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [16, pytest.param(4, marks=pytest.mark.slow)])
def test_compiled_layers_share_one_graph(bits: int) -> None:
    """Layers of a kind have one graph, which other routings do not compile again."""
    import torch._dynamo as dynamo
    from torch._dynamo.utils import counters

    dynamo.reset()
    counters.clear()
    model = make("Mixtral")
    oracle = with_lora(make("Mixtral") if bits == 16 else dequantize_model(quantize_model(make("Mixtral"), Scheme())))
    model = with_lora(model if bits == 16 else quantize_model(model, Scheme()))
    oracle.get_base_model().set_experts_implementation("eager")
    assert use_own_experts(model)
    expected = [results(oracle, rows(seed)) for seed in range(3)]
    layers = model.base_model.model.model.layers
    for layer in layers:
        layer.mlp.compile(backend="aot_eager", fullgraph=True)
    with contextlib.ExitStack() as stack:
        for seed, (loss, grads) in enumerate(expected):
            if seed == 1:
                stack.enter_context(torch.compiler.set_stance("fail_on_recompile"))
            found, own = results(model, rows(seed))
            assert found == pytest.approx(loss, abs=1e-5)
            for name, grad in grads.items():
                torch.testing.assert_close(own[name], grad, rtol=1e-4, atol=1e-6, msg=name)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
