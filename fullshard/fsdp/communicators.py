"""The communicators of a model: one per mesh axis and purpose, shared by the models on the same ranks.

Gathers and reductions have a communicator each, so that neither waits for the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from fullshard import groups, runtime
from fullshard.errors import MeshError
from fullshard.fsdp.comm import Collectives, Link
from fullshard.fsdp.counters import Meter
from fullshard.fsdp.point_to_point import PointToPoint
from fullshard.spmd.mesh import Mesh
from fullshard.watchdog import watch as watching
from fullshard.watchdog.watch import watch_for


def make_link(mesh: Mesh, axes: tuple[str, ...], purpose: str, timeout: float | None, meter: Meter) -> Link:
    """The link along one axis, or along several merged into one, for one purpose. Collective: all ranks of the mesh
    must call it."""
    ranks, device = _ranks_along(mesh, axes), runtime.device()
    communicator = _communicator(ranks, purpose, timeout)
    group, model = communicator.group, next(communicator.models)
    kind = PointToPoint if uses_point_to_point(group) else Collectives
    return kind(group, watch_for(purpose, ranks, group), device, meter, model)


def uses_point_to_point(group: dist.ProcessGroup | None) -> bool:
    """Whether tensors of this rank's device are sent point to point in a group, not in collectives."""
    return group is None or groups.backend_of(group, runtime.device()) == "gloo"


def _ranks_along(mesh: Mesh, axes: tuple[str, ...]) -> tuple[int, ...]:
    """The ranks that differ from this one only along the given axes, in mesh order."""
    indices = [mesh.get_axis_name_idx(axis) for axis in axes]
    coordinate = mesh.coordinate(runtime.rank())
    if coordinate is None:
        raise MeshError(f"rank {runtime.rank()} is not in {mesh}; wrap the module on the ranks of the mesh only")
    index = tuple(slice(None) if axis in indices else coordinate[axis] for axis in range(mesh.ndim))
    return tuple(int(rank) for rank in mesh.get_logical_mesh()[index].reshape(-1))


@dataclass
class _Communicator:
    """A process group for one purpose. Models on the same ranks share it."""

    group: dist.ProcessGroup | None
    models: Iterator[int] = field(default_factory=itertools.count)
    """Numbers its models, the same on every rank."""


def _communicator(ranks: tuple[int, ...], purpose: str, timeout: float | None) -> _Communicator:
    if len(ranks) == 1:
        return _Communicator(None)
    known = _communicators()
    key = (ranks, purpose, timeout)
    if key not in known:
        options: dict[str, Any] = {} if timeout is None else {"timeout": timedelta(seconds=timeout)}
        known[key] = _Communicator(groups.new_group(ranks, **options))
    return known[key]


_cache: tuple[Any, dict[Any, _Communicator]] = (None, {})


def _communicators() -> dict[Any, _Communicator]:
    """The communicators made so far. They become invalid with the default process group, and when one of them fails."""
    global _cache
    age = (dist.group.WORLD, watching.failures())
    if _cache[0] is None or _cache[0][0] is not age[0] or _cache[0][1] != age[1]:
        _cache = (age, {})
    return _cache[1]
