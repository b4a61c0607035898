"""The loss of a step is the model's own loss, whatever the model adds: routers, other losses, trained scales.

The oracle is what the model's forward returns for labels on one device, in fp64.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from fullshard.config.errors import ConfigError
from fullshard.data.loader import Loader
from fullshard.data.pretokenized import IGNORED
from fullshard.distributed import runtime
from fullshard.models.chunked_loss import ChunkedLossHead
from fullshard.sft.trainer import SFTTrainer
from tests.data.tiny import make_tokenizer, text_rows
from tests.pool import ranks
from tests.sft.runs import losses, settings
from tests.sft.tiny import make_model

SHAPE = {
    "vocab_size": 416, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_local_experts": 4, "pad_token_id": 2, "bos_token_id": 0, "eos_token_id": 1,
    "output_router_logits": True, "router_aux_loss_coef": 0.1,
}  # fmt: skip


class Scaled(LlamaForCausalLM):
    """A trained number multiplies the logits."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.log_scale = torch.nn.Parameter(torch.tensor(0.3))
        self.lm_head.register_forward_hook(lambda module, args, logits: torch.tanh(logits / 3) * self.log_scale.exp())


class Several(LlamaForCausalLM):
    """Predicts the token after the next as well, and keeps the logits small."""

    def forward(self, *args: Any, labels: Any = None, **kwargs: Any) -> Any:
        output = super().forward(*args, labels=labels, **kwargs)
        if labels is not None:
            later = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
            output.loss = output.loss + 0.3 * self.loss_function(output.logits, later, self.config.vocab_size)
            output.loss = 0.5 * output.loss + 1e-3 * output.logits.pow(2).mean()
        return output


class Unshifted(LlamaForCausalLM):
    """Does not ask for the loss function of transformers."""

    def forward(self, *args: Any, labels: Any = None, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        if labels is not None:
            output.loss = F.cross_entropy(output.logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)
        return output


def smoothed(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **kwargs: Any) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.1)


def build(name: str) -> Any:
    torch.manual_seed(0)
    if name == "router":
        return MixtralForCausalLM(MixtralConfig(**SHAPE))  # torch multiplies by experts in fp32 at most
    kind = {"scale": Scaled, "several": Several, "unshifted": Unshifted}.get(name, LlamaForCausalLM)
    model = kind(make_model().config).double()
    if name == "other function":
        model.loss_function = smoothed
    return model


def batch(rows: int = 3) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 416, (rows, 12), generator=draw)
    labels = ids.clone()
    labels[:, 0] = labels[0, :5] = IGNORED
    return {"input_ids": ids, "labels": labels}


def gradients(model: Any) -> dict[str, torch.Tensor]:
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("name", ["router", "scale", "several", "unshifted", "other function"])
def test_loss_and_gradients_are_those_of_the_model(name: str, chunked: bool) -> None:
    model, data = build(name), batch()
    own = model(**data, use_cache=False).loss
    own.backward()
    expected = gradients(model)
    tokens = int((data["labels"][:, 1:] != IGNORED).sum())
    head = ChunkedLossHead(model, 7, chunked)
    with head.loss_pass(scale=2 / tokens) as measured:
        loss = model(**data, use_cache=False).loss
    loss.backward()
    exactness = 1e-6  # transformers' loss is in fp32
    torch.testing.assert_close(loss, 2 * own.to(loss.dtype), rtol=exactness, atol=0)
    assert float(measured.sums[0]) == pytest.approx(float(own.detach()) * tokens, rel=exactness)
    found = gradients(model)
    assert found.keys() == expected.keys() and (name != "scale" or expected["log_scale"].abs() > 1e-3)
    for key, gradient in expected.items():
        torch.testing.assert_close(found[key], 2 * gradient, rtol=1e-5, atol=1e-7, msg=key)


@pytest.mark.parametrize("name", ["router", "unshifted"])
def test_a_batch_that_teaches_nothing_counts_nothing(name: str) -> None:
    model, data = build(name), batch()
    data["labels"].fill_(IGNORED)
    head = ChunkedLossHead(model, 7)
    with head.loss_pass(targets=0) as measured:
        loss = model(**data, use_cache=False).loss
    loss.backward()
    assert float(loss.detach()) == 0 and not measured.sums.any()
    assert all(not gradient.any() for gradient in gradients(model).values())


@ranks(1)
@pytest.mark.parametrize("packing", [True, False])
def test_a_step_is_the_mean_over_tokens_of_the_models_own_losses(packing: bool, tmp_path: Path) -> None:
    """Over micro-batches; with one of them that is what transformers' trainer has."""
    check_steps(tmp_path, packing=packing)


@ranks(2)
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "changes"), [
    ("mixtral", {"packing": True}), ("mixtral", {"gradient_checkpointing": True, "use_reentrant": True}),
    ("qwen3_moe", {"gradient_checkpointing": True}), ("gpt_oss", {"chunked_loss": False}),
])  # fmt: skip
def test_so_it_is_over_ranks(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    check_steps(tmp_path, kind, **changes)


@ranks(1)
def test_a_router_s_loss_is_on_unless_it_is_turned_off(tmp_path: Path) -> None:
    rows = {"train_dataset": text_rows(8), "tokenizer": make_tokenizer()}
    model = experts("mixtral", output_router_logits=False)
    trainer = SFTTrainer(model, settings(tmp_path, router_aux_loss_coef=0.0), **rows)
    assert not model.config.output_router_logits
    trainer = SFTTrainer(model, settings(tmp_path, router_aux_loss_coef=0.5), **rows)
    assert trainer.model.config.output_router_logits and model.router_aux_loss_coef == 0.5
    with pytest.raises(ConfigError, match="LlamaForCausalLM computes no auxiliary loss"):
        SFTTrainer(make_model(), settings(tmp_path, router_aux_loss_coef=0.5), **rows)


def experts(kind: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    shape = {**SHAPE, "num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8, "num_experts_per_tok": 2, **changes}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape))


def check_steps(place: Path, kind: str = "mixtral", **changes: Any) -> None:
    """The oracle is the model's own loss, for which an attention mask tells padding."""
    config = settings(
        place, max_steps=3, optim="sgd", lr_scheduler_type="constant", max_grad_norm=0, learning_rate=0.1,
        per_device_train_batch_size=2, gradient_accumulation_steps=2, **changes,
    )  # fmt: skip
    given = experts(kind, output_router_logits=False)
    trainer = SFTTrainer(
        given, config, train_dataset=text_rows(40), eval_dataset=text_rows(3), tokenizer=make_tokenizer()
    )
    loader = trainer.prepare().loader
    trainer.train()
    oracle = experts(kind)
    optimizer, expected, aux = torch.optim.SGD(oracle.parameters(), lr=0.1), [], []
    for pick in loader.sampler.picks(0, 3, None):
        total, routers = torch.zeros(()), 0.0
        for rank in range(loader.world):
            for data in Loader(loader.sampler, loader.collator, loader.size, rank, loader.world).load(pick).batches:
                tokens = int((data["labels"][:, 1:] != IGNORED).sum())
                mask = data.pop("real_tokens").long()
                output = oracle(**data, **({} if config.packing else {"attention_mask": mask}), use_cache=False)
                router_loss, coefficient = output.aux_loss, oracle.router_aux_loss_coef
                if config.packing:  # a mask would join the documents of a row
                    router_loss = load_balancing_loss_func(output.router_logits, 4, 2, mask)
                own = output.loss + coefficient * (router_loss - output.aux_loss)
                total, routers = total + own * tokens / pick.targets, routers + float(router_loss) * tokens
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(float(total.detach()))
        aux.append(routers / pick.targets)
    assert losses(trainer) == pytest.approx(expected, abs=2e-5)
    assert [r["aux_loss"] for r in trainer.state.log_history if "loss" in r] == pytest.approx(aux, abs=1e-5) or (
        not runtime.is_main()
    )
    evaluated = trainer.evaluate()
    assert evaluated["eval_aux_loss"] > 1
