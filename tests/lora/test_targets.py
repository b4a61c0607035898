"""Any `PeftModel` goes into `FSDPv2` as it is and trains as on one device."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model

from fullshard.fsdp import FSDPv2, transformer_auto_wrap_policy
from tests.fsdp.programs import batches, build, exact, loss_of, mean_over_ranks, mesh_for, mine
from tests.pool import ranks

DOUBLE = torch.float64
KINDS = {
    "rslora": {"target_modules": "all-linear", "use_rslora": True},
    "modules_to_save": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]},
    "embedding": {"target_modules": ["embed_tokens", "up_proj"]},
}


def adapted(**options):
    torch.manual_seed(4)
    model = get_peft_model(build("llama", DOUBLE), LoraConfig(r=3, lora_alpha=6, **options)).to(DOUBLE)
    for name, p in model.named_parameters():
        if "lora_B" in name or "lora_embedding_A" in name:
            p.data.normal_(std=0.1)  # zero at first, which would hide mistakes
    return model


def train(model, data, part):
    """Losses over a few steps, and the optimizer."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    losses = []
    with exact(DOUBLE):
        for batch in data:
            loss = loss_of(model, part(batch))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    return losses, optimizer


@ranks(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", pytest.param("HYBRID_SHARD", marks=pytest.mark.slow)])
def test_trains_as_on_one_device(kind, strategy):
    plain = adapted(**KINDS[kind])
    model = FSDPv2(
        copy.deepcopy(plain), mesh_for(strategy), auto_wrap_policy=transformer_auto_wrap_policy, strategy=strategy
    )
    frozen = {n: p.full_tensor() for n, p in model.named_parameters() if not p.requires_grad}
    expected, _ = train(plain, batches(3, DOUBLE), lambda batch: batch)
    got, optimizer = train(model, batches(3, DOUBLE), mine)
    assert [mean_over_ranks(x) for x in got] == pytest.approx([x.item() for x in expected], abs=1e-9)
    values = model.full_state_dict()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(values[name], value, rtol=0, atol=1e-9, msg=name)
    assert frozen and all(torch.equal(values[n], v) for n, v in frozen.items())
    assert len(optimizer.state) == sum(p.requires_grad for p in model.parameters())


@ranks(2)
def test_several_adapters_take_turns():
    plain = adapted(target_modules=["q_proj", "v_proj"])
    torch.manual_seed(8)
    plain.add_adapter("other", LoraConfig(r=2, target_modules=["v_proj", "down_proj"], init_lora_weights=False))
    plain.to(DOUBLE)
    plain.set_adapter("default")
    model = FSDPv2(copy.deepcopy(plain), mesh_for("FULL_SHARD"), auto_wrap_policy=transformer_auto_wrap_policy)
    first, second = batches(2, DOUBLE)
    for name, batch in (("default", first), ("other", second), ("default", second)):
        plain.set_adapter(name)
        model.set_adapter(name)
        expected, _ = train(plain, [batch], lambda batch: batch)
        got, _ = train(model, [batch], mine)
        assert mean_over_ranks(got[0]) == pytest.approx(expected[0].item(), abs=1e-9)
    values = model.full_state_dict()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(values[name], value, rtol=0, atol=1e-9, msg=name)
