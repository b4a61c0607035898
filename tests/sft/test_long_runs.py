"""Long runs: what a process holds, and what its folder holds, does not grow with the steps.

Nothing here is timed. `tests/programs/long_run.py` trains and looks at itself.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.pool import ROOT

LONG = {
    "steps": (5000, 60, 10, {"logging_steps": 50}),
    "checkpoints": (1000, 60, 10, {
        "logging_steps": 50, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 3,
    }),
    "rows": (1000, 200_000, 10, {"logging_steps": 50}),
    "long rows": (500, 200, 30_000, {"logging_steps": 50, "max_length": 512, "packing": True}),
}  # fmt: skip
"""Steps, rows, words in a row, settings."""
PER_STEP = 1.0
"""Blocks of memory that a step may leave behind: a logged line, one in 50 steps, takes about ten."""


def looks_of(
    folder: Path, steps: int, rows: int, words: int, changes: dict[str, Any], looks: int = 5
) -> list[dict[str, float]]:
    command = [sys.executable, "-m", "tests.programs.long_run", str(folder), str(looks), str(rows), str(words)]
    done = subprocess.run(
        [*command, json.dumps({"max_steps": steps, **changes})], capture_output=True, text=True, cwd=ROOT, timeout=540,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
def test_nothing_grows(tmp_path: Path, name: str) -> None:
    steps, rows, words, changes = LONG[name]
    looks = looks_of(tmp_path / "run", steps, rows, words, changes)
    first, last = looks[0], looks[-1]
    assert [one["step"] for one in looks] == [steps // 5 * n for n in range(1, 6)]
    for what in ("open_files", "threads", "python_threads", "files"):
        assert last[what] <= first[what], f"{what}: {[one[what] for one in looks]}"
    between = last["step"] - first["step"]
    assert last["blocks"] - first["blocks"] < PER_STEP * between, [one["blocks"] for one in looks]
    # The size of a checkpoint is the same but for the digits of its numbers.
    assert last["bytes"] - first["bytes"] < 2000, [one["bytes"] for one in looks]
    assert last["mib"] - first["mib"] < 64, [one["mib"] for one in looks]


@pytest.mark.slow
def test_rows_of_50_000_tokens(tmp_path: Path) -> None:
    """Rows that are longer are cut, in pages of few rows; every step trains on a whole one in the same memory."""
    changes = {"max_length": 50_000, "per_device_train_batch_size": 1, "packing": True, "logging_steps": 1}
    looks = looks_of(tmp_path, 4, 8, 60_000, changes, looks=4)
    logged = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [one["num_tokens"] for one in logged if "loss" in one] == [50_000, 100_000, 150_000, 200_000]
    for what in ("open_files", "threads", "python_threads"):
        assert looks[-1][what] <= looks[0][what], f"{what}: {[one[what] for one in looks]}"
    assert looks[-1]["mib"] - looks[0]["mib"] < 64, [one["mib"] for one in looks]


REPORT = """
import json, resource, sys
from pathlib import Path
from fullshard.report.html_report import render
from fullshard.report.run_record import read_run
from fullshard.report.compare import comparison
from fullshard.report.page import whole_page
from fullshard.report.serve import LivePage
folder, line = Path(sys.argv[1]), '{"step": %d, "loss": 2.0, "num_tokens": %d, "tokens_per_second": 9.5}\\n'
live = LivePage([folder])
live.update()
sizes = [len(render(read_run(folder))), len(whole_page(comparison([read_run(folder)] * 2))), len(live.update().text)]
step = read_run(folder).line_count
for _ in range(3):
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(line % (step + n, step + n) for n in range(1, 1001))
    step, live._due = step + 1000, 0.0
    assert f"step {step:,}" in live.update().text
print(json.dumps({"mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, "sizes": sizes}))
"""


def report_of(folder: Path, lines: int) -> dict[str, Any]:
    """Peak memory of a process that reports such a run in every way, and the sizes of its pages."""
    folder.mkdir()
    (folder / "settings.json").write_text('{"steps": 2000000}')
    with (folder / "metrics.jsonl").open("w") as file:
        for n in range(1, lines + 1):
            record = {
                "step": n, "loss": 2 + n % 97 / 100, "learning_rate": 1e-3 / n, "grad_norm": 1 + n % 89 / 9,
                "mean_token_accuracy": n % 83 / 83, "num_tokens": 300 * n, "tokens_per_second": 3000 + n % 7,
            }  # fmt: skip
            file.write(json.dumps(record) + "\n")
    done = subprocess.run(
        [sys.executable, "-c", REPORT, str(folder)], capture_output=True, text=True, check=True, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    return dict(json.loads(done.stdout))


@pytest.mark.slow
def test_a_million_lines_of_metrics_make_a_report_of_the_same_size(tmp_path: Path) -> None:
    few, many = report_of(tmp_path / "few", 50_000), report_of(tmp_path / "many", 1_000_000)
    assert many["mib"] - few["mib"] < 150, (few, many)
    for small, large in zip(few["sizes"], many["sizes"], strict=True):
        assert large < 1.3 * small < 5_000_000, (few, many)
