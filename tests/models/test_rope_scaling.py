"""Documents beyond a model's positions, against transformers with the same scaling written into its configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Gemma3TextConfig, GPT2Config

from fullshard.config.errors import ConfigError
from fullshard.models.rope_scaling import longest_document, scale_rope
from fullshard.sft.trainer import SFTTrainer
from tests.data.tiny import make_tokenizer, text_rows
from tests.pool import ranks
from tests.sft.runs import settings
from tests.sft.tiny import make_folder, make_model

SCALED: dict[str, tuple[dict[str, Any], int]] = {
    # what transformers' documentation writes for 16 → 64 positions, and max_position_embeddings
    "linear": ({"rope_type": "linear", "factor": 4.0}, 64),
    "dynamic": ({"rope_type": "dynamic", "factor": 4.0}, 16),
    "yarn": ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}, 64),
}


@ranks(1)
@pytest.mark.parametrize("kind", [pytest.param("linear", marks=pytest.mark.slow), "dynamic", "yarn"])
def test_long_documents_have_the_logits_of_transformers(kind: str, tmp_path: Path) -> None:
    make_folder(tmp_path, rows=8, max_position_embeddings=16)
    config = settings(
        tmp_path, max_steps=1, rope_scaling=kind, max_seq_len=64, learning_rate=0.0, packing=kind == "yarn",
        per_device_train_batch_size=8,
    )  # fmt: skip
    rows = [{"text": " ".join(row["text"] for row in text_rows(8, seed=s))} for s in range(8)]
    trainer = SFTTrainer(str(tmp_path / "model"), config, train_dataset=rows, tokenizer=make_tokenizer())
    assert trainer.parts.train is not None and int(trainer.parts.train.row_sizes[:].max()) == 64
    trainer.train()
    trainer.save_model()
    rope, positions = SCALED[kind]
    shape = make_model(max_position_embeddings=16).config
    shape.rope_parameters = {**shape.rope_parameters, **rope}
    shape.max_position_embeddings = positions
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model", config=shape).eval()
    ids = torch.randint(3, 400, (1, 64), generator=torch.Generator().manual_seed(0))
    expected = theirs(input_ids=ids).logits
    assert (expected - make_model().eval()(input_ids=ids).logits).abs().max() > 3e-4, "scaling does nothing"
    saved = AutoModelForCausalLM.from_pretrained(config.output_dir).eval()
    for model in (trainer.model.eval(), saved):
        torch.testing.assert_close(model(input_ids=ids).logits, expected, rtol=1e-5, atol=1e-5)


def test_only_layers_that_look_far_are_scaled() -> None:
    shape, said = Gemma3TextConfig(max_position_embeddings=1024), []
    local = dict(shape.rope_parameters["sliding_attention"])
    scale_rope(shape, "yarn", 4096, said.append)
    assert shape.rope_parameters["sliding_attention"] == local and "factor 4" in said[0]
    assert shape.rope_parameters["full_attention"]["rope_type"] == "yarn" and longest_document(shape) == 4096


def test_what_cannot_be_scaled_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a gpt2 model has no rotary positions"):
        scale_rope(GPT2Config(), "linear", 4096, print)
    shape = make_model().config
    shape.rope_parameters = {**shape.rope_parameters, "rope_type": "llama3"}
    with pytest.raises(ConfigError, match=r"already has scaled positions \(llama3\)"):
        scale_rope(shape, "linear", 4096, print)
    with pytest.raises(ConfigError, match="rope_scaling dynamic depends on the longest document"):
        settings(tmp_path, rope_scaling="dynamic", packing=True)
    with pytest.raises(ConfigError, match="the model is in memory already"):
        SFTTrainer(make_model(), settings(tmp_path, rope_scaling="yarn"), train_dataset=text_rows(3))


def test_nothing_is_scaled_without_need(tmp_path: Path) -> None:
    make_folder(tmp_path, rows=2)
    shape, said = AutoConfig.from_pretrained(tmp_path / "model"), []
    before = shape.to_dict()
    scale_rope(shape, "yarn", 128, said.append)
    assert shape.to_dict() == before and "not needed" in said[0]
