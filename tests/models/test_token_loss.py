"""Label smoothing and Dynamic Fine-Tuning: values and gradients equal those of transformers and of the formula, in
chunks and from whole logits."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaForCausalLM
from transformers.trainer_pt_utils import LabelSmoother

from fullshard.errors import ConfigError
from fullshard.models.chunked_loss import LeanHead
from fullshard.models.token_loss import TokenLoss
from tests.train.tiny import make_model


def expected(model: LlamaForCausalLM, ids: torch.Tensor, labels: torch.Tensor, kind: TokenLoss) -> torch.Tensor:
    output = model(input_ids=ids)
    if kind.smoothing:
        return LabelSmoother(epsilon=kind.smoothing)(output, labels, shift_labels=True)
    log_probs = output.logits[:, :-1].log_softmax(-1)
    mask, targets = labels[:, 1:] != -100, labels[:, 1:].clamp(min=0)
    chosen = log_probs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)[mask]
    return -(chosen * chosen.exp().detach()).mean()


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("kind", [TokenLoss(smoothing=0.2), TokenLoss(dft=True)], ids=["smoothing", "dft"])
def test_values_and_gradients(kind: TokenLoss, chunked: bool) -> None:
    torch.manual_seed(0)
    model = make_model().float()
    with torch.no_grad():
        model.lm_head.weight.mul_(20)  # probabilities that differ
    ids = torch.randint(0, model.config.vocab_size, (3, 9))
    labels = ids.clone()
    labels[0, :4], labels[2, 5:] = -100, -100
    wanted = expected(model, ids, labels, kind)
    wanted.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    head = LeanHead(model, chunk_tokens=4, chunked=chunked, kind=kind)
    targets = int((labels[:, 1:] != -100).sum())
    with head.loss_pass(1 / targets, targets) as measured:
        loss = model(input_ids=ids, labels=labels).loss
    loss.backward()
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(measured.sums[0] / targets, wanted.detach(), rtol=1e-5, atol=1e-6)
    for name, p in model.named_parameters():
        if name in gradients:
            torch.testing.assert_close(p.grad, gradients[name], rtol=1e-4, atol=1e-6)


def test_a_model_with_a_loss_of_its_own_is_refused() -> None:
    model = make_model().float()
    model.loss_function = lambda logits, labels, **kwargs: logits.float().mean()
    head = LeanHead(model, kind=TokenLoss(smoothing=0.1))
    ids = torch.randint(0, model.config.vocab_size, (1, 5))
    with pytest.raises(ConfigError, match="computes a loss of its own"), head.loss_pass():
        model(input_ids=ids, labels=ids)
