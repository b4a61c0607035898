"""Which rows a step has, and what they look like as tensors."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fullshard.config.errors import DataError
from fullshard.data.encode import TextSettings
from fullshard.data.loader import (
    IGNORED,
    Collator,
    GlobalBatch,
    Loader,
    RowOrder,
    TableSampler,
    load_table,
    micro_batch_rows,
)
from fullshard.data.sources import row_source
from fullshard.data.token_table import TokenTable
from tests.data.tiny import make_tokenizer, text_rows


def table(tmp_path: Path, rows: int = 23, **settings: Any) -> TokenTable:
    return load_table(row_source(text_rows(rows), "rows"), make_tokenizer(), TextSettings(**settings), str(tmp_path))


@given(st.integers(1, 50), st.integers(1, 9), st.integers(0, 5), st.booleans())
def test_every_epoch_has_each_row_once(rows: int, batch: int, seed: int, shuffle: bool) -> None:
    order = RowOrder(rows, batch, seed, shuffle)
    epochs = [
        np.concatenate([order.step(e * order.steps_per_epoch + i) for i in range(order.steps_per_epoch)])
        for e in (0, 1)
    ]
    for epoch in epochs:
        assert sorted(epoch) == list(range(rows))
    if shuffle and rows > 10:
        assert epochs[0].tolist() != epochs[1].tolist()
    dropped = RowOrder(rows, batch, seed, shuffle, drop_last=True)
    if rows >= batch:
        assert all(len(dropped.step(i)) == batch for i in range(dropped.steps_per_epoch))


@given(st.integers(1, 40), st.sampled_from([1, 2, 3, 4]), st.integers(1, 5))
def test_ranks_share_a_batch(rows: int, world: int, size: int) -> None:
    parts = [micro_batch_rows(range(rows), rank, world, size) for rank in range(world)]
    assert len({len(p) for p in parts}) == 1, "as many micro-batches on every rank"
    assert sorted(row for p in parts for micro in p for row in micro) == list(range(rows))
    assert max(len(micro) for p in parts for micro in p) <= size
    assert len(parts[0]) == -(-rows // (world * size))


def test_the_rows_of_a_step_do_not_depend_on_the_ranks(tmp_path: Path) -> None:
    found = table(tmp_path)
    order = RowOrder(len(found), 8, seed=3)
    seen = []
    for world, size in ((1, 8), (2, 4), (4, 1), (2, 1)):
        feed = TableSampler(found, order)
        loaders = [Loader(feed, Collator(2), size, rank, world) for rank in range(world)]
        steps = [[loader.load(feed.pick(step)) for loader in loaders] for step in range(5)]
        seen.append([sorted(r for part in ranks for micro in part.mine for r in micro) for ranks in steps])
        for ranks in steps:
            learnt = sum(int((b["labels"] != IGNORED).sum()) for part in ranks for b in part.batches)
            assert {part.pick.targets for part in ranks} == {learnt}
    assert all(s == seen[0] for s in seen)


def test_threads_give_the_same_steps(tmp_path: Path) -> None:
    found = table(tmp_path)
    order = RowOrder(len(found), 5, seed=1)
    plain = Loader(TableSampler(found, order), Collator(2), 2, 0, 2)
    threads = Loader(TableSampler(found, order), Collator(2), 2, 0, 2, workers=3)
    for a, b in zip(plain.steps(3, 14), threads.steps(3, 14), strict=True):
        assert a.number == b.number and a.mine == b.mine
        assert all(torch.equal(x[k], y[k]) for x, y in zip(a.batches, b.batches, strict=True) for k in x)


def test_tensors_of_padded_rows(tmp_path: Path) -> None:
    found = table(tmp_path)
    batch = Collator(2, multiple=4)(found, [0, 1, 2])
    assert set(batch) == {"input_ids", "labels"} and batch["input_ids"].shape[1] % 4 == 0
    for i in range(3):
        ((tokens, _),) = found.documents(i)
        n = len(tokens)
        assert batch["input_ids"][i].tolist() == [*tokens.tolist(), *[2] * (batch["input_ids"].shape[1] - n)]
        assert batch["labels"][i, :1].tolist() == [IGNORED]
        assert batch["labels"][i, 1:n].tolist() == tokens[1:].tolist() and (batch["labels"][i, n:] == IGNORED).all()


def test_tensors_of_packed_rows(tmp_path: Path) -> None:
    found = table(tmp_path, max_length=40, packing=True)
    for flatten in (False, True):
        batch = Collator(2, isolate=True, flatten=flatten)(found, range(len(found)))
        assert set(batch) == {"input_ids", "labels", "position_ids"}
        starts = batch["position_ids"].reshape(-1) == 0
        assert (batch["labels"].reshape(-1)[starts] == IGNORED).all(), "no document is predicted from another"
        assert int((batch["labels"] != IGNORED).sum()) == found.row_targets[:].sum() == found.facts["targets"]
        if flatten:
            assert batch["input_ids"].shape == (1, found.facts["tokens"]) and starts.sum() == found.facts["documents"]


def test_a_rank_without_rows_gets_a_row_that_teaches_nothing(tmp_path: Path) -> None:
    found = table(tmp_path, rows=1)
    feed = TableSampler(found, RowOrder(1, 4, 0))
    empty = Loader(feed, Collator(2), 1, 3, 4).load(feed.pick(0))
    assert empty.mine == [[]] and (empty.batches[0]["labels"] == IGNORED).all()
    assert empty.batches[0]["input_ids"].shape[0] == 1 and empty.pick.targets == found.facts["targets"]


def test_evaluation_sees_each_row_once(tmp_path: Path) -> None:
    found = table(tmp_path)
    feed = TableSampler(found, RowOrder(len(found), 6, seed=0, shuffle=False))
    loaders = [Loader(feed, Collator(2), 3, rank, 2) for rank in range(2)]
    rows = [r for each in loaders for step in each.steps(0, feed.order.steps_per_epoch) for m in step.mine for r in m]
    assert sorted(rows) == list(range(len(found)))


def test_a_step_says_where_its_epoch_stands(tmp_path: Path) -> None:
    found = table(tmp_path)
    feed = TableSampler(found, RowOrder(len(found), 5, seed=1))
    picks = [feed.pick(step) for step in range(12)]
    assert [p.ends_epoch for p in picks] == [step % 5 == 4 for step in range(12)]
    assert [p.epoch for p in picks] == [(step + 1) / 5 for step in range(12)]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_comes_after_the_steps_before_it(tmp_path: Path, workers: int) -> None:
    found = table(tmp_path)
    plain = TableSampler(found, RowOrder(len(found), 5, seed=1))
    closed = []

    class BatchSampler:
        batch = 5

        def picks(self, start: int, end: int, position: Any) -> Generator[GlobalBatch, None, None]:
            try:
                yield from plain.picks(start, 4, None)
                raise DataError("no more")
            finally:
                closed.append(True)

    seen: list[int] = []
    with pytest.raises(DataError, match="no more"):
        seen.extend(step.number for step in Loader(BatchSampler(), Collator(2), 5, 0, 1, workers).steps(0, 9))
    assert seen == [0, 1, 2, 3] and closed == [True]
    steps = Loader(BatchSampler(), Collator(2), 5, 0, 1, workers).steps(0, 9)
    next(steps)
    steps.close()
    assert closed == [True, True], "left early, the feed is closed as well"
