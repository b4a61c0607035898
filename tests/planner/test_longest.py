"""The longest rows that fit: among runs that are priced by a known sum."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from fullshard.parallel.settings import EngineSettings
from fullshard.planner.changes import SHORTEST
from fullshard.planner.longest import MOST, STEPS, LongestRows, find_longest
from fullshard.planner.machines import MACHINES
from fullshard.planner.request import PlanRequest
from fullshard.planner.tables import print_longest
from fullshard.sft.cli_args import CommandConfig
from tests.planner.test_plan_changes import GIB, price


def request_for(memory: float, **settings: Any) -> PlanRequest:
    """A run on one device with so many GiB."""
    config = CommandConfig(**{"use_peft_lora": True, "eval_strategy": "no", **settings})
    machine = replace(MACHINES["h100-80gb"], device_memory=int(memory * GIB), num_processes=1, gpus_per_node=1)
    return PlanRequest(config, EngineSettings(), "model", None, machine)


def fits(request: PlanRequest, length: int) -> bool:
    return bool(price(replace(request, config=replace(request.config, max_length=length))).verdict.fits)


def longest(request: PlanRequest) -> LongestRows:
    tried: list[str] = []
    result = find_longest(request, price, tried.append)
    assert len(tried) < 20 * len(result.stages) + 20
    return result


@pytest.mark.parametrize("memory", [16.6, 17, 23.7, 40, 79.9, 1000])
@pytest.mark.parametrize("rows", [1, 8])
def test_no_longer_rows_fit(memory: float, rows: int) -> None:
    request = request_for(memory, per_device_train_batch_size=rows)
    result = longest(request)
    first = result.stages[0]
    longer = max(SHORTEST, first.length + first.length // STEPS + 2 * SHORTEST)
    assert (first.length == 0 or fits(request, first.length)) and not fits(request, longer)
    assert first.length == 0 or first.estimate.verdict.fits
    assert first.beyond is not None and first.beyond.verdict.fits is False
    assert result.fits is (first.length > 0)


def test_changes_that_cost_time_come_one_after_another_and_each_allows_longer_rows() -> None:
    result = longest(request_for(24, per_device_train_batch_size=2))
    lengths = [stage.length for stage in result.stages]
    assert lengths == sorted(set(lengths)) and len(lengths) > 2
    assert "per_device_train_batch_size" in result.stages[1].settings
    assert result.stages[-1].settings["fsdp_offload_params"] is True
    for stage in result.stages:
        assert not {"use_4bit_quantization", "max_length", "optim"} & stage.settings.keys()
    assert result.stages[0].limit.startswith("device memory in the backward pass: shards 16.00 GiB, activations")


def test_the_table_has_a_row_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    time: Any = SimpleNamespace(tokens_per_second=1000.0)
    request = request_for(24, per_device_train_batch_size=2)
    result = find_longest(request, lambda tried: replace(price(tried), time=time, positions=1024))
    print_longest(result, Console(width=100, color_system=None))
    out = capsys.readouterr().out
    first, last = result.stages[0], result.stages[-1]
    assert out.startswith(f"The longest rows that fit: {first.length:,} tokens, 2 in a micro-batch.")
    assert "The model has 1,024 positions" in out and "as they are" in out and max(map(len, out.splitlines())) <= 100
    for stage in result.stages:
        assert f"{stage.length:,} " in out
    assert f"What limits the last is {last.limit}." in out


def test_what_does_not_fit_at_all_says_what_is_full() -> None:
    result = longest(request_for(15))
    assert result.stages[0].length == 0 and result.fits is False
    assert "shards 16.00 GiB" in result.stages[0].limit
    assert result.stages[-1].length > 0  # with the weights on the host


def test_there_is_an_end_where_nothing_limits() -> None:
    result = longest(request_for(10**7))
    assert result.stages[-1].length == MOST and result.stages[-1].limit == "nothing up to here"
