"""Partition specs: what each device holds, and every way a spec can be wrong. Pure arithmetic: no ranks needed."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullshard.config.errors import SpecError
from fullshard.spmd import mesh as mesh_module
from fullshard.spmd.mesh import Mesh
from fullshard.spmd.spec import Layout


@pytest.fixture(autouse=True)
def many_devices(monkeypatch):
    """A mesh is checked against the devices there are; here any number is."""
    monkeypatch.setattr(mesh_module.runtime, "global_runtime_device_count", lambda: 64)


def four(ids=(0, 1, 2, 3)):
    return Mesh(ids, (2, 2), ("data", "model"))


def held(spec, shape, mesh):
    layout = Layout.of(mesh, spec, shape)
    return [tuple((cut.start, cut.stop) for cut in layout.slices(shape, device)) for device in range(mesh.size())]


# What PyTorch/XLA's partitioner gives on four devices (observed there, not derived here).
NAMES = ("data", "model")
FOUR = (range(4), (2, 2), NAMES)
GEOMETRY = {
    "one axis": (("data", None), (4, 2), FOUR, [((0, 2), (0, 2))] * 2 + [((2, 4), (0, 2))] * 2),
    "two axes": (("data", "model"), (2, 2), FOUR,
        [((0, 1), (0, 1)), ((0, 1), (1, 2)), ((1, 2), (0, 1)), ((1, 2), (1, 2))]),
    "axes swapped": (("model", "data"), (2, 2), FOUR,
        [((0, 1), (0, 1)), ((1, 2), (0, 1)), ((0, 1), (1, 2)), ((1, 2), (1, 2))]),
    "tuple": ((("data", "model"),), (4,), FOUR, [((0, 1),), ((1, 2),), ((2, 3),), ((3, 4),)]),
    "tuple, minor first": ((("model", "data"),), (4,), FOUR, [((0, 1),), ((2, 3),), ((1, 2),), ((3, 4),)]),
    "uneven tuple": ((("data", "model"),), (6,), FOUR, [((0, 2),), ((2, 4),), ((4, 6),), ((6, 6),)]),
    "size one over four": ((("data", "model"),), (1,), FOUR, [((0, 1),), ((1, 1),), ((1, 1),), ((1, 1),)]),
    "uneven axis": (("data",), (3,), FOUR, [((0, 2),), ((0, 2),), ((2, 3),), ((2, 3),)]),
    "reversed devices": (("data",), (4,), ((3, 2, 1, 0), (2, 2), NAMES),
        [((2, 4),), ((2, 4),), ((0, 2),), ((0, 2),)]),
    "shuffled devices": ((("data", "model"),), (4,), ((3, 1, 0, 2), (2, 2), NAMES),
        [((2, 3),), ((1, 2),), ((3, 4),), ((0, 1),)]),
    "axis of size one": ((1, 0), (4, 3), (range(4), (4, 1)),
        [((0, 4), (i, min(i + 1, 3))) for i in range(3)] + [((0, 4), (3, 3))]),
    "more dims than axes": ((None, "data", "model"), (2, 2, 2), FOUR,
        [((0, 2), (0, 1), (0, 1)), ((0, 2), (0, 1), (1, 2)), ((0, 2), (1, 2), (0, 1)), ((0, 2), (1, 2), (1, 2))]),
    "scalar": ((), (), FOUR, [()] * 4),
}  # fmt: skip


@pytest.mark.parametrize("case", GEOMETRY)
def test_geometry_is_that_of_xla(case):
    spec, shape, mesh, expected = GEOMETRY[case]
    assert held(spec, shape, Mesh(*mesh)) == expected


def test_replica_ids():
    mesh = four()
    assert [Layout.of(mesh, ("data", "model")).replica_id(d) for d in range(4)] == [0, 0, 0, 0]
    assert [Layout.of(mesh, ("data", None)).replica_id(d) for d in range(4)] == [0, 1, 0, 1]
    assert [Layout.of(mesh, (None, "model")).replica_id(d) for d in range(4)] == [0, 0, 1, 1]
    assert [Layout.of(mesh, (None, None)).replica_id(d) for d in range(4)] == [0, 1, 2, 3]


def test_spellings_of_one_spec():
    mesh = four()
    same = [
        ("data", None),
        ["data", None],
        (0, None),
        (np.int64(0), ()),
        (("data",), None),
        np.array([0, None], dtype=object),
    ]
    assert len({Layout.of(mesh, spec, (4, 4)) for spec in same}) == 1
    assert Layout.of(mesh, (["model", 0], None)).spec == (("model", "data"), None)


BAD_SPECS = {
    "too short": (("data",), (4, 4), r"1 entries and the tensor 2 dims"),
    "too long": (("data", None, None), (4, 4), r"3 entries and the tensor 2 dims"),
    "scalar with an axis": (("data",), (), r"1 entries and the tensor 0 dims"),
    "unknown name": (("fsdp", None), (4, 4), r"no axis 'fsdp'; its axes are \['data', 'model'\]"),
    "index out of range": ((2, None), (4, 4), r"axis index 2 is out of range; the mesh has axes 0 to 1"),
    "negative index": ((-1, None), (4, 4), r"axis index -1 is out of range"),
    "axis twice": (("data", "data"), (4, 4), r"axis 'data' is used more than once"),
    "axis twice in a tuple": ((("model", "model"), None), (4, 4), r"axis 'model' is used more than once"),
    "axis alone and in a tuple": (("data", ("model", 0)), (4, 4), r"axis 'data' is used more than once"),
    "nested tuple": ((("data", ("model",)), None), (4, 4), r"contains another tuple"),
    "None in a tuple": ((("data", None), None), (4, 4), r"None inside the tuple"),
    "one string": ("data", (4,), r"a spec is a tuple"),
    "no sequence": (3, (4,), r"a spec is a tuple"),
    "nothing": (None, (4,), r"a spec is a tuple"),
    "a float": ((0.5, None), (4, 4), r"entry 0.5 is a float"),
    "a truth value": ((True, None), (4, 4), r"entry True is a bool"),
    "a dict": (({}, None), (4, 4), r"entry {} is a dict"),
}


@pytest.mark.parametrize("case", BAD_SPECS)
def test_each_bad_spec_has_its_message(case):
    spec, shape, message = BAD_SPECS[case]
    with pytest.raises(SpecError, match=message) as caught:
        Layout.of(four(), spec, shape)
    assert repr(spec) in str(caught.value) and str(tuple(shape)) in str(caught.value) and "data=2" in str(caught.value)


def test_names_on_a_mesh_without_names():
    with pytest.raises(
        SpecError, match=r"axis name 'data' on a mesh whose axes have no names; use an index from 0 to 1"
    ):
        Layout.of(Mesh(range(4), (2, 2)), ("data", None), (4, 4))


def test_something_else_than_a_mesh():
    with pytest.raises(SpecError, match=r"expected a fullshard.spmd.Mesh, got list"):
        Layout.of([0, 1], ("data",), (4,))


@st.composite
def layouts(draw):
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    ids = draw(st.permutations(range(math.prod(sizes))))
    shape = draw(st.lists(st.integers(0, 9), min_size=0, max_size=3))
    axes = draw(st.permutations(range(len(sizes))))
    dims = [[] for _ in shape]
    for axis in axes:
        place = draw(st.integers(-1, len(shape) - 1))
        if place >= 0:
            dims[place].append(axis)
    return Mesh(ids, sizes), tuple(map(tuple, dims)), tuple(shape)


@given(layouts())
def test_pieces_tile_the_tensor(drawn):
    mesh, spec, shape = drawn
    layout = Layout.of(mesh, spec, shape)
    times = np.zeros(shape, dtype=int)
    copies = mesh.size() // math.prod(layout.parts(dim) for dim in range(len(shape)))
    seen = {}
    for device in range(mesh.size()):
        where = layout.slices(shape, device)
        times[where] += 1
        seen.setdefault(tuple((c.start, c.stop) for c in where), []).append(layout.replica_id(device))
        piece = tuple(c.stop - c.start for c in where)
        assert all(size <= full for size, full in zip(piece, layout.shard_shape(shape), strict=True))
        assert not layout.is_even(shape) or piece == layout.shard_shape(shape)
    assert (times == copies).all()
    for ids in seen.values():
        assert len(ids) % copies == 0 and sorted(set(ids)) == list(range(copies))
