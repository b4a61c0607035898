"""The smallest change that makes a run fit, found among runs that are priced by a known sum."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fullshard.capacity.estimate import Estimate
from fullshard.capacity.machines import MACHINES
from fullshard.capacity.memory import MemoryEstimate
from fullshard.capacity.step_trace import BatchShape
from fullshard.capacity.verdict import judge
from fullshard.fsdp.plan import ShardingPlan
from fullshard.parallelize.settings import EngineSettings
from fullshard.train.cli_args import CommandConfig
from fullshard.train.plan_changes import COSTLY, FREE, ChangeSearch, more_devices
from fullshard.train.plan_request import PlanRequest

GIB = 2**30
WEIGHTS, ROW = 16 * GIB, 2 * GIB


def price(request: PlanRequest) -> Estimate:
    """A model of 16 GiB: gradients as large, state twice that, 2 GiB of activations per row of a micro-batch."""
    config, machine = request.config, request.machine
    sharded = machine.num_processes if request.engine.strategy != "NO_SHARD" else 1
    weights = WEIGHTS // (4 if config.use_4bit_quantization else 1) // sharded
    trained = 0 if config.use_peft_lora else WEIGHTS // sharded
    rows = config.per_device_train_batch_size * ROW
    rows //= 1 if config.gradient_checkpointing is False else 2 if config.gradient_checkpointing == "auto" else 8
    parts = {
        "shards": weights, "gradients": trained, "activations": rows,
        "optimizer": 2 * trained // (4 if config.optim == "adamw_8bit" else 1),
    }  # fmt: skip
    if request.engine.offload_params:
        parts = {"activations": rows}
    moments = {"backward": parts}
    if config.eval_strategy != "no":
        moments["evaluation"] = {**parts, "activations": config.per_device_eval_batch_size * ROW // 8}
    memory = MemoryEstimate(moments)
    plan: Any = ShardingPlan((("fsdp", machine.num_processes),), "FULL_SHARD", (), ())
    unused: Any = None
    return Estimate(
        "model", machine, {}, plan, 0, BatchShape(1, 1), (), (), memory, unused, unused, 0.0, judge(memory, machine)
    )


def smallest(memory: float, devices: int = 1, engine: dict[str, Any] | None = None, **settings: Any) -> Any:
    """The settings of the smallest change that fits into so many GiB; None if nothing does."""
    config = CommandConfig(**{"per_device_train_batch_size": 8, **settings})
    machine = replace(MACHINES["h100-80gb"], device_memory=int(memory * GIB), num_processes=devices, gpus_per_node=8)
    machine = replace(machine, gpus_per_node=min(devices, 8))
    request = PlanRequest(config, EngineSettings(**(engine or {})), "model", None, machine)
    estimate = price(request)
    assert not estimate.verdict.fits
    search = ChangeSearch(request, estimate, price)
    changes = search.find()
    assert search.tried <= 60
    return changes[0].settings if changes else None


@pytest.mark.parametrize(
    ("memory", "rows", "settings"),
    [
        (75, 8, {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}),
        (67, 8, {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8}),
        (75, 9, {"gradient_checkpointing": "auto"}),
        (67, 9, {"gradient_checkpointing": True}),
    ],
)
def test_memory_of_the_batch_is_saved_first(memory: float, rows: int, settings: dict[str, Any]) -> None:
    assert smallest(memory, per_device_train_batch_size=rows) == settings


def test_evaluations_that_need_the_most_become_smaller() -> None:
    evaluating = {"eval_strategy": "steps", "per_device_eval_batch_size": 64, "per_device_train_batch_size": 2}
    assert smallest(75, **evaluating) == {"per_device_eval_batch_size": 2}
    assert smallest(67, **evaluating) == {
        "per_device_eval_batch_size": 2, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2,
    }  # fmt: skip


ALONE = {"sharding_strategy": "NO_SHARD"}  # more devices do not help


def test_levers_are_tried_from_the_smallest_change_on() -> None:
    assert smallest(60, devices=8, engine=ALONE) == {"fsdp_sharding_strategy": "FULL_SHARD"}
    assert smallest(60) == {"num_processes": 2}
    assert smallest(60, engine=ALONE) == {"optim": "adamw_8bit"}
    assert smallest(30, engine=ALONE, optim="adamw_8bit", per_device_train_batch_size=1) == {"use_peft_lora": True}


def test_several_changes_have_none_that_is_needless() -> None:
    found = smallest(44, engine=ALONE, per_device_train_batch_size=15)
    assert found == {"gradient_checkpointing": True, "optim": "adamw_8bit"}
    found = smallest(17.9, engine=ALONE, per_device_train_batch_size=7)
    assert found == {"gradient_checkpointing": True, "use_peft_lora": True}
    both = {"use_peft_lora": True, "use_4bit_quantization": True}
    assert smallest(6, engine=ALONE, per_device_train_batch_size=7) == {"gradient_checkpointing": True, **both}
    found = smallest(2, engine=ALONE, per_device_train_batch_size=7)
    assert found == {"gradient_checkpointing": True, "fsdp_offload_params": True}


def test_more_devices_are_not_the_only_advice() -> None:
    machine = replace(MACHINES["h100-80gb"], device_memory=60 * GIB, num_processes=1, gpus_per_node=1)
    request = PlanRequest(CommandConfig(per_device_train_batch_size=8), EngineSettings(), "model", None, machine)
    found = ChangeSearch(request, price(request), price).find()
    assert [change.settings for change in found] == [{"num_processes": 2}, {"optim": "adamw_8bit"}]


def test_nothing_helps_where_nothing_can() -> None:
    assert smallest(0.1, engine={"sharding_strategy": "NO_SHARD"}) is None


def test_every_lever_is_valid_for_a_plain_run() -> None:
    """None raises for a run with defaults, and each changes something."""
    machine = replace(MACHINES["h100-80gb"], num_processes=2, gpus_per_node=2)
    request = PlanRequest(CommandConfig(), EngineSettings(sharding_strategy="SHARD_GRAD_OP"), "model", None, machine)
    pulled = {lever.__name__: list(lever(request)) for lever in (*FREE, more_devices, *COSTLY)}
    idle = [name for name, found in pulled.items() if not found]
    assert idle == ["smaller_evaluation", "offload_embedding"], "there are neither evaluations nor an adapter"
    assert all(variant.request != request and variant.settings for found in pulled.values() for variant in found)
