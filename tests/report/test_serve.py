"""`fullshard report --serve`: follows a run that is going on, on loopback, and ends with it."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

from fullshard.config.errors import ConfigError
from fullshard.report import serve as serving
from fullshard.report.run_record import RunReader
from fullshard.report.serve import LivePage, LoopbackServer, RunWatch, over
from tests.pool import ROOT
from tests.report.synthetic_runs import CLOSING, evaluation_record, synthetic_run, training_record, write_lines

HOLD = (
    "import sys, pathlib; from fullshard.sft.output_dir import FolderLock\n"
    "FolderLock(pathlib.Path(sys.argv[1])).take(); print('held', flush=True); sys.stdin.read()"
)
"""A run as far as others can tell: a process that holds the lock of the folder until it ends."""


@contextlib.contextmanager
def held(folder):
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as process:  # fmt: skip
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def started(folder, steps=20):
    return synthetic_run(folder, [evaluation_record(0), *(training_record(step) for step in range(5, steps + 1, 5))])


def append(folder, record):
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")


def test_a_run_that_was_over_is_served_until_ctrl_c(tmp_path):
    watch = RunWatch(synthetic_run(tmp_path / "run"))
    assert not over([watch]) and not over([watch])
    (watch.folder / "report.html").write_text("made again meanwhile")
    assert not over([watch])


def test_it_ends_when_the_run_has_finished(tmp_path):
    folder = started(tmp_path / "run")
    watches = [RunWatch(folder), RunWatch(synthetic_run(tmp_path / "other"))]
    with held(folder):
        assert not over(watches)
        append(folder, {"step": 20, **CLOSING})
        assert not over(watches)  # it writes its results
    assert over(watches)


def test_a_run_that_died_may_come_back(tmp_path, monkeypatch):
    folder = started(tmp_path / "run")
    watch = RunWatch(folder)
    with held(folder):
        assert not over([watch])
    assert not over([watch])  # killed; a launcher may restart it
    with held(folder):
        monkeypatch.setattr(serving, "RESTART", 0.0)
        assert not over([watch])
    assert over([watch])


def test_without_locks_the_metrics_tell(tmp_path):
    """Some file systems have no locks."""
    folder = started(tmp_path / "run")
    watch = RunWatch(folder)
    assert not over([watch])
    append(folder, training_record(25))
    assert not over([watch])
    append(folder, {"step": 25, **CLOSING})
    assert over([watch])


def test_a_page_that_takes_long_is_made_less_often(tmp_path, monkeypatch):
    folder = started(tmp_path / "run")
    page, clock = LivePage([folder]), iter([0.0, 3.0, 4.0, 32.9, 33.1, 33.1, 33.2, 33.2])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    first = page.update()  # takes 3 seconds, so that the next one is due at 33
    append(folder, training_record(25))
    assert page.update() is first and page.update() is first
    assert "step 25 of" in page.update().text
    page.over = True
    assert "no longer updated" in page.update().text  # the state itself is always shown at once


def test_it_ends_if_the_folder_is_removed(tmp_path):
    watch = RunWatch(started(tmp_path / "run"))
    assert not over([watch])
    watch.folder.rename(tmp_path / "moved")
    with pytest.raises(ConfigError, match="is not a folder; expected the output_dir of a run"):
        over([watch])


def test_a_run_that_is_away_is_read_once(tmp_path, monkeypatch):
    watch, reads = RunWatch(started(tmp_path / "run")), []
    append(watch.folder, training_record(25))
    read = RunReader.read
    monkeypatch.setattr(RunReader, "read", lambda self: reads.append(self) or read(self))
    assert not over([watch]) and not over([watch]) and len(reads) == 1
    append(watch.folder, training_record(30))
    assert not over([watch]) and len(reads) == 2


def test_the_page_follows_the_files(tmp_path, monkeypatch):
    monkeypatch.setattr(serving, "SHARE_OF_TIME", float("inf"))
    folder = started(tmp_path / "run")
    page = LivePage([folder])
    assert "ended at step 20 of 100, before it had finished" in page.update().text.lower()
    with held(folder):
        first = page.update().text
        assert "Running." in first and "step 20 of 100, about 0:00:08 of training left" in first
        assert page.update() is page.update()  # nothing is read again that has not changed
        append(folder, training_record(25))
        assert "step 25 of 100" in page.update().text
        with (folder / "metrics.jsonl").open("a") as file:
            file.write('{"step": 30, "loss": 0.1')  # half of a line
        assert "step 25 of 100" in page.update().text and "cannot be read" not in page.update().text
        write_lines(folder / "metrics.jsonl", [training_record(5)])  # resumed from a checkpoint
        assert "step 5 of 100" in page.update().text
        (folder / "metrics.jsonl").unlink()
        assert "no values yet" in page.update().text
        write_lines(folder / "metrics.jsonl", [training_record(5), {"step": 100, **CLOSING}])
    page.over = True
    assert "Finished at step 100. This page is no longer updated." in page.update().text


def test_several_runs_are_compared_live(tmp_path):
    folders = [started(tmp_path / "a"), synthetic_run(tmp_path / "b")]
    page = LivePage(folders)
    assert "0 of 2 runs are going on." in page.update().text
    with held(folders[0]):
        text = page.update().text
        assert "1 of 2 runs are going on." in text and "<p>a: step 20 of 100" in text and "2 runs compared" in text


def test_an_update_is_the_body_of_the_page(tmp_path):
    page = LivePage([started(tmp_path / "run")])
    whole, update = page.whole().text, page.update().text
    assert update in whole and "connect-src 'self'" in whole
    assert whole.count("<script>") > update.count("<script>") == 0


def test_a_folder_that_vanishes_and_comes_back(tmp_path):
    folder = started(tmp_path / "run")
    page = LivePage([folder])
    with LoopbackServer({"/update": page.update}, 0) as server:
        folder.rename(tmp_path / "moved")
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(server.address("/update"), timeout=10)
        (tmp_path / "moved").rename(folder)
        with urllib.request.urlopen(server.address("/update"), timeout=10) as answer:
            assert "Ended at step 20" in answer.read().decode()


def serve_process(*words):
    command = [sys.executable, "-m", "fullshard", "report", *map(str, words), "--serve", "--port", "0"]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    )


def test_the_command_serves_and_ctrl_c_ends_it_with_one_line(tmp_path):
    folder = synthetic_run(tmp_path / "run")
    with serve_process(folder) as process:
        line = process.stdout.readline()
        url = line.split()[0]
        assert "until Ctrl-C; the run is not going on" in line
        with urllib.request.urlopen(url, timeout=10) as answer:
            assert "Finished at step 100" in answer.read().decode()
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 130
        assert process.stdout.read() == "" and process.stderr.read().strip() == "fullshard: interrupted"


@pytest.mark.slow
def test_the_command_ends_with_the_run(tmp_path):
    folder = started(tmp_path / "run")
    with held(folder) as run, serve_process(folder) as process:
        assert "until the run ends" in process.stdout.readline()
        time.sleep(1)
        assert process.poll() is None
        append(folder, {"step": 20, **CLOSING})
        run.kill()
        assert process.wait(20) == 0
        assert process.stdout.read().strip() == f"{folder}: finished at step 20"
        assert process.stderr.read() == ""


def test_the_usual_port_may_be_taken(tmp_path, monkeypatch):
    page = LivePage([synthetic_run(tmp_path / "run")])
    with LoopbackServer({}, 0) as taken:
        monkeypatch.setattr(serving, "PORT", taken.port)
        with serving._open(page, None) as server:
            assert server.port not in (0, taken.port)
