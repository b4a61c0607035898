"""Variants of forward and backward (outputs, freezing, other passes) against one device, on every strategy."""

import contextlib
import dataclasses
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrizations

from fullshard.config.errors import FSDPError
from fullshard.fsdp import checkpoint_module
from fullshard.spmd.tensor_tree import tensors_in
from tests.fsdp.programs import Block, Stack, build, mine, sharded
from tests.fsdp.test_silent_errors import assert_same_gradients, assert_same_values, data, every_strategy, pair
from tests.fsdp.test_training_scripts import both
from tests.pool import ranks


def run(make, strategy, program, policy=None, steps=3):
    """Steps of a program on one device and sharded: the same gradients and values."""
    models = both(make, strategy, auto_wrap_policy=policy or {Block})
    for m, part in models:
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        for step in range(steps):
            optimizer.zero_grad()
            program(m, part(data(4, 8, seed=step)), step)
            if step < steps - 1:
                optimizer.step()
    assert_same_gradients(models[0][0], models[1][0])
    assert_same_values(models[0][0], models[1][0])


def loss_backward(m, x, step):
    m(x).square().mean().backward()


# --- what modules do --------------------------------------------------------------------------------------------------


class _Auxiliary(nn.Module):
    """Leaves a term of the loss on itself, computed before its output or after."""

    def __init__(self, late):
        super().__init__()
        self.a, self.b, self.late, self.kept = nn.Linear(8, 8), nn.Linear(8, 8), late, None

    def forward(self, x):
        h = self.a(x)
        if not self.late:
            self.kept = torch.tanh(self.b(h)) @ self.a.weight
        y = torch.tanh(self.b(h))
        if self.late:
            self.kept = torch.tanh(self.b(h)) @ self.a.weight
        return y


class _Auxiliaries(nn.Module):
    def __init__(self, late):
        super().__init__()
        self.parts = nn.ModuleList(_Auxiliary(late) for _ in range(3))
        self.out = nn.Linear(8, 8)

    def forward(self, x):
        for part in self.parts:
            x = part(x)
        return self.out(x)


@pytest.mark.slow
@ranks(2)
@every_strategy
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("only", [False, True])
def test_losses_left_on_modules(strategy, late, only):
    def program(m, x, step):
        y = m(x)
        loss = sum(part.kept.square().mean() for part in m.parts)
        (loss if only else loss + y.square().mean()).backward()

    run(lambda: _Auxiliaries(late), strategy, program, policy={_Auxiliary})


class _Pair(NamedTuple):
    a: torch.Tensor
    b: tuple


@dataclasses.dataclass
class _Record:
    a: torch.Tensor
    b: list


class _Returns(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.linear, self.kind = nn.Linear(8, 8), kind

    def forward(self, x):
        y = self.linear(x)
        if self.kind == "none":
            return y, None
        if self.kind == "named tuple":
            return _Pair(y, (y, x))
        if self.kind == "dataclass":
            return _Record(y, [y.sin(), {"k": y.cos()}])
        return (y, y) if self.kind == "twice" else {"a": y, "b": [None, 3, "s"]}


class _Sums(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.parts = nn.ModuleList(_Returns(kind) for _ in range(3))

    def forward(self, x):
        total = 0
        for part in self.parts:
            found = list(tensors_in(part(x)))
            x = torch.tanh(sum(found))
            total = total + found[-1].sin()
        return x + total


@ranks(2)
@every_strategy
@pytest.mark.parametrize("kind", ["none", "named tuple", "dataclass", "twice", "dict"])
def test_what_a_unit_may_return(strategy, kind):
    run(lambda: _Sums(kind), strategy, loss_backward, policy={_Returns})


class _AddsInPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x.add_(torch.tanh(self.linear(x.clone())))


class _InPlace(nn.Module):
    """Outputs that others change, and units that change their input."""

    def __init__(self):
        super().__init__()
        self.first = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.second = nn.ModuleList(_AddsInPlace() for _ in range(2))

    def forward(self, x):
        for linear in self.first:
            x = torch.relu_(linear(x).mul_(2).add_(1))
        x = x * 1
        for part in self.second:
            x = part(x)
        return x


@ranks(2)
@every_strategy
def test_changes_in_place(strategy):
    run(_InPlace, strategy, loss_backward, policy={nn.Linear, _AddsInPlace})


class _WithoutGradients(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts, self.out = nn.ModuleList(Block() for _ in range(3)), nn.Linear(8, 8)

    def forward(self, x):
        with torch.no_grad():
            start = self.parts[0](x)
        h = torch.tanh(self.parts[0](x) + start)
        with torch.no_grad():
            x = self.parts[1](h)
        h = torch.tanh(self.parts[1](h) * x)
        return self.out(self.parts[2](h).detach() + h)


@ranks(2)
@every_strategy
def test_parts_without_gradients(strategy):
    run(_WithoutGradients, strategy, loss_backward)


class _Clamps(nn.Module):
    """Changes another unit's weight before it runs, when it has been gathered ahead already."""

    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        with torch.no_grad():
            self.inner.weight.clamp_(-0.1, 0.1)
        return self.out(torch.tanh(self.inner(x)))


@ranks(2)
@every_strategy
def test_weights_changed_inside_forward(strategy):
    run(_Clamps, strategy, loss_backward, policy={nn.Linear})


class _Shares(nn.Module):
    """Parameters and a module in several places."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = Block(), Block(), Block()
        self.b.up.weight, self.c.down.bias = self.a.up.weight, self.a.down.bias
        self.again = self.b

    def forward(self, x):
        return self.again(self.c(self.b(self.a(x))))


@ranks(2)
@every_strategy
def test_shared_parameters_and_modules(strategy):
    run(_Shares, strategy, loss_backward)


class _Normed(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.block, self.out = Block(), nn.Linear(8, 8)
        norm(self.block.up)
        norm(self.out)

    def forward(self, x):
        return self.out(self.block(x))


@ranks(2)
@every_strategy
@pytest.mark.parametrize("norm", ["weight_norm", "spectral_norm", "orthogonal"])
def test_parametrizations(strategy, norm):
    run(lambda: _Normed(getattr(parametrizations, norm)), strategy, loss_backward)


class _Drops(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.drop = Block(), nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.block(x))


@ranks(2)
@every_strategy
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_draws_the_same_numbers_again(strategy, reentrant):
    def make():
        model = nn.Sequential(nn.Linear(8, 8), _Drops(), _Drops())
        checkpoint_module(model[1], reentrant=reentrant)
        checkpoint_module(model[2], reentrant=reentrant)
        return model

    models = both(make, strategy, auto_wrap_policy={_Drops})
    for m, _ in models:  # all rows on every rank, as the numbers are drawn for all of them
        torch.manual_seed(1)
        m(data(4, 8)).square().mean().backward()
    assert_same_gradients(models[0][0], models[1][0])


# --- what programs do -------------------------------------------------------------------------------------------------


@ranks(2)
@every_strategy
def test_freezing_between_steps(strategy):
    def program(m, x, step):
        for name, p in m.named_parameters():
            p.requires_grad_("blocks.1" not in name if step % 2 else "blocks.0" not in name)
        loss_backward(m, x, step)

    run(Stack, strategy, program, steps=4)


@ranks(2)
@every_strategy
def test_freezing_between_forward_and_backward(strategy):
    def program(m, x, step):
        loss = m(x).square().mean()
        m.blocks[1].requires_grad_(False)
        loss.backward()
        m.blocks[1].requires_grad_(True)

    run(Stack, strategy, program)


@ranks(2)
@every_strategy
def test_frozen_only_for_a_pass_without_gradients(strategy):
    """Preference training switches the adapter off for the reference's pass, between forward and backward."""

    def program(m, x, step):
        loss = m(x).square().mean()
        m.blocks[1].requires_grad_(False)
        with torch.no_grad():
            m(x)
        m.blocks[1].requires_grad_(True)
        loss.backward()

    run(Stack, strategy, program)


@ranks(2)
@every_strategy
def test_frozen_in_the_first_pass_which_has_no_gradients(strategy):
    """The reference's pass may come before any other: with completions that another program generates, for example."""

    def program(m, x, step):
        m.blocks[1].requires_grad_(False)
        with torch.no_grad():
            m(x)
        m.blocks[1].requires_grad_(True)
        loss_backward(m, x, step)

    run(Stack, strategy, program)


@ranks(2)
@every_strategy
def test_units_called_directly(strategy):
    """Two backward passes through one part, truncated backpropagation through time, a unit before the model."""

    def program(m, x, step):
        h = m.blocks[0](x)
        h.retain_grad()
        m.blocks[1](h).mean().backward(retain_graph=True)
        m.blocks[2](h).square().mean().backward()
        assert h.grad is not None
        total, h = 0, m.blocks[0](x)
        for i in range(4):
            h = m.blocks[1](h)
            total = total + h.square().mean()
            if i % 2:
                total.backward()
                total, h = 0, h.detach()
        h = m.blocks[1](x)
        (m(h).square().mean() + m.blocks[0](h).mean()).backward()

    run(Stack, strategy, program)


@ranks(2)
@every_strategy
def test_other_passes_between_forward_and_backward(strategy):
    def program(m, x, step):
        loss = m(x).square().mean()
        with torch.no_grad():
            m(x * 3)
        with torch.inference_mode():
            m(x * 2)
        with contextlib.suppress(RuntimeError):
            m(x[:, :3])
        loss.backward()

    run(Stack, strategy, program)


@ranks(2)
@every_strategy
def test_gradients_of_inputs(strategy):
    def program(m, x, step):
        x = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(m(x).square().mean(), x)
        m(x + grad.sign()).square().mean().backward()

    run(Stack, strategy, program)


@ranks(2)
@every_strategy
def test_two_models_against_each_other(strategy):
    makers, judges = both(Stack, strategy), both(Stack, strategy)
    for (maker, part), (judge, _) in zip(makers, judges, strict=True):
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (maker, judge)]
        for step in range(3):
            x = part(data(4, 8, seed=step))
            made = maker(x)
            judge.zero_grad()
            (judge(made.detach()).square().mean() + judge(x).mean()).backward()
            optimizers[1].step()
            maker.zero_grad()
            judge(made).square().mean().backward()
            optimizers[0].step()
    for (reference, _), (model, _) in (makers, judges):
        assert_same_values(reference, model)


@ranks(2)
@every_strategy
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_generate_between_forward_and_backward(name, strategy):
    """An encoder is called on its own by `generate`, with an embedding that the root unit has."""
    reference, model = build(name, torch.float32), sharded(name, torch.float32, strategy)
    ids = torch.randint(3, 60, (4, 9), generator=torch.Generator().manual_seed(1))
    answers = []
    for m, part in ((reference, lambda t: t), (model, mine)):
        loss = m(input_ids=part(ids), labels=part(ids)).loss
        answers.append(m.generate(ids[:1, :3], max_new_tokens=4, do_sample=False, pad_token_id=0))
        loss.backward()
    assert torch.equal(*answers)
    for p, q in zip(reference.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q.grad.full_tensor(), p.grad, rtol=1e-4, atol=1e-6)


@ranks(2)
@every_strategy
def test_functional_call(strategy):
    """Other values work; values that need gradients are refused."""
    reference, model = pair(Stack, strategy, auto_wrap_policy={Block})
    x = data(4, 8)
    outs = [functional_call(m, {n: p.detach() * 2 for n, p in m.named_parameters()}, (x,)) for m in (reference, model)]
    torch.testing.assert_close(outs[1], outs[0], rtol=0, atol=1e-12)
    with pytest.raises(FSDPError, match=r"functional_call.*detached values"):
        functional_call(model, {n: p * 2 for n, p in model.named_parameters()}, (x,))
    reference(x).square().mean().backward()
    model(mine(x)).square().mean().backward()
    assert_same_gradients(reference, model)
