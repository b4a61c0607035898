"""Experts by grouped products on 1, 2 and 4 ranks: losses and gradients of transformers' loop over experts on one
device, with PEFT's own forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fullshard.fsdp import FSDPv2, checkpoint_module, transformer_auto_wrap_policy
from fullshard.models.experts import use_own_experts
from fullshard.quant.quantize import dequantize_model, quantize_model
from fullshard.quant.sharded_groups import Scheme
from tests.fsdp.programs import STRATEGIES, mean_over_ranks, mesh_for, mine
from tests.models.test_experts import EIGHT, with_lora
from tests.pool import ranks
from tests.quant.programs import batches, train
from tests.sft.test_all_linear import make

KINDS = ("dense", "lora", "4 bits")


def build(family: str, kind: str, own: bool, dtype: torch.dtype = torch.float32) -> Any:
    """A model with our experts, or the oracle with transformers'."""
    model = make(family).to(dtype)
    if kind == "4 bits":
        model = quantize_model(model, Scheme(double=True))
        model = model if own else dequantize_model(model)
    if own:
        assert use_own_experts(model)
    else:
        model.set_experts_implementation("eager")
    if kind != "dense":
        model = with_lora(model).to(dtype)
    return model.train()


def check(family: str, kind: str, strategy: str, checkpointed: bool = False, offload: bool = False) -> None:
    alone, model = build(family, kind, own=False), build(family, kind, own=True)
    if checkpointed:
        for layer in (model if kind == "dense" else model.get_base_model()).model.layers:
            checkpoint_module(layer)
    model = FSDPv2(
        model, mesh_for(strategy), strategy=strategy, auto_wrap_policy=transformer_auto_wrap_policy,
        cpu_offload=offload, small_parameter_bytes=1024,
    )  # fmt: skip
    batch = batches(1)[0]
    expected = alone(input_ids=batch, labels=batch).loss
    expected.backward()
    loss = model(input_ids=mine(batch), labels=mine(batch)).loss
    loss.backward()
    assert mean_over_ranks(loss) == pytest.approx(expected.item(), rel=1e-5)
    theirs = {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}
    found = {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}
    largest = max(float(g.abs().max()) for g in theirs.values())
    assert theirs.keys() <= found.keys() and any("experts" in name for name in theirs)
    for name, grad in theirs.items():
        torch.testing.assert_close(found[name], grad, rtol=0, atol=1e-5 * largest, msg=name)
    for one in (alone, model):
        one.zero_grad()
    assert train(model, 3, sharded=True) == pytest.approx(train(alone, 3, sharded=False), rel=1e-4)


FAST = [("Qwen3Moe", "lora", "FULL_SHARD"), ("GptOss", "4 bits", "SHARD_GRAD_OP"), ("Mixtral", "dense", "FULL_SHARD")]


@ranks(2)
@pytest.mark.parametrize(("family", "kind", "strategy"), FAST)
def test_two_ranks(family: str, kind: str, strategy: str) -> None:
    check(family, kind, strategy)


@ranks(1, 2, 4)
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", EIGHT)
def test_every_family(family: str, kind: str) -> None:
    check(family, kind, "FULL_SHARD")


@ranks(4)
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy(strategy: str, kind: str) -> None:
    check("GptOss" if kind == "lora" else "DeepseekV3", kind, strategy)


@ranks(2)
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_checkpointed_and_offloaded(kind: str) -> None:
    check("Qwen3Moe", kind, "FULL_SHARD", checkpointed=True, offload=True)


@ranks(2)
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_units(kind: str) -> None:
    """Units of a kind share one graph, and other routings compile nothing again."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    alone, model = build("Mixtral", kind, own=False), build("Mixtral", kind, own=True)
    model = FSDPv2(model, mesh_for("FULL_SHARD"), auto_wrap_policy=transformer_auto_wrap_policy)
    model.compile_units(backend="aot_eager")
    expected = train(alone, 4, sharded=False)
    assert train(model, 1, sharded=True) == pytest.approx(expected[:1], rel=1e-4)
    graphs = counters["stats"]["unique_graphs"]
    assert graphs == 1 and not counters["graph_break"]
    train(model, 3, sharded=True)
    assert counters["stats"]["unique_graphs"] == graphs
