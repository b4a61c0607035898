"""What layers keep for backward: the choice under a budget, the levels, and inputs that wait on the host."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fullshard.activations import offload
from fullshard.activations.checkpointing import checkpoint_module, is_checkpointed, keep_activations
from fullshard.activations.layer_memory import LayerMeter, kept_bytes
from fullshard.activations.levels import (
    Level,
    LevelChoice,
    choose_levels,
    describe_levels,
    full_checkpointing,
    kinds_of,
    peak_of,
    recompute_costs,
    set_level,
)
from tests.sft.tiny import make_model

# --- the choice -----------------------------------------------------------------------------------------------------

SIZES = st.integers(0, 60)


@st.composite
def problems(draw: Any) -> Any:
    """Bytes and costs by kind and level, the kinds of layers, and a budget."""
    kinds = draw(st.integers(1, 2))
    sizes, costs = {}, {}
    for kind in range(kinds):
        levels = [Level.KEEP_ALL, *draw(st.lists(st.sampled_from(list(Level)[1:]), min_size=1, unique=True))]
        sizes[kind] = {level: draw(SIZES) for level in levels}
        costs[kind] = {level: draw(SIZES) if level else 0 for level in levels}
    layers = draw(st.lists(st.integers(0, kinds - 1), min_size=1, max_size=5))
    return sizes, costs, layers, draw(st.integers(0, 300))


def total(values: Any, layers: list[int], levels: Any) -> float:
    return sum(values[kind][level] for kind, level in zip(layers, levels, strict=True))


@given(problems())
def test_levels_fit_and_cost_at_most_one_layer_more_than_the_best(problem):
    sizes, costs, layers, budget = problem
    chosen = choose_levels(sizes, costs, layers, budget)
    assert len(chosen) == len(layers)
    every = list(itertools.product(*(sizes[kind] for kind in layers)))
    fitting = [levels for levels in every if total(sizes, layers, levels) <= budget]
    if not fitting:
        assert total(sizes, layers, chosen) == min(total(sizes, layers, levels) for levels in every)
        return
    assert total(sizes, layers, chosen) <= budget
    best = min(total(costs, layers, levels) for levels in fitting)
    assert total(costs, layers, chosen) <= best + max(max(costs[kind].values()) for kind in layers)


@given(problems())
def test_layers_that_keep_more_come_last_and_memory_without_limit_recomputes_nothing(problem):
    sizes, costs, layers, budget = problem
    chosen = choose_levels(sizes, costs, layers, budget)
    for kind in set(layers):
        mine = [level for each, level in zip(layers, chosen, strict=True) if each == kind]
        assert mine == sorted(mine, reverse=True)
    assert total(costs, layers, choose_levels(sizes, costs, layers, 10**9)) == 0


def test_the_cheapest_recomputation_per_byte_comes_first():
    """The numbers of an 8B layer: keeping the MLP's part brings more per byte than keeping the rest."""
    keep, mlp, layer = Level.KEEP_ALL, Level.RECOMPUTE_MLP, Level.RECOMPUTE
    sizes = {0: {keep: 1800, mlp: 870, layer: 134}}
    costs = {0: {keep: 0.0, mlp: 4.9, layer: 7.5}}
    chosen = choose_levels(sizes, costs, [0] * 8, 4 * 134 + 4 * 1800)
    assert chosen == [layer] * 4 + [keep] * 4
    assert choose_levels(sizes, costs, [0] * 8, 3 * 134 + 4 * 1800 + 870) == [layer] * 3 + [mlp] + [keep] * 4


def test_the_peak_is_reached_where_a_layer_has_everything():
    sizes = {0: {Level.KEEP_ALL: 10, Level.RECOMPUTE: 1}}
    assert peak_of(sizes, [0] * 4, [Level.RECOMPUTE] * 4) == 3 * 1 + 10
    assert peak_of(sizes, [0] * 4, [Level.RECOMPUTE, Level.RECOMPUTE, Level.KEEP_ALL, Level.KEEP_ALL]) == 2 + 20
    assert peak_of(sizes, [0] * 4, [Level.KEEP_ALL, Level.RECOMPUTE, Level.RECOMPUTE, Level.RECOMPUTE]) == 12 + 10


def test_levels_in_words():
    keep, mlp, layer, host = Level
    assert describe_levels([keep] * 3) == "all 3 layers keep all"
    assert describe_levels([mlp, mlp, keep]) == "1 of 3 layers keep all, 2 recompute the MLP"
    assert describe_levels([host, layer]) == "1 of 2 layers are recomputed, 1 are recomputed from inputs on the host"
    assert full_checkpointing(3, True) == [host, host, layer] and full_checkpointing(2, False) == [layer] * 2


def test_kinds_and_costs_of_layers():
    model = make_model(num_hidden_layers=3)
    model.model.layers[0].mlp.up_proj = nn.Linear(32, 65)
    layers = list(model.model.layers)
    assert kinds_of(layers) == [0, 1, 1]
    costs = recompute_costs(layers[1])
    mlp, attention = 3 * 32 * 64, 2 * 32 * 32 + 2 * 32 * 16
    assert costs[Level.RECOMPUTE_MLP] == mlp and costs[Level.RECOMPUTE] == mlp + attention
    assert costs[Level.KEEP_ALL] == 0 and costs[Level.OFFLOAD] > costs[Level.RECOMPUTE]
    assert Level.RECOMPUTE_MLP not in recompute_costs(nn.Linear(4, 4)), "what has no such part cannot recompute it"


@pytest.mark.parametrize("kinds", [[0] * 32, [0] + [1] * 30 + [2]])
def test_a_budget_is_filled(kinds):
    """Whatever the limit: what it leaves is less than another layer could keep. A peak that the levels hardly change,
    just above the limit, is no reason to recompute everything."""
    one = {Level.KEEP_ALL: 2127.0, Level.RECOMPUTE_MLP: 815.0, Level.RECOMPUTE: 125.0}
    cost = {Level.KEEP_ALL: 0.0, Level.RECOMPUTE_MLP: 176.0, Level.RECOMPUTE: 218.0}
    sizes, costs = dict.fromkeys(kinds, one), dict.fromkeys(kinds, cost)

    def peak(levels):
        return 16_900.0 + sum(one[level] for level in levels)

    least, most = peak([Level.RECOMPUTE] * 32), peak([Level.KEEP_ALL] * 32)
    for limit in [least - 1, least, most, most - 1e-3, *(least + i * (most - least) / 97.3 for i in range(98))]:
        levels = LevelChoice(kinds, sizes, costs, [Level.RECOMPUTE] * 32, peak, limit).levels()
        assert peak(levels) <= limit or limit < least
        assert limit - peak(levels) < 2127 - 815 or set(levels) == {Level.KEEP_ALL}, limit
        assert levels == sorted(levels, reverse=True), "layers that keep more come last"


# --- levels ---------------------------------------------------------------------------------------------------------


def gradients(model: Any, levels: list[Level], reentrant: bool = False) -> list[torch.Tensor]:
    """The gradients of a pass with dropout, at these levels."""
    for layer, level in zip(model.model.layers, levels, strict=True):
        set_level(layer, level, reentrant=reentrant)
    model.zero_grad()
    torch.manual_seed(3)
    ids = torch.randint(3, 400, (2, 16))
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("reentrant", [False, True])
def test_every_level_gives_the_same_gradients(reentrant, monkeypatch):
    monkeypatch.setattr(offload, "_movable", lambda t: t.is_floating_point())
    model = make_model(num_hidden_layers=4, attention_dropout=0.2).train()
    plain = gradients(model, [Level.KEEP_ALL] * 4)
    for levels in ([Level.RECOMPUTE] * 4, list(Level), full_checkpointing(4, True), [Level.KEEP_ALL] * 4):
        assert all(map(torch.equal, plain, gradients(model, levels, reentrant))), levels
    assert not any(is_checkpointed(module) for module in model.modules())


def test_a_forward_of_the_module_s_own_is_kept():
    class Doubled(nn.Linear):
        pass

    calls = []
    module = Doubled(2, 2)
    module.forward = lambda x: calls.append(1) or nn.Linear.forward(module, x) * 2  # type: ignore[method-assign]
    own = module.forward
    x = torch.ones(1, 2, requires_grad=True)
    assert torch.equal(checkpoint_module(module)(x), own(x)) and checkpoint_module(module) is module
    calls.clear()
    module(x).sum().backward()
    assert len(calls) == 2 and is_checkpointed(module)
    keep_activations(module)(x).sum().backward()
    assert len(calls) == 3 and not is_checkpointed(module)
    keep_activations(module)


@pytest.mark.slow
def test_compiled_layers_share_one_variant_per_level(monkeypatch):
    from torch._dynamo.utils import counters

    monkeypatch.setattr(offload, "_movable", lambda t: t.is_floating_point())
    model = make_model(num_hidden_layers=8)
    plain = gradients(model, [Level.KEEP_ALL] * 8)
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")
    counters.clear()
    levels = [level for level in sorted(Level, reverse=True) for _ in range(2)]
    for _ in range(2):
        for a, b in zip(plain, gradients(model, levels), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert counters["stats"]["unique_graphs"] == 3, "offloaded layers have the code of recomputed ones"


# --- inputs on the host ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_inputs_wait_in_buffers_that_are_used_again(monkeypatch):
    monkeypatch.setattr(offload, "_movable", lambda t: t.is_floating_point())
    buffers = offload.HostBuffers()
    monkeypatch.setattr(offload, "buffers", buffers)
    layers = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)]
    for layer in layers:
        checkpoint_module(layer, offload=True)
    used = []
    for _ in range(3):
        y = x = torch.randn(2, 4, requires_grad=True)
        for layer in layers:
            y = layer(y)
        assert buffers.free == [] or len(buffers.free) == len(used) - 3
        y.sum().backward()
        del y, x
        offload._leaving.clear()
        gc.collect()
        used = sorted({id(buffer) for buffer in buffers.free})
        assert len(used) == 3, "the next pass takes the buffers of this one"


def test_the_smallest_buffer_that_fits():
    buffers = offload.HostBuffers()
    large, small = torch.empty(64, dtype=torch.uint8), torch.empty(16, dtype=torch.uint8)
    buffers.give(large)
    buffers.give(small)
    assert buffers.take(10) is small and buffers.take(10) is large and buffers.take(10).numel() == 10


# --- measuring ------------------------------------------------------------------------------------------------------


def test_what_a_layer_keeps_is_measured():
    model = make_model(num_hidden_layers=1)
    layer, kept = model.model.layers[0], {}
    for level in (Level.KEEP_ALL, Level.RECOMPUTE_MLP, Level.RECOMPUTE):
        meter = LayerMeter(layer)
        gradients(model, [level])
        meter.stop()
        kept[level], hidden = meter.kept, meter.input  # the output is not counted on a CPU
    assert hidden == 2 * 16 * 32 * 4 and kept[Level.RECOMPUTE] == hidden
    inside = 4 * 2 * 16 * 64 * 4  # gate, its activation, up and their product
    assert kept[Level.KEEP_ALL] - kept[Level.RECOMPUTE_MLP] == inside and kept[Level.RECOMPUTE_MLP] > hidden
    gradients(model, [Level.KEEP_ALL])
    assert meter.kept == kept[Level.RECOMPUTE], "it has stopped"


def test_a_tensor_that_is_saved_twice_counts_once():
    x = torch.randn(4, requires_grad=True)
    with kept_bytes(x.device) as kept:
        y = (x * 2).exp()
        _ = y * y
    assert sum(kept) == 16
