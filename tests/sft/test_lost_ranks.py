"""Ranks of a real job that are stopped, killed, or end by themselves: what the user sees, and the exit codes.

`python -m tests.sft.lose_ranks` does the same hundreds of times.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.pool import ROOT
from tests.sft.tiny import make_folder

TOOL = "from tests.sft import lose_ranks; raise SystemExit(lose_ranks.main())"


def lose(*words: str, before: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", f"{before}; {TOOL}" if before else TOOL, *words]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600)


def test_the_places_where_ranks_are_lost_exist() -> None:
    from tests.sft.faults import PLACES

    assert not [place for place, (owner, name) in PLACES.items() if not hasattr(owner, name)]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["stop", "continue", "kill", "abort", "raise", "exit", "leave"])
def test_a_lost_rank_is_named_and_the_job_ends_as_documented(how: str) -> None:
    done = lose("--how", how, "--tries", "4", "--jobs", "2", "--seed", how)
    assert done.returncode == 0 and "4 of 4 tries as they should be" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("how", ["stop", "kill"])
def test_a_rank_lost_at_any_place_of_the_start_is_named_and_the_job_ends(how: str) -> None:
    from tests.sft.faults import START

    tries = str(len(START))
    done = lose("--how", how, "--places", ",".join(START), "--each", "--tries", tries, "--jobs", tries, "--ranks", "3")
    assert done.returncode == 0 and f"{tries} of {tries} tries" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "place", "fault", "noticed"),
    [
        ("stop", "export", "from fullshard.distributed.watchdog.external_waits import ExternalWaits; "
         "ExternalWaits.scan = lambda *_: None", "not ended"),
        ("stop", "end", "from fullshard.launch.agent import Agent; Agent._look_for_stopped = lambda _: 0", "not named"),
        ("stop", "forward", "from fullshard.launch.agent import Agent; Agent._outcome_known = property(lambda _: 0, "
         "lambda agent, value: None)", "exit code 137, not 69"),
        ("stop", "joining", "from fullshard.launch.agent import Agent; Agent._was_starting = lambda *_: False",
         "not ended"),
        ("kill", "metrics", "from fullshard.launch.agent import Agent; Agent._name = lambda *_: str()",
         "was not named"),
    ],
)  # fmt: skip
def test_faults_put_in_on_purpose_are_noticed(how: str, place: str, fault: str, noticed: str) -> None:
    done = lose("--how", how, "--places", place, "--tries", "1", before=fault)
    assert done.returncode == 1 and "0 of 1 tries as they should be" in done.stdout, done.stdout + done.stderr
    assert noticed in done.stdout, done.stdout


# --- exit codes -------------------------------------------------------------------------------------------------------


def sft(place: Path, *more: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "FULLSHARD_CACHE": str(place / "cache"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    words = ["--model_name_or_path", str(place / "model"), "--output_dir", str(place / "out"), "--report_to", "none",
             "--max_seq_len", "48", "--logging_steps", "1", "--cpu", "--num_processes", "2"]  # fmt: skip
    command = [sys.executable, "-m", "fullshard", "sft", *words, *more]
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--dataset_name", "{place}/data", "--learning_rat", "1"], "learning_rat"),
        (["--dataset_name", "{place}/data", "--packing", "--max_seq_len", "0"], "max_length"),
        (["--dataset_name", "{place}/nothing"], "nothing"),
        (["--dataset_name", "{place}/broken.jsonl"], "broken.jsonl"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(tmp_path: Path, words: list[str], told: str) -> None:
    place = make_folder(tmp_path)
    (place / "broken.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    job = sft(place, "--quiet", *(word.format(place=place) for word in words))
    _, err = job.communicate(timeout=240)
    assert job.returncode == 2, err
    said = [line for line in err.splitlines() if line.startswith("fullshard:")]
    assert len(said) == 1 and told in said[0] and "Traceback" not in err, err


@pytest.mark.slow
def test_a_job_that_is_asked_to_stop_in_its_first_step_saves(tmp_path: Path) -> None:
    place = make_folder(tmp_path, rows=400)
    job = sft(place, "--dataset_name", str(place / "data"), "--max_steps", "4000")
    end = time.monotonic() + 200
    while not (place / "out" / "metrics.jsonl").exists() and time.monotonic() < end:
        time.sleep(0.01)
    job.send_signal(signal.SIGTERM)
    _, err = job.communicate(timeout=200)
    assert job.returncode == 75 and not re.search("Traceback|gloo", err), err
