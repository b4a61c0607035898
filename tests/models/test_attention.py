"""Our own attention against transformers': the same logits and gradients with packed rows, windows, soft-caps, sinks,
padding and a cache; and its masks against those of torch's `create_block_mask`."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import AutoModelForCausalLM, masking_utils
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from fullshard.data.loader import Collator
from fullshard.models import attention, attention_masks
from fullshard.models.attention import is_own, use_own_attention
from fullshard.models.packed_inputs import Packed, PackingMethod
from fullshard.models.packing_check import try_packing
from tests.sft.tiny import make_model

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
MIXED = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {}, "mistral": {"sliding_window": 8}, "gemma3_text": MIXED,
    "gemma2": MIXED | {"attn_logit_softcapping": 2.0},
    "gpt_oss": MIXED | {"num_local_experts": 2, "num_experts_per_tok": 1},
}  # fmt: skip
"""Families and what their attention needs beside documents: nothing, windows everywhere or in some layers, soft-caps,
sinks."""
GUARDED = ("llama",)


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def family(name: str) -> Any:
    how = "eager" if name in ("gemma2", "gpt_oss") else "sdpa"  # which SDPA cannot compute
    config = CONFIG_MAPPING[name](**SMALL, **FAMILIES[name])
    model = AutoModelForCausalLM.from_config(config, attn_implementation=how)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def positions(rows: int, length: int, longest: int) -> torch.Tensor:
    """Documents of random lengths, one after another in each row."""
    found = torch.empty(rows, length, dtype=torch.long)
    for row in found:
        at = 0
        while at < length:
            size = min(int(torch.randint(1, longest, ())), length - at)
            row[at : at + size] = torch.arange(size)
            at += size
    return found


# --- masks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [40, 256, 300])
@pytest.mark.parametrize("kind", ["documents", "windows", "chunks", "window of whole rows"])
def test_a_mask_has_the_blocks_that_torch_finds(kind: str, length: int) -> None:
    starts = attention_masks.document_starts(positions(3, length, 200))
    if kind == "windows":
        starts = attention_masks.window_starts(starts, 37)
    elif kind == "chunks":
        starts = attention_masks.chunk_starts(starts, 50)
    elif kind == "window of whole rows":
        starts = attention_masks.window_starts(torch.zeros_like(starts), 150)
    found = attention_masks.block_mask(starts)
    expected = create_block_mask(attention_masks.interval(starts), 3, None, length, length, device="cpu")
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    assert torch.equal(found.to_dense(), expected.to_dense())
    assert torch.equal(attention_masks.dense_of(found), attention_masks.dense_mask(starts))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("softcap", "has_sinks"), [(None, False), (2.0, True)])
def test_flex_attention_computes_what_a_dense_mask_does(softcap: float | None, has_sinks: bool) -> None:
    query, key, value = torch.randn(2, 4, 40, 16), torch.randn(2, 2, 40, 16), torch.randn(2, 2, 40, 16)
    sinks = torch.randn(4) if has_sinks else None
    starts = attention_masks.document_starts(positions(2, 40, 20))
    mask, dense = attention_masks.block_mask(starts), attention_masks.dense_mask(starts)
    with torch.no_grad():
        found = attention.masked_attention(query, key, value, mask, 0.3, softcap, sinks)
    if softcap is None:
        wide = [t.repeat_interleave(2, 1) for t in (key, value)]
        torch.testing.assert_close(found, F.scaled_dot_product_attention(query, *wide, attn_mask=dense, scale=0.3))
    plain = attention.softmax_attention(query, key, value, dense, 0.0, 0.3, softcap, sinks)
    torch.testing.assert_close(found, plain)


# --- models ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n if n in GUARDED else pytest.param(n, marks=pytest.mark.slow) for n in FAMILIES])
def test_packed_rows_have_the_logits_and_gradients_of_transformers(name: str) -> None:
    model = family(name)
    own = copy.deepcopy(model)
    assert use_own_attention(own) and not is_own(model.config)
    ids = torch.randint(3, 64, (2, 40))
    batch = {"input_ids": ids, "position_ids": positions(2, 40, 20)}
    method = try_packing(own, CPU, False).way
    assert method == PackingMethod(masks=True), "masks are made once per batch"
    packed, results = Packed(own, method), []
    theirs = Packed(model, try_packing(model, CPU, False).way or PackingMethod())
    for one, rows in ((model, theirs), (own, packed)):
        with rows.rows(batch):
            logits = one(**batch, use_cache=False).logits
        F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        results.append([logits.detach(), *(p.grad for p in one.parameters() if p.grad is not None)])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", *(pytest.param(n, marks=pytest.mark.slow) for n in ("mistral", "gemma2"))])
def test_rows_of_one_document_and_their_padding(name: str) -> None:
    """Padding at the end needs no mask, padding at the start falls back; real tokens have the same logits."""
    model = family(name)
    own = copy.deepcopy(model)
    use_own_attention(own)
    ids = torch.randint(3, 64, (2, 24))
    at_end, at_start = torch.ones_like(ids), torch.ones_like(ids)
    at_end[1, 10:] = at_start[1, :14] = 0
    for mask in (None, torch.ones_like(ids), at_end, at_start):
        with torch.no_grad():
            expected, found = (one(ids, attention_mask=mask, use_cache=False).logits for one in (model, own))
        real = mask.bool() if mask is not None else torch.ones_like(ids).bool()
        torch.testing.assert_close(found[real], expected[real], rtol=1e-4, atol=1e-5)


def test_masks_are_made_once_per_batch_and_only_where_they_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    plain = attention_masks.block_mask

    def recorded(starts: torch.Tensor) -> Any:
        made.append(plain(starts))
        return made[-1]

    for place in ("attention_masks", "packed_inputs"):
        monkeypatch.setattr(f"fullshard.models.{place}.block_mask", recorded)
    monkeypatch.setattr(masking_utils, "sdpa_mask", lambda **given: pytest.fail("a dense mask"))
    own = family("gemma3_text")
    use_own_attention(own)
    packed, ids = Packed(own, PackingMethod(masks=True)), torch.randint(3, 64, (2, 40))
    with torch.no_grad(), packed.rows(batch := {"input_ids": ids, "position_ids": positions(2, 40, 20)}):
        own(**batch, use_cache=False)
    assert len(made) == 2, "one for layers with windows, one for the others"
    asked: list[Any] = []
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda p: asked.append(p))
    with torch.no_grad(), packed.rows({"input_ids": ids}):
        own(ids, use_cache=False)
    assert len(made) == 3 and not asked, "windows alone need a mask, and the device is not asked about documents"


def test_generation_is_transformers() -> None:
    model = family("llama")
    own = copy.deepcopy(model)
    use_own_attention(own)
    ids, mask = torch.randint(3, 64, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    mask[1, :4] = 0
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected, found = (one.generate(ids, attention_mask=mask, **options) for one in (model, own))
    assert torch.equal(found, expected)


def test_the_collator_pads_at_the_end() -> None:
    """What lets rows of one document run without a mask."""

    class Rows:
        def documents(self, row: int) -> Any:
            return [(np.full(9 - 6 * row, 7, np.int32), np.ones(9 - 6 * row, np.uint8))]

    batch = Collator(0, mask="attention_mask")(Rows(), [0, 1])
    assert attention_masks.ends_with_padding(batch["attention_mask"].bool())
    assert not attention_masks.ends_with_padding(batch["attention_mask"].flip(1).bool())


def test_the_choice_is_not_saved(tmp_path: Any) -> None:
    model = make_model()
    assert use_own_attention(model)
    model.save_pretrained(tmp_path)
    assert "fullshard" not in (tmp_path / "config.json").read_text()


# --- GPU ------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
def test_gpu_kernels_have_the_outputs_and_gradients_of_plain_attention(packed: bool) -> None:
    made = [torch.randn(2, heads, 300, 64, device="cuda") for heads in (8, 2, 2)]
    starts = attention_masks.document_starts(positions(2, 300, 200).to("cuda")) if packed else None
    mask: BlockMask | None = attention_masks.block_mask(starts) if starts is not None else None
    dense = attention_masks.dense_mask(starts) if starts is not None else None
    out_grad, results, module = torch.randn(2, 300, 8, 64, device="cuda"), [], torch.nn.Module()
    module.num_key_value_groups = 4
    for dtype, given in ((torch.float32, dense), (torch.bfloat16, mask)):
        inputs = [t.to(dtype, copy=True).requires_grad_() for t in made]
        found, _ = attention.attention(module, *inputs, given, is_causal=True)
        found.backward(out_grad.to(dtype))
        results.append([found.detach(), *(t.grad for t in inputs)])
    for expected, found in zip(*results, strict=True):
        assert float((found - expected).abs().max()) <= 0.02 * float(expected.abs().max())
