"""Steps whose layers run in slices of the sequence: traced like those with values, and smaller."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fullshard.activations.levels import Level
from fullshard.activations.slices import SliceCount
from fullshard.models.slice_check import apply_slices, try_slices
from fullshard.planner.batch import BatchShape
from fullshard.planner.step_trace import StepTrace
from fullshard.planner.tracer import trace_evaluation, trace_step
from fullshard.quant.config import Quantization
from fullshard.quant.sharded_groups import Scheme
from tests.planner.measured_run import Setting, plan
from tests.planner.small_models import planned
from tests.planner.test_activations import bytes_and_operations
from tests.planner.test_memory import check
from tests.pool import ranks

HALF: dict[str, Any] = {"dtype": torch.bfloat16, "precision": "bf16"}
BATCH = BatchShape(1, 61)
COUNT = 5
"""More than three: without values, one of those between the first and the last stands for all of them."""
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("llama", {}),
    "fused lora": ("qwen3", {**HALF, "lora": {}, "fused": True}),
    "qlora": ("llama", {**HALF, "lora": {}, "fused": True, "quantize": Quantization(Scheme())}),
    "experts": ("mixtral", {}),
    "gpt2": ("gpt2", {"lora": {}}),
}


def sliced(case: str, device: str, slices: int = COUNT, **more: Any) -> Any:
    name, options = CASES[case]
    step = planned(name, device, **options, **more)
    if slices > 1:
        assert apply_slices(step.model, try_slices(step.model), SliceCount(slices))
    return step


@pytest.mark.parametrize("level", [Level.RECOMPUTE_MLP, Level.RECOMPUTE], ids=lambda level: level.name)
@pytest.mark.parametrize("case", [pytest.param(c, marks=() if c == "fused lora" else pytest.mark.slow) for c in CASES])
def test_slices_are_traced_exactly(case: str, level: Level) -> None:
    if "quantize" in CASES[case][1]:  # the tables of 4-bit codes are made once in a process
        for device in ("cpu", "meta"):
            trace_step(sliced(case, device), BATCH, level)
    measured, traced = (trace_step(sliced(case, device), BATCH, level) for device in ("cpu", "meta"))
    assert bytes_and_operations(traced) == bytes_and_operations(measured)


def backward_peak(trace: StepTrace) -> int:
    """The most bytes in the backward of a layer, above what the layers before it keep."""
    return max(s.peak for s in trace.segments if s.unit and s.moment == "backward")


@pytest.mark.parametrize("case", ["full", "fused lora"])
def test_the_inside_of_a_layer_is_small(case: str) -> None:
    """With wide MLPs, what a recomputed layer needs in backward falls from the inside of the MLP to a few times the
    width of the layer."""
    wide, long = {"intermediate_size": 1024}, BatchShape(1, 2048)  # 16 times the hidden size
    whole, parts = (trace_step(sliced(case, "meta", n, **wide), long, Level.RECOMPUTE) for n in (1, 16))
    states = 2048 * 64 * (4 if case == "full" else 2)
    assert backward_peak(whole) > 40 * states > 24 * states > backward_peak(parts)
    # A part is computed in forward and once more in backward, as without slices, which do not compute the output of a
    # last product of torch's again.
    last = 2 * 2 * 2048 * 1024 * 64 if case == "full" else 0
    for value, more in (
        (lambda s: s.flops, last),
        (lambda s: s.recomputed, last),
        (lambda s: s.flops - s.recomputed, 0),
    ):
        one, other = (sum(value(s) for s in t.segments) for t in (whole, parts))
        assert other == pytest.approx(one + more, rel=0.005)


def test_layers_that_keep_everything_are_not_sliced() -> None:
    traces = (trace_step(sliced("full", "meta", n), BATCH, Level.KEEP_ALL) for n in (1, COUNT))
    whole, parts = ([s for s in trace.segments if s.unit] for trace in traces)
    assert whole == parts


@pytest.mark.slow
@ranks(1)
def test_planned_memory_is_that_of_a_run(world_size: int, tmp_path: Path) -> None:
    """Every byte of a run with slices against its plan, and against the same run without them."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 96, "intermediate_size": 1536, "vocab_size": 400}
    peaks = []
    for slices in ("4", "1"):
        train = {"gradient_checkpointing": True, "sequence_slices": slices}
        setting = Setting("slices", sizes=sizes, train=train, rows=1, length=512)
        check(setting, tmp_path / slices, world_size, 0.03)
        _, estimate = plan(setting, tmp_path / slices / "model", tmp_path)
        peaks.append(estimate.moments["backward"]["activations"])
    assert peaks[0] < peaks[1] / 2


def test_evaluations_are_sliced() -> None:
    wide, long = {"intermediate_size": 1024}, BatchShape(1, 2048)
    whole, parts = (trace_evaluation(sliced("full", "meta", n, **wide), long) for n in (1, 16))
    peaks = [max(s.peak for s in t.segments if s.unit) for t in (whole, parts)]
    assert peaks[1] < peaks[0] / 3
