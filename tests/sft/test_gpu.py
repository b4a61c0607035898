"""Training on one GPU against the same run on the CPU, and what the chunked head saves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu


def test_one_gpu(tmp_path: Path) -> None:
    environment = {**os.environ, "FULLSHARD_CACHE": str(tmp_path)}
    command = [sys.executable, "-m", "tests.sft.gpu_program", str(tmp_path)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0 and "all right" in ran.stdout, ran.stdout + ran.stderr
