"""What the ranks agree on: values that all of them exchange, and errors that all of them raise.

Every function here is collective: all ranks must call it, in the same order. The data travels through host memory on
Gloo communicators of its own, so it never mixes with training's collectives. The watchdog names the ranks that others
wait for.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fullshard.config.errors import ConfigError, TrainingError, UserError
from fullshard.distributed import runtime
from fullshard.distributed.groups import has_backend_for, is_simulated, new_group
from fullshard.distributed.rendezvous import differences, versions
from fullshard.distributed.watchdog import abort, watch

T = TypeVar("T")

TIMEOUT = timedelta(hours=6)
"""How long a rank waits for others, which may be writing files. A rank that has died is noticed within seconds."""


# --- communicators --------------------------------------------------------------------------------------------------

_host_group: tuple[Any, int, Any] = (None, -1, None)
_spares: tuple[Any, int, list[Any]] = (None, -1, [])


def _all_ranks() -> tuple[int, ...]:
    return tuple(range(runtime.world_size()))


def _new_group() -> Any:
    return new_group(_all_ranks(), backend="gloo", timeout=TIMEOUT)


def host_group() -> Any:
    """The training thread's communicator for host memory; replaced with the job's process group and after a failure."""
    global _host_group
    runtime.use_spmd()
    if _host_group[0] is not dist.group.WORLD or _host_group[1] != watch.failures():
        if has_backend_for(dist.group.WORLD, "cpu"):
            # Creating a group waits for all ranks unwatched, so they synchronize first where the wait is watched.
            _watched("start", dist.group.WORLD, lambda: dist.all_reduce(torch.zeros(1)))
        _host_group = (dist.group.WORLD, watch.failures(), _new_group())
    return _host_group[2]


class BorrowedGroup:
    """A communicator of all ranks for another thread, such as one that saves in the background.

    It is handed to the next borrower rather than destroyed: torch names some groups by how many there are, so after
    one is destroyed a name could be used twice.
    """

    def __init__(self) -> None:
        spare = _spare_groups()
        self.group = spare.pop() if spare else _new_group()
        self._home = spare

    def end(self) -> None:
        """Return the group to the spare ones."""
        if self.group is not None and self._home is _spare_groups():
            self._home.append(self.group)
        self.group = None


def _spare_groups() -> list[Any]:
    """Groups that nobody uses; dropped with the job's process group and after a failure, like all others."""
    global _spares
    if _spares[0] is not dist.group.WORLD or _spares[1] != watch.failures():
        _spares = (dist.group.WORLD, watch.failures(), [])
    return _spares[2]


def _watched(purpose: str, group: Any, job: Callable[[], T]) -> T:
    log = watch.watch_for(f"ranks {purpose}", _all_ranks(), group)
    with watch.waiting(log.issue()):
        return job()


def connection_lost(what: str, error: Exception) -> UserError:
    """The error for a broken connection to another rank; it names the rank that is gone."""
    return watch.failed(what, _all_ranks(), error)


_alone: ContextVar[bool] = ContextVar("fullshard_alone", default=False)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Inside, this process asks no other: every function here runs as on one rank, and creates no process group. For
    work that a rank, or a process that is none, does for itself: a plan."""
    before = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(before)


# --- values ---------------------------------------------------------------------------------------------------------


def exchange(value: T, what: str, *, watched: bool = True) -> list[T]:
    """Every rank's value, on every rank. `what` names the exchange in reports about ranks that are late.

    With `watched=False` a long wait is not reported: some ranks may be working before they get here.
    """
    if _alone.get():
        return [value]
    runtime.use_spmd()
    if runtime.world_size() == 1 or is_simulated(dist.group.WORLD):
        return [value]
    watch.doing(what)
    group = host_group()
    values: list[Any] = [None] * runtime.world_size()
    if watched:
        _watched("", group, lambda: dist.all_gather_object(values, value, group=group))
    else:
        try:
            dist.all_gather_object(values, value, group=group)
        except RuntimeError as error:
            raise connection_lost(what, error) from error
    watch.doing(f"after {what}")
    return values


def require_equal(facts: Mapping[str, Any], what: str, *, watched: bool = False) -> None:
    """Raise on all ranks if a fact that decides the result is not the same on all; the error names it, its values and
    their ranks. Versions are compared too."""
    values = exchange({**versions(), **_plain(facts)}, f"comparing {what}", watched=watched)
    if difference := differences(dict(enumerate(values))):
        raise ConfigError(f"the ranks would train differently: {difference}. Start all ranks with the same {what}.")


def _plain(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts that are equal in every process if they are the same: texts with the address of an object are not."""
    described = {name: json.dumps(value, default=str, sort_keys=True) for name, value in facts.items()}
    return {name: facts[name] for name, text in described.items() if " at 0x" not in text}


def any_of(flags: int, what: str) -> int:
    """The bitwise OR of every rank's flags: one small all-reduce."""
    if _alone.get() or runtime.world_size() == 1:
        return flags
    group = host_group()
    watch.doing(what)
    shared, limit = torch.tensor([flags]), abort.timeout_of(dist.group.WORLD)

    def wait() -> None:
        work = dist.all_reduce(shared, dist.ReduceOp.BOR, group=group, async_op=True)
        work.wait(*[timedelta(seconds=limit)] if limit is not None else [])

    _watched("", group, wait)
    return int(shared)


# --- outcomes -------------------------------------------------------------------------------------------------------


def agree(job: Callable[[], T], what: str, *, error: type[UserError] | None = None, watched: bool = False) -> list[T]:
    """Run `job` on every rank and return every rank's result; if it fails on any rank, all ranks raise.

    With `error` they raise one error of that class, which lists the ranks that failed and why. Without, a rank that
    failed raises its own exception, and the others raise the first one's message. `watched` is for short jobs only.
    """
    result, failure = None, None
    try:
        result = job()
    except Exception as raised:
        failure = raised
    outcomes = exchange((result, _described(failure)), what, watched=watched)
    failures = {rank: described for rank, (_, described) in enumerate(outcomes) if described is not None}
    if not failures:
        return [value for value, _ in outcomes]  # type: ignore[misc]
    if error is not None:
        raise error(by_rank({rank: text for rank, (_, text) in failures.items()})) from failure
    if failure is not None:
        raise failure
    kind, text = next(iter(failures.values()))
    raise kind(text)


def run_on_all_ranks(
    job: Callable[[], T], what: str, *, error: type[UserError] | None = None, watched: bool = False
) -> T:
    """Like `agree`, but each rank gets its own result only, which may be large; errors are shared."""
    own: list[T] = []
    agree(lambda: own.append(job()), what, error=error, watched=watched)
    return own[0]


def once_per_node(job: Callable[[], T], what: str) -> T:
    """The result (a small value) of `job` on the first rank of this node; the other ranks of the node wait for it."""
    return _result_of(runtime.rank() - runtime.local_rank(), job, what)


def on_rank_0(job: Callable[[], T], what: str) -> T:
    """The result (a small value) of `job` on rank 0; the other ranks wait for it."""
    return _result_of(0, job, what)


def _result_of(worker: int, job: Callable[[], T], what: str) -> T:
    if _alone.get():
        return job()
    results = agree(lambda: job() if runtime.rank() == worker else None, what)
    return results[worker]  # type: ignore[return-value]


def _described(error: Exception | None) -> tuple[type[UserError], str] | None:
    if error is None:
        return None
    return type(error) if isinstance(error, UserError) else TrainingError, describe_error(error)


def describe_error(error: BaseException) -> str:
    """An exception as other ranks report it."""
    if isinstance(error, OSError):
        return f"{error.filename or 'the file'}: {error.strerror or error}"
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"


def by_rank(messages: dict[int, str]) -> str:
    """One line per message, led by the ranks that it comes from unless it comes from all."""
    ranks_of: dict[str, list[int]] = {}
    for rank, message in messages.items():
        ranks_of.setdefault(message, []).append(rank)
    return "\n".join(
        message if len(ranks) == runtime.world_size() else f"rank {', '.join(map(str, ranks))}: {message}"
        for message, ranks in ranks_of.items()
    )
