"""Batches over a mesh."""

import numpy as np
import pytest
import torch

import fullshard.spmd as xs
from fullshard.config.errors import BatchError, BatchKeyError, SpecError, UserError
from fullshard.distributed import runtime
from tests.pool import ranks
from tests.spmd.orders import keepable


def square() -> xs.Mesh:
    return xs.Mesh(np.arange(4), (2, 2), ("data", "model"))


@ranks(4)
def test_one_spec_for_every_tensor_it_fits():
    spec = xs.ShardingSpec(square(), ("data", None))
    images, labels = torch.randn(4, 3), torch.arange(4)
    assert spec.can_apply(images) and not spec.can_apply(labels)
    loader = xs.ShardedLoader([(images.clone(), labels.clone(), "name")], input_sharding=spec)
    assert len(loader) == 1
    ((x, y, name),) = list(loader)
    assert x.sharding_spec == ("data", None) and torch.equal(x.full_tensor(), images)
    assert type(y) is torch.Tensor and torch.equal(y, labels) and name == "name"


@ranks(4)
def test_a_spec_for_each_key():
    sharding = {"x": xs.ShardingSpec(square(), ("data", "model")), "y": xs.ShardingSpec(square(), ("data",)), "z": None}
    batch = {"x": torch.randn(4, 2), "y": torch.arange(4), "z": torch.ones(1)}
    (got,) = list(xs.ShardedLoader([batch], input_sharding=sharding))
    assert got["x"].sharding_spec == ("data", "model") and got["y"].sharding_spec == ("data",)
    assert type(got["z"]) is torch.Tensor


@ranks(4)
def test_each_rank_brings_its_part():
    me = runtime.rank()
    whole = torch.arange(24.0).reshape(8, 3)
    for layout in keepable(
        [("data", None), (("data", "model"), None), (("model", "data"), None), (None, None), ("model", None)]
    ):
        part = whole[2 * me : 2 * me + 2].clone()
        sharded = xs.ShardingSpec(square(), layout, minibatch=True).apply(part)
        assert sharded.shape == (8, 3) and part.shape == (8, 3)
        assert sharded.sharding_spec == layout and torch.equal(sharded.full_tensor(), whole)


@ranks(4)
def test_parts_that_do_not_fit_together():
    spec = xs.ShardingSpec(square(), ("data", None), minibatch=True)
    with pytest.raises(BatchError, match=r"\(3, 2\), \(2, 2\), \(2, 2\), \(2, 2\).*same shape"):
        spec.apply(torch.zeros(3 if runtime.rank() == 0 else 2, 2))
    with pytest.raises(SpecError, match="at least one entry"):
        xs.ShardingSpec(square(), (), minibatch=True)


@ranks(4)
def test_batches_that_do_not_fit_the_sharding():
    keyed = {"x": xs.ShardingSpec(square(), ("data", None))}
    with pytest.raises(BatchError, match=r"keys \['x'\], but the loader returned a tuple"):
        next(iter(xs.ShardedLoader([(torch.ones(2, 2),)], input_sharding=keyed)))
    with pytest.raises(BatchKeyError, match=r"keys \['x'\] and the batch \['y'\]: the batch lacks \['x'\]") as caught:
        next(iter(xs.ShardedLoader([{"y": torch.ones(2, 2)}], input_sharding=keyed)))
    assert isinstance(caught.value, UserError) and isinstance(caught.value, KeyError)
    with pytest.raises(BatchKeyError, match=r"no sharding for \['y'\]"):
        next(iter(xs.ShardedLoader([{"x": torch.ones(2, 2), "y": torch.ones(1)}], input_sharding=keyed)))
    with pytest.raises(SpecError, match="2 entries and the tensor 1 dims"):
        next(iter(xs.ShardedLoader([{"x": torch.ones(2)}], input_sharding=keyed)))
    with pytest.raises(SpecError, match="no axis 'fsdp'"):
        xs.ShardingSpec(square(), ("fsdp",))
