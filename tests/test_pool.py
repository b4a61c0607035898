"""The harness itself: what it shows when a rank fails, hangs, dies or leaves the others behind."""

from __future__ import annotations

import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import fullshard.runtime as xr
from tests.pool import ROOT, pool, ranks


def outcome_of(test: Callable[..., None], *args: object) -> str:
    with pytest.raises(pytest.fail.Exception) as failure:
        test(*args)
    return str(failure.value.msg)


@ranks(1, 2, 4)
def test_body_runs_on_every_rank(world_size: int) -> None:
    assert (xr.is_spmd(), xr.world_size(), torch.get_num_threads()) == (True, world_size, 1)
    total = torch.tensor([xr.rank()])
    dist.all_reduce(total)
    assert total.item() == sum(range(world_size))


@pytest.mark.parametrize("word", ["first", "second"])
@ranks(2)
def test_parameters_and_fixtures_reach_the_ranks(word: str, tmp_path: Path) -> None:
    (tmp_path / f"{xr.rank()}").write_text(word)
    xr.barrier()
    assert [(tmp_path / f"{r}").read_text() for r in range(2)] == [word, word]


class TestMethods:
    @ranks(2)
    def test_methods_work(self) -> None:
        assert type(self) is TestMethods


@ranks(2)
@given(st.lists(st.integers(-100, 100), min_size=1, max_size=5))
def test_hypothesis_draws_alike_on_every_rank(numbers: list[int]) -> None:
    mine = torch.tensor(numbers)
    total = mine.clone()
    dist.all_reduce(total)
    assert torch.equal(total, 2 * mine)


@given(number=st.integers(0, 5))
@ranks(2)
def test_hypothesis_may_draw_in_the_parent(number: int) -> None:
    assert 0 <= number <= 5


@ranks(2)
def one_rank_fails(number: int) -> None:
    print(f"about to compare on rank {xr.rank()}")
    assert [number, xr.rank()] == [number, 0]


def test_failing_rank_is_shown() -> None:
    shown = outcome_of(one_rank_fails, 7)
    assert shown.startswith("rank 1 failed\n")
    assert "assert [7, 1] == [7, 0]" in shown and "At index 1 diff: 1 != 0" in shown
    assert "in one_rank_fails" in shown and "in _run" not in shown
    assert "about to compare on rank 1" in shown


@ranks(2)
def one_rank_fails_before_a_collective() -> None:
    if xr.rank() == 1:
        raise ValueError("rank 1 has a reason")
    dist.all_reduce(torch.ones(1))


@pytest.mark.slow
def test_ranks_that_wait_for_a_failed_one_do_not_hide_it() -> None:
    before = pool(2)
    started = time.monotonic()
    shown = outcome_of(one_rank_fails_before_a_collective)
    assert time.monotonic() - started < 40
    assert shown.index("ValueError: rank 1 has a reason") < shown.index("rank 0: stuck")
    assert "in all_reduce" in shown
    assert pool(2) is not before
    test_body_runs_on_every_rank(world_size=2)


@ranks(2)
def all_ranks_fail() -> None:
    raise KeyError("same everywhere")


def test_equal_failures_are_told_once_and_keep_the_pool() -> None:
    before = pool(2)
    shown = outcome_of(all_ranks_fail)
    assert "---- rank 0, 1: failed" in shown and shown.count("KeyError: 'same everywhere'") == 1
    assert pool(2) is before


@ranks(2, timeout=2)
def hangs() -> None:
    if xr.rank() == 0:
        time.sleep(30)


def test_hang_is_reported_with_stacks_and_the_pool_recovers() -> None:
    shown = outcome_of(hangs)
    assert shown.startswith("rank 0 stuck: no end after 2 s")
    assert "in hangs" in shown and "pool_worker.py" not in shown
    test_body_runs_on_every_rank(world_size=2)


@ranks(2)
def dies() -> None:
    if xr.rank() == 1:
        os._exit(3)


def test_dead_rank_is_reported_and_the_pool_recovers() -> None:
    assert "rank 1: died\nthe process ended with exit code 3" in outcome_of(dies)
    test_body_runs_on_every_rank(world_size=2)


@ranks(2)
def leaves_a_collective_behind() -> None:
    if xr.rank() == 0:
        dist.all_reduce(torch.ones(3), async_op=True)


@pytest.mark.slow
def test_ranks_out_of_step_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.pool.SYNC_WITHIN", 2.0)
    assert "left its ranks out of step" in outcome_of(leaves_a_collective_behind)
    test_body_runs_on_every_rank(world_size=2)


@ranks(2)
def skips(everywhere: bool) -> None:
    if everywhere or xr.rank() == 1:
        pytest.skip("not today")


def test_skip_is_a_skip_if_all_ranks_agree() -> None:
    with pytest.raises(pytest.skip.Exception, match="not today"):
        skips(True)
    assert "the ranks disagree about the outcome" in outcome_of(skips, False)


@ranks(2)
def draws_and_changes_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math, "tau", 6)
    torch.rand(3), random.random()
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    xr.warn_once("key", "message")


@ranks(2)
def starts_clean(known: float) -> None:
    assert torch.rand(1).item() == pytest.approx(known)
    assert torch.get_default_dtype() is torch.float32
    assert torch.is_grad_enabled()
    assert not xr.warned()
    assert math.tau > 6, "the last test's patches are still there"


def test_each_test_starts_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.pool_worker import SEED

    draws_and_changes_defaults(monkeypatch=monkeypatch)
    starts_clean(torch.rand(1, generator=torch.Generator().manual_seed(SEED)).item())


RUN_THAT_HANGS = """
import time
from tests.pool import ranks
@ranks(2)
def test_hangs(tmp_path):
    (tmp_path.parent / "started").touch()
    time.sleep(50)
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_no_process_outlives_the_run(end: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "test_hangs.py").write_text(RUN_THAT_HANGS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "--rootdir", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    run = subprocess.Popen(
        [*command, f"--basetemp={tmp_path}/base", "test_hangs.py"],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # shells let background jobs ignore it
    )
    try:
        wait_until(lambda: (tmp_path / "base" / "started").exists(), 90)
        run.send_signal(end)
        assert run.wait(90) != 0
        wait_until(lambda: not alive_in_session(run.pid), 40)
    finally:
        for pid in alive_in_session(run.pid):
            os.kill(pid, signal.SIGKILL)


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not so after {seconds} s"
        time.sleep(0.1)


def alive_in_session(session: int) -> list[int]:
    """The processes of a session, read from /proc; zombies do not count."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, sid = stat.read_text().rpartition(")")[2].split()[:4]
        except (OSError, ValueError):
            continue
        if int(sid) == session and state != "Z":
            found.append(int(stat.parent.name))
    return found
