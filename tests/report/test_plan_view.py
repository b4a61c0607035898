"""A folded plan holds what the plan holds: every unit, parameter and rank, to the byte."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullshard.config.errors import ConfigError
from fullshard.fsdp.plan import ParameterPlan, ShardingPlan, UnitPlan, item_size
from fullshard.report.plan_view import Cell, PlanView, view_plan
from fullshard.report.plan_words import slice_text, split_text
from fullshard.report.rank_grid import RankGrid, numbers_text
from fullshard.spmd.mesh import VirtualMesh
from fullshard.spmd.spec import Layout
from tests.report.plans import make_plan

CASES = [
    ("full", {"fsdp": 3}, "FULL_SHARD"),
    ("lora", {"fsdp": 4}, "SHARD_GRAD_OP"),
    ("qlora", {"fsdp": 2}, "FULL_SHARD"),
    pytest.param("fp8", {"fsdp": 24}, "FULL_SHARD", marks=pytest.mark.slow),
    ("tied", {"replica": 2, "fsdp": 8}, "HYBRID_SHARD"),
    pytest.param("experts", {"fsdp": 100}, "FULL_SHARD", marks=pytest.mark.slow),
    ("full", {"fsdp": 8}, "NO_SHARD"),
]


def held_by(plan: ShardingPlan, rank: int) -> int:
    """The bytes of a rank's shards, by the layouts of the sharding language."""
    mesh = VirtualMesh([size for _, size in plan.axes], [name for name, _ in plan.axes])
    total = 0
    for unit in plan.units:
        for p in unit.parameters:
            slices = Layout.of(mesh, p.spec, p.shape).slices(p.shape, rank)
            total += math.prod(s.stop - s.start for s in slices) * item_size(p.dtype)
    return total


def expanded(view: PlanView) -> list[str]:
    """The names of all parameters that the rows stand for."""
    names = []
    for unit in view.units:
        own = {u.name: u for u in view.plan.units if u.name in unit.names}
        for one in own.values():
            assert sum(row.count * len(row.parts) for row in unit.parameters) == len(one.parameters)
            names += [p.name for p in one.parameters]
    return sorted(names)


@pytest.mark.parametrize(("kind", "mesh", "strategy"), CASES)
def test_folding_loses_nothing(kind: str, mesh: dict[str, int], strategy: str) -> None:
    plan = make_plan(kind, mesh, strategy)
    folded, every = view_plan(plan, 8), view_plan(plan, 8, ranks="all", units="all")
    assert expanded(folded) == expanded(every) == sorted(p.name for u in plan.units for p in u.parameters)
    assert len(folded.units) < len(every.units) == len(plan.units)
    assert [column.ranks for column in every.columns] == [(rank,) for rank in range(math.prod(mesh.values()))]
    held = [held_by(plan, column.ranks[0]) for column in every.columns]
    assert list(every.column_bytes) == held and held[0] == plan.shard_bytes
    for column, size in zip(folded.columns, folded.column_bytes, strict=True):
        assert size == sum(held[rank] for rank in column.ranks)
        assert folded.most_in(column) == max(held[rank] for rank in column.ranks)
    assert sorted(rank for column in folded.columns for rank in column.ranks) == list(range(len(held)))
    for unit in folded.units:
        for row in unit.parameters:
            stored = sum(cell.bytes + cell.padding for cell in row.cells)
            assert stored == row.shard_bytes * len(held) or not row.plan.gathers


@settings(max_examples=25)
@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    shape=st.lists(st.integers(0, 13), min_size=0, max_size=3),
    data=st.data(),
)
def test_slices_are_those_of_layouts(sizes: list[int], shape: list[int], data: st.DataObject) -> None:
    names = ["fsdp", "model", "replica"][: len(sizes)]
    left = data.draw(st.permutations(names))
    spec = []
    for _ in shape:
        count = data.draw(st.integers(0, min(2, len(left))))
        taken, left = left[:count], left[count:]
        spec.append(None if not taken else taken[0] if count == 1 else tuple(taken))
    plan = ParameterPlan(
        ("p",), tuple(shape), "float32", "float32", "float32", True, tuple(spec), None, 1, tuple(shape), True
    )  # fmt: skip
    unit = UnitPlan("", "M", (plan,), None, (), ())
    grid = RankGrid(ShardingPlan(tuple(zip(names, sizes, strict=True)), "FULL_SHARD", (), (unit,)))
    layout = Layout.of(VirtualMesh(sizes, names), spec, shape)
    starts, stops = grid.bounds(plan)
    for position, ranks in enumerate(grid.ranks):
        for rank in ranks:
            slices = layout.slices(shape, int(rank))
            np.testing.assert_array_equal(starts[position], [s.start for s in slices])
            np.testing.assert_array_equal(stops[position], [s.stop for s in slices])


def test_rows_say_what_is_special() -> None:
    def notes(kind: str, mesh: dict[str, int], label: str) -> tuple[str, ...]:
        rows = [row for unit in view_plan(make_plan(kind, mesh)).units for row in unit.parameters]
        return next(row.notes for row in rows if row.label.endswith(label))

    two = {"fsdp": 2}
    assert notes("tied", two, "embed_tokens.weight") == ("trains", "bucket", "padded by 1", "tied: lm_head.weight")
    assert notes("qlora", two, "embed_tokens.weight") == ("frozen", "on the host")
    assert notes("qlora", two, "q_proj.base_layer.packed")[:2] == ("frozen", "4-bit with absmax, nested")
    assert notes("fp8", two, "q_proj.base_layer.packed")[:2] == ("frozen", "fp8 with scales")
    assert notes("lora", two, "q_proj.lora_A.default.weight")[0] == "trains"
    assert notes("full", {"fsdp": 1}, "norm.weight") == ("trains", "not split")


def test_names_and_ranks_fold_to_short_text() -> None:
    plan = make_plan("full", {"replica": 3, "fsdp": 3}, "HYBRID_SHARD")
    view = view_plan(plan, 3)
    assert [unit.label for unit in view.units] == ["(root)", "model.layers.[0–2]"]
    assert [numbers_text(column.ranks) for column in view.columns] == ["0, 3, 6", "1, 4, 7", "2, 5, 8"]
    embedding = view.units[0].parameters[0].plan
    assert split_text(embedding, view.grid) == "dim 0: 2 × 23 + 1 × 21"
    columns = dataclasses.replace(embedding, spec=(None, "fsdp"))
    assert split_text(columns, view.grid) == "dim 1: 2 × 11 + 1 × 10"
    held = Cell(((0, 67), (11, 22)), 8, 8, 8, 0)
    assert slice_text(held, columns) == ":, 11:22" and slice_text(held, embedding) == "0:67"
    assert numbers_text(range(8)) == "0–7" and numbers_text([0, 1, 2, 8, 9, 10]) == "0–2, 8–10"
    assert (
        numbers_text(range(0, 512, 8)) == "0, 8 … 504" and numbers_text([5]) == "5" and numbers_text([5, 6]) == "5, 6"
    )


def test_many_ranks_are_folded_in_whole_nodes() -> None:
    view = view_plan(make_plan("full", {"fsdp": 32}), 2)
    assert [numbers_text(column.ranks) for column in view.columns[:2]] == ["0–3", "4–7"] and len(view.columns) == 8
    chosen = view_plan(view.plan, 2, ranks="0-2,31", units="*.1")
    assert [column.ranks for column in chosen.columns] == [(0,), (1,), (2,), (31,)]
    assert [unit.names for unit in chosen.units] == [("model.layers.1",)]


@pytest.mark.parametrize("ranks", ["4", "3-1", "a", "", "0,,1", "-1"])
def test_ranks_that_are_not_there(ranks: str) -> None:
    with pytest.raises(ConfigError, match=r"--ranks .* from 0 to 3"):
        view_plan(make_plan(), ranks=ranks)


def test_units_that_are_not_there() -> None:
    with pytest.raises(ConfigError, match=r"no unit is named 'layers.9'; .* The units are \(root\), model.layers.0"):
        view_plan(make_plan(), units="model.layers.0,layers.9")
