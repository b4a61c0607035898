"""`fullshard.prepare` in a loop of one's own: the same numbers as one device, at any number of ranks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import fullshard
from fullshard import runtime
from fullshard.errors import ConfigError
from fullshard.fsdp import FSDPv2
from fullshard.train.engine import EngineSettings
from fullshard.train.rank_loader import RankLoader, deal
from tests.launch.test_engine import Model
from tests.pool import ranks


def data(rows: int = 16) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(rows, 8, generator=generator), torch.randn(rows, 1, generator=generator))


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"])
@ranks(1, 2, 4)
def test_a_loop_trains_as_on_one_device(strategy, world_size):
    torch.manual_seed(0)
    plain = Model().double()
    model = copy.deepcopy(plain)
    expected, losses = [], []
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for x, y in DataLoader(data(), batch_size=4):
        loss = nn.functional.mse_loss(plain(x.double()), y.double())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())

    groups = [{"params": [p for p in model.parameters() if p.ndim > 1]},
              {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.01}]  # fmt: skip
    given = torch.optim.AdamW(groups, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(given, lambda step: 1.0)
    loader = DataLoader(data(), batch_size=4 // world_size)
    copies = 2 if strategy == "HYBRID_SHARD" and world_size > 1 else None
    settings = EngineSettings(sharding_strategy=strategy, dp_replicate_size=copies)
    wrapped, optimizer, loader, same = fullshard.prepare(model, given, loader, scheduler, settings=settings)
    assert wrapped is model and optimizer is given and same is scheduler and isinstance(model, FSDPv2)
    assert [len(g["params"]) for g in given.param_groups] == [3, 3]
    assert {id(p) for g in given.param_groups for p in g["params"]} == {id(p) for p in model.parameters()}
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x.double()), y.double())
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        torch.distributed.all_reduce(mean)
        losses.append(mean.item() / world_size)
    torch.testing.assert_close(losses, expected, rtol=1e-12, atol=0)
    for (name, whole), p in zip(model.full_state_dict().items(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole, p.data, rtol=1e-9, atol=1e-12, msg=name)


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
    with pytest.raises(ConfigError, match="has taken steps on the whole parameters"):
        fullshard.prepare(model, optimizer)
    with pytest.raises(ConfigError, match="sharded already"):
        fullshard.prepare(model)
    with pytest.raises(ConfigError, match="not list"):
        fullshard.prepare([1])


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


# --- loaders ----------------------------------------------------------------------------------------------------------


class Numbers(IterableDataset):
    def __init__(self, count: int):
        self.count = count

    def __iter__(self):
        return iter(range(self.count))

    def __len__(self):
        return self.count


class Items(Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, i):
        return {"n": torch.tensor(i), "text": str(i)}


def everyone(value):
    gathered = [None] * runtime.world_size()
    torch.distributed.all_gather_object(gathered, value)
    return gathered


@ranks(2, 4)
def test_ranks_get_different_batches_of_one_order(world_size):
    loader = fullshard.prepare(DataLoader(Items(), batch_size=2, shuffle=True))
    assert isinstance(loader, RankLoader) and isinstance(loader, DataLoader)
    seen = []
    for _ in range(2):
        mine = [batch["n"].tolist() for batch in loader]
        assert len(mine) == len(loader) == -(-5 // world_size) and all(len(b) == 2 for b in mine)
        parts = everyone(mine)
        order = [n for step in zip(*parts, strict=True) for batch in step for n in batch]
        assert sorted(order[:10]) == list(range(10)) and order[10:] == order[: len(order) - 10]
        seen.append(order)
    assert seen[0] != seen[1]
    loader.set_epoch(0)
    first = everyone([batch["n"].tolist() for batch in loader])
    assert [n for step in zip(*first, strict=True) for batch in step for n in batch] == seen[0]


@ranks(2)
def test_streams_and_batches_of_one(world_size):
    rank = runtime.rank()
    stream = fullshard.prepare(DataLoader(Numbers(9), batch_size=2))
    batches = [batch.tolist() for batch in stream]
    assert batches == ([[0, 1], [4, 5], [8, 0]] if rank == 0 else [[2, 3], [6, 7], [1, 2]]) and len(stream) == 3
    dropped = fullshard.prepare(DataLoader(Numbers(9), batch_size=2, drop_last=True))
    assert [batch.tolist() for batch in dropped] == ([[0, 1], [4, 5]] if rank == 0 else [[2, 3], [6, 7]])
    single = fullshard.prepare(DataLoader(Items(), batch_size=None))
    assert [int(item["n"]) for item in single] == list(range(rank, 10, 2)) and len(single) == 5
    with pytest.raises(ConfigError, match="worker processes"):
        fullshard.prepare(DataLoader(Numbers(9), num_workers=1))


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("count", [1, 4, 11])
@pytest.mark.parametrize("drop", [False, True])
def test_dealing_is_even(world_size, count, drop):
    batches = [list(range(i, min(i + 2, count))) for i in range(0, count, 2)]
    if drop:
        batches = [b for b in batches if len(b) == 2]
    dealt = [list(deal(batches, rank, world_size, 2, drop)) for rank in range(world_size)]
    assert len({len(d) for d in dealt}) == 1 and all(len(b) == 2 for d in dealt for b in d)
    order = [n for step in zip(*dealt, strict=True) for batch in step for n in batch]
    assert order[:count] == list(range(count))[: len(order)]
