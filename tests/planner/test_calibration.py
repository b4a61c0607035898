"""Estimated step times of the runs that were measured on one H200."""

import pytest

from benchmarks.plan_time import MEASURED, estimated


@pytest.mark.slow
@pytest.mark.parametrize("name", MEASURED)
def test_estimates_are_near_what_was_measured(name, tmp_path):
    assert estimated(name, tmp_path) == pytest.approx(MEASURED[name][1], rel=0.06)
