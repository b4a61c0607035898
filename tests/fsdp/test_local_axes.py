"""Local axes: modules compute with their rank's slice, and the sharded parameters are those of one global model."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import fullshard.spmd as xs
from fullshard.config.errors import FSDPError, LayoutError
from fullshard.distributed import autograd_collectives as border
from fullshard.distributed import data_ranks, runtime
from fullshard.fsdp import FSDPv2, checkpoint_module
from fullshard.fsdp.local_axes import compute_with_slices
from fullshard.fsdp.plan import ShardingPlan
from tests.pool import ranks

WIDTH, ROWS, HEADS = 12, 8, 4
MESHES = {
    2: [((2, 1), ("tp", "fsdp")), ((1, 2), ("fsdp", "tp"))],
    4: [((2, 2), ("fsdp", "tp")), ((2, 1, 2), ("replica", "fsdp", "tp"))],
}


class Layer(nn.Module):
    """Columns, a norm of each head with one weight for all, rows."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * HEADS), nn.Linear(4 * HEADS, WIDTH, bias=False)
        self.head_norm = nn.LayerNorm(4, bias=False)
        self.group = border.RankGroup("", 1, 0)

    def forward(self, x):
        inside = self.up(border.sum_gradients(self.norm(x), self.group))
        inside = torch.tanh(self.head_norm(inside.unflatten(-1, (-1, 4)))).flatten(-2)
        return x + border.sum_terms(self.down(inside), self.group)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def model():
    torch.manual_seed(3)
    return Model().double()


def split(module, mesh):
    for layer in module.layers:
        compute_with_slices(layer.up.weight, mesh, ("tp", None))
        compute_with_slices(layer.up.bias, mesh, ("tp",))
        compute_with_slices(layer.down.weight, mesh, (None, "tp"))
        compute_with_slices(layer.head_norm.weight, mesh, sums_over=("tp",))
        layer.group = border.group_of(mesh.get_group("tp"))
    return module


def batch(step):
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def own_rows(mesh):
    """The rows of this rank: those of its place along all axes but tp."""
    shape, place = mesh.shape(), dict(zip(mesh.axis_names, mesh.coordinate(runtime.rank()), strict=True))
    count = mesh.size() // shape["tp"]
    index = place.get("replica", 0) * shape["fsdp"] + place["fsdp"]
    return slice(index * ROWS // count, (index + 1) * ROWS // count)


def whole(t):
    return t.full_tensor() if xs.is_sharded(t) else t


def trained(module, rows=slice(None), accumulates=False):
    """Norms, gradients of the first step and weights of a few steps."""
    optimizer, norms, first = torch.optim.AdamW(module.parameters(), lr=1e-2), [], {}
    for step in range(3):
        if accumulates:
            for part in (0, 1):
                x = batch(step)[rows][part::2]
                held = module.no_sync() if part == 0 and isinstance(module, FSDPv2) else torch.enable_grad()
                with held:
                    (module(x).square().mean() / 2).backward()
        else:
            module(batch(step)[rows]).square().mean().backward()
        if step == 0:
            first = {name: whole(p.grad).clone() for name, p in module.named_parameters()}
        if isinstance(module, FSDPv2):
            norms.append(module.clip_grad_norm_(0.05).item())
        else:
            norms.append(nn.utils.clip_grad_norm_(module.parameters(), 0.05).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms, first, {name: whole(p).detach() for name, p in module.named_parameters()}


def check(world, index, checkpointed=False, accumulates=False, strategy="FULL_SHARD"):
    shape, names = MESHES[world][index]
    mesh = xs.Mesh(np.arange(world), shape, names)
    expected = trained(model(), accumulates=accumulates)
    ours = FSDPv2(split(model(), mesh), mesh, auto_wrap_policy={Layer}, strategy=strategy, small_parameter_bytes=256)
    if checkpointed:
        for layer in ours.layers:
            checkpoint_module(layer)
    seen = []
    hook = ours.layers[0].up.register_forward_pre_hook(lambda module, _: seen.append(module.weight))
    norms, first, values = trained(ours, own_rows(mesh), accumulates)
    hook.remove()
    assert type(seen[0]) is nn.Parameter and seen[0].shape == (4 * HEADS // 2, WIDTH)
    assert norms == pytest.approx(expected[0], rel=1e-12)
    for found, wanted in ((first, expected[1]), (values, expected[2])):
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12, msg=name)
    return ours, mesh, values


@ranks(2)
@pytest.mark.parametrize("index", [0, 1])
def test_two_ranks_are_one_device(index):
    check(2, index)


@ranks(4)
@pytest.mark.parametrize("index", [0, 1])
def test_with_fsdp_and_replicas_it_is_one_device(index):
    ours, mesh, values = check(4, index, strategy="FULL_SHARD" if index == 0 else "HYBRID_SHARD")
    up = ours.plan.parameters["layers.0.up.weight"]
    assert up.local_axes == ("tp",) and up.whole == (8, WIDTH) and "tp" in str(up.spec)
    assert ours.plan.parameters["layers.0.head_norm.weight"].summed_axes == ("tp",)
    assert ShardingPlan.from_json(ours.plan.to_json()) == ours.plan
    assert "gradient summed over tp" in str(ours.plan)
    assert ours.layers[0].up.weight.to_local().numel() * mesh.size() // mesh.shape().get("replica", 1) == (
        ours.layers[0].up.weight.numel()
    )
    state = ours.full_state_dict()
    assert all(torch.equal(state[name], value) for name, value in values.items())
    ours.load_state_dict({name: torch.zeros_like(value) for name, value in state.items()})
    ours.load_state_dict(state)
    assert all(torch.equal(whole(p), state[name]) for name, p in ours.named_parameters())
    with ours.summon_full_params():
        assert torch.equal(ours.layers[0].up.weight, state["layers.0.up.weight"])


@ranks(4)
@pytest.mark.parametrize("strategy", ["SHARD_GRAD_OP", "NO_SHARD"])
def test_strategies_accumulation_and_checkpointing(strategy):
    check(4, 0, checkpointed=True, accumulates=True, strategy=strategy)


@ranks(4)
def test_wrong_annotations_are_refused():
    mesh = xs.Mesh(np.arange(4), (2, 2), ("fsdp", "tp"))
    weight = nn.Parameter(torch.zeros(6, 5))
    with pytest.raises(LayoutError, match="expected a size that 2 divides"):
        compute_with_slices(weight, mesh, (None, "tp"))
    with pytest.raises(LayoutError, match="fsdp splits the rows"):
        compute_with_slices(weight, mesh, ("fsdp", None))
    with pytest.raises(LayoutError, match="tp splits the rows of the batch, or is named twice"):
        compute_with_slices(weight, mesh, ("tp", None), sums_over=("tp",))
    mixed = split(model(), mesh)
    xs.mark_sharding(mixed.head.weight, mesh, (None, "tp"))
    with pytest.raises(FSDPError, match="some parameters are annotated with mark_sharding"):
        FSDPv2(mixed, mesh)


@ranks(4)
def test_the_operators_between_layers():
    mesh = xs.Mesh(np.arange(4), (2, 2), ("fsdp", "tp"))
    group = border.group_of(mesh.get_group("tp"))
    values = torch.arange(4.0, dtype=torch.float64).reshape(1, 4) + 1
    mine = values[:, 2 * group.place : 2 * group.place + 2].clone().requires_grad_()
    gathered = border.gather_slices(mine, -1, group)
    assert torch.equal(gathered, values)
    (gathered * values).sum().backward()
    assert torch.equal(mine.grad, mine.detach())
    both = values.clone().requires_grad_()
    own = border.own_slice(both, 1, group)
    assert torch.equal(own, mine.detach())
    (own.square().sum() / 2).backward()
    assert torch.equal(both.grad, values)
    both.grad = None
    total = border.sum_terms(border.own_slice(border.sum_gradients(both, group), 1, group).sum(), group)
    assert total.item() == 10
    assert border.max_over_ranks(mine, group).tolist() == [[3, 4]]
    assert border.total_over_ranks(mine, group).tolist() == [[4, 6]]
    meta = border.gather_slices(torch.empty(2, 3, device="meta", requires_grad=True), 0, border.RankGroup("", 4, 0))
    assert meta.shape == (8, 3) and meta.is_meta


@ranks(4)
def test_rows_are_counted_once():
    assert (data_ranks.data_rank(), data_ranks.data_size()) == (runtime.rank(), 4)
    data_ranks.share_rows(2)
    assert (data_ranks.data_rank(), data_ranks.data_size()) == (runtime.rank() // 2, 2)
    values = torch.tensor([1.0 + data_ranks.data_rank()], dtype=torch.float64)
    assert data_ranks.sum_over_rows("test", values).item() == 3
    assert data_ranks.of_each_row(list(range(4))) == [0, 2]
    assert dist.get_world_size() == 4
