"""What is done to parameters and modules after wrapping: it works as on one device, or is refused at once."""

import operator

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune, vector_to_parameters

import fullshard.spmd as xs
from fullshard.config.errors import FSDPError, LayoutError
from fullshard.distributed import runtime
from fullshard.fsdp import FSDPv2
from tests.fsdp.programs import Block, Stack, mesh_for
from tests.fsdp.test_forward_backward import loss_backward, run
from tests.fsdp.test_silent_errors import assert_same_values, data, every_strategy, pair
from tests.fsdp.test_training_scripts import both, two_strategies
from tests.pairwise import crossed
from tests.pool import ranks


def _assign(m, step):
    for p in m.parameters():
        p.data = p.data * 0.9


def _swap(m, step):
    """Weights and their average change places for a while."""
    average = {n: p.detach().clone() * 0.5 for n, p in m.named_parameters()}
    for n, p in m.named_parameters():
        p.data, average[n] = average[n], p.data
    m(data(2, 8))


def _vector(m, step):
    count = sum(p.numel() for p in m.parameters())
    vector_to_parameters(data(count, seed=step) * 0.1, m.parameters())


def _initialise(m, step):
    torch.manual_seed(step)
    for p in m.parameters():
        nn.init.xavier_uniform_(p) if p.ndim == 2 else nn.init.normal_(p, std=0.1)
    with torch.no_grad():
        m.out.weight.add_(torch.randn_like(m.out.weight) * torch.rand_like(m.out.weight))


@pytest.mark.slow
@ranks(2)
@every_strategy
@pytest.mark.parametrize("change", [_assign, _swap, _vector, _initialise])
@pytest.mark.parametrize("after_a_pass", [pytest.param(False, marks=pytest.mark.slow), True])
def test_values_written_by_other_means(strategy, change, after_a_pass):
    def program(m, x, step):
        if after_a_pass:
            m(x)  # so that values are gathered, and kept where the strategy keeps them
        change(m, step)
        loss_backward(m, x, step)

    run(Stack, strategy, program)


@ranks(2)
def test_what_cannot_be_assigned_is_refused():
    _, model = pair(Stack, "FULL_SHARD", auto_wrap_policy={Block})
    for value in (torch.zeros(8, 7).double(), torch.zeros(8, 8)):
        with pytest.raises(LayoutError, match=r"\.data of a sharded tensor of shape \(8, 8\)"):
            model.out.weight.data = value


class _Double(nn.Module):
    def forward(self, x):
        return x * 2


REMOVALS = {
    "bias": lambda m: setattr(m.out, "bias", None),
    "parametrization": lambda m: parametrize.register_parametrization(m.blocks[1].up, "weight", _Double()),
    "pruning": lambda m: prune.identity(m.out, "weight"),
    "weight norm": lambda m: parametrize.register_parametrization(m.out, "bias", _Double()),
}


@ranks(2)
@two_strategies
@pytest.mark.parametrize("how", REMOVALS)
def test_parameters_that_are_taken_away_after_wrapping_are_refused(strategy, how):
    _, model = pair(Stack, strategy, auto_wrap_policy={Block})
    REMOVALS[how](model)
    with pytest.raises(FSDPError, match=r"was removed after the module was wrapped"):
        model(data(2, 8))


@ranks(2)
@two_strategies
def test_saved_tensors_that_may_change_are_refused(strategy):
    _, model = pair(Stack, strategy, auto_wrap_policy={Block})
    with torch.autograd.graph.allow_mutation_on_saved_tensors(), pytest.raises(FSDPError, match=r"Remove it"):
        model(data(2, 8))
    model(data(2, 8)).sum().backward()


TRANSFORMS = {
    "vmap": lambda f, x: torch.func.vmap(f)(x),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x * 2,))[1],
}


class _Transformed(nn.Module):
    """What the refusal suggests."""

    def __init__(self, how):
        super().__init__()
        self.net, self.how = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), TRANSFORMS[how]

    def forward(self, x):
        return torch.stack([self.how(self.net, row[None]).square().sum() for row in x])


@ranks(2)
@pytest.mark.parametrize("how", TRANSFORMS)
def test_function_transforms_around_a_model_are_refused(how):
    _, model = pair(Stack, "FULL_SHARD", auto_wrap_policy={Block})
    for _ in range(2):
        with pytest.raises(FSDPError, match=r"torch.func.*inside the forward"):
            TRANSFORMS[how](model, data(2, 8))
        model(data(2, 8)).sum().backward()
    run(lambda: nn.Sequential(nn.Linear(8, 8), _Transformed(how)), "FULL_SHARD", loss_backward, {_Transformed}, steps=2)


@ranks(2)
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_a_part_of_a_unit_is_not_called_with_plain_tensors(inside, bias):
    """Each rank has its own rows: torch's class refuses them, and ours, which could take them for global ones, too."""
    module = Stack().double()
    module.head = nn.Linear(8, 8, bias=bias).double()
    ignored = [module.blocks[0]] if inside else []
    model = FSDPv2(module, mesh_for("FULL_SHARD"), auto_wrap_policy={Block}, ignored_modules=ignored)
    for part in (model.head, model.blocks[1].up):
        with pytest.raises(LayoutError if inside else RuntimeError, match=r"together with a plain tensor|got mixed"):
            part(data(2, 8))
    with torch.no_grad():
        model.head.weight.mul_(2).add_(model.head.weight.detach().clone())


@ranks(2)
@every_strategy
def test_penalties_on_sharded_parameters(strategy):
    """Where a penalty is a sharded scalar its whole value joins the loss, or it has a backward of its own."""

    def program(m, x, step):
        penalty = 0.1 * sum(p.square().sum() for p in m.parameters())
        if step == 0:
            (m(x).square().mean() + penalty).backward()
        elif step == 3:
            (m(x).square().mean() + (penalty.full_tensor() if hasattr(m, "plan") else penalty)).backward()
        elif step == 1:
            loss_backward(m, x, step)
            penalty.backward()
        else:
            penalty.backward()
            loss_backward(m, x, step)

    run(Stack, strategy, program)


@ranks(2)
@pytest.mark.parametrize(
    ("way", "norm", "ignored"), crossed(("+", "reversed +", "+=", "-", "/"), (False, True), (False, True))
)
def test_a_penalty_joins_the_loss_of_a_rank(way, norm, ignored):
    """With its full value, whichever class the parameters have; the gradient is that of the ranks' mean."""

    def combine(loss, penalty):
        operators = {
            "-": operator.sub,
            "/": operator.truediv,
            "+=": operator.iadd if loss.requires_grad else operator.add,
        }
        return operators.get(way, operator.add)(*((penalty, loss) if way in ("reversed +", "/") else (loss, penalty)))

    def penalty(m):
        return sum(p.norm() if norm else p.square().sum() for p in (m.out.weight, m.blocks[1].up.weight))

    plain, model = (Stack().double() for _ in range(2))
    plain.load_state_dict(model.state_dict())
    model = FSDPv2(model, mesh_for("FULL_SHARD"), ignored_modules=[model.blocks[0]] if ignored else [])
    assert isinstance(model.out.weight, xs.ShardedTensor) == ignored
    rows = [data(2, 8, seed=rank) for rank in range(2)]
    totals = [combine(plain(x).square().mean(), penalty(plain)) for x in rows]
    loss = model(rows[runtime.rank()]).square().mean()
    total = combine(loss, penalty(model))
    assert total.item() == pytest.approx(totals[runtime.rank()].item(), rel=1e-12)
    assert penalty(model).item() == pytest.approx(penalty(plain).item(), rel=1e-12)  # a collective
    with torch.no_grad():
        assert combine(loss.clone(), penalty(model)).item() == pytest.approx(total.item(), rel=1e-12)
    detached = combine(loss.detach(), penalty(model).detach())
    assert detached.item() == pytest.approx(total.item(), rel=1e-12)
    (sum(totals) / 2).backward()
    total.backward()
    for name in ("out.weight", "blocks.1.up.weight", "blocks.2.up.weight"):
        expected = plain.get_parameter(name).grad
        torch.testing.assert_close(model.get_parameter(name).grad.full_tensor(), expected)


FUNCTIONS = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "reversed add": lambda loss, penalty: torch.add(penalty, loss),
    "maximum": torch.maximum,
    "lerp": lambda loss, penalty: torch.lerp(loss, penalty, 0.25),
    "add_": lambda loss, penalty: loss.add_(penalty),
    "stack": lambda loss, penalty: torch.stack([loss, penalty]).sum(),
    "where": lambda loss, penalty: torch.where(loss > 0, penalty, loss) + loss,
}


@ranks(2)
@pytest.mark.parametrize("ignored", [False, True])
def test_functions_of_a_loss_and_a_penalty(ignored):
    """They are refused at once where a gradient would flow to both, also where torch has seen such arguments before;
    without gradients they have the right value."""
    plain, model = (Stack().double() for _ in range(2))
    plain.load_state_dict(model.state_dict())
    model = FSDPv2(model, mesh_for("FULL_SHARD"), ignored_modules=[model.blocks[0]] if ignored else [])
    x = data(2, 8, seed=runtime.rank()).double()

    def parts(m):
        return m(x).square().mean() + 0.5, m.out.weight.square().sum()

    refusal = r"write loss \+ penalty .* or use penalty.full_tensor\(\)"
    for name, function in FUNCTIONS.items():
        for _ in range(2):
            with pytest.raises(LayoutError, match=refusal):
                function(*parts(model))
            with torch.no_grad():
                expected, value = (function(*parts(m)) for m in (plain, model))
                assert value.item() == pytest.approx(expected.item(), rel=1e-12), name
            expected, value = (function(loss, penalty.detach()) for loss, penalty in map(parts, (plain, model)))
            assert value.item() == pytest.approx(expected.item(), rel=1e-12), name
            if name != "add_":
                two = torch.tensor(2.0, dtype=torch.float64)
                expected, value = (function(two, parts(m)[1]) for m in (plain, model))
                assert value.item() == pytest.approx(expected.item(), rel=1e-12), name
    loss, penalty = parts(model)
    expected = sum(parts(plain)).item()
    total = torch.zeros((), dtype=torch.float64)
    total += penalty
    own = loss.detach() * penalty
    assert own.item() == pytest.approx(loss.item() * penalty.item(), rel=1e-12)
    penalty += loss
    loss += total
    for value in (loss, penalty, sum(parts(model))):
        assert value.item() == pytest.approx(expected, rel=1e-12)


@ranks(2)
@pytest.mark.parametrize("ignored", [False, True])
def test_a_constant_leaves_a_penalty_sharded(ignored):
    module = Stack()
    model = FSDPv2(module, mesh_for("FULL_SHARD"), ignored_modules=[module.blocks[0]] if ignored else [])
    penalty = model.out.weight.square().sum()
    scaled = torch.tensor(3.0) * penalty + torch.tensor(1.0)
    assert xs.is_sharded(scaled)
    assert scaled.item() == pytest.approx(3 * penalty.item() + 1)
    scaled.backward()
    torch.testing.assert_close(model.out.weight.grad.full_tensor(), 6 * model.out.weight.full_tensor())


@ranks(2)
@two_strategies
def test_sharpness_aware_steps(strategy):
    """The weights move along the gradient and back between two passes."""
    models = both(Stack, strategy)
    for m, part in models:
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)
        for step in range(2):
            moves = []
            for second in (False, True):
                optimizer.zero_grad()
                loss_backward(m, part(data(4, 8, seed=step)), step)
                with torch.no_grad():
                    moves = [-move for move in moves] if second else [p.grad * 0.05 for p in m.parameters()]
                    for p, move in zip(m.parameters(), moves, strict=True):
                        p.add_(move)
            optimizer.step()
    assert_same_values(models[0][0], models[1][0])
