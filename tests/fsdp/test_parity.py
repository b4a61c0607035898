"""Sharded training equals training on one device: five AdamW steps in fp64, first gradients in fp32.

Everything: five strategies × three policies × checkpointing × offload × (tied, untied) on 2 and 4 ranks. The default
run takes a subset in which every pair of choices occurs; `-m slow` runs the rest.
"""

import itertools

import pytest
import torch

from fullshard.fsdp import FSDPv2, transformer_auto_wrap_policy
from tests.fsdp.programs import (
    POLICIES,
    STRATEGIES,
    assert_same_first_gradients,
    assert_same_training,
    build,
    mesh_for,
    train_sharded,
)
from tests.pool import ranks

CHOICES = [STRATEGIES, list(POLICIES), [False, True], [False, True], ["llama", "llama-tied"], [2, 4]]


def _pairwise(choices):
    """A small set of combinations in which every pair of choices of two different kinds occurs."""
    rows = list(itertools.product(*choices))
    kinds = list(itertools.combinations(range(len(choices)), 2))
    left = {(i, j, row[i], row[j]) for row in rows for i, j in kinds}
    picked = []
    while left:
        best = max(rows, key=lambda row: sum((i, j, row[i], row[j]) in left for i, j in kinds))
        picked.append(best)
        left -= {(i, j, best[i], best[j]) for i, j in kinds}
    return picked


PAIRS = _pairwise(CHOICES)


def _cases(world_size):
    for row in itertools.product(*CHOICES[:-1]):
        strategy, policy, checkpointed, offload, name = row
        marks = [] if (*row, world_size) in PAIRS else [pytest.mark.slow]
        words = [strategy, policy, "checkpointed" if checkpointed else "kept", "offload" if offload else "device", name]
        yield pytest.param(*row, marks=marks, id="-".join(words))


def _check(strategy, policy, checkpointed, offload, name):
    options = {
        "checkpointed": checkpointed, "mesh": mesh_for(strategy), "strategy": strategy, "cpu_offload": offload,
        "auto_wrap_policy": POLICIES[policy], "small_parameter_bytes": 2048,
    }  # fmt: skip
    model = assert_same_training(name, **options)
    units = len(model.plan.units)
    assert units == 1 if policy == "none" else units > 2
    assert_same_first_gradients(name, **options)


@ranks(2)
@pytest.mark.parametrize(("strategy", "policy", "checkpointed", "offload", "name"), list(_cases(2)))
def test_llama_on_two_ranks(strategy, policy, checkpointed, offload, name):
    _check(strategy, policy, checkpointed, offload, name)


@ranks(4)
@pytest.mark.parametrize(("strategy", "policy", "checkpointed", "offload", "name"), list(_cases(4)))
def test_llama_on_four_ranks(strategy, policy, checkpointed, offload, name):
    _check(strategy, policy, checkpointed, offload, name)


def test_the_default_run_meets_every_pair_of_choices():
    met = {pair for row in PAIRS for pair in itertools.combinations(row, 2)}
    assert all(pair in met for a, b in itertools.combinations(CHOICES, 2) for pair in itertools.product(a, b))
    assert len(PAIRS) < 25


@ranks(2)
@pytest.mark.parametrize("name", ["gpt2", "bert", "t5", "mixtral"])
@pytest.mark.parametrize(
    ("strategy", "policy", "checkpointed"),
    [
        ("FULL_SHARD", "transformer", False),
        pytest.param("FULL_SHARD", "transformer", True, marks=pytest.mark.slow),
        pytest.param("SHARD_GRAD_OP", "size", True, marks=pytest.mark.slow),
        pytest.param("NO_SHARD", "none", False, marks=pytest.mark.slow),
        pytest.param("HYBRID_SHARD", "transformer", True, marks=pytest.mark.slow),
    ],
)
def test_other_architectures(name, strategy, policy, checkpointed):
    assert_same_training(
        name, checkpointed=checkpointed, mesh=mesh_for(strategy), strategy=strategy, auto_wrap_policy=POLICIES[policy],
        small_parameter_bytes=1024,
    )  # fmt: skip


@pytest.mark.slow
@ranks(2, 4, slow=(2,))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_first_gradients_in_fp32(strategy):
    assert_same_first_gradients(
        "gpt2", mesh=mesh_for(strategy), auto_wrap_policy=transformer_auto_wrap_policy, strategy=strategy
    )


@ranks(2)
def test_steps_repeat_bit_for_bit():
    def train():
        model = FSDPv2(
            build("llama", torch.float32), mesh_for("FULL_SHARD"), auto_wrap_policy=transformer_auto_wrap_policy,
            small_parameter_bytes=2048,
        )  # fmt: skip
        train_sharded(model, "llama", 3, torch.float32)
        return [p.to_local().clone() for p in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(train(), train(), strict=True))
