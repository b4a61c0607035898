"""Meshes: their shape, their devices, their errors."""

from collections import OrderedDict

import numpy as np
import pytest
import torch

import fullshard.spmd as xs
from fullshard.config.errors import MeshError, UnsupportedError, UserError
from tests.pool import ranks
from tests.spmd.orders import ANY_ORDER


@ranks(1)
def test_a_mesh_of_one_process_needs_no_launcher():
    mesh = xs.Mesh(np.arange(1), (1, 1), ("data", "model"))
    assert mesh.shape() == OrderedDict([("data", 1), ("model", 1)])
    assert mesh.size() == 1
    t = torch.randn(3, 2)
    xs.mark_sharding(t, mesh, ("data", "model"))
    assert t.local_shards[0].indices == (slice(0, 3), slice(0, 2))


@ranks(4)
def test_shape_names_and_order():
    mesh = xs.Mesh(np.arange(4), (2, 2), ("data", "model"))
    assert mesh.shape() == OrderedDict([("data", 2), ("model", 2)])
    assert mesh.size() == 4 and mesh.axis_names == ("data", "model")
    assert mesh.get_logical_mesh().tolist() == [[0, 1], [2, 3]]
    assert mesh.get_axis_name_idx("model") == 1 and mesh.get_axis_name_idx("fsdp") is None
    assert xs.Mesh([0, 1, 2, 3], [2, 2]).shape() == OrderedDict([(0, 2), (1, 2)])
    assert "data=2" in str(mesh) and "model=2" in repr(mesh)


@ranks(4)
def test_equal_meshes_are_one_mesh():
    one, other = (xs.Mesh(np.arange(4), (2, 2), ("data", "model")) for _ in range(2))
    assert one == other and hash(one) == hash(other)
    assert one.device_mesh is other.device_mesh
    assert one != xs.Mesh(np.arange(4), (2, 2), ("data", "fsdp"))
    assert one != xs.Mesh(np.arange(4), (4, 1), ("data", "model"))
    assert one != xs.Mesh([3, 2, 1, 0], (2, 2), ("data", "model"))
    assert one != "mesh"


@ranks(4)
def test_hybrid_mesh_by_position_and_keyword():
    positional = xs.HybridMesh((2, 1), (1, 2), ("data", "model"))
    keyword = xs.HybridMesh(ici_mesh_shape=(2, 1), dcn_mesh_shape=(1, 2), axis_names=("data", "model"))
    assert positional == keyword
    assert positional.shape() == OrderedDict([("data", 2), ("model", 2)])
    # Devices 0,1 share the fast network, as do 2,3: the slow one splits `model`.
    assert positional.get_logical_mesh().tolist() == [[0, 2], [1, 3]]
    assert xs.HybridMesh(ici_mesh_shape=(2, 2)).get_logical_mesh().tolist() == [[0, 1], [2, 3]]
    assert xs.HybridMesh((1, 2), (2, 1)).get_logical_mesh().tolist() == [[0, 1], [2, 3]]


@ranks(4)
def test_one_axis_and_the_global_mesh():
    assert xs.get_global_mesh() is None
    mesh = xs.get_1d_mesh("data")
    assert mesh.shape() == OrderedDict([("data", 4)])
    assert xs.get_1d_mesh().axis_names is None
    xs.set_global_mesh(mesh)
    try:
        assert xs.get_global_mesh() is mesh
    finally:
        xs.set_global_mesh(None)
    with pytest.raises(MeshError, match=r"takes a fullshard.spmd.Mesh, not int"):
        xs.set_global_mesh(3)


@ranks(4)
def test_groups_of_an_axis():
    mesh = xs.Mesh(np.arange(4), (2, 2), ("data", "model"))
    assert torch.distributed.get_process_group_ranks(mesh.get_group("model")) in ([0, 1], [2, 3])
    assert mesh.get_group(0).size() == 2
    with pytest.raises(MeshError, match=r"no axis 'fsdp'.*\['data', 'model'\]"):
        mesh.get_group("fsdp")


BAD_MESHES = {
    "ids and shape": (([0, 1, 2, 3], (2, 3)), r"4 device ids \[0, 1, 2, 3\].*\(2, 3\), which has 6 positions"),
    "too few ids": (([0, 1], (2, 2)), r"2 device ids \[0, 1\].*4 positions"),
    "names and axes": (([0, 1, 2, 3], (2, 2), ("data",)), r"1 axis names \('data',\) for a mesh of 2 axes"),
    "same name twice": (([0, 1, 2, 3], (2, 2), ("data", "data")), r"\('data', 'data'\) must be unique"),
    "empty name": (([0, 1, 2, 3], (2, 2), ("data", "")), r"not empty"),
    "one string as names": (([0, 1], (2, 1), "ab"), r"axis_names must be a sequence of names.*'ab'"),
    "names that are numbers": (([0, 1, 2, 3], (2, 2), (0, 1)), r"axis_names must be a sequence of names"),
    "same device twice": (([0, 1, 1, 3], (2, 2)), r"\[0, 1, 1, 3\] contain \[1\] more than once"),
    "device out of range": (
        ([0, 1, 2, 7], (2, 2)),
        r"device ids \[7\] are out of range.*4 device\(s\), numbered 0 to 3",
    ),
    "negative device": (([0, 1, 2, -1], (2, 2)), r"device ids \[-1\] are out of range"),
    "devices that are no numbers": ((["a", "b"], (2, 1)), r"device_ids must be integers"),
    "shape of nothing": (([], ()), r"at least one size.*got \(\)"),
    "axis of size zero": (([], (0,)), r"1 or more; got \(0,\)"),
    "fractional shape": (([0, 1], (2.5,)), r"an integer of 1 or more"),
    "shape that is no sequence": (([0], 1), r"mesh_shape must be a sequence of integers.*not 1"),
    "shape of words": (([0], ("a",)), r"mesh_shape must be a sequence of integers"),
}


@ranks(4)
@pytest.mark.parametrize("case", BAD_MESHES)
def test_each_bad_mesh_has_its_message(case):
    arguments, message = BAD_MESHES[case]
    with pytest.raises(MeshError, match=message) as caught:
        xs.Mesh(*arguments)
    assert isinstance(caught.value, UserError)


@ranks(4)
def test_hybrid_shapes_of_different_length():
    with pytest.raises(MeshError, match=r"ici_mesh_shape \(2, 2\) and dcn_mesh_shape \(1,\) differ in length"):
        xs.HybridMesh((2, 2), (1,))


@ranks(4)
def test_a_mesh_over_some_of_the_devices():
    mesh = xs.Mesh([1, 3], (2,), ("data",))
    t = torch.arange(6.0)
    sharded = xs.mark_sharding(t, mesh, ("data",))
    doubled = sharded * 2 + 1
    me = torch.distributed.get_rank()
    assert [s.indices for s in sharded.local_shards] == {1: [(slice(0, 3),)], 3: [(slice(3, 6),)]}.get(me, [])
    if me in (1, 3):
        assert torch.equal(doubled.full_tensor(), torch.arange(6.0) * 2 + 1)
    else:
        assert doubled.shape == (6,) and doubled.to_local().numel() == 0


@ranks(4)
def test_device_order_that_torch_cannot_keep_is_refused():
    mesh = xs.Mesh([3, 1, 0, 2], (4,), ("data",))
    t = torch.arange(8.0)
    if ANY_ORDER:
        assert torch.equal(xs.mark_sharding(t, mesh, ("data",)).full_tensor(), torch.arange(8.0))
    else:
        with pytest.raises(UnsupportedError, match=r"device order \[3, 1, 0, 2\]"):
            xs.mark_sharding(t, mesh, ("data",))
