"""Runs test functions on every rank of a pool of workers that live as long as the pytest run.

    from tests.pool import ranks

    @ranks(4)                                # or ranks(1, 2, 4): one test per world size
    @pytest.mark.parametrize("dim", [0, 1])  # parametrization, fixtures and classes compose
    def test_sum(dim, tmp_path): ...         # the body runs on all four ranks, inside a process group

Arguments are pickled to the workers, which import the test's module themselves; a parameter named `world_size`
receives the number of ranks. The workers are forked from one process that has already imported the test modules,
so that torch is imported once and a pool can be restarted in a moment. What happens inside a worker is in
`tests/pool_worker.py`.

`ranks` gives CPU ranks on Gloo. `gpu_ranks` gives NCCL ranks that share one GPU: NCCL refuses two ranks on one GPU of
one host, so each worker pretends to be a node of its own (`tests/pool_worker.py`). With `FULLSHARD_TEST_DEVICE=cpu` the
same tests run on CPU ranks.
"""

from __future__ import annotations

import functools
import inspect
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

HANG_AFTER = 60.0
"""Seconds a test may take before it counts as hung."""
GRACE = 4.0
"""Seconds the other ranks get once one has failed: they may wait for it in a collective."""
SYNC_WITHIN = 20.0
"""Seconds the ranks get to meet once a test has ended on all of them."""
START_WITHIN = 120.0
OUTPUT_SHOWN = 6_000
BAD = ("failed", "died", "stuck")
DEVICE_VARIABLE = "FULLSHARD_TEST_DEVICE"
"""Where the ranks of `gpu_ranks` compute: `cuda` unless this says `cpu`."""
START_VARIABLE = "FULLSHARD_TEST_START"
"""`spawn` starts each worker as a process of its own: for a machine where imports alone start CUDA before the fork, as
bitsandbytes' does."""
GPU_KINDS = ("gpu", "gpu-plain-nccl")
"""The process group of `gpu_ranks` is made by `use_spmd()`, or by the script as a plain NCCL group before that."""
NOTE = "note: "
ROOT = Path(__file__).resolve().parent.parent

bodies: dict[tuple[str, str], Callable[..., Any]] = {}
"""The rank tests by module and qualified name; filled on import, in pytest's process and in the workers alike."""

notes: list[str] = []
"""What the tests noted (`note`), for the end of the run."""

modules_in_use: set[str] | None = None
"""The modules with rank tests to import before the workers are forked; None for all that are known."""

_pools: dict[tuple[int, str], Pool] = {}


def gpu_ranks(
    *world_sizes: int, timeout: float = HANG_AFTER, plain_nccl: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """As `ranks`, on NCCL ranks that share one GPU; marks the test `gpu`.

    With `plain_nccl` the worker calls `dist.init_process_group("nccl")` before `use_spmd()`, as a script of its own
    may: that group carries no CPU tensors.
    """
    decorate = ranks(*world_sizes, timeout=timeout, kind=GPU_KINDS[plain_nccl])
    return lambda body: pytest.mark.gpu(decorate(body))


def note(text: str) -> None:
    """From inside a rank test: have a line shown at the end of the whole run, if the test passes (rank 0's count)."""
    print(f"{NOTE}{text}")


def chosen_device() -> str:
    """The device type of `gpu_ranks`."""
    return os.environ.get(DEVICE_VARIABLE, "cuda")


def ranks(
    *world_sizes: int, slow: Sequence[int] = (), timeout: float = HANG_AFTER, kind: str = "cpu"
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Run a test on every rank of a world of this size; with several sizes, once for each. Sizes named in `slow` are
    left to the slow tests."""

    def decorate(body: Callable[..., Any]) -> Callable[..., Any]:
        key = (body.__module__, body.__qualname__)
        bodies[key] = body
        signature = inspect.signature(body)
        wants_size = "world_size" in signature.parameters

        @functools.wraps(body)
        def test(*args: Any, world_size: int = world_sizes[0], **kwargs: Any) -> None:
            if wants_size:
                kwargs["world_size"] = world_size
            pool(world_size, kind).call(key, args, kwargs, timeout)

        # Hypothesis marks its tests by these; here its work is done in the workers.
        for name in [n for n in test.__dict__ if "hypothesis" in n]:
            del test.__dict__[name]
        if not wants_size and len(world_sizes) > 1:
            extra = inspect.Parameter("world_size", inspect.Parameter.KEYWORD_ONLY)
            signature = signature.replace(parameters=[*signature.parameters.values(), extra])
        test.__signature__ = signature  # type: ignore[attr-defined]
        if wants_size or len(world_sizes) > 1:
            marks = {size: [pytest.mark.slow] if size in slow else [] for size in world_sizes}
            sizes = [pytest.param(size, marks=marks[size], id=f"ranks{size}") for size in world_sizes]
            return pytest.mark.parametrize("world_size", sizes)(test)
        return test

    return decorate


def pool(size: int, kind: str = "cpu") -> Pool:
    """The pool of this many ranks, started on first use and again after it had to be killed."""
    if (size, kind) not in _pools:
        _pools[size, kind] = Pool(size, kind)
    return _pools[size, kind]


def close_pools() -> None:
    """End every worker; nothing is left when this returns."""
    while _pools:
        _pools.popitem()[1].kill()


@dataclass
class Report:
    """What one rank says of one test."""

    outcome: str  # "passed", "failed", "skipped", "xfailed"; from the parent: "died", "stuck"
    detail: str = ""


@dataclass
class _Worker:
    process: Any
    link: Connection
    files: Path
    """Start of the names of this rank's files: `.out`, what it printed; `.stacks`, where it stood when asked."""

    def output(self) -> str:
        return Path(f"{self.files}.out").read_text(errors="replace")[-OUTPUT_SHOWN:].strip()

    def stacks(self) -> str:
        """Ask the process where it stands, without its cooperation."""
        path = Path(f"{self.files}.stacks")
        start = path.stat().st_size
        os.kill(self.process.pid, signal.SIGUSR2)
        for _ in range(20):
            time.sleep(0.05)
            if path.stat().st_size > start:
                break
        time.sleep(0.1)
        return _without_harness(path.read_text(errors="replace")[start:])


def _without_harness(stacks: str) -> str:
    """Every thread's frames down to the test's own, without the threads and frames that run the test."""
    threads = [t for t in stacks.strip().split("\n\n") if "_end_with_parent" not in t]
    kept = []
    for thread in threads:
        lines = thread.splitlines()
        outer = [i for i, line in enumerate(lines) if "pool_worker.py" in line]
        kept.append("\n".join(lines[: outer[0]] if outer and outer[0] > 1 else lines))
    return "\n\n".join(kept)


@dataclass
class Pool:
    size: int
    kind: str = "cpu"
    workers: list[_Worker] = field(default_factory=list)
    calls: int = 0

    def __post_init__(self) -> None:
        from torch.distributed import TCPStore

        from tests import pool_worker

        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.folder = tempfile.TemporaryDirectory(prefix="fullshard-pool-")
        starts_cuda = self.kind in GPU_KINDS and chosen_device() == "cuda" and find_spec("bitsandbytes") is not None
        spawned = os.environ.get(START_VARIABLE, "spawn" if starts_cuda else "") == "spawn"
        context = multiprocessing.get_context("spawn") if spawned else fork_server()
        for rank in range(self.size):
            ours, theirs = multiprocessing.Pipe()
            files = Path(self.folder.name) / f"rank{rank}"
            for suffix in (".out", ".stacks"):
                Path(f"{files}{suffix}").touch()
            arguments = (rank, self.size, self.kind, self.store.port, theirs, str(files))
            process = context.Process(target=pool_worker.main, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.workers.append(_Worker(process, ours, files))
        try:
            reports = self._collect(START_WITHIN)
            if any(r.outcome != "passed" for r in reports):
                pytest.fail(self._describe("the pool did not start", reports), pytrace=False)
        except BaseException:
            self.kill()
            raise

    def call(self, key: tuple[str, str], args: tuple[Any, ...], kwargs: dict[str, Any], timeout: float) -> None:
        """Run one test on all ranks; its outcome here is theirs."""
        self.calls += 1
        message = pickle.dumps(("test", key, pickle.dumps((args, kwargs))))
        try:
            reports = self._ask(message, timeout)
            in_step = all(r.outcome not in ("died", "stuck") for r in reports)
            if in_step:
                after = self._ask(pickle.dumps(("sync", self.calls)), SYNC_WITHIN)
                in_step = all(r.outcome == "passed" for r in after)
        except BaseException:  # Ctrl-C: the ranks are somewhere in the middle
            self.kill()
            raise
        outcomes = {r.outcome for r in reports}
        failure = ""
        if outcomes.intersection(BAD):
            headline = ", ".join(f"rank {i} {r.outcome}" for i, r in enumerate(reports) if r.outcome in BAD)
            if not outcomes & {"failed", "died"}:
                headline += f": no end after {timeout:g} s"
            failure = self._describe(headline, reports)
        elif not in_step:
            failure = self._describe("the test passed, but left its ranks out of step", after)
        elif len(outcomes) > 1:
            failure = self._describe("the ranks disagree about the outcome", reports)
        if not in_step:
            self.kill()
        if failure:
            pytest.fail(failure, pytrace=False)
        if outcomes == {"passed"}:
            notes.extend(line.removeprefix(NOTE) for line in self.workers[0].output().splitlines() if NOTE in line)
        if outcomes == {"skipped"}:
            pytest.skip(reports[0].detail)
        if outcomes == {"xfailed"}:
            pytest.xfail(reports[0].detail)

    def _ask(self, message: bytes, timeout: float) -> list[Report]:
        for worker in self.workers:
            try:
                worker.link.send_bytes(message)
            except OSError:  # the worker is gone: `_collect` says how
                continue
        return self._collect(timeout)

    def _collect(self, timeout: float) -> list[Report]:
        """One report from each rank, or what became of it: dead, or stuck in the stacks shown."""
        deadline = time.monotonic() + timeout
        reports: dict[int, Report] = {}
        while len(reports) < self.size:
            waiting = {i: self.workers[i] for i in range(self.size) if i not in reports}
            signs = [sign for w in waiting.values() for sign in (w.link, w.process.sentinel)]
            ready = wait(signs, max(0.0, deadline - time.monotonic()))
            if not ready:
                reports |= {i: Report("stuck", w.stacks()) for i, w in waiting.items()}
            for i, worker in waiting.items():
                if worker.link in ready or worker.process.sentinel in ready:
                    try:
                        reports[i] = pickle.loads(worker.link.recv_bytes())
                    except (EOFError, OSError):
                        worker.process.join(1)
                        reports[i] = Report("died", f"the process ended with exit code {worker.process.exitcode}")
                    if reports[i].outcome in ("failed", "died"):
                        deadline = min(deadline, time.monotonic() + GRACE)
        return [reports[i] for i in range(self.size)]

    def _describe(self, headline: str, reports: list[Report]) -> str:
        """The ranks' own words: failures before those who only waited for them, equal ones once."""
        parts = [headline]
        order = sorted(range(self.size), key=lambda i: (*BAD, "xfailed", "skipped", "passed").index(reports[i].outcome))
        said: dict[tuple[str, str], list[int]] = {}
        for i in order:
            said.setdefault((reports[i].outcome, reports[i].detail), []).append(i)
        for (outcome, detail), who in said.items():
            names = "rank " + ", ".join(map(str, who))
            parts.append(f"---- {names}: {outcome}" + (f"\n{detail}" if detail else ""))
        for i in order:
            printed = self.workers[i].output()
            if printed:
                parts.append(f"---- rank {i} printed\n{printed}")
        return "\n".join(parts)

    def kill(self) -> None:
        for worker in self.workers:
            worker.process.kill()
        for worker in self.workers:
            worker.process.join(10)
            worker.link.close()
        self.workers = []
        self.folder.cleanup()
        if _pools.get((self.size, self.kind)) is self:
            del _pools[self.size, self.kind]


@functools.cache
def fork_server() -> Any:
    """The process that workers are forked from: it imports the test modules once, before any thread exists in it."""
    context = multiprocessing.get_context("forkserver")
    modules = {module for module, _ in bodies} & (modules_in_use or {module for module, _ in bodies})
    context.set_forkserver_preload(["tests.pool_server", *sorted(modules)])
    changes = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # asking for GPUs must not start CUDA before the fork
    }
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        from multiprocessing import forkserver

        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    return context
