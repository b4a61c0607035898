"""Charts of a sharding plan over one training step: gathered bytes, allocated bytes, memory by part."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from fullshard.config.byte_size import memory_size
from fullshard.report.charts import Bar, Chart, Series, bar_chart, line_chart
from fullshard.report.run_charts import moment_of
from fullshard.report.step_memory import GatheredMoment, StepMemory

LEAST_OF_LIMIT = 0.1
"""The memory of the device is drawn in charts that reach at least this part of it."""
UNITS = {"B": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3, "TiB": 1024**4}


def plan_charts(gathered: Sequence[GatheredMoment], memory: StepMemory) -> list[Chart]:
    """The charts in the order of a page."""
    charts = [_steps(
        "gathered", "Gathered parameters over one step",
        [(f"{one.phase} of {one.unit or 'the root'}", one.bytes, one.phase) for one in gathered],
    )]  # fmt: skip
    if memory.timeline:
        points = [(what, size, moment_of(what) or what) for what, size in memory.timeline]
        limit = _shown_limit(memory, max(size for _, size in memory.timeline))
        beside = f"; {memory_size(memory.reserved)} of it are reserved, beside what is allocated"
        chart = _steps("allocated", "Allocated memory over one step", points, limit)
        charts.append(_with_limit(chart, memory, limit, beside if memory.reserved else ""))
    limit = _shown_limit(memory, memory.peak[1])
    return [*charts, _with_limit(_parts(memory, limit), memory, limit)]


def _shown_limit(memory: StepMemory, most: int) -> int | None:
    """The memory of the device, unless it is so far above what a chart shows that nothing could be seen of that."""
    return memory.limit if memory.limit is not None and most >= LEAST_OF_LIMIT * memory.limit else None


def _steps(id: str, title: str, points: Sequence[tuple[str, int, str]], limit: int | None = None) -> Chart:
    """A line of (what happens, bytes, phase), one after the other."""
    unit, scale = unit_for([*(size for _, size, _ in points), limit or 0])
    phases = [phase for _, _, phase in points]
    # A phase of few moments has no room for its name.
    named = [p for p in dict.fromkeys(phases) if phases.count(p) * 8 >= len(phases)]
    labels = {(phases.index(p) + len(phases) - 1 - phases[::-1].index(p)) / 2: p for p in named}
    line = Series(
        f"{title} ({unit})", [(i, size / scale) for i, (_, size, _) in enumerate(points)],
        labels=[what for what, _, _ in points],
    )  # fmt: skip
    around = (-0.5, len(points) - 0.5)
    chart = line_chart(id, title, [line], x="one step", unit=unit, zero=True, x_labels=labels, x_domain=around)
    most = max(points, key=lambda point: point[1])
    spec: dict[str, Any] = copy.deepcopy(chart.spec)
    for layer in spec["layer"]:
        if layer["mark"]["type"] == "line":
            layer["mark"]["interpolate"] = "step"
    described = f"{title}: at most {memory_size(most[1])}, in {most[0]}."
    return dataclasses.replace(chart, spec=spec, description=described)


def _parts(memory: StepMemory, limit: int | None) -> Chart:
    """Stacked bars: the parts at the peak of each moment."""
    unit, scale = unit_for([sum(parts.values()) for parts in memory.bars.values()] + [limit or 0])
    bars = [Bar(name, {part: size / scale for part, size in parts.items()}) for name, parts in memory.bars.items()]
    chart = bar_chart(
        "memory", "Memory by part, at the peak of each moment", bars, unit=unit, horizontal=True,
        top=(limit or 0) / scale,
    )  # fmt: skip
    rows = [[name, *(memory_size(parts.get(part, 0)) for part in chart.header[1:-1]), memory_size(sum(parts.values()))]
            for name, parts in memory.bars.items()]  # fmt: skip
    moment, peak = memory.peak
    described = f"Memory of a device by part: the peak is {memory_size(peak)}, in {moment}."
    return dataclasses.replace(chart, rows=rows, description=described)


def _with_limit(chart: Chart, memory: StepMemory, limit: int | None, more: str = "") -> Chart:
    """The chart with the memory of the device as a line, if it is shown, and with `more` words about it."""
    if memory.limit is None:
        return chart
    where = "dashed line" if limit is not None else "far above what is drawn"
    words = f"The device has {memory_size(memory.limit)} ({where}){more}."
    chart = dataclasses.replace(chart, notes=(words, *chart.notes), description=f"{chart.description} {words}")
    if limit is None:
        return chart
    spec: dict[str, Any] = copy.deepcopy(chart.spec)
    amount, other = ("y", "x") if spec["encoding"]["y"]["type"] == "quantitative" else ("x", "y")
    scale = UNITS[spec["encoding"][amount]["axis"]["title"]]
    line = {
        "data": {"values": [{"limit": limit / scale}]},
        "mark": {"type": "rule", "strokeDash": [6, 4], "strokeWidth": 2, "color": "var(--bad)", "aria": False},
        "encoding": {other: None, "color": None, amount: {"field": "limit", "type": "quantitative"}},
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
