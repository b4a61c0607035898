"""Where the ranks meet about checkpoints: exchanges that every rank must enter, and errors that all ranks share.

Checkpoints have communicators of their own (Gloo, host memory only), so that they never mix with training's. A rank
that waits for others here is watched by the engine's watch: within seconds it says which ranks have not come.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fullshard import runtime
from fullshard.errors import CheckpointError, FSDPError, RankLostError, UserError
from fullshard.groups import carries, new_group
from fullshard.watchdog import abort, watch

T = TypeVar("T")

PATIENCE = timedelta(hours=6)
"""How long a rank waits for others that are still writing. One that has died is noticed at once."""

_front: tuple[Any, int, Any] = (None, -1, None)


def _new_group() -> Any:
    return new_group(tuple(range(runtime.world_size())), backend="gloo", timeout=PATIENCE)


class Lease:
    """A communicator of all ranks, on loan. All ranks must take it, and end it, alike.

    It is used again by the next one rather than destroyed: torch names some groups by how many there are, so that
    after one is destroyed a name may be given twice.
    """

    def __init__(self) -> None:
        spare = _spare_groups()
        self.group = spare.pop() if spare else _new_group()
        self._home = spare

    def end(self) -> None:
        if self.group is not None and self._home is _spare_groups():
            self._home.append(self.group)
        self.group = None


_spares: tuple[Any, int, list[Any]] = (None, -1, [])


def _spare_groups() -> list[Any]:
    """Groups that nobody uses; like all others they are given up with the process group, and after a failure."""
    global _spares
    if _spares[0] is not dist.group.WORLD or _spares[1] != watch.failures:
        _spares = (dist.group.WORLD, watch.failures, [])
    return _spares[2]


def front_group() -> Any:
    """The communicator of the training thread; made anew with the job's process group, and after a failure."""
    global _front
    runtime.use_spmd()
    if _front[0] is not dist.group.WORLD or _front[1] != watch.failures:
        if carries(dist.group.WORLD, "cpu"):
            # Making a group waits for all ranks unwatched, so they meet first where the wait is watched.
            _watched("start", dist.group.WORLD, lambda: dist.all_reduce(torch.zeros(1)))
        _front = (dist.group.WORLD, watch.failures, _new_group())
    return _front[2]


def _watched(purpose: str, group: Any, job: Callable[[], T]) -> T:
    noted = watch.watch_for(f"checkpoint {purpose}", tuple(range(runtime.world_size())), group)
    try:
        with noted.waiting(noted.issue()):
            return job()
    except RankLostError:
        raise
    except FSDPError as error:
        raise CheckpointError(str(error)) from error


def exchange(value: T, step: int, what: str, *, watched: bool = True) -> list[T]:
    """Every rank's value, on every rank. Not `watched` where ranks take their time, such as after writing files."""
    if runtime.world_size() == 1:
        runtime.use_spmd()
        return [value]
    watch.at(step, None, what)
    group = front_group()
    heard: list[Any] = [None] * runtime.world_size()
    if watched:
        _watched("", group, lambda: dist.all_gather_object(heard, value, group=group))
    else:
        try:
            dist.all_gather_object(heard, value, group=group)
        except RuntimeError as error:
            raise lost(what, error) from error
    watch.at(step, None, f"after {what}")
    return heard


def lost(what: str, error: Exception) -> CheckpointError:
    """The error for a connection to another rank that is gone."""
    found = watch.failed(what, tuple(range(runtime.world_size())), error)
    return found if isinstance(found, CheckpointError) else CheckpointError(str(found))


def agree(job: Callable[[], T], step: int, what: str, *, watched: bool = True) -> list[T]:
    """Do a job on every rank and share the results; if it fails on any, the same error is raised on all."""
    values, failures, cause = attempt(job, _told, step, what, watched=watched)
    raise_for(failures, cause)
    return values


def attempt(
    job: Callable[[], T], told: Callable[[Exception], str], step: int, what: str, *, watched: bool
) -> tuple[list[T], dict[int, str], Exception | None]:
    """Do a job on every rank: the results, what failed on which rank as `told` puts it, and this rank's own error."""
    mine: Any = None
    failure: Exception | None = None
    try:
        mine = job()
    except Exception as error:
        failure = error
    heard = exchange((mine, None if failure is None else told(failure)), step, what, watched=watched)
    failures = {rank: text for rank, (_, text) in enumerate(heard) if text is not None}
    return [value for value, _ in heard], failures, failure


def any_of(flags: int, step: int, what: str) -> int:
    """The flags that any rank has set, in one small sum."""
    if runtime.world_size() == 1:
        return flags
    group = front_group()
    watch.at(step, None, what)
    shared, limit = torch.tensor([flags]), abort.time_out(dist.group.WORLD)

    def wait() -> None:
        work = dist.all_reduce(shared, dist.ReduceOp.BOR, group=group, async_op=True)
        work.wait(*[timedelta(seconds=limit)] if limit is not None else [])

    _watched("", group, wait)
    return int(shared)


def _told(error: BaseException) -> str:
    if isinstance(error, OSError):
        return f"{error.filename or 'the file'}: {error.strerror or error}"
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"


def raise_for(failures: dict[int, str], cause: BaseException | None = None) -> None:
    """Raise the one error that all ranks share, if there were any."""
    if not failures:
        return
    by_message: dict[str, list[int]] = {}
    for rank, message in failures.items():
        by_message.setdefault(message, []).append(rank)
    lines = [
        message if len(ranks) == runtime.world_size() else f"rank {', '.join(map(str, ranks))}: {message}"
        for message, ranks in by_message.items()
    ]
    raise CheckpointError("\n".join(lines)) from cause


def from_torch(error: Any) -> CheckpointError:
    """torch.distributed.checkpoint's error, which names every rank that failed, as ours."""
    failures = {rank: _told(found) for rank, (found, _) in error.failures.items()}
    try:
        raise_for(failures, error)
    except CheckpointError as made:
        return made
    return CheckpointError(str(error))
