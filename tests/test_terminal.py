"""Whole commands as a new user sees them: on a terminal of 80 columns, and in a pipe. Every line is one of ours."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from tests.pool import ROOT
from tests.screen import screen
from tests.sft.tiny import make_folder

WIDTH = 80
OURS = (
    r"transport: ", r"(training|evaluation) data: ", r"plan(ned peak)?: ", r"      (memory|optimizer)",
    r"trainable params: ", r"\[rank 0\] INFO loaded ", r"step +\d+/8  (loss|eval loss|train loss) ", "━",
    r"(steps|tokens|training loss|token accuracy) ",
    r"(evaluation loss|evaluation accuracy|tokens per second|memory) ", r"(adapter, tokenizer, card|checkpoints) ",
    r"(metrics|report|talk to it) ", r"                          \d",
)  # fmt: skip


def command() -> list[str]:
    return [
        sys.executable, "-m", "fullshard", "sft", "--model_name_or_path", "model", "--dataset_name", "data",
        "--output_dir", "out", "--overwrite", "--max_steps", "8", "--logging_steps", "2", "--eval_strategy", "steps",
        "--eval_steps", "4", "--use_peft_lora", "--lora_target_modules", "all-linear", "--max_seq_len", "48",
        "--cache_dir", "cache",
    ]  # fmt: skip


def environment(folder: Path) -> dict[str, str]:
    """As in a new user's shell: nothing is configured, and the window says how wide it is."""
    own = {"PYTHONPATH": str(ROOT), "XDG_CONFIG_HOME": str(folder), "HF_HOME": str(folder), "TERM": "xterm-256color"}
    shell = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    return {**shell, **own, "OMP_NUM_THREADS": "1"}


def on_a_terminal(words: list[str], folder: Path) -> tuple[int, str]:
    main, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 40, WIDTH, 0, 0))
    process = subprocess.Popen(words, stdin=side, stdout=side, stderr=side, cwd=folder, env=environment(folder))
    os.close(side)
    written = b""
    while True:
        try:
            part = os.read(main, 4096)
        except OSError:  # the other side is closed
            part = b""
        if not part:
            break
        written += part
    os.close(main)
    return process.wait(60), written.decode()


@pytest.mark.slow
def test_a_run_on_a_terminal_and_in_a_pipe(tmp_path: Path) -> None:
    make_folder(tmp_path)
    code, written = on_a_terminal(command(), tmp_path)
    assert code == 0, written
    lines = [line for line in screen(written, WIDTH) if line]
    foreign = [line for line in lines if not re.match("|".join(OURS), line)]
    assert len(foreign) <= 2 and not re.search("warn|deprecat", " ".join(foreign).lower()), foreign  # of a long path
    steps = [line for line in lines if line.startswith("step ")]
    assert [line.split()[1] for line in steps] == ["2/8", "4/8", "4/8", "6/8", "8/8", "8/8", "8/8"]
    assert all(re.search(r"  epoch \d\.\d\d$", line) for line in steps if "eval" in line)
    losses = [line for line in steps if not re.search("eval|train", line)]
    assert len({len(line) for line in losses}) == 1 and all("tok/s" in line for line in losses)
    assert "mean of all 8 steps" in "\n".join(lines)

    piped = subprocess.run(command(), cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True)
    assert piped.returncode == 0 and "\x1b" not in piped.stdout + piped.stderr and "━" not in piped.stdout
    assert not [line for line in piped.stdout.splitlines() if not re.match("|".join(OURS), line)]
    assert [line for line in piped.stderr.splitlines() if not line.startswith("[rank 0] INFO loaded ")] == []
    assert len([line for line in piped.stdout.splitlines() if " ETA " in line]) == 4
