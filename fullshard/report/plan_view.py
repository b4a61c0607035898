"""A sharding plan arranged for drawing: what each rank holds of each parameter, with repeated things folded.

Units that are alike become one row (`model.layers.[0–79]`, × 80), ranks become columns: replicas share one, and on many
ranks so do neighbors. Folding only groups: the bytes of a row and of a column are those of everything in them.
`plan_svg.py`, `plan_page.py` and `plan_terminal.py` draw the result.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fullshard.config.errors import ConfigError
from fullshard.fsdp.plan import ParameterPlan, ShardingPlan, UnitPlan
from fullshard.report.rank_grid import Column, RankGrid, numbers_text

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
    """A parameter of a unit, a quantized weight with its scales, or several of these that are alike."""

    label: str
    parts: tuple[ParameterPlan, ...]
    """The parameters of the first: one, or the values of a quantized weight and what belongs to them."""
    count: int
    """How many there are in one unit."""
    notes: tuple[str, ...]
    cells: tuple[Cell, ...]
    """One per column, for one of them."""

    @property
    def plan(self) -> ParameterPlan:
        """The plan of the first of them."""
        return self.parts[0]

    @property
    def shard_bytes(self) -> int:
        """Of one of them, on the rank that holds the most."""
        return sum(p.shard_bytes for p in self.parts)

    @property
    def gathered_bytes(self) -> int:
        """The bytes of the gathered values."""
        return sum(p.gathered_bytes for p in self.parts)

    def bytes_by_position(self, grid: RankGrid) -> np.ndarray:
        """Bytes of one of them at each shard position."""
        return np.sum([grid.shard_bytes(p) for p in self.parts], axis=0)


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
        """The number of identical units."""
        return len(self.names)


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
        totals = np.zeros(self.grid.positions, dtype=np.int64)
        for unit in self.units:
            for row in unit.parameters:
                totals += unit.count * row.count * row.bytes_by_position(self.grid)
        return totals

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
    selected = plan.units if units in (None, "all") else chosen_units(str(units), plan.units)
    groups = [[unit] for unit in selected] if units is not None else _alike(selected)
    rows = tuple(_unit_row(group, grid, columns) for group in groups)
    return PlanView(plan, grid, columns, rows, chosen=ranks is not None)


def chosen_ranks(text: str, world: int) -> list[int]:
    """The ranks in a list such as `0-7,12`, or `all`."""
    if text == "all":
        return list(range(world))
    ranks: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\s*[-–]\s*(\d+))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        if first > last or last >= world:
            raise ConfigError(
                f"--ranks {text}: {part.strip()!r} is not a rank or a range of ranks from 0 to {world - 1}; expected "
                f"all, or a list such as 0-7,12."
            )
        ranks += range(first, last + 1)
    return list(dict.fromkeys(ranks))


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
    """A unit's name as it is shown."""
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
    weights: dict[tuple[str, str], list[ParameterPlan]] = {}
    stored = {p.name for p in first.parameters}
    for p in first.parameters:
        weights.setdefault(quantized_weight(p, stored), []).append(p)
    groups: dict[object, list[tuple[str, list[ParameterPlan]]]] = {}
    for (form, _), parts in weights.items():
        outline = [_without_names(p, first.name) for p in parts]
        alike = [(plan, *(NUMBER.sub("#", name) for name in names)) for plan, names in outline]
        groups.setdefault((form, *alike), []).append((form, parts))
    label = fold_names([unit.name for unit in units]) or "(root)"
    rows = tuple(_parameter_row(group, first.name, grid, columns) for group in groups.values())
    return UnitRow(label, tuple(unit.name for unit in units), first, rows)


def _parameter_row(
    group: Sequence[tuple[str, list[ParameterPlan]]], unit: str, grid: RankGrid, columns: Sequence[Column]
) -> ParameterRow:
    form, parts = group[0]
    label = fold_names([relative(own[0].name, unit) for _, own in group])
    if len(parts) > 1:
        form = f"{form} with {', '.join(p.name.rpartition('.')[2] for p in parts[1:])}"
    cells = tuple(_cell(parts, grid, column) for column in columns)
    return ParameterRow(label, tuple(parts), len(group), notes_of(parts[0], form), cells)


def _cell(parts: Sequence[ParameterPlan], grid: RankGrid, column: Column) -> Cell:
    places, copies = list(column.positions), len(column.ranks) // len(column.positions)
    starts, stops = grid.bounds(parts[0])
    slices = zip(starts[places].min(axis=0).tolist(), stops[places].max(axis=0).tolist(), strict=True)
    own = np.sum([grid.shard_bytes(p)[places] for p in parts], axis=0)
    full = sum(p.shard_bytes for p in parts) if parts[0].gathers else own
    return Cell(
        tuple(slices), int(own.sum()) * copies, int(own.min()), int(own.max()), int((full - own).sum()) * copies
    )


def notes_of(p: ParameterPlan, form: str = "") -> tuple[str, ...]:
    """What is special about a parameter, in words; `form` is its quantized format."""
    notes = ["trains" if p.trainable else "frozen"]
    if form:
        notes.append(form)
    if p.in_host_memory:
        notes.append("on the host")
    if p.gathers:
        notes.append("direct" if p.direct else "bucket")
    elif not p.on_host:
        notes.append("not split")
    if p.padding:
        notes.append(f"padded by {p.padding}")
    if len(p.names) > 1:
        notes.append("tied: " + ", ".join(p.names[1:]))
    return tuple(notes)


def quantized_weight(p: ParameterPlan, names: Container[str]) -> tuple[str, str]:
    """The format of a quantized parameter (`4-bit`, `fp8`, `mxfp4`) and the weight that it is a part of, given the
    names of its unit's parameters: packed values are bytes with scales beside them (`quant/`). Others are weights of
    their own."""
    stem = re.sub(r"(packed|absmax|nested|scales|divisor|zeros|order)$", "", p.name).removesuffix("_")
    if p.form:
        return p.form, stem
    if p.dtype != "uint8":
        return "fp8" if p.dtype.startswith("float8") else "", p.name
    if f"{stem}scales" in names:
        return "fp8", stem
    four_bits = f"{stem}absmax" in names or f"{stem}_absmax" in names
    return ("4-bit", stem) if four_bits else ("bytes", p.name)


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
