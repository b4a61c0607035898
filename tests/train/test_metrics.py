"""What a run says: lines, JSON, nothing, a live display; its file, its report and its card."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from fullshard.train.card import write_card
from fullshard.train.config import SFTConfig
from fullshard.train.metrics import Reporter
from fullshard.train.report import write_report

VALUES = {"loss": 1.5, "learning_rate": 1e-3, "grad_norm": 0.25, "tokens_per_second": 1234.5, "memory_gib": 2.0}


def test_plain_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reporter = Reporter(tmp_path, 10, "auto")
    reporter.start(0)
    reporter.log(5, VALUES)
    reporter.log(10, VALUES)
    reporter.say("a word")
    reporter.close()
    first, last, word = capsys.readouterr().out.splitlines()
    assert first.startswith("step 5/10  loss 1.5000  lr 1.00e-03  grad norm 0.250  tok/s 1,234  GiB 2.00  ETA 0:00:0")
    assert last == "step 10/10  loss 1.5000  lr 1.00e-03  grad norm 0.250  tok/s 1,234  GiB 2.00" and word == "a word"


def test_json_and_quiet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for mode, said in (("json", {"step": 1, "loss": None, "epoch": 0.5}), ("quiet", None)):
        reporter = Reporter(tmp_path, 10, mode)
        reporter.start(0)
        reporter.log(1, {"loss": math.nan, "epoch": 0.5})
        reporter.say("not now")
        reporter.close()
        printed = capsys.readouterr().out
        assert (json.loads(printed) if printed else None) == said
        assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "loss": None, "epoch": 0.5}


def test_the_live_display(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reporter = Reporter(tmp_path, 10, "live")
    reporter.start(0)
    reporter.tick(3, VALUES)
    reporter.log(3, {"eval_loss": 2.5})
    reporter.close()
    printed = capsys.readouterr().out
    assert "3/10" in printed and "eval loss 2.5000" in printed


def test_a_resumed_run_drops_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    first = Reporter(tmp_path, 10, "quiet")
    first.start(0)
    for step in range(1, 6):
        first.log(step, {"loss": float(step)})
    first.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')  # the run was killed here
    second = Reporter(tmp_path, 10, "quiet")
    second.start(3)
    second.log(4, {"loss": 40.0})
    second.close()
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert (
        [(r["step"], r["loss"]) for r in records]
        == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)]
        == [(r["step"], r["loss"]) for r in second.history]
    )


def test_report_and_card(tmp_path: Path) -> None:
    config = SFTConfig(learning_rate=3e-4, run_name="a <run>")
    history = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0, "eval_loss": 1.5}, {"step": 3, "loss": None}]
    samples = [{"step": n, "prompt": "<p>", "answer": f"a{n}", "reference": "r"} for n in (1, 2)]
    write_report(tmp_path / "report.html", config, history, {"steps": 3}, samples)
    page = (tmp_path / "report.html").read_text()
    assert "<h1>a &lt;run&gt;</h1>" in page and page.count("<polyline") == 2 and "0.0003" in page
    assert "<pre>&lt;p&gt;</pre>" in page and page.index("<pre>a1") < page.index("<pre>a2") < page.index("<pre>r<")
    facts = {"base": "llama", "adapter": True, "data": "x.jsonl", "steps": 3, "ranks": 2, "metrics": {"loss": 1.0}}
    write_card(tmp_path, config, {**facts, "versions": {"torch": "2"}})
    card = (tmp_path / "README.md").read_text()
    assert 'library_name: "peft"' in card and 'base_model: "llama"' in card and "| `learning_rate` | `0.0003` |" in card
