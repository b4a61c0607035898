"""The trial's verdict on a model against an independent oracle: the losses that documents have alone.

A family is packed if and only if its packed documents, through the run's own collator and loss, have these losses.
The same sweep holds the chunked loss to each model's own loss and gradients.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from fullshard.config.errors import ConfigError
from fullshard.data.loader import Collator
from fullshard.data.pretokenized import IGNORED
from fullshard.distributed import runtime
from fullshard.models import packing_check
from fullshard.models.chunked_loss import ChunkedLossHead
from fullshard.models.packed_inputs import Packed, PackingMethod
from fullshard.models.packing_check import LEAKS, Trial, try_packing
from fullshard.models.tiny_model import small_models
from fullshard.sft.trainer import SFTTrainer
from tests.data.tiny import make_tokenizer, text_rows
from tests.pool import ranks
from tests.sft.runs import settings
from tests.sft.tiny import VOCABULARY, make_model
from tools.packing import FAMILIES, family_model, listed, row_of

CPU = torch.device("cpu")
GUARDED = ("llama", "gpt_oss", "opt", "falcon", "qwen3_next", "bloom")
SWEPT = [pytest.param(name, marks=() if name in GUARDED else pytest.mark.slow) for name in FAMILIES]


class Rows:
    """Documents of several lengths, some longer than any window, in one row each or together."""

    def __init__(self, seed: int = 5) -> None:
        draw = np.random.Generator(np.random.PCG64(seed))
        self.every = [draw.integers(8, 128, n) for n in (9, 12, 3, 14, 6, 17)]
        self.packed = [[0, 1, 2], [3, 4], [5]]

    def documents(self, row: Any) -> Any:
        chosen = self.packed[row] if isinstance(row, int) else [row[0]]
        return [(self.every[i].astype(np.int32), np.ones(len(self.every[i]), np.uint8)) for i in chosen]


def runnable(model: Any) -> Any:
    """The small model that the trial takes."""
    for small in small_models(model, CPU):
        try:
            Trial(small, CPU, False).logits_alone()
        except Exception:
            continue
        return small
    raise AssertionError("the trial had a model, this has none")


def summed(model: Any, way: PackingMethod, collator: Collator, rows: list[Any]) -> float:
    head, packed, batch = ChunkedLossHead(model, 16), Packed(model, way), collator(Rows(), rows)
    with torch.no_grad(), packed.rows(batch), head.loss_pass() as measured:
        model(**batch, use_cache=False)
    return float(measured.sums[0])


@pytest.mark.parametrize("family", SWEPT)
def test_a_family_is_packed_if_its_documents_have_the_losses_they_have_alone(family: str) -> None:
    table = listed()
    try:
        model = family_model(family)
    except Exception:
        assert not table or table[family] == "no default"
        return
    verdict = try_packing(model, CPU, False)
    assert not table or row_of(verdict) == table[family], "docs/packing.md says otherwise: run tools/packing.py"
    if not verdict.tried or family == "git":  # whose loss is over what follows an image, and fails without one
        return
    small = runnable(model)
    way = verdict.way or PackingMethod()
    alone = [summed(copy.deepcopy(small), PackingMethod(), Collator(0), [(i,)]) for i in range(6)]
    together = summed(copy.deepcopy(small), way, Collator(0, isolate=True), [0, 1, 2])
    same = together == pytest.approx(sum(alone), rel=2e-5)
    assert same == (verdict.way is not None), (together, sum(alone))
    if family != "reformer":  # which has gradients for rows of 4,096 tokens only
        check_own_loss(small)


def check_own_loss(model: Any) -> None:
    batch = Collator(0)(Rows(), [(i,) for i in range(3)])
    own = model(**batch, use_cache=False).loss
    own.backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    head = ChunkedLossHead(model, 7)
    with head.loss_pass(scale=1 / int((batch["labels"][:, 1:] != IGNORED).sum())):
        loss = model(**batch, use_cache=False).loss
    loss.backward()
    torch.testing.assert_close(loss, own, rtol=1e-5, atol=1e-6)
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys()
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        size = float(gradient.abs().max()) + 1e-3 * largest  # some are zero but for rounding, such as biases of keys
        assert float((found[name] - gradient).abs().max()) <= 2e-4 * size, name


def test_random_numbers_are_not_touched() -> None:
    model = make_model()
    torch.manual_seed(3)
    before = torch.get_rng_state()
    assert try_packing(model, CPU, False).way == PackingMethod()
    assert torch.equal(torch.get_rng_state(), before) and torch.get_default_dtype() == torch.float32


class Own(LlamaForCausalLM):
    """Code of the user's own, which no configuration can build again."""

    def __init__(self, config: Any, needed: Any) -> None:
        super().__init__(config)


class Forgetful(GPT2LMHeadModel):
    """Takes positions and a mask, and passes neither on."""

    def forward(self, position_ids: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:
        return super().forward(**kwargs)


@ranks(1)
def test_what_cannot_be_packed_is_refused_before_any_token_is_made(tmp_path: Path) -> None:
    def start(model: Any, **changes: Any) -> SFTTrainer:
        config = settings(tmp_path, packing=True, **changes)
        return SFTTrainer(model, config, train_dataset=text_rows(8), tokenizer=make_tokenizer())

    shape = make_model().config
    with pytest.raises(ConfigError, match=f"packing: {LEAKS} in Forgetful"):
        start(Forgetful(GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4)), trust_packing=True)
    with pytest.raises(ConfigError, match=r"whether Own keeps documents .* cannot be tried .*needed.*trust_packing"):
        start(Own(shape, 1))
    assert not (tmp_path / "cache").exists()
    assert start(Own(shape, 1), trust_packing=True).parts.packing == PackingMethod()


SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 2, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
LINEAR = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip


def hybrid(name: str) -> Any:
    torch.manual_seed(0)
    if name == "gpt_oss":
        return GptOssForCausalLM(GptOssConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2, sliding_window=6))
    return Qwen3NextForCausalLM(Qwen3NextConfig(**SHAPE, **EXPERTS, **LINEAR, num_experts=4))


@ranks(1)
@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_next"])
def test_runs_have_the_losses_of_unpacked_ones(name: str, tmp_path: Path) -> None:
    check_run(name, tmp_path)


@ranks(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_next"])
def test_so_have_runs_on_ranks_that_compute_activations_again(name: str, tmp_path: Path) -> None:
    check_run(name, tmp_path, gradient_checkpointing=True)


def check_run(name: str, place: Path, **changes: Any) -> None:
    """One step over all of the data: the same loss, and then the same loss again from the updated weights."""
    found = {}
    for packing in (False, True):
        config = settings(
            place / str(packing), packing=packing, max_steps=1, per_device_train_batch_size=24, learning_rate=1e-2,
            **changes,
        )  # fmt: skip
        if runtime.is_main():
            (place / str(packing)).mkdir()
        runtime.barrier()
        rows = text_rows(24)
        trainer = SFTTrainer(hybrid(name), config, train_dataset=rows, eval_dataset=rows, tokenizer=make_tokenizer())
        found[packing] = [trainer.evaluate()["eval_loss"]]
        trainer.train()
        found[packing].append(trainer.evaluate()["eval_loss"])
    assert found[True] == pytest.approx(found[False], abs=2e-5) and found[True][1] < found[True][0] - 1e-3


def test_the_trial_is_short_whatever_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many wide layers one is built, narrow and with few tokens."""
    made = []
    small = packing_check.small_models
    monkeypatch.setattr(packing_check, "small_models", lambda *a: (made.append(m) or m for m in small(*a)))
    with torch.device("meta"):
        model = make_model(hidden_size=8192, num_attention_heads=64, num_key_value_heads=8, num_hidden_layers=20)
    assert try_packing(model, CPU, False).way == PackingMethod()
    assert len(made) == 1 and sum(p.numel() for p in made[0].parameters()) < 2**20
