"""`fullshard.prepare` in a loop of one's own: the same numbers as one device, at any number of ranks."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fullshard
from fullshard.config.errors import ConfigError
from fullshard.distributed import runtime
from fullshard.fsdp import FSDPv2
from fullshard.parallel.settings import EngineSettings
from tests.pairwise import crossed
from tests.parallel.test_settings import Model
from tests.pool import ranks


def data(rows: int = 16) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(rows, 8, generator=generator), torch.randn(rows, 1, generator=generator))


def on_one_device(plain, rows, batch, epochs=1):
    """Losses of a plain loop over the whole batches."""
    optimizer, losses = torch.optim.AdamW(plain.parameters(), lr=1e-2), []
    loader = DataLoader(data(rows), batch_size=batch, shuffle=True, generator=torch.Generator().manual_seed(3))
    for x, y in itertools.chain.from_iterable(itertools.repeat(loader, epochs)):
        loss = nn.functional.mse_loss(plain(x.double()), y.double())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def assert_values(model, plain):
    for (name, whole), p in zip(model.full_state_dict().items(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole, p.data, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize(
    ("rows", "strategy"),
    crossed((33, 16, 38), ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"), pairs=False),
)
@ranks(1, 2, 4, slow=(1, 4))
def test_a_loop_trains_as_on_one_device(strategy, rows, world_size):
    """Also where the last step has a row for one rank only (33), or not equally many for all (38)."""
    torch.manual_seed(0)
    plain = Model().double()
    model = copy.deepcopy(plain)
    expected, losses = on_one_device(plain, rows, 8, epochs=2), []

    groups = [{"params": [p for p in model.parameters() if p.ndim > 1]},
              {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.01}]  # fmt: skip
    given = torch.optim.AdamW(groups, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(given, lambda step: 1.0)
    generator = torch.Generator().manual_seed(3 + runtime.rank())  # rank 0's counts
    loader = DataLoader(data(rows), batch_size=8 // world_size, shuffle=True, generator=generator)
    copies = 2 if strategy == "HYBRID_SHARD" and world_size > 1 else None
    settings = EngineSettings(sharding_strategy=strategy, dp_replicate_size=copies)
    wrapped, optimizer, loader, same = fullshard.prepare(model, given, loader, scheduler, settings=settings)
    assert wrapped is model and optimizer is given and same is scheduler and isinstance(model, FSDPv2)
    assert [len(g["params"]) for g in given.param_groups] == [3, 3]
    assert {id(p) for g in given.param_groups for p in g["params"]} == {id(p) for p in model.parameters()}
    for x, y in itertools.chain(loader, loader):
        loss = nn.functional.mse_loss(model(x.double()), y.double())
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(fullshard.mean_over_rows(loss).item())
    torch.testing.assert_close(losses, expected, rtol=1e-12, atol=0)
    assert_values(model, plain)


@ranks(2)
def test_settings_come_from_the_environment():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FSDP_SHARDING_STRATEGY", "2")
        patch.setenv("FSDP_TRANSFORMER_CLS_TO_WRAP", "Linear")
        model = fullshard.prepare(Model())
    assert model.plan.strategy == "SHARD_GRAD_OP" and len(model.plan.units) == 4


@ranks(2)
def test_what_prepare_refuses():
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.zeros(2, 8)).sum().backward()
    optimizer.step()
    with pytest.raises(ConfigError, match="has already taken steps on the unsharded parameters"):
        fullshard.prepare(model, optimizer)
    with pytest.raises(ConfigError, match="already sharded"):
        fullshard.prepare(model)
    with pytest.raises(ConfigError, match="got a list; expected torch models"):
        fullshard.prepare([1])


@ranks(2)
def test_an_optimizer_that_is_made_with_state():
    """Adagrad begins with sums of squares, one per element."""
    torch.manual_seed(0)
    model = Model()
    plain = copy.deepcopy(model)
    made = [torch.optim.Adagrad(m.parameters(), lr=0.1, initial_accumulator_value=0.5) for m in (plain, model)]
    model, optimizer = fullshard.prepare(model, made[1])
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(2))
    for m, one in ((plain, made[0]), (model, optimizer)):
        for _ in range(2):
            m(x).sum().backward()
            one.step()
            one.zero_grad()
    assert_values(model, plain)


@ranks(1, 2, 4)
def test_a_model_without_values_yet(world_size):
    with torch.device("meta"):
        model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = fullshard.prepare(model, optimizer)
    torch.manual_seed(0)
    values = Model().state_dict()
    model.load_state_dict(values)
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    assert all(not torch.equal(model.full_state_dict()[name], value) for name, value in values.items())
