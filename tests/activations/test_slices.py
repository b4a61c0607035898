"""Layers whose parts run in slices of the sequence; the oracle is the same model without slices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fullshard.activations.levels import Level, run_in_slices, set_level, sliced_parts
from fullshard.activations.slices import ELEMENTS, GradientSum, SliceCount, is_sliced, run_whole, slice_module
from fullshard.fsdp import checkpoint_module
from fullshard.models.causal_lm import get_causal_lm
from fullshard.models.experts import use_own_experts
from fullshard.models.slice_check import apply_slices, layers_of, try_slices
from fullshard.quant.config import Quantization
from fullshard.quant.sharded_groups import Scheme
from tests.lora.fused_models import assert_same
from tests.planner.small_models import planned

IDS = torch.arange(46).view(2, 23) * 7 % 61 + 3
FAMILIES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "gpt2", "mistral", "mixtral", "qwen3_moe")
WAYS: dict[str, dict[str, Any]] = {
    "full": {}, "peft lora": {"lora": {}}, "fused lora": {"lora": {}, "fused": True},
    "qlora": {"lora": {}, "fused": True, "quantize": Quantization(Scheme())},
    "dropout": {"lora": {"lora_dropout": 0.2}, "fused": True},
}  # fmt: skip
QUICK = [("llama", "fused lora"), ("gemma3", "full"), ("mixtral", "full"), ("gpt2", "peft lora"), ("qwen2", "qlora")]
WITH_EXPERTS = ("mixtral", "qwen3_moe")
EXCLUDED = {("gpt2", "qlora"), ("gpt2", "dropout"), *((name, "dropout") for name in WITH_EXPERTS)}
"""What PEFT has no adapter for, or runs by itself: its masks are drawn for each slice."""
EVERY = [(name, way) for name in FAMILIES for way in WAYS if (name, way) not in EXCLUDED]
CASES = [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in EVERY]
LEVELS = [Level.RECOMPUTE_MLP, Level.RECOMPUTE]


def make(name: str, way: str, dtype: torch.dtype = torch.float64) -> Any:
    """A tiny model in training, with an adapter that changes outputs."""
    exact = torch.float32 if way == "qlora" else dtype
    attention = "eager" if name == "gemma2" else "sdpa"
    model = planned(name, "cpu", dtype=exact, attention=attention, **WAYS[way]).model
    if name in WITH_EXPERTS and exact == torch.float64:
        get_causal_lm(model).set_experts_implementation("eager")  # the only one that computes in fp64
    torch.manual_seed(1)
    for parameter_name, parameter in model.named_parameters():
        if "lora_B" in parameter_name:
            nn.init.normal_(parameter, 0, 0.2)
        parameter.data = parameter.data.to(exact) if parameter.requires_grad else parameter.data
    return model.train()


def step(model: Any, seed: int = 3) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The logits and all gradients of one step."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    logits = model(input_ids=IDS, use_cache=False).logits
    F.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten()).backward()
    return logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def sliced(model: Any, level: Level = Level.RECOMPUTE_MLP, count: int = 4) -> list[str]:
    """Slice all parts of a model's layers that can be; returns their names in a layer."""
    parts = apply_slices(model, try_slices(model), SliceCount(count))
    for layer in layers_of(model):
        set_level(layer, level)
    return parts


def with_level(model: Any, level: Level) -> Any:
    for layer in layers_of(model):
        set_level(layer, level)
    return model


@pytest.mark.parametrize(("name", "way"), CASES)
def test_losses_and_gradients_are_those_of_the_whole(name: str, way: str) -> None:
    model = make(name, way)
    expected = step(model)
    parts = sliced(model)
    assert any("mlp" in part for part in parts)
    for level in (*LEVELS, Level.KEEP_ALL):
        compare(step(with_level(model, level)), expected)


def compare(result: Any, expected: Any) -> None:
    """Equal up to rounding: in fp64, but for the weights of norms, which Gemma's sum in fp32."""
    (logits, grads), (logits_expected, grads_expected) = result, expected
    norms = {name for name in grads_expected if "norm" in name}
    exact = 1e-10 if logits.dtype == torch.float64 else 1e-5
    for close, names in ((exact, grads_expected.keys() - norms), (max(exact, 1e-6), norms)):
        one, other = ({name: each[name] for name in each.keys() & names} for each in (grads, grads_expected))
        assert_same((logits, one), (logits_expected, other), close)
    assert grads.keys() == grads_expected.keys()


def test_own_experts_and_a_router_loss() -> None:
    model = planned("mixtral", "cpu", output_router_logits=True, router_aux_loss_coef=0.1).model.train()
    assert use_own_experts(model)

    def losses() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        model.zero_grad(set_to_none=True)
        output = model(input_ids=IDS, labels=IDS, use_cache=False)
        output.loss.backward()
        return output.loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    expected = losses()
    parts = sliced(model)
    # The router's logits are collected from outside: the block runs whole, its experts in slices.
    assert "mlp.experts" in parts and "mlp" not in parts
    assert_same(losses(), expected, 1e-5)


class Mlp(nn.Module):
    """An MLP with dropout inside, which counts its runs."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
        self.dropout, self.runs, self.most = nn.Dropout(0.3), 0, 0

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        self.runs, self.most = self.runs + 1, max(self.most, x.shape[1])
        out: torch.Tensor = self.down(self.dropout(F.gelu(self.up(x))))
        return out if scale is None else out * scale


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(8), Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.mlp(self.norm(x))
        return out


def test_a_recomputed_layer_does_not_run_its_last_part_again() -> None:
    block, x = Block(), torch.randn(2, 10, 8, requires_grad=True)
    slice_module(block.mlp, SliceCount(4))
    checkpoint_module(block)
    block(x).sum().backward()
    assert block.mlp.runs == 2 * 4 and block.mlp.most == 5  # forward, and backward slice by slice


@pytest.mark.parametrize("wrap", [lambda block: block, checkpoint_module], ids=["kept", "recomputed"])
def test_dropout_of_torch_draws_the_same_masks_in_backward(wrap: Callable[[nn.Module], nn.Module]) -> None:
    torch.manual_seed(0)
    part = nn.Sequential(nn.Dropout(0.5), nn.Linear(1, 1, bias=False), nn.Dropout(0.5))
    nn.init.ones_(part[1].weight)
    slice_module(part, SliceCount(3))
    x = torch.ones(1, 64, 1, requires_grad=True)
    out = wrap(nn.Sequential(part))(x)
    state = torch.get_rng_state()
    out.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, out.detach())  # the masks, times 4
    assert 0 < int((out == 0).sum()) < 64 and torch.equal(torch.get_rng_state(), state)


def test_gradients_of_parameters_are_summed_in_fp32() -> None:
    """In bf16, the gradient of a slice is rounded and so is the sum: √2 of the error of one product, however many
    slices there are."""
    torch.manual_seed(0)
    layer = nn.Linear(16, 16, bias=False).bfloat16()
    x, dy = torch.randn(2, 1, 4096, 16).bfloat16()
    exact = dy[0].double().t() @ x[0].double()

    def error(grad: torch.Tensor) -> float:
        assert grad.dtype == torch.bfloat16
        return float((grad.double() - exact).norm() / exact.norm())

    errors = []
    for count in (1, 16, 256):
        slice_module(layer, SliceCount(count))
        errors.append(error(*torch.autograd.grad(layer(x), layer.parameters(), dy)))
    narrow = torch.zeros_like(layer.weight)
    for one, other in zip(dy[0].split(16), x[0].split(16), strict=True):
        narrow = narrow + one.t() @ other
    assert max(errors[1:]) < 1.5 * errors[0] and max(errors[1:]) < error(narrow) / 3


def test_a_first_gradient_that_is_shared_is_not_written_to() -> None:
    shared = torch.ones(4)
    total = GradientSum()
    for _ in range(3):
        total.add(shared)
    value = total.value(torch.float32)
    assert value is not None and torch.equal(value, 3 * torch.ones(4)) and torch.equal(shared, torch.ones(4))


def test_inputs_by_token_are_sliced_and_constants_are_not() -> None:
    mlp, x = Mlp().eval(), torch.randn(2, 9, 8, requires_grad=True)
    scale = torch.randn(2, 9, 1, requires_grad=True)
    expected = torch.autograd.grad(mlp(x, scale=scale).square().sum(), [x, scale, *mlp.parameters()])
    slice_module(mlp, SliceCount(4))
    grads = torch.autograd.grad(mlp(x, scale=scale).square().sum(), [x, scale, *mlp.parameters()])
    for one, other in zip(grads, expected, strict=True):
        torch.testing.assert_close(one, other)
    mlp.runs = 0
    constant = torch.randn(8, requires_grad=True)  # would need its gradient summed: the module runs whole
    mlp(x, scale=constant).sum().backward()
    assert mlp.runs == 1 and constant.grad is not None


def test_without_gradients_nothing_is_kept_and_short_inputs_run_whole() -> None:
    mlp, x = Mlp().eval(), torch.randn(2, 9, 8)
    expected = mlp(x)
    slice_module(mlp, SliceCount(3))
    mlp.runs = 0
    with torch.no_grad():
        torch.testing.assert_close(mlp(x), expected)
        assert mlp.runs == 3
        mlp(x[:1, :1])  # a token of a generation
    assert mlp.runs == 4
    run_whole(mlp)
    assert not is_sliced(mlp) and "forward" not in vars(mlp)


def test_the_number_of_slices_follows_from_the_length() -> None:
    auto, set_by_user = SliceCount(), SliceCount(8)
    for tokens in (1, 2048, 32_767):
        assert auto.size(tokens, tokens * 4096) == tokens
    assert auto.size(2**17, 2**17 * 4096) == ELEMENTS // 4096
    assert auto.size(2**17, 2**17 * 2048) == ELEMENTS // 2048
    assert [set_by_user.size(tokens, tokens) for tokens in (0, 1, 5, 8, 17, 800)] == [0, 1, 1, 1, 3, 100]


def test_levels_slice_parts_unless_everything_is_kept() -> None:
    block = Block()
    run_in_slices(block, [block.mlp], SliceCount(2))
    for level in Level:
        set_level(block, level)
        assert is_sliced(block.mlp) is (level is not Level.KEEP_ALL)
    assert list(sliced_parts(block)) == [block.mlp]


def test_autocast_is_that_of_forward() -> None:
    mlp, x = Mlp().eval(), torch.randn(1, 12, 8, requires_grad=True)

    def grads() -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            out = mlp(x)
        assert out.dtype == torch.bfloat16
        return torch.autograd.grad(out.float().square().sum(), [x, *mlp.parameters()])

    expected = grads()
    slice_module(mlp, SliceCount(3))
    for one, other in zip(grads(), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.02 * float(other.abs().max()))
