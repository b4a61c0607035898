"""Weights on a GPU: ranks that share one (Gloo), and one rank alone (NCCL)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROGRAM = Path(__file__).with_name("gpu_program.py")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("count", [1, 2])
def test_weights_on_a_gpu(count):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(count), str(PROGRAM)]
    env = {**os.environ, "FULLSHARD_DEVICE": "cuda", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROGRAM.parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    assert done.stdout.count("resumed bit for bit") == count, done.stdout
