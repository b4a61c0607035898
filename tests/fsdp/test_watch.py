"""Ranks that fall out of step: reported, and stopped only when they can never meet again."""

import contextlib
import logging
import os
import subprocess
import sys
import textwrap
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import nn

from fullshard import runtime
from fullshard.errors import FSDPError
from fullshard.fsdp import FSDPv2, watch
from tests.fsdp.programs import Block, Stack, mesh_for
from tests.pool import ranks


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
        patch.setattr(watch, "REPORT_AFTER", report_after)
        patch.setattr(watch, "POLL", 0.2)
        try:
            yield heard
        finally:
            logger.removeHandler(heard)


def test_a_wait_is_reported_within_ten_seconds():
    # The thread looks every POLL seconds, and notes of other ranks are at most one look old.
    assert watch.REPORT_AFTER + 3 * watch.POLL < 10


@pytest.mark.slow
@ranks(2)
def test_a_slow_rank_is_reported_and_left_alone():
    model = FSDPv2(Stack(), mesh_for("FULL_SHARD"), auto_wrap_policy={Block}, small_parameter_bytes=0)
    model(torch.randn(4, 8)).sum().backward()
    torch.distributed.barrier()
    store = torch.distributed.distributed_c10d._get_default_store()
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
        assert "step 2, unit (root), gather" in message and "not entered by rank(s) 1" in message
        assert "rank 1: step 1, unit (root), after backward" in message
        assert "rank 0: step 2, unit (root), gather (waiting)" in message
    else:
        assert not heard.lines
    assert watch._here.verdict == ""


@pytest.mark.slow
@ranks(2)
def test_a_rank_that_never_comes_is_given_up_at_the_timeout():
    model = FSDPv2(Stack(), mesh_for("FULL_SHARD"), timeout=2.0)
    model(torch.randn(4, 8)).sum().backward()
    torch.distributed.barrier()
    store = torch.distributed.distributed_c10d._get_default_store()
    start = time.monotonic()
    if runtime.rank() == 1:
        store.wait(["given up"], timedelta(seconds=50))
    with pytest.raises(FSDPError, match=r"cannot go on in step 2, unit \(root\), gather"):
        model(torch.randn(4, 8)).sum().backward()
    if runtime.rank() == 0:
        assert time.monotonic() - start > 1.5
        store.set("given up", "")
    torch.distributed.barrier()


class Forked(nn.Module):
    """Calls one of two units: no collective can put that right."""

    def __init__(self):
        super().__init__()
        self.left, self.right = Block(), Block()

    def forward(self, x, way):
        return self.left(x) if way == 0 else self.right(x)


@ranks(2)
def test_ranks_in_different_operations_are_stopped():
    model = FSDPv2(Forked(), mesh_for("FULL_SHARD"), auto_wrap_policy={Block}, small_parameter_bytes=0)
    model(torch.randn(4, 8), 0).sum().backward()
    torch.distributed.barrier()
    start = time.monotonic()
    with _listening(report_after=1.0), pytest.raises(FSDPError) as caught:
        model(
            torch.randn(4, 8), runtime.rank()
        ).sum().backward()  # pieces of one size: only their names tell them apart
    assert time.monotonic() - start < 20
    message = str(caught.value)
    assert "step 2, unit left, gather" in message or "step 2, unit right, gather" in message
    assert "different operations" in message or "another rank has failed" in message
    watch._here.verdict = ""
    torch.distributed.barrier()
    again = FSDPv2(Stack(), mesh_for("FULL_SHARD"))  # other communicators: the job can go on
    again(torch.randn(4, 8)).sum().backward()


PROGRAM = """
    import os, sys, time
    import torch
    import fullshard.runtime as xr
    from fullshard.errors import FSDPError
    from fullshard.fsdp import FSDPv2
    from tests.fsdp.programs import Block, Stack, mesh_for

    xr.use_spmd()
    model = FSDPv2(Stack(), mesh_for("FULL_SHARD"), auto_wrap_policy={Block}, small_parameter_bytes=0)
    model(torch.randn(4, 8)).sum().backward()
    time.sleep(2.5)  # the ranks have told each other where they are
    if xr.rank() == 1:
        os._exit(7)
    start = time.monotonic()
    try:
        model(torch.randn(4, 8)).sum().backward()
    except FSDPError as error:
        print("TOLD", round(time.monotonic() - start, 1), error, flush=True)
        os._exit(3)
"""


@pytest.mark.slow
def test_a_rank_that_exits_is_named(tmp_path):
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(PROGRAM))
    root = Path(__file__).resolve().parent.parent.parent
    jobs = []
    for rank in range(2):
        env = {
            **os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        jobs.append(subprocess.Popen([sys.executable, str(script)], env=env, stdout=subprocess.PIPE, text=True))
    told, _ = jobs[0].communicate(timeout=100)
    jobs[1].wait(10)
    assert jobs[1].returncode == 7 and jobs[0].returncode == 3
    line = next(text for text in told.splitlines() if text.startswith("TOLD"))
    assert float(line.split()[1]) < 10
    assert "rank 1 (last in step 1, unit (root), after backward) has exited" in line
    assert "step 2, unit (root), gather" in line
