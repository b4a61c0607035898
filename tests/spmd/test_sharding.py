"""Marking tensors: in place, again, with gradients, by hand; what each rank then holds."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import fullshard.spmd as xs
from fullshard.config.errors import LayoutError, MeshError
from fullshard.distributed import runtime
from fullshard.spmd.spec import Layout
from tests.pool import ranks
from tests.spmd.orders import ANY_ORDER, keepable, needs_any_order


def square() -> xs.Mesh:
    return xs.Mesh(np.arange(4), (2, 2), ("data", "model"))


SPECS = keepable([
    ("data", "model"), ("model", "data"), ("data", None), (None, "model"), (None, None),
    (("data", "model"), None), (("model", "data"), None), (None, ("model", "data")), ((), "data"),
])  # fmt: skip


@ranks(4)
@pytest.mark.parametrize("shape", [(8, 4), (6, 7), (1, 3), (5, 2)], ids=str)
def test_a_discarded_result_leaves_the_tensor_sharded(shape):
    value = torch.randn(shape)
    for spec in SPECS:
        t = value.clone()
        returned = xs.mark_sharding(t, square(), spec)
        assert isinstance(returned, xs.ShardedTensor) and isinstance(t, xs.ShardedTensor)
        assert isinstance(t, DTensor) or torch.__version__ < "2.12"
        assert t.shape == shape and t.sharding_spec == returned.sharding_spec
        layout = Layout.of(square(), spec, shape)
        (mine,) = t.local_shards
        assert mine.indices == layout.slices(shape, runtime.rank())
        assert torch.equal(mine.data, value[mine.indices])
        assert mine.replica_id == layout.replica_id(runtime.rank())
        assert torch.equal(t.full_tensor(), value)
        assert torch.equal(t.to_local(), value[mine.indices])


@ranks(4)
def test_marking_again_lays_out_anew():
    value = torch.randn(6, 7)
    t = value.clone()
    for spec in [*SPECS, *reversed(SPECS)]:
        xs.mark_sharding(t, square(), spec)
        assert t.sharding_spec == tuple(entry or None for entry in spec)
        assert torch.equal(t.full_tensor(), value)
    same = t.to_local().data_ptr()
    xs.mark_sharding(t, square(), t.sharding_spec)
    assert t.to_local().data_ptr() == same  # the layout it has: nothing moves


@needs_any_order
@ranks(4)
@pytest.mark.parametrize("ids", [(3, 2, 1, 0), (3, 1, 0, 2), (1, 0, 3, 2)], ids=str)
def test_reordered_devices(ids):
    mesh = xs.Mesh(ids, (2, 2), ("data", "model"))
    value = torch.randn(8, 6)
    for spec in SPECS:
        t = value.clone()
        xs.mark_sharding(t, mesh, spec)
        assert torch.equal(t.local_shards[0].data, value[Layout.of(mesh, spec).slices(value.shape, runtime.rank())])
        assert torch.equal(t.full_tensor(), value)
        assert torch.allclose((t @ t.T).full_tensor(), value @ value.T, atol=1e-5)


@ranks(4)
def test_a_marked_tensor_is_used_like_any_other():
    value = torch.randn(8, 4)
    t = value.clone()
    xs.mark_sharding(t, square(), ("data", "model"))
    plain = torch.randn(8, 4)
    assert torch.allclose((t + plain).full_tensor(), value + plain)
    assert torch.allclose((plain - t).full_tensor(), plain - value)
    assert torch.allclose(torch.cat([t, plain]).full_tensor(), torch.cat([value, plain]))
    t += 1
    assert isinstance(t, xs.ShardedTensor) and torch.equal(t.full_tensor(), value + 1)
    assert len(t) == 8 and t.ndim == 2 and t.numel() == 32 and t.dtype == torch.float32
    assert t.sum().item() == pytest.approx((value + 1).sum().item(), abs=1e-4)
    for copied in (copy.deepcopy(t), t.clone(), t.detach()):
        assert copied.sharding_spec == ("data", "model") and torch.equal(copied.full_tensor(), value + 1)
    assert "ShardedTensor" in repr(t) and "'data', 'model'" in repr(t)
    plain.add_(t)  # a plain tensor is a global value: it takes the whole
    assert type(plain) is torch.Tensor
    nothing = torch.zeros(8, 4)
    nothing.copy_(t)
    assert torch.equal(nothing, value + 1)


@ranks(4)
def test_a_marked_leaf_trains():
    value = torch.randn(8, 4)
    reference = value.clone().requires_grad_()
    weight = value.clone().requires_grad_()
    xs.mark_sharding(weight, square(), ("data", "model"))
    assert weight.is_leaf and weight.requires_grad
    x = torch.randn(3, 8)
    for w in (reference, weight):
        optimizer = torch.optim.AdamW([w], lr=0.1)
        for _ in range(3):
            (x @ w).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert weight.sharding_spec == ("data", "model")
    torch.testing.assert_close(weight.full_tensor(), reference)


@ranks(4)
def test_gradients_pass_through_marks():
    value, scale = torch.randn(6, 4), torch.randn(6, 4)
    for mark in (xs.mark_sharding, xs.mark_sharding_with_gradients):
        gradients = []
        for sharded in (False, True):
            leaf = value.clone().requires_grad_()
            hidden = leaf * 2
            if sharded:
                hidden = mark(hidden, square(), ("data", None))
                hidden = mark(hidden * 1, square(), SPECS[-3])
            (hidden * scale).square().sum().backward()
            gradients.append(leaf.grad)
        assert type(gradients[1]) is torch.Tensor
        torch.testing.assert_close(gradients[1], gradients[0])


@ranks(4)
def test_with_gradients_gives_the_gradient_the_layout():
    t = torch.randn(8, 4).requires_grad_()
    xs.mark_sharding(t, square(), (None, None))
    seen = []
    marked = xs.mark_sharding_with_gradients(t, square(), ("data", "model"))
    assert marked is not t and t.sharding_spec == (None, None)
    marked.register_hook(lambda grad: seen.append(grad.sharding_spec))
    inner = marked * 3
    inner.sum().backward()
    assert t.grad.sharding_spec == ("data", "model")
    assert torch.equal(t.grad.full_tensor(), torch.full((8, 4), 3.0))


@ranks(4)
def test_clearing_and_marking_again():
    value = torch.randn(8, 4)
    t = value.clone()
    xs.mark_sharding(t, square(), ("data", None))
    assert xs.clear_sharding(t) is t and type(t) is torch.Tensor and torch.equal(t, value)
    xs.mark_sharding(t, square(), (None, "model"))
    assert t.sharding_spec == (None, "model")
    sharded = xs.mark_sharding(value.clone(), square(), ("data", None))
    xs.clear_sharding(sharded)
    assert sharded.sharding_spec == (None, None) and torch.equal(sharded.full_tensor(), value)
    parameter = nn.Parameter(value.clone())
    xs.mark_sharding(parameter, square(), ("data", None))
    assert xs.sharding_of(parameter).spec == ("data", None)
    assert xs.sharding_of(xs.clear_sharding(parameter)) is None
    xs.clear_sharding(value)  # nothing to clear


@ranks(4)
def test_local_shards_are_loaded_back():
    t = torch.zeros(6, 4)
    xs.mark_sharding(t, square(), ("data", "model"))
    value = torch.randn(6, 4)
    (mine,) = t.local_shards
    t.load_local_shards_([value[mine.indices]])
    assert torch.equal(t.full_tensor(), value)
    t.load_local_shards_(t.local_shards)
    with pytest.raises(LayoutError, match=r"shape \(9, 9\).*shard of the \(6, 4\).*shape \(3, 2\)"):
        t.load_local_shards_([torch.zeros(9, 9)])
    with pytest.raises(LayoutError, match=r"2 shard\(s\) given; this process holds 1"):
        t.load_local_shards_([mine, mine])
    pending = t.sum(0)
    with pytest.raises(LayoutError, match="sum over ranks"):
        pending.load_local_shards_(pending.local_shards)


@ranks(4)
def test_local_shards_are_copies_that_may_be_changed():
    value = torch.randn(6, 4)
    for t in (xs.mark_sharding(value.clone(), square(), ("data", "model")), value.clone()):
        xs.mark_sharding(t, square(), ("data", "model"))
        shards = t.local_shards
        for shard in shards:
            shard.data *= -1
            assert torch.equal(t.full_tensor(), value)
            shard.data = shard.data * 2
        t.load_local_shards_(shards)
        assert torch.equal(t.full_tensor(), value * -2)


@ranks(4)
def test_copies_of_a_piece_are_loaded_with_one_value():
    me, value = runtime.rank(), torch.randn(6, 4)
    for spec in ((None, None), ("data", None), (None, "model")):
        t = xs.mark_sharding(value.clone(), square(), spec)
        (mine,) = t.local_shards
        t.load_local_shards_([mine.data * 2])
        assert torch.equal(t.full_tensor(), value * 2)
        for odd in (mine.data * (2 if me == 3 else 3), torch.zeros(9) if me == 1 else mine.data):
            with pytest.raises(LayoutError, match=r"on several ranks, and they were given different data|shape \(9,"):
                t.load_local_shards_([odd])
            assert torch.equal(t.full_tensor(), value * 2)  # on every rank


@ranks(4)
def test_manual_view_there_and_back():
    mesh = xs.get_1d_mesh("data")
    value = torch.randn(7, 7)
    leaf = value.clone().requires_grad_()
    local = xs.enable_manual_sharding(leaf, ("data", None), mesh=mesh)
    assert type(local) is torch.Tensor and local.shape == (2, 7)  # padded: 2, 2, 2, 1 rows
    back = xs.disable_manual_sharding(local * 2, ("data", None), value.shape, mesh=mesh)
    assert back.sharding_spec == ("data", None) and torch.equal(back.full_tensor(), value * 2)
    back.square().sum().backward()
    torch.testing.assert_close(leaf.grad, 8 * value)
    xs.set_global_mesh(mesh)
    try:
        assert xs.enable_manual_sharding(value, (None, "data")).shape == (7, 2)
    finally:
        xs.set_global_mesh(None)
    with pytest.raises(MeshError, match="no mesh"):
        xs.enable_manual_sharding(value, ("data", None))
    with pytest.raises(LayoutError, match=r"shape \(3, 7\).*has shape \(2, 7\)"):
        xs.disable_manual_sharding(torch.zeros(3, 7), ("data", None), (7, 7), mesh=mesh)


@ranks(4)
def test_what_is_no_tensor_is_refused():
    with pytest.raises(LayoutError, match="expected a tensor, got list"):
        xs.mark_sharding([1, 2], square(), ("data",))


@ranks(4)
def test_scalars_and_empty_tensors():
    t = torch.tensor(3.0)
    xs.mark_sharding(t, square(), ())
    assert (t * 2).item() == 6.0 and float(t) == 3.0
    empty = torch.zeros(0, 4)
    xs.mark_sharding(empty, square(), ("data", "model"))
    assert empty.full_tensor().shape == (0, 4) and (empty + 1).sum().item() == 0


@ranks(4)
def test_values_that_differ_between_ranks_are_found_on_request():
    xs.check_global_values()
    try:
        xs.mark_sharding(torch.ones(4), square(), ("data",))
        with pytest.raises(LayoutError, match=r"shape \(4,\).*rank\(s\) \[1, 2, 3\]"):
            xs.mark_sharding(torch.full((4,), float(runtime.rank())), square(), ("data",))
        sharded = xs.mark_sharding(torch.ones(4), square(), ("data",))
        with pytest.raises(LayoutError, match=r"rank\(s\) \[2, 3\]"):
            sharded + torch.full((4,), float(runtime.rank() // 2))
    finally:
        xs.check_global_values(False)


@ranks(4)
def test_tensors_of_two_meshes_meet():
    value = torch.randn(8, 6)
    one = xs.mark_sharding(value.clone(), square(), ("data", "model"))
    flat = xs.mark_sharding(value.clone(), xs.get_1d_mesh("all"), ("all", None))
    reordered = xs.mark_sharding(value.clone(), square(), (("model", "data") if ANY_ORDER else ("data", "model"), None))
    for other in (flat, reordered):
        assert torch.equal((one + other).full_tensor(), value + value)
        assert torch.allclose((other @ one.T).full_tensor(), value @ value.T, atol=1e-5)
    part = xs.mark_sharding(value.clone(), xs.Mesh([0, 1], (2,), ("half",)), ("half", None))
    with pytest.raises(
        LayoutError, match=r"devices \[0, 1, 2, 3\].*\[0, 1\].*same devices|devices \[0, 1\].*same devices"
    ):
        one + part
