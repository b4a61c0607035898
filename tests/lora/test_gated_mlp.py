"""Gated MLPs with adapters as one operator; the oracle is PEFT's own forward and autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fullshard.fsdp import checkpoint_module
from fullshard.lora.fused import fuse_lora
from fullshard.lora.gated_mlp import GatedParts, fuse_mlps
from fullshard.models.layer_groups import gated_mlps, record_gated_mlps, shared_inputs
from tests.lora.fused_models import adapted, assert_same, bare, step

GATED = {
    "llama": "silu", "qwen2": "silu", "qwen3": "silu", "mistral": "silu", "gemma2": "gelu_tanh", "gemma3": "gelu_tanh",
    "cohere": "silu",
}  # fmt: skip
EPSILON = 3e-3
"""Norms compute in float32, whose rounding a smaller step would show."""
OTHERS = ("phi3", "phi", "starcoder2", "neox", "mixtral", "qwen3_moe", "gpt_oss")


def fused(name: str, **options: Any) -> tuple[Any, int]:
    base = bare(name)
    known = shared_inputs(base), gated_mlps(base)
    model = adapted(base, **options).double()
    fuse_lora(model, known[0])
    return model, fuse_mlps(model, known[1])


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == "gemma2" else [pytest.mark.slow]) for n in GATED])
def test_outputs_and_gradients_are_pefts(name: str) -> None:
    model, count = fused(name)
    assert count > 0
    parts = next(m._fullshard_mlp for m in model.modules() if "_fullshard_mlp" in m.__dict__)
    assert parts.activation == GATED[name]
    assert_same(step(model), step(adapted(bare(name)).double()))


@pytest.mark.slow
def test_modules_of_other_forms_are_left_alone() -> None:
    for name in OTHERS:
        assert gated_mlps(bare(name)) == {}, name


class Mlp(nn.Module):
    """A gated MLP, or almost one."""

    def __init__(self, dropout: float = 0.0, limit: float = 1e9) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)
        self.dropout, self.limit = dropout, limit

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = F.silu(self.gate(x)).clamp(max=self.limit) * self.up(x)
        return self.down(F.dropout(inner, self.dropout, self.training))


class Model(nn.Module):
    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.table, self.mlp = nn.Embedding(9, 8), mlp

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> torch.Tensor:
        return self.mlp(self.table(input_ids))


def test_dropout_and_limits_inside_a_module_are_noticed() -> None:
    torch.manual_seed(0)
    ids = torch.arange(9)[None]
    assert record_gated_mlps(Model(Mlp()), ids) == {Mlp: GatedParts("gate", "up", "down", "silu")}
    assert record_gated_mlps(Model(Mlp(dropout=0.5)), ids) == record_gated_mlps(Model(Mlp(limit=7.0)), ids) == {}


@pytest.mark.parametrize(
    "options", [{"rank_pattern": {"up_proj": 2, "down_proj": 7}}, {"r": 3, "use_rslora": True}], ids=["ranks", "rslora"]
)
def test_ranks_and_scales(options: dict[str, Any]) -> None:
    model, count = fused("llama", **options)
    assert count == 2
    assert_same(step(model), step(adapted(bare("llama"), **options).double()))


def test_the_modules_own_forward_runs_where_a_layer_is_not_plain_lora() -> None:
    model, _ = fused("llama")
    mlp = model.base_model.model.model.layers[0].mlp
    plain = adapted(bare("llama")).double()
    with model.disable_adapter(), plain.disable_adapter():
        assert torch.equal(step_logits(model), step_logits(plain))
    seen: list[Any] = []
    for hooked in (mlp.up_proj, mlp.act_fn):
        hook = hooked.register_forward_hook(lambda *_: seen.append(1))
        found = step(model)
        hook.remove()
        assert seen.pop() and not seen
        assert_same(found, step(plain))


def step_logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(3, 20)[None]).logits


def test_dropout_is_the_same_when_recomputed_and_differs_by_step() -> None:
    model, _ = fused("llama", lora_dropout=0.3)
    model.train()
    first = step(model, seed=5)
    assert_same(step(model, seed=5), first, 0.0)
    assert not torch.equal(step(model, seed=6)[0], first[0])
    layers = model.base_model.model.model.layers
    for layer in layers:
        own = layer.forward
        layer.forward = lambda *args, own=own, **kwargs: torch.utils.checkpoint.checkpoint(
            own, *args, use_reentrant=False, **kwargs
        )
    assert_same(step(model, seed=5), first, 0.0)


def test_dropout_in_front_of_down_has_the_gradient_of_its_mask() -> None:
    """By finite differences."""
    model, _ = fused("llama", lora_dropout=0.4)
    model.train()
    _, grads = step(model)
    for layer in ("gate_proj", "up_proj", "down_proj"):
        for part in ("A", "B"):
            name = f"base_model.model.model.layers.0.mlp.{layer}.lora_{part}.default.weight"
            parameter = model.get_parameter(name)
            direction = torch.randn_like(parameter)
            ends = []
            for sign in (1, -1):
                with torch.no_grad():
                    parameter.add_(direction, alpha=sign * EPSILON)
                    ends.append(loss_of(model))
                    parameter.add_(direction, alpha=-sign * EPSILON)
            slope = (ends[0] - ends[1]) / (2 * EPSILON)
            assert slope == pytest.approx(float((grads[name] * direction).sum()), rel=5e-3, abs=1e-5), name


def loss_of(model: Any) -> float:
    from tests.lora.fused_models import IDS

    torch.manual_seed(3)
    with torch.no_grad():
        logits = model(input_ids=IDS, use_cache=False).logits
    return float(torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten()))


def test_compiled() -> None:
    model, _ = fused("llama")
    expected = step(model)
    for layer in model.base_model.model.model.layers:
        layer.mlp.compile(backend="aot_eager", fullgraph=True)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    assert_same(step(model), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
def test_the_down_projection_is_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiled layer that is checkpointed recomputes up to the product of the branches."""
    from fullshard.lora import gated_mlp

    computed: list[int] = []
    plain = gated_mlp._down_forward
    monkeypatch.setattr(gated_mlp, "_down_forward", lambda *args: (computed.append(1), plain(*args))[1])
    model, count = fused("llama")
    expected = step(model)
    assert len(computed) == count
    for layer in model.base_model.model.model.layers:
        checkpoint_module(layer)
        layer.compile(backend="aot_eager")
    computed.clear()
    torch._dynamo.reset()
    with torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True):
        assert_same(step(model), expected)
    assert len(computed) == count
