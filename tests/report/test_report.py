"""`fullshard report`: reports are made again from the files of runs, and several runs are compared."""

import json
import os
import re
import subprocess
import sys

import pytest

from fullshard import cli
from fullshard.config.errors import ConfigError
from fullshard.report.command import ReportOptions, report, run_folder
from fullshard.report.compare import (
    ABSENT,
    RunState,
    comparison,
    different_settings,
    loss_by,
    numbers,
    position,
    state_of,
)
from fullshard.report.run_charts import labels
from fullshard.report.run_record import read_run
from tests.pool import ROOT
from tests.report.synthetic_runs import (
    CLOSING,
    hostile_run,
    synthetic_metrics,
    synthetic_run,
    training_record,
    write_lines,
)


def printed(capsys, *words):
    cli.app(["report", *map(str, words)], standalone_mode=False)
    return capsys.readouterr().out.strip()


def test_a_report_is_made_again_from_the_files(tmp_path, capsys):
    run = synthetic_run(tmp_path / "run")
    (run / "report.html").write_text("an old one")
    assert printed(capsys, run) == str(run / "report.html")
    first = (run / "report.html").read_text()
    assert "old one" not in first and "Which city?" in first
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 105, "loss": 0.123456789}) + "\n")
    printed(capsys, run)
    assert "0.123456789" in (run / "report.html").read_text()
    assert sorted(os.listdir(run)) == ["metrics.jsonl", "report.html", "samples.jsonl", "settings.json"]


def test_the_command_needs_no_torch(tmp_path):
    run = synthetic_run(tmp_path / "run")
    script = (
        "import sys; from fullshard import cli\n"
        f"cli.app(['report', {str(run)!r}, '--json'], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["runs"][0]["steps"] == 100


def test_json_has_the_numbers_of_the_metrics(tmp_path, capsys):
    run, other = synthetic_run(tmp_path / "a"), synthetic_run(tmp_path / "b", learning_rate=5e-4)
    facts = json.loads(printed(capsys, run, other, "--out", tmp_path / "c.html", "--json"))
    assert facts["report"] == str(tmp_path / "c.html") and (tmp_path / "c.html").exists()
    lines = synthetic_metrics()
    wanted = {
        "steps": 100, "total_steps": 100, "tokens": 30000, "loss": training_record(100)["loss"], "train_loss": 0.5,
        "eval_loss": lines[-2]["eval_loss"], "best_eval_loss": min(x["eval_loss"] for x in lines if "eval_loss" in x),
        "tokens_per_second": 3055.0, "memory_gib": 0.5, "state": "finished", "missing": [],
    }  # fmt: skip
    assert wanted.items() <= facts["runs"][0].items()
    assert facts["different_settings"] == {
        "learning_rate": {str(run): 1e-3, str(other): 5e-4},
        "output_dir": {str(run): str(run), str(other): str(other)},
    }


# --- bad input ------------------------------------------------------------------------------------------------------


def refused(names, **options):
    with pytest.raises(ConfigError) as error:
        report([str(name) for name in names], ReportOptions(**options))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_is_no_run_is_refused_in_one_line(tmp_path):
    run = synthetic_run(tmp_path / "runs" / "a")
    assert f"{tmp_path / 'gone'} does not exist" in refused([tmp_path / "gone"])
    assert f"is a file; expected the output_dir of a run, such as {run}" in refused([run / "metrics.jsonl"])
    (tmp_path / "notes.txt").write_text("text")
    assert refused([tmp_path / "notes.txt"]).endswith("is a file; expected the output_dir of a run.")
    (tmp_path / "empty").mkdir()
    assert "but nothing" in refused([tmp_path / "empty"])
    assert f"It contains runs: {run}." in refused([tmp_path / "runs"])
    assert "is not the output_dir of a run" in refused([run, tmp_path / "empty"])  # nothing is written then
    assert not (run / "report.html").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"serve": True, "out": "x.html"}, "--serve writes no file"),
        ({"serve": True, "as_json": True}, "--serve writes no file"),
        ({"port": 1}, "--port is for --serve"),
        ({"serve": True, "port": -1}, "--port is -1; expected 0"),
        ({"serve": True, "port": 65536}, "--port is 65536; expected 0"),
        ({"out": "model.safetensors"}, "'model.safetensors'; expected the name of an HTML file"),
    ],
)
def test_flags_that_do_not_fit_are_refused(options, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        ReportOptions(**options)


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    run = synthetic_run(tmp_path / "run")
    assert "No such file or directory" in refused([run], out=str(tmp_path / "gone" / "a.html"))
    (tmp_path / "folder.html").mkdir()
    assert "is a folder" in refused([run], out=str(tmp_path / "folder.html"))


def test_a_report_says_what_is_missing(tmp_path, capsys):
    run = synthetic_run(tmp_path / "run")
    for file in ("metrics.jsonl", "samples.jsonl"):
        (run / file).unlink()
    cli.app(["report", str(run)], standalone_mode=False)
    shown = capsys.readouterr()
    assert f"{run}: metrics.jsonl is not there." in shown.err and shown.out.strip() == str(run / "report.html")
    assert "metrics.jsonl is not there." in (run / "report.html").read_text()


def test_damaged_files_are_left_out_and_named(tmp_path):
    run = synthetic_run(tmp_path / "run")
    (run / "settings.json").write_text('{"settings": {')
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text("not json\n[1]\n\x00\xff\n" + text + '{"step": 105, "lo')
    record = read_run(run)
    assert len(record.metrics) == len(synthetic_metrics())
    assert record.missing == (
        "settings.json cannot be read.", "3 lines of metrics.jsonl cannot be read and are left out."
    )  # fmt: skip
    assert numbers(record)["steps"] == 100
    report([str(run)], ReportOptions())


def test_the_same_run_twice_is_one_run(tmp_path, capsys, monkeypatch):
    run = synthetic_run(tmp_path / "run")
    monkeypatch.chdir(run)
    assert printed(capsys, run, ".", f"{run}/") == str(run / "report.html")


# --- comparisons ----------------------------------------------------------------------------------------------------


def test_runs_with_the_same_name_are_told_apart(tmp_path):
    folders = [synthetic_run(tmp_path / path) for path in ("x/lora", "y/lora", "y/full", "x/z/lora", "y/z/lora")]
    names = labels([read_run(folder) for folder in folders])
    assert names == ["x/lora", "y/lora", "full", "x/z/lora", "y/z/lora"]
    assert labels([read_run(folders[0])]) == ["lora"]


def test_curves_of_several_runs_are_in_one_chart(tmp_path):
    short = synthetic_run(tmp_path / "short", [training_record(step) for step in (10, 20)])
    long = synthetic_run(tmp_path / "long")
    runs = [read_run(short), read_run(long)]
    charts = {chart.id: chart for chart in comparison(runs).charts}
    loss = charts["loss"]
    assert loss.names == ("short", "long", "long, evaluation")
    drawn = list(zip(*(loss.columns[key] for key in ("s", "x", "y")), strict=True))
    assert [(x, y) for s, x, y in drawn if s == 0] == [(x, training_record(x)["loss"]) for x in (10, 20)]
    assert [(x, y) for s, x, y in drawn if s == 1] == [
        (r["step"], r["loss"]) for r in synthetic_metrics() if "loss" in r
    ]
    tokens = charts["loss-tokens"]
    assert [x for s, x in zip(tokens.columns["s"], tokens.columns["x"], strict=True) if s == 0] == [3000, 6000]


def test_training_time_is_that_of_tokens_at_their_speed(tmp_path):
    lines = [{"step": s, "loss": 1.0, "num_tokens": 100 * s, "tokens_per_second": v} for s, v in ((1, 50), (3, 100))]
    run = read_run(
        synthetic_run(tmp_path / "run", [{"step": 0, "eval_loss": 2.0}, *lines, {"step": 2, "eval_loss": 1.5}])
    )
    assert run.training_seconds == [(0, 0), (1, 2), (3, 4)]
    (_, time) = loss_by([run, run])
    assert time.columns["x"] == [2, 4, 0, 3] * 2 and time.header[0] == "seconds"
    assert position([(0, 0), (10, 100)])(2.5) == 25 and position([(0, 0), (10, 100)])(12) == 100


def test_settings_that_differ(tmp_path):
    runs = [read_run(synthetic_run(tmp_path / name, **values)) for name, values in {
        "a": {"learning_rate": 1e-3, "lora_r": 8, "packing": False},
        "b": {"learning_rate": 1e-4, "lora_r": 8, "packing": False, "new": 1},
        "c": {"learning_rate": 1e-3, "lora_r": 8, "packing": True, "new": 1},
    }.items()]  # fmt: skip
    found = different_settings(runs)
    assert found.keys() == {"learning_rate", "packing", "output_dir"}  # `new` is the same where it is recorded
    assert found["learning_rate"] == [1e-3, 1e-4, 1e-3]
    runs[0].settings.pop("packing")
    assert different_settings(runs)["packing"] == [ABSENT, False, True]
    page = comparison(runs).sections["Settings"]
    assert page.index("learning_rate") < page.index("do not change training") < page.index("output_dir")


def test_runs_that_lack_files_can_be_compared(tmp_path):
    bare = synthetic_run(tmp_path / "bare")
    for file in ("metrics.jsonl", "samples.jsonl"):
        (bare / file).unlink()
    lost = synthetic_run(tmp_path / "lost")
    (lost / "settings.json").unlink()
    shown = comparison([read_run(folder) for folder in (bare, lost, synthetic_run(tmp_path / "whole"))])
    text = "".join(shown.sections.values())
    assert "bare: metrics.jsonl is not there." in text and "lost: settings.json is not there." in text
    assert "Only known for bare, whole." in text
    empty = comparison([read_run(bare), read_run(bare)])
    assert not empty.charts


def test_hostile_names_are_text(tmp_path):
    page = comparison([read_run(hostile_run(tmp_path / "a")), read_run(hostile_run(tmp_path / "b"))])
    text = "".join(page.sections.values())
    assert "<img" not in text and "<script" not in text and "onload=alert(3)&gt;" in text


# --- states ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "events", "finished"),
    [
        ([{"step": 5, "loss": 1.0}], [], False),
        ([{"step": 5, "loss": 1.0}, {"step": 5, **CLOSING}], [], True),
        ([{"step": 5, "loss": 1.0}, {"step": 5, **CLOSING}, {"step": 5, "eval_loss": 1.0}], [], True),
        ([{"step": 5, **CLOSING}, {"step": 6, "loss": 1.0}], [], False),  # resumed with more steps
        ([], [], False),
        ([{"step": 5, **CLOSING}], ["start", "end", "resume"], False),
        ([{"step": 5, "loss": 1.0}], ["start", "warning", "end", "warning"], True),
        ([{"step": 5, **CLOSING}], ["start", "failed"], False),
        ([], ["start", "stopped", "resume", "checkpoint", "end"], True),
    ],
)
def test_whether_a_run_has_finished(tmp_path, lines, events, finished):
    folder = synthetic_run(tmp_path / "run", lines)
    if events:
        write_lines(folder / "events.jsonl", [{"step": 1, "kind": kind, "time": 1.0} for kind in events])
    assert read_run(folder).has_finished is finished
    assert state_of(read_run(folder)) is (RunState.FINISHED if finished else RunState.ENDED)


def test_a_folder_that_a_run_has_only_locked_is_accepted(tmp_path, monkeypatch):
    monkeypatch.setattr("fullshard.report.command.lock_owner", lambda folder: "process 1")
    assert run_folder(str(tmp_path)) == tmp_path
