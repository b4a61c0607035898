"""`mark_sharding` and its variants on XLA: the scenarios of PyTorch/XLA's sharding tests, compared with host values."""

from __future__ import annotations

import copy
import io
import itertools

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import fullshard.runtime as xr
import fullshard.spmd as xs
import fullshard.xm as xm
from fullshard.config.errors import LayoutError, MeshError, RuntimeSetupError, SpecError, UnsupportedError
from fullshard.xla.tensor import annotation

DATA_MODEL = ("data", "model")


def mesh_2x2(ids=range(4)):
    return xs.Mesh(list(ids), (2, 2), DATA_MODEL)


def value(*shape: int) -> torch.Tensor:
    return torch.arange(1.0, 1 + int(np.prod(shape))).reshape(shape)


def on_devices(t: torch.Tensor) -> torch.Tensor:
    return t.to(xr.device())


# --- the contents of shards -------------------------------------------------------------------------------------------

CASES = [
    (mesh, shape, spec)
    for mesh, shape, specs in [
        (((2, 2), DATA_MODEL), (8, 4), [("data", "model"), ("model", "data"), ("data", None), (None, "model"), (0, 1),
                                        (DATA_MODEL, None), (("model", "data"), None), (None, DATA_MODEL), ((), "data"),
                                        (None, None), ["data", np.int64(1)]]),
        (((2, 2), DATA_MODEL), (5, 7), [("data", "model"), (DATA_MODEL, None), (None, ("model", "data"))]),
        (((2, 2), DATA_MODEL), (1, 3), [(DATA_MODEL, None), (None, DATA_MODEL)]),
        (((2, 2), DATA_MODEL), (4,), [("data",), (DATA_MODEL,), (None,)]),
        (((2, 2), DATA_MODEL), (), [()]),
        (((2, 2), DATA_MODEL), (2, 3, 4), [("data", None, "model"), (None, "model", "data"), ("model", None, None)]),
        (((1, 2, 2), ("x", "y", "z")), (2, 2, 4, 4), [("y", None, "z", "x"), (None, ("z", "y"), None, None)]),
        (((1, 2, 2), ("x", "y", "z")), (4, 4), [("x", None), (("x", "y"), "z"), (("z", "x"), None)]),
        (((4,), None), (8, 4), [(0, None), (None, 0)]),
        (((4, 1), ("fsdp", "model")), (8, 4), [("fsdp", None), ("fsdp", "model"), (None, "model")]),
    ]
    for spec in specs
]  # fmt: skip


@pytest.mark.parametrize("ids", [(0, 1, 2, 3), (3, 1, 0, 2)])
@pytest.mark.parametrize(("mesh", "shape", "spec"), CASES)
def test_shards_indices_and_replicas(mesh, shape, spec, ids):
    mesh = xs.Mesh(ids, *mesh)
    full = value(*shape)
    t = on_devices(full)
    assert xs.mark_sharding(t, mesh, spec) is t and isinstance(t, xs.XLAShardedTensor)
    layout = xs.Layout.of(mesh, spec, shape)
    assert t.sharding_spec == layout.spec and xs.sharding_of(t) == layout
    shards = t.local_shards
    assert [shard.device.index for shard in shards] == [0, 1, 2, 3]
    for device, shard in enumerate(shards):
        assert shard.indices == layout.slices(shape, device), (device, shard.indices)
        assert torch.equal(shard.data, full[shard.indices]) and torch.equal(shard.unpadded_data, shard.data)
    copies: dict[tuple, list[int]] = {}
    for shard in shards:
        copies.setdefault(tuple((part.start, part.stop) for part in shard.indices), []).append(shard.replica_id)
    if all(size >= layout.parts(dim) for dim, size in enumerate(shape)):  # else several shards are empty
        for replicas in copies.values():
            assert sorted(replicas) == list(range(len(replicas))), "replicas of a shard are numbered from 0"
    assert torch.equal(t.full_tensor(), full) and torch.equal(xs.full_tensor(t), full)
    assert torch.equal(xs.wrap_if_sharded(t).cpu(), full)


def test_kinds_of_sharding_and_placements():
    for spec, kind, placements in [
        ((None, None), "REPLICATED", (Replicate(), Replicate())),
        (("data", None), "PARTIAL", (Shard(0), Replicate())),
        (("data", "model"), "TILED", (Shard(0), Shard(1))),
        ((DATA_MODEL, None), "TILED", (Shard(0), Shard(0))),
    ]:
        t = xs.mark_sharding(on_devices(value(4, 4)), mesh_2x2(), spec)
        assert t.sharding_type == xs.ShardingType[kind] and t.placements == placements
        moved = t.redistribute(placements=(Shard(1), Replicate()))
        assert moved is not t and moved.sharding_spec == (None, "data") and t.sharding_spec == spec
        assert torch.equal(moved.full_tensor(), value(4, 4))
    with pytest.raises(UnsupportedError, match=r"to_local.*several devices"):
        t.to_local()


def test_shards_are_copies_and_can_be_loaded():
    for spec, shape in [(("data", "model"), (4, 6)), (("data", None), (5, 3)), ((None,), (3,)), ((DATA_MODEL,), (3,))]:
        t = xs.mark_sharding(on_devices(value(*shape)), mesh_2x2(), spec)
        shards = t.local_shards
        for shard in shards:
            shard.data *= -1
        assert torch.equal(t.full_tensor(), value(*shape)), "a copy"
        assert t.load_local_shards_(shards) is t
        assert torch.equal(t.full_tensor(), -value(*shape)) and t.sharding_spec == spec
        t.load_local_shards_([shard.data * 2 for shard in shards])
        assert torch.equal((t + 0).cpu(), -2 * value(*shape)), "used by the next step"
    partial = xs.mark_sharding(on_devices(value(4)), mesh_2x2(), ("data",))
    with pytest.raises(LayoutError, match="several devices, and they were given different data"):
        partial.load_local_shards_([torch.full((2,), float(device)) for device in range(4)])
    with pytest.raises(LayoutError, match=r"1 shard.* given; this process holds 4"):
        t.load_local_shards_(shards[:1])
    with pytest.raises(LayoutError, match=r"shard given has shape \(5,\); that of device 0"):
        t.load_local_shards_([torch.ones(5)] * 4)


# --- marking ----------------------------------------------------------------------------------------------------------


def test_a_tensor_in_host_memory_moves_to_the_devices_in_place():
    t = value(4, 4).requires_grad_()
    assert xs.mark_sharding(t, mesh_2x2(), ("data", None)) is t
    assert t.device.type == "xla" and t.is_leaf and t.requires_grad
    (t * 3).sum().backward()
    assert torch.equal(t.grad.cpu(), torch.full((4, 4), 3.0))


def test_the_same_spec_again_and_another_one():
    t = on_devices(value(4, 4))
    for spec in [("data", None), ("data", None), (None, "model"), ("model", "data"), (None, None)]:
        xs.mark_sharding(t, mesh_2x2(), spec)
        assert t.sharding_spec == spec and torch.equal(t.full_tensor(), value(4, 4))
    y = t + 1  # not computed yet
    for spec in [("data", None), (None, "model")]:
        xs.mark_sharding(y, mesh_2x2(), spec)
    xr.sync()
    xs.mark_sharding(t, mesh_2x2(), ("data", None))  # while the step may still run
    xs.mark_sharding(y, mesh_2x2([3, 2, 1, 0]), (None, "model"))
    assert torch.equal(y.full_tensor(), value(4, 4) + 1) and torch.equal(t.full_tensor(), value(4, 4))


def test_clear_and_mark_again():
    t = xs.mark_sharding(on_devices(value(4, 4)), mesh_2x2(), ("data", None))
    assert xs.clear_sharding(t) is t and not xs.is_sharded(t) and xs.sharding_of(t) is None
    assert type(t) is torch.Tensor and torch.equal(t.cpu(), value(4, 4))
    xs.mark_sharding(t, mesh_2x2(), (None, "data"))
    assert t.sharding_spec == (None, "data")
    with pytest.raises(LayoutError, match="no layout"):
        _ = xs.ShardedTensor.sharding_spec.fget(on_devices(value(2, 2)))


@pytest.mark.parametrize("spec", [("data", None), (None, "model"), ("data", "model")])
def test_layouts_survive_copies_and_writes(spec):
    mesh = mesh_2x2()
    t = xs.mark_sharding(on_devices(value(4, 4)), mesh, spec)
    kept = {"deepcopy": copy.deepcopy(t), "clone": t.clone(), "sum": t + t, "detach": t.detach()}
    t.add_(1)
    xr.sync()
    assert t.sharding_spec == spec and torch.equal(t.full_tensor(), value(4, 4) + 1)
    for how, other in kept.items():
        assert xs.sharding_of(other) == xs.Layout.of(mesh, spec), how
    assert isinstance(kept["deepcopy"], xs.ShardedTensor)
    assert torch.equal(kept["clone"].cpu(), value(4, 4)) and torch.equal(kept["deepcopy"].full_tensor(), value(4, 4))
    deep = copy.deepcopy({"a": t, "b": t})
    assert deep["a"] is deep["b"] and deep["a"] is not t


def test_optimizer_steps_keep_layouts_and_match_one_device():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 4))
    model = copy.deepcopy(plain)
    mesh = mesh_2x2()
    xs.mark_sharding(model[0].weight, mesh, ("model", "data"))
    xs.mark_sharding(model[2].weight, mesh, (None, "model"))
    assert xs.sharding_of(model[0].weight).spec == ("model", "data") and model[0].weight.device.type == "cpu"
    assert xs.distribute_module(model, mesh) is model
    assert isinstance(model[0].weight, nn.Parameter) and model[0].bias.sharding_spec == (None,)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    batches = [torch.randn(8, 8) for _ in range(3)]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (plain, model)]
    for batch in batches:
        x = xs.mark_sharding(on_devices(batch), mesh, ("data", None))
        losses = []
        for m, optimizer, data in ((plain, optimizers[0], batch), (model, optimizers[1], x)):
            loss = m(data).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss)
        xm.mark_step()
        torch.testing.assert_close(losses[1].cpu(), losses[0], atol=1e-6, rtol=1e-6)
    assert model[0].weight.sharding_spec == ("model", "data") and model[2].weight.sharding_spec == (None, "model")
    state = optimizers[1].state[model[0].weight]
    assert xs.sharding_of(state["exp_avg"]).spec == ("model", "data")
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(xs.full_tensor(ours), theirs.detach(), atol=1e-6, rtol=1e-5)


def test_tied_parameters_stay_tied_and_marks_on_two_meshes_are_refused():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    xs.mark_sharding(model[0].weight, mesh_2x2(), ("data", None))
    xs.distribute_module(model, mesh_2x2())
    assert model[0].weight is model[1].weight and model[0].weight.sharding_spec == ("data", None)
    other = nn.Linear(4, 4)
    xs.mark_sharding(other.weight, xs.get_1d_mesh("data"), ("data", None))
    with pytest.raises(LayoutError, match=r"weight is marked on .* use the same mesh"):
        xs.distribute_module(other, mesh_2x2())


# --- what the compiler does -------------------------------------------------------------------------------------------


def test_layouts_propagate_and_are_named_after_the_mesh():
    mesh = xs.Mesh(range(4), (2, 2), ("rows", "columns"))
    x = xs.mark_sharding(on_devices(value(4, 6)), mesh, ("rows", None))
    w = xs.mark_sharding(on_devices(value(6, 8)), mesh, (None, "columns"))
    y, s = x @ w, x.softmax(1)
    assert xs.sharding_of(y) is None and not xs.is_sharded(y), "known after the step"
    xr.sync()
    assert str(xs.sharding_of(y)) == "('rows', 'columns') on Mesh(rows=2, columns=2)"
    assert xs.sharding_of(s).spec == ("rows", None)
    torch.testing.assert_close(y.cpu(), value(4, 6) @ value(6, 8))
    assert xs.wrap_if_sharded(y) is y and y.sharding_spec == ("rows", "columns") and len(y.local_shards) == 4


def test_a_layout_that_no_mesh_has_gets_a_mesh_of_its_own():
    from fullshard.xla import tensor

    found = tensor._layout_from("{devices=[1,4]0,2,1,3}", 2, ())
    assert found.mesh.mesh_shape == (1, 4, 1) and [found.slices((2, 8), device)[1].start for device in range(4)] == [
        0, 4, 2, 6,
    ]  # fmt: skip
    assert tensor._layout_from("{replicated}", 2, ()).spec == (None, None)


def test_uneven_dims_are_exact_and_come_back_replicated():
    mesh, full = mesh_2x2(), torch.randn(7, 5)
    t = xs.mark_sharding(on_devices(full), mesh, (DATA_MODEL, None))
    w = torch.randn(5, 3)
    results = [t @ on_devices(w), t.softmax(0), t.mean(0), t.std(), t.cumsum(0)]
    expected = [full @ w, full.softmax(0), full.mean(0), full.std(), full.cumsum(0)]
    for ours, theirs in zip(results, expected, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, atol=1e-5, rtol=1e-5)
    t.mul_(2)
    xr.sync()
    assert t.sharding_spec == (None, None) and torch.equal(t.full_tensor(), full * 2)


def test_partial_replication_in_addmm_and_integers():
    mesh = mesh_2x2()
    x, w, b = torch.randn(4, 8), torch.randn(8, 6), torch.randn(6)
    marked = [
        xs.mark_sharding(on_devices(t), mesh, spec)
        for t, spec in ((x, ("data", None)), (w, (None, "model")), (b, ("model",)))
    ]
    torch.testing.assert_close(torch.addmm(marked[2], marked[0], marked[1]).cpu(), torch.addmm(b, x, w))
    for dtype in (torch.int64, torch.int32, torch.bool, torch.bfloat16):
        t = torch.arange(8).reshape(4, 2).to(dtype)
        sharded = xs.mark_sharding(on_devices(t), mesh, ("data", "model"))
        assert torch.equal(sharded.full_tensor(), t) and sharded.local_shards[3].data.dtype == dtype


def test_marks_on_values_that_are_not_computed_yet():
    mesh = mesh_2x2()
    x = on_devices(torch.randn(4, 4, 2))
    y = xs.mark_sharding(x * 2, mesh, ("data", None, None))
    pair = x.split(2, 1)
    xs.mark_sharding(pair[0], mesh, (None, "model", None))
    torch.testing.assert_close((y.sum() + pair[0].sum()).cpu(), (x.cpu() * 2).sum() + x.cpu()[:, :2].sum())
    assert y.sharding_spec == ("data", None, None)
    assert torch.equal(pair[1].cpu(), x.cpu()[:, 2:])


def test_gradients_flow_through_marks_and_get_the_layout():
    mesh, full = mesh_2x2(), torch.randn(4, 4)
    x = on_devices(full).requires_grad_()
    y = x * 2
    xs.mark_sharding(y, mesh, ("data", None))
    (y.sin()).sum().backward()
    torch.testing.assert_close(x.grad.cpu(), 2 * (2 * full).cos())

    x = on_devices(full).requires_grad_()
    z = xs.mark_sharding_with_gradients(x, mesh, (None, "model"))
    assert (
        z is not x and z.sharding_spec == (None, "model") and xs.wrap_if_sharded(x).local_shards[3].data.shape == (4, 4)
    )
    z.square().sum().backward()
    xr.sync()
    assert xs.sharding_of(x.grad).spec == (None, "model")
    torch.testing.assert_close(x.grad.cpu(), 2 * full)


def test_gradients_accumulate_over_steps():
    mesh, plain = mesh_2x2(), nn.Linear(6, 4)
    model = copy.deepcopy(plain)
    xs.mark_sharding(model.weight, mesh, ("data", "model"))
    xs.distribute_module(model, mesh)
    for _ in range(3):
        batch = torch.randn(4, 6)
        plain(batch).square().sum().backward()
        model(xs.mark_sharding(on_devices(batch), mesh, ("data", None))).square().sum().backward()
        xm.mark_step()
    torch.testing.assert_close(model.weight.grad.cpu(), plain.weight.grad, atol=1e-5, rtol=1e-5)


def test_two_trees_are_laid_out_alike():
    mesh, full = mesh_2x2(), torch.randn(4, 6)
    sharded = xs.mark_sharding(on_devices(full).requires_grad_(), mesh, ("data", None))
    plain = on_devices(full).requires_grad_()
    for a, b in ({"x": sharded}, {"x": plain}), ({"x": plain}, {"x": sharded}):
        one, other = xs.shard_as(a, b)
        assert xs.sharding_of(one["x"]).spec == xs.sharding_of(other["x"]).spec == ("data", None)
        (one["x"] * other["x"]).sum().backward()
    torch.testing.assert_close(plain.grad.cpu(), 2 * full)
    assert xs.shard_as(full, full)[0] is full
    with pytest.raises(LayoutError, match="different structures"):
        xs.shard_as([sharded], (sharded,))
    with pytest.raises(LayoutError, match=r"\(4, 6\) and \(6, 4\) cannot have the same layout"):
        xs.shard_as(sharded, full.T)


# --- manual sharding --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(8, 8), (7, 7)])
def test_manual_sharding_and_back(shape):
    mesh, full = mesh_2x2(), value(*shape)
    for spec in [("data", None), (DATA_MODEL, None), (None, "model"), ("data", "model")]:
        local = xs.enable_manual_sharding(on_devices(full), spec, mesh=mesh)
        assert tuple(local.shape) == xs.Layout.of(mesh, spec).shard_shape(shape)
        back = xs.disable_manual_sharding(local * 2, spec, shape, mesh=mesh)
        assert back.shape == shape and torch.equal(back.cpu(), 2 * full)
    with pytest.raises(LayoutError, match=r"the local tensor has shape \(3, 3\)"):
        xs.disable_manual_sharding(on_devices(value(3, 3)), ("data", None), shape, mesh=mesh)
    with pytest.raises(MeshError, match="no mesh"):
        xs.enable_manual_sharding(on_devices(full), ("data", None))
    xs.set_global_mesh(mesh)
    assert xs.enable_manual_sharding(on_devices(full), ("data", None)).shape[0] == -(-shape[0] // 2)


def test_linear_layers_that_keep_batch_dims_apart():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2, bias=False))
    model = copy.deepcopy(plain).to(xr.device())
    weight, layer = model[0].weight, model[0]
    assert xs.apply_xla_patch_to_nn_linear(model) is model and model[0] is layer and layer.weight is weight
    assert xs.apply_backward_optimization_barrier(model) is model
    x = torch.randn(2, 4, 6, requires_grad=True)
    ours = xs.mark_sharding(on_devices(x.detach()).requires_grad_(), mesh_2x2(), ("data", "model", None))
    for m, data in ((plain, x), (model, ours)):
        m(data).square().sum().backward()
    torch.testing.assert_close(ours.grad.cpu(), x.grad, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(weight.grad.cpu(), plain[0].weight.grad, atol=1e-5, rtol=1e-5)


# --- errors and drawings ----------------------------------------------------------------------------------------------


def test_every_error_of_a_mesh():
    for arguments, text in [
        (([0, 1, 2, 3], (2, 3)), "do not fit a mesh of shape"),
        (([0, 1, 2, 3], (2, 2), ("a",)), "give one name per axis"),
        (([0, 1, 2, 3], (2, 2), ("a", "a")), "must be unique"),
        (([0, 1, 1, 3], (2, 2)), "more than once"),
        (([0, 1, 2, 4], (2, 2)), "out of range: this job has 4 device.*CPU_NUM_DEVICES=5"),
        (([-1, 1, 2, 3], (2, 2)), "out of range"),
    ]:
        with pytest.raises(MeshError, match=text):
            xs.Mesh(*arguments)
    half = xs.Mesh([0, 1], (2,), ("data",))
    with pytest.raises(UnsupportedError, match=r"Mesh\(data=2\) has 2 of the job's 4 devices"):
        xs.mark_sharding(on_devices(value(4)), half, ("data",))
    with pytest.raises(RuntimeSetupError, match=r"Mesh.device_mesh is not available on the XLA engine"):
        _ = mesh_2x2().device_mesh
    hybrid = xs.HybridMesh(ici_mesh_shape=(1, 2), dcn_mesh_shape=(2, 1), axis_names=DATA_MODEL)
    assert hybrid.shape() == {"data": 2, "model": 2} and xs.get_1d_mesh().shape() == {0: 4}
    assert mesh_2x2() == mesh_2x2() != mesh_2x2([3, 2, 1, 0])


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (("data",), "has 1 entries and the tensor 2 dims"),
        (("data", "data"), "used more than once"),
        (("nothing", None), "no axis 'nothing'"),
        ((2, None), "index 2 is out of range"),
        ((-1, None), "out of range"),
        (((None, "data"), None), "None inside the tuple"),
        ((("data", ("model",)), None), "contains another tuple"),
    ],
)
def test_every_error_of_a_spec(spec, text):
    with pytest.raises(SpecError, match=text):
        xs.mark_sharding(on_devices(value(4, 4)), mesh_2x2(), spec)
    with pytest.raises(SpecError, match="axes have no names"):
        xs.mark_sharding(on_devices(value(4)), xs.Mesh(range(4), (4,)), ("data",))
    with pytest.raises(LayoutError, match="expected a tensor"):
        xs.mark_sharding([1], mesh_2x2(), ("data",))


def test_drawings_and_the_notation_are_those_of_the_compiler():
    for spec, shape in itertools.product([("data", None), (None, "model"), ("data", "model"), (None, None)], [(4, 4)]):
        t = xs.mark_sharding(on_devices(value(*shape)), mesh_2x2(), spec)
        assert xs.sharding_string(t) == annotation(t)
        console = Console(file=io.StringIO(), width=120)
        assert "4×4" in xs.visualize_tensor_sharding(t, console=console)
    assert xs.visualize_sharding("{devices=[2,2]0,1,2,3}", console=Console(file=io.StringIO()))
    with pytest.raises(LayoutError, match="no layout to draw"):
        xs.visualize_tensor_sharding(on_devices(value(2)))
