"""The page of a sharding plan: picture, charts and tables in one self-contained HTML file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.resources import files
from typing import Any

from fullshard.byte_size import memory_size
from fullshard.reporting.page import fact_list, figures, folded, note, page, section, table
from fullshard.reporting.plan_charts import plan_charts
from fullshard.reporting.plan_svg import plan_svg
from fullshard.reporting.plan_view import PlanView
from fullshard.reporting.plan_words import dtype_text, shape_text, spec_text, split_text, summary
from fullshard.reporting.step_memory import GatheredMoment, StepMemory

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
        "Layout": section("layout", "Layout", picture, folded("All parameters", _parameters(view))),
        "One step": section("step", "One step", figures(charts), *map(note, memory.notes)),
    }
    script = files("fullshard.reporting").joinpath("plan.js").read_text(encoding="utf-8")
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
