"""Signals: the first saves once on all ranks at the same step and exits; a second one ends at once."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch

from fullshard import CheckpointManager
from fullshard.checkpoint.manifest import published_steps
from fullshard.checkpoint.preemption import ECHO, EXIT_PREEMPTED, SignalListener
from fullshard.distributed import runtime
from tests.checkpoint.resume_programs import Case, Training
from tests.pool import ranks

ROOT = Path(__file__).resolve().parent.parent.parent


@ranks(2)
def test_one_rank_s_signal_stops_all_ranks_at_the_same_step(tmp_path):
    training = Training(Case())
    before = signal.getsignal(signal.SIGTERM)
    with CheckpointManager(tmp_path, 100, signals=[signal.SIGTERM]) as manager:
        stopped = None
        with pytest.raises(SystemExit) as caught:  # noqa: PT012
            for step in range(1, 500):
                training.run(1)
                if step == 4 and runtime.rank() == 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                stopped = step
                manager.exit_if_preempted(step, training.state)
        assert caught.value.code == EXIT_PREEMPTED == 75
        everyone = [None, None]
        torch.distributed.all_gather_object(everyone, stopped)
        assert everyone[0] == everyone[1] and 4 <= stopped < 500
    assert published_steps(tmp_path) == [stopped]
    assert signal.getsignal(signal.SIGTERM) is before


@ranks(2)
def test_a_step_that_was_just_saved_is_not_saved_again(tmp_path):
    training = Training(Case())
    training.run(3)
    with CheckpointManager(tmp_path, 3, signals=()) as manager:
        manager.save_async(3, training.state)
        assert not manager.reached_preemption(3)
        if runtime.rank() == 0:
            manager.preempt()
        with pytest.raises(SystemExit):
            manager.exit_if_preempted(3, training.state)
    assert published_steps(tmp_path) == [3]


def test_off_the_main_thread_it_says_so_and_does_nothing():
    note, answers = SignalListener([signal.SIGTERM]), []
    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=lambda: answers.append(note.install()))
    thread.start()
    thread.join()
    assert answers == [False] and signal.getsignal(signal.SIGTERM) is before


SIGNALLED = """
    import signal, sys, time
    sys.path.insert(0, {root!r})
    from fullshard.checkpoint.preemption import SignalListener
    note = SignalListener([signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
    assert note.install()
    print("ready", flush=True)
    while note.seen is None:
        time.sleep(0.01)
    print("seen", note.seen, flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
@pytest.mark.slow
def test_a_second_signal_ends_at_once(number):
    _two_signals(number)


def test_a_second_interrupt_ends_at_once():
    _two_signals(signal.SIGINT)


def _two_signals(number):
    program = textwrap.dedent(SIGNALLED.format(root=str(ROOT)))
    job = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert job.stdout.readline() == "ready\n"
        job.send_signal(number)
        assert job.stdout.readline() == f"seen {int(number)}\n"
        job.send_signal(number)  # an echo: a scheduler signals every process, and the launcher passes its own on
        time.sleep(ECHO + 0.2)
        assert job.poll() is None
        job.send_signal(number)
        assert job.wait(10) == 128 + number
    finally:
        job.kill()
        job.wait()


WHOLE = """
    import sys, time
    import torch
    import fullshard.runtime as xr
    from fullshard import CheckpointManager
    from tests.checkpoint.resume_programs import Case, Training

    xr.use_spmd()
    training = Training(Case())
    with CheckpointManager(sys.argv[1], 1000) as manager:
        if manager.latest() is not None:
            print("resumed", manager.restore(None, training.state), flush=True)
        for step in range(1, 100000):
            training.run(1)
            if step == 2 and xr.is_main():
                print("training", flush=True)
            manager.exit_if_preempted(step, training.state)
"""


@pytest.mark.slow
def test_a_whole_job_under_torchrun(tmp_path):
    """SIGTERM to one process of two: both exit with the documented code, one checkpoint, which resumes."""
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(WHOLE))
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
    env |= {"MASTER_PORT": "29871", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    jobs = [
        subprocess.Popen(
            [sys.executable, str(script), str(tmp_path / "out")], env={**env, "RANK": str(r), "LOCAL_RANK": str(r)},
            stdout=subprocess.PIPE, text=True,
        )
        for r in range(2)
    ]  # fmt: skip
    try:
        assert jobs[0].stdout.readline() == "training\n"
        jobs[1].send_signal(signal.SIGTERM)
        assert [job.wait(60) for job in jobs] == [EXIT_PREEMPTED] * 2
    finally:
        for job in jobs:
            job.kill()
    assert len(published_steps(tmp_path / "out")) == 1
