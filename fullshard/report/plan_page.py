"""The page of a sharding plan: picture, charts and tables in one self-contained HTML file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.resources import files
from typing import Any

from fullshard.config.byte_size import memory_size
from fullshard.report.page import closed_part, fact_list, figures, note, page, section, table
from fullshard.report.plan_charts import plan_charts
from fullshard.report.plan_svg import plan_svg
from fullshard.report.plan_view import ParameterRow, PlanView, UnitRow
from fullshard.report.plan_words import dtype_text, shape_text, spec_text, split_text, summary
from fullshard.report.step_memory import GatheredMoment, StepMemory


def plan_facts(title: str, view: PlanView, gathered: Sequence[GatheredMoment], memory: StepMemory) -> dict[str, Any]:
    """The plan with its rows and columns, folded as in the picture. Sizes are bytes."""
    plan, grid = view.plan, view.grid
    return {
        "title": title,
        "strategy": plan.strategy,
        "mesh": {
            "axes": dict(plan.axes),
            "expert_axes": dict(plan.expert_axes),
            "ranks": grid.world,
            "ranks_per_node": grid.ranks_per_node,
            "split_axes": list(grid.split_axes),
            "copy_axes": list(grid.copy_axes),
            "replica_axes": list(plan.replica_axes),
        },
        "shard_bytes": plan.shard_bytes,
        "host_bytes": plan.host_bytes,
        "columns": [
            {"ranks": list(column.ranks), "bytes": size, "most": view.most_in(column)}
            for column, size in zip(view.columns, view.column_bytes, strict=True)
        ],
        "units": [_unit(unit) for unit in view.units],
        "gathered": [asdict(moment) for moment in gathered],
        "memory": {**asdict(memory), "peak_moment": memory.peak[0], "peak": memory.peak[1]},
    }


def _unit(unit: UnitRow) -> dict[str, Any]:
    plan = unit.plan
    return {
        "label": unit.label,
        "names": list(unit.names),
        "count": unit.count,
        "class": plan.module,
        "shard_bytes": plan.shard_bytes,
        "gathered_bytes": plan.gathered_bytes,
        "gather_bucket_bytes": plan.gather_bucket.length if plan.gather_bucket else 0,
        "parameters": [_parameter(row) for row in unit.parameters],
    }


def _parameter(row: ParameterRow) -> dict[str, Any]:
    return {
        "label": row.label,
        "count": row.count,
        "shard_bytes": row.shard_bytes,
        "gathered_bytes": row.gathered_bytes,
        "notes": list(row.notes),
        "parts": [{**asdict(p), "padding": p.padding} for p in row.parts],
        "cells": [asdict(cell) for cell in row.cells],
    }


STYLE = (
    "<style>.picture{overflow-x:auto}.picture svg{display:block;min-width:60rem;max-width:100%;height:auto}"
    "@media print{.picture svg{min-width:0}}</style>"
)
HEADER = ("unit", "units", "parameter", "parameters", "shape", "dtype", "spec", "split", "bytes per rank", "notes")


def plan_page(title: str, view: PlanView, gathered: Sequence[GatheredMoment], memory: StepMemory) -> str:
    """The whole page."""
    charts = plan_charts(gathered, memory)
    picture = f'{STYLE}<div class="picture">{plan_svg(view, title, alone=False)}</div>'
    sections = {
        "Layout": section("layout", "Layout", picture, closed_part("All parameters", _parameters(view))),
        "One step": section("step", "One step", figures(charts), *map(note, memory.notes)),
    }
    script = files("fullshard.report").joinpath("plan.js").read_text(encoding="utf-8")
    return page(title, sections, charts, lead=fact_list("summary", facts(view, memory)), scripts=[script])


def facts(view: PlanView, memory: StepMemory) -> dict[str, Any]:
    """The plan in a few words."""
    where, what = summary(view)
    moment, peak = memory.peak
    limit = f" of {memory_size(memory.limit)}" if memory.limit is not None else ""
    return {
        "mesh": where, "model": what, "memory of a device": f"{memory_size(peak)}{limit}, in {moment}",
        "host memory of a node": memory.host_words or None,
    }  # fmt: skip


def _parameters(view: PlanView) -> str:
    return table(HEADER, _rows(view), "All parameters")


def _rows(view: PlanView) -> Iterator[list[Any]]:
    for unit in view.units:
        for row in unit.parameters:
            p = row.plan
            yield [
                unit.label, unit.count, row.label, row.count, shape_text(p.shape), dtype_text(p), spec_text(p),
                split_text(p, view.grid), row.shard_bytes, ", ".join(row.notes),
            ]  # fmt: skip
