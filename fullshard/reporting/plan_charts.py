"""Charts of a sharding plan over one training step: gathered bytes, allocated bytes, memory by part."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from fullshard.byte_size import memory_size
from fullshard.reporting.charts import Bar, Chart, Series, bar_chart, line_chart
from fullshard.reporting.step_memory import GatheredMoment, StepMemory

UNITS = {"B": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3, "TiB": 1024**4}


def plan_charts(gathered: Sequence[GatheredMoment], memory: StepMemory) -> list[Chart]:
    """The charts in the order of a page."""
    charts = [_steps(
        "gathered", "Gathered parameters over one step",
        [(f"{one.phase} of {one.unit or 'the root'}", one.bytes, one.phase) for one in gathered],
    )]  # fmt: skip
    if memory.timeline:
        points = [(what, size, what.split(" ")[0]) for what, size in memory.timeline]
        beside = f"; {memory_size(memory.reserved)} of it are reserved, beside what is allocated"
        chart = _steps("allocated", "Allocated memory over one step", points)
        charts.append(_with_limit(chart, memory.limit, beside if memory.reserved else ""))
    return [*charts, _with_limit(_parts(memory), memory.limit)]


def _steps(id: str, title: str, points: Sequence[tuple[str, int, str]]) -> Chart:
    """A line of (what happens, bytes, phase), one after the other."""
    unit, scale = unit_for(size for _, size, _ in points)
    phases = [phase for _, _, phase in points]
    # A phase of few moments has no room for its name.
    labels: dict[float, str] = {phases.index(p): p for p in dict.fromkeys(phases) if phases.count(p) * 8 >= len(phases)}
    line = Series(
        f"{title} ({unit})", [(i, size / scale) for i, (_, size, _) in enumerate(points)],
        labels=[what for what, _, _ in points],
    )  # fmt: skip
    chart = line_chart(id, title, [line], x="one step", unit=unit, zero=True, x_labels=labels)
    most = max(points, key=lambda point: point[1])
    spec: dict[str, Any] = copy.deepcopy(chart.spec)
    for layer in spec["layer"]:
        if layer["mark"]["type"] == "line":
            layer["mark"]["interpolate"] = "step"
    described = f"{title}: at most {memory_size(most[1])}, in {most[0]}."
    return dataclasses.replace(chart, spec=spec, description=described)


def _parts(memory: StepMemory) -> Chart:
    """Stacked bars: the parts at the peak of each moment."""
    unit, scale = unit_for([sum(parts.values()) for parts in memory.bars.values()] + [memory.limit or 0])
    bars = [Bar(name, {part: size / scale for part, size in parts.items()}) for name, parts in memory.bars.items()]
    chart = bar_chart("memory", "Memory by part, at the peak of each moment", bars, unit=unit)
    names = chart.names
    rows = [[name, *(memory_size(parts.get(part, 0)) for part in names), memory_size(sum(parts.values()))]
            for name, parts in memory.bars.items()]  # fmt: skip
    moment, peak = memory.peak
    described = f"Memory of a device by part: the peak is {memory_size(peak)}, in {moment}."
    spec: dict[str, Any] = copy.deepcopy(chart.spec)
    spec["encoding"]["x"]["axis"]["labelExpr"] = "split(datum.label, ' ')"  # a line for each word
    return dataclasses.replace(chart, rows=rows, spec=spec, description=described)


def _with_limit(chart: Chart, limit: int | None, more: str = "") -> Chart:
    """The chart with the memory of the device as a line, and with `more` words about it."""
    if limit is None:
        return chart
    words = f"The device has {memory_size(limit)} (dashed line){more}."
    chart = dataclasses.replace(chart, notes=(*chart.notes, words), description=f"{chart.description} {words}")
    spec: dict[str, Any] = copy.deepcopy(chart.spec)
    scale = UNITS[spec["encoding"]["y"]["axis"]["title"]]
    line = {
        "data": {"values": [{"limit": limit / scale}]},
        "mark": {"type": "rule", "strokeDash": [6, 4], "strokeWidth": 2, "color": "var(--bad)", "aria": False},
        "encoding": {"x": None, "color": None, "y": {"field": "limit", "type": "quantitative"}},
    }
    if "layer" in spec:
        spec["layer"].append(line)
    else:
        spec["layer"] = [{"mark": spec.pop("mark"), "encoding": spec.pop("encoding")}, line]
    return dataclasses.replace(chart, spec=spec)


def unit_for(sizes: Iterable[int]) -> tuple[str, int]:
    """The unit in which the largest of some sizes is a small number, and its bytes."""
    most = max(sizes, default=0)
    return next(((unit, scale) for unit, scale in reversed(UNITS.items()) if most >= scale), ("B", 1))


def chart_svg(chart: Chart, width: float, height: float) -> str | None:
    """A chart as a picture that stands still; None where the charting library is missing."""
    try:
        import vl_convert
    except ImportError:
        return None
    names = list(chart.columns)
    values = [dict(zip(names, row, strict=True)) for row in zip(*chart.columns.values(), strict=True)]
    spec = {**chart.spec, "width": width, "height": height, "autosize": {"type": "fit", "contains": "padding"}}
    if "layer" in spec:  # without what only answers to the pointer
        spec["layer"] = [layer for layer in spec["layer"] if "params" not in layer]
    return str(vl_convert.vegalite_to_svg({**spec, "data": {"name": "values", "values": values}}))
