"""What training scripts do with a wrapped model (optimizers, hooks, casts): as on one device, or refused at once."""

import copy
import pickle

import pytest
import torch
import transformers
from torch import nn

from fullshard.config.errors import FSDPError
from fullshard.distributed import runtime
from fullshard.fsdp import FSDPv2, MixedPrecision, ShardingStrategy
from tests.fsdp.programs import Block, Stack, llama, mesh_for, mine
from tests.fsdp.test_silent_errors import DOUBLE, assert_same_gradients, assert_same_values, data, every_strategy, pair
from tests.pairwise import thinned
from tests.pool import ranks

two_strategies = pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])


def both(make, strategy, **options):
    """Each of the two models with the rows it gets."""
    options = {"auto_wrap_policy": {Block}, "small_parameter_bytes": 256, **options}
    reference, model = pair(make, strategy, **options)
    return (reference, lambda t: t), (model, mine)


def train(m, part, optimizer, steps=3, width=8):
    for step in range(steps):
        optimizer.zero_grad()
        m(part(data(4, width, seed=step))).square().mean().backward()
        optimizer.step()


def train_both(make, strategy, optimizer, steps=3, prepare=lambda m: None, **options):
    """Train on one device and sharded; the same values come out."""
    models = both(make, strategy, **options)
    for m, part in models:
        prepare(m)
        train(m, part, optimizer(m), steps)
    assert_same_values(models[0][0], models[1][0])
    return models[1][0]


# --- hooks on parameters ----------------------------------------------------------------------------------------------


def _hooked(attach, strategy, when, steps):
    """A module on one device and sharded, with hooks attached before or after wrapping, after some backward passes."""
    made = []
    for sharded in (False, True):
        torch.manual_seed(3)
        m = Stack().double()
        if when == "before":
            attach(m)
        if sharded:
            m = FSDPv2(m, mesh_for(strategy), strategy=strategy, auto_wrap_policy={Block})
        if when == "after":
            attach(m)
        for step in range(steps):
            x = data(4, 8, seed=step)
            m(mine(x) if sharded else x).square().mean().backward()
        made.append(m)
    return made


@ranks(2)
@every_strategy
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_optimizer_in_backward(strategy, when):
    """`register_post_accumulate_grad_hook` steps each parameter as its gradient comes and drops the gradient."""

    def attach(m):
        optimizers = {}

        def step(p):
            # Hooks that were registered before wrapping are handed the shard, whose optimizer they make here.
            optimizer = optimizers.setdefault(id(p), torch.optim.AdamW([p], lr=0.1))
            optimizer.step()
            optimizer.zero_grad()

        for p in m.parameters():
            p.register_post_accumulate_grad_hook(step)

    made = _hooked(attach, strategy, when, steps=3)
    assert all(p.grad is None for m in made for p in m.parameters())
    assert_same_values(*made)


@ranks(2)
@every_strategy
@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_on_parameters_change_their_gradients(strategy, when):
    seen = []

    def attach(m):
        m.out.weight.register_hook(lambda grad: grad * 3)
        m.blocks[0].up.weight.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
        m.blocks[0].up.bias.register_hook(lambda grad: seen.append(grad.shape))
        m.blocks[1].up.weight.register_hook(lambda grad: grad * 5).remove()

    made = _hooked(attach, strategy, when, steps=2)  # gradients accumulate
    assert_same_gradients(*made)
    assert seen == [(16,)] * 4


@ranks(2)
def test_hooks_on_parameters_under_no_sync_are_refused():
    _, model = pair(Stack, "FULL_SHARD", auto_wrap_policy={Block})
    handle = model.out.weight.register_hook(lambda grad: grad * 3)
    with model.no_sync(), pytest.raises(FSDPError, match=r"hook.*out.weight.*no_sync"):
        model(data(2, 8)).sum().backward()
    handle.remove()
    with model.no_sync():
        model(data(2, 8)).sum().backward()


@ranks(2)
def test_a_hook_that_returns_something_else_is_refused():
    _, model = pair(Stack, "FULL_SHARD", auto_wrap_policy={Block})
    model.out.weight.register_hook(lambda grad: grad.to_local() * 3)
    with pytest.raises(FSDPError, match=r"hook on out.weight returned"):
        model(data(2, 8)).sum().backward()


# --- dtypes -----------------------------------------------------------------------------------------------------------


@ranks(2)
@every_strategy
@pytest.mark.parametrize("cast", ["double", "bfloat16", "half", "to"])
def test_casting_a_wrapped_model(strategy, cast):
    """After a first step, so that values were gathered in the old dtype before."""
    models = []
    for sharded in (False, True):
        torch.manual_seed(3)
        m = Stack()
        if sharded:
            m = FSDPv2(m, mesh_for(strategy), strategy=strategy, auto_wrap_policy={Block}, small_parameter_bytes=256)
        part = mine if sharded else (lambda t: t)
        m(part(data(4, 8).float())).square().mean().backward()
        m.zero_grad()
        m = m.to(torch.bfloat16) if cast == "to" else getattr(m, cast)()
        dtype = m.out.weight.dtype
        out = m(part(data(4, 8).to(dtype)))
        assert out.dtype == dtype
        out.float().square().mean().backward()
        torch.optim.SGD(m.parameters(), lr=0.1).step()
        assert all(p.grad.dtype == dtype for p in m.parameters())
        models.append(m)
    reference, model = models
    values = model.full_state_dict()
    for name, value in reference.state_dict().items():
        assert values[name].dtype == value.dtype, name
        accuracy = {"double": 1e-12, "half": 2e-3}.get(cast, 2e-2)
        torch.testing.assert_close(values[name], value, rtol=accuracy, atol=accuracy, msg=lambda m, n=name: f"{n}: {m}")
    if cast == "double":
        assert_same_gradients(reference, model)
    assert model.plan.parameters["out.weight"].dtype == str(dtype).removeprefix("torch.")


@ranks(2)
def test_casting_keeps_the_dtype_that_mixed_precision_computes_in():
    module = nn.Sequential(Block(), Block())
    model = FSDPv2(module, mesh_for("FULL_SHARD"), auto_wrap_policy={Block}, mixed_precision="bf16")
    model(torch.randn(2, 8)).sum().backward()
    model.double()
    assert model(torch.randn(2, 8)).dtype == torch.bfloat16
    assert model[0].up.weight.dtype == torch.float64


@ranks(2)
def test_casting_between_forward_and_backward_is_refused():
    model = FSDPv2(Stack(), mesh_for("FULL_SHARD"), auto_wrap_policy={Block})
    loss = model(torch.randn(2, 8)).sum()
    model.double()
    model(torch.randn(2, 8, dtype=DOUBLE))
    with pytest.raises(FSDPError, match=r"dtype.*changed between"):
        loss.backward()


class _Seen(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.seen = []

    def forward(self, x):
        self.seen.append((x.dtype, self.linear.weight.dtype))
        return self.linear(x)


class _Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = _Seen(), _Seen(), _Seen()

    def forward(self, x):
        return self.third(self.second(self.first(x)))


@ranks(2)
@every_strategy
@pytest.mark.parametrize("outer", [None, "bf16"])
def test_mixed_precision_of_one_inner_unit(strategy, outer):
    module, mesh = _Parts(), mesh_for(strategy)
    inside, outside = ("bf16", "fp32") if outer is None else ("fp32", "bf16")
    mixed = MixedPrecision(param_dtype=inside, output_dtype=outside, reduce_dtype="fp32")
    FSDPv2(module.second, mesh, strategy=strategy, mixed_precision=mixed)
    model = FSDPv2(module, mesh, strategy=strategy, mixed_precision=outer, auto_wrap_policy=None)
    out = model(torch.randn(2, 8))
    out.sum().backward()
    fp32, bf16 = (torch.float32,) * 2, (torch.bfloat16,) * 2
    here, there = (fp32, bf16) if outer is None else (bf16, fp32)
    assert model.second.seen == [there]
    assert model.first.seen == [here]
    assert model.third.seen == [here] and out.dtype == here[0]
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


@ranks(2)
@two_strategies
def test_a_grad_scaler(strategy):
    models = both(Stack, strategy)
    for m, part in models:
        optimizer, scaler = torch.optim.SGD(m.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(3):
            optimizer.zero_grad()
            loss = m(part(data(4, 8, seed=step))).square().mean()
            bad = step == 1 and (m is models[0][0] or runtime.rank() == 1)
            scaler.scale(loss * (float("inf") if bad else 1.0)).backward()  # one rank overflows: all skip
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 4.0
    assert_same_values(models[0][0], models[1][0])


# --- optimizers and averages ------------------------------------------------------------------------------------------


def _groups(m):
    decayed = [p for n, p in m.named_parameters() if not n.endswith("bias")]
    plain = [p for n, p in m.named_parameters() if n.endswith("bias")]
    assert decayed and plain
    return [{"params": decayed, "weight_decay": 0.5}, {"params": plain, "weight_decay": 0.0}]


OPTIMIZERS = {
    "groups": lambda m: torch.optim.AdamW(_groups(m), lr=0.1),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01, momentum=0.9, centered=True),
    "nadam": lambda m: torch.optim.NAdam(m.parameters(), lr=0.01),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.01),
    "asgd": lambda m: torch.optim.ASGD(m.parameters(), lr=0.01),
}


@ranks(2)
@every_strategy
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(strategy, name):
    train_both(Stack, strategy, OPTIMIZERS[name])


@ranks(2)
@every_strategy
def test_muon(strategy):
    """It orthogonalizes in bf16, where gradients that differ in the last bit round differently; here in fp64."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "bfloat16", lambda t: t)
        train_both(Stack, strategy, lambda m: torch.optim.Muon([p for p in m.parameters() if p.ndim == 2], lr=0.1))


@pytest.mark.slow
@ranks(2)
@every_strategy
@pytest.mark.parametrize("options", [{}, {"lr": 0.1, "relative_step": False, "scale_parameter": False, "beta1": 0.9}])
def test_adafactor_of_transformers(strategy, options):
    train_both(Stack, strategy, lambda m: transformers.optimization.Adafactor(m.parameters(), **options))


@ranks(2)
@every_strategy
@pytest.mark.parametrize("name", ["Adafactor", "Rprop"])
def test_optimizers_that_need_whole_parameters(strategy, name):
    def optimizer(m):
        return getattr(torch.optim, name)(m.parameters(), lr=0.1)

    if name == "Rprop" and strategy == "NO_SHARD" and torch.__version__ < "2.12":
        pytest.skip("needs torch 2.12: 2.11 has no sharding rule for index_put_ on a DTensor, which Rprop calls")
    if strategy == "NO_SHARD":  # what the refusal suggests
        train_both(Stack, strategy, optimizer)
        return
    models = both(Stack, strategy)
    with pytest.raises(FSDPError, match=r"(Adafactor|Rprop) .*NO_SHARD"):
        train(*models[1], optimizer(models[1][0]))
    assert_same_values(*(m for m, _ in models))


IN_LISTS = {
    "sgd-foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
}


@pytest.mark.slow
@ranks(2)
@every_strategy
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow) if n in ("sgd", "sgd-fused", "adamw-fused") else n for n in IN_LISTS],
)
def test_optimizers_of_sharded_and_ignored_parameters(strategy, name):
    """Every rank sees all rows, as nobody adds up the gradients of ignored modules."""
    torch.manual_seed(3)
    reference, module = Stack().double(), Stack().double()
    module.load_state_dict(reference.state_dict())
    ignored = [module.out, module.blocks[1].up]
    model = FSDPv2(module, mesh_for(strategy), strategy=strategy, auto_wrap_policy={Block}, ignored_modules=ignored)
    for m in (reference, model):
        optimizer, scaler = IN_LISTS[name](m.parameters()), torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(3):
            optimizer.zero_grad(set_to_none=step != 1)
            scaler.scale(m(data(4, 8, seed=step)).square().mean()).backward()
            scaler.unscale_(optimizer)
            total = torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1, foreach="foreach" in name or None)
            total = total.full_tensor() if m is model else total
            if m is reference:
                reference.totals = [*getattr(reference, "totals", []), total]
            else:
                torch.testing.assert_close(total, reference.totals[step], rtol=1e-12, atol=0)
                torch.testing.assert_close(model.clip_grad_norm_(1e9).double(), total.clamp(max=0.1), rtol=1e-5, atol=0)
            torch.nn.utils.clip_grad_value_(m.parameters(), 0.01)
            scaler.step(optimizer)
            scaler.update()
    assert_same_values(reference, model)


@ranks(2)
@pytest.mark.parametrize("how", ["foreach", "fused"])
def test_lists_of_sharded_and_plain_parameters_are_refused_with_what_to_do(how):
    models = [(Stack().double(), nn.Linear(8, 8).double()) for _ in range(2)]
    for two, copied in zip(*models, strict=True):
        copied.load_state_dict(two.state_dict())
    for groups in (1, 2):
        for body, head in models:
            if body is models[1][0] and groups == 1:
                FSDPv2(body, mesh_for("FULL_SHARD"), auto_wrap_policy={Block})
            parts = [list(body.parameters()), list(head.parameters())]
            given = [*parts[0], *parts[1]] if groups == 1 else [{"params": part} for part in parts]
            optimizer = torch.optim.AdamW(given, lr=0.1, **{how: True})
            optimizer.zero_grad()
            head(body(data(4, 8))).square().mean().backward()
            if groups == 1 and body is models[1][0]:
                with pytest.raises(FSDPError, match=rf"{how}=True.*separate parameter group"):
                    optimizer.step()
            elif groups == 2:
                optimizer.step()
    assert_same_values(*(body for body, _ in models))
    torch.testing.assert_close(models[1][1].weight, models[0][1].weight, rtol=0, atol=1e-12)


@ranks(2)
@two_strategies
def test_lbfgs(strategy):
    models = both(Stack, strategy)
    for m, part in models:
        optimizer = torch.optim.LBFGS(m.parameters(), lr=0.1, max_iter=3)

        def closure(m=m, part=part, optimizer=optimizer):
            optimizer.zero_grad()
            loss = m(part(data(4, 8))).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
    assert_same_values(models[0][0], models[1][0])


@ranks(2)
@two_strategies
def test_several_optimizers(strategy):
    models = both(Stack, strategy)
    for m, part in models:
        some = torch.optim.AdamW(m.blocks.parameters(), lr=0.1)
        rest = torch.optim.SGD(m.out.parameters(), lr=0.1)
        for step in range(4):
            m.zero_grad()
            m(part(data(4, 8, seed=step))).square().mean().backward()
            some.step()
            if step % 2:
                rest.step()
    assert_same_values(models[0][0], models[1][0])


@ranks(2)
@two_strategies
def test_a_moving_average_by_hand(strategy):
    models = both(Stack, strategy)
    averages = []
    for m, part in models:
        average = {n: p.detach().clone() for n, p in m.named_parameters()}
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        for _ in range(3):
            train(m, part, optimizer, 1)
            with torch.no_grad():
                for n, p in m.named_parameters():
                    average[n].mul_(0.9).add_(p, alpha=0.1)
        averages.append(average)
        m.load_state_dict({**m.state_dict(), **average})  # and use it
    for n, value in averages[0].items():
        torch.testing.assert_close(averages[1][n].full_tensor(), value, rtol=0, atol=1e-12)
    outs = [m(data(4, 8)) for m, _ in models]
    torch.testing.assert_close(outs[1], outs[0], rtol=0, atol=1e-12)


@ranks(2)
def test_averaged_model_is_refused_with_what_to_do_instead():
    _, model = pair(Stack, "FULL_SHARD", auto_wrap_policy={Block})
    for copying in (copy.deepcopy, torch.optim.swa_utils.AveragedModel):
        with pytest.raises(FSDPError, match=r"cannot be deep-copied.*averaged weights.*lerp_"):
            copying(model)


@ranks(2)
@two_strategies
def test_what_the_refusal_of_averaged_model_suggests(strategy):
    torch.manual_seed(3)
    module = Stack().double()
    averaged = torch.optim.swa_utils.AveragedModel(module, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    _, model = pair(Stack, strategy, auto_wrap_policy={Block})
    average = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (module, model)]
    for _ in range(3):
        train(module, lambda t: t, optimizers[0], 1)
        train(model, mine, optimizers[1], 1)
        with torch.no_grad():
            for n, p in model.named_parameters():
                average[n].lerp_(p, 0.1)
        if averaged.n_averaged == 0:
            averaged.n_averaged.fill_(1)  # its first update would copy
        averaged.update_parameters(module)
    for n, p in averaged.module.named_parameters():
        torch.testing.assert_close(average[n].full_tensor(), p.detach(), rtol=0, atol=1e-12)


# --- modules ----------------------------------------------------------------------------------------------------------


class _Drops(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.norm, self.drop = Block(), nn.BatchNorm1d(8), nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.norm(self.block(x)))


@ranks(2)
@every_strategy
def test_switching_between_training_and_evaluation(strategy):
    """Every rank sees the same rows, so that batch statistics are those of one device."""
    models = both(_Drops, strategy)
    outs = []
    for m, _ in models:
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        for step in range(2):
            torch.manual_seed(step)
            m.train()
            train(m, lambda t: t, optimizer, 1)
            m.eval()
            assert not m.training and not m.block.training
            with torch.no_grad():
                outs.append(m(data(4, 8)))
    torch.testing.assert_close(outs[2:], outs[:2], rtol=0, atol=1e-12)
    assert_same_values(models[0][0], models[1][0])


@ranks(2)
@every_strategy
def test_hooks_on_units(strategy):
    models = both(Stack, strategy)
    seen = []
    for m, part in models:
        mine_ = []
        seen.append(mine_)
        for block in m.blocks:
            block.register_forward_pre_hook(lambda mod, args: (args[0] * 1.5,))
            block.register_forward_hook(lambda mod, args, out: out * 0.5)
            block.register_full_backward_pre_hook(lambda mod, grads: (grads[0] * 2,))
            block.register_full_backward_hook(lambda mod, gin, gout: (gin[0] * 3,))
            block.up.register_full_backward_hook(lambda mod, gin, gout, s=mine_: s.append(mod.weight.shape))
        m.register_forward_hook(lambda mod, args, kwargs, out: out + 1, with_kwargs=True)
        m.register_full_backward_hook(lambda mod, gin, gout, s=mine_: s.append("root"))
        for step in range(2):
            x = part(data(4, 8, seed=step).requires_grad_())
            m(x).square().mean().backward()
    assert_same_gradients(models[0][0], models[1][0])
    assert seen[0] == seen[1]


@ranks(2)
def test_a_copy_made_before_wrapping_is_another_model():
    module = Stack().double()
    other = copy.deepcopy(module)
    first = FSDPv2(module, mesh_for("FULL_SHARD"), auto_wrap_policy={Block})
    second = FSDPv2(other, mesh_for("FULL_SHARD"), auto_wrap_policy={Block})
    train(first, mine, torch.optim.SGD(first.parameters(), lr=0.1), 1)
    assert all(p.grad is None for p in second.parameters())
    third = FSDPv2(copy.deepcopy(llama()), mesh_for("FULL_SHARD"))
    assert copy.deepcopy(third.config).hidden_size == 32


@ranks(2)
def test_pickled_choices():
    model = FSDPv2(llama(), mesh_for("FULL_SHARD"), mixed_precision="bf16")
    for value in (model.plan, model.config, *ShardingStrategy, MixedPrecision(param_dtype="bf16")):
        again = pickle.loads(pickle.dumps(value))
        assert str(again) == str(value)
        assert type(again) is type(value)
    assert pickle.loads(pickle.dumps(model.plan)) == model.plan
    state = torch.optim.AdamW(model.parameters()).state_dict()
    assert pickle.loads(pickle.dumps(state)) == state


class _Empty(nn.Module):
    """Parameters without elements beside ordinary ones."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.none = nn.Parameter(torch.empty(0, 8))
        self.flat = nn.Parameter(torch.empty(8, 0))
        self.only = nn.Linear(0, 8)

    def forward(self, x):
        x = torch.cat([self.lin(x), x @ self.none.t()], dim=1)
        return x + (self.flat @ self.flat.t()).sum() + self.only(x[:, :0])


@ranks(2)
@every_strategy
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_parameters_without_elements(strategy, optimizer):
    model = train_both(
        _Empty, strategy, lambda m: getattr(torch.optim, optimizer)(m.parameters(), lr=0.1),
        auto_wrap_policy={nn.Linear},
    )  # fmt: skip
    model(mine(data(4, 8))).sum().backward()
    assert torch.isfinite(model.clip_grad_norm_(1.0))


def _counting():
    compiled = []

    def backend(graph, inputs):
        compiled.append(sum(node.op == "call_function" for node in graph.graph.nodes))
        return graph.forward

    return compiled, backend


@pytest.mark.slow
@ranks(2)
@every_strategy
@pytest.mark.parametrize("how", thinned(["torch.compile", "module.compile", "compile_units", "step"]))
def test_compiling(strategy, how):
    """Of the whole model too, each unit is one graph and the engine none; never silently eager."""
    torch._dynamo.reset()
    compiled, backend = _counting()
    (reference, _), (model, _) = both(Stack, strategy)
    called = model
    if how == "compile_units":
        model.compile_units(backend=backend)
    elif how == "module.compile":
        model.compile(backend=backend)
    elif how == "torch.compile":
        called = torch.compile(model, backend=backend)

    def step(x):
        called(x).square().mean().backward()

    if how == "step":
        step = torch.compile(step, backend=backend)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (reference, model)]
    for i in range(3):
        x = data(4, 8, seed=i)
        reference(x).square().mean().backward()
        step(mine(x))
        assert_same_gradients(reference, model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        torch.testing.assert_close(called(x), reference(x), rtol=0, atol=1e-12)
    assert compiled and max(compiled) >= 4, "silently eager"
    if how != "step":
        assert compiled == [4] * len(compiled)  # a block's four operations, and nothing of the engine
    torch._dynamo.reset()


@ranks(2)
def test_compiling_a_model_without_units_inside():
    compiled, backend = _counting()
    (reference, _), (model, _) = both(Stack, "FULL_SHARD", auto_wrap_policy=None)
    x = data(4, 8)
    torch.testing.assert_close(torch.compile(model, backend=backend)(x), reference(x), rtol=0, atol=1e-12)
    assert len(compiled) == 1 and compiled[0] >= 14
    torch._dynamo.reset()
