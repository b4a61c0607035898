"""`fullshard chat` on one GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu


def test_talking_on_one_gpu(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.report.gpu_program", str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0 and "all right" in ran.stdout, ran.stdout + ran.stderr
