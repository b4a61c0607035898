"""The inside of a pool's worker: joins the process group, then runs the tests it is sent, one after another.
The workers are forked, so most of what a test needs is imported before `main` runs (see `tests/pool_server.py`).
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import multiprocessing
import os
import pickle
import random
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor

import tests.profile  # noqa: F401 - loads it
from tests.pool import GPU_KINDS, Report, bodies, chosen_device

SEED = 20_240_229
LINES_COMPARED = 40


def main(rank: int, world_size: int, kind: str, port: int, link: Connection, files: str) -> None:
    """Serve tests as one rank until the link closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    _redirect_output(f"{files}.out")
    stacks = open(f"{files}.stacks", "a")  # noqa: SIM115 - open as long as the process lives
    faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)
    faulthandler.enable()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    link.send_bytes(pickle.dumps(_guarded(_join, rank, world_size, kind, port)))
    gc.collect()
    gc.freeze()  # what was imported stays; collecting after each test looks at that test's objects only
    with contextlib.suppress(EOFError, OSError):
        while True:
            request, *rest = pickle.loads(link.recv_bytes())
            report = _guarded(_run, *rest) if request == "test" else _guarded(_sync, world_size, *rest)
            link.send_bytes(pickle.dumps(report))
    os._exit(0)  # the parent is done with us: leave without waiting for anyone


def _join(rank: int, world_size: int, kind: str, port: int) -> None:
    import fullshard.runtime as xr

    shared_gpu = kind in GPU_KINDS
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK="0" if shared_gpu else str(rank),
        LOCAL_WORLD_SIZE="1" if shared_gpu else str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",  # the store is pytest's
    )
    if shared_gpu:
        _pretend_a_node(rank)
        if kind == "gpu-plain-nccl":
            on_gpu = chosen_device() == "cuda"
            if on_gpu:
                torch.cuda.set_device(0)
            dist.init_process_group("nccl" if on_gpu else "gloo")
    xr.use_spmd(init_timeout=60)


def _pretend_a_node(rank: int) -> None:
    """NCCL refuses two ranks on one GPU of one host, and tells hosts apart by this variable: as nodes with one GPU
    each, the ranks talk over sockets."""
    os.environ.update(
        FULLSHARD_DEVICE=chosen_device(),
        NCCL_HOSTID=f"node{rank}",
        NCCL_SOCKET_IFNAME="lo",
        NCCL_IB_DISABLE="1",
        GLOO_SOCKET_IFNAME="lo",
        CUBLAS_WORKSPACE_CONFIG=":4096:8",  # without it cuBLAS has no deterministic algorithms
    )


def _run(key: tuple[str, str], arguments: bytes) -> None:
    _reset()
    if key not in bodies:
        importlib.import_module(key[0])
    args, kwargs = pickle.loads(arguments)
    try:
        bodies[key](*args, **kwargs)
    finally:
        for fixture in (*args, *kwargs.values()):
            if isinstance(fixture, pytest.MonkeyPatch):  # this process has a copy, which pytest does not undo
                fixture.undo()


def _sync(world_size: int, call: int) -> None:
    """Meet the other ranks: a collective that a test left behind, or took away, shows here and not in the next one."""
    assert dist.is_initialized() and dist.get_world_size() == world_size, "the test took the process group down"
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # NCCL's collectives end on the device: the host may be long past them
    assert dist.group.WORLD is not None
    carried = {device.type for device in dist.group.WORLD._device_types}
    mine = torch.tensor([call], device="cpu" if "cpu" in carried else "cuda")
    heard = [torch.zeros_like(mine) for _ in range(world_size)]
    dist.all_gather(heard, mine)
    assert [int(h) for h in heard] == [call] * world_size, f"ranks are at calls {[int(h) for h in heard]}"


def _reset() -> None:
    """The same clean start for every test on every rank."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.ftruncate(1, 0)
    gc.collect()
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    import fullshard.runtime as xr
    from fullshard.distributed import data_ranks
    from fullshard.distributed.watchdog import rank_state

    data_ranks.share_rows(1)
    xr.forget_warnings()
    # torch runs an operator on layouts that it has seen without asking anyone, also where we refuse it with others.
    getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", lambda: None)()
    if rank_state.failed_flag is not None:
        rank_state.failed_flag.zero_()  # a test that pretended a failure: updates would be skipped from here on


def _guarded(job: Callable[..., None], *args: Any) -> Report:
    try:
        job(*args)
    except pytest.skip.Exception as skipped:
        return Report("skipped", str(skipped.msg))
    except pytest.xfail.Exception as xfailed:
        return Report("xfailed", str(xfailed.msg))
    except BaseException as error:
        return Report("failed", _told(error))
    return Report("passed")


def _told(error: BaseException) -> str:
    """The traceback from the test's own frame on."""
    whole = traceback.TracebackException.from_exception(error)
    start = [i for i, frame in enumerate(whole.stack) if frame.filename == __file__ and frame.name == "_run"]
    whole.stack = traceback.StackSummary.from_list(whole.stack[start[0] + 1 if start else 0 :])
    return "".join(whole.format()).rstrip()


def _redirect_output(path: str) -> None:
    """Send what Python and C++ print to a file that the parent shows when the test fails."""
    target = os.open(path, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(target, stream)
    os.close(target)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def rewrite_assertions() -> None:
    """Do what pytest does to its own process when it starts, so that a failing `assert` here is told in detail."""
    from _pytest.assertion import util
    from _pytest.config import get_config

    arguments = ["-vv", "--noconftest", "--disable-plugin-autoload", "-c", os.devnull, "--rootdir", os.getcwd()]
    config = get_config(arguments)
    config.parse(arguments)  # installs the import hook
    util._config = config

    def compared(op: str, left: object, right: object) -> str | None:
        told = config.hook.pytest_assertrepr_compare(config=config, op=op, left=left, right=right)
        lines = next((list(lines) for lines in told if lines), [])[:LINES_COMPARED]
        return "\n~".join(line.replace("\n", "\\n") for line in lines).replace("%", "%%") or None

    util._reprcompare = compared
