"""Label smoothing and Dynamic Fine-Tuning: values and gradients equal those of transformers and of the formula, in
chunks and from whole logits."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaForCausalLM
from transformers.trainer_pt_utils import LabelSmoother

from fullshard.config.errors import ConfigError
from fullshard.device.torch_private import NoTorchFunction
from fullshard.models.chunked_loss import ChunkedLossHead
from fullshard.models.deferred_logits import DeferredLogits, soft_cap
from fullshard.models.token_loss import TokenLoss
from tests.sft.tiny import make_model


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
    head = ChunkedLossHead(model, chunk_tokens=4, chunked=chunked, kind=kind)
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
    head = ChunkedLossHead(model, kind=TokenLoss(smoothing=0.1))
    ids = torch.randint(0, model.config.vocab_size, (1, 5))
    with pytest.raises(ConfigError, match="computes a loss of its own"), head.loss_pass():
        model(input_ids=ids, labels=ids)


KNOWN = {
    "nothing": lambda x: x, "Gemma 2": lambda x: torch.tanh(x / 30.0) * 30.0, "Cohere": lambda x: x * 0.3,
    "Granite": lambda x: x / 7, "from the left": lambda x: 2 * x, "in place": lambda x: x.mul_(0.5).tanh_().mul_(3),
    "casts": lambda x: (x.float() / 2).to(torch.float32).contiguous(),
}  # fmt: skip
UNKNOWN = {
    "two hyperbolic tangents": lambda x: torch.tanh(torch.tanh(x)), "narrower": lambda x: x.float().bfloat16(),
    "double": lambda x: x.double(), "a tensor": lambda x: x * torch.tensor(2.0), "inverse": lambda x: torch.div(3.0, x),
    "rounded": lambda x: torch.div(x, 2.0, rounding_mode="floor"), "by zero": lambda x: x / 0.0,
}  # fmt: skip


@pytest.mark.parametrize("name", [*KNOWN, *UNKNOWN])
def test_element_wise_steps_as_one_formula(name: str) -> None:
    """The formula that the kernel computes, for the steps it can do."""
    steps = (KNOWN | UNKNOWN)[name]
    head, hidden = torch.nn.Linear(8, 11).bfloat16(), torch.randn(2, 3, 8).bfloat16()
    deferred = steps(DeferredLogits.of(hidden, head))
    assert type(deferred) is DeferredLogits
    with NoTorchFunction():
        recorded = deferred.steps
    cap = soft_cap(recorded, torch.bfloat16, hidden.device)
    if name in UNKNOWN:
        assert cap is None
        return
    assert cap is not None
    raw = head(hidden).double()
    found = cap.after * torch.tanh(cap.before * raw) if cap.tanh else cap.before * raw
    torch.testing.assert_close(found, steps(raw.clone()).double())
