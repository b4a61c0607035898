"""A sharding plan arranged for drawing: what each rank holds of each parameter, with repeated things folded.

Units that are alike become one row (`model.layers.[0–79]`, × 80), ranks become columns: replicas share one, and on many
ranks so do neighbors. Folding only groups: the bytes of a row and of a column are those of everything in them.
`plan_svg.py`, `plan_page.py` and `plan_terminal.py` draw the result.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fullshard.errors import ConfigError
from fullshard.fsdp.plan import ParameterPlan, ShardingPlan, UnitPlan
from fullshard.reporting.rank_grid import Column, RankGrid, numbers_text

NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
"""A part of a dotted name that is a number: the index of a layer or an expert."""


@dataclass(frozen=True)
class Cell:
    """What the ranks of a column hold of a parameter."""

    slices: tuple[tuple[int, int], ...]
    """Start and stop of each dim, over all positions of the column."""
    bytes: int
    """Of all its ranks together."""
    least: int
    """Bytes of the rank that holds the least."""
    most: int
    padding: int
    """Bytes by which its pieces are longer when they are sent; they are not stored."""


# --- units and parameters ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ParameterRow:
    """A parameter of a unit, or several that are alike."""

    label: str
    plan: ParameterPlan
    """The plan of the first."""
    count: int
    """How many there are in one unit."""
    notes: tuple[str, ...]
    cells: tuple[Cell, ...]
    """One per column, for one of them."""


@dataclass(frozen=True)
class UnitRow:
    """A unit, or several that are alike."""

    label: str
    names: tuple[str, ...]
    plan: UnitPlan
    """The plan of the first."""
    parameters: tuple[ParameterRow, ...]

    @property
    def count(self) -> int:
        return len(self.names)

    @property
    def trainable(self) -> int:
        """Elements that train in one unit."""
        return sum(row.count * math.prod(row.plan.shape) for row in self.parameters if row.plan.trainable)

    @property
    def elements(self) -> int:
        return sum(row.count * math.prod(row.plan.shape) for row in self.parameters)


@dataclass(frozen=True)
class PlanView:
    """A plan with its rows and columns."""

    plan: ShardingPlan
    grid: RankGrid
    columns: tuple[Column, ...]
    units: tuple[UnitRow, ...]
    chosen: bool = False
    """Whether the columns are ranks that were chosen, rather than all of them."""

    @cached_property
    def column_bytes(self) -> tuple[int, ...]:
        """What the ranks of each column hold of all rows together."""
        return tuple(
            sum(unit.count * row.count * row.cells[i].bytes for unit in self.units for row in unit.parameters)
            for i in range(len(self.columns))
        )

    @cached_property
    def position_bytes(self) -> np.ndarray:
        """What one rank at each shard position holds of all rows together."""
        held = np.zeros(self.grid.positions, dtype=np.int64)
        for unit in self.units:
            for row in unit.parameters:
                held += unit.count * row.count * self.grid.held(row.plan)
        return held

    def most_in(self, column: Column) -> int:
        """The bytes of the rank that holds the most in a column."""
        return int(self.position_bytes[list(column.positions)].max())


def view_plan(
    plan: ShardingPlan, ranks_per_node: int | None = None, *, ranks: str | None = None, units: str | None = None
) -> PlanView:
    """Arrange a plan. `ranks` is None (folded), `all`, or a list such as `0-7,12`; `units` is None (folded), `all`, or
    names and patterns such as `model.layers.0,*.3`, which are not folded."""
    grid = RankGrid(plan, ranks_per_node)
    columns = grid.columns(None if ranks is None else chosen_ranks(ranks, grid.world))
    found = plan.units if units in (None, "all") else chosen_units(str(units), plan.units)
    groups = [[unit] for unit in found] if units is not None else _alike(found)
    rows = tuple(_unit_row(group, grid, columns) for group in groups)
    return PlanView(plan, grid, columns, rows, chosen=ranks is not None)


def chosen_ranks(text: str, world: int) -> list[int]:
    """The ranks in a list such as `0-7,12`, or `all`."""
    if text == "all":
        return list(range(world))
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\s*[-–]\s*(\d+))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        if first > last or last >= world:
            raise ConfigError(
                f"--ranks {text}: {part.strip()!r} is not a rank or a range of ranks from 0 to {world - 1}; expected "
                f"all, or a list such as 0-7,12."
            )
        found += range(first, last + 1)
    return list(dict.fromkeys(found))


def chosen_units(text: str, units: Sequence[UnitPlan]) -> list[UnitPlan]:
    """The units with these names or patterns, in the plan's order."""
    patterns = [part.strip() for part in text.split(",")]
    for pattern in patterns:
        if not any(_matches(unit, pattern) for unit in units):
            some = ", ".join(unit_name(unit) for unit in units[:4])
            raise ConfigError(
                f"--units {text}: no unit is named {pattern!r}; expected all, or names and patterns such as *.0. The "
                f"units are {some}{', …' if len(units) > 4 else ''}"
            )
    return [unit for unit in units if any(_matches(unit, pattern) for pattern in patterns)]


def _matches(unit: UnitPlan, pattern: str) -> bool:
    return fnmatch.fnmatchcase(unit_name(unit), pattern) or fnmatch.fnmatchcase(unit.name, pattern)


def unit_name(unit: UnitPlan) -> str:
    return unit.name or "(root)"


def _alike(units: Iterable[UnitPlan]) -> list[list[UnitPlan]]:
    """Units in groups of the same class, parameters and buckets, whose names differ only in numbers."""
    groups: dict[object, list[UnitPlan]] = {}
    for unit in units:
        parameters = tuple(_without_names(p, unit.name) for p in unit.parameters)
        bucket = unit.gather_bucket.length if unit.gather_bucket else 0
        groups.setdefault((NUMBER.sub("#", unit.name), unit.module, parameters, bucket), []).append(unit)
    return list(groups.values())


def _without_names(p: ParameterPlan, unit: str) -> tuple[ParameterPlan, tuple[str, ...]]:
    return dataclasses.replace(p, names=()), tuple(relative(name, unit) for name in p.names)


def relative(name: str, unit: str) -> str:
    """A parameter's name inside its unit."""
    return name.removeprefix(f"{unit}.") if unit else name


def _unit_row(units: Sequence[UnitPlan], grid: RankGrid, columns: Sequence[Column]) -> UnitRow:
    first = units[0]
    groups: dict[object, list[ParameterPlan]] = {}
    for p in first.parameters:
        alike, names = _without_names(p, first.name)
        groups.setdefault((alike, *(NUMBER.sub("#", name) for name in names)), []).append(p)
    stored = {p.name for p in first.parameters}
    rows = [
        ParameterRow(
            fold_names([relative(p.name, first.name) for p in group]), group[0], len(group), notes_of(group[0], stored),
            _cells(group[0], grid, columns),
        )
        for group in groups.values()
    ]  # fmt: skip
    label = fold_names([unit.name for unit in units]) or "(root)"
    return UnitRow(label, tuple(unit.name for unit in units), first, tuple(rows))


def _cells(p: ParameterPlan, grid: RankGrid, columns: Sequence[Column]) -> tuple[Cell, ...]:
    starts, stops = grid.bounds(p)
    held = grid.held(p)
    cells = []
    for column in columns:
        own = held[list(column.positions)]
        copies = len(column.ranks) // len(column.positions)
        padding = (p.shard_bytes - own).sum() if p.gathers else 0
        places = list(column.positions)
        slices = zip(starts[places].min(axis=0).tolist(), stops[places].max(axis=0).tolist(), strict=True)
        cells.append(
            Cell(tuple(slices), int(own.sum()) * copies, int(own.min()), int(own.max()), int(padding) * copies)
        )
    return tuple(cells)


def notes_of(p: ParameterPlan, names: Iterable[str] = ()) -> tuple[str, ...]:
    """What is special about a parameter, in words; `names` are those of the parameters of its unit."""
    notes = ["trains" if p.trainable else "frozen"]
    if storage := storage_of(p, set(names)):
        notes.append(storage)
    if p.on_host:
        notes.append("on the host")
    elif p.gathers:
        notes.append("direct" if p.direct else "bucket")
    else:
        notes.append("not split")
    if p.padding:
        notes.append(f"padded by {p.padding}")
    if len(p.names) > 1:
        notes.append("tied: " + ", ".join(p.names[1:]))
    return tuple(notes)


def storage_of(p: ParameterPlan, names: set[str]) -> str:
    """The quantized format of a parameter (`4-bit`, `fp8`), or nothing: packed weights are bytes with scales beside
    them (`quant/`)."""
    if p.dtype.startswith("float8"):
        return "fp8"
    if p.dtype != "uint8":
        return ""
    stem = re.sub(r"(packed|absmax|nested|scales)$", "", p.name)
    if f"{stem}scales" in names:
        return "fp8"
    return "4-bit" if {f"{stem}absmax", f"{p.name}_absmax"} & names else "bytes"


def fold_names(names: Sequence[str]) -> str:
    """Names that differ only in numbers, as one: `layers.[0–79].mlp`."""
    if len(names) == 1:
        return names[0]
    parts = [name.split(".") for name in names]
    folded = []
    for column in zip(*parts, strict=True):
        distinct = list(dict.fromkeys(column))
        folded.append(distinct[0] if len(distinct) == 1 else f"[{numbers_text([int(n) for n in distinct])}]")
    return ".".join(folded)
