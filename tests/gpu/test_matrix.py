"""Training on NCCL ranks equals one device: the pairwise matrix of everything that changes how the engine works.

fp32: parameters within 5e-6 after three AdamW steps. bf16: no further from one device than torch's `fully_shard`, whose
deviation is shown beside ours at the end of the run. Then each case once more while delays shift the streams against
each other (`chaos`): the same bits.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from typing import Any

import pytest
import torch.distributed as dist

from fullshard.distributed import runtime
from fullshard.distributed.groups import backend_of
from tests.gpu.cases import FACTORS, Case, cases, layouts
from tests.gpu.programs import MAX_NORM, STEPS, Trained, alone, sharded, train_fully_shard, train_sharded
from tests.pool import gpu_ranks, note

try:
    from tests.gpu.chaos import chaos
except ImportError:

    def chaos(seed: int) -> contextlib.AbstractContextManager[Any]:
        """Nothing is disturbed: what is left is that a second run gives the same bits."""
        return contextlib.nullcontext()


PLAIN = [
    Case("FULL_SHARD", (), "full", "fp32", "kept", "device", "each", "untied", "clipped"),
    Case("SHARD_GRAD_OP", (), "lora", "bf16", "recomputed", "device", "no_sync", "tied", "free", "post"),
    Case("NO_SHARD", (), "qlora", "fp32", "hosted", "device", "one", "untied", "free"),
    Case("FULL_SHARD", (), "full", "fp32", "kept", "offload", "no_sync", "tied", "clipped", "none"),
    Case("HYBRID_SHARD", (2, 1), "full", "fp32", "recomputed", "device", "no_sync", "untied", "clipped"),
    Case("HYBRID_SHARD_ZERO2", (1, 2), "qlora", "bf16", "kept", "device", "one", "tied", "clipped"),
]
"""On a group that is NCCL and nothing else."""

_calm: dict[Case, Trained] = {}


def _trained(case: Case) -> Trained:
    if case not in _calm:
        _calm[case] = train_sharded(case)
    return _calm[case]


def _tied(name: str, case: Case) -> bool:
    """Whether a name is the second one of the tied embedding, which `named_parameters` leaves out."""
    return case.trains == "full" and case.words == "tied" and name == "lm_head.weight"


def _check(case: Case) -> None:
    got, expected = _trained(case), alone(case)
    assert got.values.keys() == expected.values.keys()
    frozen = expected.values.keys() - expected.trainable
    changed = [n for n in frozen if not (got.values[n] == expected.values[n]).all() and not _tied(n, case)]
    assert not changed, "frozen values changed"
    assert all(norm > MAX_NORM for norm in expected.norms), "nothing is clipped, so the comparison shows nothing"
    ours, ours_rms = got.apart(expected)
    if case.precision == "fp32":
        note(f"{case} | {ours:.2e} | -")
        assert ours <= 5e-6, (got.farthest(expected), got.losses, expected.losses)
        assert got.losses == pytest.approx(expected.losses, abs=1e-5)
        assert got.norms == pytest.approx(expected.norms, rel=1e-4)
        return
    peer = train_fully_shard(case)
    theirs, theirs_rms = peer.apart(expected)
    _, between_rms = got.apart(peer)
    note(f"{case} | {ours:.2e} (rms {ours_rms:.2e}) | {theirs:.2e} (rms {theirs_rms:.2e}; from ours {between_rms:.2e})")
    told = got.farthest(expected), got.losses, expected.losses, peer.losses
    assert ours_rms <= 1.1 * theirs_rms + 1e-6, told
    assert ours <= 1.1 * theirs + 5e-5, told
    # Both are sums of the same terms; where those are added up in another order, a rounding to bf16 may differ.
    assert between_rms <= 0.5 * theirs_rms + 1e-6, told


def _check_chaos(case: Case) -> None:
    seed = int(os.environ.get("FULLSHARD_CHAOS", "1"))
    calm = _trained(case)
    with chaos(seed):
        disturbed = train_sharded(case)
    assert disturbed.losses == calm.losses, f"chaos({seed}) changed the losses"
    largest, _ = disturbed.apart(calm)
    assert disturbed.same_bits(calm), f"chaos({seed}): {disturbed.farthest(calm)} by {largest:.2e}"


# --- what carries the pieces ----------------------------------------------------------------------------------------


def _check_links() -> None:
    model = sharded(Case(activations="recomputed"))
    device = runtime.device()
    for link in (model._fullshard_engine.context.gather_link, model._fullshard_engine.context.reduce_link):
        backend = backend_of(link.group, device)
        assert (device.type, backend) in [("cuda", "nccl"), ("cpu", "gloo")]
        assert type(link).__name__ == ("Collectives" if backend == "nccl" else "PointToPoint")
    assert model.plan.units[1].gather_bucket and any(p.direct for p in model.plan.units[1].parameters)


@gpu_ranks(2, 4)
def test_pieces_travel_by_nccl():
    assert runtime.device().type == "cpu" or dist.get_backend() == "cpu:gloo,cuda:nccl"
    _check_links()


@gpu_ranks(2, plain_nccl=True)
def test_pieces_travel_by_nccl_in_a_group_of_the_script():
    assert runtime.device().type == "cpu" or dist.get_backend() == "nccl"
    _check_links()


# --- the matrix -----------------------------------------------------------------------------------------------------


@gpu_ranks(2)
@pytest.mark.parametrize("case", cases(2), ids=str)
def test_two_ranks(case):
    _check(case)


@gpu_ranks(4)
@pytest.mark.parametrize("case", cases(4), ids=str)
def test_four_ranks(case):
    _check(case)


@gpu_ranks(2, plain_nccl=True)
@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_in_a_group_of_the_script(case):
    _check(case)


@gpu_ranks(2)
@pytest.mark.parametrize("case", cases(2), ids=str)
def test_two_ranks_under_chaos(case):
    _check_chaos(case)


@gpu_ranks(4)
@pytest.mark.parametrize("case", cases(4), ids=str)
def test_four_ranks_under_chaos(case):
    _check_chaos(case)


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_pair_of_choices_occurs(ranks):
    rows = [((c.strategy, c.mesh), *list(vars(c).values())[2:]) for c in cases(ranks)]
    for (i, a), (j, b) in itertools.combinations(enumerate([layouts(ranks), *FACTORS]), 2):
        assert {(row[i], row[j]) for row in rows} == set(itertools.product(a, b))
    assert len(rows) < 30 and STEPS == 3
