"""Charts as values: a Vega-Lite specification with its data, a description in words, and the table of the values.

Names of series are data, never field names or expressions. Colors are CSS variables of the page, so that charts follow
its light, dark and print styles. `page.py` puts charts into a page.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fullshard.reporting import vega_lite
from fullshard.reporting.vega_lite import COLORS, DASHES

DRAWN = 1000
"""The most points of a series that are drawn."""
LISTED = 60
"""The most rows in the table beside a chart."""
TARGET_STYLE = (7, 0)
"""Color and dash of what ticks mark."""
FEW = 40
"""A series of so few points has a dot at each."""


@dataclass(frozen=True)
class Series:
    """A named line: (x, y) in the order of x; y is None where the value was not finite."""

    name: str
    points: Sequence[tuple[float, float | None]]
    dashed: bool = False
    color: int | None = None
    """The color's number; by default the position among the series."""
    labels: Sequence[str] = ()
    """A name for each point, shown instead of its x."""


@dataclass(frozen=True)
class Marker:
    """Something that happened at x: a checkpoint, an evaluation, a resumed run."""

    at: float
    label: str


@dataclass(frozen=True)
class Chart:
    """What a page needs to show a chart."""

    id: str
    title: str
    spec: dict[str, Any]
    """The Vega-Lite specification, whose data has the name `values`."""
    columns: dict[str, list[Any]]
    """The data, by column; `s` numbers the entries of `names`."""
    names: tuple[str, ...]
    """The series, for the legend and the tooltips."""
    styles: tuple[tuple[int, int], ...]
    """Color and dash of each series."""
    description: str
    """The text alternative."""
    header: tuple[str, ...]
    rows: list[list[Any]]
    """The table of values, at most `LISTED` rows of it."""
    row_count: int
    """The number of rows of the whole table."""
    notes: tuple[str, ...] = field(default=())
    """What a reader must know: points that are not drawn, values that are missing."""


# --- lines ----------------------------------------------------------------------------------------------------------


def line_chart(
    id: str, title: str, series: Sequence[Series], *, x: str = "step", unit: str = "", log: bool = False,
    zero: bool = False, markers: Sequence[Marker] = (), x_labels: Mapping[float, str] | None = None,
    form: str = ".4~g",
) -> Chart:  # fmt: skip
    """A chart of lines over x. `log` is ignored if a value is not positive; `zero` lets the axis begin at 0. `x_labels`
    replaces the numbers on the x axis. `form` is d3's format of values."""
    series = [one for one in series if one.points]
    styles = tuple(_style(one, number) for number, one in enumerate(series))
    columns = _drawn_points(series)
    finite = [y for y in columns["y"] if y is not None]
    spec = vega_lite.lines(
        styles, vega_lite.Axes(x, unit, form, zero, log and bool(finite) and min(finite) > 0, x_labels),
        only_x=columns["x"][0] if len(set(columns["x"])) == 1 else None, dots=any(columns["d"]),
        labelled="l" in columns, markers=[(one.at, one.label) for one in markers],
    )  # fmt: skip
    header, rows, count = _by_x(series, x)
    return Chart(
        id, title, spec, columns, tuple(one.name for one in series), styles, _describe_lines(title, series, x, unit),
        header, rows, count, tuple(_line_notes(series)),
    )  # fmt: skip


def _drawn_points(series: Sequence[Series]) -> dict[str, list[Any]]:
    """The points to draw, by column: x, y, the series' number, whether it needs a dot, and its label if points have
    one."""
    columns: dict[str, list[Any]] = {"x": [], "y": [], "s": [], "d": []}
    if any(one.labels for one in series):
        columns["l"] = []
    for number, one in enumerate(series):
        kept = kept_points(one.points)
        points = [one.points[i] for i in kept]
        columns["x"] += [at for at, _ in points]
        columns["y"] += [y for _, y in points]
        columns["s"] += [number] * len(points)
        columns["d"] += _dots(points)
        if "l" in columns:
            columns["l"] += [one.labels[i] if one.labels else "" for i in kept]
    return columns


def _line_notes(series: Sequence[Series]) -> Iterator[str]:
    for one in series:
        if any(y is None for _, y in one.points):
            yield f"{one.name}: {_missing(one.points)}"
    most = max((len(one.points) for one in series), default=0)
    if most > DRAWN:
        drawn = max(len(kept_points(one.points)) for one in series)
        yield f"{drawn:,} of {most:,} points are drawn, extremes included."


def kept_points(points: Sequence[tuple[float, float | None]], most: int = DRAWN) -> list[int]:
    """The indices of the points to draw, at most so many: of each stretch the lowest and the highest, a gap if there is
    one, and the first and the last point of all."""
    if len(points) <= most:
        return list(range(len(points)))
    kept = {0, len(points) - 1}
    stretches = max(1, (most - 2) // 3)
    for number in range(stretches):
        begin, end = number * len(points) // stretches, (number + 1) * len(points) // stretches
        finite = [i for i in range(begin, end) if points[i][1] is not None]
        if len(finite) < end - begin:
            kept.add(next(i for i in range(begin, end) if points[i][1] is None))
        if finite:
            kept |= {min(finite, key=lambda i: points[i][1] or 0.0), max(finite, key=lambda i: points[i][1] or 0.0)}
    return sorted(kept)


def _dots(points: Sequence[tuple[float, float | None]]) -> list[int]:
    """1 for points that a line alone would not show: all of a short series, and those between gaps."""
    if len(points) <= FEW:
        return [int(y is not None) for _, y in points]
    values = [None, *(y for _, y in points), None]
    return [int(y is not None and values[i] is values[i + 2] is None) for i, (_, y) in enumerate(points)]


def _style(series: Series, number: int) -> tuple[int, int]:
    color = number if series.color is None else series.color
    return color % COLORS, int(series.dashed) or (color // COLORS) % len(DASHES)


def _missing(points: Sequence[tuple[float, float | None]]) -> str:
    lost = [x for x, y in points if y is None]
    named = ", ".join(f"{x:,g}" for x in lost[:5]) + (", …" if len(lost) > 5 else "")
    return f"{len(lost):,} of {len(points):,} values are not finite (at {named})"


def _describe_lines(title: str, series: Sequence[Series], x: str, unit: str) -> str:
    parts = []
    for one in series:
        finite = [(at, y) for at, y in one.points if y is not None]
        if not finite:
            parts.append(f"{one.name}: no finite value")
            continue
        (first, begin), (last, end) = finite[0], finite[-1]
        low, high = min(finite, key=lambda p: p[1]), max(finite, key=lambda p: p[1])
        parts.append(
            f"{one.name} from {begin:.4g} at {x} {first:,g} to {end:.4g} at {x} {last:,g}, "
            f"lowest {low[1]:.4g} at {low[0]:,g}, highest {high[1]:.4g} at {high[0]:,g}"
        )
    return f"{title}{f', {unit}' if unit else ''}, by {x}. " + ("; ".join(parts) or "no values") + "."


def _by_x(series: Sequence[Series], x: str) -> tuple[tuple[str, ...], list[list[Any]], int]:
    """The header, a row for each of some x with the value of every series, and the number of rows for all x."""
    places = sorted({at for one in series for at, _ in one.points})
    listed: dict[float, list[Any]] = {at: [""] * len(series) for at in _spread(places)}
    names: dict[float, str] = {}
    for number, one in enumerate(series):
        for i, (at, y) in enumerate(one.points):
            if at in listed:
                listed[at][number] = "not finite" if y is None else y
                names |= {at: one.labels[i]} if one.labels else {}
    rows = [[names.get(at, at), *values] for at, values in listed.items()]
    return (x, *(one.name for one in series)), rows, len(places)


def _spread(values: Sequence[Any], most: int = LISTED) -> list[Any]:
    """At most so many of the values, evenly spread, the first and the last among them."""
    if len(values) <= most:
        return list(values)
    return [values[i] for i in sorted({round(n * (len(values) - 1) / (most - 1)) for n in range(most)})]


# --- bars -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bar:
    """A bar of stacked parts."""

    name: str
    parts: Mapping[str, float]
    target: float | None = None
    """What a tick beside the bar marks."""


def bar_chart(
    id: str, title: str, bars: Sequence[Bar], *, unit: str = "", x: str = "", horizontal: bool = False,
    form: str = ".4~g", order: Sequence[str] = (), target: str = "target",
) -> Chart:  # fmt: skip
    """A chart of stacked bars, in the order given; their names differ. Parts have the same color in each bar, and are
    stacked in their `order`, others after them. A `target` is what the ticks of bars that have one mean."""
    there = dict.fromkeys(part for bar in bars for part in bar.parts)
    names = tuple(sorted(there, key=lambda part: order.index(part) if part in order else len(order)))
    ticked = any(bar.target is not None for bar in bars)
    parts, names = len(names), (*names, target) if ticked else names
    styles = (*((number % COLORS, 0) for number in range(parts)), *([TARGET_STYLE] if ticked else []))
    columns: dict[str, list[Any]] = {"b": [], "y": [], "s": []}
    for bar in bars:
        for part, value in bar.parts.items():
            columns["b"].append(bar.name)
            columns["y"].append(value if math.isfinite(value) else None)
            columns["s"].append(names.index(part))
        if bar.target is not None:
            columns["b"].append(bar.name)
            columns["y"].append(bar.target)
            columns["s"].append(parts)
    spec = vega_lite.bars(styles, vega_lite.Axes(x, unit, form), len(bars), horizontal, parts if ticked else None)
    totals = [(bar.name, sum(bar.parts.values())) for bar in bars]
    most = max(totals, key=lambda one: one[1], default=("", 0.0))
    described = (
        f"{title}: {len(bars):,} bars of {', '.join(names)}; the largest is {most[0]} with {most[1]:.4g} {unit}."
    )
    header = (x or "", *names[:parts], "total", *names[parts:])
    rows = [
        [bar.name, *(bar.parts.get(part, "") for part in names[:parts]), sum(bar.parts.values()),
         *(["" if bar.target is None else bar.target] if ticked else [])]
        for bar in _spread(bars)
    ]  # fmt: skip
    return Chart(id, title, spec, columns, names, styles, described, header, rows, len(bars))
