"""Tokens per expert as a run counts them, against the choices of the routers themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import fullshard.runtime as xr
from fullshard.distributed import runtime
from fullshard.distributed.ranks import exchange
from fullshard.models.experts import experts_modules, use_own_experts
from fullshard.models.routing import ExpertUsage, TokensPerExpert, usage_metrics, warn_of_collapse
from fullshard.report.run_charts import expert_chart
from fullshard.report.run_record import read_run
from tests.pool import ranks
from tests.sft.runs import global_batch, settings, train
from tests.sft.tiny import make_model

EXPERTS, CHOICES = 8, 2


def mixture(vocabulary: int = 64) -> Any:
    torch.manual_seed(3)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, head_dim=16, num_experts=EXPERTS, num_experts_per_tok=CHOICES,
        max_position_embeddings=256, tie_word_embeddings=False, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    ))  # fmt: skip


def chosen(model: Any) -> list[list[torch.Tensor]]:
    """The experts that the routers choose, in the order of the passes, for each layer."""
    seen: list[list[torch.Tensor]] = [[] for _ in experts_modules(model)]
    for i, (_, module) in enumerate(experts_modules(model)):
        module.register_forward_pre_hook(lambda module, args, i=i: seen[i].append(args[1].flatten()))
    return seen


@ranks(1, 2)
def test_counts_are_the_routers_choices_over_all_ranks() -> None:
    model = mixture().train()
    assert use_own_experts(model)
    model.enable_input_require_grads()
    seen, counter = chosen(model), TokensPerExpert(model)
    generator = torch.Generator().manual_seed(xr.rank())
    for _ in range(3):
        model(input_ids=torch.randint(0, 12, (2, 7), generator=generator)).logits.sum().backward()
    everywhere = exchange([torch.cat(layer).tolist() for layer in seen], "choices")
    usage = counter.take()
    assert list(usage) == [name for name, _ in experts_modules(model)]
    for i, one in enumerate(usage.values()):
        choices = torch.tensor([expert for rank in everywhere for expert in rank[i]])
        counts = torch.bincount(choices, minlength=EXPERTS).double()
        assert one.load == pytest.approx(float(counts.max() / counts.mean()))
        assert one.idle == int((counts == 0).sum()) and (one.experts, one.choices) == (EXPERTS, CHOICES)
        assert one.top_share == pytest.approx(float(counts.topk(CHOICES).values.sum() / counts.sum()))
    assert counter.take() == {}, "counts begin again"
    with torch.no_grad():
        model.eval()(input_ids=torch.zeros(1, 4, dtype=torch.long))
    assert counter.take() == {}, "evaluations do not count"


def test_a_collapsed_router_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    even, collapsed = ExpertUsage(1.5, 0, 8, 2, 0.4), ExpertUsage(3.9, 5, 8, 2, 0.97)
    runtime.forget_warnings()
    warn_of_collapse({"a": even})
    warn_of_collapse({"a": collapsed._replace(experts=4)})  # two of four are half of them
    assert not caplog.records
    for _ in range(2):
        warn_of_collapse({"layers.0": even, "layers.1": collapsed})
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1 and "layers.1 sends 97% of its choices to the same 2 of 8 experts (1 of 2 layers" in said[0]
    assert usage_metrics({"a": even, "b": collapsed}) == {
        "expert_load": pytest.approx(2.7), "idle_experts": 5, "expert_load_by_layer": [1.5, 3.9],
        "idle_experts_by_layer": [0, 5],
    }  # fmt: skip


@pytest.mark.slow
@ranks(2)
def test_a_run_logs_them_and_warns_once(tmp_path: Path) -> None:
    if xr.is_main():
        model = mixture(make_model().config.vocab_size)
        with torch.no_grad():
            for name, p in model.named_parameters():
                if name.endswith("mlp.gate.weight"):  # equal logits: topk takes the first experts
                    p.zero_()
        model.save_pretrained(tmp_path / "model")
    xr.barrier()
    runtime.forget_warnings()
    options = {"max_steps": 4, "logging_steps": 2, "learning_rate": 1e-9, "router_aux_loss_coef": 0.0}
    train(str(tmp_path / "model"), settings(tmp_path, **options, **global_batch(2)))
    assert [key for key in runtime.warned() if key == "collapsed routing"] == ["collapsed routing"]
    if xr.is_main():
        lines = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
        logged = [line for line in lines if "expert_load" in line]
        assert [line["step"] for line in logged] == [2, 4]
        assert logged[0]["expert_load_by_layer"][0] == logged[0]["expert_load"] == EXPERTS / CHOICES
        assert logged[0]["idle_experts_by_layer"][0] == EXPERTS - CHOICES
        assert logged[1]["idle_experts"] == sum(logged[1]["idle_experts_by_layer"])
        chart = expert_chart(read_run(tmp_path / "out"))
        assert chart is not None and chart.title.endswith("by layer with experts, at step 4")
        assert chart.columns["y"] == logged[1]["expert_load_by_layer"]
