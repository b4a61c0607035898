"""A sharding plan in the terminal: mesh, units, gathered bytes over a step, memory by part.

Tables are as wide as the terminal; a narrow one leaves out the columns that matter least. Piped text has all of them
and no colors.
"""

from __future__ import annotations

import io
import itertools
import math
import sys
from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fullshard.config.byte_size import memory_size
from fullshard.distributed.console import Terminal
from fullshard.distributed.terminal_text import print_text, visible
from fullshard.report.plan_view import PlanView
from fullshard.report.plan_words import (
    dtype_text,
    mesh_words,
    shape_text,
    slice_text,
    split_text,
    summary,
    times,
    with_count,
    with_numbers,
)
from fullshard.report.rank_grid import Column, mesh_cells, numbers_text
from fullshard.report.step_memory import GatheredMoment, StepMemory

BLOCKS = " ▁▂▃▄▅▆▇█"
SPARKS = 100
"""The most characters of a drawn line."""
PIPED = 200
"""The width of text that no terminal limits."""


def print_plan(title: str, view: PlanView, gathered: Sequence[GatheredMoment], memory: StepMemory) -> None:
    """Print a plan as wide as the terminal is."""
    if sys.stdout.isatty():
        console = Terminal()
        console.print(draw_plan(title, view, gathered, memory, console.width))
        return
    console = Terminal(width=PIPED, file=io.StringIO(), record=True, color_system=None)
    console.print(draw_plan(title, view, gathered, memory, PIPED))
    print_text("\n".join(line.rstrip() for line in console.export_text().splitlines()))


def draw_plan(
    title: str, view: PlanView, gathered: Sequence[GatheredMoment], memory: StepMemory, width: int
) -> RenderableType:  # fmt: skip
    """The plan as a rich renderable."""
    lines: list[RenderableType] = [_text(title, "bold"), *map(_text, summary(view))]
    sections = {"Mesh": _mesh(view, width), "Units": _units(view, width)}
    sections |= {"Gathered parameters over one step": _gathered(gathered, width)}
    sections |= {"Memory of a device by part": _memory(memory, width)}
    for heading, parts in sections.items():
        lines += [Text(), _text(heading, "bold"), *parts]
    return Group(*lines)


def _text(words: object, style: str = "") -> Text:
    """Text that is wrapped where it is too long."""
    return Text(visible(str(words)), style, overflow="fold")


def _table(*columns: tuple[str, str], header: bool = True) -> Table:
    table = Table(box=None, show_header=header, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for name, justify in columns:
        table.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]
    return table


# --- mesh and units -------------------------------------------------------------------------------------------------


def _mesh(view: PlanView, width: int) -> Iterator[RenderableType]:
    grid = view.grid
    yield from map(_text, mesh_words(grid))
    first = 0
    table = _table(("", "left"), ("ranks", "left"), ("nodes", "left"), header=False)
    for row in mesh_cells(grid):
        count = len(row[0].ranks) // len(row[0].positions)
        ranks = sorted(rank for cell in row for rank in cell.ranks)
        both = grid.replicas > 1 and grid.positions > 1
        nodes = sorted({grid.node_of(rank) for rank in ranks})
        label = f"replica {numbers_text(range(first, first + count))}" if both else ""
        each = " | ".join(numbers_text(cell.ranks) for cell in row)
        shown = f"ranks {each}" if len(each) + 40 < width else with_numbers("rank", ranks)
        table.add_row(_text(label), _text(shown), _text(with_numbers("node", nodes), "dim"))
        first += count
    yield table


ORDER = ("unit, parameter", "shape", "dtype", "split", "per rank", "notes")
"""The columns from left to right; those of chosen ranks follow."""
LEAST_IMPORTANT = ("split", "dtype", "shape")
"""What a narrow terminal leaves out, in this order."""
NOTES, NARROW = 30, 12
"""The widths of notes for which other columns are left out, and to which they shrink at most."""


def _units(view: PlanView, width: int) -> Iterator[RenderableType]:
    rows = list(_rows(view))
    names = [*(name for name in ORDER if not (view.chosen and name == "split")), *map(_rank_name, _chosen(view))]
    widths = {name: max(len(name), *(len(row.get(name, "")) + 2 for row, _ in rows)) for name in names}
    widths[names[0]] += 2  # parameters are indented
    notes = min(widths["notes"], NOTES)
    for name in LEAST_IMPORTANT:
        if sum(widths[n] for n in names) - widths["notes"] + notes > width and name in names:
            names.remove(name)
    table = _table(*((name, "right" if name == "per rank" else "left") for name in names))
    room = width - sum(widths[name] for name in names) + widths["notes"]
    if NARROW <= room < widths["notes"]:  # notes are wrapped rather than names
        table.columns[0].width = widths[names[0]] - 2
        table.columns[names.index("notes")].width = room - 2
    for row, style in rows:
        cells = [_text(row.get(name, ""), style if name != "notes" else "") for name in names]
        table.add_row(cells[0] if style else Padding(cells[0], (0, 0, 0, 2)), *cells[1:])
    yield table


def _rows(view: PlanView) -> Iterator[tuple[dict[str, str], str]]:
    """The cells of each row by column, and its style."""
    for unit in view.units:
        yield (
            {
                "unit, parameter": with_count(unit.label, unit.count),
                "shape": unit.plan.module,
                "per rank": times(unit.count, unit.plan.shard_bytes),
                "notes": f"{memory_size(unit.plan.gathered_bytes)} when gathered",
            },
            "bold",
        )
        for one in unit.parameters:
            p = one.plan
            slices = zip(_chosen(view), one.cells, strict=view.chosen)
            yield (
                {
                    "unit, parameter": with_count(one.label, one.count),
                    "shape": shape_text(p.shape),
                    "dtype": dtype_text(p),
                    "split": split_text(p, view.grid),
                    "per rank": times(one.count, one.shard_bytes),
                    "notes": ", ".join(one.notes),
                    **{_rank_name(column): slice_text(cell, p) for column, cell in slices},
                },
                "",
            )


def _chosen(view: PlanView) -> Sequence[Column]:
    return view.columns if view.chosen else ()


def _rank_name(column: Column) -> str:
    return with_numbers("rank", column.ranks)


# --- over time ------------------------------------------------------------------------------------------------------


def _gathered(gathered: Sequence[GatheredMoment], width: int) -> Iterator[RenderableType]:
    most = max(gathered, key=lambda moment: moment.bytes)
    yield _text(f"at most {memory_size(most.bytes)}, in {most.phase} of {most.unit or 'the root'}")
    if not most.bytes:
        return
    room = min(width, len(gathered), SPARKS)
    edges = [i * len(gathered) // room for i in range(room + 1)]
    highest = [max(moment.bytes for moment in gathered[a:b]) for a, b in itertools.pairwise(edges)]
    yield _text("".join(BLOCKS[math.ceil(n / most.bytes * (len(BLOCKS) - 1))] for n in highest), "cyan")
    forward = sum(moment.phase == "forward" for moment in gathered) * room // len(gathered)
    yield _text(f"{'forward':<{max(8, forward)}}{'backward'}"[: max(16, width)], "dim")


def _memory(memory: StepMemory, width: int) -> Iterator[RenderableType]:
    moment, peak = memory.peak
    of_limit = f" of {memory_size(memory.limit)}" if memory.limit else ""
    yield _text(f"at most {memory_size(peak)}{of_limit}, in {moment}")
    bars = memory.bars
    parts = tuple(bars[moment])
    if width >= 24 + 12 * (len(parts) + 1):
        table = _table(("", "left"), *((part, "right") for part in parts), ("total", "right"))
        for name, one in bars.items():
            sizes = [_text(memory_size(one[part]) if one.get(part) else "–") for part in parts]
            table.add_row(_text(name), *sizes, _text(memory_size(sum(one.values())), "bold"))
        yield table
    else:
        table = _table(("", "left"), ("total", "right"), ("most of it", "left"))
        for name, one in bars.items():
            largest = sorted((part for part in one if one[part]), key=lambda part: -one[part])[:3]
            words = ", ".join(f"{part} {memory_size(one[part])}" for part in largest)
            table.add_row(_text(name), _text(memory_size(sum(one.values())), "bold"), _text(words))
        yield table
    if memory.host_words:
        yield _text(f"host memory of a node: {memory.host_words}")
    yield from (_text(note, "dim") for note in memory.notes)
