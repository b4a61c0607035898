"""Collectives outside the engine (a metric's sum, a norm) that are watched like the engine's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from fullshard.distributed import groups, runtime
from fullshard.distributed.watchdog import watch


def finish(what: str, issue: Callable[[], Any], group: dist.ProcessGroup | None = None) -> None:
    """Issue one collective (with `async_op=True`) and wait for it as its backend does.

    All ranks of the group must call it; `what` names it in reports.
    """
    group = group if group is not None else dist.group.WORLD
    assert group is not None
    log = _log_of(what, group)
    watch.doing(what)
    with watch.issuing():
        operation, work = log.issue(), issue()
    if groups.backend_of(group, runtime.device()) == "gloo":
        with watch.waiting(operation):
            work.wait()
    else:
        log.follow(operation, [work])
        work.wait()
    watch.raise_failure()
    watch.doing(f"after {what}")


def meet(what: str) -> None:
    """Wait for all ranks."""
    if runtime.world_size() > 1:
        here = torch.zeros(1, device=runtime.device())
        finish(what, lambda: dist.all_reduce(here, async_op=True))


def set_timeout(process_groups: Iterable[dist.ProcessGroup], seconds: float) -> None:
    """Set how long a collective of all ranks, or of one of these groups, may take."""
    for group in {dist.group.WORLD, *process_groups}:
        assert group is not None
        groups.set_timeout(group, seconds)


_logs: dict[tuple[str, str], watch.OperationLog] = {}


def _log_of(what: str, group: dist.ProcessGroup) -> watch.OperationLog:
    """The log of one kind of collective; a group may have thousands of ranks, which are listed once."""
    log = _logs.get((what, group.group_name))
    if log is None or log.group is not group or not watch.is_known(log):
        log = watch.watch_for(what, tuple(dist.get_process_group_ranks(group)), group)
        _logs[what, group.group_name] = log
    return log
