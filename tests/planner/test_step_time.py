"""The estimate of a step's time: what must hold whatever the constants are, and how communication overlaps."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fullshard.activations.levels import Level
from fullshard.device import accelerator
from fullshard.fsdp.plan import ParameterPlan
from fullshard.fsdp.plan_layout import plan_unit
from fullshard.fsdp.strategy import BackwardPrefetch
from fullshard.models.kernels_on_meta import FLOPS, padded_operations
from fullshard.planner.batch import BatchShape
from fullshard.planner.machines import MACHINES, MachineOptions, find_machine
from fullshard.planner.step_time import (
    Stage,
    StepOptions,
    StepTime,
    estimate_time,
    flops_per_token,
    micro_batch_seconds,
    packed_weights,
)
from fullshard.planner.step_trace import Segment, StepTrace, TracedModel
from tests.planner.test_traffic import plan_of

PRODUCTS = "matrix products and attention"
LAYERS = tuple(f"blocks.{index}" for index in range(3))
KINDS = dict.fromkeys(LAYERS, "blocks.0")


def trace(batch: BatchShape, level: Level) -> StepTrace:
    """A traced step of one layer: backward is twice forward, and recomputation once more."""
    tokens = batch.tokens
    work = {"forward": 1, "backward": 2 + (level >= Level.RECOMPUTE)}
    kept = {Level.KEEP_ALL: 8192, Level.RECOMPUTE: 1024, Level.OFFLOAD: 0}[level] * tokens
    own = [Segment("", moment, 0, 0, 0, tokens * 10**8, tokens * 10**4) for moment in ("forward", "loss", "backward")]
    layer = [Segment("blocks.0", moment, 0, kept, 0, tokens * many * 10**9, tokens * many * 10**5)
             for moment, many in work.items()]  # fmt: skip
    return StepTrace((own[0], layer[0], own[1], layer[1], own[2]))


def step(
    rows: int = 8,
    devices: int = 1,
    machine: str = "h100-80gb",
    level: Level = Level.KEEP_ALL,
    strategy: str = "FULL_SHARD",
    accumulation: int = 1,
    gpus_per_node: int | None = None,
    offload: bool = False,
    **options: object,
) -> StepTime:
    batch = BatchShape(rows, 1024, accumulation)
    traces = {each: trace(batch, each) for each in (Level.KEEP_ALL, Level.RECOMPUTE, Level.OFFLOAD)}
    plan = plan_of(strategy, devices, replicas=2 if strategy.startswith("HYBRID") else 1)
    plan = plan.offloaded() if offload else plan
    there = find_machine(MachineOptions(machine, devices, gpus_per_node))
    return estimate_time(plan, there, TracedModel(traces, LAYERS, KINDS), [level] * 3, batch, StepOptions(**options))  # type: ignore


@pytest.mark.parametrize(
    ("kind", "longer"), [("attention", 1.43), ("attention backward", 1.83), ("grouped products", 1.1)]
)
def test_attention_and_grouped_products_are_slower_than_plain_ones(kind: str, longer: float) -> None:
    """The shares that were measured on one H200, of which plain products reach 0.694."""
    batch = BatchShape(8, 1024)

    def products(**kinds: int) -> float:
        layer = Segment("blocks.0", "forward", 0, 0, 0, 10**15, 0, kinds)
        model = TracedModel({Level.KEEP_ALL: StepTrace((layer,))}, LAYERS, KINDS)
        there, levels = find_machine(MachineOptions("h200", 1)), [Level.KEEP_ALL] * 3
        return estimate_time(plan_of("FULL_SHARD", 1), there, model, levels, batch, StepOptions()).parts[PRODUCTS]

    assert products(**{kind: 10**15}) / products() == pytest.approx(longer, abs=0.01)


def test_groups_that_do_not_fill_their_tiles_pay_for_all_of_them() -> None:
    """128 rows of a grouped product are computed at a time, on accelerators."""
    a, b = torch.empty(1024, 16, device="meta"), torch.empty(8, 16, 32, device="meta")
    grouped = torch.ops.aten._grouped_mm

    def operations(device: str, rows: int, imbalance: float = 1.0) -> float:
        with accelerator.meta_stands_for(torch.device(device), imbalance=imbalance):
            return padded_operations(grouped, (a[:rows], b, None)) / FLOPS[grouped](a[:rows], b, None)

    assert operations("cuda", 1024) == 1 and operations("cuda", 512) == 2 and operations("cpu", 512) == 1
    assert operations("cuda", 1024, imbalance=2) == (256 + 7 * 128) / 1024
    assert operations("cuda", 1024, imbalance=100) == 1, "all rows in one group"


def test_operations_follow_from_the_segments():
    batch = BatchShape(2, 1024)
    traces = {level: trace(batch, level) for level in (Level.KEEP_ALL, Level.RECOMPUTE)}
    assert flops_per_token(TracedModel(traces, LAYERS, KINDS), batch) == 3 * 3e9 + 3e8
    assert step(rows=2, accumulation=3).flops == 3 * 2048 * (9.3e9)


@pytest.mark.parametrize("devices", [1, 8])
def test_a_larger_batch_takes_longer_and_is_never_less_efficient(devices):
    times = [step(rows, devices) for rows in (1, 2, 4, 8, 64)]
    assert [t.total for t in times] == sorted(t.total for t in times)
    rates = [t.tokens_per_second for t in times]
    assert rates == sorted(rates)


def test_recomputation_costs_time_and_moving_inputs_no_less():
    keep, again, moved = (step(level=level) for level in (Level.KEEP_ALL, Level.RECOMPUTE, Level.OFFLOAD))
    assert keep.total < again.total <= moved.total
    assert again.flops / keep.flops == pytest.approx(12.3 / 9.3)


def test_devices_add_communication_and_tokens():
    one, eight, two_nodes = step(devices=1), step(devices=8), step(devices=8, gpus_per_node=4)
    assert one.total <= eight.total <= two_nodes.total
    assert eight.tokens == 8 * one.tokens
    slow = step(devices=8, machine="rtx4090").parts["waiting for communication"]
    assert slow > step(devices=8).parts.get("waiting for communication", 0)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "HYBRID_SHARD"])
def test_keeping_gathered_values_and_holding_gradients_back_wait_less(strategy):
    keeping = {"FULL_SHARD": "SHARD_GRAD_OP", "HYBRID_SHARD": "HYBRID_SHARD_ZERO2"}[strategy]
    settings = {"rows": 1, "devices": 8, "machine": "t4", "gpus_per_node": 4, "accumulation": 4}
    assert step(strategy=keeping, **settings).total < step(strategy=strategy, **settings).total
    held, each = (step(strategy=strategy, sync_each_batch=sync, **settings).total for sync in (False, True))
    assert held < each


def test_accumulation_repeats_everything_but_the_update():
    once, thrice = step(), step(accumulation=3)
    update = once.parts["optimizer and clipping"]
    assert thrice.parts["optimizer and clipping"] == update
    assert thrice.total - update == pytest.approx(3 * (once.total - update))


def test_offload_takes_longer():
    assert step(rows=1, offload=True, optimizer_state=10**6).total > step(rows=1, optimizer_state=10**6).total


def test_a_dtype_that_the_hardware_lacks_is_said():
    slow, fast = step(machine="v100-32gb"), step(machine="v100-32gb", dtype="float16")
    assert slow.total > fast.total
    assert any("no bfloat16 in hardware" in line for line in slow.assumptions)
    assert not any("in hardware" in line for line in fast.assumptions)


def test_parts_add_up_to_the_step():
    found = step(devices=8, offload=True, level=Level.OFFLOAD)
    assert found.total == pytest.approx(sum(found.parts.values()))
    assert all(seconds > 0 for seconds in found.parts.values())


def test_weights_in_few_bits_are_counted_by_format():
    def parameter(name: str, *shape: int, dtype: str = "bfloat16") -> ParameterPlan:
        return ParameterPlan((name,), shape, dtype, dtype, dtype, False, (None,) * len(shape), None, 1, shape, True)

    parameters = [
        parameter("q.packed", 2, 8192, dtype="uint8"), parameter("q.absmax", 2, 256, dtype="uint8"),
        parameter("k.packed", 64, 32, dtype="uint8"), parameter("k.scales", 64, 4, dtype="uint8"),
        parameter("q.lora_A.default.weight", 8, 64), parameter("norm.weight", 64), parameter("moe.gate_up", 4, 8, 16),
        parameter("experts.down", 4, 8192, dtype="uint8"), parameter("experts.down_absmax", 4, 256, dtype="uint8"),
    ]  # fmt: skip
    assert packed_weights([plan_unit("layer", "Layer", parameters)]) == (2 * 2 * 8192 + 2 * 4 * 8192, 64 * 32)


@pytest.mark.parametrize("name", MACHINES)
def test_every_machine_has_a_step_time(name):
    found = step(rows=1, machine=name, devices=2, optimizer_state=10**6)
    assert 0 < found.total < 3600
    assert found.assumptions


# --- overlap --------------------------------------------------------------------------------------------------------


def stages(count: int, compute: float, arrives: float = 0.0, leaves: float = 0.0) -> list[Stage]:
    return [Stage(products=compute, arrives=arrives, leaves=leaves) for _ in range(count)]


def test_compute_hides_faster_communication_but_the_first_and_the_last():
    assert micro_batch_seconds(stages(4, 2.0, 1.0), []) == 1.0 + 8.0
    assert micro_batch_seconds([], stages(4, 2.0, 0.0, 1.0)) == 8.0 + 1.0


def test_slower_communication_sets_the_pace():
    assert micro_batch_seconds(stages(4, 1.0, 2.0), []) == 8.0 + 1.0
    assert 4 * (1.0 + 2.0) <= micro_batch_seconds([], stages(4, 1.0, 1.0, 2.0)) < 4 * (1.0 + 1.0 + 2.0)


def test_without_prefetch_everything_waits():
    assert micro_batch_seconds(stages(4, 2.0, 1.0), [], forward_prefetch=False) == 12.0
    late = {"backward_prefetch": BackwardPrefetch.NONE}
    assert micro_batch_seconds([], stages(4, 2.0, 1.0), **late) == 12.0 > micro_batch_seconds([], stages(4, 2.0, 1.0))


def test_held_back_gradients_do_not_leave():
    assert micro_batch_seconds(stages(2, 1.0), stages(2, 1.0, leaves=5.0), reduces=False) == 4.0


def test_a_stage_takes_no_less_than_its_transfers():
    moved = [dataclasses.replace(stage, bus=3.0) for stage in stages(2, 1.0)]
    assert micro_batch_seconds(moved, []) == 6.0
