"""The guides' samples (examples/xla) print the same numbers on both engines."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.xla import examples
from tests.xla.torch_engine import torch_python

ROOT = examples.FOLDER.parent.parent


@pytest.fixture(scope="module", params=[2, 4])
def on_ranks(request: pytest.FixtureRequest) -> dict[str, str]:
    """What each script prints on the torch engine, on so many Gloo ranks."""
    python = torch_python()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    launch = [python, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(request.param)]
    run = subprocess.run(
        [*launch, "-m", "tests.xla.examples"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return dict(part.split("\n", 1) for part in run.stdout.split("=== ")[1:])


@pytest.fixture(scope="module")
def on_xla() -> dict[str, str]:
    """What each script prints here."""
    return {name: examples.run(name) for name in examples.SCRIPTS}


@pytest.mark.parametrize("name", examples.SCRIPTS)
def test_both_engines_print_the_same(name: str, on_ranks: dict[str, str], on_xla: dict[str, str]) -> None:
    ours, theirs = examples.values(on_xla[name]), examples.values(on_ranks[name])
    assert ours.keys() == theirs.keys() and len(ours) >= 2
    for label, numbers in ours.items():
        norm = numbers[1]  # a sum may cancel
        assert numbers == pytest.approx(theirs[label], rel=1e-5, abs=1e-5 * norm), label
    layouts = [line for line in on_xla[name].splitlines() if line.startswith("(")]
    assert layouts == [line for line in on_ranks[name].splitlines() if line.startswith("(")]
