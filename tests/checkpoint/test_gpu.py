"""Checkpoints on a GPU: one rank, and two that share it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 2])
def test_saves_and_resumes_on_a_gpu(tmp_path, count):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(count), "--master_port", "29713"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, str(ROOT / "tests/checkpoint/gpu_program.py"), str(tmp_path)],
        env=env, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the same to the bit" in done.stdout
