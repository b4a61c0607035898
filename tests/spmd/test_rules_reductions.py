"""Reductions over split dims equal one device where types are narrow, values are NaN and pieces are empty."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import fullshard.spmd as xs
from tests.pairwise import thinned
from tests.pool import ranks
from tests.spmd.orders import keepable

LAYOUTS = [("data", "model"), (("model", "data"), None), (None, ("data", "model")), ("model", None)]


def square() -> xs.Mesh:
    return xs.Mesh(np.arange(4), (2, 2), ("data", "model"))


def whole(t):
    return t.full_tensor() if isinstance(t, xs.ShardedTensor) else t


def compare(run, value, **tolerance):
    expected = run(value.clone())
    for layout in keepable(LAYOUTS):
        got = whole(run(xs.mark_sharding(value.clone(), square(), layout)))
        assert got.dtype == expected.dtype
        torch.testing.assert_close(got, expected, equal_nan=True, msg=lambda m, at=layout: f"{at}: {m}", **tolerance)


def gradient_of(run):
    def gradient(t):
        t = t.detach().requires_grad_()
        run(t).sum().backward()
        return t.grad

    return gradient


SUMS = {
    "sum": lambda t: (t / 100).sum(0),
    "mean": lambda t: t.mean(),
    "mean of a dim": lambda t: t.mean(0),
    "norm": lambda t: t.norm(),
    "norm of a dim": lambda t: t.norm(dim=0),
    "norm 3": lambda t: torch.linalg.vector_norm(t, 3),
    "list of norms": lambda t: torch._foreach_norm([t])[0],
    "distance": lambda t: torch.dist(t, t * 0),
    "variance": lambda t: torch.var_mean(t, 0)[0],
    "normalize": lambda t: F.normalize(t, dim=0),
    "cosine": lambda t: F.cosine_similarity(t, t.flip(0), dim=0),
    "absolute loss": lambda t: F.l1_loss(t, torch.zeros_like(t)),
    "cross-entropy": lambda t: F.cross_entropy(t, torch.arange(len(t)) % t.shape[1]),
    "weighted cross-entropy": lambda t: F.cross_entropy(
        t, torch.where(torch.arange(len(t)) % 3 == 0, -100, 1), weight=torch.linspace(0, 1, t.shape[1]).to(t.dtype)),
    "gradient of the mean": gradient_of(lambda t: t.mean()),
    "gradient of the norm": gradient_of(lambda t: t.norm()),
    "summed once cast": lambda t: (t.float() * 50).sum(0).sub(1.8e6).to(t.dtype),
}  # fmt: skip


@pytest.mark.slow
@ranks(4)
@pytest.mark.parametrize("run", thinned(SUMS))
def test_sums_in_narrow_types(run):
    for dtype in (torch.float16, torch.bfloat16):
        value = (torch.rand(62, 41) * 500 + 500).to(dtype)  # their squares and their sum overflow in fp16
        eps = torch.finfo(dtype).eps
        compare(SUMS[run], value, rtol=2 * eps, atol=eps)


@ranks(4)
def test_terms_of_a_pending_product_in_fp16_meet_in_fp32():
    value = torch.ones(4, 8).half()
    value[:2] *= 200  # terms of 40,000 each: two overflow, all four do not
    value[2:] *= -200
    other = torch.full((4, 8), 200.0).half()
    sharded = xs.mark_sharding(value.clone(), square(), (("data", "model"), None))
    torch.testing.assert_close(whole(sharded.T @ other), value.T @ other)


EXTREMES = {
    "amax": lambda t: t.amax(0),
    "amax of all": lambda t: t.amax(),
    "amin, dim kept": lambda t: t.amin((0, 1), keepdim=True),
    "max": lambda t: t.max(),
    "min": lambda t: t.min(),
    "max of a dim": lambda t: t.max(0).values,
    "aminmax": lambda t: torch.stack(list(torch.aminmax(t, dim=0))),
    "largest norm": lambda t: torch.linalg.vector_norm(t, math.inf),
    "smallest norm": lambda t: torch.linalg.vector_norm(t, -math.inf, dim=0),
    "list of largest norms": lambda t: torch._foreach_norm([t], math.inf)[0],
    "list of maxima": lambda t: torch._foreach_max([t])[0],
    "logsumexp": lambda t: t.logsumexp(0),
    "argmax": lambda t: t.argmax(0),
    "gradient of amax": gradient_of(lambda t: t.amax()),
    "gradient of min": gradient_of(lambda t: t.min()),
}


@pytest.mark.slow
@ranks(4)
@pytest.mark.parametrize("run", thinned(EXTREMES))
def test_extremes(run):
    for rows in (8, 5, 1):  # pieces of one size, of several, and empty ones
        value = torch.randn(rows, 3)
        compare(EXTREMES[run], value)
        compare(EXTREMES[run], -value.abs() - 1)
        value[rows - 1, 1] = math.nan
        if "gradient" not in run:
            compare(EXTREMES[run], value)
            compare(EXTREMES[run], value.half())


TRUTHS = {
    "as numbers": lambda t: (t > 0).any(0).int(),
    "counted": lambda t: (t > 0).any(0).sum(),
    "averaged": lambda t: (t > 0).any(1).float().mean(),
    "all counted": lambda t: (t < 3).all(0).sum(),
    "of bytes": lambda t: (t > 0).to(torch.uint8).any(0),
    "all of bytes": lambda t: (t.abs() * 9).to(torch.uint8).all(0),
    "of everything": lambda t: t.any() | (t > 9).all(),
    "added": lambda t: (t > 0).any(0) + (t > 0).any(0).long(),
    "integers": lambda t: (t * 9).int().amax(0) - (t * 9).to(torch.int8).amin(0),
    "no dims are all dims": lambda t: (t > 0).sum(dim=[], keepdim=True),
}


@ranks(4)
@pytest.mark.parametrize("run", thinned(TRUTHS))
def test_any_and_all(run):
    for rows in (8, 5, 1):
        compare(TRUTHS[run], torch.randn(rows, 3))


@ranks(4)
def test_an_extreme_of_nothing_is_refused_as_on_one_device():
    t = xs.mark_sharding(torch.zeros(4, 0), square(), ("data", None))
    with pytest.raises((RuntimeError, IndexError)):
        t.amax()
    assert whole(t.any()).item() is False and whole(t.sum(1)).tolist() == [0.0] * 4


@ranks(4)
def test_a_view_of_everything_is_a_tensor_of_its_own():
    value = torch.randn(4, 6)
    for view in (lambda t: t.squeeze(()), lambda t: t.squeeze((0, 1)), lambda t: t.permute(0, 1), lambda t: t[:]):
        t = xs.mark_sharding(value.clone().requires_grad_(), square(), ("data", "model"))
        (view(t) * 2).sum().backward()
        assert torch.equal(whole(t.grad), torch.full((4, 6), 2.0))
        with torch.no_grad():
            view(t).mul_(3)
        assert torch.equal(whole(t), value * 3)
