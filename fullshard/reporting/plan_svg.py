"""The picture of a sharding plan as SVG: mesh, units with what each rank holds, and charts of one step.

Frozen and trained parameters differ by pattern and by words, not by color alone. Every row can be focused and has a
title with its name, shape, dtype, bytes and spec; exact bytes are in `data-` attributes. Colors are those of the pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from textwrap import wrap

from fullshard.byte_size import memory_size
from fullshard.reporting.charts import Chart
from fullshard.reporting.mesh_svg import HEIGHT, draw_mesh, shortened
from fullshard.reporting.plan_charts import chart_svg
from fullshard.reporting.plan_view import Cell, ParameterRow, PlanView, UnitRow
from fullshard.reporting.plan_words import (
    counted,
    dtype_text,
    legend_words,
    mesh_words,
    numbered,
    parameter_title,
    shape_text,
    slice_text,
    summary,
    times,
    unit_title,
    unit_words,
)
from fullshard.reporting.rank_grid import Column, mesh_cells, numbers_text
from fullshard.reporting.svg import element, escape, fitted, rect, text

MARGIN, LABEL, TAIL = 16, 430, 104
"""Widths: around the picture, of names on the left, of sizes on the right."""
SMALL = 6.1
"""The width of a character of small text."""
CHART = 200.0
"""The height of a chart."""
LINE = 15.0
"""The height of a line of small text."""


@dataclass(frozen=True)
class Frame:
    """The width of the picture: names, then ranks, then sizes."""

    ranks: float

    @classmethod
    def of(cls, columns: int) -> Frame:
        return cls(max(640.0, 66.0 * columns))

    @property
    def left(self) -> float:
        """Where the ranks begin."""
        return MARGIN + LABEL

    @property
    def right(self) -> float:
        return self.left + self.ranks

    @property
    def width(self) -> float:
        return self.right + TAIL + MARGIN


def plan_svg(view: PlanView, title: str, charts: Sequence[Chart] = (), *, alone: bool = True) -> str:
    """The picture. `alone` means that it brings its own heading and colors, which a page around it has already."""
    mesh = mesh_cells(view.grid)
    frame = Frame.of(max(len(view.columns), len(mesh[0])))
    drawn, y = _heading(view, title, frame) if alone else ([], 0.0)
    legend, y = _legend(view, y)
    ranks, y = _mesh(view, mesh, frame, y)
    units, y = _units(view, frame, y + 30)
    step, y = _charts(charts, frame, y)
    drawn += legend + ranks + units + step
    y += MARGIN
    style = (_asset("page.css").partition("* {")[0] if alone else "") + _asset("plan.css")
    inside = [element("title", escape(title)), element("style", style), _patterns()]
    inside.append(rect(0, 0, frame.width, y, "paper"))
    return element(
        "svg", *inside, *drawn, xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {frame.width:g} {y:g}",
        width=frame.width, height=y, class_="plan", role="figure",
    )  # fmt: skip


def _asset(name: str) -> str:
    return files("fullshard.reporting").joinpath(name).read_text(encoding="utf-8")


def _patterns() -> str:
    stripes = element("path", d="M-1 1 l2 -2 M0 6 l6 -6 M5 7 l2 -2", class_="stripes")
    back = element("rect", width=6, height=6, class_="band")
    pattern = element("pattern", back, stripes, id="frozen", width=6, height=6, patternUnits="userSpaceOnUse")
    return element("defs", pattern)


def _heading(view: PlanView, title: str, frame: Frame) -> tuple[list[str], float]:
    drawn = [text(MARGIN, 30, fitted(title, frame.width - 2 * MARGIN, 9), "h1")]
    drawn += [text(MARGIN, 50 + 17 * i, line, "small") for i, line in enumerate(summary(view))]
    return drawn, 68.0


def _legend(view: PlanView, y: float) -> tuple[list[str], float]:
    drawn, x = [], MARGIN
    samples = {"trains": "sample trains", "frozen": "sample frozen", "padding: sent, not stored": "piece"}
    for words, class_ in samples.items():
        drawn += [rect(x, y + 14, 22, 14, class_), text(x + 28, y + 25, words, "small")]
        x += 28 + round(len(words) * SMALL) + 24
    drawn.append(element("line", x1=x, y1=y + 21, x2=x + 22, y2=y + 21, class_="edge"))
    drawn.append(text(x + 28, y + 25, "border of a node", "small"))
    for words in legend_words(view):
        y += 16
        drawn.append(text(MARGIN, y + 28, words, "small"))
    return drawn, y + 30


def _mesh(view: PlanView, mesh: list[list[Column]], frame: Frame, y: float) -> tuple[list[str], float]:
    y += 14
    words = mesh_words(view.grid)
    drawn = [text(MARGIN, y + 14, "Mesh", "h2")]
    drawn += [text(MARGIN, y + 32 + 15 * i, line, "small") for i, line in enumerate(words)]
    drawn += draw_mesh(view.grid, mesh, frame.left, frame.ranks, y)
    return drawn, y + max(len(mesh) * HEIGHT, 32 + 15 * len(words))


def _charts(charts: Sequence[Chart], frame: Frame, y: float) -> tuple[list[str], float]:
    """The charts side by side."""
    width = (frame.width - 2 * MARGIN) / max(1, len(charts))
    drawn, legends = [], [_legend_of(chart, width - 24) for chart in charts]
    lines = max((len(legend) for legend in legends), default=0)
    notes = [[line for note in chart.notes for line in wrap(note, int((width - 24) / SMALL))] for chart in charts]
    top = y + 46 + LINE * max(2, lines)
    for i, (chart, legend) in enumerate(zip(charts, legends, strict=True)):
        x = MARGIN + i * width
        picture = chart_svg(chart, width - 24, CHART)
        if picture is None:
            return [], y
        drawn.append(text(x, y + 30, fitted(chart.title, width - 24, 7.6), "h2"))
        for row, names in enumerate(legend):
            for at, name, color in names:
                place = y + 38 + LINE * row
                drawn.append(element("rect", x=x + at, y=place, width=10, height=10, fill=f"var(--s{color})"))
                drawn.append(text(x + at + 14, place + 9, name, "small"))
        drawn.append(picture.replace("<svg ", f'<svg x="{x:g}" y="{top:g}" overflow="visible" ', 1))
        for row, words in enumerate(notes[i]):
            drawn.append(text(x, top + CHART + 16 + LINE * row, words, "small"))
    return drawn, top + CHART + 9 + LINE * max(1, *map(len, notes)) if charts else y


def _legend_of(chart: Chart, width: float) -> list[list[tuple[float, str, int]]]:
    """Where each name goes, with its color, in as many lines as they need."""
    lines: list[list[tuple[float, str, int]]] = []
    at = width
    for name, color, _ in chart.legend:
        needed = 16 + len(name) * SMALL + 12
        if at + needed > width:
            lines.append([])
            at = 0.0
        lines[-1].append((at, name, color))
        at += needed
    return lines


# --- units ------------------------------------------------------------------------------------------------------------


def _units(view: PlanView, frame: Frame, y: float) -> tuple[list[str], float]:
    drawn = [text(MARGIN, y + 14, "Units, in the order of the model", "h2")]
    width = frame.ranks / len(view.columns)
    for j, column in enumerate(view.columns):
        x = frame.left + (j + 0.5) * width
        drawn.append(text(x, y + 4, shortened(numbered("rank", column.ranks), width, 6.6), "small", "middle"))
        drawn.append(text(x, y + 18, memory_size(view.most_in(column)), "small", "middle"))
    drawn.append(text(frame.right + TAIL, y + 18, "per rank", "small", "end"))
    y += 26
    for unit in view.units:
        part, y = _unit(view, unit, frame, y)
        drawn.append(part)
        y += 8
    return drawn, y


def _unit(view: PlanView, unit: UnitRow, frame: Frame, y: float) -> tuple[str, float]:
    share = unit.count * unit.plan.shard_bytes / (view.plan.shard_bytes or 1)
    inside = [
        element("title", escape(unit_title(unit))),
        rect(MARGIN, y, frame.right + TAIL - MARGIN, 24, "band"),
        rect(frame.left, y + 20, frame.ranks * share, 4, "share"),
        text(MARGIN + 6, y + 16, fitted(counted(unit.label, unit.count), LABEL - 12, 7.3), "unit-name"),
        text(frame.left + 4, y + 15, fitted(unit_words(unit, share), frame.right - frame.left, SMALL), "small"),
        text(frame.right + TAIL, y + 16, times(unit.count, unit.plan.shard_bytes), None, "end"),
    ]
    header = element(
        "g", *inside, class_="unit", tabindex=0, data_unit=unit.label, data_count=unit.count,
        data_shard_bytes=unit.plan.shard_bytes, data_gathered_bytes=unit.plan.gathered_bytes,
    )  # fmt: skip
    y += 26
    rows = []
    for row in unit.parameters:
        rows.append(_parameter(view, unit, row, frame, y))
        y += 30
    return element("g", header, *rows), y


def _parameter(view: PlanView, unit: UnitRow, row: ParameterRow, frame: Frame, y: float) -> str:
    p = row.plan
    words = " · ".join((row.notes[0], shape_text(p.shape), dtype_text(p), *row.notes[1:]))
    inside = [
        element("title", escape(parameter_title(row))),
        rect(MARGIN, y - 1, frame.right + TAIL - MARGIN, 29, "band", fill_opacity=0.35),
        text(MARGIN + 18, y + 11, fitted(counted(row.label, row.count), LABEL - 26, 7.0), "name"),
        text(MARGIN + 18, y + 24, fitted(words, LABEL - 26, 5.8), "small"),
    ]
    width = frame.ranks / len(view.columns)
    for j, (column, cell) in enumerate(zip(view.columns, row.cells, strict=True)):
        inside.append(_cell(row, column, cell, frame.left + j * width + 2, y + 3, width - 4))
    share = row.count * row.shard_bytes / (unit.plan.shard_bytes or 1)
    inside.append(rect(frame.right + TAIL - share * (TAIL - 12), y + 22, share * (TAIL - 12), 3, "share"))
    inside.append(text(frame.right + TAIL, y + 17, times(row.count, row.shard_bytes), None, "end"))
    classes = " ".join(("parameter", "trains" if p.trainable else "frozen", *(["on-host"] if p.on_host else [])))
    return element(
        "g", *inside, class_=classes, tabindex=0, data_unit=unit.label, data_parameter=row.label,
        data_units=unit.count, data_count=row.count, data_shard_bytes=row.shard_bytes,
    )  # fmt: skip


def _cell(row: ParameterRow, column: Column, cell: Cell, x: float, y: float, width: float) -> str:
    p = row.plan
    full = len(column.ranks) * row.shard_bytes
    held = width * cell.bytes / full if full else 0.0
    facts = {
        "data_ranks": numbers_text(column.ranks), "data_bytes": cell.bytes, "data_least": cell.least,
        "data_most": cell.most, "data_padding": cell.padding,
    }  # fmt: skip
    drawn = [rect(x, y, held, 21, "held", **facts)]
    if cell.padding:
        drawn.append(rect(x + held, y, width - held, 21, "piece"))
    words = slice_text(cell, p)
    if len(words) * 6.8 < (width if held > width / 2 else 0):
        drawn.append(text(x + held / 2, y + 14.5, words, "in", "middle"))
    return "".join(drawn)
