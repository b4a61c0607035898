"""Programs in which a sharded model could be silently wrong: each equals one device, or is refused."""

import contextlib
import dataclasses

import pytest
import torch
from torch import nn

from fullshard.config.errors import FSDPError
from fullshard.fsdp import FSDPv2
from tests.fsdp.programs import STRATEGIES, Block, Stack, mesh_for, mine
from tests.pairwise import thinned
from tests.pool import ranks

DOUBLE = torch.float64
every_strategy = pytest.mark.parametrize(
    "strategy", [pytest.param(s, marks=pytest.mark.slow) if s.startswith("HYBRID") else s for s in STRATEGIES]
)
"""On two ranks the hybrid ones shard nothing, so they come with the slow part."""


def pair(make, strategy, **options):
    """The same module twice: on one device, and sharded."""
    made = []
    for _ in range(2):
        torch.manual_seed(3)
        made.append(make().double())
    return made[0], FSDPv2(made[1], mesh_for(strategy), strategy=strategy, **options)


def data(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def assert_same_gradients(reference, model):
    got = dict(model.named_parameters())
    for name, p in reference.named_parameters():
        assert (p.grad is None) == (got[name].grad is None), name
        if p.grad is not None:
            full = got[name].grad.full_tensor()
            torch.testing.assert_close(full, p.grad, rtol=0, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


def assert_same_values(reference, model):
    full = model.full_state_dict()
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(full[name], value, rtol=0, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


# --- units that return their parameters -------------------------------------------------------------------------------


class _Table(nn.Module):
    """Returns its parameter: itself, a view, inside a container."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.w = nn.Parameter(torch.randn(6, 6))

    def forward(self):
        if self.how == "view":
            return self.w[1:5].t()
        if self.how == "containers":
            return {"pair": (self.w, [self.w[0], self.w.detach()])}
        if self.how == "dataclass":
            return _Found(self.w)
        return self.w


@dataclasses.dataclass
class _Found:
    table: torch.Tensor


class _Tied(nn.Module):
    """Two layers around a table that another unit returns."""

    def __init__(self, how):
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.table = _Table(how)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        found = self.table()
        if isinstance(found, _Found):
            found = found.table
        elif isinstance(found, dict):
            found = found["pair"][0] * found["pair"][1][1] + found["pair"][1][0]
        return self.last(torch.tanh(x @ found.new_ones(6, found.shape[0]) @ found.reshape(found.shape[0], -1)[:, :4]
                                    @ found.new_ones(4, 6)))  # fmt: skip


@ranks(2)
@every_strategy
@pytest.mark.parametrize("how", ["itself", "view", "containers", "dataclass"])
def test_a_unit_may_return_its_parameter(strategy, how):
    reference, model = pair(lambda: _Tied(how), strategy, auto_wrap_policy={nn.Linear, _Table})
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (reference, model)]
    for step in range(4):
        x = data(4, 6, seed=step // 2)  # the same twice, then another
        for m, part, optimizer in zip((reference, model), (x, mine(x)), optimizers, strict=True):
            optimizer.zero_grad()
            m(part).square().mean().backward()
        assert_same_gradients(reference, model)
        for optimizer in optimizers:
            optimizer.step()
    assert_same_values(reference, model)
    assert model.meter.live == 0
    assert not any(p.full._backward_hooks for u in model._fullshard_engine.units for p in u.parameters)


@ranks(2)
@every_strategy
@pytest.mark.parametrize("how", ["itself", "view"])
def test_a_model_may_return_its_parameter(strategy, how):
    reference, model = pair(lambda: _Table(how), strategy)
    for _ in range(2):
        for m in (reference, model):
            out = m()
            out.square().sum().backward()
            kept = out.detach()
        assert_same_gradients(reference, model)
        torch.testing.assert_close(kept, reference().detach(), rtol=0, atol=0)
    with torch.no_grad():
        out = model()
    torch.testing.assert_close(out, reference().detach(), rtol=0, atol=0)


class _Box:
    def __init__(self, value):
        self.value = value


class _Boxed(_Table):
    def forward(self):
        return _Box(super().forward())


@ranks(2)
@every_strategy
def test_a_parameter_inside_an_unknown_object_is_refused(strategy):
    _, model = pair(lambda: _Boxed("view"), strategy)
    with pytest.raises(FSDPError, match=r"returns one of its parameters.*return a clone"):
        model()


class _Passes(nn.Module):
    """Returns its inputs as they came, beside what it made of them."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x, y):
        return self.b(torch.tanh(self.a(x))), x, y


class _Around(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(6, 6)
        self.parts = nn.ModuleList(_Passes() for _ in range(3))

    def forward(self, x, y):
        x = self.stem(x)
        total = 0
        for part in self.parts:
            x, before, y = part(x, y)
            total = total + before.sin() * y
        return x + total, y


@ranks(2)
@every_strategy
def test_inputs_that_are_returned_as_they_came(strategy):
    reference, model = pair(_Around, strategy, auto_wrap_policy={_Passes})
    y = data(1, 6, seed=7).requires_grad_()  # one leaf for all steps
    leaves = []
    for m, part in ((reference, lambda t: t), (model, mine)):
        leaf = y.detach().clone().requires_grad_()
        for step in range(3):
            out, again = m(part(data(4, 6, seed=step)), leaf)
            assert again is leaf
            (out.square().mean() + again.mean()).backward()
        leaves.append(leaf)
        assert not leaf._backward_hooks
    assert_same_gradients(reference, model)
    if strategy == "FULL_SHARD":
        assert all(count == 3 for name, count in model.meter.reduces.items() if "parts" in name)


# --- gradients that no_sync holds back --------------------------------------------------------------------------------


def _drop(model, optimizer, how):
    if how == "module":
        model.zero_grad()
    elif how == "optimizer":
        optimizer.zero_grad()
    elif how == "by hand":
        for p in model.parameters():
            p.grad = None
    else:
        optimizer.zero_grad(set_to_none=False)


@pytest.mark.slow
@ranks(2)
@every_strategy
@pytest.mark.parametrize("how", thinned(["module", "optimizer", "by hand", "zeros", "zeros-foreach"]))
@pytest.mark.parametrize("reduced_before", [False, True])
def test_zero_grad_drops_what_no_sync_holds_back(strategy, how, reduced_before):
    reference, model = pair(Stack, strategy, auto_wrap_policy={Block}, small_parameter_bytes=256)
    for m, part in ((reference, lambda t: t), (model, mine)):
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1, foreach=how == "zeros-foreach")
        held = m.no_sync if m is model else contextlib.nullcontext

        def backward(seed, m=m, part=part):
            m(part(data(4, 8, seed=seed))).square().mean().backward()

        _drop(m, optimizer, how)  # before the accumulation: drops nothing that comes later
        if reduced_before:
            backward(0)
        with held():
            backward(1)
            backward(2)
        _drop(m, optimizer, how)
        with held():
            backward(3)
        backward(4)
    assert_same_gradients(reference, model)


@ranks(2)
@every_strategy
def test_gradients_reduced_before_and_held_after_add_up(strategy):
    reference, model = pair(Stack, strategy, auto_wrap_policy={Block})
    for m, part in ((reference, lambda t: t), (model, mine)):
        for seed in range(4):
            with m.no_sync() if m is model and seed in (1, 2) else contextlib.nullcontext():
                (m(part(data(4, 8, seed=seed))).square().mean() / 4).backward()
    assert_same_gradients(reference, model)


@ranks(2)
@every_strategy
def test_held_gradients_outlive_an_exception(strategy):
    """A batch that cannot be computed is left out; what was accumulated before counts."""
    reference, model = pair(Stack, strategy, auto_wrap_policy={Block})
    for m, part in ((reference, lambda t: t), (model, mine)):
        for seed in range(3):
            with m.no_sync() if m is model and seed < 2 else contextlib.nullcontext():
                with pytest.raises(RuntimeError):
                    m(data(2, 3))
                m(part(data(4, 8, seed=seed))).square().mean().backward()
    assert_same_gradients(reference, model)


@ranks(2)
@every_strategy
def test_using_held_gradients_is_refused(strategy):
    _, model = pair(Stack, strategy, auto_wrap_policy={Block})
    optimizer = torch.optim.AdamW(model.parameters())
    with model.no_sync():
        model(data(2, 8)).sum().backward()
    before = model.full_state_dict()
    with pytest.raises(FSDPError, match=r"AdamW.step\(\) while no_sync\(\) holds gradients back"):
        optimizer.step()
    with pytest.raises(FSDPError, match=r"on a gradient that no_sync\(\) holds back"):
        model.clip_grad_norm_(1.0)
    with pytest.raises(FSDPError, match=r"on a gradient that no_sync\(\) holds back"):
        model.out.weight.grad.abs()
    assert "held back" in repr(model.out.weight.grad)
    assert all(torch.equal(v, before[n]) for n, v in model.full_state_dict().items())
    model(data(2, 8)).sum().backward()
    optimizer.step()


# --- backward through values that have changed ------------------------------------------------------------------------


@ranks(2)
@every_strategy
@pytest.mark.parametrize("change", ["step", "load", "write"])
@pytest.mark.parametrize("kept", ["retained", "waiting"])
def test_backward_through_weights_that_have_changed_raises_as_on_one_device(strategy, change, kept):
    reference, model = pair(Stack, strategy, auto_wrap_policy={Block})
    for m in (reference, model):
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        loss = m(data(2, 8)).square().mean()
        if kept == "retained":
            loss.backward(retain_graph=True)
        else:
            m(data(2, 8, seed=1)).square().mean().backward()
        if change == "step":
            optimizer.step()
        elif change == "load":
            m.load_state_dict({n: v + 1 for n, v in reference.state_dict().items()})
        else:
            with torch.no_grad():
                m.blocks[1].up.weight.mul_(2)
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation"):
            loss.backward()
        optimizer.zero_grad()
        m(data(2, 8)).square().mean().backward()  # and the next step is good
    if change != "load":
        torch.testing.assert_close(model.out.weight.grad.full_tensor(), reference.out.weight.grad, rtol=0, atol=1e-9)


@ranks(2)
@every_strategy
def test_reading_whole_parameters_between_forward_and_backward_changes_nothing(strategy):
    reference, model = pair(Stack, strategy, auto_wrap_policy={Block})
    x = data(4, 8)
    reference(x).square().mean().backward()
    loss = model(mine(x)).square().mean()
    with model.summon_full_params():
        assert model.out.weight.shape == (8, 8)
    model.full_state_dict()
    loss.backward()
    assert_same_gradients(reference, model)


# --- gradients of gradients -------------------------------------------------------------------------------------------


@ranks(2)
@every_strategy
def test_a_gradient_penalty_across_units_is_refused(strategy):
    _, model = pair(Stack, strategy, auto_wrap_policy={Block})
    x = data(2, 8).requires_grad_()
    for call in (
        lambda out: torch.autograd.grad(out.sum(), x, create_graph=True),
        lambda out: out.sum().backward(create_graph=True),
    ):
        with pytest.raises(FSDPError, match=r"create_graph=True.*inside the forward of one unit"):
            call(model(x))
        model.zero_grad()
        model(x).sum().backward()
    torch.autograd.grad(model(x).sum(), x)  # without a graph of its own


class _Penalty(nn.Module):
    """What the refusal suggests."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, x):
        x = x.detach().requires_grad_()
        out = self.net(x)
        (inner,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out.square().mean() + (inner.norm(dim=1) - 1).square().mean()


@ranks(2)
@every_strategy
def test_a_gradient_penalty_inside_one_unit(strategy):
    reference, model = pair(_Penalty, strategy)
    for step in range(2):
        x = data(4, 6, seed=step)
        for m, part in ((reference, x), (model, mine(x))):
            m(part).backward()
    assert_same_gradients(reference, model)


# --- order ------------------------------------------------------------------------------------------------------------


class _Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleList(Block() for _ in range(2))
        self.mix = nn.Linear(8, 8)

    def forward(self, x):
        for block in self.inner:
            x = block(x)
        return self.mix(x)


@ranks(2)
def test_backward_gathers_nested_units_in_the_order_in_which_it_needs_them():
    _, model = pair(lambda: nn.Sequential(*(_Outer() for _ in range(2))), "FULL_SHARD",
                    auto_wrap_policy={Block, _Outer})  # fmt: skip
    gathered = []
    for unit in model._fullshard_engine.units:
        start = unit.start_gather
        unit.start_gather = lambda start=start, name=unit.name: (gathered.append(name), start())
    for _ in range(2):
        out = model(data(2, 8)).sum()
        gathered.clear()
        model.meter.reset()
        out.backward()
        assert gathered == ["1", "1.inner.1", "1.inner.0", "0", "0.inner.1", "0.inner.0"]
        assert model.meter.peak <= model.plan.gathered_bound()
