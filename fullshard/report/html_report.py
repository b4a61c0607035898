"""The HTML report of a run: one self-contained page, made from what the run's folder holds (`run_record.py`)."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

from fullshard.config.paths import replace_text
from fullshard.report.charts import evenly_spaced
from fullshard.report.page import Contents, closed_part, escape, fact_list, figures, note, section, table, whole_page
from fullshard.report.records import METRICS_FILE
from fullshard.report.run_charts import (
    communication_chart,
    expert_chart,
    length_chart,
    memory_charts,
    metric_charts,
    other_charts,
    traffic_rows,
)
from fullshard.report.run_record import Record, RunRecord, read_run
from fullshard.report.run_summary import summary_of, title_of

BETWEEN = 20
"""The most answers to a prompt between its first and its last."""
EVENTS = 500
"""The most warnings and notes, the newest ones."""


def write_report(run: Path, target: Path) -> None:
    """Write the report of the run in a folder to a file."""
    replace_text(target, render(read_run(run)))


def render(record: RunRecord) -> str:
    """The page of a run."""
    return whole_page(contents(record))


def contents(record: RunRecord) -> Contents:
    """What the page of a run shows."""
    curves, others, memory = metric_charts([record]), other_charts([record]), memory_charts(record)
    curves += [chart for chart in [expert_chart(record)] if chart is not None]
    traffic = communication_chart(record)
    lengths = [chart for i, one in enumerate(record.data, 1) if (chart := length_chart(one, i)) is not None]
    sections = {
        "Summary": section("summary", "Summary", fact_list("summary-facts", summary_of(record)), *_missing(record)),
        "Curves": section("curves", "Curves", figures(curves), _values(record)),
        "Other metrics": section("other-metrics", "Other metrics", figures(others)),
        "Answers": section("answers", "Answers", *_answers(record)),
        "Memory": section("memory-section", "Memory of one step", figures(memory), *_memory_notes(record)),
        "Communication": section("communication", "Communication of one step", *_traffic(record, traffic)),
        "Data": section("data", "Data", *_data(record), figures(lengths)),
        "Settings": section("settings", "Settings", _settings(record)),
        "Warnings": section("warnings", "Warnings and notes", _events(record)),
        "Versions": section("versions", "Versions", _versions(record)),
    }
    charts = [*curves, *others, *memory, *([traffic] if traffic else []), *lengths]
    title = title_of(record)
    lead = f'<p class="muted">{escape(record.name)}</p>' if title != record.name else ""
    return Contents(title, sections, charts, lead, data={"metrics": record.columns})


def _missing(run: RunRecord) -> list[str]:
    return [note(text, bad=True) for text in run.missing]


def _values(run: RunRecord) -> str:
    if not run.metrics:
        return note(f"There are no curves: {METRICS_FILE} has no values.")
    lines = f"All {run.line_count:,} lines of {METRICS_FILE} are in this file."
    if len(run.metrics) < run.line_count:
        lines = (
            f"{len(run.metrics):,} of {run.line_count:,} lines of {METRICS_FILE} are in this file: of each stretch "
            f"those with the first, last, lowest and highest value of each metric, and the newest."
        )
    return f'<p class="note">{lines} <button type="button" data-csv="metrics" hidden>Save as CSV</button></p>'


# --- answers --------------------------------------------------------------------------------------------------------


def _answers(run: RunRecord) -> list[str]:
    """Each prompt with the first and the last answer side by side, and those between folded."""
    by_prompt: dict[str, list[Record]] = {}
    for sample in run.samples:
        by_prompt.setdefault(sample["prompt"], []).append(sample)
    return [_prompt(prompt, answers) for prompt, answers in by_prompt.items()]


def _prompt(prompt: str, answers: list[Record]) -> str:
    first = "before" if answers[0]["step"] == 0 else "first"
    shown = [(first, answers[0]), *([("after", answers[-1])] if len(answers) > 1 else [])]
    columns = [(f"{name}, step {one['step']:,}", one["answer"]) for name, one in shown]
    reference = answers[-1].get("reference")
    columns += [("reference, from the data", reference)] if isinstance(reference, str) else []
    chosen = evenly_spaced(answers[1:-1], BETWEEN)
    between = "".join(_answer(f"step {one['step']:,}", one["answer"]) for one in chosen)
    few = f"{len(chosen):,} of {len(answers) - 2:,}" if len(chosen) < len(answers) - 2 else f"{len(answers) - 2:,}"
    return (
        f'<article class="sample"><h3>Prompt</h3><pre dir="auto">{escape(prompt)}</pre>'
        f'<div class="answers">{"".join(_answer(name, text) for name, text in columns)}</div>'
        + (closed_part(f"Between them: {few}", f'<div class="answers">{between}</div>') if between else "")
        + "</article>"
    )


def _answer(name: str, text: str) -> str:
    return f'<div><h4>{escape(name)}</h4><pre dir="auto">{escape(text.strip()) or "(nothing)"}</pre></div>'


# --- one step -------------------------------------------------------------------------------------------------------


def _memory_notes(run: RunRecord) -> list[str]:
    measured, notes = run.measured or {}, []
    if measured.get("counted") is True:
        notes.append(
            "Measured on CPUs: parameters, gradients and optimizer state are counted; torch does not report what "
            "activations take there."
        )
    if measured.get("timeline"):
        notes.append(
            f"Measured at step {measured.get('step')}, on the first rank, at the boundaries of units; in between it "
            "may be more, up to the peak of the run."
        )
    if measured:
        planned = (
            "Planned: the most in each part of the step, for the largest batch of the run."
            if run.plan is not None
            else "There is no plan.json."
        )
        notes.append(planned)
    return [note(text) for text in notes]


def _traffic(run: RunRecord, chart: Any) -> list[str]:
    rows = traffic_rows(run)
    if run.about.get("ranks") == 1 and run.measured:
        return [note("One rank: nothing was sent.")]
    listed = table(("sent by one rank", "measured", "planned"), rows, "Bytes sent in one step") if rows else ""
    return [figures([chart]) if chart is not None else "", listed]


# --- data -----------------------------------------------------------------------------------------------------------

COUNTS = {
    "documents": "documents", "rows": "rows", "tokens": "tokens", "targets": "trained tokens", "fill": "rows full",
    "row_length": "row length", "long": "too long", "cut": "tokens cut", "dropped": "dropped", "empty": "empty",
    "bad": "unusable", "masked": "without trained tokens",
}  # fmt: skip
"""The rows of the table of data sets."""


def _data(run: RunRecord) -> list[str]:
    if not run.data:
        return []
    there = {name: title for name, title in COUNTS.items() if any(one.get(name) is not None for one in run.data)}
    rows = [[title, *(_count(one, name) for one in run.data)] for name, title in there.items()]
    rejected = [f"{one.get('name')}: {text}" for one in run.data for text in one.get("bad_rows") or ()]
    sources = [(one.get("name"), one.get("source")) for one in run.data if one.get("source")]
    return [
        table(("", *(str(one.get("name", "")) for one in run.data)), rows, "Data sets"),
        fact_list("data-sources", {f"{name} data": source for name, source in sources}),
        closed_part("Rows that were left out", "".join(map(note, rejected))) if rejected else "",
    ]


def _count(data: Record, name: str) -> Any:
    value = data.get(name)
    return "" if value is None else f"{value:.1%}" if name == "fill" and isinstance(value, float) else value


# --- settings, events, versions -------------------------------------------------------------------------------------


def _settings(run: RunRecord) -> str:
    if run.changed is None:
        return closed_part("All settings", _pairs(run.settings, "Settings")) if run.settings else ""
    if not run.changed:
        return note("All settings have their default values.")
    rest = {name: value for name, value in run.settings.items() if name not in run.changed}
    changed = _pairs(run.changed, "Settings that differ from their defaults")
    if not rest:
        return changed
    return changed + closed_part(
        f"{len(rest):,} settings at their defaults", _pairs(rest, "Settings at their defaults")
    )


def _pairs(values: Record, label: str) -> str:
    return table(("setting", "value"), values.items(), label)


def _events(run: RunRecord) -> str:
    notes = run.about.get("notes")
    rows = [("", "", "note", text) for text in (notes if isinstance(notes, list) else [])]
    rows += [
        (_clock(event.get("time")), event["step"], event.get("kind", ""), event.get("text", ""))
        for event in run.events
        if event.get("kind") != "checkpoint"
    ]
    few = f"The newest {EVENTS:,} of {len(rows):,} are listed." if len(rows) > EVENTS else ""
    listed = table(("time", "step", "what", "text"), rows[-EVENTS:], "Warnings and notes") if rows else ""
    return (note(few) if few else "") + listed


def _clock(time: Any) -> str:
    try:
        return f"{datetime.fromtimestamp(time):%Y-%m-%d %H:%M:%S}"
    except (TypeError, ValueError, OverflowError, OSError):
        return ""


def _versions(run: RunRecord) -> str:
    versions = run.about.get("versions")
    if not isinstance(versions, dict) or not versions:
        return ""
    names = ", ".join(f"{name} {version}" for name, version in versions.items())
    return closed_part("Versions of libraries", f"<p>{escape(names)}</p>", prints=True)
