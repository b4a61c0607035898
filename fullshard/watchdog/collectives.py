"""Collectives beside the engine's (a metric's sum, a norm) that are watched as the engine's are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from fullshard import groups, runtime
from fullshard.spmd.mesh import Mesh
from fullshard.watchdog import watch


def finish(what: str, issue: Callable[[], Any], group: dist.ProcessGroup | None = None) -> None:
    """Issue one collective (with `async_op=True`) and wait for it as its backend does.

    All ranks of the group must call it; `what` names it in reports.
    """
    group = group if group is not None else dist.group.WORLD
    assert group is not None
    noted = _watch_of(what, group)
    watch.doing(what)
    with watch.issuing():
        label, work = noted.issue(), issue()
    if groups.backend_of(group, runtime.device()) == "gloo":
        with noted.waiting(label):
            work.wait()
    else:
        noted.follow(label, [work])
        work.wait()
    watch.check()
    watch.doing(f"after {what}")


def meet(what: str) -> None:
    """Wait for all ranks."""
    if runtime.world_size() > 1:
        here = torch.zeros(1, device=runtime.device())
        finish(what, lambda: dist.all_reduce(here, async_op=True))


def limit(mesh: Mesh, seconds: float) -> None:
    """Set how long a collective of all ranks, or along an axis of the mesh, may take."""
    along = [mesh.get_group(axis) for axis in range(mesh.ndim) if mesh.mesh_shape[axis] > 1]
    for group in {dist.group.WORLD, *along}:
        assert group is not None
        groups.limit(group, seconds)


_known: dict[tuple[str, str], watch.Watch] = {}


def _watch_of(what: str, group: dist.ProcessGroup) -> watch.Watch:
    """The watch of one kind of collective; a group may have thousands of ranks, which are listed once."""
    known = _known.get((what, group.group_name))
    if known is None or known.group is not group or not watch.is_known(known):
        known = watch.watch_for(what, tuple(dist.get_process_group_ranks(group)), group)
        _known[what, group.group_name] = known
    return known
