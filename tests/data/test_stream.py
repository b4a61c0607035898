"""Streams: the same rows for any number of ranks and workers, gone on with exactly, nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fullshard.config.errors import ConfigError, DataError
from fullshard.data import node_stream, tokenize
from fullshard.data.encode import TextSettings
from fullshard.data.loader import Collator, Loader, Step
from fullshard.data.node_stream import PageReader, Pages
from fullshard.data.raw_row import RawRow
from fullshard.data.row_formats import reading_of
from fullshard.data.sources import DataSource, file_source, row_source
from fullshard.data.stream import Stream, StreamSampler
from fullshard.data.temp_dirs import TempDir, is_alive
from fullshard.data.token_table import TokenTable, make_table
from fullshard.data.tokenize import TokenizerPool, batch_rows
from fullshard.distributed import runtime
from fullshard.distributed.ranks import exchange
from fullshard.sft.sft_config import SFTConfig
from tests.data.tiny import make_tokenizer, text_rows, write_rows
from tests.pool import ranks
from tests.sft.runs import losses, settings, train
from tests.sft.tiny import make_model

PAGE, BATCH, SEED = 16, 6, 5
ROWS = text_rows(70)


def feed(source: DataSource, folder: Path, workers: int = 0, page: int = PAGE, **more: Any) -> StreamSampler:
    values: dict[str, Any] = {name: more.pop(name) for name in ("shuffle", "drop_last", "batch") if name in more}
    check: dict[str, Any] = {"check": more.pop("check")} if "check" in more else {}
    pages = Pages(source, make_tokenizer(), TextSettings(**{"add_special_tokens": False, **more}), page, workers)
    return StreamSampler(Stream(pages, str(folder), **check), seed=SEED, **{"batch": BATCH, **values})


def read(found: StreamSampler, start: int, end: int, position: Any = None, workers: int = 0) -> list[Step]:
    """Steps of one rank that is all there is."""
    return list(Loader(found, Collator(2), found.batch, 0, 1, workers).steps(start, end, position))


def documents(step: Step) -> list[list[int]]:
    """The first document of each row."""
    return [step.pick.source.documents(row)[0][0].tolist() for row in step.pick.rows]


def expected(steps: int, shuffle: bool) -> list[list[list[int]]]:
    """The documents of each step by the words of the manual: pages in order, each shuffled by seed, epoch and page."""
    found: list[list[list[int]]] = []
    tokenizer, epoch = make_tokenizer(), 0
    rows = [[*tokenizer(row["text"])["input_ids"][1:], tokenizer.eos_token_id] for row in ROWS]
    while len(found) < steps:
        stream = []
        for page, start in enumerate(range(0, len(rows), PAGE)):
            part = rows[start : start + PAGE]
            draw = np.random.Generator(np.random.PCG64([SEED, epoch, page]))
            stream += [part[i] for i in (draw.permutation(len(part)) if shuffle else range(len(part)))]
        found += [stream[i : i + BATCH] for i in range(0, len(stream), BATCH)]
        epoch += 1
    return found[:steps]


def left_in(folder: Path) -> list[str]:
    return [p.name for p in (folder / "tokens").iterdir()]


# --- which rows -----------------------------------------------------------------------------------------------------


@given(st.integers(0, 40), st.integers(1, 9), st.integers(1, 7), st.integers(1, 60))
def test_pages_are_cut_where_they_end(rows: int, page: int, batch: int, weight: int) -> None:
    source = [RawRow(str(i), b"x" * (i % 13), i + 1) for i in range(rows)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenize, "BATCH", batch)
        patch.setattr(tokenize, "WEIGHT", weight)
        calls = list(batch_rows(source, page))
    assert [row for call in calls for row in call.rows] == source
    assert [call.ends_data for call in calls] == [False] * (len(calls) - 1) + [True] and calls[-1].ends_page
    assert all(0 < len(call.rows) <= batch for call in calls[:-1]) and (calls[-1].rows or not rows)
    sizes = [0]
    for call in calls:
        sizes[-1] += len(call.rows)
        sizes += [0] if call.ends_page else []
    assert sizes[:-1] == [min(page, rows - start) for start in range(0, max(1, rows), page)]


@pytest.mark.parametrize("shuffle", [True, False])
def test_rows_are_those_of_the_pages(tmp_path: Path, shuffle: bool) -> None:
    found = feed(row_source(ROWS, "rows"), tmp_path, shuffle=shuffle)
    steps = read(found, 0, 26)
    assert [documents(step) for step in steps] == expected(26, shuffle)
    per_epoch = -(-len(ROWS) // BATCH)
    assert [s.pick.ends_epoch for s in steps] == [(i + 1) % per_epoch == 0 for i in range(26)]
    assert [s.pick.epoch for s in steps[:per_epoch]] == [0.0] * (per_epoch - 1) + [1.0]
    assert steps[per_epoch].pick.epoch == pytest.approx(1 + BATCH / len(ROWS))
    for step in steps:
        learnt = sum(int((b["labels"] != -100).sum()) for b in step.batches)
        assert step.pick.targets == learnt == step.pick.tokens - len(step.pick.rows)
    assert left_in(tmp_path) == []


@pytest.mark.parametrize("workers", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_workers_give_the_same_rows(tmp_path: Path, workers: int) -> None:
    source = file_source([write_rows(tmp_path / "train.jsonl", ROWS)])
    plain = read(feed(source, tmp_path, packing=True, max_length=40), 0, 14)
    other = read(feed(source, tmp_path, workers, packing=True, max_length=40), 0, 14, workers=workers)
    for a, b in zip(plain, other, strict=True):
        assert a.pick.position == b.pick.position and a.pick.facts == b.pick.facts and a.mine == b.mine
        assert all(torch.equal(x[k], y[k]) for x, y in zip(a.batches, b.batches, strict=True) for k in x)


def own_documents(step: Step) -> list[list[list[int]]]:
    """The documents of each of this rank's micro-batches."""
    return [[step.pick.source.documents(row)[0][0].tolist() for row in part] for part in step.mine]


def merged(heard: list[list[list[list[list[int]]]]]) -> list[list[list[int]]]:
    """What all ranks have of each step, in the order of the global batch."""
    return [
        [row for micro in zip(*step, strict=True) for part in micro for row in part]
        for step in zip(*heard, strict=True)
    ]  # fmt: skip


@ranks(1, 2, 4)
def test_ranks_share_the_same_rows(tmp_path: Path, world_size: int) -> None:
    runtime.use_spmd()
    found = feed(row_source(ROWS, "rows"), tmp_path)
    loader = Loader(found, Collator(2), 1, runtime.rank(), world_size)
    mine = []
    for step in loader.steps(0, 26):
        mine.append(own_documents(step))
        assert exchange(step.pick.position, "positions") == [step.pick.position] * world_size
    assert merged(exchange(mine, "rows")) == expected(26, True)
    # A position says nothing of ranks: after five steps of the second epoch it is this one on any number.
    there = {"epoch": 1, "page": 1, "place": PAGE, "row": 5 * BATCH - PAGE, "before": len(ROWS) + 5 * BATCH}
    later = []
    for step in loader.steps(17, 20, there):
        later.append(own_documents(step))
        exchange(step.number, "a step, as in training")
    assert merged(exchange(later, "rows")) == expected(20, True)[17:]
    exchange(None, "the maker has closed")
    assert left_in(tmp_path) == []


@pytest.mark.parametrize(
    ("packing", "drop_last"),
    [(False, False), (True, True), *(pytest.param(*p, marks=pytest.mark.slow) for p in ((True, False), (False, True)))],
)
def test_resumed_anywhere_it_goes_on_the_same(tmp_path: Path, packing: bool, drop_last: bool) -> None:
    source = file_source([write_rows(tmp_path / "train.jsonl", ROWS)])
    found = feed(source, tmp_path, packing=packing, max_length=40, drop_last=drop_last)
    whole = read(found, 0, 30)
    for k in range(0, 29, 4):
        position = json.loads(json.dumps(whole[k].pick.position))
        for a, b in zip(read(found, k + 1, 30, position), whole[k + 1 :], strict=True):
            assert (
                documents(a) == documents(b) and a.number == b.number and a.pick.rows.tolist() == b.pick.rows.tolist()
            )
            assert a.pick.position == b.pick.position and a.pick.facts == b.pick.facts
            assert (a.pick.epoch, a.pick.ends_epoch) == (b.pick.epoch, b.pick.ends_epoch)
    if drop_last:
        assert all(len(step.pick.rows) == BATCH for step in whole)


def test_resuming_reads_nothing_before_its_page(tmp_path: Path) -> None:
    """The file is opened at the place, whatever stands before it."""
    path = write_rows(tmp_path / "train.jsonl", ROWS)
    found = feed(file_source([path]), tmp_path)
    whole = read(found, 0, 11)
    position = whole[8].pick.position or {}
    lines = path.read_bytes().splitlines(keepends=True)
    before = position["page"] * PAGE
    path.write_bytes(b"".join(b"#" * (len(line) - 1) + b"\n" for line in lines[:before]) + b"".join(lines[before:]))
    assert position["page"] == 3
    assert [documents(s) for s in read(found, 9, 11, position)] == [documents(s) for s in whole[9:]]


def test_an_epoch_without_its_last_batch(tmp_path: Path) -> None:
    found = feed(row_source(ROWS, "rows"), tmp_path, drop_last=True)
    steps = read(found, 0, 23)
    assert [s.pick.ends_epoch for s in steps] == [(i + 1) % (len(ROWS) // BATCH) == 0 for i in range(23)]
    tiny = read(feed(row_source(ROWS[:3], "rows"), tmp_path, drop_last=True), 0, 3)
    assert [len(s.pick.rows) for s in tiny] == [3, 3, 3] and all(s.pick.ends_epoch for s in tiny)


def test_pages_of_4096_rows_are_packed_as_well_as_it_goes(tmp_path: Path) -> None:
    found = feed(row_source(text_rows(4096 * 2), "rows"), tmp_path, page=4096, packing=True, max_length=1024, batch=8)
    facts = read(found, 0, 1)[0].pick.facts
    assert facts is not None and facts["documents"] == 4096
    assert facts["tokens"] / (facts["rows"] * 1024) >= 0.98


def test_rows_without_tokens_are_passed_over(tmp_path: Path) -> None:
    """Whole pages of them as well, at the end of the data too: then the step before ends the epoch."""
    rows = [*ROWS[:5], *[{"text": ""}] * 40, *ROWS[5:9], {"broken": 1}, *[{"text": ""}] * 40]
    reading = reading_of("text", None, "skip")
    steps = read(feed(row_source(rows, "rows"), tmp_path, reading=reading, shuffle=False), 0, 4)
    assert [len(s.pick.rows) for s in steps] == [6, 3, 6, 3]
    assert [s.pick.ends_epoch for s in steps] == [False, True, False, True]
    facts = steps[1].pick.facts
    assert facts is not None and (facts["documents"], facts["empty"], facts["bad"]) == (9, 80, 1)


# --- what goes wrong ------------------------------------------------------------------------------------------------


def test_data_that_teaches_nothing(tmp_path: Path) -> None:
    for rows in ([], [{"text": ""}] * 40):
        with pytest.raises(DataError, match="no documents with tokens"):
            read(feed(row_source(rows, "rows"), tmp_path), 0, 1)
    assert left_in(tmp_path) == []


@ranks(2)
@pytest.mark.parametrize("threads", [0, 2])
def test_every_rank_meets_an_error_at_the_same_step(tmp_path: Path, threads: int) -> None:
    runtime.use_spmd()
    rows = [*ROWS[:37], {"text": 3}, *ROWS]
    loader = Loader(feed(row_source(rows, "rows"), tmp_path), Collator(2), 3, runtime.rank(), 2, threads)
    done: list[Any] = []
    with pytest.raises(DataError, match="rows, row 37: ") as error:
        done.extend(exchange(step.number, "a step")[0] for step in loader.steps(0, 20))
    assert len(set(exchange(str(error.value), "errors"))) == 1
    # The third page has the bad row; rows 30 and 31 of the first two wait for it in vain.
    assert exchange(done, "steps") == [[0, 1, 2, 3, 4]] * 2
    assert left_in(tmp_path) == []


@ranks(2)
def test_nodes_with_other_files_are_refused_before_the_first_step(tmp_path: Path) -> None:
    """Also where the first page is the same: the files differ after it."""
    runtime.use_spmd()
    file, rows = tmp_path / f"node-{runtime.rank()}" / "rows.jsonl", ROWS[: 2 * PAGE + runtime.rank()]
    file.parent.mkdir()
    write_rows(file, rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "local_rank", lambda: 0)  # each rank is a node of its own
        patch.setattr(runtime, "local_world_size", lambda: 1)
        loader = Loader(feed(file_source([file]), file.parent), Collator(2), 2, runtime.rank(), 2)
        with pytest.raises(DataError, match="ranks 1 read other data than rank 0"):
            next(iter(loader.steps(0, 1)))


@ranks(2)
@pytest.mark.parametrize("late", [0.0, pytest.param(1.5, marks=pytest.mark.slow)])
def test_tokens_that_the_model_cannot_take_are_refused_on_every_rank(tmp_path: Path, late: float) -> None:
    """Also on a rank that comes to the page long after the first has refused it."""
    runtime.use_spmd()
    rows = [{"input_ids": [1, 2]}] * 20 + [{"input_ids": [1, 999]}]

    def check(page: TokenTable) -> None:
        if page.tokens[:].max() > 400:
            raise ConfigError("token 999")

    loader = Loader(feed(row_source(rows, "rows"), tmp_path, check=check), Collator(2), 3, runtime.rank(), 2)
    done: list[Any] = []

    def train() -> None:
        for step in loader.steps(0, 20):
            done.extend(exchange(step.number, "a step"))
            time.sleep(late * runtime.rank())

    with pytest.raises(ConfigError, match="token 999"):
        train()
    assert done == [0, 0, 1, 1]


def test_columns_that_are_not_used_are_named_once(tmp_path: Path) -> None:
    runtime.forget_warnings()
    read(feed(row_source([{**row, "label": 1} for row in ROWS], "rows"), tmp_path), 0, 30)
    assert {key for key in runtime.warned() if key.startswith("unused")} == {"unused label"}
    runtime.forget_warnings()


def test_left_early_nothing_stays(tmp_path: Path) -> None:
    steps = Loader(feed(row_source(ROWS, "rows"), tmp_path), Collator(2), BATCH, 0, 1).steps(0, 1000)
    next(steps)
    (folder,) = [p for p in (tmp_path / "tokens").iterdir() if p.is_dir()]
    assert is_alive(folder)
    for _ in range(60):  # many epochs: pages come and go
        next(steps)
    assert len(list(folder.glob("page-*"))) <= node_stream.AHEAD + 2
    steps.close()
    assert left_in(tmp_path) == []


def test_changed_data_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = read(feed(row_source(ROWS, "rows"), tmp_path), 0, 5)[-1].pick.position
    runtime.get_logger().addHandler(caplog.handler)
    try:
        other = read(feed(row_source(text_rows(70, seed=8), "rows"), tmp_path), 5, 6, first)
    finally:
        runtime.get_logger().removeHandler(caplog.handler)
    assert "have changed since the checkpoint" in caplog.text and len(other[0].pick.rows) == BATCH


def test_streaming_needs_max_steps() -> None:
    with pytest.raises(ConfigError, match="streaming needs max_steps"):
        SFTConfig(streaming=True)


# --- processes ------------------------------------------------------------------------------------------------------


def wait_until(condition: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_worker_that_is_killed_is_one_error(tmp_path: Path) -> None:
    with TokenizerPool(make_tokenizer(), TextSettings(), workers=1) as pool:
        chunks = pool.chunks(batch_rows([RawRow(str(i), ROWS[i % 70], i + 1) for i in range(5000)]))
        next(chunks)
        (process,) = pool._processes
        os.kill(process._process.pid, signal.SIGKILL)
        with pytest.raises(DataError, match=r"a tokenization worker \(dataloader_num_workers\) was killed by SIGKILL"):
            list(chunks)
    assert not Path(f"/proc/{process._process.pid}").exists()


def test_a_worker_s_error_is_the_row_s() -> None:
    rows = [RawRow(f"row {i}", {"text": 3} if i == 700 else ROWS[0], i + 1) for i in range(1200)]
    with TokenizerPool(make_tokenizer(), TextSettings(), workers=1) as pool:
        seen: list[int] = []
        with pytest.raises(DataError, match=r"^row 700: "):
            seen.extend(len(call.rows) for call, _ in pool.chunks(batch_rows(rows)))
    assert seen == [512], "what stands before it comes first"


class Homemade:
    """A tokenizer of the user's that no other process can have."""

    def __reduce__(self) -> Any:
        raise TypeError("made of local things")


def test_a_tokenizer_that_cannot_travel() -> None:
    with pytest.raises(DataError, match=r"dataloader_num_workers is 2, but a Homemade cannot .*\(made of local"):
        TokenizerPool(Homemade(), TextSettings(), workers=2)


ORPHANS = """
import sys
from pathlib import Path
from fullshard.data.encode import TextSettings
from fullshard.data.raw_row import RawRow
from fullshard.data.temp_dirs import TempDir
from fullshard.data.tokenize import TokenizerPool, batch_rows
from tests.data.tiny import make_tokenizer
scratch = TempDir(Path(sys.argv[1]))
pool = TokenizerPool(make_tokenizer(), TextSettings(), 1)
chunks = pool.chunks(batch_rows(RawRow("", {"text": "one"}, i) for i in range(10**9)))
next(chunks)
print(pool._processes[0]._process.pid, scratch.folder, flush=True)
for _ in chunks:
    pass
"""


@pytest.mark.slow
def test_a_killed_program_leaves_nothing_for_long(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")])}
    job = subprocess.Popen(
        [sys.executable, "-c", ORPHANS, tmp_path], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert job.stdout is not None
    pid, folder = job.stdout.readline().split()
    assert is_alive(Path(folder)) and Path(f"/proc/{pid}").exists()
    job.kill()
    job.wait()
    wait_until(lambda: not Path(f"/proc/{pid}").exists())
    assert Path(folder).exists() and not is_alive(Path(folder))
    with TempDir(tmp_path) as mine:
        assert sorted(p.name for p in tmp_path.iterdir()) == [mine.folder.name, f"{mine.folder.name}.lock"]
    assert not list(tmp_path.iterdir())


# --- training -------------------------------------------------------------------------------------------------------


def streamed(folder: Path, **changes: Any) -> SFTConfig:
    values: dict[str, Any] = {
        "streaming": True, "shuffle_buffer_size": PAGE, "max_steps": 9, "packing": True, "save_strategy": "steps",
        "save_steps": 5, "per_device_train_batch_size": 3, "lr_scheduler_type": "constant",
    }  # fmt: skip
    return settings(folder, **{**values, **changes})


@pytest.mark.slow
@ranks(2)
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_resumed_streamed_run_is_as_never_stopped(tmp_path: Path, workers: int) -> None:
    """Stopped in the second epoch, and gone on with in new objects, without or with workers."""
    rows = write_rows(tmp_path / f"{runtime.rank()}.jsonl", ROWS)
    whole = train(make_model(), streamed(tmp_path / "whole"), str(rows))
    train(make_model(), streamed(tmp_path / "part", max_steps=6), str(rows))
    more = streamed(tmp_path / "part", resume=True, dataloader_num_workers=workers)
    rest = train(make_model(seed=1), more, str(rows))
    assert losses(rest) == losses(whole) and len(losses(whole)) == 9
    assert rest.loop.progress == whole.loop.progress and rest.loop.progress.epoch > 1
    assert rest.state.epoch == rest.loop.progress.epoch
    for (name, a), (_, b) in zip(rest.model.named_parameters(), whole.model.named_parameters(), strict=True):
        assert torch.equal(a.to_local(), b.to_local()), name
    assert not list(tmp_path.rglob("scratch-*"))


@pytest.mark.slow
@ranks(1)
def test_the_page_size_changes_the_run(tmp_path: Path) -> None:
    few = [
        losses(train(make_model(), streamed(tmp_path / name, max_steps=3, **changes), ROWS))
        for name, changes in (("a", {}), ("b", {"shuffle_buffer_size": 40}), ("c", {"streaming": False}))
    ]
    assert few[0] != few[1] != few[2] != few[0]


def all_rows(open_page: Callable[[], TokenTable]) -> list[Any]:
    table = open_page()
    return [table.documents(row) for row in range(len(table))]


@pytest.mark.parametrize("name", ["tokens.bin", "learnt.bin", "document_starts.bin", "manifest.json"])
def test_a_damaged_page_is_an_error(tmp_path: Path, name: str) -> None:
    page = tmp_path / "page-00000000"
    make_table(row_source(text_rows(9), "rows"), make_tokenizer(), TextSettings(), page)
    content = bytearray((page / name).read_bytes())
    content[len(content) // 2] ^= 4
    (page / name).write_bytes(content)
    reader = PageReader(tmp_path, 0)
    with pytest.raises(DataError, match=r"the tokens in .*page-00000000 are damaged: "):
        all_rows(reader.read)
    reader.close()
