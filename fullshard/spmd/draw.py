"""Drawings of layouts for the terminal: which device holds which part of a tensor.

A tensor of rank 0 to 3 is drawn as a grid of its pieces (rank 3: one grid per piece of dim 0). Devices that hold copies
of a piece share its cell. Colour where the terminal has it; the text alone says the same.
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

from fullshard import runtime
from fullshard.errors import LayoutError, SpecError
from fullshard.spmd.sharding import sharding_of
from fullshard.spmd.spec import Layout

COLOURS = ("blue", "green", "magenta", "cyan", "yellow", "red", "bright_blue", "bright_green")


@dataclass(frozen=True)
class Pieces:
    """A grid of pieces, as many per dim as the dim is cut into, and the devices that hold each."""

    counts: tuple[int, ...]
    holders: dict[tuple[int, ...], list[int]]
    shape: tuple[int, ...] | None = None

    @classmethod
    def of(cls, layout: Layout, shape: tuple[int, ...]) -> Pieces:
        counts = tuple(layout.parts(dim) for dim in range(len(shape)))
        holders: dict[tuple[int, ...], list[int]] = {}
        for device in layout.mesh.device_ids.tolist():
            where = layout.mesh.coordinate(device)
            assert where is not None
            place = tuple(layout._index(axes, where) for axes in layout.dims)
            holders.setdefault(place, []).append(device)
        return cls(counts, holders, shape)


def visualize_tensor_sharding(t: torch.Tensor, *, use_color: bool | None = None, console: Console | None = None) -> str:
    """Draw the layout of a sharded (or marked) tensor, once, on the first rank; returns the drawing without colour."""
    layout = sharding_of(t)
    if layout is None:
        raise LayoutError(
            f"a plain tensor of shape {tuple(t.shape)} has no layout to draw; mark_sharding(t, mesh, spec) gives it one"
        )
    pieces = Pieces.of(layout, tuple(t.shape))
    return _show(pieces, f"{_size(pieces.shape)}  {layout}", use_color, console)


def visualize_sharding(sharding: str, *, use_color: bool | None = None, console: Console | None = None) -> str:
    """Draw a layout given in XLA's notation, such as `{devices=[2,2]0,1,2,3}` or `{replicated}`."""
    return _show(parse_sharding(sharding), sharding, use_color, console)


def sharding_string(t: torch.Tensor) -> str:
    """The layout of a sharded tensor in XLA's notation."""
    layout = sharding_of(t)
    if layout is None or not any(layout.dims):
        return "{replicated}"
    pieces = Pieces.of(layout, tuple(t.shape))
    order = [device for place in itertools.product(*map(range, pieces.counts)) for device in pieces.holders[place]]
    copies = layout.mesh.size() // math.prod(pieces.counts)
    counts = [*pieces.counts, copies] if copies > 1 else pieces.counts
    tail = " last_tile_dim_replicate" if copies > 1 else ""
    return f"{{devices=[{','.join(map(str, counts))}]{','.join(map(str, order))}{tail}}}"


def parse_sharding(sharding: str) -> Pieces:
    """Read XLA's notation: a tile grid with its devices listed, or counted off (`<=[4]`, `<=[2,2]T(1,0)`)."""
    body = sharding.strip().strip("{}").strip()
    if body == "replicated":
        devices = list(range(runtime.global_runtime_device_count()))
        return Pieces((), {(): devices})
    if found := re.fullmatch(r"maximal device=(\d+)", body):
        return Pieces((), {(): [int(found[1])]})
    found = re.fullmatch(
        r"devices=\[([\d,]+)\](<=\[([\d,]+)\](?:T\(([\d,]+)\))?|[\d,]+)(\s+last_tile_dim_replicate)?", body
    )
    if found is None:
        raise SpecError(
            f"{sharding!r} is not a sharding in XLA's notation; expected '{{replicated}}', '{{maximal device=0}}', "
            f"'{{devices=[2,2]0,1,2,3}}', '{{devices=[2,1,2]0,1,2,3 last_tile_dim_replicate}}', '{{devices=[4]<=[4]}}'"
        )
    counts = _numbers(found[1])
    if found[3]:
        dims = _numbers(found[3])
        ids = np.arange(math.prod(dims)).reshape(dims)
        if found[4]:
            order = _numbers(found[4])
            if sorted(order) != list(range(len(dims))):
                raise SpecError(
                    f"{sharding!r}: T({found[4]}) is not an order of the {len(dims)} dims in <=[{found[3]}]"
                )
            ids = ids.transpose(order)
        devices = ids.reshape(-1).tolist()
    else:
        devices = _numbers(found[2])
    if math.prod(counts) != len(devices):
        raise SpecError(
            f"{sharding!r}: a tile grid of {counts} needs {math.prod(counts)} devices, {len(devices)} are given"
        )
    if found[5]:
        copies, counts = counts[-1], counts[:-1]
    else:
        copies = 1
    places = list(itertools.product(*map(range, counts)))
    return Pieces(
        tuple(counts), {place: devices[i * copies : (i + 1) * copies] for i, place in enumerate(places)}
    )  # fmt: skip


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",") if n]


def _show(pieces: Pieces, title: str, use_color: bool | None, console: Console | None) -> str:
    drawing = draw(pieces, title)
    plain = Console(color_system=None, width=200, record=True, file=io.StringIO())
    plain.print(drawing)
    if runtime.is_main():
        if console is None:
            colour = {None: "auto", True: "standard", False: None}[use_color]
            console = Console(color_system=colour, force_terminal=True if use_color else None)  # type: ignore[arg-type]
        console.print(drawing)
    return plain.export_text()


def draw(pieces: Pieces, title: str) -> RenderableType:
    """The drawing as a rich renderable."""
    if len(pieces.counts) > 3:
        raise LayoutError(
            f"a layout of rank {len(pieces.counts)} cannot be drawn on a flat screen; up to rank 3 can. "
            f"Print the tensor's sharding_spec instead"
        )
    heading = Text(title, style="bold")
    if len(pieces.counts) < 3:
        return Group(heading, _grid(pieces, ()))
    return Group(heading, *(
        part for i in range(pieces.counts[0]) for part in (Text(_range(pieces, 0, i, "dim 0 ")), _grid(pieces, (i,)))
    ))  # fmt: skip


def _grid(pieces: Pieces, leading: tuple[int, ...]) -> Table:
    """The last two dims (or fewer) as rows and columns."""
    first = len(leading)
    counts = pieces.counts[first:]
    rows, columns = {0: (1, 1), 1: (1, *counts), 2: counts}[len(counts)]
    table = Table(show_header=pieces.shape is not None and bool(counts), box=SQUARE, show_lines=True, padding=(0, 1))
    if len(counts) == 2:
        table.add_column("")
    for column in range(columns):
        table.add_column(_range(pieces, len(pieces.counts) - 1, column) if counts else "", justify="center")
    for row in range(rows):
        cells: list[RenderableType] = [_range(pieces, first, row)] if len(counts) == 2 else []
        for column in range(columns):
            place = leading + ((row, column) if len(counts) == 2 else (column,) if len(counts) == 1 else ())
            devices = pieces.holders[place]
            names = ",".join(map(str, devices))
            cells.append(Align.center(Text(f"rank {names}", style=f"bold {COLOURS[devices[0] % len(COLOURS)]}")))
        table.add_row(*cells)
    return table


def _range(pieces: Pieces, dim: int, index: int, prefix: str = "") -> str:
    if pieces.shape is None:
        return f"{prefix}{index}"
    size = pieces.shape[dim]
    piece = -(-size // pieces.counts[dim])
    start, stop = min(index * piece, size), min((index + 1) * piece, size)
    return f"{prefix}[{start}:{stop}]"


def _size(shape: tuple[int, ...] | None) -> str:
    return "×".join(map(str, shape)) if shape else "scalar"
