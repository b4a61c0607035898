"""The charts of runs: curves of one or several runs; memory, communication and data of one."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fullshard.config.byte_size import memory_size
from fullshard.report.charts import Bar, Chart, Marker, Series, bar_chart, line_chart
from fullshard.report.records import is_number
from fullshard.report.run_record import Record, RunRecord
from fullshard.report.vega_lite import VALUES


@dataclass(frozen=True)
class Curve:
    """A chart of metrics over steps."""

    id: str
    title: str
    names: str
    """A regular expression of the metrics in it."""
    unit: str = ""
    zero: bool = False
    form: str = VALUES
    wide: bool = False


CURVES = (
    Curve("loss", "Loss", r"loss|eval_(.+_)?loss", "nats per token", wide=True),
    Curve("learning-rate", "Learning rate", "learning_rate", "", True, ".3~g"),
    Curve("grad-norm", "Gradient norm, before clipping", "grad_norm", "", True),
    Curve("accuracy", "Token accuracy", r"mean_token_accuracy|eval_(.+_)?mean_token_accuracy", "", False, ".3~p"),
    Curve("speed", "Speed", "tokens_per_second", "tokens per second", True, ",.4~s"),
    Curve("memory", "Peak memory so far, on the first rank", "memory_gib", "GiB", True),
    Curve("entropy", "Entropy", r"entropy|eval_(.+_)?entropy"),
    Curve("expert-load", "Busiest expert's tokens ÷ mean, over all layers", "expert_load", "", True),
    Curve("aux-loss", "Router's auxiliary loss", r"aux_loss|eval_(.+_)?aux_loss"),
)
COUNTED = (
    r"expert_load_by_layer|idle_experts(_by_layer)?|step|epoch|num_tokens|num_input_tokens_seen|skipped_steps|total_flos|train_.*|"
    r"(eval|test)_(.+_)?(runtime|samples_per_second|steps_per_second|num_tokens|model_preparation_time)"
)
"""Metrics that only grow, or come once: no charts."""
OTHERS = 12
"""The most charts of metrics that scripts log."""


def metric_charts(runs: Sequence[RunRecord]) -> list[Chart]:
    """The curves of one run, or of several with a color for each run. What no run has is left out."""
    charts = [curve_chart(curve, runs) for curve in CURVES]
    return [chart for chart in charts if chart is not None]


def other_charts(runs: Sequence[RunRecord]) -> list[Chart]:
    """Curves of metrics that a script logs or computes itself."""
    shown_names = "|".join([COUNTED, *(curve.names for curve in CURVES)])
    names = [n for n in dict.fromkeys(n for run in runs for n in run.columns) if not re.fullmatch(shown_names, n)]
    numbers = [n for n in names if any(value is not None for run in runs for _, value in run.series(n))]
    curves = [Curve(f"metric-{i}", name, re.escape(name)) for i, name in enumerate(numbers[:OTHERS], 1)]
    return [chart for curve in curves if (chart := curve_chart(curve, runs)) is not None]


def labels(runs: Sequence[RunRecord]) -> list[str]:
    """A name for each run, all of them different: with as much of its path as tells it apart."""
    names = [run.name for run in runs]
    for parts in range(1, max((len(run.folder.parts) for run in runs), default=0) + 1):
        counts = Counter(names)
        if max(counts.values()) == 1:
            break
        paths = ["/".join(run.folder.parts[-parts:]) for run in runs]
        shown = [
            path if path.endswith(run.name) else f"{run.name} ({path})" for path, run in zip(paths, runs, strict=True)
        ]
        names = [new if counts[name] > 1 else name for name, new in zip(names, shown, strict=True)]
    return names


def curve_chart(
    curve: Curve, runs: Sequence[RunRecord], x: str = "step", positions: Sequence[Callable[[float], float]] = ()
) -> Chart | None:
    """A curve of one run, or of several with a color for each. `positions` says, for each run, where a step lies on
    another axis."""
    series = []
    for number, (label, run) in enumerate(zip(labels(runs), runs, strict=True)):
        for name in sorted(run.matching(curve.names), key=lambda name: name.startswith("eval_")):
            what = _kind(name)
            title = what if len(runs) == 1 else label if what == "training" else f"{label}, {what}"
            color = number if len(runs) > 1 else None
            points = [(positions[number](at), y) for at, y in run.series(name)] if positions else run.series(name)
            dashed = what != "training" and len(runs) > 1
            counts = run.value_counts.get(name, 0), run.gap_counts.get(name, 0)
            series.append(Series(title, points, dashed, color, (), *counts))
    if not any(value is not None for one in series for _, value in one.points):
        return None
    marks = markers(runs[0]) if len(runs) == 1 else ()
    return line_chart(
        curve.id, curve.title, series, x=x, unit=curve.unit, zero=curve.zero, form=curve.form, markers=marks,
        wide=curve.wide, curves=True,
    )  # fmt: skip


def _kind(name: str) -> str:
    """Training, evaluation, or evaluation (data set)."""
    if not name.startswith("eval_"):
        return "training"
    own = name.removeprefix("eval_").removesuffix("loss").removesuffix("mean_token_accuracy").strip("_")
    return f"evaluation ({own})" if own and name.endswith(("loss", "mean_token_accuracy")) else "evaluation"


def markers(run: RunRecord) -> list[Marker]:
    """Checkpoints, and where the run was resumed."""
    saved = {int(event["step"]) for event in run.of_kind("checkpoint")} | set(run.checkpoints)
    resumed = [int(event["step"]) for event in run.of_kind("resume")]
    return [Marker(at, "checkpoint") for at in sorted(saved)] + [Marker(at, "resumed") for at in resumed]


def expert_chart(run: RunRecord) -> Chart | None:
    """How each layer of a mixture used its experts when the run logged last."""
    last: Record = next((record for record in reversed(run.metrics) if "expert_load_by_layer" in record), {})
    loads, idle = (last.get(f"{name}_by_layer") for name in ("expert_load", "idle_experts"))
    if not (isinstance(loads, list) and isinstance(idle, list) and all(map(is_number, [*loads, *idle])) and loads):
        return None
    bars = [Bar(f"{layer}" if not none else f"{layer} ({none} idle)", {"busiest ÷ mean": float(load)})
            for layer, (load, none) in enumerate(zip(loads, idle, strict=False))]  # fmt: skip
    title = f"Busiest expert's tokens ÷ mean, by layer with experts, at step {last['step']}"
    return bar_chart("expert-layers", title, bars, x="layer")


# --- memory ---------------------------------------------------------------------------------------------------------

MOMENTS = ("forward", "loss", "backward", "optimizer step")
"""The moments of a step; loading and saving are planned too."""
ROOT = "(root)"
"""The name of the unit that has none."""
PARTS = (
    "shards", "optimizer", "gradients", "gathered", "activations", "logits", "workspace", "buffers", "communication",
    "other",
)  # fmt: skip
"""The order in which parts are stacked. `other` is what was allocated besides the parts that are known."""


def memory_charts(run: RunRecord) -> list[Chart]:
    """Memory over one step and by part, measured beside planned; what there is of it."""
    planned = (run.plan or {}).get("memory")
    planned = planned if isinstance(planned, dict) else {}
    measured = run.measured or {}
    measured_label = "measured, without activations" if measured.get("counted") is True else "measured"
    timelines = {"planned": _planned_timeline(planned), measured_label: _measured_timeline(measured)}
    highest = max((used for timeline in timelines.values() for _, _, used in timeline), default=0.0)
    size, unit = byte_unit(highest)
    lines = [
        Series(name, _placed(line, size), name == "planned", color, [label for _, label, _ in line])
        for color, (name, line) in enumerate(timelines.items())
    ]
    peak, charts = run.last("memory_gib"), []
    if measured.get("counted") is False and peak is not None:
        lines.append(
            Series("measured peak of the run", [(at, peak * 2**30 / size) for at in (0, len(MOMENTS))], color=7)
        )
    if highest:
        ticks = {i + 0.5: name for i, name in enumerate(MOMENTS)}
        charts.append(
            line_chart("memory-step", "Memory over one step", lines, x="moment", unit=unit, zero=True, x_labels=ticks)
        )
    bars = _part_bars(_planned_parts(planned), _measured_parts(measured), size)
    if bars:
        charts.append(
            bar_chart("memory-parts", "Memory by part, at its peak", bars, unit=unit, horizontal=True, order=PARTS)
        )
    return charts


def byte_unit(most: float) -> tuple[float, str]:
    """The unit that suits this many bytes, with its size."""
    for power, name in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if most >= 1024**power:
            return float(1024**power), name
    return 1.0, "bytes"


TEXTS = ("moment", "unit", "operation")
"""What names the entries of a measured timeline."""
Timeline = list[tuple[str, str, float]]
"""Moment, label and bytes along a step."""


def _planned_timeline(memory: Record) -> Timeline:
    timeline, points = memory.get("timeline"), []
    for entry in timeline if isinstance(timeline, list) else []:
        if isinstance(entry, list) and len(entry) == 2 and is_number(entry[1]):
            label = str(entry[0])
            moment = moment_of(label)
            points += [(moment, label, float(entry[1]))] if moment else []
    return points


def moment_of(label: str) -> str | None:
    """The moment that an entry of a planned timeline belongs to."""
    return next((one for one in MOMENTS if label.startswith(one) or label.endswith(f"of {one}")), None)


def _measured_rows(measured: Record) -> list[tuple[str, str, dict[str, float]]]:
    """Moment, label, and bytes by part, along the measured step."""
    timeline = measured.get("timeline")
    columns = timeline if isinstance(timeline, dict) else {}
    moments, *names = ([] if not isinstance(columns.get(name), list) else columns[name] for name in TEXTS)
    parts = {name: column for name, column in columns.items() if name in PARTS and isinstance(column, list)}
    rows = []
    for i, moment in enumerate(moments):
        unit, operation = (str(column[i]) if i < len(column) else "" for column in names)
        if moment in MOMENTS:
            row = {name: column[i] for name, column in parts.items() if i < len(column) and is_number(column[i])}
            label = moment if operation in ("", moment) else f"{moment}: {operation}"
            rows.append((str(moment), f"{label} {unit or ROOT}".strip(), row))
    return rows


def _measured_timeline(measured: Record) -> Timeline:
    return [(moment, label, float(sum(row.values()))) for moment, label, row in _measured_rows(measured)]


def _placed(timeline: Timeline, size: float) -> list[tuple[float, float | None]]:
    """The points of a timeline: each moment is one unit wide, and its points are evenly spaced in it."""
    counts = Counter(moment for moment, _, _ in timeline)
    placed: Counter[str] = Counter()
    points: list[tuple[float, float | None]] = []
    for moment, _, used in timeline:
        points.append((MOMENTS.index(moment) + (placed[moment] + 0.5) / counts[moment], used / size))
        placed[moment] += 1
    return points


def _planned_parts(memory: Record) -> dict[str, Mapping[str, float]]:
    moments = memory.get("moments")
    return {
        name: {part: float(size) for part, size in parts.items() if is_number(size) and size}
        for name, parts in (moments.items() if isinstance(moments, dict) else ())
        if isinstance(parts, dict)
    }


def _measured_parts(measured: Record) -> dict[str, Mapping[str, float]]:
    """The parts of each moment, at its peak."""
    peaks: dict[str, dict[str, float]] = {}
    for moment, _, row in _measured_rows(measured):
        if sum(row.values()) > sum(peaks.get(moment, {}).values()):
            peaks[moment] = row
    return dict(peaks)


def _part_bars(planned: Mapping[str, Any], measured: Mapping[str, Any], size: float) -> list[Bar]:
    def scaled(parts: Mapping[str, float]) -> dict[str, float]:
        return {name: used / size for name, used in parts.items() if used}

    bars = []
    for moment in ("load", *MOMENTS, "evaluation", "save"):
        for what, parts_by_moment in (("planned", planned), ("measured", measured)):
            if moment in parts_by_moment:
                bars.append(Bar(f"{moment}, {what}", scaled(parts_by_moment[moment])))
    return bars


# --- communication and data -----------------------------------------------------------------------------------------


def communication_chart(run: RunRecord) -> Chart | None:
    """Bytes that one rank sent in the measured step, by unit; ticks mark what was planned."""
    units = unit_traffic(run)
    size, unit = byte_unit(max((sum(parts.values()) for parts in units.values()), default=0.0))
    short, planned = _short(list(units)), _planned_traffic(run).get("units")
    planned = {name or ROOT: sent for name, sent in planned.items()} if isinstance(planned, dict) else {}
    bars = [
        Bar(
            short[name],
            {part: sent / size for part, sent in parts.items()},
            planned[name] / size if is_number(planned.get(name)) else None,
        )
        for name, parts in units.items()
    ]
    if not any(bar.parts for bar in bars):
        return None
    title = "Sent by the first rank in one step, by unit"
    return bar_chart("communication-units", title, bars, unit=unit, x="unit", target="planned")


def _planned_traffic(run: RunRecord) -> Record:
    traffic = (run.plan or {}).get("traffic")
    return traffic if isinstance(traffic, dict) else {}


def unit_traffic(run: RunRecord) -> dict[str, dict[str, float]]:
    """By unit, the bytes that the first rank sent to gather parameters and to reduce gradients in the measured step."""
    units = (run.measured or {}).get("units")
    by_unit = (
        {str(name): one for name, one in units.items() if isinstance(one, dict)} if isinstance(units, dict) else {}
    )
    return {
        name or ROOT: {part: float(counts[key]) for part, key in SENT.items() if is_number(counts.get(key))}
        for name, counts in by_unit.items()
    }


def traffic_rows(run: RunRecord) -> list[list[Any]]:
    """What the first rank sent in the measured step, beside the plan: rows of (what, measured, planned)."""
    units, plan = unit_traffic(run), _planned_traffic(run)
    planned: Counter[str] = Counter()
    for place in ("inside", "across"):
        kinds = plan.get(place)
        for kind, sent in kinds.items() if isinstance(kinds, dict) else ():
            what = "gathered parameters" if str(kind).startswith("gather") else PLANNED.get(str(kind))
            planned[what or "metrics and clipping"] += int(sent) if is_number(sent) else 0
    measured = {part: sum(one.get(part, 0.0) for one in units.values()) for part in SENT} if units else {}
    if not measured.get(TO_EXPERTS):
        measured.pop(TO_EXPERTS, None)  # few models have experts
    rows = [[part, measured.get(part), planned.get(part)] for part in dict.fromkeys([*measured, *planned])]
    return [[part, *("" if sent is None else memory_size(int(sent)) for sent in numbers)] for part, *numbers in rows]


def _short(names: Sequence[str]) -> dict[str, str]:
    """Names of units without the beginning that they share, but its last part."""
    parts = [name.split(".") for name in names if name != ROOT]
    shared = 0
    while len({tuple(one[: shared + 1]) for one in parts}) == 1 and all(len(one) > shared + 1 for one in parts):
        shared += 1
    return {name: ".".join(name.split(".")[max(0, shared - 1) :]) if name != ROOT else name for name in names}


TO_EXPERTS = "tokens to experts"
SENT = {"gathered parameters": "gather_sent", "reduced gradients": "reduce_sent", TO_EXPERTS: "tokens_sent"}
"""What is sent, and its counter in the measured step."""
PLANNED = {
    **dict.fromkeys(("reduce", "flags", "replica all-reduce"), "reduced gradients"),
    TO_EXPERTS: TO_EXPERTS,
}
"""Kinds of planned traffic that belong together."""


def length_chart(data: Record, number: int) -> Chart | None:
    """How long the rows of a data set are."""
    lengths = data.get("row_lengths")
    edges, counts = (lengths.get(key) for key in ("edges", "rows")) if isinstance(lengths, dict) else (None, None)
    if not (isinstance(edges, list) and isinstance(counts, list) and len(edges) == len(counts) + 1 and counts):
        return None
    bars = [
        Bar(f"{low:,}" if high - low <= 1 else f"{low:,}–{high - 1:,}", {"rows": float(count)})
        for low, high, count in zip(edges, edges[1:], counts, strict=False)
    ]
    return bar_chart(
        f"lengths-{number}", f"Row lengths, {data.get('name', '')} data", bars, unit="rows", x="tokens", form=",~r"
    )
