"""The ways a training step can go, and the shapes a model can have."""

import contextlib

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn

import fullshard.spmd as xs
from fullshard.distributed import runtime
from fullshard.fsdp import FSDPv2, transformer_auto_wrap_policy
from fullshard.fsdp.gradients import unreduced_gradient
from tests.fsdp.programs import (
    alone,
    assert_same_training,
    batches,
    build,
    exact,
    llama,
    loss_of,
    mean_over_ranks,
    mesh_for,
    mine,
    sharded,
    step,
)
from tests.pool import ranks

DOUBLE = torch.float64


def _gradients(model):
    return {n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None}


def _assert_gradients(model, expected, atol=1e-12):
    got = _gradients(model)
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


def _reference_gradients(program, name="llama"):
    model = build(name, DOUBLE)
    with exact(DOUBLE):
        program(model, lambda batch: batch)
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def _compare(program, name="llama", **options):
    expected = _reference_gradients(program, name)
    model = sharded(name, DOUBLE, **options)
    with exact(DOUBLE):
        program(model, mine)
    _assert_gradients(model, expected)
    assert model.meter.live == 0
    return model


def _accumulate(model, part, sync_each):
    data = batches(3, DOUBLE)
    for i, batch in enumerate(data):
        keep = contextlib.nullcontext() if sync_each or i == 2 or not hasattr(model, "no_sync") else model.no_sync()
        with keep:
            (loss_of(model, part(batch)) / 3).backward()


@ranks(2)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"])
@pytest.mark.parametrize("sync_each", [True, False], ids=["reduce-each", "no-sync"])
def test_accumulated_gradients(strategy, sync_each):
    model = _compare(lambda m, part: _accumulate(m, part, sync_each), strategy=strategy)
    layer = model.plan.units[1].name
    assert model.meter.reduces[layer] == (3 if sync_each else 1)


@ranks(2)
def test_no_sync_keeps_narrow_gradients_in_the_dtype_they_are_summed_in():
    model = sharded(mixed_precision="bf16")
    with model.no_sync():
        step(model)
    held = [unreduced_gradient(p) for u in model._fullshard_engine.units for p in u.parameters]
    assert all(h is not None and h.term.dtype == torch.float32 for h in held)
    step(model)
    assert all(unreduced_gradient(p) is None for u in model._fullshard_engine.units for p in u.parameters)


@ranks(2)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_several_forwards_before_one_backward(strategy):
    def program(model, part):
        first, second = batches(2, DOUBLE)
        (loss_of(model, part(first)) + 2 * loss_of(model, part(second))).backward()

    model = _compare(program, strategy=strategy)
    assert all(count == 1 for count in model.meter.reduces.values())


@ranks(2)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_forwards_then_two_backwards(strategy, order):
    def program(model, part):
        losses = [loss_of(model, part(batch)) for batch in batches(2, DOUBLE)]
        for i in order:
            losses[i].backward()

    _compare(program, strategy=strategy)


@ranks(2)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_backward_twice_through_one_graph(strategy):
    def program(model, part):
        loss = loss_of(model, part(batches(1, DOUBLE)[0]))
        loss.backward(retain_graph=True)
        loss.backward()

    _compare(program, strategy=strategy)


@ranks(2)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_a_forward_without_a_backward_leaves_nothing_behind(strategy):
    def program(model, part):
        first, second = batches(2, DOUBLE)
        loss_of(model, part(first))  # with gradients enabled, and dropped
        loss_of(model, part(second)).backward()

    _compare(program, strategy=strategy)


@ranks(2)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"foreach": False}], ids=lambda o: str(*o))
def test_a_kept_forward_does_not_hide_an_optimizer_step(strategy, options):
    """Values gathered for an earlier forward, whose graph still lives, are gathered anew once the shards changed."""
    model, reference = sharded(dtype=DOUBLE, strategy=strategy), build("llama", DOUBLE)
    data = batches(3, DOUBLE)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1, **options) for m in (model, reference)]
    with exact(DOUBLE):
        loss_of(model, mine(data[0])).backward()
        loss_of(reference, data[0]).backward()
        kept = loss_of(model, mine(data[1]))
        for optimizer in optimizers:
            optimizer.step()
        assert abs(mean_over_ranks(loss_of(model, mine(data[2]))) - loss_of(reference, data[2]).item()) < 1e-9
    del kept


@ranks(2)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_training_with_a_key_value_cache(strategy):
    """transformers fills a cache unless told otherwise: each layer puts tensors of its own into what it is given."""

    def program(model, part):
        batch = part(batches(1, DOUBLE)[0])
        model(input_ids=batch, labels=batch, use_cache=True).loss.backward()

    _compare(program, strategy=strategy)


class _Through(nn.Module):
    """Returns what a unit returned, and a unit's weight, as they are."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.second(self.first(x)), x


@ranks(2)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_outputs_that_pass_through_the_module_around_a_unit(strategy):
    torch.manual_seed(0)
    reference = _Through().double()
    torch.manual_seed(0)
    model = FSDPv2(_Through().double(), mesh_for(strategy), auto_wrap_policy={nn.Linear}, strategy=strategy)
    x = torch.randn(4, 4, dtype=DOUBLE, requires_grad=True)
    for m, part in ((reference, x), (model, mine(x))):
        y, again = m(part)
        (y.square().mean() + again.mean()).backward()
    for p, q in zip(reference.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q.grad.full_tensor(), p.grad, rtol=0, atol=1e-12)


@ranks(2)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_evaluation_without_gradients(strategy):
    model = sharded(dtype=DOUBLE, strategy=strategy)
    batch = batches(1, DOUBLE)[0]
    with torch.inference_mode(), exact(DOUBLE):  # the very first pass
        loss_of(model, mine(batch))
    model.meter.reset()
    with torch.no_grad(), exact(DOUBLE):
        loss = loss_of(model, mine(batch))
        assert model.meter.live == 0
        expected = loss_of(build("llama", DOUBLE), batch)
    assert abs(mean_over_ranks(loss) - expected.item()) < 1e-12
    assert all(count == 1 for count in model.meter.gathers.values())
    with torch.inference_mode(), exact(DOUBLE):
        loss_of(model, mine(batch))
    step(model, dtype=DOUBLE)


@ranks(2, 4)
def test_ranks_that_take_different_branches():
    model = assert_same_training("branches", mesh=mesh_for("FULL_SHARD"), small_parameter_bytes=128)
    assert model.unused.grad is None  # as on one device: no weight decay either
    assert torch.equal(model.unused.full_tensor(), torch.ones(5, 3, dtype=DOUBLE))


@ranks(2)
def test_ranks_that_take_different_branches_without_syncing():
    def program(model, part):
        data = batches(2, DOUBLE, "branches")
        with model.no_sync() if hasattr(model, "no_sync") else contextlib.nullcontext():
            (loss_of(model, part(data[0])) / 2).backward()
        (loss_of(model, part(data[1])) / 2).backward()

    _compare(program, "branches")


class _Boom(Exception):
    pass


def _raise(*_):
    raise _Boom


@ranks(2)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("where", ["forward", "backward", "between"])
def test_a_good_step_after_an_exception(strategy, where):
    expected = _reference_gradients(lambda m, part: loss_of(m, batches(1, DOUBLE)[0]).backward())
    model = sharded(dtype=DOUBLE, strategy=strategy)
    layer = model.model.layers[0].mlp
    with exact(DOUBLE):
        step(model, dtype=DOUBLE)
        model.zero_grad()
        if where == "forward":
            handle = layer.register_forward_hook(_raise)
        elif where == "backward":
            handle = layer.register_full_backward_hook(_raise)
        else:
            handle = model.lm_head.register_forward_hook(_raise)
        with pytest.raises(_Boom):
            step(model, dtype=DOUBLE)
        handle.remove()
        assert not any(unit.shown for unit in model._fullshard_engine.units) or where == "backward"
        model.zero_grad()
        step(model, dtype=DOUBLE)
    _assert_gradients(model, expected)
    assert model.meter.live == 0


@ranks(2)
@pytest.mark.parametrize("cache", [False, True])
def test_generate_with_ranks_that_stop_at_different_lengths(cache):
    if not cache and tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 20):
        pytest.skip(
            "needs transformers 5.20: with 5.17 and no cache the mask of a finished rank grows on while its tokens do "
            "not, and the next forward fails on that rank"
        )
    torch.manual_seed(3)
    plain = llama()
    model = sharded(dtype=torch.float32)
    prompts = [torch.tensor([[5, 9, 11]]), torch.tensor([[7, 3, 30]])]
    # Each rank ends at a token that its own continuation contains early or late.
    free = [plain.generate(p, max_new_tokens=8, do_sample=False, eos_token_id=None) for p in prompts]
    stops = [int(free[0][0, 4]), int(free[1][0, 9])]
    me = runtime.rank()
    options = {
        "max_new_tokens": 8,
        "do_sample": False,
        "eos_token_id": stops[me],
        "pad_token_id": 0,
        "use_cache": cache,
    }
    out = model.generate(prompts[me], **options)
    alone_ = plain.generate(prompts[me], **options)
    assert torch.equal(out, alone_)
    lengths = [None, None]
    torch.distributed.all_gather_object(lengths, alone_.shape[1])
    assert lengths[0] != lengths[1]
    step(model)  # and it still trains


# --- shapes ---------------------------------------------------------------------------------------------------------


class _Odd(nn.Module):
    """Scalars, vectors, uneven and tiny parameters, one used by two units, one module called twice."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(7, 5)
        self.b = nn.Linear(5, 7, bias=False)
        self.twice = nn.Linear(7, 7)
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.shift = nn.Parameter(torch.randn(3))
        self.cube = nn.Parameter(torch.randn(3, 2, 7))
        self.tied = nn.Linear(7, 5, bias=False)
        self.tied.weight = self.a.weight
        self.register_buffer("mask", torch.ones(7))

    def forward(self, x):
        h = self.b(torch.tanh(self.a(x))) * self.gain + self.shift.sum()
        h = self.twice(torch.tanh(self.twice(h))) + torch.einsum("cij,bj->b", self.cube, x)[:, None]
        return self.tied(h * self.mask)


@ranks(1, 2, 4, slow=(1, 2))
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("small", [0, 1 << 20], ids=["direct", "bucket"])
def test_odd_shapes_tied_units_and_modules_called_twice(strategy, small):
    def make():
        torch.manual_seed(1)
        return _Odd().double()

    reference = make()
    policy = {nn.Linear}
    model = FSDPv2(make(), mesh_for(strategy), auto_wrap_policy=policy, strategy=strategy, small_parameter_bytes=small)
    assert model.tied.weight is model.a.weight
    names = [p.names for p in model.plan.units[0].parameters if len(p.names) > 1]
    assert names == [("a.weight", "tied.weight")]  # the root has it: the unit around both
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (reference, model)]
    for _ in range(4):
        x = torch.randn(8, 7, dtype=DOUBLE)
        for m, optimizer, part in ((reference, optimizers[0], x), (model, optimizers[1], mine(x))):
            m(part).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for (name, p), q in zip(reference.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q.full_tensor(), p.detach(), rtol=0, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.slow
@ranks(4)
def test_permuted_and_hybrid_meshes():
    for ids, shape, names in [
        ([3, 1, 0, 2], (4,), ("fsdp",)),
        ([0, 1, 2, 3], (2, 2), ("replica", "fsdp")),
        ([0, 2, 1, 3], (2, 2), ("fsdp", "data")),
        ([0, 1, 2, 3], (2, 2), ("fsdp", "model")),
    ]:
        if (
            hasattr(torch.distributed, "all_gather_single") or sorted(ids) == ids
        ):  # torch 2.11 keeps ascending order only
            mesh = xs.Mesh(np.array(ids), shape, names)
            extra = "data" if "data" in names else None
            if "model" in names:
                # Ranks along an axis that splits neither batch nor parameters see the same rows.
                torch.manual_seed(1)
                reference = _Odd().double()
                torch.manual_seed(1)
                model = FSDPv2(_Odd().double(), mesh)
                x = torch.randn(8, 7, dtype=DOUBLE)
                reference(x).square().mean().backward()
                row = mesh.coordinate(runtime.rank())[0]
                model(x.chunk(2)[row]).square().mean().backward()
                for p, q in zip(reference.parameters(), model.parameters(), strict=True):
                    torch.testing.assert_close(q.grad.full_tensor(), p.grad, rtol=0, atol=1e-12)
            else:
                order = mesh.device_ids.tolist()
                assert sorted(order) == [0, 1, 2, 3]
                assert_same_training("llama", steps=2, mesh=mesh, extra_data_axis=extra)


@ranks(1)
def test_one_device_shares_storage_and_calls_no_collective():
    def forbidden(*_, **__):
        raise AssertionError("a collective at world size 1")

    names = ("all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor", "send", "recv")
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(torch.distributed, name, forbidden)
        model = assert_same_training(
            "llama", steps=2, mesh=mesh_for("FULL_SHARD"), auto_wrap_policy=transformer_auto_wrap_policy
        )
    assert not model.meter.gathers and not model.meter.reduces and model.meter.peak == 0
    for unit in model._fullshard_engine.units:
        for p in unit.parameters:
            assert p.full.data_ptr() == p.local.data_ptr()


@ranks(2)
def test_the_reference_is_not_what_is_tested():
    """The one-device program and the sharded one really differ in what each rank sees."""
    losses, _, _ = alone("llama", 5, DOUBLE)
    model = sharded(dtype=DOUBLE)
    with exact(DOUBLE):
        own = loss_of(model, mine(batches(1, DOUBLE)[0])).item()
    assert abs(own - losses[0]) > 1e-6
    assert not isinstance(model.lm_head.weight.to_local(), type(model.lm_head.weight))
    assert model.lm_head.weight.to_local().shape[0] < model.lm_head.weight.shape[0]


@ranks(4)
def test_ranks_with_different_pasts_meet():
    """torch names groups by how many a rank has; ranks that took part in different ones still find each other."""
    if runtime.rank() < 2:
        dist.new_group([0, 1], use_local_synchronization=True)
    model = sharded(timeout=1234.0)  # groups that no test made before
    step(model)
