"""What a run says: lines, JSON, nothing, a live display; its file and its card."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path

import pytest

from fullshard.report.records import LONG, RECENT
from fullshard.report.reporter import Reporter
from fullshard.report.run_summary import write_card
from fullshard.report.terminal import step_line
from fullshard.sft.sft_config import SFTConfig
from tests.screen import Window, screen

VALUES = {
    "loss": 1.5, "learning_rate": 1e-3, "grad_norm": 0.25, "mean_token_accuracy": 0.125, "tokens_per_second": 1234.4,
    "memory_gib": 2.0,
}  # fmt: skip


def test_plain_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reporter = Reporter(tmp_path, 10, "auto")
    reporter.start(0)
    reporter.log(5, VALUES)
    reporter.log(5, {"eval_loss": 2.5, "eval_mean_token_accuracy": 0.5, "epoch": 0.125})
    reporter.log(10, {**VALUES, "grad_norm": 10.25, "tokens_per_second": 123456.7})
    reporter.log(10, {"test_loss": 2.5})
    reporter.say("a word")
    reporter.close()
    first, evaluation, last, own, word = capsys.readouterr().out.splitlines()
    numbers = "step  5/10  loss 1.5000  lr 1.00e-03  grad norm  0.250  acc 0.125  tok/s   1,234  GiB  2.00"
    assert first.startswith(f"{numbers}  ETA 0:00:0")
    assert evaluation.startswith("step  5/10  eval loss 2.5000  acc 0.500  epoch 0.12  ETA 0:00:0")
    assert last == "step 10/10  loss 1.5000  lr 1.00e-03  grad norm 10.250  acc 0.125  tok/s 123,457  GiB  2.00"
    assert (own, word) == ("step 10/10  test loss 2.5000", "a word")


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


@pytest.mark.parametrize(("width", "total"), [(80, 10), (80, 12_000), (60, 10), (60, 12_000), (40, 10)])
def test_the_live_display(width: int, total: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal of its own: losses stay as lines, numbers stand below each other, the bar is below them."""
    with Window() as window, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", window.file)
        patch.setenv("COLUMNS", str(width))
        patch.setenv("TERM", "xterm")
        reporter = Reporter(tmp_path, total, "auto")
        reporter.start(0)
        for step in range(1, 10):
            reporter.tick(step, VALUES)
            if step % 3 == 0:
                reporter.log(step, {**VALUES, "loss": step / 2, "grad_norm": 4.0 * step})
        reporter.log(9, {"eval_loss": 2.5, "epoch": 0.9})
        reporter.say("a word")
        reporter.close()
    assert "\x1b[?25l" not in window.written, "a process that is killed could not bring the cursor back"
    lines = screen(window.written, width)
    *losses, evaluation, word, bar, last = lines
    assert [line.split("  lr")[0].split("loss")[1] for line in losses] == [" 1.5000", " 3.0000", " 4.5000"]
    assert len({line.rindex(" ") for line in losses}) == 1, "aligned"
    where = len(str(total))
    assert evaluation == f"step {9:>{where}}/{total}  eval loss 2.5000  epoch 0.90"[:width].rstrip()
    assert (word, last) == ("a word", "") and bar.startswith("━" * 10) and f"9/{total}" in bar
    assert max(map(len, lines)) <= width and (width < 80 or ("loss" in bar and "tok/s" in bar and "ETA" in bar))
    assert all(("acc 0.125" in line) == (width == 80) for line in losses)


def test_the_first_numbers_are_those_that_fit() -> None:
    whole = step_line(5, 10, VALUES, "0:00:07")
    assert whole.endswith("GiB  2.00  ETA 0:00:07")
    for width in range(10, len(whole) + 1):
        cut = step_line(5, 10, VALUES, "0:00:07", width)
        assert len(cut) <= max(width, 10) and whole.startswith(cut) and whole[len(cut) :][:2] in ("", "  ")


def test_no_colour_where_none_is_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value, live in (("NO_COLOR", "1", True), ("TERM", "dumb", False)):
        with Window() as window, monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", window.file)
            patch.setenv("TERM", "xterm")
            patch.setenv(variable, value)
            reporter = Reporter(tmp_path, 10, "auto")
            reporter.start(0)
            reporter.tick(3, VALUES)
            reporter.log(3, VALUES)
            reporter.close()
        assert not re.search("\x1b\\[[0-9;]*3[0-9]", window.written) and "loss 1.5000" in window.written
        assert (reporter.mode == "live") == live == ("━" in window.written)


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


def test_the_history_of_a_long_run_is_bounded(tmp_path: Path) -> None:
    """`trainer.state.log_history` is this list; the file has all lines. A resumed run reads the file line by line."""
    reporter = Reporter(tmp_path, 100_000, "quiet")
    reporter.start(0)
    history, sizes = reporter.history, []
    for step in range(1, 3 * LONG + 1):
        reporter.log(step, {"loss": 99.0 if step == 777 else 1 / step, "lr": 0.5})
        sizes.append(len(history))
    reporter.log(step, {"eval_loss": 7.0})
    reporter.close()
    assert max(sizes) <= LONG and reporter.history is history
    assert history[0]["step"] == 1 and {"step": 777, "loss": 99.0, "lr": 0.5} in history
    assert [one["step"] for one in history[-RECENT:]] == [*range(step - RECENT + 2, step + 1), step]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3 * LONG + 1
    second = Reporter(tmp_path, 100_000, "quiet")
    second.start(2 * LONG + 5)
    second.close()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2 * LONG + 5
    assert len(second.history) <= LONG and second.history[-1]["step"] == 2 * LONG + 5
    assert {"step": 777, "loss": 99.0, "lr": 0.5} in second.history


def test_card(tmp_path: Path) -> None:
    config = SFTConfig(learning_rate=3e-4, run_name="a <run>")
    facts = {"base": "llama", "adapter": True, "data": "x.jsonl", "steps": 3, "ranks": 2, "metrics": {"loss": 1.0}}
    write_card(tmp_path, config.run_name, config.changed(), {**facts, "versions": {"torch": "2"}})
    card = (tmp_path / "README.md").read_text()
    assert 'library_name: "peft"' in card and 'base_model: "llama"' in card and "| `learning_rate` | `0.0003` |" in card
