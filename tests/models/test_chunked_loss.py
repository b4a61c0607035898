"""The chunked head loss against torch's cross-entropy on whole logits; packed rows against documents on their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from fullshard.data.encode import TextSettings
from fullshard.data.loader import Collator, load_table
from fullshard.data.pretokenized import IGNORED
from fullshard.data.sources import row_source
from fullshard.models.chunked_loss import FUSED_BYTES, ChunkedLossHead, _Options, chunked_cross_entropy
from fullshard.models.deferred_logits import DeferredLogits, SoftCap
from fullshard.models.token_loss import TokenLoss
from tests.data.tiny import make_tokenizer, text_rows
from tests.sft.tiny import make_model

SHAPE = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MODELS = {
    "llama": ("LlamaConfig", {}),
    "llama, tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "mistral": ("MistralConfig", {"sliding_window": 8}),
    "qwen2": ("Qwen2Config", {}),
    "gemma2: soft-cap": ("Gemma2Config", {"head_dim": 8, "final_logit_softcapping": 2.0, "sliding_window": 8}),
    "cohere: scale": ("CohereConfig", {"logit_scale": 0.3}),
    "granite: divisor": ("GraniteConfig", {"logits_scaling": 7.0}),
    "gpt2": (
        "GPT2Config",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0},
    ),
    "phi: bias": ("PhiConfig", {"resid_pdrop": 0.0}),
    "gpt-neox": ("GPTNeoXConfig", {}),
}


def build(name: str) -> Any:
    import transformers

    kind, changes = MODELS[name]
    shape = SHAPE | changes
    if kind == "GPT2Config":
        shape = {k: v for k, v in shape.items() if k not in ("hidden_size", "intermediate_size", "num_hidden_layers",
                 "num_attention_heads", "num_key_value_heads")}  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**shape))
    return model.double()


def batch(rows: int = 3, length: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 97, (rows, length), generator=draw)
    labels = ids.clone()
    labels[0, :5] = labels[2, 7:] = IGNORED
    return ids, labels


def plain_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED, reduction="sum")


@pytest.mark.parametrize(
    ("name", "chunk"),
    [*((name, 7) for name in MODELS), *((n, c) for n in ("llama, tied", "gemma2: soft-cap") for c in (1, 1000))],
)
def test_loss_and_gradients_are_those_of_whole_logits(name: str, chunk: int) -> None:
    model = build(name)
    ids, labels = batch()
    logits = model(input_ids=ids, use_cache=False).logits
    expected = plain_loss(logits, labels)
    (expected / 3).backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    head = ChunkedLossHead(model, chunk, entropy=True)
    assert head.head is not None, head.why_not
    with head.loss_pass() as measured:
        output = model(input_ids=ids, labels=labels, use_cache=False)
    (output.loss / 3).backward()
    assert output.logits is None
    torch.testing.assert_close(output.loss, expected, rtol=1e-12, atol=0)
    for n, p in model.named_parameters():
        if n in gradients:
            torch.testing.assert_close(p.grad, gradients[n], rtol=1e-9, atol=1e-12)
    learnt = labels[:, 1:] != IGNORED
    chances = logits[:, :-1].softmax(-1)
    entropy = -(chances * chances.log()).sum(-1)
    assert measured.sums[1] == ((logits[:, :-1].argmax(-1) == labels[:, 1:]) & learnt).sum()
    torch.testing.assert_close(measured.sums[2], (entropy * learnt).sum().detach())


@pytest.mark.parametrize("counted", [False, True])
def test_logits_never_exist_as_a_whole(counted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the host knows the number of trained tokens, the others have no logits at all."""
    largest = []
    linear = F.linear

    def spy(x: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> torch.Tensor:
        out = linear(x, weight, bias)
        if weight.shape[0] == 97:
            largest.append(out.numel() // 97)
        return out

    model = build("llama")
    ids, labels = batch()
    plain_loss(model(input_ids=ids).logits, labels).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    head = ChunkedLossHead(model, 5)
    monkeypatch.setattr(F, "linear", spy)
    if counted:
        labels.trained_tokens = (24, labels._version)  # type: ignore[attr-defined]
    with head.loss_pass():
        model(input_ids=ids, labels=labels).loss.backward()
    assert largest == ([5] * 4 + [4] if counted else [5] * 7 + [1])
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("tokens", "trained", "columns", "dtype", "rows"),
    [
        (16384, 16384, 128256, torch.bfloat16, 1024), (16384, 5461, 128256, torch.bfloat16, 960),
        (2048, 2048, 128256, torch.bfloat16, 256), (16384, 16384, 152064, torch.bfloat16, 832),
        (16384, 16384, 32000, torch.bfloat16, 2048), (16384, 16384, 256000, torch.float32, 256),
        (100, 90, 128256, torch.bfloat16, 128), (100, 0, 50, torch.bfloat16, 64),
    ],
)  # fmt: skip
def test_chunks_for_the_kernel(tokens: int, trained: int, columns: int, dtype: torch.dtype, rows: int) -> None:
    """An eighth of the tokens, at least 256, within 256 MiB, and equal to each other up to multiples of 64."""
    options = _Options((), 0, 1.0, TokenLoss(), False)
    assert options.rows(tokens, trained, columns, dtype, SoftCap()) == rows
    assert rows * columns * dtype.itemsize <= FUSED_BYTES
    assert options._replace(chunk_tokens=7).rows(tokens, trained, columns, dtype, SoftCap()) == 7


def test_a_count_from_before_the_labels_were_changed_is_not_used() -> None:
    head, hidden = torch.nn.Linear(8, 11), torch.randn(2, 3, 8)
    labels = torch.randint(0, 11, (2, 3))
    labels[:, 2] = IGNORED
    labels.trained_tokens = (2, labels._version)  # type: ignore[attr-defined]
    labels[:, 2] = 5
    found = chunked_cross_entropy(DeferredLogits.of(hidden, head), labels)
    torch.testing.assert_close(found.loss, plain_loss(head(hidden), labels).detach())


def test_a_frozen_head_gets_no_gradient() -> None:
    model = build("llama")
    model.lm_head.weight.requires_grad_(False)
    head = ChunkedLossHead(model, 4)
    ids, labels = batch()
    with head.loss_pass():
        model(input_ids=ids, labels=labels).loss.backward()
    assert model.lm_head.weight.grad is None and model.model.embed_tokens.weight.grad is not None


class Operators(TorchDispatchMode):
    """The names of the operators that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(operator))
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["llama", "gemma2: soft-cap", "phi: bias"])
def test_without_gradients_none_are_computed(name: str) -> None:
    model = build(name)
    head, (ids, labels) = ChunkedLossHead(model, 4), batch()

    def operators() -> list[str]:
        with Operators() as seen, torch.no_grad(), head.loss_pass():
            model(input_ids=ids, labels=labels)
        return [name for name in seen.names if "detach" not in name]

    trained = operators()
    model.requires_grad_(False)
    assert operators() == trained


def test_generation_and_plain_logits_are_untouched() -> None:
    model = build("llama").float()
    ids, labels = batch()
    before, loss = model(input_ids=ids).logits, model(input_ids=ids, labels=labels).loss
    ChunkedLossHead(model, 4)
    assert torch.equal(model(input_ids=ids).logits, before)
    assert torch.equal(model(input_ids=ids, labels=labels).loss, loss), "the model's own outside loss_pass"
    assert model.generate(ids[:1], max_new_tokens=3, do_sample=False).shape == (1, ids.shape[1] + 3)


def test_any_other_use_gives_real_logits() -> None:
    head = torch.nn.Linear(8, 11).double()
    hidden = torch.randn(2, 3, 8, dtype=torch.double)
    whole = head(hidden)
    stand_in = DeferredLogits.of(hidden, head)
    assert stand_in.shape == whole.shape and stand_in.dtype == whole.dtype
    torch.testing.assert_close(stand_in.softmax(-1), whole.softmax(-1))
    torch.testing.assert_close((stand_in * 2 + whole), whole * 3)
    torch.testing.assert_close((stand_in / 3)[:, 1:], whole[:, 1:] / 3)
    scaled = torch.tanh(stand_in / 2.0).float()
    assert type(scaled) is DeferredLogits and scaled.dtype == torch.float32
    labels = torch.randint(0, 11, (2, 3))
    expected = plain_loss(torch.tanh(whole / 2.0).float(), labels)
    torch.testing.assert_close(chunked_cross_entropy(scaled, labels, 2).loss.float(), expected.detach())


def test_a_head_that_is_no_plain_linear_layer_is_said_and_exact() -> None:
    class Head(torch.nn.Linear):
        pass

    model = build("llama")
    ids, labels = batch()
    expected = plain_loss(model(input_ids=ids).logits, labels)
    head = Head(32, 97, bias=False).double()
    head.weight = model.lm_head.weight
    model.lm_head = head
    lean = ChunkedLossHead(model)
    assert "the output head is Head" in lean.why_not
    with lean.loss_pass():
        torch.testing.assert_close(model(input_ids=ids, labels=labels).loss, expected, rtol=1e-12, atol=0)


def test_in_bf16_as_exact_as_whole_logits() -> None:
    """Both against fp64. Each chunk's share of the gradient is rounded, and their sum once more: a factor of √2."""
    torch.manual_seed(0)
    head = torch.nn.Linear(16, 50, bias=False)
    hidden, labels = torch.randn(4, 40, 16), torch.randint(0, 50, (4, 40))

    def gradients(dtype: torch.dtype, chunked: bool) -> list[torch.Tensor]:
        layer = torch.nn.Linear(16, 50, bias=False).to(dtype)
        layer.weight.data.copy_(head.weight.data)
        x = hidden.to(dtype).requires_grad_()
        if chunked:
            loss = chunked_cross_entropy(DeferredLogits.of(x, layer), labels, 16, 1 / 156).scaled
        else:
            wide = torch.promote_types(dtype, torch.float32)
            loss = plain_loss(layer(x).to(wide), labels) / 156
        loss.backward()
        return [x.grad.double(), layer.weight.grad.double()]  # type: ignore[union-attr]

    exact = gradients(torch.float64, False)
    for mine, usual, right in zip(
        gradients(torch.bfloat16, True), gradients(torch.bfloat16, False), exact, strict=True
    ):
        assert (mine - right).norm() <= 2**0.5 * (usual - right).norm()


PACKED = [
    *(("sdpa", name) for name in ("llama", "mistral", "qwen2", "gpt2", "gpt-neox", "phi: bias")),
    *(("eager", name) for name in ("llama", "gemma2: soft-cap", "gpt2")),
]


@pytest.mark.parametrize(("attention", "name"), PACKED)
def test_packed_documents_have_the_losses_they_have_alone(name: str, attention: str, tmp_path: Path) -> None:
    model = build(name)
    model.set_attn_implementation(attention)
    rows = [{"input_ids": torch.randint(3, 97, (n,)).tolist()} for n in (9, 3, 14, 2, 6, 6, 11, 1, 20)]
    tokenizer = make_tokenizer()
    packed = load_table(row_source(rows, "x"), tokenizer, TextSettings(24, packing=True), str(tmp_path))
    alone = load_table(row_source(rows, "x"), tokenizer, TextSettings(24), str(tmp_path))
    assert len(packed) < len(alone)

    def losses(table: Any, collator: Collator, groups: list[list[int]]) -> dict[tuple[int, ...], list[float]]:
        """Each document's per-token losses, by its tokens."""
        found = {}
        for group in groups:
            data = collator(table, group)
            labels = data.pop("labels")
            with torch.no_grad():
                logits = model(**data, use_cache=False).logits
            each = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="none")
            each = each.view(labels.shape[0], -1)
            for i, row in enumerate(group):
                at = 0
                for tokens, _ in table.documents(row):
                    n = len(tokens)
                    found[tuple(tokens.tolist())] = each[i, at : at + n - 1].tolist()
                    at += n
        return found

    ours = losses(packed, Collator(0, isolate=True), [list(range(len(packed)))])
    theirs = losses(alone, Collator(0, multiple=1), [[row] for row in range(len(alone))])
    padded = losses(alone, Collator(0), [list(range(len(alone)))])
    assert ours.keys() == theirs.keys() == padded.keys()
    exactness = 1e-7 if attention == "eager" else 1e-10  # transformers' eager attention takes its softmax in fp32
    for key, expected in theirs.items():
        assert ours[key] == pytest.approx(expected, rel=exactness, abs=1e-12), "packed"
        assert padded[key] == pytest.approx(expected, rel=exactness, abs=1e-12), "padded"


def test_text_rows_of_the_tiny_model_pack_alike(tmp_path: Path) -> None:
    """The summed loss of a whole data set, packed or not, with the model and loss that training uses."""
    model = make_model().double()
    head = ChunkedLossHead(model, 16)
    sums = []
    for packing in (False, True):
        table = load_table(
            row_source(text_rows(25), "x"), make_tokenizer(), TextSettings(48, packing=packing), str(tmp_path)
        )
        data = Collator(2, isolate=packing)(table, range(len(table)))
        with torch.no_grad(), head.loss_pass() as measured:
            model(**data, use_cache=False)
        sums.append(measured.sums)
    torch.testing.assert_close(sums[0], sums[1], rtol=1e-10, atol=1e-10)
