"""The picture of a sharding plan as SVG: mesh, units with what each rank holds, and charts of one step.

Frozen and trained parameters differ by pattern and by words, not by color alone. Every row can be focused and has a
title with its name, shape, dtype, bytes and spec; exact bytes are in `data-` attributes. Colors are those of the pages.
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from textwrap import wrap

from fullshard.config.byte_size import memory_size
from fullshard.report.charts import Chart
from fullshard.report.plan_charts import chart_svg
from fullshard.report.plan_view import Cell, ParameterRow, PlanView, UnitRow
from fullshard.report.plan_words import (
    dtype_text,
    legend_words,
    mesh_words,
    parameter_title,
    shape_text,
    slice_text,
    summary,
    times,
    unit_title,
    unit_words,
    with_count,
    with_numbers,
)
from fullshard.report.rank_grid import Column, RankGrid, mesh_cells, numbers_text

NOT_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML cannot hold."""


def escape(text: object) -> str:
    """Text for XML and HTML, in elements and in quoted attributes."""
    return html.escape(NOT_XML.sub("\ufffd", str(text)))


def element(tag: str, *inside: str, **attributes: object) -> str:
    """An element around parts that are markup already. `class_` and `data_bytes` become `class` and `data-bytes`;
    attributes that are None are left out."""
    named = {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items() if value is not None}
    words = "".join(f' {name}="{escape(_number(value))}"' for name, value in named.items())
    return f"<{tag}{words}>{''.join(inside)}</{tag}>" if inside else f"<{tag}{words}/>"


def text(x: float, y: float, words: object, class_: str | None = None, anchor: str | None = None) -> str:
    """An SVG text."""
    return element("text", escape(words), x=x, y=y, class_=class_, text_anchor=anchor)


def rect(x: float, y: float, width: float, height: float, class_: str, **more: object) -> str:
    """An SVG rectangle."""
    return element("rect", x=x, y=y, width=width, height=height, class_=class_, **more)


def fitted(words: str, width: float, character: float) -> str:
    """Words that fit into a width at this width per character; the middle of longer ones is left out."""
    room = max(3, int(width / character))
    if len(words) <= room:
        return words
    head = (room - 1) * 2 // 5
    return f"{words[:head]}…{words[head + 1 - room :]}"


def _number(value: object) -> object:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else value


HEIGHT = 34.0
"""Of one row."""


def draw_mesh(grid: RankGrid, mesh: list[list[Column]], left: float, width: float, y: float) -> list[str]:
    """The cells of a mesh (`mesh_cells`) in this place, with the names of the replicas before them."""
    drawn, first, cell_width = [], 0, width / len(mesh[0])
    for i, row in enumerate(mesh):
        count = len(row[0].ranks) // len(row[0].positions)
        top = y + i * HEIGHT
        if grid.replicas > 1 and grid.positions > 1:
            label = f"replica {numbers_text(range(first, first + count))}"
            drawn.append(text(left - 10, top + 20, label, "small", "end"))
        first += count
        drawn += [_mesh_cell(grid, cell, left + j * cell_width, top, cell_width) for j, cell in enumerate(row)]
    return drawn + _node_edges(grid, mesh, left, y, cell_width)


def _mesh_cell(grid: RankGrid, cell: Column, x: float, y: float, width: float) -> str:
    ranks = with_numbers("rank", cell.ranks)
    where = with_numbers("node", sorted({grid.node_of(rank) for rank in cell.ranks}))
    inside = [
        element("title", escape(f"{ranks}\n{where}")),
        rect(x, y, width, HEIGHT, "rank", data_ranks=numbers_text(cell.ranks), data_count=len(cell.ranks)),
        text(x + width / 2, y + 15, shortened(ranks, width, 7.2), None, "middle"),
        text(x + width / 2, y + 28, shortened(where, width, 6.6), "small", "middle"),
    ]
    return element("g", *inside)


def _node_edges(grid: RankGrid, mesh: list[list[Column]], x: float, y: float, width: float) -> list[str]:
    """Thick lines where one node ends and another begins."""
    nodes = [[frozenset(grid.node_of(rank) for rank in cell.ranks) for cell in row] for row in mesh]
    lines = []
    for i, row in enumerate(nodes):
        for j, own in enumerate(row):
            left, top, right, bottom = x + j * width, y + i * HEIGHT, x + (j + 1) * width, y + (i + 1) * HEIGHT
            sides = {
                (left, top, left, bottom): j > 0 and row[j - 1] == own,
                (left, top, right, top): i > 0 and nodes[i - 1][j] == own,
                (right, top, right, bottom): j + 1 < len(row),
                (left, bottom, right, bottom): i + 1 < len(nodes),
            }
            lines += [place for place, covered in sides.items() if not covered]
    return [element("line", x1=a, y1=b, x2=c, y2=d, class_="edge") for a, b, c, d in lines]


def shortened(words: str, width: float, character: float) -> str:
    """Numbers with their name, or without it if there is no room."""
    return words if len(words) * character <= width - 4 else fitted(words.partition(" ")[2], width - 4, character)


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
        """The frame for a number of columns."""
        return cls(max(640.0, 66.0 * columns))

    @property
    def left(self) -> float:
        """Where the ranks begin."""
        return MARGIN + LABEL

    @property
    def right(self) -> float:
        """Where the columns end."""
        return self.left + self.ranks

    @property
    def width(self) -> float:
        """The width of the whole picture."""
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
    return files("fullshard.report").joinpath(name).read_text(encoding="utf-8")


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
        drawn.append(text(x, y + 4, shortened(with_numbers("rank", column.ranks), width, 6.6), "small", "middle"))
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
        text(MARGIN + 6, y + 16, fitted(with_count(unit.label, unit.count), LABEL - 12, 7.3), "unit-name"),
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
        text(MARGIN + 18, y + 11, fitted(with_count(row.label, row.count), LABEL - 26, 7.0), "name"),
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
    own_width = width * cell.bytes / full if full else 0.0
    facts = {
        "data_ranks": numbers_text(column.ranks), "data_bytes": cell.bytes, "data_least": cell.least,
        "data_most": cell.most, "data_padding": cell.padding,
    }  # fmt: skip
    drawn = [rect(x, y, own_width, 21, "held", **facts)]
    if cell.padding:
        drawn.append(rect(x + own_width, y, width - own_width, 21, "piece"))
    words = slice_text(cell, p)
    if len(words) * 6.8 < (width if own_width > width / 2 else 0):
        drawn.append(text(x + own_width / 2, y + 14.5, words, "in", "middle"))
    return "".join(drawn)
