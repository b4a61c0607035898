"""Prepared loaders: in one process what the user's loader gives, on several ranks the same rows, each once."""

from __future__ import annotations

import copy
import itertools
import multiprocessing
import os
import random
from collections import UserDict, namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import fullshard
from fullshard.config.errors import ConfigError, FSDPError
from fullshard.distributed import runtime
from fullshard.fsdp import uneven_batches
from fullshard.parallel.data_loader import RankLoader
from fullshard.parallel.sampler import rank_batches
from tests.parallel.test_prepare import assert_values, data
from tests.parallel.test_settings import Model
from tests.pool import ranks

# --- dealing ----------------------------------------------------------------------------------------------------------


@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 7), st.booleans(), st.booleans())
def test_every_row_is_dealt_once(count, size, world_size, drop, own):
    batches = [list(range(i, min(i + size, count))) for i in range(0, count, size)]
    if drop:
        batches = [b for b in batches if len(b) == size]
    dealt = [list(rank_batches(batches, rank, world_size, None if own else size, drop)) for rank in range(world_size)]
    assert len({len(d) for d in dealt}) == 1 and all(one.batch for d in dealt for one in d)
    steps = list(zip(*dealt, strict=True))
    order = [row for step in steps for one in step if one.rows for row in one.batch]
    assert order == list(range(count))[: len(order)] and (drop or len(order) == count)
    for step in steps:
        assert {one.total for one in step} == {sum(one.rows for one in step)}
        assert all(one.rows in (0, len(one.batch)) for one in step)
        assert not drop or all(one.rows == size for one in step)
        assert own or max(one.rows for one in step) - min(one.rows for one in step) <= 1
        assert own or all(one.rows for one in step) or step[0].total < world_size


# --- kinds of loaders -------------------------------------------------------------------------------------------------

ROWS = 33


class Items(Dataset):
    def __len__(self):
        return ROWS

    def __getitem__(self, i):
        return {"n": torch.tensor(i), "text": str(i)}


class Stream(IterableDataset):
    """Shuffles with whatever generator the process has."""

    def __init__(self, count=ROWS, shuffle=False):
        self.count, self.shuffle = count, shuffle

    def __iter__(self):
        rows = list(range(self.count))
        if self.shuffle:
            random.shuffle(rows)
        return ({"n": torch.tensor(i), "text": str(i)} for i in rows)

    def __len__(self):
        return self.count


class Shuffled(Sampler):
    """A sampler of the user's own, with numpy's random numbers."""

    def __iter__(self):
        return iter(np.random.permutation(ROWS).tolist())

    def __len__(self):
        return ROWS


class Growing(Sampler):
    """Batches of 1, 2, 3, … rows."""

    def __iter__(self):
        left = iter(range(ROWS))
        for size in itertools.count(1):
            if not (batch := list(itertools.islice(left, size))):
                return
            yield batch

    def __len__(self):
        return 8


class Doubling(DataLoader):
    """A loader of the user's own class."""

    def __iter__(self):
        for batch in super().__iter__():
            yield {"n": batch["n"] * 2 // 2, "text": batch["text"]}


def seeded(n=5):
    return torch.Generator().manual_seed(n)


LOADERS = {
    "in order": lambda: DataLoader(Items(), batch_size=4),
    "last dropped": lambda: DataLoader(Items(), batch_size=4, drop_last=True),
    "shuffled": lambda: DataLoader(Items(), batch_size=4, shuffle=True),
    "own generator": lambda: DataLoader(Items(), batch_size=4, shuffle=True, generator=seeded()),
    "sampler's generator": lambda: DataLoader(
        Items(), batch_size=4, sampler=RandomSampler(Items(), generator=seeded())
    ),
    "worker processes": lambda: DataLoader(Items(), 4, shuffle=True, num_workers=1, multiprocessing_context="fork"),
    "with replacement": lambda: DataLoader(Items(), batch_size=4, sampler=RandomSampler(Items(), True, 21)),
    "subset": lambda: DataLoader(Items(), batch_size=4, sampler=SubsetRandomSampler(range(3, 30))),
    "by weight": lambda: DataLoader(Items(), batch_size=4, sampler=WeightedRandomSampler(range(1, ROWS + 1), 30)),
    "own sampler": lambda: DataLoader(Items(), batch_size=4, sampler=Shuffled()),
    "batch sampler": lambda: DataLoader(Items(), batch_sampler=BatchSampler(SequentialSampler(Items()), 5, False)),
    "own batches": lambda: DataLoader(Items(), batch_sampler=Growing()),
    "no batches": lambda: DataLoader(Items(), batch_size=None),
    "own class": lambda: Doubling(Items(), batch_size=4, shuffle=True),
    "stream": lambda: DataLoader(Stream(), batch_size=4),
    "stream, last dropped": lambda: DataLoader(Stream(), batch_size=4, drop_last=True),
    "shuffled stream": lambda: DataLoader(Stream(shuffle=True), batch_size=4),
    "stream of items": lambda: DataLoader(Stream(), batch_size=None),
}


def seed(n):
    # Worker processes of a loader are refused to processes that end with their parent, as those of the pools do.
    multiprocessing.current_process()._config["daemon"] = False
    torch.manual_seed(n)
    random.seed(n)
    np.random.seed(n)


def epochs(loader, count=2):
    return [[(batch["n"].tolist(), batch["text"]) for batch in loader] for _ in range(count)]


@pytest.mark.parametrize("kind", LOADERS)
@ranks(1)
def test_in_one_process_nothing_changes(kind):
    """The same batches, in as many epochs as you like, and the same random numbers left for the program."""
    seed(1)
    plain = LOADERS[kind]()
    expected, after = epochs(plain), torch.rand(1)
    seed(1)
    given = LOADERS[kind]()
    loader = fullshard.prepare(given)
    assert isinstance(loader, RankLoader) and isinstance(loader, type(given)) and loader is not given
    assert epochs(loader) == expected and torch.equal(torch.rand(1), after)
    assert (len(loader), loader.batch_size, loader.drop_last) == (len(plain), plain.batch_size, plain.drop_last)
    assert len(expected[0]) == len(loader) and loader.share is None


@pytest.mark.parametrize("kind", LOADERS)
@ranks(2, 4, slow=(2,))
def test_several_ranks_give_each_row_once_in_the_order_of_one_process(kind, world_size):
    seed(1)
    plain = epochs(LOADERS[kind]())
    seed(1 + runtime.rank())  # rank 0's counts
    loader = fullshard.prepare(LOADERS[kind]())
    for expected in plain:
        order = [n for batch, _ in expected for n in (batch if isinstance(batch, list) else [batch])]
        found, texts, steps = [], [], 0
        for batch in loader:
            together = fullshard.gather_for_metrics(batch)
            found += together["n"].tolist()
            texts += together["text"]
            steps += 1
        dropped = "dropped" in kind
        assert found == (order[: len(order) // (4 * world_size) * 4 * world_size] if dropped else order)
        assert texts == [str(n) for n in found]
        assert steps == len(loader) == (len(expected) // world_size if dropped else -(-len(expected) // world_size))


@pytest.mark.parametrize("kind", ["shuffled", "own generator", "own sampler", "by weight"])
@ranks(1, 2)
def test_an_epoch_can_be_asked_for_and_begun_anywhere(kind, world_size):
    def reads(loader):
        return [(batch["n"].tolist(), loader.is_stand_in) for batch in loader]

    seed(1)
    loader = fullshard.prepare(LOADERS[kind]())
    loader.set_epoch(0)
    first = [reads(loader) for _ in range(3)]
    assert len({str(epoch) for epoch in first}) == 3
    seed(1)
    again = fullshard.prepare(LOADERS[kind]())
    torch.rand(100), np.random.rand(100)  # what a resumed program draws in between does not matter
    again.set_epoch(2, step=3)
    assert reads(again) == first[2][3:]
    again.set_epoch(1)
    left = iter(again)
    assert next(left)["n"].tolist() == first[1][0][0]
    del left
    again.set_epoch(1, step=len(again))
    assert reads(again) == [] and reads(again) == first[2] and len(again) == len(first[0])


@ranks(2)
def test_streams_and_samplers_are_told_the_epoch_and_begin_anywhere():
    class Told(Stream):
        epoch = None

        def set_epoch(self, epoch):
            self.epoch = epoch

    stream = Told()
    loader = fullshard.prepare(DataLoader(stream, batch_size=4))
    whole = [batch["n"].tolist() for batch in loader]
    loader.set_epoch(7, step=2)
    assert stream.epoch == loader.dataset.epoch == 7
    assert [batch["n"].tolist() for batch in loader] == whole[2:]
    sampler = Shuffled()
    sampler.set_epoch = lambda epoch: setattr(sampler, "epoch", epoch)
    loader = fullshard.prepare(DataLoader(Items(), batch_size=4, sampler=sampler))
    loader.set_epoch(3)
    assert sampler.epoch == 3 and len(list(loader)) == 5


@ranks(2)
def test_what_a_loader_is_refused_for():
    with pytest.raises(ConfigError, match="each worker process of an IterableDataset"):
        fullshard.prepare(DataLoader(Stream(), num_workers=1))
    with pytest.raises(ConfigError, match="DistributedSampler, which already splits the rows"):
        fullshard.prepare(DataLoader(Items(), sampler=DistributedSampler(Items())))
    with pytest.raises(ConfigError, match="loss_reduction is 'max'; expected mean or sum"):
        fullshard.prepare(DataLoader(Items()), loss_reduction="max")


@ranks(2)
def test_which_batch_counts():
    """The one handed out last by a loader that is still being read."""
    training = fullshard.prepare(DataLoader(range(9), batch_size=4))  # the last step: 1 row, and a stand-in
    evaluation = fullshard.prepare(DataLoader(range(4), batch_size=2))
    weights = []
    for _ in training:
        for _ in evaluation:
            assert uneven_batches.active_share().weight == 1.0
            break
        for _ in evaluation:
            assert uneven_batches.active_share().weight == 1.0
        weights.append(uneven_batches.active_share().weight)
        assert training.is_stand_in == (weights[-1] == 0.0)
    assert weights == [1.0, 2.0 - 2.0 * runtime.rank()] and not training.is_stand_in
    assert uneven_batches.active_share().weight == 1.0 and uneven_batches._open == []


# --- gradients --------------------------------------------------------------------------------------------------------


class Answer:
    """An output of the user's own class."""

    def __init__(self, value):
        self.value = value


class Answering(Model):
    def forward(self, x):
        return Answer(super().forward(x))


def accumulate(model, batches):
    for i, (x, y) in enumerate(batches):
        with model.no_sync() if hasattr(model, "no_sync") and i % 2 == 0 else torch.enable_grad():
            (nn.functional.mse_loss(model(x), y) / 2).backward()
        if i % 2:
            yield


def sum_before_backward(model, batches):
    total = sum(nn.functional.mse_loss(model(x), y) for x, y in batches)
    total.backward()
    yield


def through_itself(model, batches):
    """The model's output goes in again, and the penalty is on the first."""
    for x, y in batches:
        first = model(x)
        (nn.functional.mse_loss(model(x + first), y) + first.pow(2).mean()).backward()
        yield


def own_class(model, batches):
    for x, y in batches:
        nn.functional.mse_loss(model(x).value, y).backward()
        yield


def parts_alone(model, batches):
    for x, y in batches:
        hidden = model.layers[1](model.layers[0](x))
        nn.functional.mse_loss(hidden.mean(-1, keepdim=True), y).backward()
        yield


def sums(model, batches):
    for x, y in batches:
        nn.functional.mse_loss(model(x), y, reduction="sum").backward()
        yield


@pytest.mark.slow
@pytest.mark.parametrize("loop", [accumulate, sum_before_backward, through_itself, own_class, parts_alone, sums])
@ranks(1, 2, 4)
def test_other_loops_train_as_on_one_device(loop, world_size):
    torch.manual_seed(0)
    plain = (Answering() if loop is own_class else Model()).double()
    model = copy.deepcopy(plain)
    rows = TensorDataset(*(t.double() for t in data(30 if loop is accumulate else 33).tensors))
    one = torch.optim.SGD(plain.parameters(), lr=1e-2)
    for _ in loop(plain, DataLoader(rows, batch_size=8)):
        one.step()
        one.zero_grad()
    reduction = "sum" if loop is sums else "mean"
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    loader = DataLoader(rows, batch_size=8 // world_size)
    model, optimizer, loader = fullshard.prepare(model, optimizer, loader, loss_reduction=reduction)
    for _ in loop(model, loader):
        optimizer.step()
        optimizer.zero_grad()
    assert_values(model, plain)


@ranks(2, 4)
def test_models_in_a_chain_and_gradients_of_what_they_are_given(world_size):
    torch.manual_seed(0)
    first, second = Model().double(), Model().double()
    plain = copy.deepcopy(nn.ModuleList([first, second]))
    start = torch.full((1, 8), 0.1, dtype=torch.float64)

    def gradient(first, second, batches):
        offset = start.clone().requires_grad_()
        for x, y in batches:
            hidden = first(x.double() + offset)
            nn.functional.mse_loss(second(hidden.expand(-1, 8)), y.double()).backward()
        return offset.grad

    expected = gradient(plain[0], plain[1], DataLoader(data(11), batch_size=8))
    first, second, loader = fullshard.prepare(first, second, DataLoader(data(11), batch_size=8 // world_size))
    mine = gradient(first, second, [])
    total = torch.zeros_like(start)
    for batch in loader:
        mine = gradient(first, second, [batch])  # of this rank's loss
        total += mine * uneven_batches.active_share().weight / world_size
    torch.distributed.all_reduce(total)
    torch.testing.assert_close(total, expected, rtol=1e-10, atol=1e-13)
    for model, one in ((first, plain[0]), (second, plain[1])):
        for p, q in zip(model.parameters(), one.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-9, atol=1e-12)


@ranks(1, 2, 4)
def test_a_mean_over_tokens(world_size):
    """Rows of different lengths: each rank says how many tokens its loss is a mean over."""
    torch.manual_seed(0)
    plain = Model().double()
    model = copy.deepcopy(plain)
    mask = torch.rand(13, 1, generator=seeded()) < 0.6
    mask[0] = True
    rows = TensorDataset(*(t.double() for t in data(13).tensors), mask)

    def loss_of(model, x, y, mask):
        return ((model(x) - y).pow(2) * mask).sum() / mask.sum().clamp(min=1)

    for batch in DataLoader(rows, batch_size=8):
        loss_of(plain, *batch).backward()
    model, loader = fullshard.prepare(model, DataLoader(rows, batch_size=8 // world_size))
    for number, batch in enumerate(loader):
        with fullshard.weighted(int(batch[-1].sum())) as tokens:
            loss_of(model, *batch).backward()
        assert tokens == int(mask[number * 8 : number * 8 + 8].sum())
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-9, atol=1e-12)
    with pytest.raises(FSDPError, match=r"weighted\(-1\): expected the number of items"), fullshard.weighted(-1):
        pass


@ranks(2)
def test_uneven_batches_of_the_user_s_own_are_said_once():
    runtime.forget_warnings()
    list(fullshard.prepare(DataLoader(Items(), batch_size=4)))
    assert not any("different sizes" in key for key in runtime.warned())
    list(fullshard.prepare(DataLoader(Items(), batch_sampler=Growing())))
    assert any("different sizes" in key for key in runtime.warned())


# --- gathering --------------------------------------------------------------------------------------------------------

Pair = namedtuple("Pair", "left right")


@ranks(1, 2, 4)
def test_containers_are_gathered_row_by_row(world_size):
    from transformers.modeling_outputs import SequenceClassifierOutput

    loader = fullshard.prepare(DataLoader(range(9), batch_size=8 // world_size))
    seen: dict = {}
    for n in loader:
        made = {
            "n": n,
            "pair": Pair(n.bfloat16(), [n.bool(), (n.float().view(-1, 1, 1).expand(-1, 2, 3),)]),
            "output": SequenceClassifierOutput(logits=n.unsqueeze(1)),
            "words": [{"row": int(i)} for i in n],
            "mapping": UserDict(n=n),
            "loss": n.float().mean(),
            "none": None,
            "rank": runtime.rank(),
        }
        found = fullshard.gather_for_metrics(made)
        total = int(found["n"][-1]) + 1 - len(seen.get("n", []))
        assert isinstance(found["pair"], Pair) and isinstance(found["pair"].right[1], tuple) and found["none"] is None
        assert found["pair"].left.dtype == torch.bfloat16 and found["pair"].right[0].dtype == torch.bool
        assert found["pair"].right[1][0].shape == (total, 2, 3) and found["output"].logits.shape == (total, 1)
        assert found["mapping"]["n"].tolist() == found["n"].tolist() == [row["row"] for row in found["words"]]
        whole = fullshard.gather_for_metrics([n, "x"], use_gather_object=True)
        with_rows = min(world_size, total)
        assert len(found["loss"]) == len(found["rank"]) == with_rows and len(whole) == 2 * with_rows
        assert fullshard.gather_for_metrics("text") == ["text"] * with_rows
        mean = found["n"].double().mean()
        torch.testing.assert_close(fullshard.mean_over_rows(n.double().mean()), mean)
        lost = float("nan") if loader.is_stand_in else n.double().mean()
        torch.testing.assert_close(fullshard.mean_over_rows(lost).double(), mean)
        seen.setdefault("n", []).extend(found["n"].tolist())
    assert seen["n"] == list(range(9))
    outside = fullshard.gather_for_metrics(torch.full((runtime.rank(), 2), runtime.rank()))
    assert outside[:, 0].tolist() == [r for r in range(world_size) for _ in range(r)]
    assert fullshard.mean_over_rows(runtime.rank()).item() == (world_size - 1) / 2


@ranks(2)
def test_what_cannot_be_joined_is_said_on_every_rank():
    mine = torch.zeros(2, 3 + runtime.rank())
    with pytest.raises(ConfigError, match=r"a tensor of \[2, 3\] in float32, rank 1 one of \[2, 4\] in float32"):
        fullshard.gather_for_metrics(mine)
    detections = [{"box": torch.zeros(2)}] * (1 + runtime.rank())
    with pytest.raises(ConfigError, match=r"rank 0 has \[\{box: a tensor\}\], rank 1 has .* use_gather_object=True"):
        fullshard.gather_for_metrics(detections)
    assert len(fullshard.gather_for_metrics(detections, use_gather_object=True)) == 3


@pytest.mark.parametrize("rows", [8, 9, 14, 16])
@ranks(2, 4)
def test_gathered_rows_are_those_that_accelerate_gathers(rows, world_size):
    import accelerate

    place = {"RANK": runtime.rank(), "LOCAL_RANK": runtime.rank(), "WORLD_SIZE": world_size}
    place |= {"ACCELERATE_USE_CPU": "true", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29511}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in place.items():
            patch.setitem(os.environ, name, str(value))
        accelerator = accelerate.Accelerator(cpu=True)
        try:
            assert accelerator.num_processes == world_size
            theirs, ours = [], []
            for prepared, gather, kept in (
                (accelerator.prepare(DataLoader(range(rows), batch_size=2)), accelerator.gather_for_metrics, theirs),
                (fullshard.prepare(DataLoader(range(rows), batch_size=2)), fullshard.gather_for_metrics, ours),
            ):
                for n in prepared:
                    together, words = gather({"n": n, "deep": [(n.double() * 2,)]}), gather([str(int(i)) for i in n])
                    kept.append((together["n"].tolist(), together["deep"][0][0].tolist(), words))
        finally:
            accelerate.state.AcceleratorState._reset_state(True)
            accelerate.state.GradientState._reset_state()
    assert ours == theirs
