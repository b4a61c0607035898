"""Drawings of layouts for the terminal: which device holds which part of a tensor.

A tensor of 0 to 3 dims is drawn as a grid of its shards (3 dims: one grid per shard of dim 0). Devices with copies of
the same shard share a cell. Colors are used if the terminal has them; the text alone is complete.
"""

from __future__ import annotations

import io
import itertools
import math
import re
from dataclasses import dataclass

import numpy as np
import torch
from rich.align import Align
from rich.box import SQUARE
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from fullshard.config.errors import LayoutError, SpecError
from fullshard.distributed import engines, runtime
from fullshard.distributed.console import Terminal
from fullshard.spmd.spec import Layout

COLORS = ("blue", "green", "magenta", "cyan", "yellow", "red", "bright_blue", "bright_green")


@dataclass(frozen=True)
class ShardGrid:
    """The shards of a tensor as a grid, and the devices that hold each."""

    counts: tuple[int, ...]
    holders: dict[tuple[int, ...], list[int]]
    shape: tuple[int, ...] | None = None

    @classmethod
    def of(cls, layout: Layout, shape: tuple[int, ...]) -> ShardGrid:
        """The grid of a layout of a tensor."""
        counts = tuple(layout.parts(dim) for dim in range(len(shape)))
        holders: dict[tuple[int, ...], list[int]] = {}
        for device in layout.mesh.device_ids.tolist():
            coordinate = layout.mesh.coordinate(device)
            assert coordinate is not None
            place = tuple(layout.index_along(axes, coordinate) for axes in layout.dims)
            holders.setdefault(place, []).append(device)
        return cls(counts, holders, shape)


def visualize_tensor_sharding(t: torch.Tensor, *, use_color: bool | None = None, console: Console | None = None) -> str:
    """Print the layout of a sharded (or marked) tensor on rank 0; returns the drawing without colors."""
    layout, shape = engines.current().layouts.sharding_of(t), tuple(t.shape)
    if layout is None:
        raise LayoutError(
            f"a plain tensor of shape {shape} has no layout to draw; shard it first: mark_sharding(t, mesh, spec)"
        )
    return _show(ShardGrid.of(layout, shape), f"{_size(shape)}  {layout}", use_color, console)


def visualize_sharding(sharding: str, *, use_color: bool | None = None, console: Console | None = None) -> str:
    """Print a layout given in XLA's notation, such as `{devices=[2,2]0,1,2,3}` or `{replicated}`."""
    return _show(parse_sharding(sharding), sharding, use_color, console)


def sharding_string(t: torch.Tensor) -> str:
    """The layout of a sharded tensor in XLA's notation."""
    layout = engines.current().layouts.sharding_of(t)
    return "{replicated}" if layout is None else layout_string(layout, tuple(t.shape))


def layout_string(layout: Layout, shape: tuple[int, ...]) -> str:
    """The layout of a tensor of the given shape in XLA's notation."""
    if not any(layout.dims):
        return "{replicated}"
    grid = ShardGrid.of(layout, shape)
    order = [device for place in itertools.product(*map(range, grid.counts)) for device in grid.holders[place]]
    copies = layout.mesh.size() // math.prod(grid.counts)
    counts = [*grid.counts, copies] if copies > 1 else grid.counts
    tail = " last_tile_dim_replicate" if copies > 1 else ""
    return f"{{devices=[{','.join(map(str, counts))}]{','.join(map(str, order))}{tail}}}"


def parse_sharding(sharding: str) -> ShardGrid:
    """Parse XLA's notation: a tile grid with a list of devices, or a range of them (`<=[4]`, `<=[2,2]T(1,0)`)."""
    body = sharding.strip().strip("{}").strip()
    if body == "replicated":
        devices = list(range(runtime.global_runtime_device_count()))
        return ShardGrid((), {(): devices})
    if match := re.fullmatch(r"maximal device=(\d+)", body):
        return ShardGrid((), {(): [int(match[1])]})
    match = re.fullmatch(
        r"devices=\[([\d,]+)\](<=\[([\d,]+)\](?:T\(([\d,]+)\))?|[\d,]+)(\s+last_tile_dim_replicate)?", body
    )
    if match is None:
        raise SpecError(
            f"{sharding!r} is not a sharding in XLA's notation; expected '{{replicated}}', '{{maximal device=0}}', "
            f"'{{devices=[2,2]0,1,2,3}}', '{{devices=[2,1,2]0,1,2,3 last_tile_dim_replicate}}', '{{devices=[4]<=[4]}}'"
        )
    counts = _numbers(match[1])
    if match[3]:
        dims = _numbers(match[3])
        ids = np.arange(math.prod(dims)).reshape(dims)
        if match[4]:
            order = _numbers(match[4])
            if sorted(order) != list(range(len(dims))):
                raise SpecError(
                    f"{sharding!r}: T({match[4]}) is not a permutation of the {len(dims)} dims in <=[{match[3]}]"
                )
            ids = ids.transpose(order)
        devices = ids.reshape(-1).tolist()
    else:
        devices = _numbers(match[2])
    if math.prod(counts) != len(devices):
        raise SpecError(f"{sharding!r}: a tile grid of {counts} needs {math.prod(counts)} devices, got {len(devices)}")
    if match[5]:
        copies, counts = counts[-1], counts[:-1]
    else:
        copies = 1
    places = list(itertools.product(*map(range, counts)))
    return ShardGrid(
        tuple(counts), {place: devices[i * copies : (i + 1) * copies] for i, place in enumerate(places)}
    )  # fmt: skip


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",") if n]


def _show(grid: ShardGrid, title: str, use_color: bool | None, console: Console | None) -> str:
    drawing = draw(grid, title)
    plain = Terminal(color_system=None, width=200, record=True, file=io.StringIO())
    plain.print(drawing)
    if runtime.is_main():
        if console is None:
            color = {None: "auto", True: "standard", False: None}[use_color]
            console = Terminal(color_system=color, force_terminal=True if use_color else None)
        console.print(drawing)
    return plain.export_text()


def draw(grid: ShardGrid, title: str) -> RenderableType:
    """The drawing as a rich renderable."""
    if len(grid.counts) > 3:
        raise LayoutError(
            f"a layout of {len(grid.counts)} dims cannot be drawn; the most is 3 dims. Print the tensor's "
            f"sharding_spec instead"
        )
    heading = Text(title, style="bold")
    if len(grid.counts) < 3:
        return Group(heading, _grid(grid, ()))
    return Group(heading, *(
        part for i in range(grid.counts[0]) for part in (Text(_range(grid, 0, i, "dim 0 ")), _grid(grid, (i,)))
    ))  # fmt: skip


def _grid(grid: ShardGrid, leading: tuple[int, ...]) -> Table:
    """The last two dims (or fewer) as rows and columns."""
    first = len(leading)
    counts = grid.counts[first:]
    rows, columns = {0: (1, 1), 1: (1, *counts), 2: counts}[len(counts)]
    table = Table(show_header=grid.shape is not None and bool(counts), box=SQUARE, show_lines=True, padding=(0, 1))
    if len(counts) == 2:
        table.add_column("")
    for column in range(columns):
        table.add_column(_range(grid, len(grid.counts) - 1, column) if counts else "", justify="center")
    for row in range(rows):
        cells: list[RenderableType] = [_range(grid, first, row)] if len(counts) == 2 else []
        for column in range(columns):
            place = leading + ((row, column) if len(counts) == 2 else (column,) if len(counts) == 1 else ())
            devices = grid.holders[place]
            names = ",".join(map(str, devices))
            cells.append(Align.center(Text(f"rank {names}", style=f"bold {COLORS[devices[0] % len(COLORS)]}")))
        table.add_row(*cells)
    return table


def _range(grid: ShardGrid, dim: int, index: int, prefix: str = "") -> str:
    if grid.shape is None:
        return f"{prefix}{index}"
    size = grid.shape[dim]
    length = -(-size // grid.counts[dim])
    start, stop = min(index * length, size), min((index + 1) * length, size)
    return f"{prefix}[{start}:{stop}]"


def _size(shape: tuple[int, ...] | None) -> str:
    return "×".join(map(str, shape)) if shape else "scalar"
