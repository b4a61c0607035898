"""Several runs on one page: their curves in one chart each, their results in one table, the settings that differ."""

from __future__ import annotations

import bisect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import Any

from fullshard.report.charts import Chart
from fullshard.report.page import Contents, escape, figures, folded, note, section, table
from fullshard.report.records import is_number
from fullshard.report.run_charts import CURVES, curve_chart, labels, metric_charts, other_charts
from fullshard.report.run_record import RunRecord
from fullshard.report.run_summary import summary_of
from fullshard.sft.output_dir import HARMLESS, lock_owner

ABSENT = object()
"""The value of a setting that a run has not recorded."""


class RunState(Enum):
    """What a run is doing."""

    RUNNING = "running"
    FINISHED = "finished"
    ENDED = "ended early"


def state_of(run: RunRecord) -> RunState:
    """The state of a run. A run that is going on holds the lock of its folder, which the system releases however the
    process ends; where the file system has no locks, it seems to have ended early."""
    if lock_owner(run.folder) is not None:
        return RunState.RUNNING
    return RunState.FINISHED if run.has_finished else RunState.ENDED


def comparison(runs: Sequence[RunRecord]) -> Contents:
    """The page that compares runs."""
    names = labels(runs)
    by_step = metric_charts(runs)
    losses = [chart for chart in by_step if chart.id == "loss"] + loss_by(runs)
    curves = [chart for chart in by_step if chart.id != "loss"] + other_charts(runs)
    missing = [
        note(f"{name}: {sentence}", bad=True) for name, run in zip(names, runs, strict=True) for sentence in run.missing
    ]
    sections = {
        "Results": section("results", "Results", _results(runs, names), *missing),
        "Loss": section("losses", "Loss", figures(losses)),
        "Settings": section("settings", "Settings that differ", _settings(runs, names)),
        "Curves": section("curves", "Other curves", figures(curves)),
        "Answers": section("answers", "Last answers", *_answers(runs, names)),
    }
    return Contents(f"{len(runs)} runs compared", sections, [*losses, *curves])


def numbers(run: RunRecord) -> dict[str, Any]:
    """The results of a run as numbers."""
    seconds, evaluations = run.training_seconds[-1][1], run.series("eval_loss")
    losses = [value for _, value in evaluations if value is not None]
    return {
        "folder": str(run.folder), "name": run.name, "state": state_of(run).value,
        "steps": run.last_step, "total_steps": run.total_steps, "tokens": run.last("num_tokens"),
        "training_seconds": seconds or None, "loss": run.last("loss"), "train_loss": run.last("train_loss"),
        "mean_token_accuracy": run.last("mean_token_accuracy"), "eval_loss": run.last("eval_loss"),
        "best_eval_loss": min(losses, default=None), "eval_mean_token_accuracy": run.last("eval_mean_token_accuracy"),
        "tokens_per_second": run.speed, "memory_gib": run.last("memory_gib"),
        "missing": list(run.missing),
    }  # fmt: skip


# --- loss over tokens and time --------------------------------------------------------------------------------------

UNITS = ((3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))


def loss_by(runs: Sequence[RunRecord]) -> list[Chart]:
    """The losses over trained tokens and over training time, which compare runs with different batches."""
    curve = replace(next(one for one in CURVES if one.id == "loss"), wide=False)
    tokens = [_tokens(run) for run in runs]
    times = [run.training_seconds for run in runs]
    longest = max((time[-1][1] for time in times), default=0.0)
    size, unit = next(((size, unit) for size, unit in UNITS if longest >= 3 * size), UNITS[-1])
    charts = (
        _loss_over(runs, replace(curve, id="loss-tokens", title="Loss by tokens"), tokens, "tokens", 1.0),
        _loss_over(runs, replace(curve, id="loss-time", title="Loss by training time"), times, unit, size),
    )
    return [chart for chart in charts if chart is not None]


def _loss_over(
    runs: Sequence[RunRecord], curve: Any, places: Sequence[list[tuple[float, float]]], unit: str, size: float
) -> Chart | None:
    positions = [position(points, size) for points in places]
    drawn = [run if len(points) > 1 else replace(run, metrics=()) for run, points in zip(runs, places, strict=True)]
    return curve_chart(curve, drawn, unit, positions)


def _tokens(run: RunRecord) -> list[tuple[float, float]]:
    points = [(one["step"], one["num_tokens"]) for one in run.metrics if is_number(one.get("num_tokens"))]
    return [(0.0, 0.0), *points]


def position(points: Sequence[tuple[float, float]], size: float = 1.0) -> Callable[[float], float]:
    """Where a step lies on another axis, between the points (step, place) that are known."""
    steps = [step for step, _ in points]

    def at(step: float) -> float:
        i = bisect.bisect_left(steps, step)
        if i == 0 or i == len(points):
            return points[min(i, len(points) - 1)][1] / size
        (before, low), (after, high) = points[i - 1], points[i]
        return (low + (high - low) * (step - before) / (after - before)) / size

    return at


# --- tables ---------------------------------------------------------------------------------------------------------


def _results(runs: Sequence[RunRecord], names: Sequence[str]) -> str:
    summaries = [{**summary_of(run), "Status": state_of(run).value} for run in runs]
    rows = [[title, *("" if one[title] is None else one[title] for one in summaries)] for title in summaries[0]]
    return table(("", *names), [row for row in rows if any(row[1:])], "Results")


def different_settings(runs: Sequence[RunRecord]) -> dict[str, list[Any]]:
    """The settings with different values, in the runs that have recorded them; `ABSENT` in the others."""
    differing = {}
    for name in dict.fromkeys(name for run in runs for name in run.settings):
        values = [run.settings.get(name, ABSENT) for run in runs]
        if len({json.dumps(value, sort_keys=True, default=str) for value in values if value is not ABSENT}) > 1:
            differing[name] = values
    return differing


def _settings(runs: Sequence[RunRecord], names: Sequence[str]) -> str:
    differing = different_settings(runs)
    around = {**_differences([run.about.get("versions") for run in runs]), **_differences([{
        "ranks": run.about.get("ranks"), "hardware": run.about.get("hardware"), **_flat(run.about.get("engine")),
    } for run in runs])}  # fmt: skip
    training = {name: values for name, values in differing.items() if name not in HARMLESS}
    rest = {name: values for name, values in differing.items() if name in HARMLESS}
    header = ("setting", *names)
    parts = [table(header, _rows(training), "Settings that differ") if training else ""]
    if not training:
        parts = [note("All settings that change training are the same.")]
    if around:
        parts.append("<h3>Machine and versions</h3>" + table(header, _rows(around), "Machine and versions"))
    if rest:
        parts.append(folded("Settings that do not change training", table(header, _rows(rest), "Other settings")))
    if len(with_settings := [name for name, run in zip(names, runs, strict=True) if run.settings]) < len(runs):
        parts.append(note(f"Only known for {', '.join(with_settings) or 'no run'}."))
    return "".join(parts)


def _flat(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, dict) else {}


def _differences(values: Sequence[Any]) -> dict[str, list[Any]]:
    facts = [_flat(one) for one in values]
    names = dict.fromkeys(name for one in facts for name in one)
    rows = {name: [one.get(name, ABSENT) for one in facts] for name in names}
    return {name: row for name, row in rows.items() if len({str(value) for value in row if value is not ABSENT}) > 1}


def _rows(by_name: Mapping[str, Sequence[Any]]) -> list[list[Any]]:
    return [[name, *("–" if value is ABSENT else value for value in values)] for name, values in by_name.items()]


def _answers(runs: Sequence[RunRecord], names: Sequence[str]) -> list[str]:
    """The last answer of each run to the prompts that several of them have answered."""
    answers: dict[str, dict[str, str]] = {}
    for name, run in zip(names, runs, strict=True):
        for sample in run.samples:
            answers.setdefault(sample["prompt"], {})[name] = sample["answer"]
    return [
        f'<article class="sample"><h3>Prompt</h3><pre dir="auto">{escape(prompt)}</pre><div class="answers">'
        + "".join(
            f'<div><h4>{escape(name)}</h4><pre dir="auto">{escape(text) or "(nothing)"}</pre></div>'
            for name, text in by_run.items()
        )
        + "</div></article>"
        for prompt, by_run in answers.items()
        if len(by_run) > 1
    ]
