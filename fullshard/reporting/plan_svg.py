"""The picture of a sharding plan as SVG: the mesh with its nodes and replicas, and the units with what each rank holds.

Frozen and trained parameters differ by pattern and by words, not by color alone. Every row can be focused and has a
title with its name, shape, dtype, bytes and spec; exact bytes are in `data-` attributes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fullshard.byte_size import memory_size
from fullshard.reporting.plan_view import (
    Cell,
    ParameterRow,
    PlanView,
    UnitRow,
    dtype_text,
    shape_text,
    slice_text,
    spec_text,
)
from fullshard.reporting.rank_grid import MOST_COLUMNS, Column, RankGrid, numbers_text
from fullshard.reporting.svg import element, escape, fitted, rect, text

MARGIN, LABEL, TAIL = 16, 430, 104
"""Widths: around the picture, of names on the left, of sizes on the right."""
MOST_MESH_ROWS = 8
SMALL = 6.1
"""The width of a character of small text."""

STYLE = """
.plan{--ink:#1b1f24;--soft:#57606a;--line:#8c959f;--faint:#d0d7de;--paper:#ffffff;--band:#f0f3f6;--trains:#2f6fb3;
--on-trains:#ffffff;--frozen:#dbe3ec;--stripe:#a9b8c8;--on-frozen:#1b1f24;--node:#1b1f24;font-family:system-ui,sans-serif}
@media (prefers-color-scheme:dark){.plan{--ink:#e6edf3;--soft:#9ea7b3;--line:#6e7681;--faint:#373e47;--paper:#0d1117;
--band:#1c2129;--trains:#4c8fd6;--on-trains:#06121f;--frozen:#2b3440;--stripe:#4b5867;--on-frozen:#e6edf3;--node:#e6edf3}}
@media print{.plan{--ink:#000;--soft:#333;--line:#555;--faint:#999;--paper:#fff;--band:#eee;--trains:#2f6fb3;
--on-trains:#fff;--frozen:#fff;--stripe:#999;--on-frozen:#000;--node:#000}}
.plan text{fill:var(--ink);font-size:12px}.plan .h1{font-size:17px;font-weight:600}.plan .h2{font-size:14px;font-weight:600}
.plan .small{font-size:11px;fill:var(--soft)}.plan .name{font-family:ui-monospace,Menlo,Consolas,monospace;font-size:11.5px}
.plan .unit-name{font-family:ui-monospace,Menlo,Consolas,monospace;font-size:12px;font-weight:600}
.plan .paper{fill:var(--paper)}.plan .band{fill:var(--band)}.plan .share{fill:var(--faint)}
.plan .piece{fill:none;stroke:var(--line);stroke-dasharray:2 2}.plan .held{stroke:var(--line)}
.plan .trains .held,.plan .sample.trains{fill:var(--trains)}.plan .trains .in{fill:var(--on-trains);font-size:10.5px}
.plan .frozen .held,.plan .sample.frozen{fill:url(#frozen)}.plan .frozen .in{fill:var(--on-frozen);font-size:10.5px}
.plan .on-host .held{stroke-width:2.5;stroke-dasharray:6 3}.plan .rank{fill:var(--band);stroke:var(--faint)}
.plan .edge{stroke:var(--node);stroke-width:2.5}.plan .sample{stroke:var(--line)}
.plan g[tabindex]{outline:none}.plan g[tabindex]:focus .band,.plan g[tabindex]:hover .band{stroke:var(--trains);stroke-width:1.5}
"""


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


def plan_svg(view: PlanView, title: str) -> str:
    """The picture, complete in itself."""
    mesh = mesh_cells(view.grid)
    frame = Frame.of(max(len(view.columns), len(mesh[0])))
    drawn = [element("title", escape(title)), element("style", STYLE.strip()), _patterns()]
    body, y = _heading(view, title, frame)
    mesh_part, y = _mesh(view, mesh, frame, y + 14)
    units_part, y = _units(view, frame, y + 30)
    body += mesh_part + units_part
    paper = rect(0, 0, frame.width, y + MARGIN, "paper")
    return element(
        "svg", *drawn, paper, *body,
        xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {frame.width:g} {y + MARGIN:g}", width=frame.width,
        height=y + MARGIN, class_="plan", role="figure",
    )  # fmt: skip


def _patterns() -> str:
    stripes = element("path", d="M-1 1 l2 -2 M0 6 l6 -6 M5 7 l2 -2", stroke="var(--stripe)", stroke_width=1.2)
    back = element("rect", width=6, height=6, fill="var(--frozen)")
    return element("defs", element("pattern", back, stripes, id="frozen", width=6, height=6, patternUnits="userSpaceOnUse"))


# --- heading and mesh -------------------------------------------------------------------------------------------------


def summary(view: PlanView) -> list[str]:
    """The plan in two lines."""
    plan, grid = view.plan, view.grid
    axes = " × ".join(f"{name} {size}" for name, size in plan.axes)
    nodes = f" on {grid.nodes} nodes of {grid.ranks_per_node}" if grid.nodes > 1 else ""
    tensors = [p for unit in plan.units for p in unit.parameters]
    trained = [p for p in tensors if p.trainable]
    shown = sum(unit.count for unit in view.units)
    of_all = "" if shown == len(plan.units) else f" ({shown} of them shown)"
    return [
        f"{plan.strategy} over {axes}: {grid.world:,} {'rank' if grid.world == 1 else 'ranks'}{nodes}",
        f"{len(plan.units):,} units{of_all}, {len(tensors):,} parameters, {len(trained):,} of them train "
        f"({sum(math.prod(p.shape) for p in trained):,} elements); {memory_size(plan.shard_bytes)} per rank",
    ]


def _heading(view: PlanView, title: str, frame: Frame) -> tuple[list[str], float]:
    drawn = [text(MARGIN, 30, fitted(title, frame.width - 2 * MARGIN, 9), "h1")]
    drawn += [text(MARGIN, 50 + 17 * i, line, "small") for i, line in enumerate(summary(view))]
    x, y = MARGIN, 82.0
    for class_, words in (
        ("sample trains", "trains"), ("sample frozen", "frozen"), ("piece", "padding: sent, not stored"),
        ("edge-sample", "thick line: border of a node"),
    ):  # fmt: skip
        if class_ == "edge-sample":
            drawn.append(element("line", x1=x, y1=y + 7.0, x2=x + 22, y2=y + 7.0, class_="edge"))
        else:
            drawn.append(rect(x, y, 22, 14, class_))
        drawn.append(text(x + 28, y + 11, words, "small"))
        x += 28 + len(words) * SMALL + 24
    for words in legend_words(view):
        y += 16
        drawn.append(text(MARGIN, y + 14, words, "small"))
    return drawn, y + 16


WORDS = {
    "direct": "direct: gathered straight into its own memory",
    "bucket": "bucket: small or padded, sent together with the unit's other small parameters",
    "not split": "not split: whole on every rank",
    "on the host": "on the host: whole in the host memory of every rank (thick dashes)",
    "4-bit": "4-bit: packed values and their scales, sent as they are",
    "fp8": "fp8: values and one scale per row, sent as they are",
}


def legend_words(view: PlanView) -> list[str]:
    """What the notes beside parameters mean, in lines of two."""
    there = {note for unit in view.units for row in unit.parameters for note in row.notes}
    words = [meaning for note, meaning in WORDS.items() if note in there]
    return [" · ".join(words[i : i + 2]) for i in range(0, len(words), 2)]


def mesh_cells(grid: RankGrid) -> list[list[Column]]:
    """The mesh in rows of replicas and columns of shards. If nothing is split, ranks are listed in one row."""
    ranks = grid.ranks if grid.positions > 1 else grid.ranks.T
    places = [column.positions for column in grid.columns()] if grid.positions > 1 else _runs(len(ranks), MOST_COLUMNS)
    rows = _runs(ranks.shape[1], MOST_MESH_ROWS)
    return [
        [Column(tuple(place), tuple(sorted(ranks[np.ix_(list(place), list(row))].ravel().tolist()))) for place in places]
        for row in rows
    ]  # fmt: skip


def _runs(count: int, most: int) -> list[tuple[int, ...]]:
    width = -(-count // most)
    return [tuple(range(i, min(i + width, count))) for i in range(0, count, width)]


def mesh_words(grid: RankGrid) -> list[str]:
    """Who holds the same as whom, in words."""
    words = []
    sizes = " × ".join(grid.split_axes)
    if grid.positions > 1:
        words.append(f"Ranks side by side hold different shards ({sizes}: {grid.positions}).")
    if grid.replicas > 1:
        along = " × ".join(grid.copy_axes) or "no axis"
        words.append(f"Ranks {'one below the other' if grid.positions > 1 else 'side by side'} hold the same "
                     f"({along}: {grid.replicas} copies).")  # fmt: skip
    return words or ["One rank holds everything."]


def _mesh(view: PlanView, mesh: list[list[Column]], frame: Frame, y: float) -> tuple[list[str], float]:
    grid, height, width = view.grid, 34.0, frame.ranks / len(mesh[0])
    drawn = [text(MARGIN, y + 14, "Mesh", "h2")]
    drawn += [text(MARGIN, y + 32 + 15 * i, words, "small") for i, words in enumerate(mesh_words(grid))]
    first = 0
    for i, row in enumerate(mesh):
        count = len(row[0].ranks) // max(1, len(row[0].positions))
        top = y + i * height
        if grid.replicas > 1 and grid.positions > 1:
            label = f"replica {numbers_text(range(first, first + count))}"
            drawn.append(text(frame.left - 10, top + 20, label, "small", "end"))
        first += count
        drawn += [_mesh_cell(grid, cell, frame.left + j * width, top, width, height) for j, cell in enumerate(row)]
    drawn += _node_edges(grid, mesh, frame.left, y, width, height)
    return drawn, y + max(len(mesh) * height, 32 + 15 * len(mesh_words(grid)))


def _mesh_cell(grid: RankGrid, cell: Column, x: float, y: float, width: float, height: float) -> str:
    ranks = numbered("rank", cell.ranks)
    where = numbered("node", sorted({grid.node_of(rank) for rank in cell.ranks}))
    inside = [
        element("title", escape("\n".join(filter(None, (ranks, where))))),
        rect(x, y, width, height, "rank", data_ranks=numbers_text(cell.ranks), data_count=len(cell.ranks)),
        text(x + width / 2, y + 15, _shortened(ranks, width, 7.2), None, "middle"),
        text(x + width / 2, y + 28, _shortened(where, width, 6.6), "small", "middle"),
    ]
    return element("g", *inside)


def numbered(what: str, numbers: Sequence[int]) -> str:
    """Ranks or nodes with their numbers, such as `rank 0` or `nodes 0–31`."""
    return f"{what}{'s' if len(numbers) > 1 else ''} {numbers_text(numbers)}"


def _shortened(words: str, width: float, character: float) -> str:
    """Numbers with their name, or without it if there is no room."""
    return words if len(words) * character <= width - 4 else fitted(words.partition(" ")[2], width - 4, character)


def _node_edges(
    grid: RankGrid, mesh: list[list[Column]], x: float, y: float, width: float, height: float
) -> list[str]:
    """Thick lines where one node ends and another begins."""
    nodes = [[frozenset(grid.node_of(rank) for rank in cell.ranks) for cell in row] for row in mesh]
    lines = []
    for i, row in enumerate(nodes):
        for j, own in enumerate(row):
            left, top, right, bottom = x + j * width, y + i * height, x + (j + 1) * width, y + (i + 1) * height
            sides = {
                (left, top, left, bottom): j > 0 and row[j - 1] == own,
                (left, top, right, top): i > 0 and nodes[i - 1][j] == own,
                (right, top, right, bottom): j + 1 < len(row),
                (left, bottom, right, bottom): i + 1 < len(nodes),
            }
            lines += [place for place, covered in sides.items() if not covered]
    return [element("line", x1=a, y1=b, x2=c, y2=d, class_="edge") for a, b, c, d in lines]


# --- units ------------------------------------------------------------------------------------------------------------


def _units(view: PlanView, frame: Frame, y: float) -> tuple[list[str], float]:
    drawn = [text(MARGIN, y + 14, "Units, in the order of the model", "h2")]
    width = frame.ranks / len(view.columns)
    for j, column in enumerate(view.columns):
        x = frame.left + (j + 0.5) * width
        drawn.append(text(x, y + 4, _shortened(numbered("rank", column.ranks), width, 6.6), "small", "middle"))
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
    label = unit.label + (f" × {unit.count}" if unit.count > 1 else "")
    inside = [
        element("title", escape(unit_title(unit))),
        rect(MARGIN, y, frame.right + TAIL - MARGIN, 24, "band"),
        rect(frame.left, y + 20, frame.ranks * share, 4, "share"),
        text(MARGIN + 6, y + 16, fitted(label, LABEL - 12, 7.3), "unit-name"),
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


def unit_words(unit: UnitRow, share: float) -> str:
    gathered = memory_size(unit.plan.gathered_bytes)
    each = "each " if unit.count > 1 else ""
    return f"{unit.plan.module} · {share:.1%} of a rank's parameters · {each}{gathered} when gathered"


def times(count: int, size: int) -> str:
    """Bytes of several equal things, such as `32 × 104.0 MiB`."""
    return f"{count} × {memory_size(size)}" if count > 1 else memory_size(size)


def unit_title(unit: UnitRow) -> str:
    """A unit in full, for its tooltip."""
    plan, lines = unit.plan, [unit.label, f"class {unit.plan.module}"]
    each = " each" if unit.count > 1 else ""
    lines.append(f"{memory_size(plan.shard_bytes)} per rank{each} ({plan.shard_bytes:,} B)")
    lines.append(f"{memory_size(plan.gathered_bytes)} when gathered{each} ({plan.gathered_bytes:,} B)")
    if plan.gather_bucket:
        count = len(plan.gather_bucket.slots)
        lines.append(f"gather bucket: {count} parameters, {memory_size(plan.gather_bucket.length)} per rank")
    for bucket in plan.scatter_buckets:
        lines.append(f"reduce-scatter bucket: {len(bucket.slots)} gradients in {bucket.dtype}")
    for bucket in plan.copy_buckets:
        lines.append(f"all-reduce bucket: {len(bucket.slots)} gradients in {bucket.dtype}")
    return "\n".join(lines)


def parameter_title(row: ParameterRow) -> str:
    """A parameter in full, for its tooltip."""
    p = row.plan
    lines = [row.label + (f" × {row.count}" if row.count > 1 else ""), f"shape {shape_text(p.shape)}"]
    lines += [f"dtype {dtype_text(p)}" + (f", gradient reduced in {p.reduce_dtype}" if p.trainable else "")]
    lines += [f"spec {spec_text(p)}", f"{memory_size(p.shard_bytes)} per rank ({p.shard_bytes:,} B)"]
    if p.gathers:
        lines.append(f"{memory_size(p.gathered_bytes)} when gathered ({p.gathered_bytes:,} B)")
    return "\n".join([*lines, ", ".join(row.notes)])


def _parameter(view: PlanView, unit: UnitRow, row: ParameterRow, frame: Frame, y: float) -> str:
    p = row.plan
    name = row.label + (f" × {row.count}" if row.count > 1 else "")
    words = " · ".join((shape_text(p.shape), dtype_text(p), *row.notes))
    inside = [
        element("title", escape(parameter_title(row))),
        rect(MARGIN, y - 1, frame.right + TAIL - MARGIN, 29, "band", fill_opacity=0.35),
        text(MARGIN + 18, y + 11, fitted(name, LABEL - 26, 7.0), "name"),
        text(MARGIN + 18, y + 24, fitted(words, LABEL - 26, 5.8), "small"),
    ]
    width = frame.ranks / len(view.columns)
    for j, (column, cell) in enumerate(zip(view.columns, row.cells, strict=True)):
        inside.append(_cell(row, column, cell, frame.left + j * width + 2, y + 3, width - 4))
    inside.append(text(frame.right + TAIL, y + 18, times(row.count, p.shard_bytes), None, "end"))
    classes = " ".join(("parameter", "trains" if p.trainable else "frozen", *(["on-host"] if p.on_host else [])))
    return element(
        "g", *inside, class_=classes, tabindex=0, data_unit=unit.label, data_parameter=row.label,
        data_units=unit.count, data_count=row.count, data_shard_bytes=p.shard_bytes,
    )  # fmt: skip


def _cell(row: ParameterRow, column: Column, cell: Cell, x: float, y: float, width: float) -> str:
    p = row.plan
    full = len(column.ranks) * p.shard_bytes
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
