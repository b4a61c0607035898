"""The report of a run: its numbers are those of the run's files, text stays text, and what is missing is named."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fullshard.config.errors import ConfigError
from fullshard.report import page as pages
from fullshard.report.charts import DRAWN, LISTED, MARKED, PACKAGE
from fullshard.report.html_report import contents, render, write_report
from fullshard.report.records import LONG, RECENT
from fullshard.report.run_charts import communication_chart, memory_charts, metric_charts, traffic_rows
from fullshard.report.run_record import RunReader, read_run
from fullshard.report.run_summary import seconds, status, summary_of, title_of
from tests.report.synthetic_runs import HOSTILE, full_run, hostile_run, synthetic_metrics, synthetic_run, write_lines

FILES = ("settings.json", "metrics.jsonl", "samples.jsonl", "events.jsonl", "data.json", "step.json", "plan.json")


class Parsed(HTMLParser):
    """A page as a browser reads it: elements with attributes, the text of each script, and all other text."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: dict[str, str] = {}
        self.code: list[str] = []
        self.text = ""
        self._script: str | None = None
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "script":
            self._script = dict(attrs).get("id") or ""

    def handle_endtag(self, tag: str) -> None:
        if tag == "script":
            self._script = None

    def handle_data(self, data: str) -> None:
        if self._script is None:
            self.text += data
        elif self._script:
            self.scripts[self._script] = data
        else:
            self.code.append(data)


def data_of(page: str, id: str) -> Any:
    return json.loads(Parsed(page).scripts[id])


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


# --- numbers --------------------------------------------------------------------------------------------------------


def test_the_numbers_are_those_of_metrics_jsonl(tmp_path: Path) -> None:
    run = full_run(tmp_path / "run")
    write_report(run, run / "report.html")
    page, lines = (run / "report.html").read_text(), lines_of(run)
    columns = data_of(page, "metrics")
    assert [
        {k: column[i] for k, column in columns.items() if column[i] is not None} for i in range(len(lines))
    ] == lines
    charts = data_of(page, "charts")
    for chart, name in (("loss", "loss"), ("grad-norm", "grad_norm"), ("speed", "tokens_per_second")):
        drawn = charts[chart]["columns"]
        points = [(x, y) for x, y, s in zip(drawn["x"], drawn["y"], drawn["s"], strict=True) if s == 0]
        assert points == [(line["step"], line[name]) for line in lines if name in line]
    assert charts["loss"]["names"] == ["training", "evaluation"]
    assert f"{lines[-1]['train_loss']:.4f} on average" in Parsed(page).text


def test_the_summary_comes_first(tmp_path: Path) -> None:
    run = full_run(tmp_path / "run")
    record = read_run(run)
    assert summary_of(record)["Steps"] == "100 of 100" and status(record) == "finished" and seconds(record) == 100
    text = Parsed(render(record)).text
    assert text.index("Base model") < text.index("Gradient norm") < text.index("torch 2.13.0"), "versions come last"
    for label in ("Method", "Data", "Duration", "Tokens", "Training loss", "Evaluation loss", "Hardware", "Result"):
        assert label in text


@pytest.mark.parametrize(
    ("about", "title"),
    [
        ({"base": "org/Model-1B", "method": "LoRA, 1,024 trained parameters", "data": "org/chats"},
         "LoRA of org/Model-1B on org/chats"),
        ({"base": "/models/tiny", "method": "full fine-tuning, 9 trained parameters", "data": "../data/train.jsonl"},
         "Full fine-tuning of tiny on train.jsonl"),
        ({"base": "org/Model-1B", "data": "user-provided data"}, "org/Model-1B on user-provided data"),
        ({"method": "LoRA"}, "LoRA"),
        ({"base": 3, "method": None, "data": ["x"], "name": "my run"}, "my run"),
        ({}, "run"),
    ],
)  # fmt: skip
def test_the_title_says_what_was_trained(tmp_path: Path, about: dict[str, Any], title: str) -> None:
    run = synthetic_run(tmp_path / "run")
    (run / "settings.json").write_text(json.dumps({"settings": {}, **about}))
    assert title_of(read_run(run)) == title == contents(read_run(run)).title


def test_columns_without_values_are_left_out() -> None:
    rows = [("10:00", 1, "start", ""), ("10:01", 2, "end", None)]
    assert pages.table(("time", "step", "what", "text"), rows, "x").count('<th scope="col">') == 3
    assert "<td>0</td>" in pages.table(("a", "b"), [("x", 0)], "x")
    assert pages.table(("", "b"), [("", "x")], "x").count("<th scope") == 3, "the first column names the rows"


def test_tables_of_values_have_the_evaluations(tmp_path: Path) -> None:
    """They are few, and fall between evenly spread steps."""
    lines = [{"step": n, "loss": 1 / n} for n in range(1, 5000)] + [{"step": n, "eval_loss": 2.0} for n in (1234, 3456)]
    (chart,) = metric_charts([read_run(synthetic_run(tmp_path / "run", sorted(lines, key=lambda one: one["step"])))])
    assert [row[0] for row in chart.rows if row[2] == 2.0] == [1234, 3456] and len(chart.rows) <= LISTED


def test_time_before_a_resumed_run_counts_and_time_between_does_not(tmp_path: Path) -> None:
    run = synthetic_run(tmp_path / "run")
    kinds = [("start", 0, 0), ("failed", 30, 10), ("resume", 1000, 10), ("end", 1045, 100)]
    write_lines(run / "events.jsonl", [{"time": t, "step": s, "kind": k, "text": "no"} for k, t, s in kinds])
    record = read_run(run)
    assert seconds(record) == 75 and "resumed 1 time" in str(summary_of(record)["Duration"])
    write_lines(run / "events.jsonl", [{"time": t, "step": s, "kind": k, "text": "no"} for k, t, s in kinds[:2]])
    assert status(read_run(run)) == "failed at step 10: no" and seconds(read_run(run)) == 30


# --- text -----------------------------------------------------------------------------------------------------------


def fully_hostile(folder: Path) -> Path:
    """Hostile text in every place that a run's files have."""
    hostile_run(folder)
    write_lines(
        folder / "events.jsonl", [{"time": 1e9, "step": 1, "kind": t, "text": t} for t in (*HOSTILE, "warning")]
    )
    rows = {"edges": [0, 1, 2], "rows": [1, 2]}
    sets = [{"name": t, "source": t, "bad_rows": [t], "documents": t, "row_lengths": rows} for t in HOSTILE]
    (folder / "data.json").write_text(json.dumps({"data_sets": sets}))
    moments = ["forward", "backward"]
    timeline = {"moment": moments, "unit": list(HOSTILE[:2]), "operation": list(HOSTILE[2:4]), "shards": [9, 9]}
    units = {text: {"gather_sent": 5, "reduce_sent": 5} for text in HOSTILE}
    (folder / "step.json").write_text(json.dumps({"step": HOSTILE[0], "timeline": timeline, "units": units}))
    memory = {"timeline": [[f"forward {t}", 9] for t in HOSTILE], "moments": {"forward": dict.fromkeys(HOSTILE, 9)}}
    traffic = {"inside": dict.fromkeys(HOSTILE, 9)}
    (folder / "plan.json").write_text(json.dumps({"memory": memory, "traffic": traffic}))
    return folder


def test_text_in_a_run_is_text_in_its_report(tmp_path: Path) -> None:
    plain, hostile = (
        Parsed(render(read_run(make(tmp_path / name)))) for name, make in (("a", full_run), ("b", fully_hostile))
    )
    assert {tag for tag, _ in hostile.elements} <= {tag for tag, _ in plain.elements} | {"h4"}
    assert hostile.code == plain.code, "the scripts are ours alone"
    attributes = [(name, value) for _, attrs in hostile.elements for name, value in attrs.items()]
    assert not [name for name, _ in attributes if name.startswith("on")]
    assert {value[:1] for name, value in attributes if name in ("href", "src") and value} == {"#"}
    for text in HOSTILE[:5]:
        assert hostile.text.count(text) >= 10 and text in hostile.scripts["metrics"].encode().decode("unicode_escape")
    assert "\x00" not in hostile.text and "\x1b" not in hostile.text
    for block in hostile.scripts.values():
        assert not set("<>&\u2028\u2029") & set(block) and json.loads(block)
    names = [name for chart in json.loads(hostile.scripts["charts"]).values() for name in chart["names"]]
    assert set(HOSTILE[:5]) <= set(names), "parts of memory"


def test_names_are_never_part_of_a_specification(tmp_path: Path) -> None:
    """A specification has field names and expressions, which are code."""
    for chart in contents(read_run(fully_hostile(tmp_path / "run"))).charts:
        assert not [text for text in HOSTILE if text[:12] in json.dumps(chart.spec)], chart.id


def test_lone_surrogates_can_be_written(tmp_path: Path) -> None:
    run = synthetic_run(tmp_path / "run", run_name="a\ud800b")
    write_lines(run / "samples.jsonl", [{"step": 0, "prompt": "\udfff?", "answer": "\ud83d", "reference": None}])
    write_report(run, run / "report.html")
    assert "\ufffd?" in (run / "report.html").read_text()


def test_the_page_requests_nothing(tmp_path: Path) -> None:
    page = render(read_run(full_run(tmp_path / "run")))
    found = Parsed(page)
    style = page[page.index("<style>") : page.index("</style>")]
    assert "url(" not in style and "@import" not in style
    assert not [attrs for tag, attrs in found.elements if tag in ("link", "img", "iframe", "object", "embed", "base")]
    policy = next(attrs["content"] for tag, attrs in found.elements if attrs.get("http-equiv"))
    assert policy is not None and policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "connect-src 'none'" in policy and "unsafe-eval" not in policy


# --- much, little and nothing ---------------------------------------------------------------------------------------


def long_metrics(count: int) -> list[dict[str, Any]]:
    """Many lines, with the highest, the lowest and a missing loss among them."""
    lines: list[dict[str, Any]] = [
        {"step": n, "loss": math.sin(n / 500) + n % 7 / 100, "num_tokens": 100 * n, "tokens_per_second": 50.0 + n % 11}
        for n in range(1, count + 1)
    ]
    lines[5000]["loss"], lines[6000]["loss"], lines[7000]["loss"] = 99.0, None, -99.0
    return lines


@pytest.mark.parametrize("count", [10_000, 60_000])
def test_more_points_than_are_drawn(tmp_path: Path, count: int) -> None:
    lines = long_metrics(count)
    record = read_run(synthetic_run(tmp_path / "run", lines))
    chart = next(one for one in metric_charts([record]) if one.id == "loss")
    points = list(zip(chart.columns["x"], chart.columns["y"], strict=True))
    assert len(points) <= DRAWN and set(points) <= {(line["step"], line["loss"]) for line in lines}
    assert {
        (1, lines[0]["loss"]),
        (count, lines[-1]["loss"]),
        (5001, 99.0),
        (6001, None),
        (7001, -99.0),
    } <= set(points)
    assert any(f"of {count:,} points are drawn" in note for note in chart.notes)
    page = render(record)
    in_page = data_of(page, "metrics")["loss"]
    if count < LONG:
        assert in_page == [line["loss"] for line in lines], "all of them are in the file"
    else:
        assert in_page[-RECENT:] == [line["loss"] for line in lines][-RECENT:]
        assert f"{len(in_page):,} of {count:,} lines of metrics.jsonl are in this file" in Parsed(page).text
    assert f"1 of {count:,} values are not finite (at 6,001)" in Parsed(page).text


def test_a_long_file_is_thinned_and_its_totals_are_those_of_all_lines(tmp_path: Path) -> None:
    lines = long_metrics(3 * LONG)
    peaks = {line["step"] for line in lines[137::300]}
    for line in lines[137::300]:
        line["loss"] = 20.0
    lines += [{"step": 100, "eval_loss": 7.0}, {"step": 30_000, "eval_loss": 1.5}]
    lines.sort(key=lambda one: one["step"])
    record = read_run(synthetic_run(tmp_path / "run", lines))
    assert len(record.metrics) < LONG and record.line_count == len(lines)
    assert record.value_counts["loss"] == 3 * LONG and record.gap_counts == {"loss": 1}
    assert record.series("eval_loss") == [(100, 7.0), (30_000, 1.5)], "few values of a name are all kept"
    kept = [line["loss"] for line in record.metrics if line.get("loss") is not None]
    assert (max(kept), min(kept)) == (99.0, -99.0) and record.last("num_tokens") == 300 * LONG
    assert peaks <= {line["step"] for line in record.metrics if line.get("loss") == 20.0}
    speeds = sorted(line["tokens_per_second"] for line in lines if "tokens_per_second" in line)
    assert record.speed == speeds[len(speeds) // 2], "of all lines"
    spent = sum(100 / line["tokens_per_second"] for line in lines if "tokens_per_second" in line)
    assert record.training_seconds[-1] == (3 * LONG, pytest.approx(spent))


@pytest.mark.parametrize("steps", ["backwards", "equal", "far"])
def test_odd_steps_can_be_thinned(tmp_path: Path, steps: str) -> None:
    place = {"backwards": lambda n: -n, "equal": lambda n: 5, "far": lambda n: 2**53 * (n % 2)}[steps]
    lines = [{"step": place(n), "loss": float(n % 100)} for n in range(LONG + 10)]
    record = read_run(synthetic_run(tmp_path / "run", lines))
    assert {0.0, 99.0} <= {value for _, value in record.series("loss")}
    assert render(record)


def test_reading_again_reads_what_was_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = synthetic_run(tmp_path / "run", long_metrics(LONG + 5))
    reader, parsed = RunReader(folder), []
    assert reader.read().line_count == LONG + 5
    loads = json.loads
    monkeypatch.setattr(json, "loads", lambda text: parsed.append(text) or loads(text))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 30000, "loss": 5.0}\n{"step": 30001, "lo')
    assert reader.read().last("loss") == 5.0
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('ss": 6.0}')
    assert reader.read().last("loss") == 6.0, "complete, though the end of the line is missing"
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('\n{"step": 30002, "loss": 7.0}\n')
    run = reader.read()
    assert run.last("loss") == 7.0 and run.line_count == LONG + 8 and not run.missing
    assert len([text for text in parsed if "loss" in text]) < 10
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n' + "x" * 3_000_000)
    assert reader.read().series("loss") == [(1, 1.0)], "a file that was written anew"
    write_lines(folder / "metrics.jsonl", long_metrics(LONG + 5))
    assert reader.read().line_count == LONG + 5


def test_smoothing_begins_with_medians_where_points_are_left_out(tmp_path: Path) -> None:
    """Of noise the lowest and the highest values are drawn, whose mean is not what is between them."""
    lines = [{"step": n, "loss": 100.0 if n % 50 == 0 else 1.0} for n in range(5 * DRAWN)]
    (chart,) = metric_charts([read_run(synthetic_run(tmp_path / "run", lines))])
    assert 100.0 in chart.columns["y"] and set(chart.columns["a"]) == {1.0}
    (short,) = metric_charts([read_run(synthetic_run(tmp_path / "short", lines[:DRAWN]))])
    assert "a" not in short.columns


def test_many_events_answers_and_checkpoints_are_not_all_in_the_page(tmp_path: Path) -> None:
    run = synthetic_run(tmp_path / "run")
    events = [{"time": 1.7e9 + n, "step": n, "kind": "checkpoint", "text": ""} for n in range(1, 5001)]
    events += [{"time": 1.8e9 + n, "step": 5001, "kind": "warning", "text": f"warning {n}."} for n in range(2000)]
    write_lines(run / "events.jsonl", events)
    samples = [{"step": n, "prompt": "Where?", "answer": f"answer {n}.", "reference": None} for n in range(1000)]
    write_lines(run / "samples.jsonl", samples)
    page = render(read_run(run))
    text = Parsed(page).text
    assert "The newest 500 of 2,000 are listed." in text and "warning 1999." in text and "warning 5." not in text
    assert {"answer 0.", "answer 999."} <= set(re.findall(r"answer \d+\.", text)) and text.count("answer ") < 50
    assert "Between them: 20 of 998" in text
    chart = data_of(page, "charts")["loss"]["spec"]["layer"][-1]["data"]["values"]
    assert len(chart) == MARKED and {1, 5000} <= {one["x"] for one in chart}
    assert "200 of 5,000 marks are drawn." in text


@pytest.mark.parametrize("loss", [2.5, None])
def test_a_single_line(tmp_path: Path, loss: float | None) -> None:
    record = read_run(synthetic_run(tmp_path / "run", [{"step": 3, "loss": loss, "grad_norm": 1.0}]))
    charts = {chart.id: chart for chart in metric_charts([record])}
    assert ("loss" in charts) == (loss is not None), "a chart of nothing is left out"
    assert charts["grad-norm"].columns["d"] == [1], "a line alone would not show a single point"
    assert charts["grad-norm"].spec["encoding"]["x"]["scale"]["domain"] == [2, 4]


def test_nan_and_infinity_are_gaps(tmp_path: Path) -> None:
    run = synthetic_run(tmp_path / "run")
    (run / "metrics.jsonl").write_text(
        '{"step": 1, "loss": NaN}\n{"step": 2, "loss": Infinity}\n{"step": 3, "loss": 1.5}\n'
    )
    record = read_run(run)
    assert record.series("loss") == [(1, None), (2, None), (3, 1.5)] and record.last("loss") == 1.5
    assert data_of(render(record), "metrics")["loss"] == [None, None, 1.5]


def test_a_half_written_last_line_is_left_out(tmp_path: Path) -> None:
    run = synthetic_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 105, "lo')
    record = read_run(run)
    assert len(record.metrics) == len(synthetic_metrics()) and not record.missing
    (run / "metrics.jsonl").write_text(
        '{"step": 1, "loss": 2.0}\n{"broken\n[1]\n{"loss": 1}\n{"step": 2, "loss": 1.0}\n'
    )
    assert read_run(run).missing == ("3 lines of metrics.jsonl cannot be read and are left out.",)


@pytest.mark.parametrize("file", FILES)
def test_a_file_that_is_missing(tmp_path: Path, file: str) -> None:
    run = full_run(tmp_path / "run")
    (run / file).unlink(missing_ok=True)
    text = Parsed(render(read_run(run))).text
    assert (f"{file} is not there." in text) == (file in FILES[:2])


def test_an_empty_folder_and_none(tmp_path: Path) -> None:
    text = Parsed(render(read_run(tmp_path))).text
    assert "settings.json is not there." in text and "There are no curves" in text
    with pytest.raises(ConfigError, match="is not a folder; expected the output_dir of a run"):
        read_run(tmp_path / "none")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["step", "loss", "eval_loss", "settings", "changed", "versions", "notes", "steps",
        "ranks", "data_sets", "name", "row_lengths", "edges", "rows", "bad_rows", "timeline", "moment", "unit",
        "operation", "shards", "units", "memory", "moments", "traffic", "inside", "kind", "time", "text", "prompt",
        "answer", "reference", "forward", "gather_sent"]), inner, max_size=5),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(JSON, min_size=len(FILES), max_size=len(FILES)))
def test_no_file_can_make_the_report_fail(tmp_path_factory: pytest.TempPathFactory, values: list[Any]) -> None:
    run = tmp_path_factory.mktemp("run")
    for file, value in zip(FILES, values, strict=True):
        many = value if file.endswith("l") and isinstance(value, list) else [value]
        text = "\n".join(json.dumps({"step": 1, **one} if isinstance(one, dict) else one) for one in many)
        (run / file).write_text(text)
    write_report(run, run / "report.html")


# --- memory and traffic ---------------------------------------------------------------------------------------------


MEASURED = ("shards", "gathered", "gradients", "optimizer", "other")
TIMELINE = [
    ["forward layers.0", 100], ["loss", 200], ["backward of the loss", 300], ["backward layers.0", 250],
    ["end of backward", 120], ["optimizer step", 90],
]  # fmt: skip
"""As `planner/memory.py` names the places of a step."""


def planned_run(folder: Path) -> Path:
    run = full_run(folder)
    moments = {"load": {"shards": 10}, "forward": {"shards": 2**20, "logits": 2**20}, "backward": {"gradients": 5}}
    memory = {"moments": moments, "timeline": TIMELINE}
    traffic = {
        "inside": {"gather forward": 2**20, "gather backward": 2**20, "reduce": 1000, "flags": 24},
        "across": {"reduce": 0},
        "units": {"": 2**20, "layers.0": 2**19},
    }
    (run / "plan.json").write_text(json.dumps({"memory": memory, "traffic": traffic}))
    return run


def test_memory_is_shown_measured_beside_planned(tmp_path: Path) -> None:
    over_step, parts = memory_charts(read_run(planned_run(tmp_path / "run")))
    assert over_step.names == ("planned", "measured, without activations")
    columns, size = over_step.columns, 2**20
    rows = list(zip(columns["l"], columns["y"], columns["s"], strict=True))
    assert [[label, round(y * size)] for label, y, s in rows if s == 0] == TIMELINE
    timeline = json.loads((tmp_path / "run" / "step.json").read_text())["timeline"]
    totals = [sum(parts) for parts in zip(*(timeline[name] for name in MEASURED if name in timeline), strict=True)]
    assert [y * size for _, y, s in rows if s == 1] == pytest.approx(totals)
    bars = [row[0] for row in parts.rows]
    assert bars == ["load, planned", "forward, planned", "forward, measured", "loss, measured", "backward, planned",
                    "backward, measured", "optimizer step, measured"]  # fmt: skip
    forward = dict(zip(parts.header, parts.rows[2], strict=True))
    peak = max(total for total, moment in zip(totals, timeline["moment"], strict=True) if moment == "forward")
    assert forward["total"] * size == pytest.approx(peak)


def test_on_gpus_the_peak_of_the_run_is_a_line(tmp_path: Path) -> None:
    run = full_run(tmp_path / "run")
    found = json.loads((run / "step.json").read_text())
    (run / "step.json").write_text(json.dumps({**found, "counted": False}))
    chart = memory_charts(read_run(run))[0]
    assert chart.names == ("measured", "measured peak of the run")
    peaks = [y * 2**20 for y, s in zip(chart.columns["y"], chart.columns["s"], strict=True) if s == 1]
    assert peaks == [0.5 * 2**30] * 2, "memory_gib of metrics.jsonl"


def test_traffic_is_shown_measured_beside_planned(tmp_path: Path) -> None:
    record = read_run(planned_run(tmp_path / "run"))
    chart = communication_chart(record)
    assert chart is not None and chart.header[-2:] == ("total", "planned") and chart.names[-1] == "planned"
    assert [row[-1] * 2**20 if row[-1] != "" else None for row in chart.rows[:3]] == [2**20, 2**19, None]
    assert traffic_rows(record) == [
        ["gathered parameters", "2.9 MiB", "2.0 MiB"], ["reduced gradients", "293.0 KiB", "1.0 KiB"],
    ]  # fmt: skip


# --- the library ----------------------------------------------------------------------------------------------------


def test_the_page_without_the_library_has_the_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "chart_library", lambda: None)
    page = render(read_run(full_run(tmp_path / "run")))
    assert f"{PACKAGE} is not installed" in page and len(page) < 100_000
    assert page.count("<details open><summary>Values") == page.count("<figure")


def test_a_report_is_small_enough_to_send(tmp_path: Path) -> None:
    assert len(render(read_run(synthetic_run(tmp_path / "run", synthetic_metrics(2000, 1))))) < 2_000_000


def test_vega_lite_accepts_every_chart(tmp_path: Path) -> None:
    """Its compiler is the oracle. In a process of its own: it starts a JavaScript engine."""
    charts = contents(read_run(planned_run(tmp_path / "run"))).charts
    assert {"loss", "memory-step", "memory-parts", "communication-units", "lengths-1"} <= {chart.id for chart in charts}
    specs = [
        {**chart.spec, "data": {"name": "values", "values": [{"x": 1, "y": 2, "s": 0, "d": 1, "b": "a"}]}}
        for chart in charts
    ]
    code = "import json, sys, vl_convert\nfor one in json.load(sys.stdin): print(len(vl_convert.vegalite_to_vega(one)))"
    done = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps(specs), capture_output=True, text=True, check=True
    )
    assert len(re.findall(r"^[1-9]", done.stdout, re.MULTILINE)) == len(charts) and "WARN" not in done.stderr
