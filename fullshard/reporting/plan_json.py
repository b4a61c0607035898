"""What the pictures of a sharding plan show, as plain data for other programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from fullshard.reporting.plan_view import ParameterRow, PlanView, UnitRow
from fullshard.reporting.step_memory import GatheredMoment, StepMemory


def plan_facts(title: str, view: PlanView, gathered: Sequence[GatheredMoment], memory: StepMemory) -> dict[str, Any]:
    """The plan with its rows and columns, folded as in the picture. Sizes are bytes."""
    plan, grid = view.plan, view.grid
    return {
        "title": title,
        "strategy": plan.strategy,
        "mesh": {
            "axes": dict(plan.axes),
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
