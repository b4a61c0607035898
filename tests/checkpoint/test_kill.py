"""Kill -9 at every stage of a save: no damaged checkpoint is ever loaded, none that was published is lost."""

import random
import signal
import time

import pytest
import torch

from fullshard import CheckpointManager
from fullshard.checkpoint import publish
from fullshard.distributed import runtime
from tests.checkpoint.resume_programs import Case, Training, assert_same_bits
from tests.pool import pool, ranks

CASE = Case("FULL_SHARD")


def _die(at, who):
    """End this process when a save reaches the stage, as kill -9 would."""

    def stage(name):
        if name == at and runtime.rank() == who:
            import os

            os.kill(os.getpid(), signal.SIGKILL)

    publish.stage = stage


@ranks(2)
def _save_until_killed(folder, at, who, background):
    training = Training(CASE)
    with CheckpointManager(folder / "checkpoints", 1, max_to_keep=2) as manager:
        for step in (1, 2, 3):
            training.run(1)
            manager.save(step, training.state)
            torch.save(training.values(), folder / f"{step}-{runtime.rank()}.pt")
        training.run(1)
        torch.save(training.values(), folder / f"4-{runtime.rank()}.pt")
        _die(at, who)
        manager.save_async(4, training.state) if background else manager.save(4, training.state)
        manager.join()
    raise AssertionError("nobody was killed")


@ranks(2)
def _resume(folder, oldest, newest):
    """What is there loads, and is what was saved; the next save works and clears away what was left behind."""
    training = Training(CASE, seed=9)
    with CheckpointManager(folder / "checkpoints", 1, max_to_keep=2) as manager:
        steps = manager.all_steps()
        assert oldest <= steps[-1] <= newest and steps == sorted(steps)
        for step in steps:
            assert manager.restore(step, training.state) == step
            assert_same_bits(training.values(), torch.load(folder / f"{step}-{runtime.rank()}.pt"))
        assert manager.restore(None, training.state) == steps[-1]
        manager.save(9, training.state)
        torch.distributed.barrier()
        assert manager.latest() == 9
        assert not list((folder / "checkpoints").glob(".step-4*"))


def _killed(job, *args):
    """Run a job whose ranks die; then none of them is left."""
    with pytest.raises(pytest.fail.Exception) as caught:
        job(*args)
    pool(2).kill()
    assert any(f"rank {r} died" in str(caught.value) for r in (0, 1)), caught.value


@pytest.mark.parametrize(
    ("at", "who", "background"),
    [
        ("inside a file", 0, True),
        ("file", 1, False),
        ("publish", 0, True),
        ("published", 0, False),
    ],
)
def test_killed_at_a_stage(tmp_path, at, who, background):
    _killed(_save_until_killed, tmp_path, at, who, background)
    published = at in ("published", "removing")
    _resume(tmp_path, 4 if published else 3, 4 if published else 3)


STAGES = ("start", "directory", "inside a file", "file", "files", "manifest", "publish", "published", "removing")
EVERY = [(at, who) for at in STAGES for who in (0, 1) if who == 0 or at not in STAGES[5:]]


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(("at", "who"), EVERY)
def test_killed_at_every_stage(tmp_path, at, who, background):
    _killed(_save_until_killed, tmp_path, at, who, background)
    published = at in ("published", "removing")
    _resume(tmp_path, 4 if published else 3, 4 if published else 3)


@ranks(2)
def _save_for_ever(folder, background):
    training = Training(CASE)
    with CheckpointManager(folder / "checkpoints", 1, max_to_keep=2) as manager:
        while True:
            training.run(1)
            step = len(training.losses)
            torch.save(training.values(), folder / f"{step}-{runtime.rank()}.pt")
            torch.distributed.barrier()
            manager.save_async(step, training.state) if background else manager.save(step, training.state)
            if runtime.is_main():
                (folder / "at").write_text(str(step))


def _last_save(folder):
    """The step of the last save that returned; 0 before the first."""
    at = folder / "at"
    return int((at.read_text() if at.exists() else "") or 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_killed_at_random(tmp_path, seed):
    import threading

    rng = random.Random(seed)
    ranks_ = pool(2).workers
    background = seed % 2 == 1

    def kill():
        deadline = time.monotonic() + 40
        # The first save in the background need not be published yet when the second begins.
        while _last_save(tmp_path) <= background and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(rng.uniform(0.05, 1.0))
        for worker in rng.sample(ranks_, rng.choice((1, 2))):
            worker.process.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    _killed(_save_for_ever, tmp_path, background)
    killer.join()
    known = max(1, _last_save(tmp_path))
    # What `save` returned from is published; a save in the background that was not waited for may not be.
    _resume_any(tmp_path, known - background)


@ranks(2)
def _resume_any(folder, at_least):
    training = Training(CASE, seed=9)
    with CheckpointManager(folder / "checkpoints", 1) as manager:
        steps = manager.all_steps()
        assert steps and steps[-1] >= at_least
        for step in steps:
            manager.restore(step, training.state)
            assert_same_bits(training.values(), torch.load(folder / f"{step}-{runtime.rank()}.pt"))
