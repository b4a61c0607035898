"""Planned runs of a small model, priced for real: what must hold for any constants, and a search whose files give the
same price again."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from fullshard.parallel.settings import EngineSettings
from fullshard.planner.estimate import Estimate, Estimator
from fullshard.planner.machines import MachineOptions, find_machine
from fullshard.planner.request import PlanRequest
from fullshard.planner.search import search_settings
from fullshard.sft.checked_run import sharding_settings
from fullshard.sft.cli_args import parse

SHAPE = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 4096,
    "max_position_embeddings": 256, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model")
    (place / "config.json").write_text(json.dumps(SHAPE))
    return place


@pytest.fixture(scope="module")
def price() -> Estimator:
    """One for all tests, so that models are built and traced once."""
    return Estimator()


def asked(folder: Path, *words: str, devices: int = 1, per_node: int | None = None, **machine: Any) -> PlanRequest:
    given = ["--model_name_or_path", str(folder), "--bf16", "--max_length", "128", *words]
    config = parse(given).config
    there = find_machine(MachineOptions("h100-80gb", devices, per_node, **machine))
    return PlanRequest(config, sharding_settings(config, EngineSettings(), []), str(folder), None, there)


def with_strategy(request: PlanRequest, strategy: str, **more: Any) -> PlanRequest:
    engine = dataclasses.replace(request.engine, sharding_strategy=strategy, **more)
    return dataclasses.replace(request, engine=engine)


def test_more_devices_never_need_more_memory_each(folder, price):
    found = [price(asked(folder, devices=count)).memory for count in (2, 4, 8, 64)]
    peaks = [memory.peak for memory in found]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[0] > peaks[-1]


def test_larger_micro_batches_need_more_memory_and_time(folder, price):
    found = [price(asked(folder, "--per_device_train_batch_size", str(rows))) for rows in (1, 2, 8)]
    assert [e.memory.peak for e in found] == sorted(e.memory.peak for e in found)
    assert [e.time.total for e in found] == sorted(e.time.total for e in found)


def test_recomputation_needs_less_memory_and_more_operations(folder, price):
    kept, again = (price(asked(folder, "--gradient_checkpointing", value)) for value in ("false", "true"))
    assert again.memory.peak < kept.memory.peak
    assert again.time.flops > kept.time.flops
    assert again.flops_per_token == kept.flops_per_token


LAYER = 2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 512
WEIGHTS = 4 * LAYER + 256 * 4096
ATTENTION = 4 * (2 + 5) * 256 * 128 / 2 * 2


def test_operations_per_token_are_those_of_the_model(folder, price):
    """Six for each weight of a product: two of forward and four of backward; and attention's."""
    assert price(asked(folder)).flops_per_token == pytest.approx(6 * WEIGHTS + ATTENTION, rel=1e-3)


@pytest.mark.slow
def test_operations_per_token_with_an_adapter(folder, price):
    """Four for each frozen weight, and at most six for each of the adapter's, which kernels compute on the way."""
    found = price(asked(folder, "--use_peft_lora", "--lora_r", "8", "--lora_target_modules", "all-linear"))
    adapters = 4 * 8 * (2 * (256 + 256) + 2 * (256 + 128) + 3 * (256 + 512))
    frozen = 4 * WEIGHTS + ATTENTION
    assert frozen <= found.flops_per_token <= frozen + 6 * adapters


@pytest.mark.parametrize("pair", [
    ("FULL_SHARD", "SHARD_GRAD_OP"), pytest.param(("HYBRID_SHARD", "HYBRID_SHARD_ZERO2"), marks=pytest.mark.slow),
])  # fmt: skip
def test_strategies_that_share_a_layout_are_priced_like_alone(folder, pair):
    """A planned model is shared between strategies; each price equals that of a run of its own."""
    request, shared = asked(folder, devices=16), Estimator()
    shared(with_strategy(request, pair[0]))
    one = with_strategy(request, pair[1], offload_params=True)
    assert _comparable(shared(one)) == _comparable(Estimator()(one))
    assert len(shared._models) == 1


def _comparable(estimate: Estimate) -> Any:
    return estimate.plan, estimate.memory, estimate.traffic, estimate.time, estimate.levels


@pytest.mark.parametrize("allow", [(), pytest.param(("lora", "qlora", "fp8"), marks=pytest.mark.slow)])
def test_files_of_a_search_have_the_price_that_was_shown(folder, price, allow, tmp_path):
    """On a machine that is too small for the whole batch, so that there is something to find."""
    whole = price(asked(folder, devices=16)).verdict.needs
    request = asked(folder, devices=16, device_memory=f"{int(whole * 0.98)}B")
    result = search_settings(request, price, allow)
    assert result.fitting
    assert all(found.fits for found in result.fitting)
    for found in result.fitting[:3]:
        (tmp_path / "run.yaml").write_text(found.yaml())
        config = parse([str(tmp_path / "run.yaml")]).config
        engine = sharding_settings(config, EngineSettings(), [])
        again = Estimator()(PlanRequest(config, engine, str(folder), None, request.machine))
        assert _comparable(again) == _comparable(found.estimate)


def test_where_nothing_fits_it_is_said(folder, price):
    result = search_settings(asked(folder, devices=2, device_memory="1MiB"), price)
    assert not result.fitting and result.nearest is not None
    assert not result.nearest.fits
