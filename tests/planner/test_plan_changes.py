"""The smallest change that makes a run fit, found among runs that are priced by a known sum."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fullshard.config.errors import ConfigError
from fullshard.fsdp.plan import ShardingPlan
from fullshard.parallel.settings import EngineSettings
from fullshard.planner.batch import BatchShape
from fullshard.planner.changes import FREE, OTHER, SLOWER, ChangeSearch, more_devices, shorter_rows
from fullshard.planner.estimate import Estimate
from fullshard.planner.machines import MACHINES, MachineOptions, find_machine
from fullshard.planner.memory import MemoryEstimate
from fullshard.planner.request import PlanRequest
from fullshard.planner.verdict import judge
from fullshard.sft.cli_args import CommandConfig

GIB = 2**30
WEIGHTS, ROW = 16 * GIB, 2 * GIB


def price(request: PlanRequest) -> Estimate:
    """A model of 16 GiB: gradients as large, state twice that, 2 GiB of activations per row of 1024 tokens."""
    config, machine = request.config, request.machine
    sharded = machine.num_processes if request.engine.strategy != "NO_SHARD" else 1
    weights = WEIGHTS // (4 if config.use_4bit_quantization else 1) // sharded
    trained = 0 if config.use_peft_lora else WEIGHTS // sharded
    rows = config.per_device_train_batch_size * ROW * (config.max_length or 1024) // 1024
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


def changes(memory: float, devices: int = 1, engine: dict[str, Any] | None = None, **settings: Any) -> list[Any]:
    """The settings of the smallest changes that fit into so many GiB."""
    config = CommandConfig(**{"per_device_train_batch_size": 8, **settings})
    machine = replace(MACHINES["h100-80gb"], device_memory=int(memory * GIB), num_processes=devices, gpus_per_node=8)
    machine = replace(machine, gpus_per_node=min(devices, 8))
    request = PlanRequest(config, EngineSettings(**(engine or {})), "model", None, machine)
    estimate = price(request)
    assert not estimate.verdict.fits
    search = ChangeSearch(request, estimate, price)
    found = [change.settings for change in search.find()]
    assert search.tried <= 90
    return found


def smallest(memory: float, devices: int = 1, engine: dict[str, Any] | None = None, **settings: Any) -> Any:
    """The first of them; None if nothing fits."""
    return next(iter(changes(memory, devices, engine, **settings)), None)


@pytest.mark.parametrize(
    ("memory", "rows", "settings"),
    [
        (75, 8, {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}),
        (67, 8, {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8}),
        (75, 9, {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 3}),
        (71, 30, {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 10}),
        (65.5, 1, {"gradient_checkpointing": "auto"}),
        (64.5, 1, {"gradient_checkpointing": True}),
    ],
)
def test_memory_of_the_batch_is_saved_first(memory: float, rows: int, settings: dict[str, Any]) -> None:
    assert smallest(memory, per_device_train_batch_size=rows) == settings


def test_evaluations_that_need_the_most_become_smaller() -> None:
    evaluating = {"eval_strategy": "steps", "per_device_eval_batch_size": 64, "per_device_train_batch_size": 2}
    assert smallest(75, **evaluating) == {"per_device_eval_batch_size": 32}
    assert smallest(67, **evaluating) == {
        "per_device_eval_batch_size": 8, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2,
    }  # fmt: skip
    evaluating |= {"per_device_train_batch_size": 64, "per_device_eval_batch_size": 64}
    assert smallest(67, **evaluating) == {
        "per_device_eval_batch_size": 8, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 64,
    }, "evaluations are no larger than batches that are trained, and still too large"  # fmt: skip


ALONE = {"sharding_strategy": "NO_SHARD"}  # more devices do not help


def test_levers_are_tried_from_the_smallest_change_on() -> None:
    assert smallest(60, devices=8, engine=ALONE) == {"fsdp_sharding_strategy": "FULL_SHARD"}
    assert smallest(60) == {"num_processes": 2}
    host = {"fsdp_offload_params": True}
    assert changes(60, engine=ALONE) == [host, {"optim": "adamw_8bit"}]
    assert changes(34, engine=ALONE, optim="adamw_8bit", per_device_train_batch_size=1) == [
        host, {"use_peft_lora": True}
    ]  # fmt: skip


def test_several_changes_have_none_that_is_needless() -> None:
    found = changes(44, engine=ALONE, per_device_train_batch_size=15)
    less = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 15}
    assert found == [{"fsdp_offload_params": True}, {**less, "optim": "adamw_8bit"}]
    found = changes(17.9, engine=ALONE, per_device_train_batch_size=7)
    less = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 7}
    assert found == [{"fsdp_offload_params": True}, {**less, "gradient_checkpointing": "auto", "use_peft_lora": True}]
    found = changes(0.2, engine=ALONE, per_device_train_batch_size=1, max_length=1024)
    assert found == [{"gradient_checkpointing": True, "fsdp_offload_params": True, "max_length": 800}]
    assert changes(0.01, engine=ALONE, per_device_train_batch_size=7) == []


def test_more_devices_are_not_the_only_advice() -> None:
    """Host memory changes nothing about the result; what trains something else is named beside it."""
    found = changes(60)
    assert found == [{"num_processes": 2}, {"fsdp_offload_params": True}, {"optim": "adamw_8bit"}]


@pytest.mark.parametrize(
    ("devices", "memory", "count"), [(8, 3.5, 24), (1, 23, 3), (1, 8.3, 8), (6, 10, 7), (3, 5, 16)]
)
def test_the_fewest_devices_that_fit(devices: int, memory: float, count: int) -> None:
    """Counts need not be powers of two; a node is filled first, then there are whole nodes."""
    once = {"per_device_train_batch_size": 1, "gradient_checkpointing": True}
    assert changes(memory, devices, **once)[0] == {"num_processes": count}
    by_hand = next(n for n in (*range(devices + 1, 9), *range(16, 65, 8)) if 64 / n + 0.25 <= memory)
    assert count == by_hand


def test_fewer_devices_come_before_less_work() -> None:
    """16 devices fit if activations are recomputed, 24 without."""
    settings = {"per_device_train_batch_size": 1, "max_length": 1024}
    assert changes(4.8, 8, **settings)[0] == {"num_processes": 16, "gradient_checkpointing": True}
    assert changes(6.1, 8, **settings)[0] == {"num_processes": 16}


def test_nodes_have_as_many_devices_as_they_have() -> None:
    options = MachineOptions(machine="h100-80gb", num_processes=6, gpus_per_node=6)
    assert [m.num_processes for m in find_machine(options).with_more_devices(24)] == [12, 18, 24]
    assert [m.gpus_per_node for m in find_machine(options).with_more_devices(24)] == [6, 6, 6]
    options = MachineOptions(machine="h100-80gb", num_processes=6)
    assert [(m.num_processes, m.nodes) for m in find_machine(options).with_more_devices(16)] == [
        (7, 1),
        (8, 1),
        (16, 2),
    ]
    options = MachineOptions(machine="cpu", num_processes=4)
    assert [(m.num_processes, m.nodes) for m in find_machine(options).with_more_devices(12)] == [(8, 2), (12, 3)]


def test_meshes_that_the_settings_exclude_are_not_advised() -> None:
    hybrid = {"sharding_strategy": "HYBRID_SHARD", "dp_replicate_size": 2}
    machine = replace(MACHINES["h100-80gb"], num_processes=2, gpus_per_node=2)
    request = PlanRequest(CommandConfig(), EngineSettings(**hybrid), "model", None, machine)
    assert [v.settings["num_processes"] for v in more_devices(request)][:5] == [4, 6, 8, 16, 24]


def test_rows_are_cut_only_as_far_as_needed() -> None:
    settings = {"per_device_train_batch_size": 1, "gradient_checkpointing": True, "activation_offloading": True}
    found = changes(7, engine={**ALONE, "offload_params": True}, max_length=65536, **settings)
    assert found == [{"max_length": 27648}] or found == [{"max_length": 28672}], found
    config = CommandConfig(max_length=4096, per_device_train_batch_size=2)
    request = PlanRequest(config, EngineSettings(), "model", None, MACHINES["h100-80gb"], lengths=[900] * 3 + [1000])
    cut = list(shorter_rows(request))
    assert len(cut) <= 64 and cut[0].request.lengths == [900, cut[0].settings["max_length"]]


def test_settings_that_a_model_excludes_hide_no_others() -> None:
    """4 bits are refused for this model, offloaded activations too: LoRA and the other levers are still found."""

    def refusing(request: PlanRequest) -> Estimate:
        if request.config.use_4bit_quantization or request.config.activation_offloading:
            raise ConfigError("not for this model")
        return price(request)

    machine = replace(MACHINES["h100-80gb"], device_memory=int(16.5 * GIB), node_devices=1)
    machine = replace(machine, gpus_per_node=1, num_processes=1, host_memory=0)
    request = PlanRequest(CommandConfig(per_device_train_batch_size=7), EngineSettings(**ALONE), "model", None, machine)
    found = [change.settings for change in ChangeSearch(request, refusing(request), refusing).find()]
    less = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 7}
    assert {**less, "gradient_checkpointing": True, "use_peft_lora": True} in found


def test_nothing_helps_where_nothing_can() -> None:
    assert smallest(0.01, engine={"sharding_strategy": "NO_SHARD"}) is None


def test_every_lever_is_valid_for_a_plain_run() -> None:
    """None raises for a run with defaults, and each changes something."""
    machine = replace(MACHINES["h100-80gb"], num_processes=2, gpus_per_node=2)
    request = PlanRequest(CommandConfig(), EngineSettings(sharding_strategy="SHARD_GRAD_OP"), "model", None, machine)
    pulled = {lever.__name__: list(lever(request)) for lever in (*FREE, more_devices, *SLOWER, *OTHER)}
    idle = [name for name, found in pulled.items() if not found]
    assert idle == ["smaller_evaluation", "offload_embedding"], "there are neither evaluations nor an adapter"
    assert all(variant.request != request and variant.settings for found in pulled.values() for variant in found)
