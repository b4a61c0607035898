"""Drawings of layouts."""

import io

import numpy as np
import pytest
import torch
from rich.console import Console

import fullshard.spmd as xs
from fullshard.config.errors import LayoutError, SpecError
from fullshard.distributed import runtime
from tests.pool import ranks
from tests.spmd.orders import ANY_ORDER, keepable


def square() -> xs.Mesh:
    return xs.Mesh(np.arange(4), (2, 2), ("data", "model"))


def drawn(shape, spec, **options) -> str:
    return xs.visualize_tensor_sharding(xs.mark_sharding(torch.zeros(shape), square(), spec), **options)


def cells(drawing: str) -> list[list[str]]:
    """The ranks in each row of a drawing."""
    rows = [line for line in drawing.splitlines() if "rank" in line]
    return [[cell.strip().removeprefix("rank ") for cell in row.split("│") if "rank" in cell] for row in rows]


@ranks(4)
def test_every_rank_up_to_three_is_drawn():
    assert cells(drawn((8, 4), ("data", "model"))) == [["0", "1"], ["2", "3"]]
    assert cells(drawn((8, 4), ("model", "data"))) == [["0", "2"], ["1", "3"]]
    assert cells(drawn((8, 4), ("data", None))) == [["0,1"], ["2,3"]]
    if ANY_ORDER:
        assert cells(drawn((8,), (("model", "data"),))) == [["0", "2", "1", "3"]]
    assert cells(drawn((), ())) == [["0,1,2,3"]]
    assert cells(drawn((2, 4, 4), ("data", None, "model"))) == [["0", "1"], ["2", "3"]]
    uneven = drawn((6,), (("data", "model"),))
    assert "[0:2]" in uneven and "[4:6]" in uneven and "[6:6]" in uneven
    assert "6  (('data', 'model'),) on Mesh(data=2, model=2)" in uneven
    with pytest.raises(LayoutError, match="4 dims cannot be drawn"):
        drawn((2, 2, 2, 2), (None, None, None, "data"))
    with pytest.raises(LayoutError, match=r"plain tensor of shape \(3,\) has no layout"):
        xs.visualize_tensor_sharding(torch.zeros(3))


@ranks(4)
def test_only_the_first_rank_prints_and_colour_is_optional():
    for colour in (True, False):
        out = io.StringIO()
        console = Console(file=out, color_system="standard" if colour else None, force_terminal=colour, width=100)
        drawn((8, 4), ("data", "model"), console=console)
        assert bool(out.getvalue()) == (runtime.rank() == 0)
        assert ("\x1b[" in out.getvalue()) == (colour and runtime.rank() == 0)


@ranks(4)
def test_xlas_notation_there_and_back():
    for spec in keepable(
        [("data", "model"), ("model", "data"), ("data", None), (("model", "data"), None), (None, None)]
    ):
        t = xs.mark_sharding(torch.zeros(8, 4), square(), spec)
        text = xs.sharding_string(t)
        if any(spec):
            assert cells(xs.visualize_sharding(text)) == cells(xs.visualize_tensor_sharding(t)), text
    assert (
        xs.sharding_string(xs.mark_sharding(torch.zeros(8, 4), square(), ("data", "model"))) == "{devices=[2,2]0,1,2,3}"
    )
    assert (
        xs.sharding_string(xs.mark_sharding(torch.zeros(8, 4), square(), ("data", None)))
        == "{devices=[2,1,2]0,1,2,3 last_tile_dim_replicate}"
    )
    assert cells(xs.visualize_sharding("{replicated}")) == [["0,1,2,3"]]
    assert cells(xs.visualize_sharding("{maximal device=2}")) == [["2"]]
    assert cells(xs.visualize_sharding("{devices=[2,2]<=[4]}")) == [["0", "1"], ["2", "3"]]
    assert cells(xs.visualize_sharding("{devices=[2,2]<=[2,2]T(1,0)}")) == [["0", "2"], ["1", "3"]]


@ranks(1)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{tiled}", "not a sharding in XLA's notation"),
        ("{devices=[2,2]0,1}", r"tile grid of \[2, 2\] needs 4 devices, got 2"),
        ("{devices=[2,2]<=[2,2]T(0,0)}", r"T\(0,0\) is not a permutation"),
    ],
)
def test_notation_that_cannot_be_read(text, message):
    with pytest.raises(SpecError, match=message):
        xs.visualize_sharding(text)
