"""Ranks that fall out of step, stop or disappear: named within seconds, ended only when they can never meet again."""

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fullshard.config.errors import FSDPError, RankLostError
from fullshard.distributed import processes, runtime
from fullshard.distributed.groups import short_name
from fullshard.distributed.job_store import JobStore
from fullshard.distributed.processes import Process, state_of
from fullshard.distributed.watchdog import abort, heartbeat, investigate, rank_state, threads, watch
from fullshard.distributed.watchdog.diagnosis import (
    Failure,
    RankStatus,
    Wait,
    describe_wait,
    find_failure,
    is_member,
    late_ranks,
)
from fullshard.distributed.watchdog.external_waits import ExternalWaits
from fullshard.distributed.watchdog.heartbeat import HeartbeatRing, Liveness, beat_every
from fullshard.fsdp import FSDPv2
from fullshard.launch.worker import EXIT_RANK_LOST
from tests.fsdp.programs import Block, Stack, mesh_for
from tests.pool import ROOT, ranks


class _Heard(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []
        self.then = lambda: None

    def emit(self, record):
        self.lines.append(record.getMessage())
        self.then()


@contextlib.contextmanager
def _listening(report_after):
    """Hear the log, and wait less than a user would."""
    logger, heard = runtime.get_logger(), _Heard()
    logger.addHandler(heard)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(investigate, "REPORT_AFTER", report_after)
        patch.setattr(threads, "POLL", 0.1)
        patch.setattr(heartbeat, "BEAT", 0.2)
        try:
            yield heard
        finally:
            logger.removeHandler(heard)


@pytest.mark.parametrize("world", [2, 256, 4096])
def test_a_missing_rank_is_named_within_ten_seconds(world):
    beat = beat_every(world)
    # A heartbeat is seen by the successor at its next one, and its absence at the one after the limit.
    assert heartbeat.SILENT_AFTER + 2 * beat < 10
    # A wait is looked at on a heartbeat; others answer on theirs; the answers are read on the next.
    assert investigate.REPORT_AFTER + threads.POLL + 2 * beat < 10


# --- whole programs in the pool ---------------------------------------------------------------------------------------


@pytest.mark.slow
@ranks(2)
def test_a_slow_rank_is_reported_and_left_alone():
    watch.begin_step(1)
    model = FSDPv2(Stack(), mesh_for("FULL_SHARD"), auto_wrap_policy={Block}, small_parameter_bytes=0)
    model(torch.randn(4, 8)).sum().backward()
    dist.barrier()
    store = dist.distributed_c10d._get_default_store()
    with _listening(report_after=1.0) as heard:
        if runtime.rank() == 0:
            heard.then = lambda: store.set("a slow rank was reported", "")
        else:  # as slow as it takes, and slower
            store.wait(["a slow rank was reported"], timedelta(seconds=50))
            time.sleep(2)
        model(torch.randn(4, 8)).sum().backward()
        time.sleep(0.5)
    if runtime.rank() == 0:
        [message] = heard.lines
        assert "step 1, unit (root), gather" in message and "not entered by rank(s) 1" in message
        assert "rank 1: step 1, unit (root), after backward" in message  # no optimizer has stepped
        assert "rank 0: step 1, unit (root), gather (waiting)" in message
    else:
        assert not heard.lines
    assert rank_state.current.failure is None
    watch.raise_failure()


@pytest.mark.slow
@ranks(2)
def test_a_rank_that_never_comes_is_given_up_at_the_timeout():
    watch.begin_step(1)
    model = FSDPv2(Stack(), mesh_for("FULL_SHARD"), timeout=2.0)
    model(torch.randn(4, 8)).sum().backward()
    dist.barrier()
    store = dist.distributed_c10d._get_default_store()
    start = time.monotonic()
    if runtime.rank() == 1:
        store.wait(["given up"], timedelta(seconds=50))
    with pytest.raises(FSDPError, match=r"cannot continue in step 1, unit \(root\), gather"):
        model(torch.randn(4, 8)).sum().backward()
    if runtime.rank() == 0:
        assert time.monotonic() - start > 1.5
        store.set("given up", "")
    dist.barrier()
    watch.forget()


class Forked(nn.Module):
    """Calls one of two units: no collective can put that right."""

    def __init__(self):
        super().__init__()
        self.left, self.right = Block(), Block()

    def forward(self, x, way):
        return self.left(x) if way == 0 else self.right(x)


@ranks(2)
def test_ranks_in_different_operations_are_stopped():
    watch.begin_step(1)
    model = FSDPv2(Forked(), mesh_for("FULL_SHARD"), auto_wrap_policy={Block}, small_parameter_bytes=0)
    model(torch.randn(4, 8), 0).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    dist.barrier()
    start = time.monotonic()
    with _listening(report_after=1.0), pytest.raises(FSDPError) as caught:
        # Pieces of one size: only their names tell them apart.
        model(torch.randn(4, 8), runtime.rank()).sum().backward()
    assert time.monotonic() - start < 15
    message = str(caught.value)
    assert "different operations" in message
    assert "rank 0 is in step 1, unit left, gather, rank 1 in step 1, unit right, gather" in message or (
        "rank 1 is in step 1, unit right, gather, rank 0 in step 1, unit left, gather" in message
    )
    assert not isinstance(caught.value, RankLostError)  # the program's mistake: exit code 2
    assert caught.value.exit_code == 2
    # Until the program has put that right nothing goes on.
    for attempt in (optimizer.step, lambda: model(torch.randn(4, 8), 0), lambda: model.clip_grad_norm_(1.0)):
        with pytest.raises(FSDPError, match="different operations"):
            attempt()
    dist.barrier()
    watch.forget()
    again = FSDPv2(Stack(), mesh_for("FULL_SHARD"))  # other communicators: the job can go on
    again(torch.randn(4, 8)).sum().backward()


# --- followed works ---------------------------------------------------------------------------------------------------


class _Work:
    """What a backend returns, as far as the watch asks."""

    def __init__(self, *, done=False, error=None):
        self.completed, self.error = done, error

    def is_completed(self):
        if self.error:
            raise RuntimeError(self.error)
        return self.completed


class _Future:
    """torch's result of an NCCL work: 0 is success, 1 a time-out, 2 a broken connection."""

    def __init__(self, result=None):
        self.result = result

    def done(self):
        return self.result is not None

    def value(self):
        return self.result


class _NCCLWork(_Work):
    def __init__(self, result=None):
        super().__init__()
        self.future = _Future(result)

    def get_future_result(self):
        return self.future

    def is_completed(self):
        raise AssertionError("asking the work itself queries CUDA under Python's lock")


@pytest.fixture
def alone(monkeypatch):
    """A state of its own, and no threads."""
    monkeypatch.setattr(rank_state, "current", rank_state.RankState())
    monkeypatch.setattr(threads, "ensure_started", lambda: None)
    made = watch.watch_for("gather", (0, 1), None)
    watch.at(3, "layers.0", "gather")
    return made


def test_followed_works_are_let_go_in_order(alone):
    works = [_Work(done=True), _NCCLWork(0), _Work(), _Work(done=True)]
    labels = []
    for work in works:
        labels.append(alone.issue())
        alone.follow(labels[-1], [work])
    now = time.monotonic()
    assert rank_state.finish_followed(now) is None
    assert [label.number for label, _, _ in alone.followed] == [3, 4]
    [(label, wait)] = rank_state.waits(now + 7)
    assert label is labels[2] and wait.on_device and 6.5 < wait.seconds < 7.5
    works[2].completed = True
    assert rank_state.finish_followed(now + 8) is None
    assert not alone.followed and rank_state.waits(now + 9) == []


def test_time_counts_from_when_an_operation_is_the_oldest(alone):
    first, second = _Work(), _Work()
    for work in (first, second):
        alone.follow(alone.issue(), [work])
    now = time.monotonic()
    rank_state.finish_followed(now)
    first.completed = True
    rank_state.finish_followed(now + 60)  # the device was busy with what came before
    [(label, wait)] = rank_state.waits(now + 61)
    assert label.number == 2 and wait.seconds == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize(
    ("work", "why"),
    [
        (_Work(error="connection reset"), "connection reset"),
        (_NCCLWork(1), "timed out"),
        (_NCCLWork(2), "broken connection"),
    ],
)
def test_a_followed_work_that_failed_says_why(alone, work, why):
    alone.follow(alone.issue(), [work])
    label, reason = rank_state.finish_followed(time.monotonic())
    assert label.what == "step 3, unit layers.0, gather" and why in reason
    assert not alone.followed


def test_a_coalesced_launch_is_followed_by_its_works(alone):
    class Manager:
        works = (_NCCLWork(0), _NCCLWork())

    alone.follow(alone.issue(), [Manager])
    rank_state.finish_followed(time.monotonic())
    assert len(alone.followed) == 1
    Manager.works[1].future.result = 0
    rank_state.finish_followed(time.monotonic())
    assert not alone.followed


def test_what_is_followed_is_bounded(alone):
    for _ in range(5 * rank_state.FOLLOWED):
        alone.follow(alone.issue(), [_NCCLWork()])
    assert len(alone.followed) == rank_state.FOLLOWED and len(alone.history) == rank_state.REMEMBERED


@ranks(2)
def test_with_a_verdict_nobody_else_takes_communicators_of_nccl_apart():
    for backend, owns in (("gloo", True), ("nccl", False)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rank_state, "current", rank_state.RankState())
            patch.setattr(runtime, "_owns_group", True)
            patch.setattr(abort, "backend_of", lambda group, device, found=backend: found)
            rank_state.set_failure(Failure("rank 1 is gone", rank_lost=True))
            assert runtime._owns_group == owns


def test_a_verdict_stops_everything_that_would_use_a_result(alone):
    watch.raise_failure()
    assert watch.cause(RuntimeError("an error of its own")) is None
    rank_state.current.failure = Failure("rank 1 is gone", rank_lost=True)
    assert isinstance(watch.cause(RuntimeError("an error that follows")), RankLostError)
    with pytest.raises(RankLostError, match="rank 1 is gone") as caught:
        watch.raise_failure()
    assert caught.value.exit_code == EXIT_RANK_LOST and rank_state.current.raised


def test_steps_are_the_optimizer_s(alone):
    assert watch.begin_pass() == 1 and watch.begin_pass() == 1  # micro-batches
    watch.stepped()
    watch.stepped()  # one optimizer for the body, one for the head
    assert watch.begin_pass() == 2
    watch.begin_step(500)  # a loop that was resumed
    assert watch.begin_pass() == 500 and watch.position().startswith("step 500, ")
    watch.stepped()
    assert watch.begin_pass() == 501


@ranks(2)
def test_reports_count_optimizer_steps():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_state, "current", rank_state.RankState())
        model = FSDPv2(Stack(), mesh_for("FULL_SHARD"), auto_wrap_policy={Block}, small_parameter_bytes=0)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        seen = []
        for _ in range(3):
            with model.no_sync():
                model(torch.randn(4, 8)).sum().backward()
            model(torch.randn(4, 8)).sum().backward()
            seen.append(watch.position().partition(",")[0])
            model.clip_grad_norm_(1.0)
            seen.append(watch.position())
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model(torch.randn(4, 8))
            seen.append(watch.position().partition(",")[0])
    assert seen == [
        text for n in (1, 2, 3) for text in (f"step {n}", f"step {n}, after norm of the gradients", f"step {n}")
    ]


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:20613. This "
         "is typically caused by a remote worker crashing.", "a connection broke"),
        ("[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 8000ms for recv operation to "
         "complete", "timed out"),
        ("Application timeout caused pair closure", "timed out"),
        ("quota exceeded", "quota exceeded"),
    ],
)  # fmt: skip
def test_what_gloo_says_of_its_sockets_is_not_shown(alone, said, shown):
    error = watch.failed("step 3, unit a, gather", (0, 1), RuntimeError(said))
    assert isinstance(error, RankLostError) and error.at == "step 3, unit a, gather"
    assert str(error).endswith(f"another rank failed, or did not arrive in time ({shown})")


# --- waits outside the engine -----------------------------------------------------------------------------------------


@pytest.mark.slow
@ranks(2)
def test_a_collective_of_the_program_is_seen_from_outside():
    store = dist.distributed_c10d._get_default_store()
    found = ExternalWaits()
    if runtime.rank() == 1:
        store.wait(["seen from outside"], timedelta(seconds=50))
    else:

        def look():
            found.scan(0.0)
            _until(lambda: (found.scan(1.0), found.by_thread)[1], 30)
            found.scan(2.0)
            store.set("seen from outside", "")

        looking = threading.Thread(target=look)
        looking.start()
    dist.all_reduce(torch.zeros(1))
    if runtime.rank() == 0:
        looking.join()
        longest = found.longest()
        assert longest.since == 1.0 and longest.what.startswith("all_reduce at test_watch.py:")
        assert found.longest(excluding=threading.main_thread().ident) is None
        found.scan(3.0)
        assert not found.by_thread


def test_a_wait_outside_ends_with_a_rank_that_is_lost_and_not_before():
    wait = Wait("external/0-2", 0, "step 4, barrier at train.py:7", 90.0, external=True)
    statuses = {
        0: _status({"gather/0-2": 7}, [wait]),
        1: _status({"gather/0-2": 7}, [wait]),
        2: _status({"gather/0-2": 7}),
    }
    assert late_ranks(wait, (0, 1, 2), statuses) == [2]
    for how in ("silent", "stopped", "busy", "back", "exited"):  # it may not be one of those that are waited for
        assert find_failure(statuses, {2: Liveness(2, how, "x")}) is None
    found = find_failure(statuses, {2: Liveness(2, "lost", "step 4", " (process 5 on b)")})
    assert found.rank_lost and found.at == "step 4, barrier at train.py:7"
    assert found.text.startswith("rank 0 waits in step 4, barrier at train.py:7, but rank 2 (process 5 on b) has sent")


# --- statuses ---------------------------------------------------------------------------------------------------------


def _status(last, waits=(), operations=None, position="step 4, unit (root), forward"):
    return RankStatus(1, position, list(waits), last, operations or {})


GATHER = Wait("gather/0-1", 7, "step 4, unit a, gather", 6.0)


def test_a_wait_for_a_slow_rank_may_end():
    statuses = {0: _status({"gather/0-1": 7}, [GATHER]), 1: _status({"gather/0-1": 6})}
    assert find_failure(statuses, {}) is None
    assert late_ranks(GATHER, (0, 1), statuses) == [1]
    for how in ("silent", "stopped", "busy", "back"):
        assert find_failure(statuses, {1: Liveness(1, how, "x")}) is None
    assert "has sent no heartbeat for 30 s" in find_failure(statuses, {1: Liveness(1, "lost", "x")}).text
    assert find_failure(statuses, {1: Liveness(1, "silent", "x")}, connection_broke=True).rank_lost


def test_a_rank_that_exited_is_missed_only_where_it_is_member():
    statuses = {0: _status({"gather/0-1": 7}, [GATHER]), 2: _status({"gather/2-3": 1})}
    assert find_failure(statuses, {2: Liveness(2, "exited", "its end")}) is None
    assert "rank 1 has exited" in find_failure(statuses, {1: Liveness(1, "exited", "its end")}).text
    statuses[1] = _status({"gather/0-1": 7})  # it has sent its part
    assert find_failure(statuses, {1: Liveness(1, "exited", "its end")}) is None
    dead = find_failure(statuses, {2: Liveness(2, "dead", "step 3", " (process 5 on b)")}).text
    assert dead == (
        "rank 0 waits in step 4, unit a, gather, but rank 2 (process 5 on b) ended without an error of its own, like "
        "a killed process (last seen in step 3)"
    )
    assert [is_member(r, f"x/{short_name((0, 4, 8))}") for r in (0, 2, 4)] == [True, False, True]
    assert is_member(5, f"x/{short_name((0, 3, 4))}")  # a digest does not say


def test_ranks_that_wait_for_each_other_are_found_also_by_a_third():
    reduce = Wait("reduce/0-1", 3, "step 4, unit b, reduce", 6.0)
    statuses = {
        0: _status({"gather/0-1": 7, "reduce/0-1": 2}, [GATHER]),
        1: _status({"gather/0-1": 6, "reduce/0-1": 3}, [reduce]),
        2: _status({"gather/0-2:2": 1}, [Wait("gather/0-2:2", 1, "step 4, unit c, gather", 6.0)]),
    }
    found = find_failure(statuses, {})
    assert found.text == (
        "ranks entered different operations: rank 0 is in step 4, unit a, gather, rank 1 in step 4, unit b, reduce"
    )
    assert not found.rank_lost


def test_operations_of_one_number_and_different_kinds_are_found_behind_the_oldest():
    # On NCCL the host runs ahead of the device: the ranks differ two operations after the one that waits.
    mine = {"7": "step 4, unit a, gather", "8": "step 4, unit b, gather"}
    theirs = {"7": "step 4, unit a, gather", "8": "step 4, unit c, gather"}
    statuses = {0: _status({"gather/0-1": 8}, [GATHER], {"gather/0-1": mine}),
             1: _status({"gather/0-1": 8}, [], {"gather/0-1": theirs})}  # fmt: skip
    assert "rank 0 is in step 4, unit b, gather, rank 1 in step 4, unit c, gather" in find_failure(statuses, {}).text
    first = describe_wait(GATHER, (0, 1), statuses, {}, {}).splitlines()[0]
    assert first.endswith("unit a, gather: all ranks have entered it, and different operations after it")


def test_a_rank_in_another_operation_has_not_entered_this_one():
    """The report under "ranks entered different operations" does not say that all have entered it."""
    statuses = {
        rank: _status({"gather/0-2": 7}, [Wait("gather/0-2", 7, what, 6.0)], {"gather/0-2": {"7": what}})
        for rank, what in enumerate([GATHER.what, "step 4, unit b, gather", GATHER.what])
    }
    assert "ranks entered different operations: rank 0" in find_failure(statuses, {}).text
    wait = statuses[0].waits[0]
    lines = describe_wait(wait, (0, 1, 2), statuses, {}, {}).splitlines()
    assert lines[0] == ("waiting for 6 s in step 4, unit a, gather: rank(s) 1 entered another operation in its place")
    del statuses[2]
    assert (
        describe_wait(wait, (0, 1, 2), statuses, {}, {})
        .splitlines()[0]
        .endswith(": not entered by rank(s) 2, rank(s) 1 entered another operation in its place")
    )
    other_step = statuses[0].operations["gather/0-2"]["7"].replace("step 4", "step 5")
    assert (
        describe_wait(
            wait, (0, 1), {0: statuses[0], 1: _status({"gather/0-2": 7}, (), {"gather/0-2": {"7": other_step}})}, {}, {}
        )
        .splitlines()[0]
        .endswith("all ranks have entered it")
    )


def test_a_report_of_many_ranks_is_short():
    statuses = {rank: _status({"gather/0-4095": 7}, [GATHER]) for rank in range(4096) if rank not in (5, 900)}
    wait = Wait("gather/0-4095", 7, GATHER.what, 6.0)
    text = describe_wait(wait, range(4096), statuses, {900: Liveness(900, "silent", "step 3")}, {5: "step 2"})
    assert "not entered by rank(s) 5, 900" in text and len(text) < 600
    assert "rank 5: step 2" in text and "rank 900 sends no heartbeat (last seen in step 3)" in text
    assert len(statuses[0].text()) < 300


# --- heartbeats -------------------------------------------------------------------------------------------------------


def test_processes_are_told_by_node_number_and_start():
    me = processes.this_process()
    assert Process.parse(me.text()) == me
    assert state_of(me) == "alive"
    assert state_of(Process(me.node, me.pid, "1", me.host)) == "dead"  # the number is another process's now
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    theirs = Process(me.node, child.pid, processes.stat_of(child.pid)[1], me.host)
    os.kill(child.pid, signal.SIGSTOP)
    _until(lambda: state_of(theirs) == "stopped")
    os.kill(child.pid, signal.SIGKILL)
    _until(lambda: state_of(theirs) == "dead")  # nobody has waited for it yet
    child.wait()
    child.stdin.close()
    assert state_of(theirs) == "dead"
    # The same host name says nothing: a process of this number may live on another node.
    assert state_of(Process("another node", child.pid, theirs.start, me.host)) == ""


def _until(condition, seconds=5):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_the_ring_names_the_silent_and_leaves_the_rest_alone(monkeypatch):
    store = JobStore(dist.HashStore(), "0")
    rings = [HeartbeatRing(store, rank, 4) for rank in range(4)]
    for rank in range(1, 4):  # on nodes of the same name, where processes of such numbers are not
        store.put(f"process/{rank}", Process(f"node {rank}", 999_999, "5", socket.gethostname()).text())

    def look(now):
        return [
            (change.rank, change.state) for change in rings[0].check(store.read([f"beat/{r}" for r in range(4)]), now)
        ]

    assert look(0) == []  # nobody has begun
    for ring in rings:
        ring.beat("step 1")
    assert look(0) == [] and rings[0].watched() == [1]
    assert look(5.9) == []
    assert look(6.1) == [(1, "silent")] and rings[0].watched() == [1, 2]
    assert look(7) == []  # rank 2 is looked at from now on: it may have gone with the node
    rings[1].beat("step 2")
    assert look(8) == [(1, "back")] and rings[0].watched() == [1]
    assert look(11) == [] and look(14.1) == [(1, "silent")]
    rings[2].beat("step 2")
    assert look(14.2) == [] and not [change for now in (20, 26, 32, 37) for change in look(now) if change[0] == 1]
    assert look(38.1)[0] == (1, "lost")
    rings[1].leave("its end")
    assert (1, "exited") in look(39)


def test_a_rank_that_was_stopped_itself_accuses_nobody():
    store = JobStore(dist.HashStore(), "0")
    rings = [HeartbeatRing(store, rank, 2) for rank in range(2)]
    store.put("process/1", Process("another-node", 999_999, "5", "b").text())
    look = lambda now: [change.state for change in rings[0].check(store.read(["beat/1"]), now)]  # noqa: E731
    rings[1].beat("step 1")
    assert look(0) == [] and look(1) == []
    assert look(3601) == []  # the whole job was suspended for an hour
    assert look(3604) == [] and look(3608) == ["silent"]
    rings[1].beat("step 1")
    assert look(3609) == ["back"]


def test_a_rank_that_is_stopped_before_its_first_heartbeat_is_named(monkeypatch):
    store = JobStore(dist.HashStore(), "0")
    ring = HeartbeatRing(store, 0, 3)
    states = {"1": "alive", "2": "alive"}
    monkeypatch.setattr(heartbeat, "state_of", lambda process: states[process.start] if process else "")
    store.put("process/1", Process("node", 1, "1", "a").text())  # as `runtime.use_spmd` does
    look = lambda now: [(change.rank, change.state) for change in ring.check({}, now)]  # noqa: E731
    assert [look(now) for now in range(0, 40, 5)] == [[]] * 8  # it loads
    states["1"] = "stopped"
    assert look(40) == [(1, "lost")]
    states["1"] = "dead"
    assert look(41) == [(1, "dead")]


def test_reading_keys_takes_few_calls():
    class Counting:
        def __init__(self):
            self.store, self.calls = dist.HashStore(), 0

        def __getattr__(self, name):
            self.calls += 1
            return getattr(self.store, name)

    counting = Counting()
    store = JobStore(counting, "0")
    for rank in range(1000):
        if rank != 321:
            store.put(f"status/{rank}", str(rank))
    counting.calls = 0
    keys = [f"status/{rank}" for rank in range(1000)]
    found = store.read(keys)
    assert len(found) == 999 and found["status/7"] == "7" and "status/321" not in found
    assert counting.calls < 30  # which are there is found by halves
    counting.calls = 0
    store.read(keys)
    assert counting.calls == 2  # known keys in one call, the missing one in another
    assert store.add("count", 1) == 1 and store.add("count", 0) == 1 and store.read(["count"]) == {"count": "1"}


def test_traffic_does_not_grow_with_the_number_of_ranks():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import watch_traffic
    finally:
        sys.path.pop(0)
    small, large = (watch_traffic.measure(world, seconds=12, sampled=4) for world in (8, 512))
    for found in (small, large):
        assert found["calm"]["calls"] <= 2.5 and found["calm"]["bytes"] < 300
        assert found["missing"]["calls"] < 8
    assert large["calm"]["calls"] == pytest.approx(small["calm"]["calls"], rel=0.1)
    assert large["status_bytes"] < 2000


# --- processes that end, are killed, are stopped ----------------------------------------------------------------------

PROGRAM = str(Path(__file__).with_name("watch_program.py"))


class Ranks:
    """Processes that train together; the store is held by this one, as a launcher does."""

    def __init__(self, tmp_path, how, world=2, **environment):
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.folder = tmp_path
        self.jobs = []
        for rank in range(world):
            env = {
                **os.environ, "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment,
            }  # fmt: skip
            out = open(tmp_path / f"out-{rank}", "w")  # noqa: SIM115
            self.jobs.append(
                subprocess.Popen([sys.executable, PROGRAM, how, str(tmp_path)], env=env, stdout=out, stderr=out)
            )

    def when(self, *names):
        _until(
            lambda: all((self.folder / name).exists() for name in names), 180
        )  # to import takes long on a busy machine

    def said(self, rank):
        return (self.folder / f"out-{rank}").read_text()

    def end(self, *who, seconds=40):
        for rank in who:
            self.jobs[rank].wait(seconds)
        return [self.jobs[rank].returncode for rank in who]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for job in self.jobs:
            job.kill()
            job.wait()


def _named_after(text):
    """Seconds from the event to the line that names the rank, as the program measured."""
    line = next(line for line in text.splitlines() if line.startswith("RAISED"))
    return float(line.split()[1])


@pytest.mark.slow
@pytest.mark.parametrize("nodes", ["one", "several"])
def test_a_killed_rank_is_named(tmp_path, nodes):
    with Ranks(tmp_path, "train", NODES=nodes) as job:
        job.when("ready-0", "ready-1")
        job.jobs[1].kill()
        killed = time.time()
        assert job.end(0) == [69]
        text = job.said(0)
        assert "rank 1" in text
        assert ("ended without an error" if nodes == "one" else "sends no heartbeat") in text
        assert "last seen in step" in text
        assert _named_after(text) - killed < 10
        assert "STEPPED AFTER" not in text


@pytest.mark.slow
def test_a_rank_that_exits_early_is_named(tmp_path):
    with Ranks(tmp_path, "exit") as job:
        assert job.end(1, 0) == [0, 69]
        text = job.said(0)
        assert "rank 1 has exited (last seen in step" in text


@pytest.mark.slow
@pytest.mark.parametrize("holder", ["launcher", "rank 0"])
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stopped_rank_is_named_and_given_up(tmp_path, stopped, holder):
    extra = {} if holder == "launcher" else {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": str(_free_port())}
    with Ranks(tmp_path, "train", LOST_AFTER="9", **extra) as job:
        job.when("ready-0", "ready-1")
        os.kill(job.jobs[stopped].pid, signal.SIGSTOP)
        start, other = time.time(), 1 - stopped
        _until(lambda: f"rank {stopped} " in job.said(other) and "is stopped" in job.said(other), 10)
        assert time.time() - start < 10
        assert job.end(other) == [69]
        assert time.time() - start < 25


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stopped_rank_is_always_reported(tmp_path, stopped):
    """Whichever it was doing, also if it was itself the one to report; 10 times each, faster than for users."""
    with Ranks(tmp_path, "train", FAST="1", LOST_AFTER="60") as job:
        job.when("ready-0", "ready-1")
        other = 1 - stopped
        for attempt in range(1, 11):
            time.sleep(0.3 + 0.07 * attempt)
            os.kill(job.jobs[stopped].pid, signal.SIGSTOP)
            _until(lambda: job.said(other).count("is stopped") >= attempt, 8)  # noqa: B023
            _until(lambda: job.said(other).count("waiting for") >= attempt, 8)  # noqa: B023
            steps = (tmp_path / f"ready-{other}").stat().st_size
            os.kill(job.jobs[stopped].pid, signal.SIGCONT)
            _until(lambda: (tmp_path / f"ready-{other}").stat().st_size > steps + 3, 8)  # noqa: B023
        assert [one.poll() for one in job.jobs] == [None, None], job.said(other)


@pytest.mark.slow
def test_the_rank_that_reports_is_replaced_when_it_is_stopped(tmp_path):
    """Rank 2 is late, and one of the two that wait for it reports; the other goes on when that one is stopped."""
    with Ranks(tmp_path, "late", world=3, FAST="1", LOST_AFTER="60") as job:
        job.when("ready-0", "ready-1", "ready-2")
        reported = lambda rank: "waiting for" in job.said(rank)  # noqa: E731
        _until(lambda: reported(0) or reported(1), 20)
        first = 0 if reported(0) else 1
        os.kill(job.jobs[first].pid, signal.SIGSTOP)
        _until(lambda: reported(1 - first), 10)
        assert "not entered by rank(s) 2" in job.said(1 - first)
        os.kill(job.jobs[first].pid, signal.SIGCONT)


@pytest.mark.slow
@pytest.mark.parametrize("killed", [False, True])
def test_a_rank_held_up_by_its_device_is_ended_too(tmp_path, killed):
    """The host is not in a wait of ours, as on NCCL: what was issued is followed, and the process is ended."""
    with Ranks(tmp_path, "device", FAST="1", **({"STAYS": "1"} if killed else {})) as job:
        job.when("ready-0", "ready-1")
        start = time.time()
        if killed:
            job.jobs[1].kill()
        _until(lambda: "rank 1" in job.said(0), 10)
        assert job.end(0) == [EXIT_RANK_LOST]
        assert time.time() - start < 20
        text = job.said(0)
        assert ("rank 1 has exited" in text) != killed and ("ended without an error" in text) == killed
        assert "did not return from its wait: ending the process" in text and "RAISED" not in text


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
