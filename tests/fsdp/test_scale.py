"""One rank of 4,096 does no more than one rank of 8: `benchmarks/scale.py` on torch's fake process group."""

import json
import os
import subprocess
import sys

import pytest

from tests.pool import ROOT


def _case(world: int, kind: str) -> dict[str, float]:
    command = [sys.executable, "benchmarks/scale.py", "--quick", "--case", str(world), "FULL_SHARD", kind]
    environment = os.environ | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_the_work_of_a_rank_does_not_grow_with_their_number(kind):
    few, many = _case(8, kind), _case(4096, kind)
    assert many["pass_calls"] <= 1.2 * few["pass_calls"]
    assert many["step_launches"] <= 1.2 * few["step_launches"]
    assert many["groups"] == few["groups"] and many["longest_name"] < 64
    assert max(many["gather_ratio"], many["reduce_ratio"]) <= 1.1
