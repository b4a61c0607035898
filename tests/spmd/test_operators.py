"""torch's own catalogue of operators, with torch's own samples, on sharded tensors: equal to one device.

Slow (`make test-all`): some 570 operators, up to six samples each, every tensor in a layout drawn at random.
"""

import random
from itertools import islice

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

import fullshard.spmd as xs
from tests.pool import ranks
from tests.spmd.orders import ANY_ORDER

PARTS = 8
AXES = [None, "data", "model", ("data", "model")] + [("model", "data")] * ANY_ORDER

LEFT_OUT = {
    "uninitialised memory": "empty empty_like new_empty empty_strided new_empty_strided empty_permuted resize_ "
    "resize_as_",
    "reads the memory of its index tensor in C++": "tensor_split",
    "depends on how a tensor lies in memory, which differs between pieces and whole": "as_strided as_strided_copy "
    "as_strided_scatter as_strided.partial_views",
}
SKIPPED = {name for names in LEFT_OUT.values() for name in names.split()}


def spec_for(rng: random.Random, rank: int) -> tuple[object, ...]:
    while True:
        spec = tuple(rng.choice(AXES) for _ in range(rank))
        used = [axis for entry in spec if entry for axis in ([entry] if isinstance(entry, str) else entry)]
        if len(set(used)) == len(used):
            return spec


def tensors(tree):
    return [t for t in tree_leaves(tree) if isinstance(t, torch.Tensor)]


def whole(t):
    return t.full_tensor() if isinstance(t, xs.ShardedTensor) else t


def gradients(results, inputs):
    differentiable = [t for t in results if t.requires_grad and t.is_floating_point()]
    inputs = [t for t in inputs if t.requires_grad]
    if not differentiable or not inputs:
        return []
    total = sum((t * t.detach().cos()).sum() for t in differentiable)
    return torch.autograd.grad(total, inputs, allow_unused=True)


def compare(op, sample, rng, mesh):
    def shard(t):
        if type(t) is not torch.Tensor or t.layout != torch.strided:
            return t
        copied = t.detach().clone().requires_grad_(t.requires_grad)
        return xs.mark_sharding(copied, mesh, spec_for(rng, t.ndim))

    torch.manual_seed(7)
    expected = op(sample.input, *sample.args, **sample.kwargs)
    given = (sample.input, sample.args, sample.kwargs)
    sharded = tree_map(shard, given)
    torch.manual_seed(7)
    got = op(sharded[0], *sharded[1], **sharded[2])
    for a, b in zip(tensors(expected), tensors(got), strict=True):
        torch.testing.assert_close(whole(b), a, rtol=1e-8, atol=1e-8, equal_nan=True)
    try:
        wanted = gradients(tensors(expected), tensors(given))
    except RuntimeError:
        return  # no gradient on one device either
    for a, b in zip(wanted, gradients(tensors(got), tensors(sharded)), strict=True):
        a, b = (torch.zeros(()) if g is None else whole(g) for g in (a, b))
        torch.testing.assert_close(
            *torch.broadcast_tensors(b, a), rtol=1e-6, atol=1e-6, equal_nan=True, check_dtype=False
        )


@pytest.mark.slow
@ranks(4, timeout=900)
@pytest.mark.parametrize("part", range(PARTS))
def test_every_operator_equals_one_device(part):
    import torch.testing._internal.common_methods_invocations as catalogue

    mesh = xs.Mesh(np.arange(4), (2, 2), ("data", "model"))
    failed, compared = {}, 0
    for op in catalogue.op_db[part::PARTS]:
        name = ".".join(filter(None, (op.name, op.variant_test_name)))
        if (
            name in SKIPPED
            or "sparse" in name
            or "jiterator" in name
            or torch.float64 not in op.supported_dtypes("cpu")
        ):
            continue
        rng = random.Random(name)
        torch.manual_seed(0)
        samples = op.sample_inputs("cpu", torch.float64, requires_grad=op.supports_autograd)
        for number, sample in enumerate(islice(samples, 6)):
            try:
                compare(op, sample, rng, mesh)
                compared += 1
            except Exception as error:
                failed[f"{name} #{number}"] = f"{type(error).__name__}: {str(error)[:300]}"
    assert compared > 200
    assert not failed, "\n".join(f"{name}: {why}" for name, why in failed.items())
