"""torch's own two-dimensional way: `parallelize_module` along one axis of a mesh, then `FSDPv2` along the other."""

import copy

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import fullshard.spmd as xs
from fullshard.config.errors import FSDPError, MeshError
from fullshard.distributed import runtime
from fullshard.fsdp import FSDPv2, checkpoint_module
from tests.pool import ranks

WIDTH, ROWS, LENGTH = 12, 4, 6


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 10), nn.Linear(10, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(17, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, 17, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def model():
    torch.manual_seed(3)
    return Model().double()


def parallelized(module, mesh, sequence):
    """Megatron's split of each layer; with `sequence` norms work on parts of the sequence, and their weights are
    replicated `DTensor`s."""
    for layer in module.layers:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        if sequence:
            plan = {
                "norm": SequenceParallel(),
                "up": ColwiseParallel(input_layouts=Shard(1)),
                "down": RowwiseParallel(),
            }
            parallelize_module(
                layer.norm,
                mesh,
                PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1)),
            )
        parallelize_module(layer, mesh, plan)
    ends = {"embed": RowwiseParallel(input_layouts=Replicate()), "head": ColwiseParallel(output_layouts=Replicate())}
    return parallelize_module(module, mesh, ends)


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, 17, (ROWS, LENGTH), generator=generator)


def loss_of(module, ids):
    return nn.functional.cross_entropy(module(ids).flatten(0, 1), ids.roll(1, 1).flatten())


def whole(t):
    return t.full_tensor() if xs.is_sharded(t) else t


def trained(module, rows=slice(None), steps=2, clip=0.5):
    """Losses, norms and weights of a few steps."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    losses, norms = [], []
    for step in range(steps):
        loss = loss_of(module, batch(step)[rows])
        loss.backward()
        if isinstance(module, FSDPv2):
            norms.append(module.clip_grad_norm_(clip).item())
        else:
            gradients = [p.grad for p in module.parameters()]  # torch's own function refuses DTensors on two meshes
            norm = torch.stack([whole(g).square().sum() for g in gradients]).sum().sqrt().item()
            for g in gradients:
                g.mul_(min(1.0, clip / (norm + 1e-6)))
            norms.append(norm)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        if rows != slice(None):
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        losses.append(mean.item())
    return losses, norms, {name: whole(p).detach() for name, p in module.named_parameters()}


def same(found, expected):
    assert found[0] == pytest.approx(expected[0], rel=1e-10) and found[1] == pytest.approx(expected[1], rel=1e-8)
    for name, value in expected[2].items():
        torch.testing.assert_close(found[2][name], value, rtol=1e-8, atol=1e-9, msg=name)


@ranks(4)
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("given", ["Mesh", "DeviceMesh", 'mesh["dp"]'])
def test_a_parallelized_model_is_that_of_fully_shard_and_of_one_device(given, sequence):
    named = "dp" if given == 'mesh["dp"]' else "fsdp"
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=(named, "tp"))
    rows = slice(2 * (runtime.rank() // 2), 2 * (runtime.rank() // 2) + 2)
    one_device = trained(model())
    theirs = parallelized(model(), mesh["tp"], sequence)
    for layer in theirs.layers:
        fully_shard(layer, mesh=mesh[named])
    fully_shard(theirs, mesh=mesh[named])
    same(trained(theirs, rows), one_device)

    ours = parallelized(model(), mesh["tp"], sequence)
    own = xs.Mesh(np.arange(4), (2, 2), ("fsdp", "model"))
    place = own if given == "Mesh" else mesh if given == "DeviceMesh" else mesh["dp"]
    ours = FSDPv2(ours, place, auto_wrap_policy={Layer})
    assert [unit.name for unit in ours.plan.units] == ["", "layers.0", "layers.1"]
    weight = ours.layers[0].up.weight
    assert xs.is_sharded(weight) and weight.to_local().numel() * 4 == weight.numel()
    seen = []
    hook = ours.layers[0].up.register_forward_pre_hook(lambda module, _: seen.append(module.weight))
    found = trained(ours, rows)
    hook.remove()
    assert type(seen[0].data) is DTensor and seen[0].device_mesh == mesh["tp"]
    same(found, one_device)
    values = ours.full_state_dict()
    ours.load_state_dict({name: torch.zeros_like(value) for name, value in values.items()})
    assert not any(whole(p).count_nonzero() for p in ours.parameters())
    ours.load_state_dict(values)
    assert all(torch.equal(whole(p), found[2][name]) for name, p in ours.named_parameters())


@ranks(4)
@pytest.mark.parametrize("strategy", ["SHARD_GRAD_OP", "NO_SHARD"])
def test_strategies_accumulation_and_checkpointing(strategy):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    plain = model()
    ours = FSDPv2(
        parallelized(copy.deepcopy(plain), mesh["tp"], True), mesh, auto_wrap_policy={Layer}, strategy=strategy
    )
    for layer in ours.layers:
        checkpoint_module(layer)
    group = runtime.rank() // 2
    for step in range(2):
        ids = batch(step)
        loss_of(plain, ids).backward()
        if step == 0:
            with ours.no_sync():
                loss_of(ours, ids[2 * group : 2 * group + 2]).backward()
        else:
            loss_of(ours, ids[2 * group : 2 * group + 2]).backward()
    for (name, p), q in zip(plain.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(whole(q.grad), p.grad, msg=name)


@ranks(4)
def test_replicas_deferred_values_and_a_penalty():
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicas", "shards", "tp"))
    with torch.device("meta"):
        deferred = Model().double()
    plain = model()
    ours = FSDPv2(parallelized(deferred, mesh["tp"], False), mesh["replicas", "shards"], strategy="HYBRID_SHARD")
    assert ours.plan.axes == (("replica", 2), ("fsdp", 1), ("tp", 2))
    ours.load_state_dict(plain.state_dict())
    group = runtime.rank() // 2
    for module, rows in ((plain, slice(None)), (ours, slice(2 * group, 2 * group + 2))):
        (loss_of(module, batch(0)[rows]) + sum(p.norm() for p in module.parameters())).backward()
    for (name, p), q in zip(plain.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(whole(q.grad), p.grad, msg=name)


@ranks(4)
def test_other_devices_and_mixtures_are_refused():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    across = parallelized(model(), mesh["fsdp"], False)
    with pytest.raises(FSDPError, match="is annotated on"):
        FSDPv2(across, mesh)
    mixed = parallelized(model(), mesh["tp"], False)
    ours = xs.Mesh(np.arange(4), (2, 2), ("fsdp", "tp"))
    xs.mark_sharding(mixed.layers[0].norm.weight, ours, ("tp",))
    with pytest.raises(FSDPError, match=r"some parameters are annotated .* and others are split for their modules"):
        FSDPv2(mixed, ours)
    cube = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("a", "b", "c"))
    with pytest.raises(MeshError, match=r"has 3 dims; pass the one that shards the model"):
        FSDPv2(model(), cube)
