"""Charts as values: a Vega-Lite specification with its data, a description in words, and the table of the values.

Names of series are data, never field names or expressions. Colors are CSS variables of the page, so that charts follow
its light, dark and print styles. `page.py` puts charts into a page.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from fullshard.config.paths import replace_text
from fullshard.report import vega_lite
from fullshard.report.vega_lite import COLORS, DASHES, VALUES

PACKAGE = "vl-convert-python"
SNIPPET = "window.vegaEmbed = vegaEmbed;"
BUNDLE = f"import sys, vl_convert; sys.stdout.buffer.write(vl_convert.javascript_bundle({SNIPPET!r}).encode())"
SECONDS = 60


def with_checksum(script: str) -> str:
    """A script with its checksum as its last line."""
    return f"{script}\n/* sha256 of the chart library: {hashlib.sha256(script.encode()).hexdigest()} */"


@functools.cache
def chart_library() -> str | None:
    """The script, which defines `vegaEmbed`; None if the package is not installed or does not work."""
    try:
        cached = _cached(version(PACKAGE))
    except PackageNotFoundError:
        return None
    with contextlib.suppress(OSError, UnicodeDecodeError):
        text = cached.read_text(encoding="utf-8")
        if text == with_checksum(text.rpartition("\n")[0]):
            return text
    try:
        done = subprocess.run([sys.executable, "-c", BUNDLE], capture_output=True, timeout=SECONDS, check=True)
        text = with_checksum(done.stdout.decode("utf-8"))
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    with contextlib.suppress(OSError):  # a cache that cannot be written only costs time
        cached.parent.mkdir(parents=True, exist_ok=True)
        replace_text(cached, text)
    return text


def _cached(release: str) -> Path:
    root = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return root / "fullshard" / "charts" / f"vega-{release}.js"


DRAWN = 1000
"""The most points of a series that are drawn."""
LISTED = 60
"""The most rows in the table beside a chart."""
TARGET_STYLE = (7, 0)
"""Color and dash of what ticks mark."""
FEW = 40
"""A series of so few points has a dot at each."""
MARKED = 200
"""The most markers of a kind in a chart."""
VISIBLE = 1 / 200
"""The part of a chart's height that can be seen, about a pixel."""


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
    count: int = 0
    """The number of points that the run has logged; those that are not in `points` any more among them."""
    gaps: int = 0
    """The number of them that were not finite."""

    @property
    def all_points(self) -> int:
        """The number of points before thinning."""
        return max(self.count, len(self.points))


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
    left_out: tuple[str, ...] = ()
    """The series that are too small to be seen, and in the table only."""
    wide: bool = False
    """Whether it has a row of the page for itself."""
    smooths: bool = False
    """Whether the reader may smooth its lines."""
    log: bool = False
    """Whether the reader may choose a logarithmic axis: all values are positive."""

    @property
    def legend(self) -> tuple[tuple[str, int, int], ...]:
        """Name, color and dash of the series that a reader must tell apart."""
        needed = len(self.names) + len(self.left_out) > 1
        return tuple((name, *style) for name, style in zip(self.names, self.styles, strict=True)) if needed else ()


# --- lines ----------------------------------------------------------------------------------------------------------


def line_chart(
    id: str, title: str, series: Sequence[Series], *, x: str = "step", unit: str = "", zero: bool = False,
    markers: Sequence[Marker] = (), x_labels: Mapping[float, str] | None = None,
    x_domain: tuple[float, float] | None = None, form: str = VALUES, wide: bool = False, curves: bool = False,
) -> Chart:  # fmt: skip
    """A chart of lines over x. `zero` lets the axis begin at 0. `x_labels` replaces the numbers on the x axis. `form`
    is d3's format of values. `curves` may be smoothed and, if all values are positive, be seen on a log axis."""
    series = [one for one in series if one.points]
    styles = tuple(_style(one, number) for number, one in enumerate(series))
    columns = _drawn_points(series, curves)
    finite = [y for y in columns["y"] if y is not None]
    if x_domain is None and len(set(columns["x"])) == 1:
        x_domain = columns["x"][0] - 1, columns["x"][0] + 1
    shown = _spread_markers(markers)
    spec = vega_lite.lines(
        styles, vega_lite.Axes(x, unit, form, zero, x_labels, x_domain), dots=any(columns["d"]),
        labelled="l" in columns, markers=[(one.at, one.label) for one in shown],
        height=vega_lite.WIDE_HEIGHT if wide else vega_lite.HEIGHT,
    )  # fmt: skip
    header, rows, count = _by_x(series, x)
    notes = [*_line_notes(series)]
    if len(shown) < len(markers):
        notes.append(f"{len(shown):,} of {len(markers):,} marks are drawn.")
    return Chart(
        id, title, spec, columns, tuple(one.name for one in series), styles, _describe_lines(title, series, x, unit),
        header, rows, count, tuple(notes), wide=wide, smooths=curves, log=curves and bool(finite) and min(finite) > 0,
    )  # fmt: skip


def _spread_markers(markers: Sequence[Marker]) -> list[Marker]:
    """At most `MARKED` markers of each kind."""
    kinds = dict.fromkeys(one.label for one in markers)
    return [one for kind in kinds for one in evenly_spaced([m for m in markers if m.label == kind], MARKED)]


def _drawn_points(series: Sequence[Series], curves: bool) -> dict[str, list[Any]]:
    """The points to draw, by column: x, y, the series' number, whether it needs a dot, its label if points have one,
    and, if not all points of a curve are drawn, the median around it (`a`), which smoothing begins with."""
    columns: dict[str, list[Any]] = {"x": [], "y": [], "s": [], "d": []}
    if any(one.labels for one in series):
        columns["l"] = []
    if curves and any(len(one.points) > DRAWN for one in series):
        columns["a"] = []
    for number, one in enumerate(series):
        indices = drawn_indices(one.points)
        points = [one.points[i] for i in indices]
        columns["x"] += [at for at, _ in points]
        columns["y"] += [y for _, y in points]
        columns["s"] += [number] * len(points)
        columns["d"] += _dots(points)
        if "l" in columns:
            columns["l"] += [one.labels[i] if one.labels else "" for i in indices]
        if "a" in columns:
            columns["a"] += _medians(one.points, indices)
    return columns


def _medians(points: Sequence[tuple[float, float | None]], indices: Sequence[int]) -> list[float | None]:
    """For each drawn point the median of the values around it: lowest and highest values, which are what is drawn of
    noise, would say little about what is between them."""
    near = 3 * len(points) // (2 * DRAWN)
    medians: list[float | None] = []
    for i in indices:
        around = [y for _, y in points[max(0, i - near) : i + near + 1] if y is not None]
        medians.append(statistics.median(around) if points[i][1] is not None else None)
    return medians


def _line_notes(series: Sequence[Series]) -> Iterator[str]:
    for one in series:
        if any(y is None for _, y in one.points):
            yield f"{one.name}: {_missing(one)}"
    most = max((one.all_points for one in series), default=0)
    drawn = max((len(drawn_indices(one.points)) for one in series), default=0)
    if most > drawn:
        yield f"{drawn:,} of {most:,} points are drawn, extremes included."


def drawn_indices(points: Sequence[tuple[float, float | None]], most: int = DRAWN) -> list[int]:
    """The indices of the points to draw, at most so many: of each stretch the lowest and the highest, a gap if there is
    one, and the first and the last point of all."""
    if len(points) <= most:
        return list(range(len(points)))
    indices = {0, len(points) - 1}
    stretches = max(1, (most - 2) // 3)
    for number in range(stretches):
        begin, end = number * len(points) // stretches, (number + 1) * len(points) // stretches
        finite = [i for i in range(begin, end) if points[i][1] is not None]
        if len(finite) < end - begin:
            indices.add(next(i for i in range(begin, end) if points[i][1] is None))
        if finite:
            indices |= {min(finite, key=lambda i: points[i][1] or 0.0), max(finite, key=lambda i: points[i][1] or 0.0)}
    return sorted(indices)


def _dots(points: Sequence[tuple[float, float | None]]) -> list[int]:
    """1 for points that a line alone would not show: all of a short series, and those between gaps."""
    if len(points) <= FEW:
        return [int(y is not None) for _, y in points]
    values = [None, *(y for _, y in points), None]
    return [int(y is not None and values[i] is values[i + 2] is None) for i, (_, y) in enumerate(points)]


def _style(series: Series, number: int) -> tuple[int, int]:
    color = number if series.color is None else series.color
    return color % COLORS, int(series.dashed) or (color // COLORS) % len(DASHES)


def _missing(series: Series) -> str:
    missing = [x for x, y in series.points if y is None]
    count = max(series.gaps, len(missing))
    named = ", ".join(f"{x:,g}" for x in missing[:5]) + (", …" if count > len(missing[:5]) else "")
    return f"{count:,} of {series.all_points:,} values are not finite (at {named})"


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
    chosen, room = set(places if len(places) <= LISTED else ()), LISTED
    if not chosen:  # of each series its share: evaluations are few, and would be missed between the steps
        for left, one in zip(range(len(series), 0, -1), sorted(series, key=lambda one: len(one.points)), strict=True):
            share = {at for at, _ in evenly_spaced(one.points, max(2, room // left))}
            chosen, room = chosen | share, room - len(share)
    listed: dict[float, list[Any]] = {at: [""] * len(series) for at in sorted(chosen)}
    names: dict[float, str] = {}
    for number, one in enumerate(series):
        for i, (at, y) in enumerate(one.points):
            if at in listed:
                listed[at][number] = "not finite" if y is None else y
                names |= {at: one.labels[i]} if one.labels else {}
    rows = [[names.get(at, at), *values] for at, values in listed.items()]
    return (x, *(one.name for one in series)), rows, max([len(places), *(one.all_points for one in series)])


def evenly_spaced(values: Sequence[Any], most: int = LISTED) -> list[Any]:
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
    form: str = VALUES, order: Sequence[str] = (), target: str = "target", top: float = 0.0,
) -> Chart:  # fmt: skip
    """A chart of stacked bars, in the order given; their names differ. Parts have the same color in each bar, and are
    stacked in their `order`, others after them. A `target` is what the ticks of bars that have one mean. `top` is what
    the axis reaches in any case. Parts too small to be seen in any bar are in the table only."""
    there = dict.fromkeys(part for bar in bars for part in bar.parts)
    parts = sorted(there, key=lambda part: order.index(part) if part in order else len(order))
    totals = [(bar.name, sum(bar.parts.values())) for bar in bars]
    most = max(totals, key=lambda one: one[1], default=("", 0.0))
    least = VISIBLE * max(most[1], top)
    drawn = [part for part in parts if not max(abs(bar.parts.get(part, 0.0)) for bar in bars) < least]
    left_out = tuple(part for part in parts if part not in drawn)
    ticked = any(bar.target is not None for bar in bars)
    names = (*drawn, target) if ticked else tuple(drawn)
    styles = (*((number % COLORS, 0) for number in range(len(drawn))), *([TARGET_STYLE] if ticked else []))
    columns: dict[str, list[Any]] = {"b": [], "y": [], "s": []}
    for bar in bars:
        for number, part in enumerate(drawn):
            if part in bar.parts:
                columns["b"].append(bar.name)
                columns["y"].append(bar.parts[part] if math.isfinite(bar.parts[part]) else None)
                columns["s"].append(number)
        if bar.target is not None:
            columns["b"].append(bar.name)
            columns["y"].append(bar.target)
            columns["s"].append(len(drawn))
    axes = vega_lite.Axes(x, unit, form)
    spec = vega_lite.bars(styles, axes, len(bars), horizontal, len(drawn) if ticked else None)
    described = (
        f"{title}: {len(bars):,} bars of {', '.join(names)}; the largest is {most[0]} with {most[1]:.4g} {unit}."
    )
    header = (x or "", *parts, "total", *([target] if ticked else []))
    rows = [
        [bar.name, *(bar.parts.get(part, "") for part in parts), sum(bar.parts.values()),
         *(["" if bar.target is None else bar.target] if ticked else [])]
        for bar in evenly_spaced(bars)
    ]  # fmt: skip
    notes = (f"Too small to be seen: {', '.join(left_out)}.",) if left_out else ()
    return Chart(id, title, spec, columns, names, styles, described, header, rows, len(bars), notes, left_out)
