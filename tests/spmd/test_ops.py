"""Operators on sharded tensors equal the same operators on one device, whatever the shapes, meshes and specs."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import fullshard.spmd as xs
from fullshard.config.errors import LayoutError
from fullshard.distributed import runtime
from tests.pairwise import thinned
from tests.pool import ranks
from tests.spmd.orders import ANY_ORDER, keepable

MESHES = [
    ((4,), (0, 1, 2, 3)),
    ((2, 2), (0, 1, 2, 3)),
    ((4, 1), (0, 1, 2, 3)),
    ((2, 2), (2, 0, 3, 1)),
    ((1, 2, 2), (0, 1, 2, 3)),
]


def square() -> xs.Mesh:
    return xs.Mesh(np.arange(4), (2, 2), ("data", "model"))


@st.composite
def specs(draw, mesh_shape, rank):
    dims = [[] for _ in range(rank)]
    for axis in draw(st.permutations(range(len(mesh_shape)))) if ANY_ORDER else range(len(mesh_shape)):
        place = draw(st.integers(-1, rank - 1))
        if place >= 0:
            dims[place].append(axis)
    return tuple(map(tuple, dims))


@st.composite
def problems(draw):
    """A mesh, and tensors of fitting shapes with a layout each."""
    mesh_shape, ids = draw(st.sampled_from([m for m in MESHES if ANY_ORDER or sorted(m[1]) == list(m[1])]))
    rows, inner, columns = (draw(st.integers(1, 9)) for _ in range(3))
    shapes = {"x": (rows, inner), "y": (rows, inner), "w": (inner, columns), "v": (inner,), "t": (rows,)}
    return mesh_shape, ids, shapes, {name: draw(specs(mesh_shape, len(shape))) for name, shape in shapes.items()}


def build(problem):
    """The tensors of a problem, plain and sharded, each pair with the same values."""
    mesh_shape, ids, shapes, layouts = problem
    mesh = xs.Mesh(ids, mesh_shape)
    generator = torch.Generator().manual_seed(math.prod(map(sum, shapes.values())))
    plain, sharded = {}, {}
    for name, shape in shapes.items():
        value = torch.randn(shape, generator=generator, dtype=torch.float64)
        if name == "t":
            value = torch.randint(0, shapes["x"][1], shape, generator=generator)
        plain[name] = value.clone().requires_grad_(value.is_floating_point())
        sharded[name] = xs.mark_sharding(value.clone().requires_grad_(value.is_floating_point()), mesh, layouts[name])
    return plain, sharded


PROGRAMS = {
    "elementwise": lambda x, y, w, v, t: torch.sigmoid(x) * y + v - x / (y.square() + 1),
    "matmul": lambda x, y, w, v, t: (x @ w).tanh() @ w.T,
    "linear": lambda x, y, w, v, t: F.linear(x, w.T.contiguous(), None) * 2,
    "softmax": lambda x, y, w, v, t: x.softmax(-1) + y.log_softmax(0),
    "layer norm": lambda x, y, w, v, t: F.layer_norm(x, (x.shape[1],), v, v * 2),
    "embedding": lambda x, y, w, v, t: F.embedding(t, w),
    "cross-entropy": lambda x, y, w, v, t: F.cross_entropy(x, t),
    "masked cross-entropy": lambda x, y, w, v, t: F.cross_entropy(x, torch.where(t == 0, -100, t), reduction="sum"),
    "means": lambda x, y, w, v, t: x.mean(0) * y.mean() + x.mean((0, 1)) + x.sum(0),
    "extremes": lambda x, y, w, v, t: x.amax(0) + x.max(1).values.sum() + y.min(),
    "shapes": lambda x, y, w, v, t: torch.cat([x.reshape(-1), y.T.flatten(), v]).view(-1, 1).squeeze(-1).unsqueeze(0),
    "slices": lambda x, y, w, v, t: x[1:].sum() + y[:, :1] * x[0] + torch.stack([x, y], 1)[:, 0],
    "statistics": lambda x, y, w, v, t: x.var() + y.norm(dim=0) + x.cumsum(0) + x.std(1, keepdim=True, correction=0),
    "selection": lambda x, y, w, v, t: (
        x.gather(1, t[:, None]) + torch.where(x > 0, x, y).tril() + x[t.clamp(max=len(x) - 1)]),
}  # fmt: skip


@ranks(4)
@pytest.mark.parametrize(
    "program", thinned(["matmul", "softmax", "layer norm", "embedding", "cross-entropy", "means", "slices"], 2)
)
@settings(max_examples=3)
@given(problem=problems())
def test_programs_equal_one_device(program, problem):
    _equal_one_device(program, problem)


@ranks(4, timeout=300)
@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
@settings(max_examples=40)
@given(problem=problems())
def test_programs_equal_one_device_on_many_layouts(program, problem):
    _equal_one_device(program, problem)


def _equal_one_device(program, problem):
    plain, sharded = build(problem)
    run = PROGRAMS[program]
    expected, got = run(**plain), run(**sharded)
    torch.testing.assert_close(got.full_tensor(), expected, rtol=1e-10, atol=1e-10, equal_nan=True)
    for result in (expected, got):
        result.sin().sum().backward()
    for name, tensor in plain.items():
        if tensor.requires_grad and tensor.grad is not None:
            gradient = sharded[name].grad
            torch.testing.assert_close(gradient.full_tensor(), tensor.grad, rtol=1e-9, atol=1e-9, equal_nan=True)


@ranks(4, timeout=120)
@settings(max_examples=15)
@given(problem=problems())
def test_gathering_gives_back_every_bit(problem):
    plain, sharded = build(problem)
    for name, tensor in plain.items():
        assert torch.equal(sharded[name].full_tensor(), tensor)
        (mine,) = sharded[name].local_shards
        assert torch.equal(mine.data, tensor[mine.indices])


@ranks(4)
def test_an_operator_without_a_rule_warns_once_and_is_exact():
    runtime.forget_warnings()
    value = torch.randn(4, 4, dtype=torch.float64)
    expected = value.clone().requires_grad_()
    got = value.clone().requires_grad_()
    xs.mark_sharding(got, square(), ("data", "model"))
    for t in (expected, got):
        for _ in range(2):
            torch.renorm(t, 2, 0, 1.0).sum().backward()
    torch.testing.assert_close(got.grad.full_tensor(), expected.grad)
    warned = [key for key in runtime.warned() if "renorm" in key]
    assert warned == ["fallback aten.renorm.default"]


@ranks(4)
def test_a_mistake_raises_what_one_device_raises_on_every_rank():
    x = xs.mark_sharding(torch.randn(4, 6), square(), ("data", None))
    with pytest.raises(RuntimeError, match=r"shapes cannot be multiplied|mat1 and mat2|size mismatch"):
        x @ torch.randn(5, 3)
    assert torch.equal((x * 0).full_tensor(), torch.zeros(4, 6))  # and the ranks are still in step


@ranks(4)
def test_random_numbers_are_those_of_one_device():
    for layout in keepable([("data", "model"), (("model", "data"), None), (None, None)]):
        for draw in (
            lambda t: t.uniform_(),
            lambda t: t.normal_(),
            lambda t: F.dropout(t, 0.4),
            lambda t: torch.rand_like(t),
            lambda t: torch.bernoulli(t.abs().clamp(max=1)),
            torch.nn.init.trunc_normal_,
        ):
            value = torch.randn(6, 5)
            sharded = xs.mark_sharding(value.clone(), square(), layout)
            torch.manual_seed(5)
            expected = draw(value.clone())
            torch.manual_seed(5)
            got = draw(sharded)
            assert torch.equal(got.full_tensor(), expected)
            _assert_generators_agree()


def _assert_generators_agree():
    state = torch.get_rng_state()
    gathered = [torch.empty_like(state) for _ in range(4)]
    torch.distributed.all_gather(gathered, state)
    assert all(torch.equal(state, other) for other in gathered)


WRITES = {
    "row": lambda t: t.__setitem__(0, 5.0),
    "negative row": lambda t: t.__setitem__(-1, torch.arange(6.0)),
    "slice": lambda t: t.__setitem__(slice(1, 4), 2.0),
    "columns": lambda t: t.__setitem__((slice(None), slice(2, 5)), -1.0),
    "cell": lambda t: t.__setitem__((3, 2), 9.0),
    "mask": lambda t: t.__setitem__(t > 0, 0.0),
    "index": lambda t: t.__setitem__(torch.tensor([0, 2]), 7.0),
    "view": lambda t: t.view(-1).mul_(3),
    "view of a row": lambda t: t[1].unsqueeze(0).add_(1),
    "narrow": lambda t: t.narrow(0, 1, 3).fill_(4.0),
    "in place": lambda t: t.add_(1).clamp_(max=1).mul_(torch.arange(6.0)),
    "fill diagonal": lambda t: t.fill_diagonal_(8.0),
    "index_add": lambda t: t.index_add_(0, torch.tensor([1, 1]), torch.ones(2, 6)),
    "transposed": lambda t: t.t().mul_(2),
    "diagonal": lambda t: t.diagonal().add_(1),
    "chunk": lambda t: t.chunk(2)[1].mul_(3),
    "columns of a split": lambda t: t.split([1, 3, 2], 1)[1].zero_(),
    "one of all rows": lambda t: t.unbind(0)[2].fill_(9.0),
    "permuted": lambda t: t.permute(1, 0)[2].mul_(0),
    "every other row": lambda t: t[::2].mul_(2),
}


@ranks(4)
@pytest.mark.parametrize("write", thinned(WRITES))
def test_writes_into_views_reach_the_tensor(write):
    for rows in (4, 5):
        for layout in keepable(
            [("data", "model"), (("model", "data"), None), (None, ("data", "model")), ("model", None)]
        ):
            value = torch.randn(rows, 6)
            sharded = xs.mark_sharding(value.clone(), square(), layout)
            WRITES[write](value)
            WRITES[write](sharded)
            assert torch.equal(sharded.full_tensor(), value), (rows, layout)


@ranks(4)
def test_merging_a_split_dim_into_one_before_it():
    value = torch.arange(8.0).reshape(2, 4)
    merged = xs.mark_sharding(value.clone(), square(), (None, "data")).reshape(8)
    assert torch.equal(merged.full_tensor(), value.reshape(8))
    assert torch.equal(merged.local_shards[0].data, value.reshape(8)[merged.local_shards[0].indices])
    both = torch.stack([merged, xs.mark_sharding(torch.ones(8), square(), ("data",))])
    assert torch.equal(both.full_tensor(), torch.stack([value.reshape(8), torch.ones(8)]))


@ranks(4)
def test_writes_into_a_pending_sum():
    value = torch.randn(4, 6, dtype=torch.float64)
    pending = xs.mark_sharding(value.clone(), square(), ("data", None)).sum(0)
    assert any(p.is_partial() for p in pending.placements)
    assert torch.equal(torch.ones_like(pending).full_tensor(), torch.ones(6, dtype=torch.float64))
    torch.testing.assert_close(pending.clone().add_(1).full_tensor(), value.sum(0) + 1)
    torch.testing.assert_close(pending.clone().clamp_(min=0).full_tensor(), value.sum(0).clamp(min=0))
    pending[0] = 3.0
    assert pending.full_tensor()[0] == 3.0


@ranks(4)
def test_terms_of_a_pending_sum_are_not_rounded_divided_by_zero_or_cast_one_by_one():
    value = torch.randn(7, 6) * 1000
    for run in (
        lambda t: t.half() * t.sum(0),
        lambda t: t.sum(0) / 0,
        lambda t: t.sum(0) / torch.zeros(6),
        lambda t: t.sum(0).div(torch.tensor(3.0)),
        lambda t: t.sum(0).bfloat16(),
        lambda t: (t.sum(0) * 0.1).int(),
        lambda t: t.sum(0).to(torch.bool),
    ):
        expected = run(value)
        for layout in keepable([("data", "model"), (("model", "data"), None)]):
            got = run(xs.mark_sharding(value.clone(), square(), layout)).full_tensor()
            torch.testing.assert_close(got, expected, rtol=1e-2 if got.dtype == torch.bfloat16 else 1e-3, atol=1e-3)


@ranks(4)
def test_gradients_of_a_write_through_a_mask():
    value = torch.randn(7, 6)
    for layout in keepable([("data", None), (None, "data"), ("model", "data"), (("model", "data"), None)]):
        results = []
        for t in (value.clone(), xs.mark_sharding(value.clone(), square(), layout)):
            t = t.detach().requires_grad_()
            changed = t * 2
            changed[t.detach() > 0] = 0.0
            changed[torch.arange(7) % 2 == 0] *= 3
            (changed * torch.arange(6.0)).sum().backward()
            results += [changed, t.grad]
        for got, expected in zip(results[2:], results[:2], strict=True):
            torch.testing.assert_close(got.full_tensor(), expected)


@ranks(4)
def test_a_tensor_reshaped_in_place():
    for layout in keepable([("data", None, "model"), (("model", "data"), None, None), (None, None, None)]):
        value = torch.randn(4, 1, 6)
        sharded = xs.mark_sharding(value.clone(), square(), layout)
        for t in (value, sharded):
            t.squeeze_(1).t_().unsqueeze_(0)
        assert sharded.shape == (1, 6, 4)
        assert torch.equal((sharded * 2).full_tensor(), value * 2)


@ranks(4)
def test_a_write_that_cannot_reach_its_tensor_is_refused():
    t = xs.mark_sharding(torch.randn(3, 4), square(), (("data", "model"), None))
    view = t.unfold(0, 2, 1)
    with pytest.raises(LayoutError, match=r"a write to a view made by aten.unfold.*\(3, 4\)"):
        view.zero_()


@ranks(4)
def test_lists_of_plain_and_sharded_tensors():
    values = [torch.randn(4, 4), torch.randn(3), torch.randn(8)]
    mixed = [v.clone() for v in values]
    xs.mark_sharding(mixed[0], square(), ("data", "model"))
    xs.mark_sharding(mixed[2], square(), (("model", "data") if ANY_ORDER else "data",))
    torch._foreach_mul_(mixed, 2.0)
    for v, m in zip(values, torch._foreach_add(mixed, 1.0), strict=True):
        full = m.full_tensor() if hasattr(m, "full_tensor") else m
        assert torch.equal(full, v * 2 + 1)
    grads = [torch.ones_like(m) for m in mixed]
    for m, g in zip(mixed, grads, strict=True):
        m.requires_grad_().grad = g
    norm = torch.nn.utils.clip_grad_norm_(mixed, 1.0)
    full = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    torch.testing.assert_close(full, torch.tensor(27.0).sqrt())
