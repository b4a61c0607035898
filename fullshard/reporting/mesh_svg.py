"""The mesh of a plan as SVG: shards side by side, replicas one below the other, thick lines around nodes."""

from __future__ import annotations

from fullshard.reporting.plan_words import numbered
from fullshard.reporting.rank_grid import Column, RankGrid, numbers_text
from fullshard.reporting.svg import element, escape, fitted, rect, text

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
    ranks = numbered("rank", cell.ranks)
    where = numbered("node", sorted({grid.node_of(rank) for rank in cell.ranks}))
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
