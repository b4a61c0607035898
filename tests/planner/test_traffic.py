"""Planned traffic against what the engine really sends, counted by its meter on CPU ranks."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from fullshard.distributed import autograd_collectives, runtime
from fullshard.distributed.ranks import exchange
from fullshard.fsdp import FSDPv2, transformer_auto_wrap_policy
from fullshard.fsdp.plan import ShardingPlan
from fullshard.models.chunked_loss import ChunkedLossHead
from fullshard.parallel.model import join_ranks, shard_model
from fullshard.parallel.settings import EngineSettings
from fullshard.parallel.tensor_parallel import exchanges_of
from fullshard.planner.traffic import LayerExchanges, Ring, ring_along, step_traffic
from fullshard.quant.sharded_groups import Scheme
from tests.fsdp.programs import HUGGING_FACE, STRATEGIES, Stack, batches, llama, loss_of, mesh_for, mine
from tests.pool import ranks
from tests.quant.programs import sharded_qlora, with_lora

UNCOUNTED = ("clipping", "metrics")
"""What the meter does not count: it is not the engine that sends it."""


def counted(model: Any, accumulation: int = 1, sync_each: bool = True) -> int:
    """Bytes that one step sent on the first rank, after a step that recorded the order of the units."""
    for _ in range(2):
        model.meter.reset()
        for index in range(accumulation):
            held = not sync_each and index + 1 < accumulation
            with model.no_sync() if held else contextlib.nullcontext():
                loss_of(model, mine(batches(1, torch.float32)[0])).backward()
        model.zero_grad(set_to_none=True)
    return int(exchange(model.meter.bytes_sent, "bytes sent")[0])


def planned(plan: ShardingPlan, **options: Any) -> int:
    found = step_traffic(plan, gpus_per_node=runtime.world_size(), direct=True, **options)
    assert not any(found.across.values())
    return found.sent - sum(found.inside.get(kind, 0) for kind in UNCOUNTED)


def sharded(model: nn.Module, strategy: str, **options: Any) -> Any:
    return FSDPv2(
        model, mesh_for(strategy), strategy=strategy, auto_wrap_policy=transformer_auto_wrap_policy, **options
    )


@ranks(2)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"])
def test_every_byte_of_a_step(strategy):
    model = sharded(llama(), strategy, small_parameter_bytes=2048)
    assert planned(model.plan) == counted(model) > 0


@ranks(2)
@pytest.mark.parametrize("sync_each", [True, False])
def test_accumulation_of_lora(sync_each):
    model = sharded(with_lora(llama()), "FULL_SHARD", small_parameter_bytes=2048, mixed_precision="bf16")
    expected = planned(model.plan, accumulation=3, sync_each_batch=sync_each)
    assert expected == counted(model, 3, sync_each)


@pytest.mark.slow
@ranks(2, 4)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", HUGGING_FACE)
@pytest.mark.parametrize("small", [0, 2048, 2**20])
def test_every_model_and_strategy(name, strategy, small):
    torch.manual_seed(0)
    model = sharded(HUGGING_FACE[name](), strategy, small_parameter_bytes=small)
    assert planned(model.plan) == counted(model) > 0


@pytest.mark.slow
@ranks(2, 4)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("checkpointed", ["", "plain", "reentrant"])
def test_4_bit_weights_and_checkpointing(strategy, checkpointed):
    model = sharded_qlora(Scheme(double=True), strategy, checkpointed, mixed_precision="bf16")
    expected = planned(model.plan, accumulation=2, without_backward=frozenset())
    assert expected == counted(model, 2)


@pytest.mark.slow
@ranks(2, 4)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("sync_each", [True, False])
@pytest.mark.parametrize("offload", [True, False])
def test_accumulation_and_offload(strategy, sync_each, offload):
    model = sharded(with_lora(llama()), strategy, mixed_precision="bf16", cpu_offload=offload)
    assert planned(model.plan, accumulation=2, sync_each_batch=sync_each) == counted(model, 2, sync_each)


@ranks(2)
def test_layers_that_backward_does_not_reach_are_not_gathered_again():
    model = llama(layers=3)
    model.requires_grad_(False)
    model.model.layers[1].requires_grad_(True)
    model = sharded(model, "FULL_SHARD")
    assert planned(model.plan) == counted(model)
    assert planned(model.plan, without_backward=frozenset()) > planned(model.plan)


@ranks(4)
@pytest.mark.slow
def test_norms_and_metrics(monkeypatch):
    """What the meter does not count is summed over the ranks by torch."""
    sums = []
    real = dist.all_reduce

    def count(value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sums.append((value.nbytes, dist.get_world_size(args[1] if len(args) > 1 else kwargs.get("group"))))
        return real(value, *args, **kwargs)

    model = sharded(llama(), "HYBRID_SHARD")
    loss_of(model, mine(batches(1, torch.float32)[0])).backward()
    monkeypatch.setattr(dist, "all_reduce", count)
    model.clip_grad_norm_(1.0)
    expected = sum(2 * (size - 1) * nbytes // size for nbytes, size in sums)
    assert step_traffic(model.plan, 4).inside["clipping"] == expected > 0


# --- inside and across nodes ----------------------------------------------------------------------------------------


def plan_of(strategy: str, world: int, replicas: int = 1) -> ShardingPlan:
    """The plan of a stack of layers on a mesh that is not there, from the plan of one rank."""
    from fullshard.fsdp.plan_layout import PlanInputs, plan_parameter, plan_unit
    from fullshard.fsdp.strategy import MixedPrecision, ShardingStrategy
    from fullshard.spmd.mesh import VirtualMesh

    hybrid = strategy.startswith("HYBRID")
    shape, names = ((replicas, world // replicas), ("replica", "fsdp")) if hybrid else ((world,), ("fsdp",))
    mesh = VirtualMesh(shape, names)
    terms = PlanInputs(mesh, ShardingStrategy[strategy], MixedPrecision.of("bf16"), ("replica",) if hybrid else ())
    stack = Stack(width=64)
    owner = {name: ".".join(name.split(".")[:2]) if name.startswith("blocks") else "" for name, _ in
             stack.named_parameters()}  # fmt: skip
    units = [
        plan_unit(unit, "Block", [
            plan_parameter([name], p.shape, p.dtype, True, None, terms)
            for name, p in stack.named_parameters() if owner[name] == unit
        ])
        for unit in dict.fromkeys(["", *owner.values()])
    ]  # fmt: skip
    return ShardingPlan(tuple(zip(names, shape, strict=True)), strategy, terms.replica_axes, tuple(units))


def test_a_ring_of_two_nodes_crosses_twice():
    plan = plan_of("FULL_SHARD", 8)
    assert ring_along(plan.axes, ("fsdp",), 8).crossing == 0
    assert ring_along(plan.axes, ("fsdp",), 4).crossing == 2 / 8
    assert ring_along(plan.axes, ("fsdp",), 1).crossing == 1


def test_replicas_in_different_nodes_gather_inside_and_sum_across():
    found = step_traffic(plan_of("HYBRID_SHARD", 8, replicas=2), gpus_per_node=4)
    assert found.across["gather forward"] == found.across["reduce"] == found.inside["replica all-reduce"] == 0
    assert found.inside["gather forward"] > 0 < found.across["replica all-reduce"]


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_nodes_change_where_bytes_go_not_how_many(strategy):
    plan = plan_of(strategy, 8)
    one, two = step_traffic(plan, gpus_per_node=8), step_traffic(plan, gpus_per_node=4)
    assert one.sent == two.sent and not any(one.across.values())
    assert sum(two.across.values()) == pytest.approx(two.sent / 4, rel=0.01)


def test_what_strategies_save():
    full, keeping, copies = (step_traffic(plan_of(s, 8), 8) for s in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"))
    assert full.sent > keeping.sent and not keeping.inside["gather backward"]
    assert not copies.inside["gather forward"] and copies.inside["reduce"] > full.inside["reduce"]


@pytest.mark.parametrize("ring", [Ring(1), Ring(2), Ring(7), Ring(8, direct=True)])
def test_a_sum_is_a_scatter_and_a_gather(ring):
    count = 9600 * ring.size
    whole = ring.scatter_sum(4 * count) + ring.gather(4 * count // ring.size)
    assert ring.sum(count, 4) == whole


def test_offloaded_shards_cross_the_bus():
    plan = plan_of("FULL_SHARD", 4)
    found = step_traffic(plan.offloaded(), 4, accumulation=2)
    layers = sum(unit.shard_bytes for unit in plan.units[1:])
    assert found.from_host == 2 * plan.shard_bytes + 2 * layers
    assert found.to_host == 2 * plan.shard_bytes
    assert step_traffic(plan, 4).from_host == step_traffic(plan, 4).to_host == 0


def test_rings_follow_the_order_of_ranks():
    plan = plan_of("HYBRID_SHARD", 16, replicas=8)
    nodes = np.arange(16) // 4
    along = ring_along(plan.axes, ("replica",), 4)
    assert along.crossing == float(np.mean(nodes[::2] != np.roll(nodes[::2], 1)))


@pytest.mark.slow
@ranks(4)
@pytest.mark.parametrize("lora", [False, True])
def test_every_byte_of_tensor_parallelism(lora):
    """With a frozen embedding, the gradient of the first layer's input is not needed."""
    config = LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    if lora:
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    head = ChunkedLossHead(model)
    engine = EngineSettings(use_cpu=True, tp_size=2)
    join_ranks(engine)
    model = shard_model(model, engine)
    rows, length = 3, 8
    ids = torch.ones(rows, length, dtype=torch.int64)

    def step() -> None:
        with head.loss_pass(1 / 21, 21):
            model(input_ids=ids, labels=ids)["loss"].backward()

    step()
    model.meter.reset()
    autograd_collectives.sent.clear()
    step()
    found = exchange((model.meter.bytes_sent, autograd_collectives.sent["bytes"]), "bytes sent")[0]
    known = {
        name: one._replace(forward_gather=0) if name == "lm_head" else one for name, one in exchanges_of(model).items()
    }
    between = LayerExchanges(known, rows * length, 4, {})
    expected = step_traffic(model.plan, 4, direct=True, between=between)
    statistics = rows * length * (4 + 2 * 4 + 8)  # of each token: largest logit, two sums, the first of the largest
    spared = rows * length * 32 * 4 if lora else 0
    kinds = {kind: size for kind, size in expected.inside.items() if kind.startswith("between")}
    assert sum(kinds.values()) + statistics - spared == found[1] > 0
    assert expected.sent - sum(kinds.values()) - sum(expected.inside[kind] for kind in UNCOUNTED) == found[0] > 0
