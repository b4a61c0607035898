"""Operators that write several tensors, sharded and plain in one call: every write arrives, as on one device."""

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

import fullshard.spmd as xs
from fullshard import FSDPv2
from fullshard.distributed import runtime
from fullshard.spmd import torch_rules
from tests.pool import ranks
from tests.spmd.orders import keepable

LAYOUTS = [("data", "model"), (("model", "data"), None), (None, None), (None, "model")]


def square() -> xs.Mesh:
    return xs.Mesh(np.arange(4), (2, 2), ("data", "model"))


def whole(t):
    return t.full_tensor() if isinstance(t, xs.ShardedTensor | DTensor) else t


def scaled_steps(layout, kind, **options):
    """Three steps with a GradScaler, of which the second overflows in one element; `layout` None: on one device."""
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 5)
    if layout is not None:
        xs.mark_sharding(model.weight, square(), layout)
        xs.distribute_module(model, square())
    plain = torch.nn.Parameter(torch.ones(5))
    optimizer = kind([*model.parameters(), plain], lr=0.1, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1)
    scales, gradients = [], []
    for step in range(3):
        optimizer.zero_grad()
        loss = (model(torch.randn(4, 6)) * plain).square().mean()
        scaler.scale(loss).backward()
        if step == 1:
            model.weight.grad[4, 5] = float("inf")
        scaler.unscale_(optimizer)
        gradients += [whole(p.grad) for p in (model.weight, plain)]
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, [*gradients, *(whole(p).detach() for p in (model.weight, model.bias, plain))]


@ranks(4)
@pytest.mark.parametrize(
    "options",
    [*(pytest.param({"foreach": on}, marks=pytest.mark.slow) for on in (False, True)), {"fused": True}],
    ids=["loop", "foreach", "fused"],
)
def test_grad_scaler_equals_one_device(options):
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        scales, expected = scaled_steps(None, kind, **options)
        assert scales == [128.0, 64.0, 128.0]
        for layout in keepable(LAYOUTS):
            got_scales, got = scaled_steps(layout, kind, **options)
            assert got_scales == scales
            for a, b in zip(got, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@ranks(4)
def test_optimizers_work_on_pieces_of_different_sizes():
    runtime.forget_warnings()
    scaled_steps((("data", "model"), None), torch.optim.AdamW, foreach=True)
    scaled_steps((("data", "model"), None), torch.optim.AdamW, fused=True)
    assert not [key for key in runtime.warned() if "foreach" in key or "fused" in key]


@ranks(4)
def test_writes_into_states_of_another_layout():
    values = [torch.randn(5, 6) for _ in range(4)]
    expected = [v.clone() for v in values]
    specs = [("data", None), (None, "model"), None, (("data", "model"), None)]
    given = [
        v.clone() if spec is None else xs.mark_sharding(v.clone(), square(), spec)
        for v, spec in zip(values, specs, strict=True)
    ]
    for param, grad, average, square_average in (expected, given):
        torch._fused_adamw_(
            [param], [grad], [average.abs_()], [square_average.abs_()], [], [torch.tensor(3.0)], lr=0.1, beta1=0.9,
            beta2=0.99, weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip
    for a, b in zip(given, expected, strict=True):
        torch.testing.assert_close(whole(a), b)


CALLS = {
    "sort": lambda x, a, b: torch.sort(x, out=(a, b)),
    "topk": lambda x, a, b: torch.topk(x, 6, out=(a, b)),
    "max": lambda x, a, b: torch.max(x, 1, keepdim=True, out=(a, b)),
    "kthvalue": lambda x, a, b: torch.kthvalue(x, 2, keepdim=True, out=(a, b)),
}


@ranks(4)
@pytest.mark.parametrize("call", CALLS)
def test_results_written_into_a_plain_and_a_sharded_tensor(call):
    value = torch.randn(4, 6)
    expected = torch.empty(0), torch.empty(0, dtype=torch.long)
    shape = CALLS[call](value, *expected)[0].shape
    for sharded in (0, 1):
        got = [torch.empty(0), torch.empty(0, dtype=torch.long)]  # a plain one is given its shape
        got[sharded] = torch.zeros(shape, dtype=got[sharded].dtype)
        got[sharded] = xs.mark_sharding(got[sharded], square(), ("data", None))
        returned = CALLS[call](xs.mark_sharding(value.clone(), square(), ("data", "model")), *got)
        for a, r, b in zip(got, returned, expected, strict=True):
            assert torch.equal(whole(a), b) and torch.equal(whole(r), b)


@ranks(4)
def test_batch_statistics_of_which_one_is_sharded():
    x = torch.randn(8, 4)
    one, other = torch.nn.BatchNorm1d(4), torch.nn.BatchNorm1d(4)
    xs.mark_sharding(other.running_mean, square(), ("data",))
    for _ in range(2):
        one(x)
        other(xs.mark_sharding(x.clone(), square(), ("data", None)))
    for name, buffer in one.named_buffers():
        torch.testing.assert_close(whole(getattr(other, name)), buffer)


@ranks(4)
def test_grad_scaler_with_ignored_modules():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
    model = FSDPv2(model, xs.get_1d_mesh("fsdp"), ignored_modules=[model[1]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    scaler.scale(model(torch.randn(4, 64)).square().mean()).backward()
    before = [whole(p.grad).clone() for p in model.parameters()]
    scaler.unscale_(optimizer)
    for p, grad in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(whole(p.grad), grad / 16)
    scaler.step(optimizer)


@ranks(4)
def test_an_overflow_is_seen_whatever_the_layout_of_the_first_gradient():
    mesh = xs.get_1d_mesh("fsdp").device_mesh
    copied = DTensor.from_local(torch.ones(3), mesh, [Replicate()])
    split = DTensor.from_local(torch.full((2,), float("inf") if runtime.rank() == 2 else 1.0), mesh, [Shard(0)])
    found = torch.zeros(1)
    torch._amp_foreach_non_finite_check_and_unscale_([copied, split], found, torch.tensor([0.5]))
    assert found.item() == 1.0


@ranks(4)
def test_how_a_step_runs_is_chosen_once():
    for kind, options in [
        (torch.optim.AdamW, {"foreach": False}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.SGD, {"foreach": False, "momentum": 0.9}),
        (torch.optim.Adagrad, {"foreach": False, "lr_decay": 0.1}),
        (torch.optim.RMSprop, {"foreach": False}),
    ]:
        model = torch.nn.Linear(8, 8)
        xs.mark_sharding(model.weight, square(), ("data", "model"))
        xs.distribute_module(model, square())
        optimizer = kind(model.parameters(), lr=0.1, **options)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)
        known = []
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().sum().backward()
            optimizer.step()
            schedule.step()
            known.append(len(torch_rules._choices))
        assert len(set(known[2:])) == 1, (kind, known)
