"""Saves that fail: disks that are full, directories that are gone, ranks that do not come."""

import errno
import logging
import os
import resource
import time

import pytest
import torch

from fullshard import CheckpointManager, FSDPv2, save_state
from fullshard.checkpoint import dcp_storage, publish
from fullshard.config.errors import CheckpointError, UserError
from fullshard.distributed import runtime
from fullshard.distributed.watchdog import heartbeat, investigate, threads, watch
from tests.checkpoint.resume_programs import Case, Training, assert_same_bits
from tests.fsdp.programs import Stack, mesh_for
from tests.pool import ranks


def _fails(error_number, where, rank=1):
    """An OSError at one place on one rank, as the system would raise it."""

    def patched(*args, **kwargs):
        if runtime.rank() == rank:
            raise OSError(error_number, os.strerror(error_number), "a file of the checkpoint")
        return original(*args, **kwargs)

    module, name = where
    original = getattr(module, name)
    return module, name, patched


FAULTS = {
    "disk full while writing": (errno.ENOSPC, (dcp_storage, "_write"), 1),
    "disk full at fsync": (errno.ENOSPC, (dcp_storage, "sync"), 1),
    "read-only": (errno.EROFS, (publish, "make_directory"), 0),
    "permission lost at the manifest": (errno.EACCES, (publish, "write_manifest"), 0),
    "permission lost at the rename": (errno.EACCES, (os, "rename"), 0),
    "the disk fails": (errno.EIO, (dcp_storage, "_write"), 0),
}


@pytest.mark.parametrize("background", [False, True])
@ranks(2)
def test_a_failed_save_is_told_on_every_rank_and_harms_nothing(tmp_path, background):
    training = Training(Case())
    with CheckpointManager(tmp_path, 1) as manager:
        training.run(1)
        manager.save(1, training.state)
        for name, (number, where, rank) in FAULTS.items():
            training.run(1)
            before, step = training.values(), len(training.losses)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(*_fails(number, where, rank))
                with pytest.raises(CheckpointError) as caught:  # noqa: PT012
                    if background:
                        manager.save_async(step, training.state)
                        manager.join()
                    else:
                        manager.save(step, training.state)
            message = str(caught.value)
            assert f"rank {rank}" in message and os.strerror(number) in message, (name, message)
            assert f"save of checkpoint step {step}" in message
            assert ("in the background" in message) == background
            assert_same_bits(training.values(), before)
            torch.distributed.barrier()
            assert sorted(os.listdir(tmp_path)) == ["step-1"], name
        assert manager.restore(None, training.state) == 1
        manager.save(9, training.state)  # and when the fault is gone it works again
        torch.distributed.barrier()
        assert manager.all_steps() == [1, 9]


@ranks(2)
def test_a_file_size_limit_is_a_real_full_disk(tmp_path):
    model = FSDPv2(torch.nn.Linear(400, 400), mesh_for("FULL_SHARD"))
    import signal

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        if runtime.rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
        with pytest.raises(CheckpointError, match=r"rank 1: .*rank00001-0\.safetensors: File too large"):
            save_state(tmp_path / "one", model=model)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    torch.distributed.barrier()
    assert os.listdir(tmp_path) == []
    save_state(tmp_path / "one", model=model)


@ranks(2)
def test_an_unusable_directory_is_refused_at_the_start(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"checkpoints cannot be kept in .*file/below"):
        CheckpointManager(tmp_path / "file" / "below", 1)
    with pytest.raises(CheckpointError, match="checkpoints cannot be kept in /proc"):
        CheckpointManager("/proc/checkpoints", 1)
    # One path, and a directory of its own behind it on every node:
    with pytest.raises(CheckpointError, match=r"not the same directory on every rank: rank 0 does not see what rank"):
        CheckpointManager(tmp_path / f"node-{runtime.rank()}", 1)


@ranks(2)
def test_files_that_the_first_rank_does_not_see_are_never_published(tmp_path):
    model = FSDPv2(Stack(), mesh_for("FULL_SHARD"))
    with pytest.MonkeyPatch.context() as patch:
        if runtime.rank() == 1:  # this rank's directory is its own
            hidden = dcp_storage.CheckpointWriter.__init__

            def elsewhere(self, directory, conclude):
                hidden(self, tmp_path / "other" / directory.name, conclude)
                self.directory.mkdir(parents=True)

            patch.setattr(dcp_storage.CheckpointWriter, "__init__", elsewhere)
        with pytest.raises(CheckpointError, match=r"rank 0 does not see the files of rank 1: .* is missing"):
            save_state(tmp_path / "one", model=model)
    torch.distributed.barrier()
    assert not (tmp_path / "one").exists()


class _Heard(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


@ranks(2)
def test_a_save_on_some_ranks_only_is_reported_and_ended(tmp_path):
    model = FSDPv2(Stack(), mesh_for("FULL_SHARD"), small_parameter_bytes=0)
    model(torch.randn(4, 8)).sum().backward()
    heard = _Heard()
    runtime.get_logger().addHandler(heard)
    with pytest.MonkeyPatch.context() as patch, CheckpointManager(tmp_path, 1) as manager:
        patch.setattr(investigate, "REPORT_AFTER", 1.0)
        patch.setattr(threads, "POLL", 0.1)
        patch.setattr(heartbeat, "BEAT", 0.2)
        torch.distributed.barrier()
        start = time.monotonic()
        with pytest.raises(UserError) as caught:  # noqa: PT012
            if runtime.is_main():
                manager.save(1, {"model": model})
            model(torch.randn(4, 8)).sum().backward()
        assert time.monotonic() - start < 20
        runtime.get_logger().removeHandler(heard)
        told = "\n".join([*heard.lines, str(caught.value)])
        if runtime.is_main():
            assert "save of checkpoint step 1" in told and "different operations" in told, told
    torch.distributed.barrier()
    watch.forget()
    assert os.listdir(tmp_path) == []
    with CheckpointManager(tmp_path, 1) as manager:  # other communicators: the job can go on
        manager.save(2, {"model": FSDPv2(Stack(), mesh_for("FULL_SHARD"))})


@ranks(2)
def test_a_failure_in_the_background_is_raised_at_the_same_step_on_every_rank(tmp_path):
    training = Training(Case())
    training.run(1)
    with CheckpointManager(tmp_path, 1, signals=()) as manager:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(*_fails(errno.ENOSPC, (dcp_storage, "_write"), 0))
            manager.save_async(1, training.state)
            steps = 1
            with pytest.raises(CheckpointError, match=r"a save in the background failed: .*No space left") as caught:  # noqa: PT012
                while True:
                    steps += 1
                    manager.reached_preemption(steps)
                    time.sleep(0.01 * (1 + runtime.rank()))
        assert isinstance(caught.value.__cause__, CheckpointError)
        everyone = [None, None]
        torch.distributed.all_gather_object(everyone, steps)
        assert everyone[0] == everyone[1]
        assert not manager.reached_preemption(steps + 1)


@ranks(2)
def test_a_save_in_the_background_copies_what_it_saves(tmp_path):
    """Training goes on at once; buffers are used again, and nothing new is allocated for a second save."""
    training = Training(Case("NO_SHARD"))
    training.run(1)
    with CheckpointManager(tmp_path, 1) as manager:
        for step in (1, 2):
            expected = training.values()
            manager.save_async(step, training.state)
            memory = manager._buffer._memory.data_ptr()
            with torch.no_grad():
                for p in training.model.parameters():
                    p.zero_()
            manager.join()
            moments = [id(t) for own in training.optimizer.state.values() for t in own.values()]
            manager.restore(step, training.state)
            assert_same_bits(training.values(), expected)
            # What is there already is filled, so that going back needs no more memory than training.
            assert moments == [id(t) for own in training.optimizer.state.values() for t in own.values()]
        assert manager._buffer._memory.data_ptr() == memory
