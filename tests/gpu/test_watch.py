"""The watch on NCCL: several ranks on one GPU, as nodes of one rank each."""

import subprocess
import sys

import pytest

from tests.pool import ROOT


@pytest.mark.gpu
@pytest.mark.slow
def test_missing_ranks_are_named_on_nccl_and_everything_ends():
    run = subprocess.run(
        [sys.executable, "-m", "tests.gpu.watch_program"], cwd=ROOT, capture_output=True, text=True, timeout=400
    )
    assert run.returncode == 0, run.stdout + run.stderr
