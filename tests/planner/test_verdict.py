"""The verdict in words, and when a run certainly does not fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fullshard.planner.machines import MACHINES
from fullshard.planner.memory import MemoryEstimate, StateMemory
from fullshard.planner.verdict import ERROR_BOUND, Change, cannot_fit, judge

GIB = 2**30
MACHINE = replace(MACHINES["h100-80gb"], device_memory=80 * GIB, host_memory=512 * GIB)


def memory(activations: float, host: float = 10, reserved: float = 4) -> MemoryEstimate:
    parts = {"shards": 16 * GIB, "activations": int(activations * GIB), "logits": GIB}
    moments = {"load": {"shards": 16 * GIB}, "backward": parts, "optimizer step": {"shards": 16 * GIB}}
    return MemoryEstimate(moments, (), int(reserved * GIB), {"processes": int(host * GIB)})


def test_a_run_that_fits_says_by_how_much_and_where_its_peak_is() -> None:
    found = judge(memory(20), MACHINE)
    assert found.fits and not found.changes
    assert found.sentences() == [
        "Fits: each device needs 41.00 GiB of 80.00 GiB, 39.00 GiB to spare (49%).",
        "The peak is in the backward pass: activations 20.00 GiB, shards 16.00 GiB, logits 1.00 GiB.",
    ]


def test_a_run_that_does_not_fit_says_what_would_help() -> None:
    found = judge(memory(70), MACHINE)
    assert found.fits is False
    change = Change("gradient_checkpointing true", {"gradient_checkpointing": True}, 40 * GIB)
    assert replace(found, changes=(change,), tried=3).sentences() == [
        "Does not fit: each device needs 91.00 GiB and has 80.00 GiB, 11.00 GiB too little.",
        "The peak is in the backward pass: activations 70.00 GiB, shards 16.00 GiB, logits 1.00 GiB.",
        "Smallest change that fits: gradient_checkpointing true (40.00 GiB per device).",
    ]
    assert replace(found, tried=3).sentences()[-1].startswith("None of 3 changes")


def test_host_memory_counts_too() -> None:
    found = judge(memory(20, host=600), MACHINE)
    assert found.fits is False and found.device_fits
    assert "each node needs 600.00 GiB of host memory and has 512.00 GiB, 88.00 GiB too little" in found.sentences()[0]


def test_what_was_not_traced_is_not_promised_to_fit() -> None:
    known = replace(memory(0), state=StateMemory(16 * GIB, GIB, 2 * GIB))
    unknown = judge(known, MACHINE, untraced="It branches on values.")
    assert unknown.fits is None
    assert unknown.sentences() == [
        "Unknown: the activations of this model cannot be traced, so what a step needs is not known.",
        "It branches on values.",
        "Known for each device: shards 16.00 GiB, gradients 1.00 GiB, optimizer 2.00 GiB.",
    ]
    too_much = judge(memory(70), MACHINE, untraced="It branches on values.")
    assert too_much.fits is False, "what is known is too much already"
    assert too_much.sentences()[0].startswith("Does not fit: each device needs, activations aside, 91.00 GiB")


@pytest.mark.parametrize(("peak", "stops"), [(80, False), (80 / (1 - ERROR_BOUND) - 0.1, False), (84.3, True)])
def test_a_run_is_stopped_only_beyond_the_error_of_the_estimate(peak: float, stops: bool) -> None:
    """What is reserved beside torch's allocations never stops a run."""
    assert cannot_fit(memory(peak - 17, reserved=30), MACHINE) is stops
