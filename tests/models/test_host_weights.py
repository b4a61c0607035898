"""Weights in host memory compute what they compute on the device; the oracle is the same run without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import fullshard.runtime as xr
import fullshard.spmd as xs
from fullshard.config.errors import FSDPError
from fullshard.fsdp import FSDPv2, transformer_auto_wrap_policy
from fullshard.fsdp.host_embedding import HostTable, lookup
from fullshard.models.host_weights import offload_embedding, offload_experts
from tests.pool import ranks
from tests.sft.runs import global_batch, losses, settings, train
from tests.sft.tiny import make_model

LORA = LoraConfig(r=4, lora_alpha=16, target_modules="all-linear", lora_dropout=0.0, task_type="CAUSAL_LM")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_table_on_the_host_is_the_table(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rows, ids = torch.randn(50, 12), torch.randint(0, 50, (3, 7))
    table, plain = HostTable(rows, dtype, torch.device("cpu")), rows.to(dtype)
    assert table.dtype == dtype and table.shape == plain.shape
    assert torch.equal(nn.functional.embedding(ids, table, padding_idx=3), nn.functional.embedding(ids, plain))
    assert torch.equal(nn.functional.embedding(ids, table.detach()), plain[ids])
    assert torch.equal(table.sum(0), plain.sum(0)) and torch.equal(plain[:4] @ table.T, plain[:4] @ plain.T)


def sharded(model: Any, **options: Any) -> Any:
    n = xr.world_size()
    mesh = xs.Mesh(np.arange(n), (n,), ("fsdp",))
    return FSDPv2(model, mesh, auto_wrap_policy=transformer_auto_wrap_policy, **options)


@pytest.mark.slow
@ranks(2)
def test_a_run_has_the_same_losses_and_gathers_no_embedding(tmp_path: Path) -> None:
    options = {"max_steps": 4, "gradient_checkpointing": True, **global_batch(2)}
    if xr.is_main():
        make_model().save_pretrained(tmp_path / "model")
    xr.barrier()
    runs = {
        on: train(
            str(tmp_path / "model"), settings(tmp_path / str(on), offload_embedding=on, **options), peft_config=LORA
        )
        for on in (False, True)
    }
    assert losses(runs[True]) == losses(runs[False])
    table, plan = make_model().get_input_embeddings().weight, runs[True].model.plan
    assert plan.host_bytes == table.numel() * 4
    assert [p.name.rsplit(".", 2)[1:] for p in plan.parameters.values() if p.on_host] == [["embed_tokens", "weight"]]
    whole = runs[False].model.plan.units[0].gathered_bytes
    assert plan.units[0].gathered_bytes == whole - table.numel() * 4
    saved = [run.model.full_state_dict() for run in runs.values()]
    assert saved[0].keys() == saved[1].keys()
    assert all(torch.equal(saved[0][name], saved[1][name]) for name in saved[0])


@ranks(1)
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_an_embedding_that_scales_its_rows(precision: str | None) -> None:
    """Gemma's embedding is a class of its own, with a forward of its own."""
    config = Gemma3TextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, tie_word_embeddings=False,
    )  # fmt: skip
    ids, found = torch.randint(0, 64, (2, 9)), []
    for on in (False, True):
        torch.manual_seed(0)
        model = get_peft_model(Gemma3ForCausalLM(config), LORA)
        assert not on or offload_embedding(model) == ""
        model = sharded(model, mixed_precision=precision)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        found.append([loss, *(p.grad.full_tensor() for p in model.parameters() if p.grad is not None)])
    assert len(found[0]) > 1 and all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@ranks(1)
def test_values_are_loaded_and_training_it_is_refused() -> None:
    model = get_peft_model(make_model(), LORA)
    assert offload_embedding(model) == ""
    model = sharded(model, mixed_precision="bf16")
    root = model._fullshard_engine.units[0]
    assert root.only_casts and not any(p.plan.offloaded for p in root.parameters)  # so that the host need not wait
    ids, table = torch.arange(12).view(2, 6), model.get_input_embeddings()
    before = table.weight.full_tensor().clone()
    values = {name: value + 1 if "embed_tokens" in name else value for name, value in model.full_state_dict().items()}
    model.load_state_dict(values)
    seen = []
    table.register_forward_hook(lambda module, args, output: seen.append(output))
    model(input_ids=ids)
    assert torch.equal(seen[0], (before[ids] + 1).bfloat16())
    table.weight.requires_grad_()
    with pytest.raises(FSDPError, match=r"kept in host memory .* cannot be trained"):
        model(input_ids=ids)


def test_an_embedding_that_must_stay_on_the_device() -> None:
    tied = get_peft_model(make_model(tie_word_embeddings=True), LORA)
    assert "tied" in offload_embedding(tied)
    assert "trained" in offload_embedding(make_model())
    limited = get_peft_model(make_model(), LORA)
    limited.get_input_embeddings().max_norm = 1.0
    assert "max_norm" in offload_embedding(limited)


# --- experts ----------------------------------------------------------------------------------------------------------

SHAPE = {
    "vocab_size": 131, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "num_experts_per_tok": 2, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
MIXTURES = {
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=4)),
    "qwen3": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SHAPE, num_experts=4, moe_intermediate_size=48, head_dim=16, norm_topk_prob=True)
    ),
    "gpt-oss": lambda: GptOssForCausalLM(GptOssConfig(**SHAPE, num_local_experts=4, head_dim=16)),
}


def mixture(family: str) -> Any:
    torch.manual_seed(3)
    return MIXTURES[family]()


@ranks(1, 2)
@pytest.mark.parametrize("family", MIXTURES)
def test_only_frozen_experts_are_offloaded(family: str) -> None:
    """Adapters, routers and attention stay on the device; the gradients are those of experts on the device."""
    config = LoraConfig(
        r=2, target_modules=["q_proj"], target_parameters=["experts.gate_up_proj"], lora_dropout=0.0,
        init_lora_weights=False,
    )  # fmt: skip
    ids, results = torch.randint(0, 131, (2, 9), generator=torch.Generator().manual_seed(1)), []
    for on in (False, True):
        torch.manual_seed(5)
        model = get_peft_model(mixture(family), config)
        assert not on or offload_experts(model) == ""
        model = sharded(model)
        moved = {name for name, p in model.plan.parameters.items() if p.offloaded}
        experts = {name for name, p in model.plan.parameters.items() if "experts" in name and not p.trainable}
        assert experts and moved == (experts if on else set())
        assert model.plan.host_bytes == sum(model.plan.parameters[name].shard_bytes for name in moved)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        results.append([loss, *(p.grad.full_tensor() for p in model.parameters() if p.grad is not None)])
    assert len(results[0]) > 3 and all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.slow
@ranks(2)
@pytest.mark.parametrize("four_bits", [False, True])
def test_a_run_with_experts_on_the_host(tmp_path: Path, four_bits: bool) -> None:
    options = {
        "max_steps": 3, "use_peft_lora": True, "lora_target_modules": "q_proj,v_proj", "lora_dropout": 0.0,
        "use_4bit_quantization": four_bits, **global_batch(2),
    }  # fmt: skip
    if xr.is_main():
        model = mixture("mixtral")
        model.resize_token_embeddings(make_model().config.vocab_size)
        model.save_pretrained(tmp_path / "model")
    xr.barrier()
    runs = {
        on: train(str(tmp_path / "model"), settings(tmp_path / str(on), offload_experts=on, **options))
        for on in (False, True)
    }
    assert losses(runs[True]) == losses(runs[False])
    moved = [p for p in runs[True].model.plan.parameters.values() if p.offloaded]
    assert moved and all(p.dtype == ("uint8" if four_bits else "float32") for p in moved)
    assert runs[False].model.plan.host_bytes == 0
    saved = [run.model.full_state_dict() for run in runs.values()]
    assert all(torch.equal(saved[0][name], saved[1][name]) for name in saved[0])


def test_experts_that_must_stay_on_the_device() -> None:
    assert "no experts" in offload_experts(get_peft_model(make_model(), LORA))
    assert "trained" in offload_experts(mixture("mixtral"))


@pytest.mark.gpu
@pytest.mark.parametrize("family", MIXTURES)
def test_experts_come_from_page_locked_memory(family: str) -> None:
    """One device: the same bits, with nothing of the experts left on the device between steps."""
    config = LoraConfig(r=8, target_modules=["q_proj"], lora_dropout=0.0, init_lora_weights=False)
    ids, results = torch.randint(0, 131, (2, 9), generator=torch.Generator().manual_seed(1)).cuda(), []
    for on in (False, True):
        torch.manual_seed(5)
        model = get_peft_model(mixture(family), config)
        assert not on or offload_experts(model) == ""
        model = sharded(model.bfloat16())
        for _ in range(3):
            model.zero_grad()
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
        local = [p.local for unit in model._fullshard_engine.units for p in unit.parameters if p.plan.offloaded]
        assert bool(local) == on and all(t.is_pinned() for t in local)
        results.append([loss, *(p.grad.full_tensor() for p in model.parameters() if p.grad is not None)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_the_kernel_reads_rows_in_host_memory(stored: torch.dtype) -> None:
    from fullshard.device import accelerator

    torch.manual_seed(0)
    rows = accelerator.host_memory((5000, 300), stored)
    assert rows.is_pinned()
    rows.copy_(torch.randn(5000, 300))
    ids = torch.randint(0, 5000, (4, 130))
    found = lookup(rows, ids.cuda(), torch.bfloat16)
    assert torch.equal(found.cpu(), rows[ids].to(torch.bfloat16))
    outside = lookup(rows, torch.tensor([3, 5000, -1]).cuda(), torch.bfloat16).cpu()
    assert torch.equal(outside[0], rows[3].to(torch.bfloat16)) and outside[1:].isnan().all()
