"""Whole modules over a mesh, and models of images."""

import copy
import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fullshard.spmd as xs
from fullshard import FSDPv2
from fullshard.config.errors import LayoutError, RuntimeSetupError
from fullshard.distributed import runtime
from fullshard.spmd import unused_annotations
from tests.pool import ranks

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def square() -> xs.Mesh:
    return xs.Mesh(np.arange(4), (2, 2), ("data", "model"))


def example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6, bias=False), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.frozen = nn.Parameter(torch.randn(6), requires_grad=False)
        self.register_buffer("offset", torch.randn(6))

    def forward(self, x):
        return self.second(self.first(x) * self.scale + self.frozen).relu() + self.offset


@ranks(4)
def test_marked_parameters_are_sharded_and_the_rest_copied():
    torch.manual_seed(0)
    reference = Tied()
    model = copy.deepcopy(reference)
    for m in (reference, model):
        m(torch.ones(2, 6)).sum().backward()  # gradients that are there move along
    xs.mark_sharding(model.first.weight, square(), ("data", "model"))
    xs.mark_sharding(model.offset, square(), ("model",))
    assert xs.distribute_module(model, square()) is model
    assert model.first.weight is model.second.weight and isinstance(model.first.weight, nn.Parameter)
    assert model.first.weight.sharding_spec == ("data", "model")
    assert model.first.weight.grad.sharding_spec == ("data", "model")
    assert model.second.bias.sharding_spec == (None,) and model.scale.sharding_spec == ()
    assert model.offset.sharding_spec == ("model",)
    assert not model.frozen.requires_grad
    x = torch.randn(5, 6)
    sharded_x = xs.mark_sharding(x.clone(), square(), ("data", None))
    for m, value in ((reference, x), (model, sharded_x)):
        m(value).square().mean().backward()
    for (name, expected), got in zip(reference.named_parameters(), model.parameters(), strict=True):
        assert (got.grad is None) == (expected.grad is None)
        if expected.grad is not None:
            assert got.grad.sharding_spec == got.sharding_spec
            torch.testing.assert_close(got.grad.full_tensor(), expected.grad, msg=name)


@ranks(4)
def test_state_dicts_copies_and_meta_modules():
    model = xs.distribute_module(Tied(), square())
    state = {name: value.full_tensor() for name, value in model.state_dict().items()}
    again = copy.deepcopy(model)
    assert again.first.weight.sharding_spec == model.first.weight.sharding_spec
    with torch.no_grad():
        for p in again.parameters():
            p.zero_()
    again.load_state_dict(model.state_dict())
    again.load_state_dict(state)  # plain values are global values
    for name, value in again.state_dict().items():
        assert torch.equal(value.full_tensor(), state[name])
    with torch.device("meta"):
        shell = nn.Linear(8, 8)
    xs.mark_sharding(shell.weight, square(), ("data", None))
    xs.distribute_module(shell, square())
    assert shell.weight.is_meta and shell.weight.to_local().shape == (4, 8)


@ranks(4)
def test_what_cannot_be_distributed():
    module = nn.Linear(4, 4)
    xs.mark_sharding(module.weight, xs.get_1d_mesh("other"), ("other", None))
    with pytest.raises(LayoutError, match=r"weight is marked on Mesh\(other=4\).*over Mesh\(data=2, model=2\)"):
        xs.distribute_module(module, square())
    with pytest.raises(RuntimeSetupError, match="DistributedDataParallel"):
        xs.distribute_module(nn.parallel.DistributedDataParallel(nn.Linear(2, 2)), square())


@ranks(4)
def test_an_undistributed_module_takes_sharded_input():
    module = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3))
    x = torch.randn(4, 6)
    expected = module(x)
    got = module(xs.mark_sharding(x.clone(), square(), ("data", None)))
    assert got.sharding_spec[0] == "data"
    torch.testing.assert_close(got.full_tensor(), expected)


@pytest.mark.slow
@ranks(4)
@pytest.mark.parametrize("batch", [8, 6])
def test_a_resnet_with_its_batch_split_equals_one_device(batch):
    resnet = example("resnet_data_parallel")
    mesh = xs.get_1d_mesh("data")
    reference = resnet.build_model(torch.float64)
    model = xs.distribute_module(resnet.build_model(torch.float64), mesh)
    data = [{k: v[:batch] for k, v in b.items()} for b in resnet.batches(torch.float64)]
    sharding = {
        "pixel_values": xs.ShardingSpec(mesh, ("data", None, None, None)),
        "labels": xs.ShardingSpec(mesh, ("data",)),
    }
    expected = resnet.train(reference, copy.deepcopy(data))
    runtime.forget_warnings()
    got = resnet.train(model, xs.ShardedLoader(data, input_sharding=sharding))
    if batch == 8:
        assert not [key for key in runtime.warned() if key.startswith("fallback")]
    assert max(abs(a - b) for a, b in zip(expected, got, strict=True)) < 1e-9
    for (name, p), q in zip(reference.state_dict().items(), model.state_dict().values(), strict=True):
        torch.testing.assert_close(q.full_tensor(), p, rtol=1e-8, atol=1e-8, msg=name)


@ranks(1, 4)
def test_the_guides_statements_leave_the_layouts_they_say(world_size):
    tensors = example("spmd_basic").main()
    specs = {name: t.sharding_spec for name, t in tensors.items()}
    assert specs["t"] == ("data", "model")
    assert specs["t1"] == (None, "data", "model")
    assert specs["t2"] == (("data", "model"),)
    n, me = world_size, runtime.rank()
    step = 8 // n
    piece = slice(me * step, (me + 1) * step)
    assert tensors["t"].local_shards[0].indices == (piece, slice(0, 4))
    assert tensors["t1"].local_shards[0].indices == (slice(0, 8), piece, slice(0, 16))
    assert tensors["t2"].local_shards[0].indices == (piece,)
    assert tensors["t"].to_local().shape == (step, 4)


def _two_layers(mesh):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for layer in model:
        xs.mark_sharding(layer.weight, mesh, ("model", None))
    return model


def _reminders():
    return [key for key in runtime.warned() if key.startswith("marked but not sharded")]


@ranks(4)
def test_marks_that_nobody_honours_are_named_once():
    mesh = xs.Mesh(np.arange(4), (2, 2), ("fsdp", "model"))
    runtime.forget_warnings()
    model = _two_layers(mesh)
    assert not _reminders()
    for _ in range(2):
        model(torch.randn(2, 8))
    assert _reminders() == ["marked but not sharded: 0.weight, 1.weight"]
    assert unused_annotations._forward_hook is None  # nothing is left to look for

    runtime.forget_warnings()
    bare = nn.Parameter(torch.ones(4, 4))
    xs.mark_sharding(bare, mesh, ("model", None))
    bare.sum().backward()
    torch.optim.SGD([bare], lr=0.1).step()
    assert _reminders() == ["marked but not sharded: a parameter of shape (4, 4)"]

    runtime.forget_warnings()
    for model in (
        xs.distribute_module(_two_layers(mesh), mesh),
        FSDPv2(_two_layers(mesh), mesh),
        _two_layers(xs.Mesh([0], (1,), ("model",))),  # one device: whole either way
    ):
        model(torch.randn(4, 8)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    cleared = _two_layers(mesh)
    for parameter in cleared.parameters():
        xs.clear_sharding(parameter)
    cleared(torch.randn(4, 8))
    assert not _reminders()


@ranks(4)
def test_an_optimizer_of_replaced_parameters_is_refused():
    mesh = xs.Mesh(np.arange(4), (2, 2), ("data", "model"))
    model = _two_layers(mesh)
    stale = torch.optim.SGD(model.parameters(), lr=0.1)
    xs.distribute_module(model, mesh)
    model(torch.randn(2, 8)).sum().backward()
    with pytest.raises(LayoutError, match=r"this SGD was made before distribute_module.*0.weight, 0.bias, 1.weight"):
        stale.step()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
