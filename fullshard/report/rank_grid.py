"""The ranks of a plan's mesh as a grid, which shard each holds of a parameter, and ranks folded into few columns."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fullshard.fsdp.plan import ParameterPlan, ShardingPlan, item_size

MOST_COLUMNS = 16
"""Columns of ranks that a picture has at most, unless ranks are chosen."""
FOLDED_COLUMNS = 8
"""Columns when there would be more."""
MOST_MESH_ROWS = 8
"""Rows of replicas in a picture of the mesh."""


@dataclass(frozen=True)
class Column:
    """Ranks that are drawn as one: those that hold the same shards, and neighbors where there are many."""

    positions: tuple[int, ...]
    """Which shards they hold: indices along the axes that split parameters."""
    ranks: tuple[int, ...]


class RankGrid:
    """The ranks of a plan's mesh as a grid: shard positions × replicas."""

    def __init__(self, plan: ShardingPlan, ranks_per_node: int | None = None) -> None:
        names = [name for name, _ in plan.axes]
        sizes = [size for _, size in plan.axes]
        used = {axis for p in plan.parameters.values() for axis in itertools.chain.from_iterable(map(axes_of, p.spec))}
        if plan.expert_axes:  # they split the same ranks once more
            used |= set(names) - set(plan.replica_axes)
        self.split_axes = tuple(name for name in names if name in used)
        """The axes that split parameters."""
        self.copy_axes = tuple(name for name in names if name not in used)
        """The axes along which ranks hold the same."""
        self.world = math.prod(sizes)
        self.ranks_per_node = min(ranks_per_node or self.world, self.world)
        self.sizes = dict(plan.axes)
        self._own_axes = {p.name: unit.axes for unit in plan.units for p in unit.parameters if unit.axes}
        """The meshes of parameters that have another one of the same ranks (experts)."""
        shape = [self.sizes[name] for name in self.split_axes]
        order = [names.index(name) for name in (*self.split_axes, *self.copy_axes)]
        ranks = np.arange(self.world).reshape(sizes).transpose(order)
        self.ranks = ranks.reshape(math.prod(shape), -1)
        """Ranks by [position, replica]."""
        places = np.unravel_index(np.arange(len(self.ranks)), shape) if shape else ()
        self._coordinates = dict(zip(self.split_axes, places, strict=True))

    @property
    def positions(self) -> int:
        """The number of shard positions."""
        return len(self.ranks)

    @property
    def replicas(self) -> int:
        """The number of ranks that hold the same shards."""
        return self.ranks.shape[1]

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return -(-self.world // self.ranks_per_node)

    def node_of(self, rank: int) -> int:
        """The node of a rank."""
        return rank // self.ranks_per_node

    def coordinate(self, position: int) -> str:
        """A position in words, such as `fsdp 3 · model 0`."""
        return " · ".join(f"{axis} {self._coordinates[axis][position]}" for axis in self.split_axes)

    def sizes_of(self, p: ParameterPlan) -> dict[str, int]:
        """The axes of a parameter's mesh and their sizes."""
        return dict(self._own_axes.get(p.name, ())) or self.sizes

    def _places(self, p: ParameterPlan) -> dict[str, np.ndarray]:
        """The index of each position along the axes of a parameter's mesh."""
        if p.name not in self._own_axes:
            return self._coordinates
        order = sorted(self._own_axes[p.name], key=lambda axis: axis[0] == "ep")  # the ranks of `ep` are consecutive
        places = np.unravel_index(self.ranks[:, 0], [size for _, size in order])
        return {name: place for (name, _), place in zip(order, places, strict=True)}

    def bounds(self, p: ParameterPlan) -> tuple[np.ndarray, np.ndarray]:
        """Where the shard of each position starts and stops, [position, dim]."""
        sizes, coordinates = self.sizes_of(p), self._places(p)
        starts = np.zeros((self.positions, len(p.shape)), dtype=np.int64)
        stops = np.tile(np.array(p.shape, dtype=np.int64), (self.positions, 1))
        for dim, entry in enumerate(p.spec):
            index, count = np.zeros(self.positions, dtype=np.int64), 1
            for axis in axes_of(entry):
                index, count = index * sizes[axis] + coordinates[axis], count * sizes[axis]
            length = -(-p.shape[dim] // count)
            starts[:, dim] = np.minimum(index * length, p.shape[dim])
            stops[:, dim] = np.minimum((index + 1) * length, p.shape[dim])
        return starts, stops

    def shard_bytes(self, p: ParameterPlan) -> np.ndarray:
        """Bytes of the shard of each position."""
        starts, stops = self.bounds(p)
        return (stops - starts).prod(axis=1) * item_size(p.dtype)

    def columns(self, chosen: Sequence[int] | None = None) -> tuple[Column, ...]:
        """All ranks in few columns, in whole nodes where they must be folded; or one column for each chosen rank."""
        if chosen is not None:
            place = {int(rank): position for position, row in enumerate(self.ranks) for rank in row}
            return tuple(Column((place[rank],), (rank,)) for rank in chosen)
        width = 1
        if self.positions > MOST_COLUMNS:
            node = self.ranks_per_node if self.positions % self.ranks_per_node == 0 else 1
            width = node * -(-self.positions // (FOLDED_COLUMNS * node))
        groups = [range(i, min(i + width, self.positions)) for i in range(0, self.positions, width)]
        return tuple(Column(tuple(g), _sorted(self.ranks[g.start : g.stop])) for g in groups)


def axes_of(entry: object) -> tuple[str, ...]:
    """The axes in an entry of a spec."""
    if entry is None:
        return ()
    return tuple(map(str, entry)) if isinstance(entry, tuple) else (str(entry),)


def numbers_text(numbers: Sequence[int], most: int = 4) -> str:
    """Numbers in few words: `0–7, 16–23`, `0, 8 … 504`."""
    step = numbers[1] - numbers[0] if len(numbers) > most else 1
    if step > 1 and all(b - a == step for a, b in itertools.pairwise(numbers)):
        return f"{numbers[0]}, {numbers[1]} … {numbers[-1]}"
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], n]
        else:
            runs.append([n])
    shown = [
        str(run[0]) if len(run) == 1 else f"{run[0]}{', ' if run[1] == run[0] + 1 else '–'}{run[1]}" for run in runs
    ]
    return ", ".join(shown) if len(shown) <= most else f"{', '.join(shown[:2])} … {shown[-1]}"


def mesh_cells(grid: RankGrid) -> list[list[Column]]:
    """The mesh in rows of replicas and columns of shards. If nothing is split, ranks are listed in one row."""
    ranks = grid.ranks if grid.positions > 1 else grid.ranks.T
    places = [column.positions for column in grid.columns()] if grid.positions > 1 else _runs(len(ranks), MOST_COLUMNS)
    rows = _runs(ranks.shape[1], MOST_MESH_ROWS)
    return [[Column(place, _sorted(ranks[np.ix_(list(place), list(row))])) for place in places] for row in rows]


def _sorted(ranks: np.ndarray) -> tuple[int, ...]:
    return tuple(sorted(ranks.ravel().tolist()))


def _runs(count: int, most: int) -> list[tuple[int, ...]]:
    width = -(-count // most)
    return [tuple(range(i, min(i + width, count))) for i in range(0, count, width)]
