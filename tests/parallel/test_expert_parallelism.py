"""Experts split over ranks: losses, gradients and norms are those of transformers' loop over experts on one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from fullshard.config.errors import ConfigError
from fullshard.distributed import data_ranks, runtime
from fullshard.fsdp.plan import ShardingPlan
from fullshard.models.routing import TokensPerExpert
from fullshard.parallel.model import join_ranks, shard_model
from fullshard.parallel.prepare import prepare
from fullshard.parallel.settings import EngineSettings
from fullshard.weights.fill import fill
from tests.fsdp.programs import exact, mean_over_ranks, mine
from tests.models.test_experts_sharded import KINDS, build
from tests.pool import ranks
from tests.quant.programs import batches, train
from tests.sft.test_all_linear import FAMILIES as SHAPES
from tests.sft.test_all_linear import make

FAMILIES = ("Mixtral", "Qwen3Moe", "DeepseekV3", "GptOss", "GraniteMoe")
CLOSE = {torch.float64: 1e-10, torch.float32: 1e-5}


def sharded(family: str, kind: str, ep: int, dtype: torch.dtype, **options: Any) -> Any:
    model = build(family, kind, own=True, dtype=dtype)
    return shard_model(model, EngineSettings(ep_size=ep, **options), small_parameter_bytes=1024)


def check(family: str, kind: str, ep: int, dtype: torch.dtype | None = None, **options: Any) -> Any:
    dtype = dtype or (torch.float32 if kind == "4 bits" else torch.float64)  # 4-bit products are in fp32
    with exact(dtype):
        return check_in(family, kind, ep, dtype, options)


def check_in(family: str, kind: str, ep: int, dtype: torch.dtype, options: dict[str, Any]) -> Any:
    join_ranks(EngineSettings(ep_size=ep, **options))
    alone, model = build(family, kind, False, dtype), sharded(family, kind, ep, dtype, **options)
    close = CLOSE[dtype]
    for batch in batches(2):  # the second without synchronization of the first
        expected = alone(input_ids=batch, labels=batch).loss
        expected.backward()
    for i, batch in enumerate(batches(2)):
        rows = batch.chunk(data_ranks.data_size())[data_ranks.data_rank()]
        with model.no_sync() if i == 0 and kind != "4 bits" else torch.enable_grad():
            loss = model(input_ids=rows, labels=rows).loss
            loss.backward()
    assert mean_over_ranks(loss) == pytest.approx(expected.item(), rel=close)
    theirs = {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}
    own = {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}
    largest = max(float(g.abs().max()) for g in theirs.values())
    assert theirs.keys() <= own.keys() and any("experts" in name for name in theirs)
    for name, grad in theirs.items():
        torch.testing.assert_close(own[name], grad, rtol=0, atol=close * largest, msg=name)
    norm = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
    assert model.clip_grad_norm_(0.1).item() == pytest.approx(norm.item(), rel=close)
    for one in (alone, model):
        one.zero_grad()
    if options.get("tp_size", 1) > 1:
        return model
    assert train(model, 3, sharded=True) == pytest.approx(train(alone, 3, sharded=False), rel=1e-4)
    return model


@ranks(2)
@pytest.mark.parametrize(("family", "kind"), [("Qwen3Moe", "dense"), ("GptOss", "4 bits")])
def test_two_ranks(family: str, kind: str) -> None:
    model = check(family, kind, 2)
    units = [unit for unit in model.plan.units if unit.axes]
    assert units and all(unit.axes == (("ep", 2), ("fsdp", 1)) for unit in units)
    assert not any(p.gathers for unit in units for p in unit.parameters)
    assert all(p.spec[0] in ("ep", ("ep", "fsdp")) for unit in units for p in unit.parameters)
    assert ShardingPlan.from_json(model.plan.to_json()) == model.plan
    experts = {unit.name for unit in units}
    assert model.meter.tokens_sent.keys() == experts and not experts & model.meter.gathers.keys()


@ranks(2, 4)
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str, kind: str, world_size: int) -> None:
    check(family, kind, 2)


@ranks(4)
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_an_expert_per_rank(family: str, kind: str) -> None:
    check(family, kind, 4)


@ranks(4)
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strategy", ["SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"])
def test_strategies(strategy: str, kind: str) -> None:
    options = {"dp_replicate_size": 2} if "HYBRID" in strategy else {}
    check("GptOss", kind, 2, sharding_strategy=strategy, **options)


@ranks(2)
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_checkpointed_and_offloaded(kind: str) -> None:
    check("Qwen3Moe", kind, 2, torch.float32, activation_checkpointing=True, offload_params=True)


@ranks(4)
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_experts_that_the_remaining_ranks_cannot_share_evenly(kind: str) -> None:
    """Three experts for two ranks: another dim is split over them, and packed rows are on both."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SHAPES, "Qwen3Moe", {**SHAPES["Qwen3Moe"], "num_experts": 6})
        model = check("Qwen3Moe", kind, 2)
    stacks = [p for unit in model.plan.units if unit.axes for p in unit.parameters]
    assert {p.dim for p in stacks} == {None if kind == "4 bits" else 1}


@ranks(4)
@pytest.mark.slow
@pytest.mark.parametrize("ep", [2, 4])
@pytest.mark.parametrize("kind", ["dense", "lora"])
@pytest.mark.parametrize("family", ["Mixtral", "Qwen3Moe"])
def test_beside_tensor_parallelism(family: str, kind: str, ep: int) -> None:
    check(family, kind, ep, tp_size=2)


@ranks(2)
@pytest.mark.slow
def test_a_script_of_its_own() -> None:
    """A model whose experts run transformers' code, and its optimizer, in the user's loop."""
    alone, model = make("Mixtral").train(), make("Mixtral").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = prepare(model, optimizer, settings=EngineSettings(ep_size=2))
    expected, losses = train(alone, 3, sharded=False), []
    for batch in batches(3):
        loss = model(input_ids=mine(batch), labels=mine(batch)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(loss))
    assert losses == pytest.approx(expected, rel=1e-4) and losses[0] > losses[-1]
    assert any(unit.axes for unit in model.plan.units)


@ranks(4)
@pytest.mark.slow
@pytest.mark.parametrize("ep", [2, 4])
def test_a_rank_reads_its_own_experts(ep: int, tmp_path: Path) -> None:
    if runtime.is_main():
        make("Mixtral").save_pretrained(tmp_path)
    runtime.barrier()
    alone = make("Mixtral")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(alone.config)
    model = shard_model(model, EngineSettings(ep_size=ep))
    report = fill(model, tmp_path, progress=False)
    assert report.bytes == sum(p.to_local().nbytes for p in model.parameters())
    for name, value in model.full_state_dict().items():
        assert torch.equal(value, alone.state_dict()[name]), name
    model.save_pretrained(tmp_path / "exported")
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert all(torch.equal(value, alone.state_dict()[name]) for name, value in exported.state_dict().items())


# --- what is refused --------------------------------------------------------------------------------------------------


@ranks(2)
def test_what_cannot_be_split() -> None:
    def refused(model: Any, text: str, **options: Any) -> None:
        with pytest.raises(ConfigError, match=text):
            shard_model(model, EngineSettings(ep_size=2, **options))

    refused(make("Llama4Text"), "Llama4ForCausalLM does not take its experts from transformers' interface; use 1")
    refused(transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2)), "has no experts; use")
    config = make("Qwen3Moe").config
    config.num_experts = 5
    refused(
        transformers.AutoModelForCausalLM.from_config(config),
        "has 5 experts; expected a size that divides their number: 1, 5",
    )
    with pytest.raises(ConfigError, match=r"ep_size 4 with 2 ranks per replica: .*: 1, 2"):
        shard_model(make("Qwen3Moe"), EngineSettings(ep_size=4))


# --- evaluation, generation, counts -----------------------------------------------------------------------------------


@ranks(2)
@pytest.mark.slow
def test_ranks_that_generate_different_lengths() -> None:
    """Each rank continues a prompt of its own; the longer one is as on one device."""
    alone, model = build("Qwen3Moe", "dense", False, torch.float64), sharded("Qwen3Moe", "dense", 2, torch.float64)
    alone.eval(), model.eval()
    rank = runtime.rank()
    prompt = torch.randint(5, 100, (1, 6), generator=torch.Generator().manual_seed(rank))
    options = {"max_new_tokens": 3 + 5 * rank, "do_sample": False, "pad_token_id": 2}
    assert torch.equal(model.generate(prompt, **options), alone.generate(prompt, **options))
    with torch.no_grad():
        logits = model(input_ids=prompt).logits
        torch.testing.assert_close(logits, alone(input_ids=prompt).logits, rtol=0, atol=1e-10)


@ranks(4)
@pytest.mark.slow
def test_tokens_per_expert_are_those_of_all_ranks() -> None:
    usages = []
    for model in (sharded("DeepseekV3", "dense", 2, torch.float64), sharded("DeepseekV3", "dense", 1, torch.float64)):
        counts = TokensPerExpert(model)
        batch = mine(batches(1)[0])
        model(input_ids=batch, labels=batch)
        usages.append(counts.take())
    assert usages[0] == usages[1] and usages[0]
