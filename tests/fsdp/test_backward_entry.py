"""Losses from tensors that left a unit by another way than its outputs, and `backward(inputs=…)`, as on one device."""

import contextlib
import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from fullshard.config.errors import FSDPError
from fullshard.fsdp import FSDPv2, backward_entry, uneven_batches
from tests.fsdp.programs import Block, Stack, mesh_for, mine
from tests.fsdp.test_forward_backward import _Auxiliaries, _Auxiliary, run
from tests.fsdp.test_silent_errors import assert_same_gradients, data, every_strategy, pair
from tests.fsdp.test_training_scripts import both
from tests.pool import ranks

# --- tensors taken from inside ----------------------------------------------------------------------------------------


class _Scales(nn.Module):
    """A unit whose backward reads a weight element by element, and does work after its output is made."""

    def __init__(self):
        super().__init__()
        self.weight, self.lin = nn.Parameter(torch.randn(8)), nn.Linear(8, 8)
        self.scaled, self.after = nn.Identity(), nn.Identity()

    def forward(self, x):
        y = torch.tanh(self.scaled(self.lin(x) * self.weight))
        self.after(torch.sin(self.lin(y)) * self.weight)
        return y


class _Nest(nn.Module):
    """Units inside units."""

    def __init__(self):
        super().__init__()
        self.units, self.mix = nn.ModuleList(_Scales() for _ in range(2)), nn.Linear(8, 8)

    def forward(self, x):
        for unit in self.units:
            x = unit(x)
        return torch.tanh(self.mix(x) @ self.mix.weight)


class _Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.nests, self.stem, self.head = nn.ModuleList(_Nest() for _ in range(2)), nn.Linear(8, 8), _Scales()

    def forward(self, x):
        x = self.stem(x)
        for nest in self.nests:
            x = nest(x)
        return self.head(x)


NAMES = ["stem", "nests.0", "nests.0.mix", "nests.0.units.1", "nests.1.units.0.scaled", "nests.1.units.0.after", "head"]


class _Taken:
    """What the named modules return, taken by forward hooks."""

    def __init__(self, model, names):
        self.found = {}
        self.handles = [model.get_submodule(name).register_forward_hook(self._take(name)) for name in names]

    def _take(self, name):
        return lambda module, args, out: self.found.update({name: out})

    def __enter__(self):
        return self.found

    def __exit__(self, *_):
        for handle in self.handles:
            handle.remove()


@pytest.mark.slow
@ranks(2)
@every_strategy
@pytest.mark.parametrize("output", [False, True])
def test_a_loss_from_tensors_that_hooks_took(strategy, output):
    """One by one, then all of them; the output of the model is in the loss or gone."""

    def program(m, x, step):
        names = NAMES if step == len(NAMES) else [NAMES[step]]
        with _Taken(m, names) as found:
            y = m(x)
        loss = sum(t.square().mean() for t in found.values())
        loss = loss + y.square().mean() if output else loss
        del y, found
        loss.backward()

    run(_Model, strategy, program, policy={_Scales, _Nest}, steps=len(NAMES) + 1)


@ranks(2)
@every_strategy
def test_a_tensor_taken_from_inside_may_itself_be_the_loss(strategy):
    def program(m, x, step):
        with _Taken(m, ["nests.0.units.1.scaled"]) as found:
            m(x)
        taken = found["nests.0.units.1.scaled"]
        taken.backward(torch.full_like(taken, 1 / taken.numel()), retain_graph=step == 0)
        if step == 0:
            torch.autograd.backward([taken.mean(), taken.square().mean()])

    run(_Model, strategy, program, policy={_Scales, _Nest})


class _Stop(Exception):
    pass


class _Quit(Exception):
    pass


@contextlib.contextmanager
def _left_at(module, kind):
    """Inside, a call of the module ends in an exception."""

    def leave(module, args, out):
        raise kind

    handle = module.register_forward_hook(leave)
    try:
        with contextlib.suppress(kind):
            yield
    finally:
        handle.remove()


class _Exits(_Model):
    """Leaves a unit in the middle, by an exception, with what a hook took from there."""

    def forward(self, x):
        with _Taken(self, ["nests.1.units.0.scaled"]) as found, _left_at(self.nests[1].units[0].scaled, _Stop):
            super().forward(x)
        return self.head(found["nests.1.units.0.scaled"])


@ranks(2)
@every_strategy
def test_a_forward_left_early(strategy):
    """Inside the model, and out of it."""

    def program(m, x, step):
        m(x).square().mean().backward()
        with _Taken(m, ["nests.0.units.1.scaled"]) as found, _left_at(m.nests[0].units[1].scaled, _Quit):
            m(x)
        found["nests.0.units.1.scaled"].square().mean().backward()

    run(_Exits, strategy, program, policy={_Scales, _Nest})


class _Features(nn.Module):
    """A backbone for what hooks take from inside it; its own output is not used."""

    def __init__(self):
        super().__init__()
        self.backbone, self.head, self.out = _Nest(), Block(), nn.Linear(8, 8)

    def forward(self, x):
        with _Taken(self.backbone, ["units.0.scaled", "units.1.after"]) as found:
            self.backbone(x)
        return self.out(self.head(found["units.1.after"] * 2) + self.head(found["units.0.scaled"]))


@ranks(2)
@every_strategy
@pytest.mark.parametrize("inside", [pytest.param(_Nest, marks=pytest.mark.slow), _Scales])
def test_features_of_one_unit_as_inputs_of_another(strategy, inside):
    run(_Features, strategy, lambda m, x, step: m(x).square().mean().backward(), policy={inside, Block})


class _Sums(_Auxiliaries):
    """Adds up inside the model what its units have left on themselves."""

    def forward(self, x):
        y = super().forward(x)
        return y.square().mean() + sum(part.kept.square().mean() for part in self.parts)


@ranks(2)
@every_strategy
def test_losses_left_on_units_and_added_up_in_the_model(strategy):
    run(lambda: _Sums(late=True), strategy, lambda m, x, step: m(x).backward(), policy={_Auxiliary})


@ranks(2)
def test_losses_of_many_passes_before_one_backward():
    def program(m, x, step):
        losses = []
        for i in range(backward_entry.KEPT + 4):
            m(x + i)
            losses.append(sum(part.kept.square().mean() for part in m.parts))
        sum(losses).backward()

    run(lambda: _Auxiliaries(late=True), "FULL_SHARD", program, policy={_Auxiliary}, steps=2)


@ranks(2)
def test_calls_without_a_graph_are_forgotten():
    _, model = pair(Stack, "FULL_SHARD", auto_wrap_policy={Block})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backward_entry, "KEPT", 2)
        for step in range(6):
            backward_entry._calls.limit = 0
            model(data(2, 8, seed=step)).square().mean().backward()
    mine_ = [call for call in backward_entry._calls.outermost if call._unit() in model._fullshard_engine.units]
    assert len(mine_) <= 3 and not backward_entry._calls.open
    with pytest.raises(RuntimeError):
        model(data(2, 3))
    assert not backward_entry._calls.open
    shard = weakref.ref(model.out.weight)
    del model, mine_
    gc.collect()
    assert shard() is None


# --- weighted steps ---------------------------------------------------------------------------------------------------


class _Wraps:
    def __init__(self, value):
        self.value = value


class _Out(nn.Linear):
    """A unit by itself."""


class _Leaves(nn.Module):
    """Leaves terms of the loss in every way."""

    def __init__(self):
        super().__init__()
        self.parts, self.out = nn.ModuleList(_Auxiliary(late) for late in (False, True)), _Out(8, 8)
        self.losses = []

    def forward(self, x):
        for part in self.parts:
            x = part(x)
            self.losses.append(part.kept.mean())
        self.total = sum(self.losses)
        return _Wraps(self.out(x) + self.total)


def _terms(m, x, how):
    """What is added up, as means over rows."""
    m.losses.clear()
    with _Taken(m, ["parts.1.b"]) as found:
        y = m(x).value
    kept = m.parts[0].kept
    return {
        "attribute": lambda: kept.square().mean(),
        "list": lambda: m.losses[1] + m.losses[0] * 2,
        "hook": lambda: found["parts.1.b"].square().mean(),
        "alone": lambda: m.total,
        "with the output": lambda: y.mean() + m.total + found["parts.1.b"].mean(),
        "into another call": lambda: m.out(kept).square().mean() + m.parts[0](found["parts.1.b"] * 2).mean(),
    }[how]()


@ranks(2)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", pytest.param("NO_SHARD", marks=pytest.mark.slow)])
@pytest.mark.parametrize("how", ["attribute", "list", "hook", "alone", "with the output", "into another call"])
def test_weights_of_losses_that_left_by_another_way(strategy, how):
    """Three rows on two ranks: a rank's mean over one row counts half of one over two."""
    (reference, _), (model, _) = both(_Leaves, strategy, auto_wrap_policy={_Auxiliary, _Out})
    x = data(3, 8)
    _terms(reference, x, how).backward()
    rows = mine(x)
    with uneven_batches.activate(uneven_batches.Share(len(rows) * 2 / 3)):
        loss = _terms(model, rows, how)
    loss.backward(retain_graph=True)
    model.zero_grad()
    loss.backward()  # the factor is there once more, not twice
    assert_same_gradients(reference, model)


class _Calls(nn.Module):
    """Calls a model that it does not own."""

    def __init__(self, other):
        super().__init__()
        self.block, self.others = Block(), [other]

    def forward(self, x):
        return self.block(self.others[0](x))


@ranks(2)
def test_a_weight_counts_once_where_models_call_each_other():
    (inner, _), (sharded, _) = both(Stack, "FULL_SHARD")
    (outer, _), (around, _) = both(lambda: _Calls(None), "FULL_SHARD")
    outer.others, around.others = [inner], [sharded]
    x = data(3, 8)
    outer(x).square().mean().backward()
    rows = mine(x)
    with uneven_batches.activate(uneven_batches.Share(len(rows) * 2 / 3)):
        around(rows).square().mean().backward()
    assert_same_gradients(inner, sharded)
    assert_same_gradients(outer, around)


@pytest.mark.slow
@ranks(4)
@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "HYBRID_SHARD_ZERO2"])
def test_hybrid_strategies_with_groups_of_two(strategy):
    """Four ranks, so that the hybrid ones shard something: hooks, losses on modules, accumulation, chosen inputs."""

    def program(m, x, step):
        with _Taken(m, ["parts.0.a"]) as found:
            y = m(x)
        kept = sum(part.kept.square().mean() for part in m.parts)
        with m.no_sync() if step == 1 and hasattr(m, "no_sync") else contextlib.nullcontext():
            (kept + found["parts.0.a"].square().mean()).backward(retain_graph=True)
        if step == 2:
            y.square().mean().backward(inputs=[m.parts[1].b.weight, m.out.bias])
        else:
            (y.square().mean() + kept).backward()

    run(lambda: _Auxiliaries(late=True), strategy, program, policy={_Auxiliary}, steps=4)


@pytest.mark.slow
@ranks(4)
@pytest.mark.parametrize("how", ["hook", "with the output", "into another call"])
def test_weights_on_four_ranks(how):
    (reference, _), (model, _) = both(_Leaves, "HYBRID_SHARD", auto_wrap_policy={_Auxiliary, _Out})
    x = data(7, 8)
    _terms(reference, x, how).backward()
    rows = mine(x)
    with uneven_batches.activate(uneven_batches.Share(len(rows) * 4 / 7)):
        _terms(model, rows, how).backward()
    assert_same_gradients(reference, model)


# --- backward(inputs=…) -----------------------------------------------------------------------------------------------

CHOSEN = ["blocks.1.up.weight", "out.bias", "blocks.1.down.bias"]


@ranks(2)
@every_strategy
@pytest.mark.parametrize("how", ["method", "function", pytest.param("edge", marks=pytest.mark.slow)])
def test_gradients_of_the_parameters_that_backward_names(strategy, how):
    def program(m, x, step):
        chosen = [m.get_parameter(name) for name in CHOSEN[: step + 1]]
        x = x.clone().requires_grad_()
        if step == 1:
            chosen.append(x)
        loss = m(x).square().mean()
        if how == "method":
            loss.backward(inputs=chosen)
        elif how == "function":
            torch.autograd.backward([loss, loss * 2], inputs=chosen)
        else:
            loss.backward(inputs=[torch.autograd.graph.get_gradient_edge(p) for p in chosen[:1]], retain_graph=True)
            loss.backward(inputs=chosen[1:] or chosen[0])
        assert (x.grad is not None) == (step == 1)

    run(Stack, strategy, program)


@ranks(2)
def test_backward_names_parameters_that_took_no_part():
    (reference, _), (model, part) = both(Stack, "FULL_SHARD")
    for m, rows in ((reference, lambda t: t), (model, part)):
        m.blocks[0](rows(data(4, 8))).mean().backward(inputs=[m.out.weight])
        m(rows(data(4, 8))).mean().backward(inputs=list(m.parameters()))
        m.blocks[0](rows(data(4, 8))).mean().backward(inputs=[m.blocks[1].up.weight, m.blocks[0].up.weight])
    assert_same_gradients(reference, model)


@ranks(2)
@every_strategy
def test_autograd_grad_of_sharded_parameters_is_refused(strategy):
    module = Stack().double()
    old = module.out.weight
    model = FSDPv2(module, mesh_for(strategy), strategy=strategy, auto_wrap_policy={Block})
    for unused in (False, True):
        with pytest.raises(FSDPError, match=r"sharded parameter out.weight.*backward\(inputs=\[…\]\)"):
            torch.autograd.grad(model(data(2, 8)).sum(), [model.out.weight], allow_unused=unused)
    for call in (lambda loss: loss.backward(inputs=[old]), lambda loss: torch.autograd.grad(loss, old)):
        with pytest.raises(FSDPError, match=r"out.weight as it was before the module was wrapped"):
            call(model(data(2, 8)).sum())
    plain = copy.deepcopy(Stack())
    assert torch.autograd.grad(plain(torch.randn(2, 8)).sum(), plain.out.weight)[0].shape == (8, 8)
