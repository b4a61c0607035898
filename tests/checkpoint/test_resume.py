"""Resuming: bit for bit what an uninterrupted training gives, and the same values on any other arrangement of ranks."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from fullshard import CheckpointManager, FSDPv2, load_state, save_state
from fullshard.distributed import runtime
from fullshard.spmd.tensor import is_sharded
from tests.checkpoint.resume_programs import Case, Training, assert_same_bits
from tests.fsdp.programs import STRATEGIES, mesh_for
from tests.pool import pool, ranks

BEFORE, AFTER = 5, 5
CASES = [
    *(Case(strategy, background=i % 2 == 1) for i, strategy in enumerate(STRATEGIES)),
    Case("SHARD_GRAD_OP", "llama", "foreach", precision="bf16"),
    Case("FULL_SHARD", "lora", background=True),
]
ALL = [
    Case("FULL_SHARD", offload=True, optimizer="sgd"),
    Case("HYBRID_SHARD", "frozen", "factored", background=True),
    Case("FULL_SHARD", "parallel", "fused"),
] + [
    Case(strategy, model, optimizer, offload, background)
    for strategy in STRATEGIES
    for model, optimizer in (("stack", "adamw"), ("frozen", "fused"), ("llama", "foreach"), ("lora", "adamw"))
    for offload in (False, True)
    for background in (False, True)
]


def _own_generators():
    """Generators that differ from rank to rank, as a training with dropout may have them."""
    runtime.seed(17, per_rank=True)


@ranks(2, 4)
def _train_straight_and_half(case, folder, world_size):
    straight = Training(case)
    _own_generators()
    straight.run(BEFORE + AFTER)
    noise = torch.rand(1).item(), random.random(), float(np.random.rand())
    torch.save((straight.losses, straight.values(), noise), folder / f"straight-{runtime.rank()}.pt")
    half = Training(case)
    _own_generators()
    with CheckpointManager(folder / "checkpoints", BEFORE) as manager:
        half.run(BEFORE)
        if case.background:
            assert manager.save_async(BEFORE, half.state)
            half.run(1)  # what happens meanwhile does not get into the checkpoint
        else:
            assert manager.save(BEFORE, half.state)


@ranks(2, 4)
def _resume(case, folder, world_size):
    losses, values, noise = torch.load(folder / f"straight-{runtime.rank()}.pt", weights_only=False)
    resumed = Training(case, seed=99)
    with CheckpointManager(folder / "checkpoints", BEFORE) as manager:
        state = resumed.state
        assert manager.restore(None, state) == BEFORE
    resumed.losses = state["losses"]
    assert resumed.losses == losses[:BEFORE]
    resumed.run(AFTER)
    assert resumed.losses == losses
    assert_same_bits(resumed.values(), values)
    assert (torch.rand(1).item(), random.random(), float(np.random.rand())) == noise


@pytest.fixture(scope="module")
def halves(request, tmp_path_factory):
    """The first half of every case that will be asked for; then all its processes are ended."""
    folders = {}
    for item in request.session.items:
        if item.module is request.module and "halves" in item.fixturenames:
            case, world = item.callspec.params["case"], item.callspec.params["world"]
            folders[case, world] = tmp_path_factory.mktemp("resume")
            _train_straight_and_half(case, folders[case, world], world_size=world)
    for world in {world for _, world in folders}:
        pool(world).kill()
    return folders


@pytest.mark.parametrize("world", [2])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_resumed_training_continues_bit_for_bit(halves, case, world):
    _resume(case, halves[case, world], world_size=world)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("case", ALL, ids=str)
def test_every_training_continues_bit_for_bit(halves, case, world):
    _resume(case, halves[case, world], world_size=world)


# --- other numbers of ranks -----------------------------------------------------------------------------------------

MOVED = [
    (Case("FULL_SHARD"), 1, Case("FULL_SHARD"), 2),
    (Case("FULL_SHARD"), 2, Case("HYBRID_SHARD"), 4),
    (Case("HYBRID_SHARD"), 4, Case("SHARD_GRAD_OP"), 2),
    (Case("FULL_SHARD", "parallel"), 4, Case("FULL_SHARD", "parallel"), 2),
]
EVERYWHERE = [
    (Case("FULL_SHARD"), 2, Case("NO_SHARD"), 1),
    (Case("NO_SHARD"), 4, Case("HYBRID_SHARD"), 1),
    (Case("HYBRID_SHARD_ZERO2"), 2, Case("HYBRID_SHARD_ZERO2"), 4),
    (Case("FULL_SHARD", "parallel"), 2, Case("FULL_SHARD", "parallel"), 1),
    (Case("FULL_SHARD", "parallel"), 1, Case("FULL_SHARD", "parallel", offload=True), 4),
    (Case("FULL_SHARD", "frozen", "factored"), 4, Case("HYBRID_SHARD", "frozen", "factored"), 2),
] + [
    (Case(before, "llama"), n, Case(after, "llama"), m)
    for n in (1, 2, 4)
    for m in (1, 2, 4)
    for before in STRATEGIES
    for after in STRATEGIES
]


@ranks(1, 2, 4)
def _save(case, folder, world_size):
    training = Training(case)
    training.run(2)
    with CheckpointManager(folder / "checkpoints", 1) as manager:
        manager.save(2, training.state)
    values = training.whole_values()
    if runtime.is_main():
        torch.save(values, folder / "values.pt")


@ranks(1, 2, 4)
def _load_elsewhere(case, folder, world_size):
    training = Training(case, seed=99)
    with CheckpointManager(folder / "checkpoints", 1) as manager:
        manager.restore(None, {k: v for k, v in training.state.items() if k != "losses"})
    expected = torch.load(folder / "values.pt")
    got = training.whole_values()
    assert_same_bits(
        {n: v for n, v in got.items() if "running" not in n}, {n: v for n, v in expected.items() if "running" not in n}
    )
    training.run(1)  # and it trains


def _moved_id(value):
    return str(value)


@pytest.mark.parametrize(("before", "n", "after", "m"), MOVED, ids=_moved_id)
def test_another_arrangement_loads_the_same_values(tmp_path, before, n, after, m):
    _save(before, tmp_path, world_size=n)
    _load_elsewhere(after, tmp_path, world_size=m)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "n", "after", "m"), EVERYWHERE, ids=_moved_id)
def test_every_arrangement_loads_the_same_values(tmp_path, before, n, after, m):
    _save(before, tmp_path, world_size=n)
    _load_elsewhere(after, tmp_path, world_size=m)


@ranks(2)
def test_a_plain_model_is_resumed_sharded_and_back(tmp_path):
    """Optimizer state gets the layout of its parameter, and how the optimizer computes is not restored."""

    def made(wrapped, seed, **how):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
        model = FSDPv2(model, mesh_for("FULL_SHARD")) if wrapped else model
        return model, torch.optim.Adam(model.parameters(), 1e-2, **how)

    def steps(model, optimizer):
        losses = []
        for _ in range(2):
            loss = model(torch.ones(4, 6)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
        return losses

    plain = made(False, 0)
    steps(*plain)
    save_state(tmp_path / "plain", model=plain[0], optimizer=plain[1])
    sharded = made(True, 1, foreach=True)
    load_state(tmp_path / "plain", model=sharded[0], optimizer=sharded[1])
    assert sharded[1].param_groups[0]["foreach"] is True
    for p, state in sharded[1].state.items():
        assert is_sharded(state["exp_avg"]) and state["exp_avg"].placements == p.placements
        assert not is_sharded(state["step"])
    save_state(tmp_path / "sharded", model=sharded[0], optimizer=sharded[1])
    expected = steps(*plain)
    torch.testing.assert_close(steps(*sharded), expected, rtol=0, atol=1e-6)
    again = made(False, 2)
    load_state(tmp_path / "sharded", model=again[0], optimizer=again[1])
    assert steps(*again) == expected
